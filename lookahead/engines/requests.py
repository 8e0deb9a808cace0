"""Rows of a drafter by request id, for engines of others. In: new tokens of requests. Out: a draft tree for each.

What adapters share: they translate an engine's calls into `begin`, `step` and `keep_only`, and trees into its draft format.
A request that an engine preempts and resumes has ended and starts again, with all its text so far as the prompt: what was
emitted before is remembered once. Knows no engine, and imports neither torch nor anything that drafting does not need.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lookahead.budget.policy import Budget
from lookahead.draft.drafter import Drafter, Row
from lookahead.draft.step import RowState, StepBatch
from lookahead.draft.tree import DraftTree
from lookahead.engines.accepted import AcceptedTokens, Emitted, TextSpan
from lookahead.engines.pace import ExternalBudget


class NewTokens(NamedTuple):
    """What a request emitted since its latest step, at least one token.

    room: draft tokens that its text may still take; the drafter's options are a limit, too.
    """

    request_id: Hashable
    token_ids: Sequence[int]
    room: int


class _Known:
    """A running request. slot: its row's in the batch."""

    __slots__ = ("emitted", "row", "slot")

    def __init__(self, row: Row, slot: int):
        self.row, self.slot = row, slot
        self.emitted = Emitted(len(row.text))


class Requests:
    """The running requests of an engine.

    pace: chooses how much is drafted, by the time between two steps; None: each step drafts all that the drafter's options
    allow, at their price. seconds: spent in `step`. steps, drafted: calls of `step`; draft tokens they gave out.
    accepted: keeps who drafted what was accepted, None as long as nobody asks, see `count_accepted`.
    """

    def __init__(self, drafter: Drafter, pace: ExternalBudget | None = None):
        self.drafter, self.pace = drafter, pace
        self.seconds, self.steps, self.drafted = 0.0, 0, 0
        self.accepted: AcceptedTokens | None = None
        self._known: dict[Hashable, _Known] = {}
        self._in_slots: list[_Known] = []
        self._batch = StepBatch(drafter, 0, pace is not None)
        self._budget = pace.budget if pace else Budget()

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._known)

    def begin(self, request_id: Hashable, text: Sequence[int] | np.ndarray) -> None:
        """A request begins, or resumes after a preemption: its prompt and what it has emitted, at least one token.

        The tokens that it emits next come with its first `step`.
        """
        self.finish(request_id)
        row = self.drafter.start(text)
        self._batch.add(RowState(row, len(row.text), 1, 0, None, (), None, follows=False))
        self._known[request_id] = known = _Known(row, len(self._in_slots))
        self._in_slots.append(known)

    def length(self, request_id: Hashable) -> int:
        """Tokens of a request's text so far, prompt included."""
        known = self._known[request_id]
        return len(known.row.text) + len(self._batch.unknown_tokens(known.slot))

    def has_text(self, request_id: Hashable, text: np.ndarray) -> bool:
        """Whether a request's text so far is this one. text: int32."""
        known = self._known[request_id]
        own, new = known.row.text, self._batch.unknown_tokens(known.slot)
        return np.array_equal(own, text[: len(own)]) and np.array_equal(new, text[len(own) :])

    def _text(self, known: _Known) -> np.ndarray:
        """int32, a copy."""
        return np.append(known.row.text, self._batch.unknown_tokens(known.slot))

    def finish(self, request_id: Hashable) -> None:
        """A request has ended; of one that is not known nothing happens. Its output joins the drafter's memory."""
        if known := self._known.pop(request_id, None):
            self._batch.remove(known.slot)
            last = self._in_slots.pop()
            if last is not known:
                self._in_slots[known.slot], last.slot = last, known.slot
            if self.accepted is not None:
                self.accepted.end(known.row.text, known.emitted)
            known.row.finish()

    def keep_only(self, running: Collection[Hashable]) -> None:
        """Requests that are not in `running` have ended."""
        for request_id in [each for each in self._known if each not in running]:
            self.finish(request_id)

    def step(self, new: Sequence[NewTokens], others: int = 0) -> list[DraftTree]:
        """A forward of the engine is over: these requests have emitted tokens. Returns a draft tree of each for the next one.

        Node 0 of a tree is the latest token, `probabilities` are those of paths. others: requests that the forward only
        prefilled. Each request in `new` must have begun.
        """
        began, batch = time.perf_counter(), self._batch
        known = [self._known[each.request_id] for each in new]
        batch.wait()
        for each, tokens in zip(known, new, strict=True):
            batch.emit(each.slot, tokens.token_ids, tokens.room)
            if self.accepted is not None:
                each.emitted.add(tokens.token_ids)
        drafts = bool(known) and (self.pace is None or self._learn_pace(new, others, began))
        self.steps += 1
        batch.propose(self._budget, self.steps, drafts)
        trees = batch.trees_of([each.slot for each in known])
        for each, tree in zip(known, trees, strict=True):
            each.emitted.drafted = tree
        ended = time.perf_counter()
        if self.pace is not None:
            self.pace.left(batch.tokens, batch.expected, drafts, ended)
        self.seconds += ended - began
        self.drafted += batch.tokens - len(trees)
        return trees

    def count_accepted(self) -> None:
        """From now on keep who drafted what requests accept, for `accepted_of`."""
        self.accepted = AcceptedTokens(self.drafter.source_names)

    def accepted_of_each(self, texts: Sequence[tuple[bytes, int]]) -> list[dict[str, int]]:
        """See `accepted_of`. texts: of each request its prompt and answer, int32, as bytes, and tokens of the prompt."""
        return [dict(self.accepted_of(np.frombuffer(text, np.int32), int(prompt))) for text, prompt in texts]

    def accepted_of(self, text: np.ndarray, prompt: int) -> Counter[str]:
        """See `AcceptedTokens.take`; of nothing where nobody counts."""
        if self.accepted is None:
            return Counter()
        return self.accepted.take(
            text, prompt, lambda: [TextSpan(self._text(each), each.emitted) for each in self._known.values()]
        )

    def forget(self) -> None:
        """Be as new: all requests have ended, nothing is remembered or learned, but what forwards cost."""
        self.keep_only([])
        self.drafter.forget()

    def _learn_pace(self, new: Sequence[NewTokens], others: int, now: float) -> bool:
        assert self.pace is not None
        emitted = [len(each.token_ids) for each in new]
        return self.pace.arrived([each.request_id for each in new], emitted, others, now)
