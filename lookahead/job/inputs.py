"""Files of a job to rows. In: names of files. Out: each row with its file, line and fingerprint, one at a time.

JSON lines, a JSON array, CSV (each also .gz, .zst; "-" is JSON lines on stdin) or .parquet; rows of an array and of .parquet
count as lines. Nothing is held but the row at hand, and of a line that is too long only its fingerprint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterator
from typing import IO, Any

from lookahead.corpus.read import CorpusReport, open_text, parquet_rows
from lookahead.corpus.tables import TABLES, Found, json_file_rows, row_of, table_rows, without_mark
from lookahead.errors import CorpusError, UsageError
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
        """Of "2/8". Raises UsageError for anything else."""
        number, slash, count = (text or "1/1").partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise UsageError(f"--shard {text}: give I/N, such as 2/8 for the second of eight parts.")
        return cls(int(number), int(count))

    def holds(self, row: int) -> bool:
        """row: its number from 0."""
        return row % self.count == self.number - 1

    def size(self, rows: int) -> int:
        """How many of that many rows it holds."""
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
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        if number == 1:
            line = without_mark(line, name)
            _check_kind(name, line)
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            yield InputRow(name, number, f"a line of more than {LONGEST_LINE >> 20} MiB", _skip(file, line))
        elif line.strip():
            yield InputRow(name, number, row_of(line), fingerprint(line.strip()))


def _check_kind(name: str, begin: bytes) -> None:
    """Raises CorpusError for a file whose name does not tell what it is and that does not look like JSON lines."""
    if name != "-" and kind_of(name) not in (*LINES, ".json", "") and begin.strip() and not begin.lstrip().startswith(b"{"):
        raise CorpusError(f"{name}: unknown kind of file. Use .jsonl, .json, .csv, .tsv (also .gz, .zst) or .parquet.")


def fingerprint(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _skip(file: IO[bytes], begin: bytes) -> bytes:
    """Read on to the end of a line; its fingerprint."""
    digest = hashlib.blake2b(begin, digest_size=DIGEST_BYTES)
    while piece := file.readline(PIECE):
        digest.update(piece)
        if piece.endswith(b"\n"):
            break
    return digest.digest()
