"""How many drafts pay: the learned cost curve and the decoding length that it leads to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.budget.cost import CostCurve, isotonic
from lookahead.budget.goodput import GoodputBudget


def play(cost, accept, steps: int = 2000, noise: float = 0.0, budget: GoodputBudget | None = None) -> GoodputBudget:
    """A job of `steps` steps whose forwards cost cost(tokens) seconds and accept node i with probability accept(i)."""
    random = np.random.default_rng(0)
    budget = budget or GoodputBudget(64)
    for _ in range(steps):
        tokens = budget.decoding_length()
        nodes = [0]
        while nodes[-1] + 1 < tokens and random.random() < accept(nodes[-1] + 1):
            nodes.append(nodes[-1] + 1)
        seconds = cost(tokens) * (5.0 if random.random() < noise else 1.0)
        budget.observe([tokens], [nodes], seconds, seconds + 1e-4)
    return budget


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


def test_flat_cost_drafts_as_much_as_is_allowed() -> None:
    assert play(lambda tokens: 0.01, lambda node: 0.9).best >= 32


def test_drafts_that_are_never_accepted_are_given_up() -> None:
    budget = play(lambda tokens: 0.01 + 0.001 * tokens, lambda node: 0.0)
    assert budget.best == 1


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("slope", [0.03, 0.1, 0.3])
def test_chosen_length_is_within_five_percent_of_the_best(slope: float, noise: float) -> None:
    """A chain of nodes of probability 0.8 each, on a machine where a draft token costs `slope` of a plain step."""

    def goodput(tokens: int) -> float:
        gain = sum(0.8**depth for depth in range(tokens))
        return gain / (0.01 * (1 + slope * (tokens - 1)) + 1e-4)

    best = max(goodput(tokens) for tokens in range(1, 65))
    chosen = play(lambda tokens: 0.01 * (1 + slope * (tokens - 1)), lambda node: 0.8, noise=noise).best
    assert goodput(chosen) >= 0.95 * best


def test_text_that_turns_predictable_or_unpredictable_is_noticed() -> None:
    def cost(tokens: int) -> float:
        return 0.01 * (1 + 0.1 * (tokens - 1))

    budget = play(cost, lambda node: 0.0)
    assert budget.best == 1
    play(cost, lambda node: 0.95, budget=budget)
    assert budget.best >= 8
    play(cost, lambda node: 0.0, budget=budget)
    assert budget.best == 1
