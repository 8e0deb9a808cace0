"""What the baselines draft: prompt lookup as Hugging Face's, and the original lookahead trie."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from benchmarks.baselines import OriginalTrie, PromptLookup
from lookahead.draft.tree import DraftTree


def drafted(baseline: OriginalTrie, prompt: list[int], **limits: int) -> list[tuple[int, ...]]:
    """Paths of the draft behind a prompt, in the order of the nodes."""
    baseline.start(prompt)
    tree, paths = baseline.draft(**limits), [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], int(tree.token_ids[node])))
    return paths[1:]


def copied(tree: DraftTree) -> list[int]:
    assert tree.is_chain()
    return tree.token_ids[1:].tolist()


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
