"""How much is drafted where an engine tells nothing of its forwards. In: when steps came and what they gave. Out: tree sizes.

The time between two calls, from handing drafts over to the tokens that came of them, is taken as the time of the forward: it
includes the engine's scheduling and sampling. The draft budget learns costs from it (budget/goodput.py), and the clock decides
whether drafts pay at all (budget/rates.py): a few steps in a row without drafts are weighed against those with drafts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from lookahead.budget.cost import CostCurve, MeasuredStep
from lookahead.budget.goodput import GoodputBudget
from lookahead.budget.profile import Forward
from lookahead.budget.rates import Rates
from lookahead.draft.grown import GrownTrees
from lookahead.draft.tree import DraftTree


class _Step(NamedTuple):
    """A step that has begun. arrived, left: clock readings, in seconds: tokens came, drafts were handed over."""

    request_ids: list[Hashable]
    forward: Forward
    drafts: bool
    arrived: float
    left: float


class Pace:
    """The draft budget of an engine that is watched from outside. Calls come in turn: arrived, choose (if asked to), left."""

    def __init__(self, curve: CostCurve | None = None) -> None:
        self._budget = GoodputBudget(curve or CostCurve())
        self._rates = Rates()
        self._before: _Step | None = None
        self._ids: list[Hashable] = []
        self._keys = 0
        self._arrived = 0.0

    @property
    def price(self) -> float:
        """Path probability below which nodes need not be drafted."""
        return self._budget.price

    def free(self, rows: int) -> int:
        """See `GoodputBudget.free`."""
        return self._budget.free(rows)

    def arrived(self, request_ids: Sequence[Hashable], keys: int, emitted: Sequence[int], others: int, now: float) -> bool:
        """Tokens have come; True if the next step is to have drafts.

        keys: tokens of all these requests' texts. emitted: of each request. others: requests that were prefilled alongside.
        now: clock reading, in seconds.
        """
        before, ids = self._before, list(request_ids)
        if before and before.request_ids == ids and not others:
            seconds, total = now - before.arrived, sum(emitted)
            drafting = before.left - before.arrived if before.drafts else 0.0
            step = MeasuredStep(before.forward, total, seconds, now - before.left, drafting)
            self._budget.observe(step)
            self._rates.note(len(ids), before.drafts, seconds, total)
        self._ids, self._keys, self._arrived, self._before = ids, keys, now, None
        return not self._rates.rest(len(ids), self._budget.speed)

    def choose(self, grown: GrownTrees, keys: int) -> list[int]:
        """Nodes of each tree that the next forward is to verify, root included."""
        plain = Forward(len(self._ids), len(self._ids), keys)
        kept, *_ = self._budget.choose(grown.probabilities, grown.spans, plain, 0, chains=True)
        return kept

    def left(self, trees: Sequence[DraftTree], drafts: bool, now: float) -> None:
        """Drafts are handed over. drafts: the step was to have some."""
        if drafts:
            self._budget.drafted_in(now - self._arrived)
        if trees:
            sizes = list(map(len, trees))
            forward = Forward(sum(sizes), len(sizes), self._keys, max(sizes))
            self._before = _Step(self._ids, forward, drafts, self._arrived, now)
