"""How a job is doing: a bar on a terminal, else a line now and then; a metrics file; a table at the end. All on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lookahead.errors import LookaheadError
from lookahead.job.metrics import write_metrics
from lookahead.job.totals import JobTotals
from lookahead_cli import logs, render

if TYPE_CHECKING:
    from lookahead.decode.engine import Clock

BAR_SECONDS, METRICS_SECONDS, SAVE_SECONDS, TIMES_SECONDS = 0.25, 5.0, 10.0, 60.0
PARTS = ("draft", "forward", "verify")  # of a step, as the engine's clock has them


@dataclasses.dataclass
class Every:
    """Does something when `seconds` have gone by since the last time."""

    seconds: float
    act: Callable[[], None]
    due: float = 0.0


class JobProgress:
    """Called after each step of a job; mostly does nothing.

    totals: of the job, changed by who writes rows. count: gives its rows as soon as they are known, until then None.
    gain: gives (seconds that plain decoding would have taken, seconds taken) by this run so far, or None.
    """

    def __init__(self, totals: JobTotals, count: Callable[[], int | None], gain: Callable[[], tuple[float, float] | None]):
        self.totals, self._count, self._gain = totals, count, gain
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
    def speedup(self) -> float | None:
        """Over plain decoding, of this run; at most its EDL. None of one row, or where too little has been measured."""
        gain, run = self._gain(), self.run
        return min(gain[0] / gain[1], run.edl) if gain and run.rows > 1 and run.steps else None

    @property
    def seconds_left(self) -> float | None:
        """None where that cannot be known."""
        rows, expected = self.totals.rows - self.before.rows, self.expected
        if expected is None or not rows:
            return None
        return max(0, expected - self.totals.rows) * self.seconds / rows

    @property
    def rows(self) -> str:
        """How many of how many."""
        expected = self.expected
        of = f" of {expected:,}" if expected is not None else ""
        return f"{self.totals.rows:,}{of} rows"

    def note(self) -> str:
        """Speed in words."""
        run, speedup = self.run, self.speedup
        parts = [f"{run.tokens / self.seconds:,.0f} tokens/s", f"EDL {run.edl:.2f}"]
        if speedup:
            parts.append(f"{speedup:.1f}x plain")
        if self.totals.errors:
            parts.append(f"{self.totals.errors:,} failed")
        return ", ".join(parts)

    def line(self, on_stderr: bool = True) -> None:
        """A line on stderr, with a time stamp, and in the log file; or there alone."""
        left = self.seconds_left
        ending = f", {duration(left)} left" if left is not None else ""
        text = f"{self.rows}, {self.note()}{ending}"
        logs.note(text)
        if on_stderr:
            render.err.print(f"{logs.stamp(timespec='seconds')} {text}")

    def metrics(self, path: Path) -> None:
        """Replace the metrics file. One that can no longer be written does not end the job."""
        gauges = {
            "rows_expected": self.expected,
            "tokens_per_second": self.run.tokens / self.seconds,
            "speedup_over_plain": self.speedup,
            "seconds_left": self.seconds_left,
        }
        try:
            write_metrics(path, self.totals, gauges, self.labels)
        except LookaheadError as error:
            if not self._metrics_failed:
                render.notice(f"--metrics {error} The job goes on.")
            self._metrics_failed = True

    def table(self, on_stderr: bool = True) -> None:
        """What the job came to: on stderr and in the log file; or there alone."""
        totals, run = self.totals, self.run
        rows = [("rows", f"{totals.rows:,} ({totals.errors:,} failed)"), ("tokens", f"{totals.tokens:,}")]
        if self.before.rows:
            rows.append(("in this run", f"{run.rows:,} rows, {run.tokens:,} tokens"))
        rows += [
            ("time", duration(self.seconds)),
            ("speed", f"{run.tokens / self.seconds:,.1f} tokens/s" + (f", {s:.1f}x plain" if (s := self.speedup) else "")),
            ("EDL", f"{run.edl:.2f}"),
        ]
        if total := sum(run.accepted_by_source.values()):
            shares = [f"{name} {count / total:.0%}" for name, count in run.accepted_by_source.most_common()]
            rows.append(("accepted by", ", ".join(shares)))
        for name, value in rows:
            logs.note(f"{name}: {value}")
        if on_stderr:
            render.summary(rows)


class StepTimes:
    """Logs what steps took on average, since the last time."""

    def __init__(self, clock: Clock):
        self._clock, self._before = clock, dataclasses.replace(clock)

    def __call__(self) -> None:
        now, before = dataclasses.replace(self._clock), self._before
        if steps := now.steps - before.steps:
            parts = (f"{part} {1e3 * (getattr(now, part) - getattr(before, part)) / steps:.2f} ms" for part in PARTS)
            logs.package.info("%s", f"{steps:,} steps: {', '.join(parts)} on average")
        self._before = now


@contextlib.contextmanager
def shown(
    progress: JobProgress, wanted: bool, metrics: Path | None, save: Callable[[], None], clock: Clock | None = None
) -> Iterator[None]:
    """Show the progress of a job for as long as the block runs. save: what else is to be done every ten seconds.

    clock: of the engine; what steps take is logged every minute.
    """
    progress.every(SAVE_SECONDS, save)
    times = StepTimes(clock) if clock else None
    if times:
        progress.every(TIMES_SECONDS, times)
    if metrics is not None:
        progress.metrics(metrics)
        progress.every(METRICS_SECONDS, lambda: progress.metrics(metrics))
    with render.progress("answering", progress.expected, wanted, progress.totals.rows) as update:
        if wanted and render.err.is_terminal:
            progress.every(BAR_SECONDS, lambda: update(progress.totals.rows, progress.note(), progress.expected))
        elif wanted or logs.is_kept():
            progress.every(logs.LINE_SECONDS, lambda: progress.line(on_stderr=wanted))
        yield
    if times:
        times()
    if metrics is not None:
        progress.metrics(metrics)


def duration(seconds: float) -> str:
    """3725 -> "1 h 2 min", 65 -> "1 min 5 s", 2.5 -> "2.5 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
