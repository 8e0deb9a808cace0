"""Rows of a drafter by request id, for engines of others. In: new tokens of requests. Out: a draft tree for each.

What adapters share: they translate an engine's calls into `begin`, `step` and `keep_only`, and trees into its draft format.
A request that an engine preempts and resumes has ended and starts again, with all its text so far as the prompt: what was
emitted before is remembered once. Knows no engine, and imports neither torch nor anything that drafting does not need.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import numpy as np

from lookahead.budget.policy import Budget
from lookahead.draft.drafter import Drafter, Row
from lookahead.draft.tree import GIVEN, DraftTree, name_of
from lookahead.step.batch import RowState, StepBatch

log = logging.getLogger(__name__)

LINK = "LOOKAHEAD_LINK"
PATIENCE = 10.0  # seconds that a job waits for the drafter
MAX_ENDED = 4096  # texts of ended requests that nobody has asked for yet; older ones are dropped
OWN = GIVEN - 2  # instead of a source: a token that the model has emitted by itself


class NewTokens(NamedTuple):
    """Holds what a request emitted since its latest step, at least one token.

    room: draft tokens that its text may still take; the drafter's options are a limit, too.
    """

    request_id: Hashable
    token_ids: Sequence[int]
    room: int


class _Step(NamedTuple):
    """Describes a step that has begun.

    expected: draft tokens that are to be accepted. arrived, left: when tokens came and drafts were handed over, in seconds.
    """

    request_ids: list[Hashable]
    tokens: int
    expected: float
    drafts: bool
    arrived: float
    left: float


class ExternalBudget:
    """Chooses how much is drafted for an engine that reports nothing of its forwards. Calls come in turn: arrived, left.

    The time from handing drafts over to the tokens that came of them is taken as that of the forward: it includes the engine's
    scheduling and sampling.
    """

    def __init__(self) -> None:
        self.budget = Budget()
        self._before: _Step | None = None
        self._ids: list[Hashable] = []
        self._arrived = 0.0

    def arrived(self, new: Sequence[NewTokens], others: int, now: float) -> bool:
        """Note that tokens have come; return True if the next step is to have drafts.

        others: requests that were prefilled alongside. now: clock reading, in seconds.
        """
        before, ids = self._before, [each.request_id for each in new]
        if before and before.request_ids == ids and not others:
            seconds = now - before.arrived, now - before.left
            emitted = sum(len(each.token_ids) for each in new)
            self.budget.observe(len(ids), before.tokens, emitted, before.expected, *seconds, before.drafts)
        self._ids, self._arrived, self._before = ids, now, None
        return self.budget.drafts(len(ids))

    def left(self, tokens: int, expected: float, drafts: bool, now: float) -> None:
        """Note that drafts are handed over.

        tokens: that the next forward gets. expected: draft tokens that are to be accepted. drafts: the step was to have some.
        """
        if tokens:
            self._before = _Step(self._ids, tokens, expected, drafts, self._arrived, now)


class Emitted:
    """Keeps who drafted each token that a request has emitted since it began, or resumed with `begin` tokens."""

    __slots__ = ("begin", "drafted", "sources", "taken")

    def __init__(self, begin: int):
        self.begin = begin
        self.sources: list[int] = []  # see DraftTree.sources, or OWN
        self.drafted: DraftTree | None = None  # its latest draft
        self.taken = False  # it has been asked for

    def of_step(self, token_ids: Sequence[int]) -> list[int]:
        """Find who drafted each of a step's tokens: all but the last one are a path of the latest draft, filler included."""
        found: list[int] = []
        node, tree = 0, self.drafted
        for token in token_ids[:-1]:
            if tree is None:
                break
            children = np.flatnonzero((tree.parents == node) & (tree.token_ids == token))
            if not len(children):
                break
            node = int(children[0])
            found.append(int(tree.sources[node]))
        return [*found, *[GIVEN] * (len(token_ids) - 1 - len(found)), OWN]


