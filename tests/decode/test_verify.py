"""Verify and accept: the path of a draft tree that the model itself would have said."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookahead.budget.policy import Budget
from lookahead.decode.verify import verify_and_accept
from lookahead.draft.tree import root_only
from lookahead.forward.slots import Scores
from lookahead.step.batch import RowState, StepBatch
from lookahead.step.layout import DECODES
from tests.support.drafts import KnownAnswer, tree_of


def verified(tree, *said, last=None):
    """Verify against a model that says said[node] after each node; `last` ends the answer."""
    return verify_and_accept(tree, said.__getitem__, lambda token: token != last)


#      5
#    8   9
#    3
EXAMPLE = tree_of([5, 8, 9, 3], [-1, 0, 0, 1])
# 5 - 8 - 1
#   - 8 - 3
#   - 8 - 3 - 4
SIDE_BY_SIDE = tree_of([5, 8, 1, 8, 3, 8, 3, 4], [-1, 0, 1, 0, 3, 0, 5, 6])
SIBLINGS = tree_of([5, 8, 8, 3], [-1, 0, 0, 2])


@pytest.mark.parametrize(
    ("tree", "said", "token_ids", "nodes"),
    [
        pytest.param(EXAMPLE, [8, 3, 0, 4], [8, 3, 4], [0, 1, 3], id="whole-branch"),
        pytest.param(EXAMPLE, [8, 2, 0, 4], [8, 2], [0, 1], id="branch-in-part"),
        pytest.param(EXAMPLE, [9, 0, 7, 0], [9, 7], [0, 2], id="other-branch"),
        pytest.param(EXAMPLE, [1, 3, 7, 4], [1], [0], id="nothing"),
        pytest.param(EXAMPLE, [3, 3, 3, 3], [3], [0], id="token-of-a-deeper-node"),
        pytest.param(root_only(5), [7], [7], [0], id="no-draft"),
        pytest.param(SIDE_BY_SIDE, [8, 3, 0, 3, 4, 3, 4, 6], [8, 3, 4, 6], [0, 5, 6, 7], id="branches-side-by-side"),
        pytest.param(SIBLINGS, [8, 3, 3, 4], [8, 3, 4], [0, 2, 3], id="siblings-of-the-same-token"),
    ],
)
def test_longest_path_that_the_model_says_is_accepted(tree, said, token_ids, nodes):
    accepted = verified(tree, *said)
    assert (accepted.token_ids, accepted.nodes) == (token_ids, nodes)


@pytest.mark.parametrize(("last", "token_ids", "nodes"), [(8, [8], [0, 1]), (3, [8, 3], [0, 1, 3]), (4, [8, 3, 4], [0, 1, 3])])
def test_answer_ends_with_the_token_that_ends_it_drafted_or_not(last, token_ids, nodes):
    accepted = verified(EXAMPLE, 8, 3, 0, 4, last=last)
    assert (accepted.token_ids, accepted.nodes) == (token_ids, nodes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@given(seed=st.integers(0, 1000), offset=st.sampled_from([0.0, -50.0, 50.0]), few=st.booleans())
def test_best_token_is_the_first_of_those_with_the_highest_score(dtype, seed, offset, few):
    """Where all scores are below 0 too, and where several are the same, 0 with either sign among them."""
    scores = torch.randn(3, 500, generator=torch.Generator().manual_seed(seed))
    scores = (scores.clamp(max=0).round() * -0.0 if few else scores + offset).to(dtype)
    found = Scores(scores, [1, 2])
    expected = [int(row.float().numpy().argmax()) for row in scores]
    assert [found.best(0, 0), found.best(1, 0), found.best(1, 1)] == expected


class Grown(KnownAnswer):
    """Drafts these trees, one for each row."""

    def __init__(self, trees):
        super().__init__([], None)
        self.trees = trees

    def draft(self, row, longest):
        return self.trees[row.text.item(0)]


@given(st.data())
def test_trees_are_followed_at_once_as_each_by_itself(data):
    """`StepBatch.accept` is `DraftTree.follow`: any trees, ties, branches side by side, all float types, forced answers."""
    tokens = st.integers(0, 5)
    trees = []
    for _ in range(data.draw(st.integers(1, 4))):
        parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, data.draw(st.integers(1, 9))))]
        trees.append(tree_of([data.draw(tokens) for _ in parents], parents))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    nodes = sum(map(len, trees))
    values = data.draw(st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0]), min_size=6 * nodes, max_size=6 * nodes))
    scores = Scores(torch.tensor(values, dtype=dtype).view(nodes, 6), [len(tree) for tree in trees])
    forced_tokens = [data.draw(st.one_of(st.none(), st.lists(tokens, min_size=1, max_size=4))) for _ in trees]
    drafter = Grown(trees)
    batch = StepBatch(drafter, 6)
    for number, (tree, forced) in enumerate(zip(trees, forced_tokens, strict=True)):
        root = int(tree.token_ids[0])
        batch.add(RowState(drafter.start([number, root]), 3, 1000, 1000, root, [], forced, True))
        batch.set_input(number, DECODES)
    batch.propose(Budget(), 1, True)
    batch.accept(scores)
    for slot, (tree, forced, found) in enumerate(zip(trees, forced_tokens, batch.accepted(), strict=True)):
        assert batch.trees_of([slot])[0].token_ids.tolist() == tree.token_ids.tolist()

        def say(node, so_far, slot=slot, forced=forced):
            if forced:
                return forced[len(so_far)] if len(so_far) < len(forced) else None
            return int(scores.of(slot)[node].float().argmax())

        assert (found.token_ids, found.nodes) == tree.follow(say)
