"""Files of a job to rows. In: names of files. Out: each row with its file, line and fingerprint, one at a time.

JSON lines, a JSON array, CSV (each also .gz, .zst; "-" is JSON lines on stdin) or .parquet. Nothing is held but the row at
hand. `RowCount` counts rows for progress, in a thread alongside the job; files that cannot be read are reported by the job
itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from lookahead.corpus.read import CorpusReport, open_text, parquet_rows
from lookahead.corpus.tables import TABLES, Found, json_file_rows, row_of, table_rows, without_mark
from lookahead.errors import CorpusError, LookaheadError, UsageError
from lookahead.files.outputs import LINES, kind_of

LONGEST_LINE = 64 << 20  # bytes
PIECE = 1 << 20  # bytes of a longer line that are read at a time
DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class InputRow:
    """line: from 1. row: a JSON object, or what is wrong with the line. fingerprint: of what stands there."""

    file: str
    line: int
    row: dict[str, Any] | str
    fingerprint: bytes


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part `number` (from 1) of `count`: every count-th row."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """Parse "2/8". Raises UsageError for anything else."""
        number, slash, count = (text or "1/1").partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise UsageError(f"--shard {text}: give I/N, such as 2/8 for the second of eight parts.")
        return cls(int(number), int(count))

    def holds(self, row: int) -> bool:
        """row: its number from 0."""
        return row % self.count == self.number - 1

    def size(self, rows: int) -> int:
        return len(range(self.number - 1, rows, self.count))


def input_rows(name: str, columns: Collection[str] | None = None) -> Iterator[InputRow]:
    """The rows of one file; blank lines are none. columns: as of `parquet_rows`. Raises CorpusError if it cannot be read."""
    kind = "" if name == "-" else kind_of(name)
    if kind == ".parquet":
        for number, row in parquet_rows(name, CorpusReport(), columns):
            yield _of_value(name, number, row)
        return
    with open_text(name) as file:
        found: Iterator[Found] | None = table_rows(file, name, TABLES[kind]) if kind in TABLES else None
        if kind == ".json":
            found, file = json_file_rows(file, name)
        if found is None:
            yield from _of_lines(name, file)
            return
        yield from (_of_value(name, number, row) for number, row in found)


def _of_value(name: str, number: int, row: dict[str, Any] | str) -> InputRow:
    return InputRow(name, number, row, fingerprint(json.dumps(row, default=str).encode("utf-8", "surrogatepass")))


def _of_lines(name: str, file: IO[bytes]) -> Iterator[InputRow]:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
        if number == 1:
            line = without_mark(line, name)
            known = name == "-" or kind_of(name) in (*LINES, ".json", "")
            if not known and line.strip() and not line.lstrip().startswith(b"{"):
                raise CorpusError(f"{name}: unknown kind of file. Use .jsonl, .json, .csv, .tsv (also .gz, .zst) or .parquet.")
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            digest = hashlib.blake2b(line, digest_size=DIGEST_BYTES)
            while not line.endswith(b"\n") and (line := file.readline(PIECE)):
                digest.update(line)
            yield InputRow(name, number, f"a line of more than {LONGEST_LINE >> 20} MiB", digest.digest())
        elif line.strip():
            yield InputRow(name, number, row_of(line), fingerprint(line.strip()))


def fingerprint(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


BLOCK = 1 << 20  # bytes that are counted at a time
LOWEST_PRIORITY = 19
AT_ONCE = 0.2  # seconds in which files of usual size are counted, so that the total stands there from the beginning


class RowCount:
    """Counts the rows of files in a thread, which ends with the context. rows: None until known, and of stdin always."""

    def __init__(self, names: Sequence[str]):
        self.rows: int | None = None
        self._stopped = threading.Event()
        self._names = names
        self._thread = threading.Thread(target=self._count, name="row count", daemon=True)

    def __enter__(self) -> RowCount:
        if self._names and "-" not in self._names:
            self._thread.start()
            self._thread.join(AT_ONCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()  # it is not waited for: a disk may keep it

    def _count(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # of this thread only; not all systems have it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        with contextlib.suppress(LookaheadError, OSError, ValueError):
            self.rows = count_rows(self._names, self._stopped.is_set)


def count_rows(names: Sequence[str], stopped: Callable[[], bool] = lambda: False) -> int | None:
    """Rows of files; None for stdin and devices, or if it was stopped. Raises CorpusError for a file that cannot be read."""
    counts = [_rows_of(name, stopped) for name in names]
    return None if None in counts else sum(filter(None, counts))


def _rows_of(name: str, stopped: Callable[[], bool]) -> int | None:
    if name == "-" or not Path(name).is_file():
        return None
    kind = kind_of(name)
    if kind == ".parquet":
        with contextlib.suppress(Exception), open(name, "rb") as file:  # whoever reads the rows reports it
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(file).num_rows)
        return None
    if kind in (".jsonl", ".ndjson"):
        return _lines_of(name, stopped)
    rows = 0
    for _ in input_rows(name):
        rows += 1
        if rows % 256 == 0 and stopped():
            return None
    return rows


def _lines_of(name: str, stopped: Callable[[], bool]) -> int | None:
    """Lines that are not blank, in blocks: a line may be of any length."""
    rows, holds = 0, False  # whether the line that the last block ended in holds anything so far
    with open_text(name) as file:
        while block := file.read(BLOCK):
            first, *others = block.split(b"\n")
            holds = holds or bool(first.strip())
            for line in others:
                rows += holds
                holds = bool(line) and not line.isspace()
            if stopped():
                return None
            time.sleep(0)  # the job comes first
    return rows + holds