class TextSpan(NamedTuple):
    """Holds a part of a text, from `emitted.begin`. text: int32, from the prompt's first token on."""

    text: np.ndarray
    emitted: Emitted

    def agrees(self, text: np.ndarray, prompt: int) -> bool:
        """Return whether it begins within the answer and is the same as far as both go: an engine may cut what came last."""
        emitted, common = self.emitted, min(len(self.text), len(text))
        begins = not emitted.taken and prompt <= emitted.begin < common
        return begins and bool(np.array_equal(self.text[:common], text[:common]))


class _Known:
    """Holds a running request. slot: its row's in the batch."""

    __slots__ = ("emitted", "row", "slot")

    def __init__(self, row: Row, slot: int):
        self.row, self.slot = row, slot
        self.emitted = Emitted(len(row.text))


class Requests:
    """Drafts for the running requests of an engine.

    pace: chooses how much is drafted, by the time between two steps; None: each step drafts all that the drafter's options
    allow, at their price. steps, drafted: calls of `step`; draft tokens they gave out. counts: who drafted what was accepted
    is kept for `accepted_of`; not before somebody asks. Requests are identified by their text there, as who asks may be in
    another process, or know other request ids.
    """

    def __init__(self, drafter: Drafter, pace: ExternalBudget | None = None):
        self.drafter, self.pace = drafter, pace
        self.steps, self.drafted, self.counts = 0, 0, False
        self._known: dict[Hashable, _Known] = {}
        self._ended: deque[TextSpan] = deque(maxlen=MAX_ENDED)  # that have not been asked for
        self._in_slots: list[_Known] = []
        self._batch = StepBatch(drafter, 0, pace is not None)
        self._budget = pace.budget if pace else Budget()

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, request_id: Hashable, text: Sequence[int] | np.ndarray) -> None:
        """Begin a request, or resume it after a preemption.

        text: its prompt and what it has emitted, at least one token. What it emits next comes with its first `step`.
        """
        self.finish(request_id)
        row = self.drafter.start(text)
        self._batch.add(RowState(row, len(row.text), 1, 0, None, (), None, follows=False))
        self._known[request_id] = known = _Known(row, len(self._in_slots))
        self._in_slots.append(known)

    def length(self, request_id: Hashable) -> int:
        """Count the tokens of a request's text so far, prompt included."""
        known = self._known[request_id]
        return len(known.row.text) + len(self._batch.unknown_tokens(known.slot))

    def has_text(self, request_id: Hashable, text: np.ndarray) -> bool:
        """Return whether a request's text so far is this one. text: int32."""
        known = self._known[request_id]
        own, new = known.row.text, self._batch.unknown_tokens(known.slot)
        return np.array_equal(own, text[: len(own)]) and np.array_equal(new, text[len(own) :])

    def finish(self, request_id: Hashable) -> None:
        """End a request, if it is known. Its output joins the drafter's memory."""
        if known := self._known.pop(request_id, None):
            self._batch.remove(known.slot)
            last = self._in_slots.pop()
            if last is not known:
                self._in_slots[known.slot], last.slot = last, known.slot
            if known.emitted.sources and not known.emitted.taken:
                self._ended.append(TextSpan(known.row.text.copy(), known.emitted))
            known.row.finish()

    def keep_only(self, running: Collection[Hashable]) -> None:
        """End all requests that are not in `running`."""
        for request_id in [each for each in self._known if each not in running]:
            self.finish(request_id)

    def step(self, new: Sequence[NewTokens], others: int = 0) -> list[DraftTree]:
        """Take what a forward of the engine has emitted; return a draft tree of each request for the next one.

        Node 0 of a tree is the latest token, `probabilities` are those of paths. others: requests that the forward only
        prefilled. Each request in `new` must have begun.
        """
        began, batch = time.perf_counter(), self._batch
        known = [self._known[each.request_id] for each in new]
        batch.wait()
        for each, tokens in zip(known, new, strict=True):
            batch.emit(each.slot, tokens.token_ids, tokens.room)
            if self.counts:
                each.emitted.sources += each.emitted.of_step(tokens.token_ids)
        drafts = bool(known) and (self.pace is None or self.pace.arrived(new, others, began))
        self.steps += 1
        batch.propose(self._budget, self.steps, drafts)
        trees = batch.trees_of([each.slot for each in known])
        for each, tree in zip(known, trees, strict=True):
            each.emitted.drafted = tree
        if self.pace is not None:
            self.pace.left(batch.tokens, batch.expected, drafts, time.perf_counter())
        self.drafted += batch.tokens - len(trees)
        return trees

    def answer(self, method: str, texts: Sequence[tuple[bytes, int]] = ()) -> Any:
        """Serve a job in another process, which calls by name.

        count_accepted: count from now on; True. accepted: of each text its counts by source, see `accepted_of`; texts are a
        request's prompt and answer, int32, as bytes, and tokens of the prompt. forget: all requests have ended, nothing is
        remembered or learned, but what forwards cost; None.
        """
        if method == "count_accepted":
            self.counts = True
            return True
        if method == "accepted":
            return [dict(self.accepted_of(np.frombuffer(text, np.int32), int(prompt))) for text, prompt in texts]
        self.keep_only([])
        return self.drafter.forget()

    def accepted_of(self, text: np.ndarray, prompt: int) -> Counter[str]:
        """Count the accepted tokens of the request with this text by draft source. It can be asked for once.

        text: int32, prompt and answer. prompt: tokens of the prompt. A request that was preempted has several spans. What is
        not known is not counted.
        """
        counts: Counter[str] = Counter()
        length = len(text)
        while length > prompt:
            agreeing = [each for each in self._ended if each.agrees(text[:length], prompt)]
            if not any(len(each.text) >= length for each in agreeing):
                texts = ((known.row.text, self._batch.unknown_tokens(known.slot), known) for known in self._known.values())
                running = [TextSpan(np.append(before, new), known.emitted) for before, new, known in texts]
                agreeing += [each for each in running if each.agrees(text[:length], prompt)]
            if not agreeing:
                break
            found = max(agreeing, key=lambda each: min(len(each.text), length))
            begin, found.emitted.taken = found.emitted.begin, True
            sources = found.emitted.sources[: length - begin]
            if self.counts and length > len(found.text):  # an engine may not report what the last step has emitted
                sources += found.emitted.of_step(text[len(found.text) : length].tolist())
            counts.update(name_of(source, self.drafter.source_names) for source in sources if source != OWN)
            length = begin
        self._ended = deque((each for each in self._ended if not each.emitted.taken), MAX_ENDED)
        return counts


