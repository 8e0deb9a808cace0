"""The draft source of runner-up tokens (Token Recycling, arXiv 2408.08696): what the model ranked highest at verified nodes.

In: draft trees and the model's best tokens behind each node. Out: the table that drafts are made from (recycled.py), and
whether using it pays. Best tokens are added to the table at the next draft: by then the rows have been notified of what the
model emitted, so none of it seems to have been foreseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lookahead.budget.worth import SourceUtility
from lookahead.draft.recycled import PLACES, Recycled
from lookahead.draft.tree import DraftTree

# Asked for at the next draft: (int32 [nodes, BEST] token ids, float32 scores) behind the nodes of some trees, best first.
BestTokens = Callable[[], tuple[np.ndarray, np.ndarray]]
Ranked = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class RunnerUpTokens:
    """table: see `Recycled`; it holds nothing where the source is off. has_keys: it holds something. pays: use it at the next
    step.
    """

    def __init__(self, on: bool):
        self.table = Recycled.empty(PLACES if on else 0)
        self._on = on
        self.clear()

    @property
    def pays(self) -> bool:
        return self._on and self._utility.pays

    @property
    def in_use(self) -> bool:
        """Drafts are made from the table."""
        return self.pays and self.has_keys

    def clear(self) -> None:
        """Forget everything; be tried again."""
        self._pending: Callable[[], Ranked] | None = None
        self._utility = SourceUtility()
        self.table.clear()
        self.has_keys = False

    def note(self, trees: Sequence[DraftTree], before: np.ndarray, best: BestTokens) -> None:
        """These trees were verified. before: int32 [trees, 2], the tokens before each root, see `Recycled.add`."""

        def ranked() -> Ranked:
            token_ids = np.concatenate([tree.token_ids for tree in trees])
            parents = np.concatenate([tree.parents for tree in trees])
            return token_ids, parents, np.array([len(tree) for tree in trees]), before, *best()

        if self._on:
            self._pending = ranked

    def add_pending(self) -> None:
        """Add what was noted to the table."""
        if self._pending is None:
            return
        ranked, self._pending = self._pending, None
        self.table.add(*ranked())
        self.has_keys = True

    def observe(self, seconds: float, accepted: int, step_seconds: float, emitted: float, rows: int) -> None:
        """A step in which the source took `seconds` and `accepted` of its tokens were accepted. See `SourceUtility.observe`."""
        if self._on:
            self._utility.observe(seconds, accepted, step_seconds, emitted, rows)
