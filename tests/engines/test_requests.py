"""Rows by request id: drafts as of the drafter's own rows, whatever comes and goes; who drafted what has been accepted."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions, Strategy
from lookahead.draft.tree import DraftTree
from lookahead.engines.batch_rows import ById, ByText, Running
from lookahead.engines.requests import ExternalBudget, NewTokens, Requests
from lookahead.engines.vllm import DrafterOfWorker

VOCABULARY = 50
ROOM = 100


def text_of(seed: int, length: int = 60) -> list[int]:
    """Text that repeats itself: pieces of a few kinds, in an order of its own."""
    random = np.random.default_rng(seed)
    pieces = np.random.default_rng(0).integers(0, VOCABULARY, (6, 5))
    return pieces[random.integers(0, 6, length // 5)].ravel().tolist()


@pytest.fixture
def trie(make_trie):
    return make_trie([text_of(seed) for seed in range(20)], VOCABULARY)


def drafter_of(tries: Any = (), strategy: Strategy = "single", **options: Any) -> Drafter:
    return Drafter(tries, DraftOptions(strategy, decoding_length=7, branch_length=6, recycle=False, **options))


def same(one: DraftTree, other: DraftTree) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("token_ids", "parents", "probabilities"))


@pytest.mark.parametrize("strategy", ["single", "hierarchical"])
def test_trees_are_those_of_the_drafters_own_rows(trie, strategy):
    requests, other = Requests(drafter_of([trie], strategy)), drafter_of([trie], strategy)
    text, prompt = text_of(99), 12
    requests.begin("a", text[:prompt])
    row = other.start(text[:prompt])
    for position in range(prompt, len(text), 3):
        new = text[position : position + 3]
        row.accept(new)
        (tree,) = requests.step([NewTokens("a", new, ROOM)])
        assert same(tree, row.draft())
        assert tree.is_chain() or strategy == "hierarchical"
    assert requests.length("a") == len(text)
    assert requests.has_text("a", np.array(text, np.int32))
    assert not requests.has_text("a", np.array([*text[:-1], 49], np.int32))


def test_the_output_of_a_request_is_remembered_once_and_drafted_from_although_it_was_preempted():
    answer, drafter = list(range(4, 44)), drafter_of()
    requests = Requests(drafter)
    requests.begin("a", [1, 2, 3])
    requests.step([NewTokens("a", answer[:20], ROOM)])
    requests.keep_only([])  # preempted
    requests.begin("a", [1, 2, 3, *answer[:20]])
    requests.step([NewTokens("a", answer[20:], ROOM)])
    requests.finish("a")
    requests.finish("a")  # again: nothing
    drafter.remember(())
    assert drafter.session.length == len(answer) + 2 * 2  # two documents, each behind a token and with its end
    requests.begin("b", [7])
    (tree,) = requests.step([NewTokens("b", answer[:10], ROOM)])
    assert tree.token_ids[1:].tolist() == answer[10:16]


class Clocked(ExternalBudget):
    """A pace that says on which steps there are drafts."""

    def __init__(self, steps: list[bool]):
        super().__init__()
        self.steps = iter(steps)

    def arrived(self, *args: Any) -> bool:
        super().arrived(*args)
        return next(self.steps)


def test_tokens_of_steps_without_drafts_reach_the_rows_later(trie):
    text = text_of(99)
    requests = Requests(drafter_of([trie]), Clocked([True, False, False, True]))
    requests.begin("a", text[:10])
    for position in range(10, 13):
        (tree,) = requests.step([NewTokens("a", [text[position]], ROOM)])
        assert tree.token_ids[0] == text[position]
        assert requests.has_text("a", np.array(text[: position + 1], np.int32))
    assert tree.draft_tokens == 0
    other = drafter_of([trie])
    row = other.start(text[:10])
    row.accept(text[10:14])
    requests.step([NewTokens("a", [text[13]], ROOM)])
    assert np.array_equal(requests._known["a"].row.own.tokens, row.own.tokens)


def test_drafts_that_cost_more_than_they_give_rest(monkeypatch):
    """Forwards of a machine that takes as long for each token of a step as for a step of one."""
    now, drafted = [0.0], 0
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    requests = Requests(drafter_of(), ExternalBudget())
    requests.begin("a", [1, 2])
    for step in range(600):
        (tree,) = requests.step([NewTokens("a", [step % 7], 3)])
        drafted += tree.draft_tokens if step > 300 else 0
        now[0] += 1e-2 * len(tree)
    assert drafted < 60


def test_drafting_imports_nothing_that_it_does_without():
    """Engines of others bring their own versions of packages, or none."""
    code = """
