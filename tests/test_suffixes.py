"""Sorting, merging and searching suffixes, against the same in slow plain Python."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.trie.file import child_ranges, suffixes_in_order
from lookahead.trie.format import smallest_dtype
from lookahead.trie.suffixes import DEPTH, first_table, matching_range, merge_sorted, sort_suffixes

# 65534 is the last vocabulary whose tokens are packed four to a key, 65535 the last with two-byte tokens.
VOCAB_SIZES = [4, 65534, 65535, 70000]


@st.composite
def corpora(draw):
    """(documents, vocab_size): few different tokens, the largest id among them, so that text repeats itself."""
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    token = st.sampled_from([0, 1, vocab_size - 1])
    return draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=6)), vocab_size


def flat(documents, vocab_size):
    """The tokens section: each document closed by the separator, read-only as in a mapped file."""
    tokens = [token for document in documents for token in (*document, vocab_size)]
    array = np.array(tokens, smallest_dtype("tokens", vocab_size))
    array.setflags(write=False)
    return array


def sorted_slowly(tokens, separator, depth):
    """Positions of real tokens by the rule: first `depth` tokens up to the own separator, then position."""

    def key(position):
        end = tokens.index(separator, position)
        return tokens[position : end + 1][:depth], position

    return sorted((p for p, token in enumerate(tokens) if token != separator), key=key)


def index_of(documents, vocab_size):
    """(tokens, suffixes, first) as Trie holds them: narrow and read-only."""
    tokens = flat(documents, vocab_size)
    suffixes = sort_suffixes(tokens, vocab_size).astype(np.uint32)
    first = first_table(tokens[suffixes], vocab_size).astype(np.uint32)
    for array in (suffixes, first):
        array.setflags(write=False)
    return tokens, suffixes, first


@given(corpora(), st.sampled_from([4, 8, DEPTH]))
@settings(max_examples=150, deadline=None)
def test_suffixes_are_sorted_by_their_first_tokens_then_by_position(corpus, depth):
    documents, vocab_size = corpus
    tokens = flat(documents, vocab_size)
    assert sort_suffixes(tokens, vocab_size, depth).tolist() == sorted_slowly(tokens.tolist(), vocab_size, depth)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_suffixes_that_agree_in_depth_tokens_stand_by_position(vocab_size):
    tokens = flat([[1] * (DEPTH + 3), [1] * (DEPTH + 1)], vocab_size)
    found = sort_suffixes(tokens, vocab_size).tolist()
    assert found[:6] == [0, 1, 2, 3, DEPTH + 4, DEPTH + 5]  # these have at least DEPTH ones before them
    assert found == sorted_slowly(tokens.tolist(), vocab_size, DEPTH)


@given(corpora())
@settings(max_examples=50, deadline=None)
def test_sorted_suffixes_pass_the_order_check_and_any_two_swapped_fail_it(corpus):
    documents, vocab_size = corpus
    tokens, suffixes, _ = index_of(documents, vocab_size)
    assert suffixes_in_order(tokens, vocab_size, suffixes, DEPTH)
    for k in range(len(suffixes) - 1):
        swapped = suffixes.copy()
        swapped[[k, k + 1]] = swapped[[k + 1, k]]
        swapped.setflags(write=False)
        assert not suffixes_in_order(tokens, vocab_size, swapped, DEPTH)


@given(corpora(), st.data())
@settings(max_examples=100, deadline=None)
def test_matching_range_holds_all_places_of_a_pattern_and_no_other(corpus, data):
    documents, vocab_size = corpus
    tokens, suffixes, first = index_of(documents, vocab_size)
    longest = st.lists(st.sampled_from([0, 1, vocab_size - 1]), min_size=1, max_size=6)
    pattern = data.draw(st.one_of(longest, st.sampled_from([d[i:] for d in documents for i in range(len(d))])))
    low, high = matching_range(tokens, suffixes, first, np.array(pattern, np.int32), 0, len(pattern))
    text = tokens.tolist()
    places = {p for p in range(len(text)) if text[p : p + len(pattern)] == pattern}
    assert high - low == len(places)
    assert set(suffixes[low:high].tolist()) == places


@pytest.mark.parametrize("token", [-1, 4, 1 << 30])
def test_token_outside_the_vocabulary_matches_nothing(token):
    tokens, suffixes, first = index_of([[0, 1, 2, 3]], 4)
    low, high = matching_range(tokens, suffixes, first, np.array([token], np.int32), 0, 1)
    assert high - low == 0


def test_only_the_part_from_start_to_stop_is_searched():
    tokens, suffixes, first = index_of([[0, 1, 2, 3], [1, 2, 0]], 4)
    low, high = matching_range(tokens, suffixes, first, np.array([3, 1, 2, 3], np.int32), 1, 3)
    assert sorted(suffixes[low:high].tolist()) == [1, 5]  # the two places of [1, 2]


def test_no_branch_crosses_from_one_document_into_the_next():
    tokens, suffixes, first = index_of([[0, 1], [2, 3]], 4)
    low, high = matching_range(tokens, suffixes, first, np.array([1, 2], np.int32), 0, 2)
    assert high - low == 0
    low, high = matching_range(tokens, suffixes, first, np.array([1], np.int32), 0, 1)
    below, _, _ = child_ranges(tokens, suffixes, 1, low, high)
    assert below.tolist() == [4]  # the separator


@given(corpora())
@settings(max_examples=100, deadline=None)
def test_child_ranges_count_each_next_token(corpus):
    documents, vocab_size = corpus
    tokens, suffixes, first = index_of(documents, vocab_size)
    text = tokens.tolist()
    for pattern in {tuple(d[i : i + n]) for d in documents for i in range(len(d)) for n in (1, 2, 3)}:
        n = len(pattern)
        low, high = matching_range(tokens, suffixes, first, np.array(pattern, np.int32), 0, n)
        below, lows, highs = child_ranges(tokens, suffixes, n, low, high)
        counted = Counter(text[p + n] for p in range(len(text) - n) if tuple(text[p : p + n]) == pattern)
        assert dict(zip(below.tolist(), (highs - lows).tolist(), strict=True)) == counted
        assert below.tolist() == sorted(counted)
        assert [low, *highs[:-1]] == lows.tolist()  # the ranges lie side by side


def test_more_than_sixteen_children_are_all_found():
    documents = [[0, token] for token in range(1, 41)]
    tokens, suffixes, first = index_of(documents, 50)
    low, high = matching_range(tokens, suffixes, first, np.array([0], np.int32), 0, 1)
    below, _, _ = child_ranges(tokens, suffixes, 1, low, high)
    assert below.tolist() == list(range(1, 41))


@given(corpora(), st.data())
@settings(max_examples=100, deadline=None)
def test_merging_two_sorted_parts_is_sorting_the_whole(corpus, data):
    documents, vocab_size = corpus
    cut = data.draw(st.integers(0, len(documents)))
    tokens = flat(documents, vocab_size)
    whole = sort_suffixes(tokens, vocab_size)
    boundary = sum(len(d) + 1 for d in documents[:cut])
    left, right = whole[whole < boundary], whole[whole >= boundary]
    assert merge_sorted(tokens, vocab_size, left, right, DEPTH).tolist() == whole.tolist()


def test_merging_puts_the_left_part_first_where_text_is_equal_for_depth_tokens():
    tokens = flat([[1] * DEPTH + [0], [1] * DEPTH + [2]], 4)
    merged = merge_sorted(tokens, 4, np.array([0]), np.array([DEPTH + 2]), DEPTH)
    assert merged.tolist() == [0, DEPTH + 2]
    merged = merge_sorted(tokens, 4, np.array([DEPTH + 2]), np.array([0]), DEPTH)
    assert merged.tolist() == [DEPTH + 2, 0]


def test_first_table_bounds_the_suffixes_of_each_first_token():
    tokens, suffixes, first = index_of([[2, 0, 2], [2]], 4)
    assert first.tolist() == [0, 1, 1, 4, 4]
    assert tokens[suffixes].tolist() == [0, 2, 2, 2]
