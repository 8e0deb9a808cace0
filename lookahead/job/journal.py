"""What of a job is done. In: rows as they end. Out: rows on disk, and after a crash what is left to do.

Before a row is written to the output, a line about it goes to the journal next to it, with fingerprints of the request and of
the row's bytes. A row is done if the output holds it and the journal knows it, wherever it stands; so nothing that a kill, a
full disk or a cut file leaves behind is taken for done. Rows of a .parquet, .gz or .zst output wait in JSON lines next to it.

    out.jsonl                   the rows (of out.parquet: out.parquet.partial.jsonl)
    out.jsonl.journal           {"row": 17, "input": "9f2c...", "output": "41ab...", "tokens": 93, ...}
    out.jsonl.manifest.json     see manifest.py
    out.jsonl.learned.jsonl     with --save-trie, until it is saved: token ids of the answers, a corpus of its own
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from lookahead.errors import LookaheadError
from lookahead.files.atomic import remove, replacing, uninterrupted
from lookahead.job.inputs import PIECE, fingerprint
from lookahead.job.lock import JobFiles, OutputLock
from lookahead.job.manifest import Manifest, sampled
from lookahead.job.parquet import write_as_named
from lookahead.job.progress import JobTotals
from lookahead.token_documents import OUTPUTS, TokenDocument

INVALID = "invalid_row"  # the type of an error that is the row's own fault
RESERVE = 1 << 16  # bytes kept on the disk for the last manifest of a run, at least
SAVING = b'{"saving":'  # begins the line among kept answers that notes that they are being saved, see forget_saved
MOST = 1 << 53  # of any number in a journal
COUNTS = ("prompt_tokens", "tokens", "first_tokens", "steps", "draft_tokens", "accepted_tokens", "seconds")


@dataclasses.dataclass(frozen=True)
class FinishedRow:
    """A row to be written. error: the type of its error, or "". emitted: of each sample, the last prompt ids and answer.
    seconds: from its first step to its last.
    """

    number: int
    fingerprint: bytes
    row: dict[str, Any]
    counts: JobTotals
    error: str = ""
    emitted: Sequence[tuple[list[int], list[int]]] = ()
    seconds: float | None = None


@dataclasses.dataclass
class Done:
    """Work that a job has done. requests: their fingerprints by number. totals: of their rows."""

    requests: dict[int, bytes] = dataclasses.field(default_factory=dict)
    totals: JobTotals = dataclasses.field(default_factory=JobTotals)
    ascending: bool = True  # rows stand in the order of their requests, each once
    size: int = 0  # bytes of the output
    cut: int = 0  # of those, bytes behind the last whole row, which are taken off
    whole: bool = False  # a file that was made at the end, to which no rows can be added
    faults: set[int] = dataclasses.field(default_factory=set)  # numbers of failed rows that may be tried again

    def add(self, entry: dict[str, Any]) -> None:
        failed, fault = bool(entry["error"]), entry["error"] not in ("", INVALID)
        counts, by_source = {name: entry[name] for name in COUNTS}, Counter(entry["accepted_by_source"])
        self.totals.merge(JobTotals(rows=1, errors=failed, faults=fault, accepted_by_source=by_source, **counts))
        self.requests[entry["row"]] = bytes.fromhex(entry["input"])
        if fault:
            self.faults.add(entry["row"])


@dataclasses.dataclass(frozen=True)
class RowPosition:
    """Position of a row in the output: bytes, and the journal's line about it."""

    number: int
    start: int
    end: int
    entry: dict[str, Any]


def read_done(files: JobFiles) -> Done:
    """Return what is done, by output and journal; changes neither. Raises LookaheadError if they do not belong together."""
    if not files.journal.exists():
        raise LookaheadError(
            f"{files.existing()}: cannot be continued, as {files.journal.name} is not there. Start again with --overwrite."
        )
    done = Done()
    if files.is_made_at_the_end and not files.rows.exists():  # written whole: the journal is all there is to know
        for entry in {entry["row"]: entry for _, entry in entries(files.journal)}.values():
            done.add(entry)
        return dataclasses.replace(done, whole=True)
    last, end = -1, 0
    for row in positions(files):
        done.add(row.entry)
        done.ascending = done.ascending and row.number > last
        last, end = row.number, row.end
    done.size = files.rows.stat().st_size
    done.cut = done.size - end
    with files.rows.open("rb") as file:
        if done.cut and not end and file.readline().endswith(b"\n"):
            raise LookaheadError(f"{files.rows}: no row of it is in {files.journal.name}. Start again with --overwrite.")
    return done