class Link:
    """Connects a job to our drafter in another process. Calls return nothing where no drafter is there, or does not answer.

    The job listens at a local socket, which the other process inherits by an environment variable, with a key that both check.
    """

    def __init__(self) -> None:
        key = secrets.token_bytes(32)
        self._listener = Listener(authkey=key)
        self._line: Any = None
        self._there = threading.Event()
        os.environ[LINK] = json.dumps([self._listener.address, key.hex()])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            self._line = self._listener.accept()
            self._there.set()
        except OSError:  # closed before a drafter came
            log.debug("no drafter has come", exc_info=True)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return [what `Requests.answer` does], or nothing."""
        try:
            if not self._there.wait(PATIENCE):
                return []
            self._line.send((method, arguments))
            return [self._line.recv()] if self._line.poll(PATIENCE) else []
        except (OSError, EOFError):
            log.debug("%s has failed", method, exc_info=True)
            return []

    def close(self) -> None:
        os.environ.pop(LINK, None)
        self._listener.close()
        if self._line is not None:
            self._line.close()


def serve(requests: Requests, lock: threading.Lock, environment: Mapping[str, str] = os.environ) -> None:
    """Answer the job, if one listens, in a thread. lock: held while `requests` is used."""
    if LINK not in environment:
        return
    address, key = json.loads(environment[LINK])
    line = Client(address, authkey=bytes.fromhex(key))
    threading.Thread(target=_answer_all, args=(line, requests, lock), daemon=True).start()


def _answer_all(line: Connection, requests: Requests, lock: threading.Lock) -> None:
    try:
        while True:
            method, arguments = line.recv()
            with lock:
                answered = requests.answer(method, *arguments)
            line.send(answered)
    except (OSError, EOFError):  # the job has ended
        line.close()
