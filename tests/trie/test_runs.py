"""Sorted runs merged block by block."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.errors import TrieFormatError
from lookahead.trie.runs import Pages, Run, merged
from lookahead.trie.suffixes import sort_suffixes
from tests.support.depth import deep
from tests.support.tries import corpora, flat, keys_slowly, small_blocks


def runs_of(tokens, separator, cuts):
    """The runs of tokens[:cuts[0]], tokens[cuts[0]:cuts[1]], ..., each sorted for itself."""
    bounds = [0, *cuts, len(tokens)]
    return [Run(sort_suffixes(tokens[a:b], separator), a, b - a) for a, b in itertools.pairwise(bounds)]


def merge(tokens, separator, runs, workers=1, limit=1 << 40):
    """Positions of the merged runs; their keys must be those of the texts. limit 0: as if the tokens outgrew the memory."""
    blocks = list(merged(tokens, separator, runs, workers, Pages(limit)))
    positions = np.concatenate([np.empty(0, np.int64), *(positions for positions, _ in blocks)]).tolist()
    keys = [key for _, keys in blocks for key in keys.tolist()]
    assert keys == keys_slowly(tokens.tolist(), separator, positions)
    return positions


@given(corpora(longest=24), st.sampled_from([0, 1 << 40]), st.sampled_from([1, 16, 40, 1 << 14]), st.data())
def test_merged_runs_are_the_sorted_whole(corpus, limit, block, data):
    documents, vocab_size = corpus
    tokens = flat(documents, vocab_size)
    ends = (np.flatnonzero(tokens == vocab_size)[:-1] + 1).tolist()
    cuts = sorted(data.draw(st.sets(st.sampled_from(ends)))) if ends else []
    runs = runs_of(tokens, vocab_size, cuts)
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, block)
        assert merge(tokens, vocab_size, runs, limit=limit) == sort_suffixes(tokens, vocab_size).tolist()


# Documents, and the numbers of those that begin a run. Texts that tie are many more than a window holds.
SHAPES = {
    "one run much longer than the others": ([[0], [1], *[[0, 1, 1]] * 3000, [0, 1]], [1, 2, 3002]),
    "the longest run first": ([*[[0, 1, 1]] * 3000, [0, 1], [1]], [3000, 3001]),
    "one text throughout": ([[0, 1, 2]] * 4000, [1000, 1100, 3500]),
    "many runs of one document": ([[n % 3, n % 2] for n in range(300)], list(range(1, 300))),
    "descending runs": ([[3 - n // 1500, n % 4, n % 3] for n in range(6000)], [1500, 3000, 4500]),
}


@pytest.mark.parametrize(("block", "workers"), [(64, 3), *deep([(1 << 14, 1), (64, 1), (1 << 14, 3)])])
@pytest.mark.parametrize("shape", SHAPES)
def test_runs_that_tie_or_differ_in_size_are_merged_like_any(monkeypatch, shape, block, workers):
    small_blocks(monkeypatch, block)
    documents, begins = SHAPES[shape]
    tokens = flat(documents, 4)
    starts = [0, *(np.flatnonzero(tokens == 4) + 1).tolist()]
    runs = runs_of(tokens, 4, [starts[number] for number in begins])
    assert merge(tokens, 4, runs, workers, limit=0) == sort_suffixes(tokens, 4).tolist()


@pytest.mark.parametrize("place", [0, 50, 98, 99, 100, 101, 199, -2])  # each of two runs offers 100 at a time
@pytest.mark.parametrize("which", [0, 1])
def test_run_that_is_not_sorted_is_refused_by_name(monkeypatch, place, which):
    small_blocks(monkeypatch, 200)
    tokens = flat([list(range(300)), list(range(300))], 300)
    runs = runs_of(tokens, 300, [301])
    suffixes = runs[which].suffixes.copy()
    suffixes[[place, place + 1]] = suffixes[[place + 1, place]]
    runs[which] = Run(suffixes, runs[which].offset, runs[which].length, "old.trie")
    with pytest.raises(TrieFormatError, match=r"old\.trie.*: suffixes are not sorted"):
        merge(tokens, 300, runs)


@pytest.mark.parametrize("value", [30, 31, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("count", [1, 2])
def test_position_outside_of_its_run_is_refused_by_name(value, count):
    tokens = flat([[0, 1] * 14 + [2]] * count, 4)  # 30 tokens each: what is outside of the first is inside of the second
    runs = runs_of(tokens, 4, [30] * (count - 1))
    suffixes = runs[0].suffixes.astype(np.uint64)
    suffixes[-1] = value
    with pytest.raises(TrieFormatError, match=r"old\.trie: a suffix points outside the tokens"):
        merge(tokens, 4, [Run(suffixes, 0, 30, "old.trie"), *runs[1:]])
