"""Sorting suffixes and merging sorted ones, against the same in slow plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.trie.suffixes import DEPTH, FEW, SAMPLE, sample_keys, sort_suffixes
from tests.support.tries import VOCAB_SIZES, corpora, flat, keys_slowly, sorted_slowly


@given(corpora(), st.sampled_from([1, 4, 8, DEPTH]), st.sampled_from([1, 3]))
def test_suffixes_are_sorted_by_their_first_tokens_then_by_position(corpus, depth, workers):
    documents, vocab_size = corpus
    tokens = flat(documents, vocab_size)
    found = sort_suffixes(tokens, vocab_size, depth, workers)
    assert found.dtype == np.uint32
    assert found.tolist() == sorted_slowly(tokens.tolist(), vocab_size, depth)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("size", [FEW - 1, FEW, FEW + 1, 300])
def test_shares_are_sorted_alike_by_insertion_and_by_radix(vocab_size, size):
    tokens = flat([(np.random.default_rng(size).integers(0, 2, size) * (vocab_size - 1)).tolist()], vocab_size)
    assert sort_suffixes(tokens, vocab_size).tolist() == sorted_slowly(tokens.tolist(), vocab_size)


@pytest.mark.parametrize("vocab_size", [65534, 70000])
def test_first_token_with_thousands_of_pairs_below_it_is_sorted(vocab_size):
    groups = range(1, 1301)  # each holds more than FEW suffixes that tie in their first key
    tokens = flat([[0, token, 0, 0, 0, end] for token in groups for end in range(FEW + 2, 0, -1)], vocab_size)
    expected = sorted_slowly_by_document(tokens, vocab_size)
    assert np.array_equal(sort_suffixes(tokens, vocab_size, workers=2), expected)


def sorted_slowly_by_document(tokens, separator):
    """As sorted_slowly, for documents of six tokens each."""
    rows = tokens.reshape(-1, 7).astype(np.int64)
    columns = [np.concatenate([rows[:, start:], np.zeros((len(rows), start), np.int64)], axis=1) for start in range(6)]
    keys = np.concatenate(columns)
    positions = np.concatenate([np.arange(len(rows)) * 7 + start for start in range(6)])
    return positions[np.lexsort((positions, *keys.T[::-1]))]


@pytest.mark.parametrize("vocab_size", [1, 2, 3, *VOCAB_SIZES])
def test_sampled_keys_are_the_first_tokens_of_every_256th_suffix_as_one_number(vocab_size):
    random = np.random.default_rng(vocab_size)
    tokens = flat([(random.integers(0, 2, 30) * (vocab_size - 1)).tolist() for _ in range(40)], vocab_size)
    suffixes = sort_suffixes(tokens, vocab_size)
    keys = sample_keys(tokens, vocab_size, suffixes, np.empty(-(-len(suffixes) // SAMPLE), np.uint64))
    assert len(keys) == 5
    assert keys.tolist() == keys_slowly(tokens.tolist(), vocab_size, suffixes[::SAMPLE].tolist())


def test_sampled_key_of_a_text_that_no_separator_closes_ends_with_the_tokens():
    around = np.array([3, 1, 2, 7, 7, 7], np.uint16)
    before = sample_keys(around[:3], 4, np.array([1]), np.empty(1, np.uint64)).tolist()
    around[3:] = 5
    assert sample_keys(around[:3], 4, np.array([1]), np.empty(1, np.uint64)).tolist() == before
