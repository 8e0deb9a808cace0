"""Measures the speedup of a run over plain decoding. In: its steps and rows as they end. Out: a speedup, how sure it is.

A run takes plain steps now and then (policy.py): they are timed as a plain run takes them. What plain decoding of
the whole run would have taken is then

    all that lies outside of decode steps, less what drafts learn there  +  prefill  +  the plain run's decode steps

Prefill is what it took, less drafting and the share of draft tokens in the forward. How many decode steps the plain run takes,
and with how many rows each, follows from the lengths of prompts and answers (`PlainRun`): rows that end at other times than
with drafts leave other batches behind. Seconds of a step of n rows are those of the plain steps that were timed; where none of
that size was, the cost curve gives the ratio to those that were.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

BLOCK = 0.25  # seconds of plain steps that count as one measurement, as what slows a machine lasts longer than a step
MOST_BLOCKS = 1000  # about: in longer runs blocks are longer
SCATTER = 0.04  # standard deviation of a block, at least: the rest is what few blocks do not show
UNKNOWN = 0.5  # standard deviation where no block has been measured
FEW = 16  # timed steps of a size that count as much as the ratio to other sizes
WIDEST = 0.25  # of the speedup: an interval that reaches further to each side is not a measurement

Block = dict[int, tuple[float, int]]  # plain steps, by their rows: seconds, and how many


class Speedup(NamedTuple):
    """Seconds that a run took, that plain decoding would have taken, and two standard deviations of these.

    why: it is not measured, where it is not.
    """

    seconds: float
    plain_seconds: float
    error_seconds: float
    why: str = "too short"

    @property
    def is_measured(self) -> bool:
        return self.seconds > 0 and self.error_seconds <= WIDEST * self.plain_seconds

    @property
    def value(self) -> float:
        return self.plain_seconds / self.seconds

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = self.plain_seconds - self.error_seconds, self.plain_seconds + self.error_seconds
        return low / self.seconds, high / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Names as in manifests, metrics and `--json`."""
        if not self.is_measured:
            return {"speedup_over_plain": None, "speedup_not_measured": self.why}
        low, high = (round(bound, 4) for bound in self.bounds)
        return {"speedup_over_plain": round(self.value, 4), "speedup_low": low, "speedup_high": high}

    def with_loading(self, seconds: float) -> float:
        """The speedup of a job that took as long to load either way."""
        return (self.plain_seconds + seconds) / (self.seconds + seconds)

    def __str__(self) -> str:
        """1.38 and 1.52 -> "1.38 to 1.52x plain"."""
        low, high = self.bounds
        if not self.is_measured:
            return f"speedup not measured: {self.why}"
        digits = 1 if high >= 10 else 2
        ends = f"{low:.{digits}f}", f"{high:.{digits}f}"
        return f"{ends[0]}x plain" if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}x plain"


def total(speedups: Iterable[Speedup | None]) -> Speedup | None:
    """Sum the speedups of several engines of one job; None if none has one."""
    known = [each for each in speedups if each]
    if not known:
        return None
    seconds, plain, error, whys = zip(*known, strict=True)
    return Speedup(sum(seconds), sum(plain), sum(error), whys[0])


