"""What each row of a job took. In: a job's output, finished or running. Out: counts of its rows in the order of completion.

They are read from the journal next to the output, else from the rows themselves; nothing is locked or written.
"""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    *("speedup_over_plain", "speedup_low", "speedup_high", "speedup_not_measured"),
)
SHORTEST, LONGEST_BUCKET = 16, 1 << 20  # tokens of a prompt: bounds of the table's rows


@dataclasses.dataclass(frozen=True)
class RowRecord:
    """One row. number: of its request, from 1. ended: seconds of answering after which it was there; None if unknown."""

    number: int
    counts: JobTotals
    ended: float | None = None
    id: Any = None

    @property
    def edl(self) -> float | None:
        return self.counts.edl

    def as_json(self) -> dict[str, Any]:
        counts = self.counts.as_json()
        names = ("prompt_tokens", "tokens", "steps", "draft_tokens", "accepted_tokens", "edl")
        return {
            "row": self.number,
            "id": self.id,
            "failed": bool(self.counts.errors),
            **{name: counts[name] for name in names},
            "ended_seconds": None if self.ended is None else round(self.ended, 4),
        }


@dataclasses.dataclass(frozen=True)
class Part:
    """Some rows of a job. name: their prompt lengths, or how many were completed before. ended: seconds, if they are known."""

    name: str
    rows: int
    counts: JobTotals
    ended: float | None = None

    def as_json(self) -> dict[str, Any]:
        counts, rate = self.counts, round(self.counts.tokens_per_second, 2)
        value = {"part": self.name, "rows": self.rows, "tokens": counts.tokens, "edl": counts.rounded_edl}
        value |= {} if self.ended is None else {"ended_seconds": round(self.ended, 4)}
        value |= {"tokens_per_second": rate} if counts.seconds else {}
        return {**value, "accepted_by_source": dict(counts.accepted_by_source.most_common())}


