"""How many drafts pay: the learned cost curve and the decoding length that it leads to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.budget.cost import CostCurve, isotonic
from lookahead.budget.goodput import GoodputBudget
from lookahead.draft.tree import DraftTree, chain


def chain_of(probability: float, nodes: int = 63) -> DraftTree:
    """A branch whose tokens are right with this probability each."""
    tree = chain(np.arange(nodes + 1, dtype=np.int32), source=0)
    tree.probabilities = (probability ** np.arange(nodes + 1)).astype(np.float32)
    return tree


def play(cost, probabilities, steps: int = 1010, noise: float = 0.0, budget: GoodputBudget | None = None) -> GoodputBudget:
    """A job of `steps` steps whose forwards cost cost(tokens) seconds; row k drafts a chain of probabilities[k]."""
    random = np.random.default_rng(0)
    budget = budget or GoodputBudget(64)
    for _ in range(steps):
        tokens = sum(map(len, budget.cut([chain_of(p) for p in probabilities])))
        seconds = cost(tokens) * (5.0 if random.random() < noise else 1.0)
        budget.observe(tokens, seconds, seconds + 1e-4)
    return budget


def sizes(budget: GoodputBudget, probabilities) -> list[int]:
    """Draft tokens of each row in the next step."""
    return [tree.draft_tokens for tree in budget.cut([chain_of(p) for p in probabilities])]


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0.1, 5)), min_size=1, max_size=12))
@settings(deadline=None)
def test_isotonic_fit_never_falls_and_keeps_the_weighted_mean(pairs: list[tuple[float, float]]) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    fitted = isotonic(values, weights)
    assert (np.diff(fitted) >= -1e-9).all()
    assert fitted @ weights == pytest.approx(values @ weights, abs=1e-6)
    if (np.diff(values) >= 0).all():
        assert fitted == pytest.approx(values)


def test_cost_of_any_size_is_read_off_the_observed_steps() -> None:
    curve = CostCurve()
    for tokens, seconds in ((1, 1.0), (8, 2.0), (8, 2.0), (8, 99.0), (16, 4.0)):
        curve.observe(tokens, seconds)
    seconds = curve.seconds(32)
    assert seconds[[1, 8, 12, 16]] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert seconds[32] == pytest.approx(4.0 + 16 * (3.0 / 15))


def linear(slope: float):
    """A draft token costs `slope` of a plain step."""
    return lambda tokens: 0.01 * (1 + slope * (tokens - 1))


def test_flat_cost_drafts_as_much_as_is_allowed() -> None:
    assert sizes(play(lambda tokens: 0.01, [0.9]), [0.9]) == [63]


def test_drafts_that_do_not_pay_are_not_verified_and_in_time_not_made() -> None:
    budget = play(linear(0.1), [0.05])
    assert sizes(budget, [0.05]) == [0]
    assert 0.01 < budget.price < 0.1


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("slope", [0.03, 0.1, 0.3])
def test_chosen_size_is_within_three_percent_of_the_best(slope: float, noise: float) -> None:
    cost = linear(slope)

    def goodput(drafted: int) -> float:
        return sum(0.8**depth for depth in range(drafted + 1)) / (cost(1 + drafted) + 1e-4)

    (chosen,) = sizes(play(cost, [0.8], noise=noise), [0.8])
    assert goodput(chosen) >= 0.97 * max(goodput(drafted) for drafted in range(64))


def test_rows_share_one_queue_and_the_predictable_one_gets_more() -> None:
    budget = play(linear(0.05), [0.9, 0.5, 0.01])
    first, second, third = sizes(budget, [0.9, 0.5, 0.01])
    assert first > second > third == 0
    worst_taken, best_left = min(0.9**first, 0.5**second), max(0.9 ** (first + 1), 0.5 ** (second + 1), 0.01)
    assert worst_taken >= best_left


def test_what_is_kept_of_a_tree_is_a_tree_of_its_first_nodes() -> None:
    budget = play(linear(0.1), [0.8, 0.8])
    trees = [chain_of(0.8), chain_of(0.6)]
    for whole, part in zip(trees, budget.cut(trees), strict=True):
        assert part.token_ids.tolist() == whole.token_ids[: len(part)].tolist()
        assert part.parents.tolist() == whole.parents[: len(part)].tolist()


def test_row_that_turns_predictable_gets_drafts_at_once() -> None:
    budget = play(linear(0.1), [0.05])
    assert sizes(budget, [0.05]) == [0]
    assert sizes(budget, [0.95])[0] >= 8


def test_machine_that_becomes_slow_for_large_forwards_is_noticed() -> None:
    budget = play(linear(0.01), [0.8])
    before = sizes(budget, [0.8])[0]
    play(linear(0.5), [0.8], steps=3010, budget=budget)
    assert sizes(budget, [0.8])[0] < before / 2