import sys
for name in ("llguidance", "pyarrow", "matplotlib", "torch", "transformers", "vllm", "typer", "rich"):
    sys.modules[name] = None  # an import of it fails
from lookahead.engines.batch_rows import ByText
from lookahead.engines.settings import DraftSettings
from lookahead.engines import vllm
drafter = DraftSettings.of({"lookahead": {"price": 0.1}}).drafter("single", 4)
from lookahead.engines.requests import NewTokens, Requests
requests = Requests(drafter)
requests.begin(0, [1, 2, 3, 1, 2])
print(requests.step([NewTokens(0, [3], 9)])[0].token_ids.tolist())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("[3, 1")


class Call(NamedTuple):
    """Of vLLM's V1 runner: request, tokens of its text, new tokens of each row."""

    request: int
    length: int
    emitted: list[int]


def recorded() -> tuple[list[list[int]], list[list[Call]]]:
    """(prompts by request, calls): vLLM 0.32 answering 12 requests, 5 at once, in a cache too small for them.

    Prompts are prefilled in pieces of 64 tokens; five times a request is preempted and resumes; rows move; six requests are
    samples of two prompts.
    """
    found = json.loads((Path(__file__).parent / "vllm_calls.json").read_text(encoding="utf-8"))
    return found["prompts"], [[Call(*row) for row in step] for step in found["steps"]]


def test_recorded_calls_of_vllm_by_text_are_those_by_request_id():
    """Rows told apart by text alone draft as those of known requests do."""
    prompts, steps = recorded()
    requests = Requests(drafter_of())
    rows, longest = ByText(requests), 350
    by_id = Requests(drafter_of())
    texts, drafted = [list(prompt) for prompt in prompts], 0
    for step in steps:
        arrays = np.zeros((len(step), longest), np.int32)
        new = []
        for row, call in enumerate(step):
            texts[call.request] += call.emitted
            text = texts[call.request][: call.length]
            arrays[row, : len(text)] = text
            if call.emitted:
                if call.request not in by_id:
                    by_id.begin(call.request, text[: len(text) - len(call.emitted)])
                new.append(NewTokens(call.request, call.emitted, longest - call.length - 1))
        by_id.keep_only({each.request_id for each in new})
        drafts = rows.step([call.emitted for call in step], np.array([call.length for call in step]), arrays, longest)
        expected = iter(by_id.step(new))
        for call, found in zip(step, drafts, strict=True):
            assert found == (next(expected).token_ids[1:].tolist() if call.emitted else [])
            drafted += len(found)
    assert drafted > 100


def test_arrays_by_id_hold_chains_filler_and_confidences(trie):
    """As vLLM's V2 runner has them: a count and a last token of each row; a request that resumes has a longer prefill."""
    requests, width = Requests(drafter_of([trie])), 6
    rows = ById(requests, np.zeros((4, width), np.int64), np.ones((4, width), np.float32))
    texts, lengths = {"a": text_of(1), "b": text_of(2)}, {"a": 10, "b": 20}
    prefilled = dict(lengths)

    def about(request_id):
        text = texts[request_id]
        return Running(prefilled[request_id], 50, lambda: np.array(text[: prefilled[request_id]], np.int32))

    def step(order, emitted):
        for name in order:
            lengths[name] += emitted[name]
        last = np.array([texts[name][lengths[name] - 1] for name in order])
        rows.step(list(order), np.array([emitted[name] for name in order]), last, set(order), about)
        for row, name in enumerate(order):
            if emitted[name]:
                assert requests.has_text(name, np.array(texts[name][: lengths[name]], np.int32))
            filler = rows.confidences[row] == 0
            assert (rows.tokens[row][filler] == last[row]).all()
            assert ((rows.confidences[row] >= 0) & (rows.confidences[row] <= 1)).all()

    step("ab", {"a": 1, "b": 0})
    accepted = 0
    for _ in range(12):
        emitted = dict.fromkeys("ab", 1)
        for row, name in enumerate("ab"):
            guess = rows.tokens[row].tolist() if name in requests else []
            ahead = texts[name][lengths[name] : lengths[name] + width]
            kept = next((n for n, pair in enumerate(zip(guess, ahead, strict=False)) if pair[0] != pair[1]), len(guess))
            emitted[name] = min(kept, 2) + 1
            accepted += emitted[name] - 1
        if max(lengths[name] + emitted[name] for name in "ab") >= 49:
            break
        step("ab", emitted)
    assert accepted > 3
    prefilled["b"] = lengths["b"]  # preempted, and resumed before the next call
    step("b", {"b": 1})
    assert ("b" in requests, len(requests)) == (True, 1)


