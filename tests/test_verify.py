"""Verify and accept: the path of a draft tree that the model itself would have said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from lookahead.decode.verify import verify_and_accept
from lookahead.draft.tree import DraftTree, chain, root_only

VOCAB_SIZE = 10


def tree_of(token_ids, parents):
    nodes = len(token_ids)
    no_source = np.full(nodes, -1, np.int32)
    return DraftTree(
        np.array(token_ids, np.int32),
        np.array(parents, np.int32),
        np.ones(nodes, np.float32),
        no_source,
        np.zeros(nodes, np.int32),
    )


def saying(*token_ids):
    """Scores whose row i says token_ids[i]."""
    logits = torch.zeros(len(token_ids), VOCAB_SIZE)
    logits[torch.arange(len(token_ids)), torch.tensor(token_ids)] = 1.0
    return logits


#      5
#    8   9
#    3
EXAMPLE = tree_of([5, 8, 9, 3], [-1, 0, 0, 1])


@pytest.mark.parametrize(
    ("said", "token_ids", "nodes"),
    [
        pytest.param([8, 3, 0, 4], [8, 3, 4], [0, 1, 3], id="whole-branch"),
        pytest.param([8, 2, 0, 4], [8, 2], [0, 1], id="branch-in-part"),
        pytest.param([9, 0, 7, 0], [9, 7], [0, 2], id="other-branch"),
        pytest.param([1, 3, 7, 4], [1], [0], id="nothing"),
        pytest.param([3, 3, 3, 3], [3], [0], id="token-of-a-deeper-node"),
    ],
)
def test_longest_path_that_the_model_says_is_accepted(said, token_ids, nodes):
    accepted = verify_and_accept(EXAMPLE, saying(*said))
    assert (accepted.token_ids, accepted.nodes) == (token_ids, nodes)


def test_without_a_draft_the_model_says_one_token():
    accepted = verify_and_accept(root_only(5), saying(7))
    assert (accepted.token_ids, accepted.nodes) == ([7], [0])


def test_branches_side_by_side_are_followed_together_to_the_longest():
    #        5
    #    8   8   8
    #    1   3   3
    #            4
    tree = tree_of([5, 8, 1, 8, 3, 8, 3, 4], [-1, 0, 1, 0, 3, 0, 5, 6])
    accepted = verify_and_accept(tree, saying(8, 3, 0, 3, 4, 3, 4, 6))
    assert accepted.token_ids == [8, 3, 4, 6]
    assert accepted.nodes == [0, 5, 6, 7]


def test_siblings_of_the_same_token_are_one_branch():
    tree = tree_of([5, 8, 8, 3], [-1, 0, 0, 2])
    accepted = verify_and_accept(tree, saying(8, 3, 3, 4))
    assert (accepted.token_ids, accepted.nodes) == ([8, 3, 4], [0, 2, 3])


@pytest.mark.parametrize("rows", [0, 3, 5])
def test_scores_that_do_not_fit_the_tree_are_refused_with_both_sizes(rows):
    with pytest.raises(ValueError, match=f"{rows} rows of logits for 4 nodes"):
        verify_and_accept(EXAMPLE, torch.zeros(rows, VOCAB_SIZE))


def test_processor_sees_the_text_up_to_each_visited_node_and_no_other():
    seen = []

    def unchanged(token_ids, scores):
        seen.append((token_ids.tolist(), scores.argmax(-1).tolist()))
        return scores

    accepted = verify_and_accept(EXAMPLE, saying(8, 3, 0, 4), unchanged, torch.tensor([[6, 5]]))
    assert accepted.token_ids == [8, 3, 4]
    assert seen == [([[6, 5]], [8]), ([[6, 5, 8]], [3]), ([[6, 5, 8, 3]], [4])]


def test_what_the_processor_leaves_is_what_is_said():
    logits = saying(8, 8, 0)
    logits[:, 3] = 0.9  # next best
    tree = chain([5, 8, 8])
    text = torch.tensor([[6, 5]])
    assert verify_and_accept(tree, logits).token_ids == [8, 8, 0]
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    assert verify_and_accept(tree, logits, penalty, text).token_ids == [8, 3]  # 8 counts as said within the step


def test_processor_gets_float32_scores_whatever_the_model_computes_in():
    kinds = []

    def unchanged(token_ids, scores):
        kinds.append(scores.dtype)
        return scores

    verify_and_accept(root_only(5), saying(7).to(torch.bfloat16), unchanged, torch.tensor([[5]]))
    assert kinds == [torch.float32]