@dataclasses.dataclass(frozen=True)
class JobRecord:
    """A job. rows: in the order of completion. state: of its manifest, "" without one. runs: what the clock gave for each."""

    name: str
    rows: list[RowRecord]
    state: str = ""
    model: str = ""
    runs: Sequence[Mapping[str, Any]] = ()

    @property
    def latest_run(self) -> str:
        """Return how long it took, and its speedup over plain decoding; "" where nothing is known."""
        run = self.runs[-1] if self.runs else {}
        if not {"run_seconds", "loading_seconds"} <= run.keys():
            return ""
        line = "latest run: {run_seconds:,.1f} s, after {loading_seconds:,.1f} s of loading".format_map(run)
        if run.get("speedup_over_plain"):
            return line + ", {speedup_low:.2f} to {speedup_high:.2f}x plain".format_map(run)
        return line + (f", speedup not measured: {run['speedup_not_measured']}" if "speedup_not_measured" in run else "")

    @property
    def totals(self) -> JobTotals:
        return added(self.rows)

    def by_prompt_length(self) -> list[Part]:
        """Answered rows by their prompts' tokens, doubling from one part to the next."""
        parts: dict[int, list[RowRecord]] = {}
        for row in self.rows:
            if row.counts.steps:
                bound = SHORTEST
                while bound < min(row.counts.prompt_tokens + 1, LONGEST_BUCKET):
                    bound *= 2
                parts.setdefault(bound, []).append(row)
        names = {bound: f"{bound // 2 if bound > SHORTEST else 1:,} to {bound - 1:,}" for bound in parts}
        return [Part(names[bound], len(parts[bound]), added(parts[bound])) for bound in sorted(parts)]

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
            if ended:
                counts.seconds, before = ended - before, ended
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

    def as_json(self) -> dict[str, Any]:
        """The object that `lookahead report --json` prints."""
        return {
            "job": self.name,
            "state": self.state or None,
            "model": self.model or None,
            "runs": list(self.runs),
            **self.totals.as_json(),
            "edl_of_rows": {name: round(value, 4) for name, value in self.edl_quantiles().items()},
            "by_prompt_length": [part.as_json() for part in self.by_prompt_length()],
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


def tables(record: JobRecord) -> list[tuple[str, list[str], list[tuple[str, ...]]]]:
    """(title, columns, rows) of each table; those that would be empty are left out."""
    totals, by_time, quantiles = record.totals, record.by_time(), record.edl_quantiles()
    accepted = sum(totals.accepted_by_source.values())
    by_source: list[tuple[str, ...]] = [
        (name, f"{count:,}", f"{count / accepted:.1%}", f"{count / max(1, totals.steps):.2f}")
        for name, count in totals.accepted_by_source.most_common()
    ]
    timed = any(row.ended is not None for row in record.rows)
    columns = ["completed", "rows", "tokens", "EDL", *(["until s", "tokens/s"] if timed else [])]
    numbers = ["prompt tokens", "tokens", "steps", "drafted", "accepted"]
    found: list[tuple[str, list[str], list[tuple[str, ...]]]] = [
        ("Accepted tokens by source", ["source", "tokens", "share", "per step"], by_source),
        ("EDL by prompt length", ["prompt tokens", "rows", "tokens", "EDL"], [_of_part(p) for p in record.by_prompt_length()]),
        ("EDL over time, rows as they were completed", columns, [_of_part(part) for part in by_time]),
        ("EDL of rows", list(quantiles), [tuple(map(shown_edl, quantiles.values()))] if quantiles else []),
        ("Rows of the lowest and the highest EDL", ["row", "id", *numbers, "EDL"], [*map(_of_row, record.extremes())]),
    ]
    return [each for each in found if each[2]]


def shown_edl(edl: float | None) -> str:
    return "-" if edl is None else f"{edl:.2f}"


def _of_row(row: RowRecord) -> tuple[str, ...]:
    counts = row.counts
    numbers = counts.prompt_tokens, counts.tokens, counts.steps, counts.draft_tokens, counts.accepted_tokens
    name = "" if row.id is None else in_one_line(str(row.id))
    return f"{row.number:,}", name, *(f"{number:,}" for number in numbers), shown_edl(row.edl)


def _of_part(part: Part) -> tuple[str, ...]:
    time = () if part.ended is None else (f"{part.ended:,.1f}", f"{part.counts.tokens_per_second:,.1f}")
    return part.name, f"{part.rows:,}", f"{part.counts.tokens:,}", shown_edl(part.counts.edl), *time


def read_record(out: str) -> JobRecord:
    """Read the record of the job that writes or wrote to `out`. Raises LookaheadError if there is none, or its rows hold no
    counts.
    """
    files = JobFiles(Path(out))
    about = _of_manifest(files.manifest)
    if files.journal.exists():
        return JobRecord(out, list(_of_journal(files.journal)), *about)
    if not files.out.is_file():
        raise CorpusError(f"{out}: no such file, and no journal of a job that writes it.")
    rows = list(_of_rows(out))
    if not any(row.counts.steps or row.counts.errors for row in rows):
        raise LookaheadError(
            f"{out}: its rows hold no steps (is it an output of lookahead generate?). Of OpenAI lines the counts stand in "
            f"{files.journal.name}, which is not there."
        )
    return JobRecord(out, rows, *about)


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
        yield RowRecord(number + 1, counts, ended, entry.get("id"))


def _of_rows(out: str) -> Iterator[RowRecord]:
    """Read records from output rows themselves. When they ended is not known."""
    found = parquet_rows(out, CorpusReport(), OWN) if kind_of(out) == ".parquet" else json_rows(out)
    for number, row in found:
        if isinstance(row, str):
            continue
        names = ("prompt_tokens", "completion_tokens", "steps", "draft_tokens", "accepted_tokens")
        known = {name: row[name] if type(row.get(name)) is int else 0 for name in names}
        tokens, errors = known.pop("completion_tokens"), int(row.get("error") is not None)
        first, by_source = min(len(row.get("samples") or ()) or 1, tokens), Counter(dict(row.get("accepted_by_source") or {}))
        counts = JobTotals(rows=1, errors=errors, tokens=tokens, first_tokens=first, accepted_by_source=by_source, **known)
        yield RowRecord(number, counts, id=row.get("id"))


def _of_manifest(path: Path) -> tuple[str, str, list[dict[str, Any]]]:
    """(state, model, what the clock gave for each run); empty where it is not there or cannot be read."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        runs = [{name: run[name] for name in CLOCKED if name in run} for run in manifest["runs"]]
        return str(manifest["state"]), str(manifest["answering"]["model"]), [run for run in runs if run]
    except (OSError, ValueError, KeyError, TypeError):
        return "", "", []
