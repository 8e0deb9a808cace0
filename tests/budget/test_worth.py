"""Whether a source of drafts pays."""

from __future__ import annotations

import pytest

from lookahead.budget.worth import ITS_OWN, LONGEST_REST, REST, TRIAL, SourceUtility
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.step.batch import StepBatch
from tests.support.depth import deep

STEP, SAID = 10e-3, 4


def uses(worth: SourceUtility, steps: int, seconds: float, tokens: int, rows: int = 1) -> list[bool]:
    """Whether each step used the source, which takes `seconds` and gives `tokens` where it is used."""
    used = []
    for _ in range(steps):
        used.append(worth.pays)
        worth.observe(seconds if worth.pays else 0.0, tokens if worth.pays else 0, STEP, SAID, rows)
    return used


def test_source_that_saves_more_time_than_it_takes_is_always_used():
    assert all(uses(SourceUtility(), 5_000, 0.9 * ITS_OWN * STEP / SAID, 1))


def test_source_that_takes_more_than_it_saves_is_hardly_used():
    used = uses(SourceUtility(), 100_000, 1.1 * ITS_OWN * STEP / SAID, 1)
    assert used[: TRIAL + REST] == [True] * TRIAL + [False] * REST
    assert used[TRIAL + REST]  # tried again
    assert sum(used[50_000:]) / 50_000 < 1.5 * TRIAL / LONGEST_REST


@pytest.mark.parametrize(("rows", "trial"), [(2, TRIAL // 2), (8, TRIAL // 4), (32, TRIAL // 4)])
def test_batch_is_judged_sooner(rows, trial):
    used = uses(SourceUtility(), TRIAL + REST, 1e-3, 0, rows)
    assert used[: trial + REST] == [True] * trial + [False] * REST


def test_source_that_begins_to_pay_is_noticed():
    worth = SourceUtility()
    uses(worth, 2_000, 1e-3, 0)
    assert all(uses(worth, 10_000, 1e-4, 1)[LONGEST_REST:])


@pytest.mark.parametrize("adaptive", [True, *deep([False])])
def test_recycling_that_does_not_pay_is_left_off_where_lengths_are_chosen(tiny_model, monkeypatch, adaptive):
    from lookahead.models.probe import probed

    monkeypatch.setattr("lookahead.draft.drafter.SourceUtility", lambda: SourceUtility(0.0))  # what it gives counts nothing
    engine = DecodingEngine(probed(tiny_model("llama")), Drafter([], DraftOptions(decoding_length=16, adaptive=adaptive)), 2)
    recycled, accept = [], StepBatch.accept
    monkeypatch.setattr(
        StepBatch, "accept", lambda self, *scores: (recycled.extend([1] * bool(self.call["recycles"])), accept(self, *scores))
    )
    answers = [engine.request([5, 6, 7 + k % 40], 48) for k in range(60)]
    list(engine.run(answers))
    steps = engine.clock.steps
    assert steps > 2 * TRIAL
    assert (len(recycled) < steps / 2) == adaptive
    assert all(answer.error is None for answer in answers)
    engine.forget()
    assert engine.drafter.recycled_utility.pays
