"""Jobs, benches and replays on screen: a bar on a terminal, else a line now and then; a table at the end. All on stderr.

A job ends well: the first SIGINT or SIGTERM lets the step in progress end, the second ends the process at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from lookahead.job.events import BenchEvents, Events, JobEvents
from lookahead.printable import duration, shares
from lookahead_cli import logs, render
from lookahead_cli.explain import Explainer

if TYPE_CHECKING:
    from lookahead.decode.engine import Clock
    from lookahead.draft.explain import ObserverOf
    from lookahead.job.progress import JobProgress, JobReport
    from lookahead.job.spec import JobSpec

BAR_SECONDS, TIMES_SECONDS = 0.25, 60.0
PARTS = ("draft", "forward", "verify")  # of a step, as the engine's clock has them


@contextlib.contextmanager
def on_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Calls stop(number) of the first signal, as long as the block runs (in the main thread: no other may take signals)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        stop(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # so that the second needs nobody's consent
        show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
        os.write(2, show_cursor + b"\nstopping after this step; once more stops at once\n")

    before = {each: signal.signal(each, first) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class OnScreen(Events):
    """Display that jobs, benches and replays share. stdout_is_free: of answers and JSON, so that steps are shown there."""

    def __init__(self, stdout_is_free: bool):
        self._stdout_is_free = stdout_is_free

    def notice(self, text: str) -> None:
        render.notice(text)

    def with_spinner(self, act: Callable[[], Any], why: str) -> Any:
        return render.with_spinner(act, why)

    def observers(self, tokenizer: Any | None, rows: int, name: str = "") -> ObserverOf:
        return Explainer(render.out if self._stdout_is_free else render.err, tokenizer, rows, name).observer_of


class BenchOnScreen(OnScreen, BenchEvents):
    """Shows how far a bench or a replay is. json: stdout is for one object."""

    def __init__(self, json: bool):
        super().__init__(stdout_is_free=not json)

    @contextlib.contextmanager
    def working(self, what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        with render.progress(what, total, shown=self._stdout_is_free) as update:
            yield lambda done: update(done, unit)


class JobOnScreen(OnScreen, JobEvents):
    """Shows a job as its options ask for. signal: that asked for the end; 0: none did."""

    def __init__(self, spec: JobSpec):
        super().__init__(stdout_is_free=spec.io.out is not None and not spec.reporting.json)
        self.signal = 0
        self._shown = not (spec.reporting.quiet or spec.reporting.explain)

    @contextlib.contextmanager
    def running(self, progress: JobProgress) -> Iterator[None]:
        with on_signals(functools.partial(setattr, self, "signal")), shown(progress, self._shown):
            yield

    def stopped(self) -> bool:
        return self.signal != 0


@contextlib.contextmanager
def shown(progress: JobProgress, wanted: bool) -> Iterator[None]:
    """Show the progress of a job for as long as the block runs; what steps of its engine take is logged every minute."""
    times = _step_times(progress.clock) if progress.clock else None
    if times:
        progress.every(TIMES_SECONDS, times)
    with render.progress("answering", progress.expected, wanted, progress.totals.rows) as update:
        if wanted and render.err.is_terminal:
            progress.every(BAR_SECONDS, lambda: update(progress.totals.rows, speed(progress), progress.expected))
        elif wanted or logs.is_kept():
            progress.every(logs.LINE_SECONDS, lambda: line(progress, on_stderr=wanted))
        yield
    if times:
        times()


def _step_times(clock: Clock) -> Callable[[], None]:
    """Logs what steps took on average, since the last time."""
    before = dataclasses.replace(clock)

    def log() -> None:
        nonlocal before
        now, last, before = clock, before, dataclasses.replace(clock)
        if steps := now.steps - last.steps:
            parts = (f"{part} {1e3 * (getattr(now, part) - getattr(last, part)) / steps:.2f} ms" for part in PARTS)
            logs.package.info("%s", f"{steps:,} steps: {', '.join(parts)} on average")

    return log


def rows_done(of: JobProgress | JobReport) -> str:
    """Return how many rows are done, of how many."""
    expected = f" of {of.expected:,}" if of.expected is not None else ""
    return f"{of.totals.rows:,}{expected} rows"


def speed(progress: JobProgress) -> str:
    """Tokens per second and what drafts bring."""
    from lookahead.job.record import shown_edl

    run, speedup = progress.run, progress.speedup
    parts = [f"{run.tokens / progress.seconds:,.0f} tokens/s", f"EDL {shown_edl(run.edl)}"]
    if speedup and speedup.is_measured:
        parts.append(f"{speedup.value:.1f}x plain")
    if progress.totals.errors:
        parts.append(f"{progress.totals.errors:,} failed")
    return ", ".join(parts)


def line(progress: JobProgress, on_stderr: bool = True) -> None:
    """A line on stderr, with a time stamp, and in the log file; or there alone."""
    left = progress.seconds_left
    ending = f", {duration(left)} left" if left is not None else ""
    text = f"{rows_done(progress)}, {speed(progress)}{ending}"
    logs.note(text)
    if on_stderr:
        render.err.print(f"{logs.stamp(timespec='seconds')} {text}")


def table(report: JobReport, on_stderr: bool = True) -> None:
    """Print what the job came to: on stderr and in the log file; or there alone."""
    from lookahead.job.progress import why_no_drafts
    from lookahead.job.record import shown_edl

    totals, run, shared = report.totals, report.run, report.used.get("prompt_tokens_taken_over", 0)
    rows = [
        ("rows", f"{totals.rows:,} ({totals.errors:,} failed)"),
        ("tokens", f"{totals.tokens:,}"),
        ("in this run", f"{run.rows:,} rows, {run.tokens:,} tokens" if totals.rows > run.rows else ""),
        ("prompts", f"{run.prompt_tokens:,} tokens, {shared:,} of them computed for other rows before" if shared else ""),
        ("time", f"{duration(report.seconds)}, after {duration(report.loading_seconds)} of loading"),
        ("speed", f"{run.tokens / report.seconds:,.1f} tokens/s{_over_plain(report)}"),
        ("estimated", _against_estimate(report)),
        ("EDL", shown_edl(run.edl)),
        ("accepted by", shares(run.accepted_by_source)),
        ("no drafts", why_no_drafts(report.used)),
        ("forward", str(report.used.get("path") or "")),
    ]
    rows = [(name, value) for name, value in rows if value]
    for name, value in rows:
        logs.note(f"{name}: {value}")
    if on_stderr:
        render.summary(rows)


def _against_estimate(report: JobReport) -> str:
    """What the rows before this run let expect, and what it was; "" without enough of them."""
    if not (found := report.estimate):
        return ""
    time, _, disk = render.estimate_parts(found)
    return f"time {time}, was {duration(report.seconds)}, disk {disk}, was {render.size(report.disk_bytes)}"


def _over_plain(report: JobReport) -> str:
    """The speedup, and that with loading where it is another."""
    speedup, loading = report.speedup, report.loading_seconds
    if speedup is None:
        return ""
    if not speedup.is_measured or loading < 0.05 * report.seconds:
        return f", {speedup}"
    return f", {speedup} ({speedup.with_loading(loading):.2f}x with loading)"
