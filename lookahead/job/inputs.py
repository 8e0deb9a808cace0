"""Files of a job to rows. In: names of files. Out: each row with its file, line and fingerprint, one at a time.

JSON lines (also .gz, .zst, "-" for stdin) or .parquet, whose rows count as lines. Nothing is held but the row at hand, and of a
line that is too long only its fingerprint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import IO, Any

from lookahead.corpus import CorpusReport, kind_of, open_text, parquet_rows, parse_line
from lookahead.errors import UsageError

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
        """How many of so many rows it holds."""
        return len(range(self.number - 1, rows, self.count))


def input_rows(name: str) -> Iterator[InputRow]:
    """The rows of one file; blank lines are none. Raises CorpusError if it cannot be read."""
    if name != "-" and kind_of(name) == ".parquet":
        for number, row in parquet_rows(name, CorpusReport()):
            yield InputRow(name, number, row, fingerprint(json.dumps(row, default=str).encode("utf-8", "surrogatepass")))
        return
    with open_text(name) as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                yield InputRow(name, number, f"a line of more than {LONGEST_LINE >> 20} MiB", _skip(file, line))
            elif line.strip():
                yield InputRow(name, number, parse_line(line), fingerprint(line.strip()))


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
