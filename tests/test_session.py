"""The token log of the running job: its chains, against a search through everything; its bound; its left context."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.trie.session import BREAK, TokenLog, hash_one, hash_two

token = st.integers(0, 4)
documents_with_left_context = st.lists(
    st.tuples(st.lists(token, max_size=3), st.lists(token, min_size=1, max_size=12)), min_size=1, max_size=12
)


def text_of(log):
    return log.tokens[: len(log)].tolist()


def places_of(log, ending):
    """Places on the chain that hold `ending` (one or two tokens), in the chain's order; collisions left out."""
    if len(ending) == 1:
        place, previous = log.head1[hash_one(ending[0], len(log.head1))], log.previous1
    else:
        place, previous = log.head2[hash_two(ending[0], ending[1], len(log.head2))], log.previous2
    text, places = text_of(log), []
    while place >= 0:
        if place + 1 >= len(ending) and tuple(text[place + 1 - len(ending) : place + 1]) == ending:
            places.append(int(place))
        place = previous[place]
    return places


def assert_chained(log, linked):
    """Every chain holds the places of its ending among `linked`, newest first, and nothing else."""
    text = text_of(log)
    for first in range(5):
        assert places_of(log, (first,)) == [p for p in reversed(linked) if text[p] == first]
        for second in range(5):
            expected = [p for p in reversed(linked) if p and text[p - 1 : p + 1] == [first, second]]
            assert places_of(log, (first, second)) == expected


@given(st.lists(st.lists(token, max_size=20), max_size=6), st.sampled_from([1, 12]))
@settings(max_examples=60, deadline=None)
def test_chains_hold_all_places_of_one_and_of_two_tokens_newest_first(pieces, hash_bits):
    log = TokenLog(1000, hash_bits)  # one bit: most places collide
    for piece in pieces:
        log.append(piece)
    assert text_of(log) == [token for piece in pieces for token in piece]
    assert_chained(log, range(len(log)))


@given(documents_with_left_context)
@settings(max_examples=60, deadline=None)
def test_document_is_chained_from_the_last_token_of_its_left_context_on(documents):
    log, text, linked = TokenLog(1000), [], []
    for left, ids in documents:
        log.append_document(left, ids)
        text += [BREAK, *left, *ids]
        linked += range(len(text) - len(ids) - bool(left), len(text))
    assert text_of(log) == text
    assert_chained(log, linked)


@given(documents_with_left_context, st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_full_log_keeps_the_newest_tokens_chained_as_before(documents, capacity):
    log, text, linked = TokenLog(capacity), [], []
    for left, ids in documents:
        log.append_document(left, ids)
        text += [BREAK, *left, *ids]
        linked += range(len(text) - len(ids) - bool(left), len(text))
        assert min(len(text), capacity // 2) <= len(log) <= capacity
        kept_from = len(text) - len(log)
        assert text_of(log) == text[kept_from:]
        assert all(len(a) <= capacity for a in (log.tokens, log.previous1, log.previous2))
        kept = [p - kept_from for p in linked if p >= kept_from]
        for ending in range(5):
            assert places_of(log, (ending,)) == [p for p in reversed(kept) if text_of(log)[p] == ending]


def test_two_tokens_on_either_side_of_a_break_are_no_pair():
    log = TokenLog(100)
    log.append_document([], [1])
    log.append_document([], [2])
    assert text_of(log) == [BREAK, 1, BREAK, 2]
    assert places_of(log, (1, 2)) == []
    assert places_of(log, (2,)) == [3]


def test_log_grows_beyond_its_first_arrays_without_losing_a_token():
    log = TokenLog(1 << 16)
    tokens = np.random.default_rng(0).integers(0, 5, 10_000)
    for start in range(0, 10_000, 100):
        log.append(tokens[start : start + 100])
    assert text_of(log) == tokens.tolist()
    assert places_of(log, (3, 1)) == [p for p in range(9_999, 0, -1) if tokens[p - 1] == 3 and tokens[p] == 1]


def test_document_longer_than_the_log_keeps_its_end():
    log = TokenLog(4)
    log.append_document([1, 1, 1], [0, 1, 2, 3, 4, 2])
    assert text_of(log) == [2, 3, 4, 2]
    assert places_of(log, (2,)) == [3, 0]


@pytest.mark.parametrize("capacity", [10, 0])
def test_cleared_or_empty_log_finds_nothing(capacity):
    log = TokenLog(capacity)
    log.append([1, 2, 1])
    log.clear()
    assert len(log) == 0
    assert all(places_of(log, (token,)) == [] for token in range(5))
    assert (log.head1 == -1).all()
    assert (log.head2 == -1).all()
