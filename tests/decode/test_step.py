"""The native half-steps: whichever stages Python takes its part between, answers, counts and what is learned are the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lookahead.decode.engine import DecodingEngine
from lookahead.decode.request import Generation
from lookahead.decode.sampling import Sampling
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.forward.target import TargetModel
from lookahead.job import setup
from lookahead.step.batch import StepBatch
from tests.support.depth import deep
from tests.support.jobs import MODEL

PROMPTS = [[1, 5, 9, 4], [7, 7, 3], [2, 8], [11, 12, 13, 14, 15], [6]]
BEGINNING = [*range(20, 50)]  # which prompts share: one row prefills it, the others wait for that
LONG = [[*BEGINNING, 5], [*BEGINNING, 7, 3], [8, 4], [*range(60, 100)], [*BEGINNING, 9, 6, 2], [3, *range(60, 99)]]
FIXED = DraftOptions(adaptive=False, decoding_length=16)
ADDRESSES = ("texts", "common")  # of the drafter's shared arrays: where sorted texts are, and indices into them


def demo(dtype: str = "float32", **how: Any) -> TargetModel:
    target = setup.load_model(str(MODEL), dtype, "cpu", **how)
    assert target.program is not None
    return target


def requests_of(engine: DecodingEngine, room: int, stop: Sequence[int] = (), prompts: Sequence[list[int]] = PROMPTS * 2):
    sampling = Sampling(stop_token_ids=tuple(stop))
    return [engine.request(prompt, room + 3 * k, sampling) for k, prompt in enumerate(prompts)]


def ran(engine: DecodingEngine, requests: Sequence[Generation]) -> list[list[int]]:
    list(engine.run(requests))
    for request in requests:
        assert request.error is None, request.error
    return [request.token_ids for request in requests]


def run_of(
    target: TargetModel,
    options: DraftOptions,
    batch_size: int,
    room: int = 40,
    stop: Sequence[int] = (),
    prompts: Sequence[list[int]] = PROMPTS * 2,
    prefill_chunk: int = 512,
) -> tuple[list[list[int]], list[Generation], DecodingEngine]:
    engine = DecodingEngine(target, Drafter(options=options), batch_size, prefill_chunk)
    requests = requests_of(engine, room, stop, prompts)
    return ran(engine, requests), requests, engine


@pytest.mark.parametrize(
    ("batch_size", "length", "strategy", "prompts", "prefill_chunk"),
    [
        (1, 16, "hierarchical", PROMPTS * 2, 512),
        (3, 32, "hierarchical", LONG, 16),
        *deep([(3, 8, "single", PROMPTS * 2, 512), (4, 16, "hierarchical", LONG, 512)]),
    ],
)
def test_stages_one_by_one_are_one_call(
    batch_size: int, length: int, strategy: str, prompts: list[list[int]], prefill_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are prefilled in chunks, or at once."""
    target, options = demo(), DraftOptions(strategy=strategy, adaptive=False, decoding_length=length)
    answers, requests, engine = run_of(target, options, batch_size, prompts=prompts, prefill_chunk=prefill_chunk)
    assert answers == run_of(target, DraftOptions("off"), batch_size, prompts=prompts)[0]
    monkeypatch.setattr(StepBatch, "_is_staged", lambda *_: True)
    staged, by_stages, other = run_of(target, options, batch_size, prompts=prompts, prefill_chunk=prefill_chunk)
    assert staged == answers
    for request, single in zip(requests, by_stages, strict=True):
        assert (request.steps, request.draft_tokens) == (single.steps, single.draft_tokens)
        assert request.accepted_by_source == single.accepted_by_source
        beyond = request.accepted_tokens - (len(request.token_ids) - 1 - request.steps)
        assert request.accepted_tokens == single.accepted_tokens == request.accepted_by_source.total()
        assert beyond in (0, 1)  # a draft token that ended the answer has no token of the model's behind it
    assert engine.accounting.steps == other.accounting.steps == engine.clock.steps
    assert engine.clock.prefilled == other.clock.prefilled
    a, b = engine.drafter.shared, other.drafter.shared
    assert all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for name in a.names if name not in ADDRESSES)


def test_budget_and_rests_leave_plain_tokens_and_forget_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that nothing is drafted for for long, and that are drafted for again, draft from all that they have emitted."""
    target = demo()
    plain, _, _ = run_of(target, DraftOptions("off"), 3, room=60)
    answers, requests, engine = run_of(target, DraftOptions(), 3, room=60)
    assert answers == plain
    assert sum(request.accepted_tokens for request in requests) > 0
    assert engine.speedup is not None
    assert engine.clock.forward > 0 < engine.clock.draft
    engine = DecodingEngine(target, Drafter(options=DraftOptions()), 3)
    monkeypatch.setattr(engine.budget, "drafts", lambda rows: engine.accounting.steps % 50 > 40)
    assert ran(engine, requests_of(engine, 60)) == plain
    engine.drafter.remember(())
    held = sum(len(run.suffixes) for run in engine.drafter.session.runs)
    assert held >= sum(map(len, plain))


def test_tokens_that_end_answers_and_forced_answers() -> None:
    """Scores are computed all the same; what is not forced the row chooses."""
    target = demo()
    (first, second, *_), _, _ = run_of(target, FIXED, 1)
    stop = first[20]
    assert run_of(target, FIXED, 2, stop=[stop])[0][0] == first[: first.index(stop) + 1]
    engine = DecodingEngine(target, Drafter(options=FIXED), 2)
    requests = requests_of(engine, 30, prompts=PROMPTS[:2])
    requests[0].forced = [(token + 1) % 4000 + 5 for token in first[:30]]
    assert ran(engine, requests) == [requests[0].forced, second[:33]]


def test_one_stall_does_not_end_drafts(monkeypatch):
    """Kernels that are compiled in the first drafted steps, or a machine that was asleep, tell nothing about later ones."""
    propose, stalls = StepBatch.propose, [0.4, 0.4]

    def slow(self, budget, step, drafts):
        propose(self, budget, step, drafts)
        if drafts and stalls:
            time.sleep(stalls.pop())

    monkeypatch.setattr(StepBatch, "propose", slow)
    engine = DecodingEngine(demo(), Drafter((), DraftOptions(adaptive=True)))
    prompt = [5, 6, 7, 8] * 8
    for _ in range(4):
        requests = requests_of(engine, 120, prompts=[prompt])
        ran(engine, requests)
    assert not stalls
    assert requests[0].steps < 0.7 * len(requests[0].token_ids)


def test_clock_counts_what_prompts_take_over_from_each_other():
    engine = DecodingEngine(demo(), Drafter((), FIXED), batch_size=len(LONG))
    prompts = sum(map(len, LONG))
    ran(engine, requests_of(engine, 4, prompts=LONG))
    assert engine.clock.taken_over == prompts - engine.clock.prefilled >= 2 * len(BEGINNING)