def positions(files: JobFiles) -> Iterator[RowPosition]:
    """Rows of the output that the journal knows, as they stand. Raises LookaheadError for an unknown line between them."""
    known = {bytes.fromhex(entry["output"]): start for start, entry in entries(files.journal)}
    unknown, start = 0, 0
    with files.rows.open("rb") as file, files.journal.open("rb") as journal:
        for number, line in enumerate(file, 1):
            begins = known.get(fingerprint(line))
            if begins is None:
                unknown = unknown or number
            elif unknown:
                raise LookaheadError(
                    f"{files.rows}:{unknown}: was not written by this job, or was changed. Take the line out, and its row is "
                    "answered again; or start again with --overwrite."
                )
            else:
                journal.seek(begins)
                entry = json.loads(journal.readline())
                yield RowPosition(entry["row"], start, start + len(line), entry)
            start += len(line)


def rewrite(files: JobFiles, kept: Iterable[tuple[int, int]]) -> None:
    """Keep the bytes of the rows that begin and end there, in this order."""
    with files.rows.open("rb") as old, replacing(files.rows) as new:
        for start, end in kept:
            old.seek(start)
            new.write(old.read(end - start))


class Journal:
    """Writes rows, each at once, and how the job is doing; in the context of its lock. totals: of rows done before, too."""

    def __init__(
        self, lock: OutputLock, done: Done, manifest: Manifest, learn: bool = False, again: Set[int] = frozenset()
    ) -> None:
        """learn: keep token ids. again: rows to leave out. Raises LookaheadError if the output has changed."""
        files = lock.files
        lock.used = True
        try:
            _cut_torn_line(lock.journal, files.journal)
            if (files.rows.stat().st_size if files.rows.exists() else 0) != done.size:
                raise LookaheadError(f"{files.out}: another process has written it meanwhile. Run the same command again.")
            if again:
                rewrite(files, ((row.start, row.end) for row in positions(files) if row.number not in again))
                done = read_done(files)
            uninterrupted(lock.open_rows().truncate, done.size - done.cut)
            self._learned = _opened(files.learned) if learn else None
            self._reserve = _reserved(files)
        except OSError as error:
            raise LookaheadError(f"{files.out}: cannot be written ({error.strerror}).") from error
        self.files, self.manifest, self.totals, self._lock = files, manifest, done.totals, lock
        self._ascending = done.ascending  # rows stand in the order of their requests
        self._last = max(done.requests, default=-1)
        self.save()

    @property
    def _rows(self) -> FileIO:
        assert self._lock.rows is not None
        return self._lock.rows

    def write(self, ended: FinishedRow) -> None:
        """Put a row on disk and count it. Raises LookaheadError if that fails; what is there stays resumable."""
        line = (json.dumps(ended.row, ensure_ascii=False) + "\n").encode()
        entry = {
            "row": ended.number,
            "id": ended.row.get("custom_id", ended.row.get("id")),
            "input": ended.fingerprint.hex(),
            "output": fingerprint(line).hex(),
            "error": ended.error,
            **{name: getattr(ended.counts, name) for name in COUNTS},
            "accepted_by_source": ended.counts.accepted_by_source,
            "row_seconds": ended.seconds,
        }
        try:
            if self._learned is not None:
                for before, ids in ended.emitted:
                    _append(self._learned, {"row": ended.number, "prompt_ids": before, "response_ids": ids})
            _append(self._lock.journal, entry)
            _append_bytes(self._rows, line)
        except OSError as error:
            raise self._failed(error) from error
        self._ascending = self._ascending and ended.number > self._last
        self._last = max(self._last, ended.number)
        self.totals.merge(ended.counts)

    def save(self) -> None:
        """Also note in the manifest how far the job is. Raises LookaheadError if that fails or files were moved or replaced."""
        self._lock.check((self._learned, self.files.learned))
        try:
            os.fsync(self._lock.journal.fileno())
            os.fsync(self._rows.fileno())
        except OSError as error:
            raise self._failed(error) from error
        try:
            self.manifest.write(self.files.manifest, self.totals)
        except LookaheadError as error:
            raise LookaheadError(f"{error} The rows are safe: make room, then run the same command with --resume.") from error

    def finish(self, in_order: bool) -> None:
        """All rows are there: put them where they belong. JSON lines of another file stay while rows may be tried again."""
        self._lock.check()
        if in_order and not self._ascending:
            rows = sorted((row.number, row.start, row.end) for row in positions(self.files))
            rewrite(self.files, [(start, end) for _, start, end in rows])
            self._lock.open_rows()
        if self.files.is_made_at_the_end:
            write_as_named(self.files.rows, self.files.out)
            self.manifest.output = sampled(self.files.out)
            if not self.totals.faults:
                remove(self.files.rows)
        if self._learned is not None and not os.fstat(self._learned.fileno()).st_size:
            remove(self.files.learned)
        self.manifest.state = "complete"

    def learned(self) -> Iterator[TokenDocument]:
        """The answers that were kept, each once: a row that a kill cut short was written again."""
        return _documents(_whole_lines(self.files.learned)) if self.files.learned.exists() else iter(())

    def forget_saved(self, copies_of: Callable[[Iterable[TokenDocument]], int]) -> None:
        """Forget answers that a run has added to the trie before it was killed: it holds more copies than were noted then."""
        lines = enumerate(_whole_lines(self.files.learned)) if self._learned is not None else ()
        notes = [(number, line) for number, line in lines if line.startswith(SAVING)]
        if not notes:
            return
        number, line = notes[-1]
        if copies_of(_documents(islice(_whole_lines(self.files.learned), number))) <= json.loads(line)["saving"]:
            return
        with replacing(self.files.learned) as new:
            new.writelines(islice(_whole_lines(self.files.learned), number + 1, None))
        assert self._learned is not None
        uninterrupted(self._learned.close)
        self._learned = _opened(self.files.learned)

    def note_saving(self, copies: int) -> None:
        """The answers are about to be added to a trie that holds that many copies of them."""
        assert self._learned is not None
        try:
            _append_bytes(self._learned, SAVING + b" %d}\n" % copies)
            os.fsync(self._learned.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def forget_learned(self) -> None:
        remove(self.files.learned)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.manifest.state, self.manifest.error = "failed", str(error)
        elif self.manifest.state == "running":
            self.manifest.state = "interrupted"
        if self._reserve is not None:
            uninterrupted(self._reserve.close)  # on a full disk this makes room for the manifest
        with contextlib.suppress(*([LookaheadError] if error else [])):  # again what went wrong before
            if self._lock.is_held:  # else another job may have begun there
                self.manifest.end(self.files.manifest, self.totals)
        if self._learned is not None:
            uninterrupted(self._learned.close)

    def _failed(self, error: OSError) -> LookaheadError:
        return LookaheadError(
            f"{self.files.rows}: write failed ({error.strerror}) after {self.totals.rows} rows, which are safe. Make room, "
            "then run the same command with --resume."
        )


def entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a journal, and at which byte each begins. What a loss of power or an edit has left there is left out."""
    start = 0
    for line in _whole_lines(path):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            entry = json.loads(line)
            numbers = [entry["row"], *(entry[name] for name in COUNTS), *entry["accepted_by_source"].values()]
            are_counts = all(type(each) in (int, float) and 0 <= each < MOST for each in numbers)
            fingerprints = bytes.fromhex(entry["input"]), bytes.fromhex(entry["output"])
            if are_counts and type(entry["row"]) is int and isinstance(entry["error"], str) and all(fingerprints):
                yield start, entry
        start += len(line)


def _documents(lines: Iterable[bytes]) -> Iterator[TokenDocument]:
    seen: set[bytes] = set()
    for line in lines:
        key = fingerprint(line)
        if key not in seen and not line.startswith(SAVING):
            seen.add(key)
            row = json.loads(line)
            yield TokenDocument(np.array([*row["prompt_ids"], *row["response_ids"]], np.int32), OUTPUTS)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file without one that was cut short."""
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _opened(path: Path) -> FileIO:
    file = path.open("ab", buffering=0)
    _cut_torn_line(file, path)
    return file


def _cut_torn_line(file: FileIO, path: Path) -> None:
    """Take off a last line that has no end. file: open for appending at `path`."""
    end = os.fstat(file.fileno()).st_size
    with path.open("rb") as old:
        while end:  # backwards, piece by piece
            begin = max(0, end - PIECE)
            old.seek(begin)
            found = old.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
    uninterrupted(file.truncate, end)


def _reserved(files: JobFiles) -> IO[bytes] | None:
    """A file without a name that takes as much of the disk as a new manifest needs, until it is closed; None if it is full."""
    try:
        file = tempfile.TemporaryFile(dir=files.out.parent, buffering=0)  # noqa: SIM115 - it stays open
        try:
            before = files.manifest.stat().st_size if files.manifest.exists() else 0
            _append_bytes(file, os.urandom(RESERVE + 2 * before))  # a file system may store zeros without room
            return file
        except BaseException:
            file.close()
            raise
    except OSError:
        return None


def _append(file: FileIO, row: dict[str, Any]) -> None:
    _append_bytes(file, json.dumps(row).encode() + b"\n")


def _append_bytes(file: FileIO | IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
