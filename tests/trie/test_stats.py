"""Figures of a trie, against a scan; those of several segments are those of the merged file."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_tries
from lookahead.trie.segment import BuildResources
from lookahead.trie.stats import BRANCH_LENGTH, continuations, overview
from tests.support.tries import VOCAB_SIZES, append_ids, build_ids, counts_of, texts, tiny_runs


def rows(found):
    return [(row.depth, row.nodes, row.branching, row.singletons) for row in found.depths]


def rows_by_scan(documents, deepest):
    counts, _ = counts_of(documents)
    expected, above = [], 1
    for depth in range(1, deepest + 1):
        at = [count for ngram, count in counts.items() if len(ngram) == depth]
        if not at:
            break
        expected.append((depth, len(at), round(len(at) / above, 3), round(at.count(1) / len(at), 4)))
        above = len(at)
    return expected


@st.composite
def corpora_in_parts(draw):
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    document = texts(st.sampled_from([0, 1, vocab_size - 1]), 40)
    return draw(st.lists(st.lists(document, min_size=1, max_size=3), min_size=1, max_size=4)), vocab_size


@given(corpora_in_parts(), st.sampled_from([BRANCH_LENGTH, 8, 32]), st.sampled_from([0, 1, 3, 1000]))
def test_overview_is_that_of_a_scan_whatever_the_segments(corpus, deepest, most):
    parts, vocab_size = corpus
    documents = [document for part in parts for document in part]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.trie"
        trie = build_ids(path, parts[0], vocab_size)
        for part in parts[1:]:
            trie = append_ids(path, part, vocab_size)
        assert len(trie.segments) == len(parts)
        merge_tries([path], path.with_name("merged.trie"))
        found = overview(trie, deepest, most)
        assert found == overview(Trie(path.with_name("merged.trie")), deepest, most)
        with tiny_runs():
            assert found == overview(trie, deepest, most, BuildResources(workers=2))
    assert rows(found) == rows_by_scan(documents, deepest)
    branches = {ngram: count for ngram, count in counts_of(documents)[0].items() if len(ngram) == BRANCH_LENGTH}
    expected = sorted(branches.items(), key=lambda item: (-item[1], item[0]))[:most]
    assert found.top == [(list(ngram), count) for ngram, count in expected]


@pytest.mark.parametrize("segments", [1, 2])
def test_continuations_are_a_tree_of_counts_and_shares_of_the_parent(tmp_path, segments):
    documents = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 5]]
    trie = build_ids(tmp_path / "x.trie", documents[: 4 // segments])
    if segments == 2:
        trie = append_ids(tmp_path / "x.trie", documents[2:])
    match, nodes = continuations(trie, np.array([9, 1], np.int32), depth=2, width=2)
    assert (match.length, match.count) == (1, 4)
    assert [(n.token_id, n.count, n.share) for n in nodes] == [(2, 3, 0.75), (5, 1, 0.25)]
    assert [(n.token_id, n.count, n.share) for n in nodes[0].children] == [(3, 2, 2 / 3), (4, 1, 1 / 3)]
    assert nodes[1].children == nodes[0].children[0].children == ()
