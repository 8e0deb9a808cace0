"""How a job is doing. In: its totals, changed by who writes rows. Out: rows, speed and time left; acts at intervals."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lookahead.errors import LookaheadError
from lookahead.job.metrics import write_metrics
from lookahead.job.totals import JobTotals

if TYPE_CHECKING:
    from lookahead.budget.speedup import Speedup
    from lookahead.decode.engine import Clock


@dataclasses.dataclass
class Every:
    """Does something when `seconds` have gone by since the last time."""

    seconds: float
    act: Callable[[], None]
    due: float = 0.0


class JobProgress:
    """Called after each step of a job; mostly does nothing.

    totals: of the job, changed by who writes rows. count: gives its rows as soon as they are known, until then None.
    speedup: gives that of this run so far, or None. clock: of the engine of this process; None if others answer.
    loading_seconds: before the first row could be answered.
    """

    def __init__(
        self,
        totals: JobTotals,
        count: Callable[[], int | None] = lambda: None,
        speedup: Callable[[], Speedup | None] = lambda: None,
        clock: Clock | None = None,
        loading_seconds: float = 0.0,
    ):
        self.totals, self.clock, self._count, self._speedup = totals, clock, count, speedup
        self.loading_seconds = loading_seconds
        self.labels: dict[str, str] = {}  # of the metrics
        self.before = JobTotals()  # of earlier runs of the job
        self.before.merge(totals)
        self.began = time.monotonic()
        self._acts: list[Every] = []
        self._metrics_failed = False

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """From now on, call `act` at this interval."""
        self._acts.append(Every(seconds, act, time.monotonic() + seconds))

    def __call__(self) -> None:
        now = time.monotonic()
        for each in self._acts:
            if now >= each.due:
                each.act()
                each.due = time.monotonic() + each.seconds

    @property
    def run(self) -> JobTotals:
        """What this run has added."""
        return self.totals.minus(self.before)

    @property
    def expected(self) -> int | None:
        """Rows of the job; None while they are not known."""
        return self._count()

    @property
    def seconds(self) -> float:
        return max(1e-9, time.monotonic() - self.began)

    @property
    def speedup(self) -> Speedup | None:
        """Of this run over plain decoding; None of plain decoding itself, and before the first step."""
        found = self._speedup()
        if not found or not self.clock:
            return found
        rest = max(0.0, self.seconds - found.seconds)  # outside of the engine, such as in writing rows
        return found._replace(seconds=found.seconds + rest, plain_seconds=found.plain_seconds + rest)

    @property
    def seconds_left(self) -> float | None:
        """None where that cannot be known."""
        rows, expected = self.totals.rows - self.before.rows, self.expected
        if expected is None or not rows:
            return None
        return max(0, expected - self.totals.rows) * self.seconds / rows

    def write_metrics(self, path: Path, notice: Callable[[str], None]) -> None:
        """Replace the metrics file. One that can no longer be written does not end the job: `notice` gets the reason, once."""
        gauges = {
            "rows_expected": self.expected,
            "tokens_per_second": self.run.tokens / self.seconds,
            **(self.speedup.as_json() if self.speedup and self.speedup.is_measured else {}),
            "loading_seconds": self.loading_seconds,
            "seconds_left": self.seconds_left,
        }
        try:
            write_metrics(path, self.totals, gauges, self.labels)
        except LookaheadError as error:
            if not self._metrics_failed:
                notice(f"--metrics {error} The job continues.")
            self._metrics_failed = True
