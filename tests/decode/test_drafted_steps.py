"""Steps with drafts that are one native call: what single steps give, and what they leave with the drafter, bit by bit."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lookahead.backends.cpu.linear import lay_out
from lookahead.budget.rates import Rates
from lookahead.decode import drafted_steps
from lookahead.decode.accounting import Accounting
from lookahead.decode.drafted_steps import DraftedSteps
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.request import Generation
from lookahead.decode.row import RunningRow
from lookahead.decode.sampling import Sampling
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import Step
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import DraftTree
from lookahead.forward.target import TargetModel
from lookahead.models.probe import probed
from tests.architectures import NEW_TOKENS, plain_answers
from tests.decode.test_plain_steps import PROMPTS, demo
from tests.support.depth import deep

BEGINNING = [*range(20, 50)]  # which prompts share: one row prefills it, the others wait for that
LONG = [[*BEGINNING, 5], [*BEGINNING, 7, 3], [8, 4], [*range(60, 100)], [*BEGINNING, 9, 6, 2], [3, *range(60, 99)]]
FIXED = DraftOptions(adaptive=False, decoding_length=16)
ADDRESSES = ("texts", "common")  # of the drafter's shared arrays: where sorted texts are, and places in them


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets how many steps each native call takes."""
    steps: list[int] = []
    original = DraftedSteps._take_over

    def noted(self: DraftedSteps, *arguments: Any) -> None:
        steps.append(arguments[-1])
        original(self, *arguments)

    monkeypatch.setattr(DraftedSteps, "_take_over", noted)
    return steps


def requests_of(engine: DecodingEngine, room: int, stop: Sequence[int] = (), prompts: Sequence[list[int]] = PROMPTS * 2):
    sampling = Sampling(stop_token_ids=tuple(stop))
    return [engine.request(prompt, room + 3 * k, sampling) for k, prompt in enumerate(prompts)]


def ran(engine: DecodingEngine, requests: Sequence[Generation]) -> list[list[int]]:
    for _ in engine.run(requests):
        pass
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


def same_state(a: Drafter, b: Drafter) -> bool:
    """All that has been learned."""
    shared = [name for name in a.shared.names if name not in ADDRESSES]
    return all(np.array_equal(getattr(a.shared, name), getattr(b.shared, name), equal_nan=True) for name in shared)


