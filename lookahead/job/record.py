"""What each row of a job took. In: a job's output, finished or running. Out: counts of its rows in the order of completion.

They are read from the journal next to the output, else from the rows themselves; nothing is locked or written.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lookahead.budget.speedup import Speedup, total
from lookahead.corpus.read import CorpusReport, json_rows, parquet_rows
from lookahead.errors import CorpusError, LookaheadError
from lookahead.files.outputs import kind_of
from lookahead.job.fields import OWN
from lookahead.job.journal import COUNTS, entries
from lookahead.job.lock import JobFiles
from lookahead.job.progress import JobTotals
from lookahead.printable import in_one_line

CLOCKED = (  # of a run in a manifest, see progress.py
    *("run_rows", "run_tokens", "run_seconds", "loading_seconds"),
    *("speedup_over_plain", "speedup_low", "speedup_high", "speedup_not_measured", "speedup_over_time"),
)
SHORTEST, LONGEST_BUCKET = 16, 1 << 20  # tokens of a prompt or an answer: bounds of the table's rows
MOST_RUNS, MOST_FAILED = 10, 10  # that are listed
LENGTHS = {"prompt": "prompt_tokens", "answer": "tokens"}  # which count of a row is its length


@dataclasses.dataclass(frozen=True)
class RowRecord:
    """One row. number: of its request, from 1. ended: seconds of answering after which it was there; seconds: from its first
    step to its last; None if unknown. error: type of its error, or "".
    """

    number: int
    counts: JobTotals
    ended: float | None = None
    id: Any = None
    seconds: float | None = None
    error: str = ""

    @property
    def edl(self) -> float | None:
        return self.counts.edl

    def length(self, of: str) -> int:
        """Tokens of its prompt or its answer, see LENGTHS."""
        return int(getattr(self.counts, LENGTHS[of]))

    def as_json(self) -> dict[str, Any]:
        counts = self.counts.as_json()
        names = ("prompt_tokens", "tokens", "steps", "draft_tokens", "accepted_tokens", "edl")
        return {
            "row": self.number,
            "id": self.id,
            "failed": bool(self.counts.errors),
            **{name: counts[name] for name in names},
            "ended_seconds": None if self.ended is None else round(self.ended, 4),
            "row_seconds": self.seconds,
        }


@dataclasses.dataclass(frozen=True)
class Part:
    """Some rows of a job. name: their lengths, or numbers as completed. row_seconds: mean of a row; None: unknown."""

    name: str
    rows: int
    counts: JobTotals
    ended: float | None = None
    row_seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        counts, rate = self.counts, round(self.counts.tokens_per_second, 2)
        value = {"part": self.name, "rows": self.rows, "tokens": counts.tokens, "edl": counts.rounded_edl}
        value |= {} if self.ended is None else {"ended_seconds": round(self.ended, 4)}
        value |= {"tokens_per_second": rate} if counts.seconds else {}
        value |= {} if self.row_seconds is None else {"row_seconds": round(self.row_seconds, 4)}
        return {**value, "accepted_by_source": dict(counts.accepted_by_source.most_common())}


@dataclasses.dataclass(frozen=True)
class JobRecord:
    """A job. rows: in the order of completion. state: of its manifest, "" without one. runs: what the clock gave for each.
    latest: its latest run, all that the manifest has of it. updated: when the manifest was written, in seconds of Unix time.
    """

    name: str
    rows: list[RowRecord]
    state: str = ""
    model: str = ""
    runs: Sequence[Mapping[str, Any]] = ()
    latest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    updated: float = 0.0

    @property
    def latest_run(self) -> str:
        """Return how long it took, and its speedup over plain decoding; "" where nothing is known."""
        run = self.runs[-1] if self.runs else {}
        if not {"run_seconds", "loading_seconds"} <= run.keys():
            return ""
        line = "latest run: {run_seconds:,.1f} s, after {loading_seconds:,.1f} s of loading".format_map(run)
        return ", ".join(filter(None, (line, _speedup_of(run))))

    @property
    def speedup(self) -> Speedup | None:
        """That of all runs in which it was measured; None if it was in none."""
        return total(map(_measured_in, self.runs))

    @property
    def speedup_over_time(self) -> list[list[tuple[float, float, float]]]:
        """For each run in which it was measured: (seconds of the job, bounds of the speedup of this run until then)."""
        found, before = [], 0.0
        for run in self.runs:
            found.append([(before + at, low, high) for at, low, high in run.get("speedup_over_time", ())])
            before += run.get("run_seconds", 0.0)
        return [points for points in found if points]

    @functools.cached_property
    def totals(self) -> JobTotals:
        return added(self.rows)

    def by_length(self, of: str) -> list[Part]:
        """Answered rows by the length of their prompt or answer (see LENGTHS), doubling from one part to the next."""
        parts: dict[int, list[RowRecord]] = {}
        for row in self.rows:
            if row.counts.steps:
                bound = SHORTEST
                while bound < min(row.length(of) + 1, LONGEST_BUCKET):
                    bound *= 2
                parts.setdefault(bound, []).append(row)
        found = []
        for bound, rows in sorted(parts.items()):
            seconds = [row.seconds for row in rows if row.seconds is not None]
            name = f"{bound // 2 if bound > SHORTEST else 1:,} to {bound - 1:,}"
            found.append(Part(name, len(rows), added(rows), row_seconds=fmean(seconds) if seconds else None))
        return found

    def by_time(self, most: int = 10) -> list[Part]:
        """Rows as completed, in parts of as many seconds each, or of as many rows; a part without rows is one with the next."""
        count, last = min(most, len(self.rows)), self.rows[-1].ended if self.rows else None
        if last:
            ends = [row.ended or 0.0 for row in self.rows]
            bounds = [bisect_right(ends, last * n / count) for n in range(count)] + [len(ends)]
        else:
            bounds = [len(self.rows) * n // count for n in range(count + 1)] if count else []
        parts, before = [], 0.0
        for n in range(1, len(bounds)):
            begin, end = bounds[n - 1], bounds[n]
            if begin == end:
                continue
            counts = added(self.rows[begin:end])
            ended = last * n / count if last else None
            counts.seconds, before = (ended - before, ended) if ended else (0.0, 0.0)
            parts.append(Part(f"{begin + 1:,} to {end:,}", end - begin, counts, ended))
        return parts

    def edl_quantiles(self) -> dict[str, float]:
        found = sorted(row.edl for row in self.rows if row.edl is not None)
        if not found:
            return {}
        at = {"least": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "most": 1.0}
        return {name: found[round(share * (len(found) - 1))] for name, share in at.items()}

    def extremes(self, most: int = 5) -> list[RowRecord]:
        found = sorted((row for row in self.rows if row.edl is not None), key=lambda row: row.edl or 0.0)
        return found if len(found) <= 2 * most else [*found[:most], *found[-most:]]

    def slowest(self, most: int = 5) -> list[RowRecord]:
        """Rows that took longest from their first step to their last; none where that is not known."""
        return sorted((row for row in self.rows if row.seconds), key=lambda row: -(row.seconds or 0.0))[:most]

    def as_json(self) -> dict[str, Any]:
        """The object that `lookahead report --json` prints."""
        return {
            "job": self.name,
            "state": self.state or None,
            "model": self.model or None,
            "runs": list(self.runs),
            **self.totals.as_json(),
            "edl_of_rows": {name: round(value, 4) for name, value in self.edl_quantiles().items()},
            **{f"by_{each}_length": [part.as_json() for part in self.by_length(each)] for each in LENGTHS},
            "by_time": [part.as_json() for part in self.by_time()],
            "by_row": [row.as_json() for row in self.rows],
        }


def added(rows: Sequence[RowRecord]) -> JobTotals:
    totals = JobTotals()
    for row in rows:
        totals.merge(row.counts)
    return totals


def title_of(record: JobRecord) -> str:
    totals = record.totals
    parts = [f"{record.name}: {totals.rows:,} rows", f"{totals.tokens:,} tokens", f"EDL {shown_edl(totals.edl)}", record.state]
    return ", ".join(filter(None, parts))


class Table(NamedTuple):
    """left: as many of its columns are text, the others numbers."""

    title: str
    columns: list[str]
    rows: list[tuple[str, ...]]
    left: int = 1


def tables(record: JobRecord) -> dict[str, Table]:
    """By name; those that would be empty are left out."""
    totals, by_time, quantiles = record.totals, record.by_time(), record.edl_quantiles()
    by_sources, steps, accepted = sum(totals.accepted_by_source.values()), max(1, totals.steps), totals.accepted_tokens
    by_source: list[tuple[str, ...]] = [
        (in_one_line(name), f"{count:,}", f"{count / by_sources:.1%}", f"{count / steps:.2f}")
        for name, count in totals.accepted_by_source.most_common()
    ]
    drafts, extremes = totals.draft_tokens, record.extremes() if totals.draft_tokens else []
    fates = ("accepted", accepted), ("not accepted", drafts - accepted), ("all", drafts)
    drafted: list[tuple[str, ...]] = [
        (kind, f"{count:,}", f"{count / drafts:.1%}", f"{count / steps:.2f}") for kind, count in fates if drafts
    ]
    edls = [tuple(map(shown_edl, quantiles.values()))] if drafts and quantiles else []
    timed = any(row.ended is not None for row in record.rows)
    of_rows = ["s/row"] if any(row.seconds is not None for row in record.rows) else []
    failed: list[tuple[str, ...]] = [
        (f"{row.number:,}", name_of(row), in_one_line(row.error)) for row in record.rows if row.error
    ]
    row, numbers = ["row", "id"], ["prompt", "tokens", "steps", "drafted", "accepted", "EDL", *of_rows]
    completed = ["completed", "rows", "tokens", "EDL", *(["until s", "tokens/s"] if timed else [])]
    lengths = [(each, [f"{each} tokens", "rows", "tokens", "EDL", *of_rows], record.by_length(each)) for each in LENGTHS]
    found = {
        "sources": Table("Accepted tokens by source", ["source", "tokens", "share", "per step"], by_source),
        "drafts": Table("Draft tokens", ["draft", "tokens", "share", "per step"], drafted),
        **{f"{each}s": Table(f"EDL by {each} length", columns, [*map(_of_part, parts)]) for each, columns, parts in lengths},
        "time": Table("EDL over time, rows as they were completed", completed, [*map(_of_part, by_time)]),
        "edl": Table("EDL of rows", [*quantiles], edls, 0),
        "extremes": Table("Rows of the lowest and the highest EDL", [*row, *numbers], [*map(_of_row, extremes)], 2),
        "slowest": Table("Rows that took longest", [*row, *numbers], [*map(_of_row, record.slowest())], 2),
        "failed": Table(f"{len(failed):,} failed rows", [*row, "error"], failed[:MOST_FAILED], 3),
        "runs": Table("Runs", ["run", *RUN], _of_runs(record.runs) if len(record.runs) > 1 else []),
    }
    return {name: table for name, table in found.items() if table.rows}


def shown_edl(edl: float | None) -> str:
    return "-" if edl is None else f"{edl:.2f}"


RUN = ["rows", "tokens", "seconds", "loading", "tokens/s", "x plain"]


def _of_runs(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, run in list(enumerate(runs, 1))[-MOST_RUNS:]:
        counts = (f"{run.get('run_rows', 0):,}", f"{run.get('run_tokens', 0):,}")
        seconds, loading = run.get("run_seconds", 0.0), run.get("loading_seconds", 0.0)
        rate = run.get("run_tokens", 0) / seconds if seconds else 0.0
        speedup = _speedup_of(run).removeprefix("speedup ").removesuffix(" plain")
        rows.append((f"{number}", *counts, f"{seconds:,.1f}", f"{loading:,.1f}", f"{rate:,.1f}", speedup))
    return rows


def _measured_in(run: Mapping[str, Any]) -> Speedup | None:
    """The speedup of a run of a manifest, None if it was not measured."""
    if not run.get("speedup_over_plain"):
        return None
    seconds = run["run_seconds"]
    error = (run["speedup_high"] - run["speedup_low"]) / 2
    return Speedup(seconds, run["speedup_over_plain"] * seconds, error * seconds)


def _speedup_of(run: Mapping[str, Any]) -> str:
    """In words; "" for plain decoding, and where nothing is known."""
    if found := _measured_in(run):
        return str(found)
    return f"speedup not measured: {run['speedup_not_measured']}" if "speedup_not_measured" in run else ""


def _of_row(row: RowRecord) -> tuple[str, ...]:
    counts = row.counts
    numbers = counts.prompt_tokens, counts.tokens, counts.steps, counts.draft_tokens, counts.accepted_tokens
    seconds = () if row.seconds is None else (f"{row.seconds:,.2f}",)
    return f"{row.number:,}", name_of(row), *(f"{number:,}" for number in numbers), shown_edl(row.edl), *seconds


def name_of(row: RowRecord) -> str:
    """Its id; "" without one."""
    return "" if row.id is None else in_one_line(str(row.id))


def _of_part(part: Part) -> tuple[str, ...]:
    time = () if part.ended is None else (f"{part.ended:,.1f}", f"{part.counts.tokens_per_second:,.1f}")
    seconds = () if part.row_seconds is None else (f"{part.row_seconds:,.2f}",)
    return part.name, f"{part.rows:,}", f"{part.counts.tokens:,}", shown_edl(part.counts.edl), *time, *seconds


def read_record(out: str) -> JobRecord:
    """The job that writes or wrote to `out`. Raises LookaheadError if there is none, or its rows hold no counts."""
    files = JobFiles(Path(out))
    about = _of_manifest(files.manifest)
    if files.journal.exists():
        return JobRecord(out, list(_of_journal(files.journal)), **about)
    if not files.out.is_file():
        raise CorpusError(f"{out}: no such file, and no journal of a job that writes it.")
    rows = list(_of_rows(out))
    if not any(row.counts.steps or row.counts.errors for row in rows):
        raise LookaheadError(
            f"{out}: its rows hold no steps (is it an output of lookahead generate?). Of OpenAI lines the counts stand in "
            f"{files.journal.name}, which is not there."
        )
    return JobRecord(out, rows, **about)


def _of_journal(path: Path) -> Iterator[RowRecord]:
    """The latest line about each row; one that was cut short is left out."""
    latest: dict[int, dict[str, Any]] = {}
    for _, entry in entries(path):
        latest.pop(entry["row"], None)  # so that it stands where it ended last
        latest[entry["row"]] = entry
    ended = 0.0
    for number, entry in latest.items():
        by_source, errors = Counter(entry["accepted_by_source"]), int(bool(entry["error"]))
        counts = JobTotals(rows=1, errors=errors, accepted_by_source=by_source, **{name: entry[name] for name in COUNTS})
        ended += counts.seconds  # since the row before it
        yield RowRecord(number + 1, counts, ended, entry.get("id"), _seconds(entry.get("row_seconds")), entry["error"])


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < math.inf else None


def _of_rows(out: str) -> Iterator[RowRecord]:
    """Read records from output rows themselves. When they ended is not known."""
    found = parquet_rows(out, CorpusReport(), OWN) if kind_of(out) == ".parquet" else json_rows(out)
    for number, row in found:
        if isinstance(row, str):
            continue
        names = ("prompt_tokens", "completion_tokens", "steps", "draft_tokens", "accepted_tokens")
        known = {name: row[name] if type(row.get(name)) is int else 0 for name in names}
        error = row.get("error")
        kind = "" if error is None else str(error.get("type", "error")) if isinstance(error, dict) else "error"
        tokens = known.pop("completion_tokens")
        first, by_source = min(len(row.get("samples") or ()) or 1, tokens), Counter(dict(row.get("accepted_by_source") or {}))
        errors = int(bool(kind))
        counts = JobTotals(rows=1, errors=errors, tokens=tokens, first_tokens=first, accepted_by_source=by_source, **known)
        yield RowRecord(number, counts, id=row.get("id"), seconds=_seconds(row.get("seconds")), error=kind)


def _of_manifest(path: Path) -> dict[str, Any]:
    """What a `JobRecord` has of a manifest; empty where it is not there or cannot be read."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        runs = [{name: run[name] for name in CLOCKED if name in run} for run in manifest["runs"]]
        return {
            "state": str(manifest["state"]),
            "model": str(manifest["answering"]["model"]),
            "runs": [run for run in runs if run],
            "latest": manifest["runs"][-1],
            "updated": float(manifest["updated"]),
        }
    except (OSError, ValueError, LookupError, TypeError):
        return {}
