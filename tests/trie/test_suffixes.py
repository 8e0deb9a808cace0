"""Sorting suffixes and merging sorted ones, against the same in slow plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.trie.check import first_unsorted
from lookahead.trie.suffixes import (
    DEPTH,
    FEW,
    SAMPLE,
    add_counts,
    count_before,
    key_digits,
    merge_block,
    pack_texts,
    sample_keys,
    sort_suffixes,
)
from tests.support.tries import VOCAB_SIZES, corpora, flat, keys_slowly, sorted_slowly


@given(corpora(), st.sampled_from([1, 4, 8, DEPTH]), st.sampled_from([1, 3]))
def test_suffixes_are_sorted_by_their_first_tokens_then_by_position(corpus, depth, workers):
    documents, vocab_size = corpus
    tokens = flat(documents, vocab_size)
    found = sort_suffixes(tokens, vocab_size, depth, workers)
    assert found.dtype == np.uint32
    assert found.tolist() == sorted_slowly(tokens.tolist(), vocab_size, depth)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_suffixes_that_agree_in_depth_tokens_stand_by_position(vocab_size):
    tokens = flat([[1] * (DEPTH + 3), [1] * (DEPTH + 1)], vocab_size)
    found = sort_suffixes(tokens, vocab_size).tolist()
    assert found[:6] == [0, 1, 2, 3, DEPTH + 4, DEPTH + 5]  # these have at least DEPTH ones before them
    assert found == sorted_slowly(tokens.tolist(), vocab_size)


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


def test_progress_of_sorting_ends_with_every_suffix():
    seen = []
    sort_suffixes(flat([[0, 1, 2]] * 5, 4), 4, workers=2, progress=lambda *args: seen.append(args))
    assert seen[-1] == ("sorting", 15, 15)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_documents_of_one_token_and_of_the_largest_id_are_sorted():
    for vocab_size in VOCAB_SIZES:
        tokens = flat([[vocab_size - 1], [0], [vocab_size - 1]], vocab_size)
        assert sort_suffixes(tokens, vocab_size).tolist() == [2, 0, 4]


@given(corpora(longest=12))
def test_sorted_suffixes_pass_the_order_check_and_any_two_swapped_fail_it(corpus):
    documents, vocab_size = corpus
    tokens = flat(documents, vocab_size)
    suffixes = sort_suffixes(tokens, vocab_size)
    assert first_unsorted(tokens, vocab_size, suffixes, DEPTH) == -1
    for k in range(len(suffixes) - 1):
        swapped = suffixes.copy()
        swapped[[k, k + 1]] = swapped[[k + 1, k]]
        assert first_unsorted(tokens, vocab_size, swapped, DEPTH) in (k - 1, k)


def test_counts_are_those_of_the_tokens_with_separators():
    counts = np.zeros(5, np.int64)
    add_counts(flat([[2, 0, 2], [2]], 4), counts)
    assert counts.tolist() == [1, 0, 3, 0, 2]


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


@given(corpora(longest=12), st.booleans())
def test_count_before_is_the_number_of_smaller_texts(corpus, equal_too):
    documents, vocab_size = corpus
    tokens = flat(documents, vocab_size)
    positions = sort_suffixes(tokens, vocab_size).astype(np.int64)
    text = tokens.tolist()
    keys = [text[p : text.index(vocab_size, p) + 1][:DEPTH] for p in positions]
    for splitter, key in zip(positions.tolist(), keys, strict=True):
        expected = sum(k < key or (equal_too and k == key) for k in keys)
        assert count_before(tokens, vocab_size, positions, splitter, equal_too, DEPTH) == expected


# ---- merging
def merged_block(tokens, separator, parts):
    """(accepted, merged positions) of sorted parts."""
    positions = np.concatenate([np.array(part, np.int64) for part in parts])
    bounds = np.cumsum([0, *map(len, parts)])
    block = np.full(len(positions), -1)
    bits = separator.bit_length()
    texts = np.full((len(positions), -(-DEPTH // key_digits(bits))), 1 << 63, np.uint64)
    pack_texts(tokens, separator, bits, positions, np.arange(len(positions))[::-1].copy(), texts)
    keys = np.zeros(len(positions), np.uint64)
    accepted = merge_block(texts, positions, bounds, block, keys, True)
    if accepted:
        assert keys.tolist() == keys_slowly(tokens.tolist(), separator, block.tolist())
    return accepted, block.tolist()


@given(corpora(), st.integers(1, 5), st.data())
def test_merging_sorted_parts_is_sorting_the_whole(corpus, count, data):
    documents, vocab_size = corpus
    tokens = flat(documents, vocab_size)
    whole = sort_suffixes(tokens, vocab_size)
    part_of = data.draw(st.lists(st.integers(0, count - 1), min_size=len(documents), max_size=len(documents)).map(sorted))
    document_of = np.searchsorted(np.flatnonzero(tokens == vocab_size), whole)
    parts = [whole[np.array(part_of)[document_of] == part] for part in range(count)]
    assert merged_block(tokens, vocab_size, parts) == (True, whole.tolist())


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equal_texts_keep_the_order_of_the_parts(vocab_size):
    tokens = flat([[1] * DEPTH + [token] for token in (3, 2, 1, 0)], vocab_size)  # alike as far as is looked
    starts = [number * (DEPTH + 2) for number in range(4)]
    assert merged_block(tokens, vocab_size, [[p] for p in starts]) == (True, starts)
    tokens = flat([[1, 2]] * 3, vocab_size)  # alike up to the separator
    assert merged_block(tokens, vocab_size, [[0, 1], [3, 4], [6, 7]]) == (True, [0, 3, 6, 1, 4, 7])


@given(corpora(longest=12), st.data())
def test_part_that_is_not_sorted_is_not_accepted(corpus, data):
    documents, vocab_size = corpus
    tokens = flat([*documents, [0, 1]], vocab_size)
    suffixes = sort_suffixes(tokens, vocab_size).astype(np.int64)
    place = data.draw(st.integers(0, len(suffixes) - 2))
    suffixes[[place, place + 1]] = suffixes[[place + 1, place]]
    assert not merged_block(tokens, vocab_size, [suffixes])[0]
    assert not merged_block(tokens, vocab_size, [suffixes[:0], suffixes, suffixes[:0]])[0]
