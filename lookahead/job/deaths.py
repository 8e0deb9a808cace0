"""Rows that were in flight when an engine died. In: those of each death. Out: groups to ask again, and rows that are given up.

Nothing reports which row ended the engine, or whether one did. So its rows are asked again in groups, during which the engine
has no other row. A group with which it dies again is divided further, down to single rows. A row with which the engine dies
twice while it has no other is given up. All others are answered, however often they were in flight with such a row.

    16 in flight, the engine dies    8 groups of 2, one dies    2 groups of 1, one dies    asked once more: given up if it dies
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

from lookahead.errors import LookaheadError
from lookahead.job.journal import FinishedRow
from lookahead.job.rows import Request
from lookahead.job.runner import failed

PARTS = 8  # that the rows of a dead engine are divided into
MOST_DEATHS = 2  # of engines that had no other row; then the row fails
DEATHS_IN_A_ROW = 5  # of each engine while no row ends; then the job fails
ENGINE_DIED = "EngineDied"  # the type of the error of such a row


class Retries:
    """What is asked again. engines: that answer the job, whose seed is `seed`. deaths: of all of them."""

    def __init__(self, engines: int = 1, seed: int = 0):
        self._most, self._seed = DEATHS_IN_A_ROW * engines, seed
        self._groups: deque[list[Request]] = deque()
        self._alone: Counter[int] = Counter()  # engines that died with this row alone, by its number
        self._without_rows = self.deaths = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def next_group(self) -> list[Request]:
        """Rows that an engine is to answer while it has no others; none where nothing is asked again."""
        return self._groups.popleft() if self._groups else []

    def row_has_ended(self) -> None:
        self._without_rows = 0

    def died(self, requests: Collection[Request], reason: str) -> list[FinishedRow]:
        """An engine has, with these rows. Returns error rows. Raises LookaheadError where engines die one after the other."""
        self.deaths += 1
        self._without_rows += 1
        if self._without_rows >= self._most:
            raise LookaheadError(
                f"{self._without_rows} engines died one after the other ({reason}). The rows before are safe: the same command "
                "with --resume continues."
            )
        held = list(requests)
        if len(held) == 1:
            (request,) = held
            self._alone[request.number] += 1
            if (deaths := self._alone[request.number]) >= MOST_DEATHS:
                what = f"the engine died {deaths} times while it answered this row alone ({reason})"
                return [failed(request, f"{request.where}: {what}", ENGINE_DIED, self._seed)]
        size = -(-len(held) // PARTS)
        self._groups.extend(held[begin : begin + size] for begin in range(0, len(held), max(1, size)))
        return []
