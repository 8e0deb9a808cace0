"""Draft sources of a user's own: whatever they do, the tokens are those of plain greedy decoding, and good ones save steps."""

import logging
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from lookahead.api import GenerationParams, LookaheadEngine
from lookahead.bench.replay import replay_with
from lookahead.budget.policy import Budget
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.sources import LONGEST, MOST_PATHS, DraftSource
from lookahead.errors import UsageError
from lookahead.forward.target import TargetModel
from lookahead.models.probe import probed
from lookahead.step.batch import RowState, StepBatch
from tests.architectures import NEW_TOKENS, decoded, plain_answers, random_prompts
from tests.support.depth import deep, some_deep

Answers = list[tuple[list[int], list[int]]]
VOCAB_SIZE = 97


class Source:
    """propose(rest of the answer, context) of a test, for answers that are known. Remembers what it observed."""

    def __init__(self, answers: Answers, propose: Callable[[list[int], np.ndarray], Any], name: str = "mine"):
        self.answers, self._propose, self.name = answers, propose, name
        self.observed: dict[int, list[int]] = {}
        self.over: set[int] = set()
        self.calls = 0

    def propose(self, request: int, context: np.ndarray, most: int) -> Any:
        self.calls += 1
        assert request not in self.over
        text = context.tolist()
        for prompt, answer in self.answers:
            if text[: len(prompt)] == prompt and text[len(prompt) :] == answer[: len(text) - len(prompt)]:
                return self._propose(answer[len(text) - len(prompt) :], context)
        return []

    def observe(self, request: int, token_ids: Sequence[int], ended: bool) -> None:
        self.observed.setdefault(request, []).extend(token_ids)
        if ended:
            self.over.add(request)


def perfect(rest: list[int], context: np.ndarray) -> Any:
    return [rest]


def wrong(rest: list[int], context: np.ndarray) -> Any:
    return [[(token + 1) % VOCAB_SIZE for token in rest]]


def rather_good(rest: list[int], context: np.ndarray) -> Any:
    """Three tokens of which the last is wrong, and other branches."""
    return [(*rest[:2], 5), rest[:1], [7, 8, 9], np.array(rest[:4], np.int64)]


def slow(rest: list[int], context: np.ndarray) -> Any:
    time.sleep(0.002)
    return iter([rest[:2]])


def at_random(rest: list[int], context: np.ndarray) -> Any:
    random = np.random.default_rng(len(context))
    return [random.integers(0, VOCAB_SIZE, random.integers(0, 9)).tolist() for _ in range(random.integers(0, 12))]


def raising(rest: list[int], context: np.ndarray) -> Any:
    raise RuntimeError("no index")


def raising_later(rest: list[int], context: np.ndarray) -> Iterator[list[int]]:
    yield rest
    raise RuntimeError("lost the index")


def writing(rest: list[int], context: np.ndarray) -> Any:
    context[0] = 3
    return []


NONSENSE = {
    "ids outside": lambda rest, context: [[*rest[:1], VOCAB_SIZE]],
    "negative": lambda rest, context: [[-1]],
    "floats": lambda rest, context: [[1.0]],
    "bools": lambda rest, context: [[True]],
    "text": lambda rest, context: "answer",
    "list of texts": lambda rest, context: ["answer"],
    "number": lambda rest, context: 5,
    "flat": lambda rest, context: [1, 2, 3],
    "too long": lambda rest, context: [[1] * (LONGEST + 1)],
    "endless": lambda rest, context: ([1, n] for n in iter(int, 1)),
    "too many": lambda rest, context: [[n % VOCAB_SIZE, n // VOCAB_SIZE] for n in range(MOST_PATHS + 1)],
    "raises": raising,
    "raises later": raising_later,
    "writes": writing,
}
SOURCES = {
    "perfect": perfect, "wrong": wrong, "rather good": rather_good, "slow": slow, "random": at_random,
    "none": lambda rest, context: None, "empty": lambda rest, context: [[], ()],
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tiny_model):
    return probed(tiny_model("llama"), "llama")


@pytest.fixture(scope="module")
def answers():
    return plain_answers("llama", random_prompts((1, 9, 20, 5, 14)))


def run(target: TargetModel, answers: Answers, source: Any, batch_size: int = 1, **options: Any) -> Any:
    """Generations of all prompts; each must have the tokens of plain decoding."""
    drafter = Drafter([], DraftOptions(**{"adaptive": False, **options}), sources=[source])
    engine = DecodingEngine(target, drafter, batch_size)
    done = decoded(engine, [prompt for prompt, _ in answers])
    for generation, (_, answer) in zip(done, answers, strict=True):
        assert generation.token_ids == answer
    return done


def edl(generations: Any) -> float:
    steps, tokens = sum(g.steps for g in generations), sum(len(g.token_ids) - 1 for g in generations)
    return tokens / steps


WAYS: list[dict[str, Any]] = [{}, {"adaptive": True}, {"strategy": "single"}, {"strategy": "parallel", "decoding_length": 7}]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, WAYS[1]) for kind in ("random", "wrong", "none")),
        *deep((kind, WAYS[1]) for kind in ("perfect", "slow", "empty")),
        *((kind, way) for kind in ("rather good",) for way in WAYS if way != WAYS[1]),
        *deep((kind, way) for kind in SOURCES if kind != "rather good" for way in WAYS if way != WAYS[1]),
    ],
)
def test_any_source_at_any_batch_size_yields_the_plain_greedy_tokens(target, answers, kind, options, caplog):
    for batch_size in (1, 4):
        source = Source(answers, SOURCES[kind])
        done = run(target, answers, source, batch_size, **options)
        assert sorted(source.observed.values()) == sorted(answer for _, answer in answers)
        assert source.over == set(range(len(answers)))
        if not options.get("adaptive"):  # asked in each step but those that have room for one token only
            assert 0 <= sum(g.steps for g in done) - source.calls <= len(answers)
    assert not caplog.records


