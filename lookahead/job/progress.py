"""How a job is doing, and what it came to. In: its totals, changed by who writes rows. Out: rows, speed, time left, metrics.

Metrics are in the Prometheus text format, for a collector that reads files.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lookahead.draft.counts import DraftCounts
from lookahead.errors import LookaheadError, UsageError
from lookahead.files.atomic import replacing

if TYPE_CHECKING:
    from lookahead.budget.speedup import Speedup
    from lookahead.decode.engine import Clock, Generation


MOST_POINTS = 128  # of the speedup over the time of a run
LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def labels_of(pairs: Iterable[str], job: str, model: str) -> dict[str, str]:
    """Labels of metrics: output, model, and pairs such as "team=search", which win. Raises UsageError for a wrong pair."""
    given: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not LABEL.fullmatch(name):
            wanted = "give NAME=VALUE, with a NAME of letters, digits and _, such as team=search."
            raise UsageError(f"--metrics-label {pair}: {wanted}")
        if name == "source":
            raise UsageError(f"--metrics-label {pair}: source is the label of the draft source. Choose another name.")
        if name in given:
            raise UsageError(f"--metrics-label {pair}: {name} is given twice.")
        given[name] = value
    return {"job": job, "model": model, **given}


def metrics_text(totals: JobTotals, gauges: Mapping[str, float | None], labels: Mapping[str, str] | None = None) -> str:
    """One family after the other, each with its help and type. gauges: further values; None is left out. labels: of all."""
    edl = totals.rounded_edl
    of_all = ",".join(f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items())
    counters = (
        ("rows_total", "Rows written, failed ones included.", totals.rows),
        ("rows_failed_total", "Rows written as errors.", totals.errors),
        ("prompt_tokens_total", "Tokens of prompts.", totals.prompt_tokens),
        ("completion_tokens_total", "Tokens of answers.", totals.tokens),
        ("decode_steps_total", "Decode steps, summed over rows.", totals.steps),
        ("draft_tokens_total", "Tokens drafted.", totals.draft_tokens),
        ("accepted_tokens_total", "Draft tokens accepted, by draft source.", None),
        ("busy_seconds_total", "Seconds spent in answering.", round(totals.seconds, 3)),
    )
    by_source: list[tuple[str, float]] = [
        (f'source="{_escaped(name)}"', count) for name, count in sorted(totals.accepted_by_source.items())
    ]
    families: list[tuple[str, str, str, list[tuple[str, float]]]] = [
        (name, "counter", about, by_source if value is None else [("", value)]) for name, about, value in counters
    ]
    if edl is not None:
        families.append(("edl", "gauge", "Effective decoding length: tokens per decode step.", [("", edl)]))
    for name, value in gauges.items():
        if value is not None:
            families.append((name, "gauge", f"{name.replace('_', ' ').capitalize()}.", [("", round(value, 4))]))
    lines = []
    for name, kind, help_text, samples in families:
        lines += [f"# HELP lookahead_{name} {help_text}", f"# TYPE lookahead_{name} {kind}"]
        for own, value in samples:
            both = ",".join(filter(None, (of_all, own)))
            lines.append(f"lookahead_{name}{{{both}}} {value}" if both else f"lookahead_{name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    label = label.encode("utf-8", "replace").decode("utf-8")  # a name's bytes may be no UTF-8
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@dataclasses.dataclass
class JobTotals(DraftCounts):
    """Sums over rows of a job. faults: errors that may succeed when tried again. first_tokens: answers that have one."""

    rows: int = 0
    errors: int = 0
    faults: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    first_tokens: int = 0
    seconds: float = 0.0

    @property
    def edl(self) -> float | None:
        """Effective decoding length; None where no decode step was taken, as for answers of one token."""
        return (self.tokens - self.first_tokens) / self.steps if self.steps else None

    @property
    def rounded_edl(self) -> float | None:
        return None if self.edl is None else round(self.edl, 4)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, generation: Generation) -> None:
        self.tokens += len(generation.token_ids)
        self.first_tokens += bool(generation.token_ids)
        self.add_counts(generation)

    def merge(self, other: JobTotals) -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.accepted_by_source.update(other.accepted_by_source)

    def minus(self, other: JobTotals) -> JobTotals:
        counts = {name: getattr(self, name) - getattr(other, name) for name in _SUMS}
        return JobTotals(accepted_by_source=self.accepted_by_source - other.accepted_by_source, **counts)

    def as_json(self) -> dict[str, Any]:
        """The object that `generate --json` prints."""
        names = ("rows", "errors", "faults", "prompt_tokens", "tokens", "steps", "draft_tokens", "accepted_tokens")
        return {
            **{name: getattr(self, name) for name in names},
            "seconds": round(self.seconds, 4),
            "accepted_by_source": dict(self.accepted_by_source),
            "edl": self.rounded_edl,
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


_SUMS = [field.name for field in dataclasses.fields(JobTotals) if field.name != "accepted_by_source"]


class JobProgress:
    """Called after each step of a job; mostly does nothing. loading_seconds: before the first row could be answered.

    totals: of the job, changed by who writes rows. count: gives its rows once they are known. speedup: gives that of this run
    so far. clock: of the engine of this process. labels: of the metrics.
    """

    def __init__(
        self,
        totals: JobTotals,
        count: Callable[[], int | None] = lambda: None,
        speedup: Callable[[], Speedup | None] = lambda: None,
        clock: Clock | None = None,
        loading_seconds: float = 0.0,
        labels: Mapping[str, str] | None = None,
    ):
        self.totals, self.clock, self._count, self._speedup = totals, clock, count, speedup
        self.loading_seconds, self._labels = loading_seconds, labels
        self.before = JobTotals()  # of earlier runs of the job
        self.before.merge(totals)
        self.began = time.monotonic()
        self._due: dict[Callable[[], None], tuple[float, float]] = {}  # when each is, and its interval
        self.speedup_over_time: list[tuple[float, float, float]] = []  # of this run: (seconds, low, high)
        self._point_seconds = 1.0  # between two of these, at least
        self._metrics_failed = False

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        self._due[act] = time.monotonic() + seconds, seconds

    def __call__(self) -> None:
        now = time.monotonic()
        for act, (due, seconds) in self._due.items():
            if now >= due:
                act()
                self._due[act] = time.monotonic() + seconds, seconds

    def note_speedup(self) -> None:
        """Keep the speedup so far, if it is measured. Each time there are MOST_POINTS, every other one is dropped."""
        seconds, points = self.seconds, self.speedup_over_time
        if points and seconds < points[-1][0] + self._point_seconds:
            return
        if (found := self.speedup) and found.is_measured:
            low, high = found.bounds
            points.append((round(seconds, 2), round(low, 3), round(high, 3)))
        if len(points) == MOST_POINTS:
            del points[::2]
            self._point_seconds *= 2

    @property
    def run(self) -> JobTotals:
        return self.totals.minus(self.before)

    @property
    def expected(self) -> int | None:
        return self._count()

    @property
    def seconds(self) -> float:
        return max(1e-9, time.monotonic() - self.began)

    @property
    def speedup(self) -> Speedup | None:
        """Speedup of this run over plain decoding; None of plain decoding itself, and before the first step."""
        found = self._speedup()
        if not found or not self.clock:
            return found
        rest = max(0.0, self.seconds - found.seconds)  # outside of the engine, such as in writing rows
        return found._replace(seconds=found.seconds + rest, plain_seconds=found.plain_seconds + rest)

    @property
    def seconds_left(self) -> float | None:
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
            with replacing(path, "w") as file:
                file.write(metrics_text(self.totals, gauges, self._labels))
        except LookaheadError as error:
            if not self._metrics_failed:
                notice(f"--metrics {error} The job continues.")
            self._metrics_failed = True


@dataclasses.dataclass(frozen=True)
class JobReport:
    """state: complete; stopped, with rows left to answer; or led, where another process leads. out: None: stdout.

    totals: of the whole job; run: of this run, which took `seconds` after loading_seconds. expected: rows of the job, if known.
    used: workers, batch size, peak memory (bytes) and path of forwards, by name. resumable: it writes to a file. estimate: of
    this run by the rows before it, as JSON; disk_bytes: what the files of the job take.
    """

    state: Literal["complete", "stopped", "led"]
    model: str
    out: str | None
    totals: JobTotals = dataclasses.field(default_factory=JobTotals)
    run: JobTotals = dataclasses.field(default_factory=JobTotals)
    seconds: float = 0.0
    loading_seconds: float = 0.0
    speedup: Speedup | None = None
    expected: int | None = None
    used: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    resumable: bool = False
    estimate: Mapping[str, Any] | None = None
    disk_bytes: int = 0

    @classmethod
    def of(cls, progress: JobProgress, **about: Any) -> JobReport:
        names = ("totals", "run", "seconds", "loading_seconds", "speedup", "expected")
        return cls(**{name: getattr(progress, name) for name in names}, **about)

    def as_json(self) -> dict[str, Any]:
        """The object that `generate --json` prints."""
        estimate = {"estimate": self.estimate, "disk_bytes": self.disk_bytes} if self.estimate else {}
        return {"model": self.model, "output": self.out, **self.totals.as_json(), **clocked(self), **self.used, **estimate}


def clocked(of: JobProgress | JobReport) -> dict[str, Any]:
    """Return what the clock gave for a run: of `--json` and of manifests."""
    counts = {"run_rows": of.run.rows, "run_tokens": of.run.tokens, "run_seconds": round(of.seconds, 3)}
    speedup = {} if of.speedup is None else of.speedup.as_json()
    return {**counts, "loading_seconds": round(of.loading_seconds, 3), **speedup}


def why_no_drafts(used: Mapping[str, Any]) -> str:
    """Why most steps had no drafts, and what to do; "" where they had."""
    if not (share := used.get("steps_without_drafts")):
        return ""
    rows, cost = used["rows_at_once"], used["cost_of_16_draft_tokens"]
    reason = "too few would be accepted for what they cost"
    if cost:
        reason += f": 16 draft tokens in a forward of {rows} row{'s' if rows > 1 else ''} take it to {cost:.1f} times"
    fewer = "fewer rows at once make a draft cheaper (compare with lookahead bench --batch-size 1), and " if rows > 1 else ""
    return f"in {share:.0%} of the steps: {reason}; {fewer}a --trie of such texts makes more be accepted"