ANSWER = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


@pytest.fixture
def requests(make_trie):
    """Drafts of three tokens, from a trie that holds ANSWER."""
    trie = make_trie([[1, 2, 3, *ANSWER]] * 3, 50)
    options = DraftOptions("single", decoding_length=4, branch_length=3, recycle=False, session_tokens=0)
    found = Requests(Drafter([trie], options))
    found.answer("count_accepted")
    return found


def answered(requests: Requests, name: str, answer: list[int]) -> list[int]:
    """As an engine would: the first token, then each draft as far as it is right, and a token. Returns what was accepted."""
    done, draft, accepted = 0, list[int](), []
    while done < len(answer):
        right = next((k for k, token in enumerate(draft) if answer[done + k : done + k + 1] != [token]), len(draft))
        right = min(right, len(answer) - done - 1)
        new = answer[done : done + right + 1]
        (tree,) = requests.step([NewTokens(name, new, ROOM)])
        accepted.append(right)
        draft, done = tree.token_ids[1:].tolist(), done + len(new)
    return accepted


def asked(requests: Requests, prompt: list[int], answer: list[int]) -> Counter[str]:
    return requests.accepted_of(np.array([*prompt, *answer], np.int32), len(prompt))


def test_accepted_tokens_are_counted_by_source_and_given_once(requests):
    requests.begin("a", [1, 2, 3])
    accepted = sum(answered(requests, "a", ANSWER))
    assert accepted >= 6
    (source,) = (name for name in requests.drafter.source_names if name.startswith("trie:"))
    assert asked(requests, [1, 2, 3], ANSWER) == {source: accepted}
    requests.finish("a")
    assert not asked(requests, [1, 2, 3], ANSWER)


def test_a_request_that_has_ended_is_found_by_its_text(requests):
    for name, prompt, answer in (("a", [1, 2, 3], ANSWER), ("b", [3, 2], [5, 6, 7, 30, 31])):
        requests.begin(name, prompt)
        answered(requests, name, answer)
    requests.keep_only([])
    b, a = asked(requests, [3, 2], [5, 6, 7, 30, 31]), asked(requests, [1, 2, 3], ANSWER)
    assert a.total() > b.total()
    assert not asked(requests, [1, 2], [40])


def test_an_answer_that_the_engine_has_cut_counts_what_is_left_of_it(requests):
    requests.begin("a", [1, 2, 3])
    requests.step([NewTokens("a", ANSWER[:1], ROOM)])
    requests.step([NewTokens("a", ANSWER[1:5], ROOM)])  # three accepted, of which the engine keeps two: the second ended it
    assert sum(asked(requests, [1, 2, 3], ANSWER[:3]).values()) == 2


def test_a_request_that_was_preempted_is_counted_whole(requests):
    requests.begin("a", [1, 2, 3])
    first = sum(answered(requests, "a", ANSWER[:6]))
    requests.keep_only([])
    requests.begin("a", [1, 2, 3, *ANSWER[:6]])
    second = sum(answered(requests, "a", ANSWER[6:]))
    assert first
    assert second
    requests.finish("a")
    assert sum(asked(requests, [1, 2, 3], ANSWER).values()) == first + second


def test_a_worker_answers_for_its_drafter(requests):
    def worker(**runner):
        found = DrafterOfWorker()
        found.model_runner = SimpleNamespace(**runner)
        return found

    text = np.array([1, 2, 3, *ANSWER], np.int32).tobytes()
    ours = worker(drafter=SimpleNamespace(requests=requests))
    assert ours.lookahead_answer("count_accepted")
    requests.begin("a", [1, 2, 3])
    accepted = sum(answered(requests, "a", ANSWER))
    found = ours.lookahead_answer("accepted", [(text, 3), (text, 3)])
    assert [sum(each.values()) for each in found] == [accepted, 0]
    ours.lookahead_answer("forget")
    assert not len(requests)
    for other in (worker(drafter=SimpleNamespace()), worker(speculator=None), worker(drafter=SimpleNamespace(requests=None))):
        assert not other.lookahead_answer("count_accepted")
        assert other.lookahead_answer("accepted", [(text, 3)]) is None
        other.lookahead_answer("forget")
