"""How much is drafted where an engine tells nothing of its forwards. In: when steps came and what they gave. Out: tree sizes.

The time between two calls, from handing drafts over to the tokens that came of them, is taken as the time of the forward: it
includes the engine's scheduling and sampling. The draft budget (budget/policy.py) learns costs from it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from lookahead.budget.policy import Budget, StepCost


class _Step(NamedTuple):
    """A step that has begun. expected: draft tokens that are to be accepted. arrived, left: clock readings, in seconds: tokens
    came, drafts were handed over.
    """

    request_ids: list[Hashable]
    tokens: int
    expected: float
    drafts: bool
    arrived: float
    left: float


class ExternalBudget:
    """The draft budget of an engine that is watched from outside. Calls come in turn: arrived, left."""

    def __init__(self, cost: StepCost | None = None) -> None:
        self.budget = Budget(cost)
        self._before: _Step | None = None
        self._ids: list[Hashable] = []
        self._arrived = 0.0

    def arrived(self, request_ids: Sequence[Hashable], emitted: Sequence[int], others: int, now: float) -> bool:
        """Tokens have come; True if the next step is to have drafts.

        emitted: of each request. others: requests that were prefilled alongside. now: clock reading, in seconds.
        """
        before, ids = self._before, list(request_ids)
        if before and before.request_ids == ids and not others:
            seconds = now - before.arrived, now - before.left
            self.budget.observe(len(ids), before.tokens, sum(emitted), before.expected, *seconds, before.drafts)
        self._ids, self._arrived, self._before = ids, now, None
        return self.budget.drafts(len(ids))

    def left(self, tokens: int, expected: float, drafts: bool, now: float) -> None:
        """Drafts are handed over. tokens: that the next forward gets. expected: draft tokens that are to be accepted. drafts:
        the step was to have some.
        """
        if tokens:
            self._before = _Step(self._ids, tokens, expected, drafts, self._arrived, now)
