"""Drafts rest where steps without them are faster by the clock, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead.budget.backoff import APART
from lookahead.budget.rates import REST, SHORT, Rates

ROWS = 8
PLAIN = 1.0  # seconds of a step without drafts, which gives ROWS tokens


def played(rates: Rates, steps: int, gain: float, speed: float = 1.2, noise: float = 0.0, seed: int = 0) -> list[bool]:
    """Which steps had drafts. gain: times as many tokens a second with drafts. The first step after a change takes longer."""
    random, drafted, before = np.random.default_rng(seed), [], True
    for _ in range(steps):
        drafts = not rates.rest(ROWS, speed)
        seconds = (1.5 if drafts else PLAIN) * (1 + noise * random.random()) * (2 if drafts != before else 1)
        emitted = random.poisson(1.5 * gain * ROWS) if drafts else ROWS
        rates.note(ROWS, drafts, seconds, int(emitted))
        drafted.append(drafts)
        before = drafts
    return drafted


def test_drafts_that_gain_are_hardly_ever_left_out() -> None:
    for seed in range(20):
        drafted = played(Rates(), 2000, 1.15, noise=0.2, seed=seed)
        assert np.mean(drafted) > 0.92  # the first look, at few steps, may be wrong once


def test_looks_are_rare_and_late_where_much_is_gained() -> None:
    drafted = played(Rates(), 2000, 2.0, speed=1.8)
    assert all(drafted[:REST])
    assert 6 * SHORT <= drafted.count(False) <= 14 * SHORT


@pytest.mark.parametrize("gain", [0.6, 0.85])
def test_drafts_that_lose_rest_ever_longer_and_are_tried_again(gain: float) -> None:
    for seed in range(20):
        drafted = played(Rates(), 4000, gain, noise=0.1, seed=seed)
        assert drafted[: 2 * APART] == [True] * 2 * APART
        assert np.mean(drafted[1000:]) < 0.2
        assert any(drafted[1000:]), "drafts get a chance now and then"


def test_try_that_clearly_loses_is_short() -> None:
    for gain, longest in ((0.2, 4), (0.5, 6), (0.9, 2 * APART)):
        rates = Rates()
        drafted = played(rates, 3 * APART + REST, gain)
        tried = played(rates, 2 * APART, gain)
        assert not any(drafted[-REST:])
        assert 2 <= sum(tried) <= longest, gain


def test_rest_ends_when_drafts_gain_again() -> None:
    rates = Rates()
    played(rates, 3 * APART + REST + 2 * APART, 0.5)
    later = played(rates, 4 * REST + 2 * APART + 16 * REST, 1.3)
    assert np.mean(later[4 * REST + 2 * APART :]) > 0.9


def test_longest_rest_ends_too() -> None:
    rates = Rates()
    drafted = played(rates, 200 * REST, 0.5)
    runs = "".join("d" if each else "p" for each in drafted).split("d")
    assert 16 * REST <= max(map(len, runs)) <= 16 * REST + 2


def test_rows_of_other_numbers_are_weighed_apart() -> None:
    rates = Rates()
    played(rates, 3 * APART, 0.5)
    assert rates.rest(ROWS, 1.2)
    assert not rates.rest(1, 1.2)


def test_rows_that_back_off_are_weighed_with_the_steps_between_their_drafts() -> None:
    """One step in three has a draft, which takes as long as two steps and gives a tenth of a token more."""
    for seed in range(10):
        rates, random, rested = Rates(), np.random.default_rng(seed), []
        for step in range(3000):
            rests = rates.rest(1, 1.2)
            drafted = step % 3 == 0 and not rests
            rates.note(
                1, drafted, (2.0 if drafted else PLAIN) * random.normal(1, 0.03), 1 + (drafted and random.random() < 0.1)
            )
            rested.append(rests)
        assert np.mean(rested[500:]) > 0.8
