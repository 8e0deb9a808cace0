"""What the baselines draft: prompt lookup as Hugging Face's, and the original lookahead trie."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from benchmarks.baselines import BASELINES, BRANCH, OriginalTrie, PromptLookup
from lookahead.bench.replay import replay
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import DraftTree

tokens = st.integers(0, 4)
requests = st.lists(
    st.tuples(st.lists(tokens, min_size=1, max_size=12), st.lists(st.lists(tokens, max_size=4), max_size=5)), max_size=3
)


def frequencies_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Path below the root -> probability, in the order of the nodes."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], int(tree.token_ids[node])))
    return dict(zip(paths[1:], tree.probabilities[1:].tolist(), strict=True))


def drafted(baseline, prompt, output=(), **limits):
    """Paths of the draft behind a prompt and an output, in the order of the nodes; the request ends."""
    baseline.start(prompt)
    baseline.accept(list(output))
    tree = baseline.draft(**limits)
    baseline.finish()
    return list(frequencies_of(tree))


def copied(tree: DraftTree) -> list[int]:
    assert tree.is_chain()
    return tree.token_ids[1:].tolist()


# Prompt lookup


def test_prompt_lookup_searches_prompt_and_output_and_says_which():
    lookup = PromptLookup()
    lookup.start([5, 1, 2])
    lookup.accept([3, 4, 1])
    tree = lookup.draft()
    assert copied(tree) == [2, 3, 4, 1]
    assert [lookup.source_names[source] for source in tree.sources[1:]] == ["prompt", "output", "output", "output"]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 40))
def test_prompt_lookup_drafts_what_hugging_face_drafts(text, prompt_length):
    prompt, output = text[: max(1, prompt_length)], text[max(1, prompt_length) :]
    theirs = PromptLookupCandidateGenerator(num_output_tokens=10, max_matching_ngram_size=3, max_length=1000)
    candidates, _ = theirs.get_candidates(torch.tensor([text]))
    ours = PromptLookup()
    ours.start(prompt)
    ours.accept(output)
    assert copied(ours.draft()) == candidates[0, len(text) :].tolist()


# The original trie


HALVES = [[1, 2, 4, 5, 6, 7, 8]], [1, 2, 3, 9, 9, 9, 9, 1, 2]


@pytest.mark.parametrize(
    ("documents", "prompt", "limits", "paths"),
    [
        # The most frequent continuation first.
        ([[1, 2, 3], *[[1, 2, 4]] * 2, *[[1, 2, 5]] * 3], [1, 2], {}, [(5,), (4,), (3,)]),
        ([[1, 2, 3], *[[1, 2, 4]] * 2, *[[1, 2, 5]] * 3], [1, 2], {"budget": 1}, [(5,)]),
        # In the order of frequency, not branch by branch; among equals a branch is followed to its end.
        ([*[[1, 2, 3]] * 2, [1, 2, 3, 6], *[[1, 2, 4]] * 2], [1, 2], {"budget": 2}, [(3,), (4,)]),
        ([*[[1, 2, 3]] * 2, [1, 2, 3, 6], *[[1, 2, 4]] * 2], [1, 2], {}, [(3,), (4,), (3, 6)]),
        ([[1, 2, 3, 4, 5], [1, 2, 6, 7]], [1, 2], {}, [(3,), (3, 4), (3, 4, 5), (6,), (6, 7)]),
        # Half of the tree is for what outputs say most often; what they do not fill goes to the prompt.
        (*HALVES, {"budget": 4}, [(4,), (4, 5), (3,), (3, 9)]),
        (*HALVES, {"budget": 3}, [(4,), (4, 5), (3,)]),
        ([], [1, 2, 4, 1, 2, 3, 1, 2, 3, 1, 2], {"budget": 2}, [(3,), (3, 1)]),
        # The last two tokens are matched, and no more.
        ([[7, 8, 1, 2, 3], *[[9, 1, 2, 4]] * 2], [7, 8, 1, 2], {"budget": 1}, [(4,)]),
    ],
)
def test_original_trie_drafts(make_trie, documents, prompt, limits, paths):
    assert drafted(OriginalTrie([make_trie(documents)] if documents else []), prompt, **limits) == paths


# All baselines
@pytest.mark.parametrize("name", BASELINES)
@given(
    requests=requests,
    decoding_length=st.integers(1, 24),
    branch_length=st.integers(1, 24),
    budget=st.none() | st.integers(0, 12),
    longest=st.none() | st.integers(0, 12),
)
def test_every_draft_is_a_tree_within_budget_and_branch_length(name, requests, decoding_length, branch_length, budget, longest):
    baseline = BASELINES[name]([], DraftOptions("hierarchical", decoding_length, branch_length))
    for prompt, steps in requests:
        baseline.start(prompt)
        last = prompt[-1]
        for accepted in [[], *steps]:
            baseline.accept(accepted)
            last = accepted[-1] if accepted else last
            tree = baseline.draft(budget, longest)
            assert (tree.token_ids[0], tree.parents[0], tree.probabilities[0], tree.sources[0]) == (last, -1, 1, -1)
            below = range(1, len(tree))
            assert tree.draft_tokens <= min(decoding_length - 1, 99 if budget is None else budget)
            assert tree.depths().max() <= min(branch_length, BRANCH, 99 if longest is None else longest)
            assert all(0 <= tree.parents[node] < node for node in below)
            assert all(0 < tree.probabilities[node] <= tree.probabilities[tree.parents[node]] for node in below)
            assert all(0 <= tree.sources[node] < len(baseline.source_names) for node in below)
            assert len(frequencies_of(tree)) == tree.draft_tokens  # no two nodes of one path
            assert [a.dtype for a in (tree.token_ids, tree.parents, tree.sources)] == [np.int32] * 3
            assert tree.probabilities.dtype == np.float32
        baseline.finish()


def test_warm_start_helps_the_original_trie_and_not_prompt_lookup(make_trie):
    pairs = [([1, 2, 3], [4, 5, 6, 7, 8, 9])]
    tries = [make_trie([[4, 5, 6, 7, 8, 9]])]
    for name, edl in [("original-trie", 5.0), ("prompt-lookup", 1.0)]:
        warm, cold = replay(pairs, tries, DraftOptions(), name), replay(pairs, [], DraftOptions(), name)
        assert (warm.edl, warm.start) == (edl, "warm")
        assert (cold.edl, cold.start) == (1.0, "cold")