@pytest.mark.parametrize("kind", some_deep(NONSENSE, list(NONSENSE)[::2]))
def test_source_that_fails_is_disabled_with_one_warning_and_changes_nothing(target, answers, kind, caplog):
    for batch_size in (1, 4):
        caplog.clear()
        source = Source(answers, NONSENSE[kind])
        with caplog.at_level(logging.WARNING):
            done = run(target, answers, source, batch_size)
        assert source.calls == 1
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert 'draft source "mine" is disabled: ' in caplog.text
        assert not any(generation.accepted_by_source["mine"] for generation in done)


def test_observe_that_raises_disables_the_source_too(target, answers, caplog):
    source = Source(answers, perfect)
    source.observe = raising
    run(target, answers, source)
    assert source.calls == 0  # the first token was observed before
    assert len(caplog.records) == 1


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("strategy", ["hierarchical", "parallel", "single"])
def test_perfect_source_raises_the_edl_and_is_credited(target, answers, batch_size, strategy):
    without = run(target, answers, Source(answers, SOURCES["none"]), batch_size, strategy=strategy)
    done = run(target, answers, Source(answers, perfect), batch_size, strategy=strategy)
    assert edl(done) > 2 * edl(without)
    by_source = sum(generation.accepted_by_source["mine"] for generation in done)
    assert by_source > 0.8 * sum(generation.accepted_tokens for generation in done)


def test_wrong_source_costs_hardly_any_edl(answers):
    """Its branches lose against ours as soon as it is known."""
    pairs = [(prompt, answer) for prompt, answer in answers] * 6
    options = DraftOptions(decoding_length=8, adaptive=False)
    alone = replay_with(Drafter([], options), pairs)
    beside = replay_with(Drafter([], options, sources=[Source(answers, wrong)]), pairs)
    assert beside.edl > 0.97 * alone.edl


class OnlyEven:
    """A guide under which the text goes on with 4, and then with even tokens only."""

    def forced(self) -> list[int]:
        return [4]

    def possible(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[bool]:
        kept = [True]
        for token, parent in zip(token_ids[1:], parents[1:], strict=True):
            kept.append(kept[parent] and token % 2 == 0)
        return kept


def test_proposals_that_a_grammar_forbids_are_not_drafted():
    source = Source([([1], [2, 4, 6, 7, 8, 10])], lambda rest, context: [rest, [5, 6], [4, 6, 8, 10]])
    drafter = Drafter([], DraftOptions(decoding_length=8, adaptive=False), sources=[source])
    batch = StepBatch(drafter, 100)
    batch.add(RowState(drafter.start([1]), 1, 20, 20, None, (), None, True, OnlyEven()))
    batch.emit(0, [2], 16)
    batch.propose(Budget(), 1, True)
    (tree,) = batch.trees_of([0])
    assert tree.token_ids.tolist() == [2, 4, 6, 8, 10]
    assert [drafter.source_names[number] for number in tree.sources[2:]] == ["mine"] * 3


def test_price_and_lengths_hold_for_proposals_too():
    source = Source([([1], list(range(2, 60)))], perfect)
    drafter = Drafter([], DraftOptions(decoding_length=16, adaptive=False), sources=[source])
    row = drafter.start([1])
    assert row.draft(budget=5).token_ids.tolist()[:4] == [1, 2, 3, 4]
    assert row.draft(budget=5).draft_tokens == 5
    assert row.draft(branch_length=3).depths().max() == 3
    assert row.draft().draft_tokens == 15
    tree = row.draft(price=0.1)
    assert 0 < tree.draft_tokens < 15
    assert tree.probabilities.min() >= 0.1
    assert row.draft(branch_length=0).draft_tokens == 0


def test_slow_source_rests_where_lengths_are_chosen_by_what_pays(target, answers):
    def useless(rest, context):
        time.sleep(0.003)
        return [[3]]

    source = Source(answers, useless)
    done = run(target, answers * 6, source, adaptive=True, session_tokens=0)
    assert source.calls < 0.7 * sum(generation.steps for generation in done)


def test_example_of_the_docstring_drafts_what_it_says():
    example = textwrap.dedent("\n".join((DraftSource.__doc__ or "").split("Example:")[1].splitlines()[2:]))
    held = {"Drafter": Drafter}
    exec(example, held)
    tree = held["tree"]
    named = [held["drafter"].source_names[source] for source in tree.sources[1:]]
    assert [token for token, name in zip(tree.token_ids[1:].tolist(), named, strict=True) if name == "known texts"] == [7, 8, 9]


def test_engine_takes_sources_and_counts_them_by_name(tiny_model, answers):
    class Known:
        def propose(self, request, context, most):
            return Source(answers, perfect).propose(request, context, most)

    engine = LookaheadEngine(tiny_model("llama"), sources=Known(), drafts=DraftOptions(adaptive=False))
    results = engine.generate([prompt for prompt, _ in answers], GenerationParams(max_new_tokens=NEW_TOKENS))
    assert [result.token_ids for result in results] == [answer for _, answer in answers]
    assert sum(result.accepted_by_source.get("Known", 0) for result in results) > 0


@pytest.mark.parametrize(
    ("sources", "saying"),
    [
        ([object()], "a object is not a draft source"),
        ([Source], "the class Source is not a draft source"),
        ([Source([], perfect, "prompt")], '"prompt"'),
        ([Source([], perfect), Source([], perfect)], "a name of its own"),
    ],
)
def test_what_is_no_source_is_refused(sources, saying):
    with pytest.raises(UsageError, match=saying):
        Drafter([], sources=sources)
