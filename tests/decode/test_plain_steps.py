"""Steps of plain decoding that are one native call: the same tokens as step by step, and never beyond where somebody waits."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lookahead.backends.cpu.linear import lay_out
from lookahead.decode import plain_steps
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.sampling import Sampling
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import Observer, Step
from lookahead.draft.options import DraftOptions
from lookahead.forward.slots import PackedSlots
from lookahead.forward.target import TargetModel
from lookahead.job import setup
from lookahead.models.probe import probed
from tests.architectures import NEW_TOKENS, plain_answers
from tests.support.depth import deep
from tests.support.jobs import MODEL

PROMPTS = [[1, 5, 9, 4], [7, 7, 3], [2, 8], [11, 12, 13, 14, 15], [6]]
ONE_BY_ONE = 1


def demo(dtype: str = "float32", **how: Any) -> TargetModel:
    target = setup.load_model(str(MODEL), dtype, "cpu", **how)
    assert target.program is not None
    return target


@pytest.fixture
def target() -> TargetModel:
    return demo()


class Watched(PackedSlots):
    """Notes how many steps each native call took."""

    def __init__(self, target: TargetModel) -> None:
        super().__init__(target)
        self.taken: list[int] = []

    def plain_steps(self, *asked):
        emitted = super().plain_steps(*asked)
        self.taken.append(len(emitted[0]))
        return emitted


def answers_of(
    target: TargetModel, batch_size: int = 1, room: int = 40, observer: Observer | None = None, stop: Sequence[int] = ()
) -> tuple[list[list[int]], list[int], DecodingEngine]:
    """(answers, steps of each native call, the engine)."""
    made: list[Watched] = []

    def watched(each: TargetModel) -> Watched:
        made.append(Watched(target))
        return made[-1]

    target_watched = dataclasses.replace(target, slots_factory=watched)
    engine = DecodingEngine(target_watched, Drafter(options=DraftOptions("off")), batch_size)
    requests = [engine.request(prompt, room + 3 * k, Sampling(stop_token_ids=tuple(stop))) for k, prompt in enumerate(PROMPTS)]
    for request in requests:
        request.observer = observer
    for _ in engine.run(requests):
        pass
    return [request.token_ids for request in requests], [steps for slots in made for steps in slots.taken], engine


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_and_counts_are_those_of_single_steps(
    target: TargetModel, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, taken, engine = answers_of(target, batch_size)
    assert max(taken) > 1
    monkeypatch.setattr(plain_steps, "MOST", ONE_BY_ONE)
    singly, taken, one_by_one = answers_of(target, batch_size)
    assert set(taken) == {1}
    assert answers == singly
    assert engine.accounting.steps == one_by_one.accounting.steps == engine.clock.steps


def test_a_token_that_ends_an_answer_ends_the_call(target: TargetModel) -> None:
    (first, *_), _, _ = answers_of(target)
    stop = first[20]
    answers, _, engine = answers_of(target, stop=[stop])
    assert answers[0] == first[: first.index(stop) + 1]
    assert engine.clock.steps == sum(map(len, answers))  # no step beyond the end; the first token comes from the prefill


def test_answers_that_are_given(target: TargetModel) -> None:
    """Scores are computed all the same; what a row is not given it chooses."""
    (first, second, *_), _, _ = answers_of(target)
    engine = DecodingEngine(target, Drafter(options=DraftOptions("off")), 2)
    requests = [engine.request(prompt, 30) for prompt in PROMPTS[:2]]
    requests[0].forced = [(token + 1) % 4000 + 5 for token in first[:30]]
    for _ in engine.run(requests):
        pass
    assert requests[0].token_ids == requests[0].forced
    assert requests[1].token_ids == second[:30]
    assert engine.clock.steps < 60


def test_each_step_is_observed(target: TargetModel) -> None:
    seen: list[Step] = []
    answers, taken, _ = answers_of(target, observer=seen.append)
    assert max(taken) > 1
    assert [token for step in seen for token in step.said] == [token for answer in answers for token in answer[1:]]
    assert all(step.number > 0 and len(step.tree) == 1 for step in seen)
    assert [step.tree.token_ids[0] for step in seen[:3]] == answers[0][:3]


def test_rests_of_drafts_end_when_they_would_step_by_step(target: TargetModel) -> None:
    """Where drafts rest, at most as many steps are taken at once as are left of the rest."""
    engine = DecodingEngine(target, Drafter(options=DraftOptions(adaptive=True)))
    lefts: list[tuple[int, int]] = []
    original: Callable[..., list[list[int]]] = PackedSlots.plain_steps

    def noted(slots, tokens, most, *others):
        lefts.append((most, engine.accounting.rates.steps_left(1)))
        return original(slots, tokens, most, *others)

    engine.accounting.rates._of(1)._state = "rests"
    engine.accounting.rates._of(1)._left = 21
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedSlots, "plain_steps", noted)
        engine.generate(PROMPTS[0], 60)
    assert lefts
    assert all(most <= left for most, left in lefts)
    assert engine.accounting.rates._of(1)._state != "rests"


@pytest.mark.parametrize(
    ("dtype", "how"),
    [("bfloat16", {"quantize": "int4"}), *deep([("float16", {"quantize": "int8"}), ("float32", {"kv_dtype": "int8"})])],
)
def test_halves_and_quantised_models_too(dtype: str, how: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = demo(dtype, **how)
    assert found.dtype == getattr(torch, dtype)
    answers, taken, _ = answers_of(found, 3, room=20)
    assert max(taken) > 1
    monkeypatch.setattr(plain_steps, "MOST", ONE_BY_ONE)
    assert answers == answers_of(found, 3, room=20)[0]


@pytest.mark.parametrize(
    ("architecture", "threads"), [("mistral", 2), ("gemma3", 1), *deep([("gpt2", 2), ("mistral", 1), ("gemma3", 2)])]
)
def test_answers_are_those_of_generate(tiny_model: Any, architecture: str, threads: int) -> None:
    """Also of layers that see a window only, which the answers outgrow."""
    target = probed(lay_out(copy.deepcopy(tiny_model(architecture))), architecture)
    assert target.program is not None, target.reason
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        answers, taken, _ = answers_of(target, 2, room=NEW_TOKENS)
    finally:
        torch.set_num_threads(before)
    assert max(taken) > 1
    expected = [answer for _, answer in plain_answers(architecture, PROMPTS)]
    assert [answer[: len(all_of)] for answer, all_of in zip(answers, expected, strict=True)] == expected