@pytest.mark.parametrize(
    ("batch_size", "length", "strategy", "prompts", "prefill_chunk"),
    [
        (1, 16, "hierarchical", PROMPTS * 2, 512),
        (3, 32, "hierarchical", LONG, 16),
        *deep([(3, 8, "single", PROMPTS * 2, 512), (4, 16, "hierarchical", LONG, 512)]),
    ],
)
def test_answers_counts_and_what_is_learned_are_those_of_single_steps(
    batch_size: int,
    length: int,
    strategy: str,
    prompts: list[list[int]],
    prefill_chunk: int,
    taken: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three trees of 32 are more tokens than a program has room for at first. Prompts are prefilled in chunks, or at once."""
    target, options = demo(), DraftOptions(strategy=strategy, adaptive=False, decoding_length=length)
    answers, requests, engine = run_of(target, options, batch_size, prompts=prompts, prefill_chunk=prefill_chunk)
    assert max(taken) > 1
    assert sum(taken) > 0.8 * engine.accounting.steps
    monkeypatch.setattr(drafted_steps.DraftedSteps, "_most", lambda *_: 0)
    taken.clear()
    singly, one_by_one, other = run_of(target, options, batch_size, prompts=prompts, prefill_chunk=prefill_chunk)
    assert not taken
    assert answers == singly
    for request, single in zip(requests, one_by_one, strict=True):
        assert (request.steps, request.draft_tokens) == (single.steps, single.draft_tokens)
        assert request.accepted_by_source == single.accepted_by_source
        beyond = request.accepted_tokens - (len(request.token_ids) - 1 - request.steps)
        assert request.accepted_tokens == single.accepted_tokens
        assert beyond in (0, 1)  # a draft token that ended the answer has no token of the model's behind it
    assert engine.accounting.steps == other.accounting.steps == engine.clock.steps == other.clock.steps
    assert engine.clock.taken_in == other.clock.taken_in
    assert same_state(engine.drafter, other.drafter)


def test_where_the_budget_chooses(taken: list[int]) -> None:
    target = demo()
    plain, _, _ = run_of(target, DraftOptions("off"), 3, room=60)
    assert not taken
    answers, requests, engine = run_of(target, DraftOptions(), 3, room=60)
    assert answers == plain
    assert sum(taken) > 0
    assert sum(request.accepted_tokens for request in requests) > 0
    assert engine.speedup is not None
    assert engine.clock.forward > 0 < engine.clock.draft


def test_a_token_that_ends_an_answer_ends_the_call(taken: list[int]) -> None:
    target = demo()
    (first, *_), _, _ = run_of(target, FIXED, 1)
    stop = first[20]
    answers, _, _ = run_of(target, FIXED, 2, stop=[stop])
    assert answers[0] == first[: first.index(stop) + 1]
    assert max(taken) > 1


def test_answers_that_are_given(taken: list[int]) -> None:
    """Scores are computed all the same; what a row is not given it chooses."""
    target = demo()
    (first, second, *_), _, _ = run_of(target, FIXED, 1)
    engine = DecodingEngine(target, Drafter(options=FIXED), 2)
    requests = requests_of(engine, 30, prompts=PROMPTS[:2])
    requests[0].forced = [(token + 1) % 4000 + 5 for token in first[:30]]
    assert ran(engine, requests) == [requests[0].forced, second[:33]]
    assert max(taken) > 1


def test_who_observes_steps_sees_each(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def seen_steps() -> list[Step]:
        seen: list[Step] = []
        engine = DecodingEngine(target, Drafter(options=FIXED), 2)
        requests = requests_of(engine, 30, prompts=PROMPTS[:3])
        for request in requests:
            request.observer = seen.append
        answers = ran(engine, requests)
        assert sorted(token for step in seen for token in step.said) == sorted(token for a in answers for token in a[1:])
        return seen

    target = demo()
    natively = seen_steps()
    assert max(taken) > 1
    monkeypatch.setattr(drafted_steps.DraftedSteps, "_most", lambda *_: 0)
    for step, single in zip(natively, seen_steps(), strict=True):
        assert dataclasses.replace(step, tree=single.tree) == single
        for field in dataclasses.fields(DraftTree):
            assert np.array_equal(getattr(step.tree, field.name), getattr(single.tree, field.name)), field.name


def test_rows_that_back_off_are_drafted_for_again(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that begins or ends in the middle of a call; the drafter hears of what they emit meanwhile."""
    original = Accounting.record_drafted

    def noted(self: Accounting, rows: list[RunningRow], *arguments: Any) -> None:
        assert all(row.length == len(row.drafts.text) + row.unnoticed for row in rows)
        original(self, rows, *arguments)
        rows[0].backoff.until = self.steps + 3  # it rests for two steps

    monkeypatch.setattr(Accounting, "record_drafted", noted)
    engine = DecodingEngine(demo(), Drafter(options=DraftOptions()), 3)
    answers = ran(engine, requests_of(engine, 60))
    assert answers == run_of(demo(), DraftOptions("off"), 3, room=60)[0]
    assert len(taken) > 1


def test_whether_drafts_rest_is_asked_for_as_many_rows_as_hold_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while one of them prefills: steps are noted for that many."""
    original, asked = Rates.rest, []

    def rest(self: Rates, rows: int, speed: float) -> bool:
        asked.append(rows)
        return original(self, rows, speed)

    monkeypatch.setattr(Rates, "rest", rest)
    engine = DecodingEngine(demo(), Drafter(), 2)
    ran(engine, requests_of(engine, 12, prompts=PROMPTS[:4]))
    assert asked == sorted(asked, reverse=True), "two, and one only at the end"
    assert 2 in asked


@pytest.mark.parametrize(
    ("dtype", "how"),
    [("bfloat16", {"quantize": "int4"}), *deep([("float16", {"quantize": "int8"}), ("float32", {"kv_dtype": "int8"})])],
)
def test_halves_and_quantised_models_too(dtype: str, how: dict[str, str], taken: list[int]) -> None:
    target = demo(dtype, **how)
    answers, _, engine = run_of(target, FIXED, 3, room=20)
    assert max(taken) > 1
    assert answers == run_of(target, DraftOptions("off"), 1, room=20)[0]
    assert len(engine.drafter.recycled)


@pytest.mark.parametrize(("architecture", "threads"), [("gemma3", 2), *deep([("gpt2", 1), ("mistral", 2), ("mistral", 1)])])
def test_answers_are_those_of_generate(tiny_model: Any, architecture: str, threads: int, taken: list[int]) -> None:
    """Also of layers that see a window only, which the answers outgrow."""
    target = probed(lay_out(copy.deepcopy(tiny_model(architecture))), architecture)
    assert target.program is not None, target.reason
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine = DecodingEngine(target, Drafter(options=FIXED), 2)
        answers = ran(engine, requests_of(engine, NEW_TOKENS, prompts=PROMPTS))
    finally:
        torch.set_num_threads(before)
    assert max(taken) > 1
    expected = [answer for _, answer in plain_answers(architecture, PROMPTS)]
    assert [answer[: len(all_of)] for answer, all_of in zip(answers, expected, strict=True)] == expected
