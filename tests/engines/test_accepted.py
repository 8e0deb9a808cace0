"""Who drafted what requests of another engine have accepted: found by the text of a request, whatever came and went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import DraftTree
from lookahead.engines.requests import NewTokens, Requests
from lookahead.engines.vllm_common import DrafterOfWorker
from lookahead.trie.file import Trie

ROOM = 100
ANSWER = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


@pytest.fixture
def requests(make_trie: Callable[..., Trie]) -> Requests:
    """Drafts of three tokens, from a trie that holds ANSWER."""
    trie = make_trie([[1, 2, 3, *ANSWER]] * 3, 50)
    options = DraftOptions("single", decoding_length=4, branch_length=3, recycle=False, session_tokens=0)
    found = Requests(Drafter([trie], options))
    found.count_accepted()
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


def test_accepted_tokens_are_counted_by_source_and_given_once(requests: Requests) -> None:
    requests.begin("a", [1, 2, 3])
    accepted = sum(answered(requests, "a", ANSWER))
    assert accepted >= 6
    (source,) = (name for name in requests.drafter.source_names if name.startswith("trie:"))
    assert asked(requests, [1, 2, 3], ANSWER) == {source: accepted}
    requests.finish("a")
    assert not asked(requests, [1, 2, 3], ANSWER)


def test_a_request_that_has_ended_is_found_by_its_text(requests: Requests) -> None:
    for name, prompt, answer in (("a", [1, 2, 3], ANSWER), ("b", [3, 2], [5, 6, 7, 30, 31])):
        requests.begin(name, prompt)
        answered(requests, name, answer)
    requests.keep_only([])
    b, a = asked(requests, [3, 2], [5, 6, 7, 30, 31]), asked(requests, [1, 2, 3], ANSWER)
    assert (sum(a.values()), sum(b.values())) != (0, 0)
    assert sum(a.values()) > sum(b.values())
    assert not asked(requests, [1, 2], [40])


def test_an_answer_that_the_engine_has_cut_counts_what_is_left_of_it(requests: Requests) -> None:
    requests.begin("a", [1, 2, 3])
    requests.step([NewTokens("a", ANSWER[:1], ROOM)])
    requests.step([NewTokens("a", ANSWER[1:5], ROOM)])  # three accepted, of which the engine keeps two: the second ended it
    assert sum(asked(requests, [1, 2, 3], ANSWER[:3]).values()) == 2


def test_a_request_that_was_preempted_is_counted_whole(requests: Requests) -> None:
    requests.begin("a", [1, 2, 3])
    first = sum(answered(requests, "a", ANSWER[:6]))
    requests.keep_only([])
    requests.begin("a", [1, 2, 3, *ANSWER[:6]])
    second = sum(answered(requests, "a", ANSWER[6:]))
    assert first
    assert second
    requests.finish("a")
    assert sum(asked(requests, [1, 2, 3], ANSWER).values()) == first + second


def test_accepted_filler_has_no_source_of_ours(requests: Requests) -> None:
    requests.begin("a", [40])
    (tree,) = requests.step([NewTokens("a", [41], ROOM)])
    guessed = tree.draft_tokens
    requests.step([NewTokens("a", [*tree.token_ids[1:].tolist(), 41, 41], ROOM)])  # one token more than there were guesses
    assert asked(requests, [40], [41, *tree.token_ids[1:].tolist(), 41, 41])["padding"] == 1
    assert guessed < 4


def test_nothing_is_counted_where_nobody_asks(make_trie: Callable[..., Trie]) -> None:
    requests = Requests(Drafter([make_trie([[1, 2, 3]], 50)], DraftOptions("single", recycle=False)))
    requests.begin("a", [1])
    requests.step([NewTokens("a", [2], ROOM)])
    assert asked(requests, [1], [2]) == Counter()
    assert requests._known["a"].emitted.sources == []


def test_a_worker_answers_for_its_drafter(requests: Requests) -> None:
    def worker(**runner: Any) -> DrafterOfWorker:
        found = DrafterOfWorker()
        found.model_runner = SimpleNamespace(**runner)
        return found

    text = np.array([1, 2, 3, *ANSWER], np.int32).tobytes()
    ours = worker(drafter=SimpleNamespace(requests=requests))
    assert ours.lookahead_count_accepted()
    requests.begin("a", [1, 2, 3])
    accepted = sum(answered(requests, "a", ANSWER))
    found = ours.lookahead_accepted([(text, 3), (text, 3)])
    assert found is not None
    assert [sum(each.values()) for each in found] == [accepted, 0]
    ours.lookahead_forget()
    assert not len(requests)
    for other in (worker(drafter=SimpleNamespace()), worker(speculator=None), worker(drafter=SimpleNamespace(requests=None))):
        assert not other.lookahead_count_accepted()
        assert other.lookahead_accepted([(text, 3)]) is None
        other.lookahead_forget()


def test_rows_told_apart_by_text_begin_anew_when_all_is_forgotten(requests: Requests) -> None:
    from lookahead.engines.batch_rows import ByText

    rows, texts = ByText(requests), np.array([[1, 2, 3, 5, 6, 7, 0]], np.int32)
    assert rows.step([[5]], [4], texts, ROOM)[0][:2] == [6, 7]
    requests.forget()
    assert rows.step([[6]], [5], texts, ROOM)[0][:1] == [7]
    assert isinstance(requests._known[1].emitted.drafted, DraftTree)