class PlainRun:
    """The decode steps of plain decoding. Rows come in the order in which they took their slots.

    steps: by rows that decode in them; those that prefill are left out, though rows alongside decode in them, too.
    """

    def __init__(self, prefill_chunk: int):
        self.steps: Counter[int] = Counter()
        self._chunk = prefill_chunk
        self._room = 0  # tokens that the latest step can still prefill
        self._now = 0  # steps so far
        self._ends: list[int] = []  # heap: the step at which each running row ends

    def copy(self) -> PlainRun:
        other = PlainRun(self._chunk)
        other.steps, other._room, other._now, other._ends = self.steps.copy(), self._room, self._now, [*self._ends]
        return other

    def add(self, prefilled: int, emitted: int, batch_size: int) -> None:
        """The next row: tokens of its prompt that are prefilled and of its answer. batch_size: rows at once."""
        while len(self._ends) >= batch_size:
            self._decode_to_next_end()
        steps = max(0, -(-(prefilled - self._room) // self._chunk))
        self._room += steps * self._chunk - prefilled
        self._now += steps
        heapq.heappush(self._ends, self._now + emitted - 1)  # the first token comes from the prefill

    def finish(self) -> None:
        """No further rows."""
        while self._ends:
            self._decode_to_next_end()

    def _decode_to_next_end(self) -> None:
        end = heapq.heappop(self._ends)
        if end > self._now:
            self.steps[len(self._ends) + 1] += end - self._now
            self._now, self._room = end, 0


class PlainTime:
    """Keeps what plain decoding of a run would have taken; a call takes microseconds.

    expected: seconds of a plain step of that many rows, of which ratios count.
    """

    def __init__(self, expected: Callable[[int], float], prefill_chunk: int):
        self._expected = expected
        self._run = PlainRun(prefill_chunk)
        self.batch_size = 1
        self._ended: dict[int, tuple[int, int]] = {}  # by number: rows that wait for one before them
        self._next = 0  # number of the next row of the plain run
        self._blocks: list[Block] = []
        self._continues, self._block_seconds = False, 0.0  # the latest block
        self.seconds = 0.0  # of the run
        self.decode_seconds = 0.0  # of steps that only decode
        self.draft_seconds = 0.0  # that drafts took outside of these

    def plain_step(self, rows: int, seconds: float, steps: int = 1) -> None:
        """Plain steps were timed, as a plain run takes them. seconds: of all of these."""
        if not self._continues:
            self._blocks.append({})
            self._block_seconds = 0.0
        block = self._blocks[-1]
        before, known = block.get(rows, (0.0, 0))
        block[rows] = before + seconds, known + steps
        self._block_seconds += seconds
        self._continues = self._block_seconds < max(BLOCK, self.decode_seconds / MOST_BLOCKS)

    def prefill_step(self, seconds: float, draft_seconds: float, drafted: float) -> None:
        """A step that prefills has ended. draft_seconds: of it, in drafting. drafted: share of draft tokens in its forward."""
        self.draft_seconds += draft_seconds + drafted * (seconds - draft_seconds)

    def next_block(self) -> None:
        """Drafts come between the plain steps so far and the next ones."""
        self._continues = False

    def rows_at_once(self, rows: int) -> None:
        self.batch_size = max(self.batch_size, rows)

    def row_ended(self, number: int, prefilled: int, emitted: int) -> None:
        """number: of the row, in the order in which rows took slots, from 0."""
        self._ended[number] = prefilled, emitted
        while self._next in self._ended:
            self._run.add(*self._ended.pop(self._next), self.batch_size)
            self._next += 1

    def speedup(self, running: Iterable[tuple[int, int]] = ()) -> Speedup | None:
        """So far; None before the first step. running: (prefilled, emitted) of rows that have not ended."""
        if self.seconds <= 0:
            return None
        run = self._run.copy()
        for row in (*(self._ended[number] for number in sorted(self._ended)), *running):
            run.add(*row, self.batch_size)
        run.finish()
        timed: Block = {}
        for block in self._timed:
            for rows, (seconds, steps) in block.items():
                before, known = timed.get(rows, (0.0, 0))
                timed[rows] = before + seconds, known + steps
        decoding = sum(count * self._seconds_of(rows, timed) for rows, count in run.steps.items())
        other = self.seconds - self.decode_seconds - self.draft_seconds
        return Speedup(self.seconds, other + decoding, 2 * self._deviation(timed) * decoding)

    @property
    def _timed(self) -> list[Block]:
        """Blocks but the first, in which memory is touched for the first time, unless it is all there is."""
        return self._blocks[1:] or self._blocks

    def _seconds_of(self, rows: int, timed: Block) -> float:
        """Seconds of a plain step of that many rows: as timed, and by the curve from other timed steps."""
        if not timed:
            return self._expected(rows)
        by_curve = sum(seconds * self._expected(rows) / self._expected(n) for n, (seconds, _) in timed.items())
        by_curve /= sum(steps for _, steps in timed.values())
        seconds, steps = timed.get(rows, (0.0, 0))
        return (seconds + FEW * by_curve) / (steps + FEW)

    def _deviation(self, timed: Block) -> float:
        """Standard deviation of the pace of plain steps, relative to it."""
        if not timed:
            return UNKNOWN
        apart = total = 0.0
        for block in self._timed:
            expected = sum(steps * timed[rows][0] / timed[rows][1] for rows, (_, steps) in block.items())
            seconds = sum(seconds for seconds, _ in block.values())
            apart, total = apart + (seconds / expected - 1) ** 2 * expected, total + expected
        return float(((SCATTER**2 + apart / total) / len(self._timed)) ** 0.5)
