"""How many rows a job has, for its progress. In: names of input files. Out: their number, as soon as it is known.

Of Parquet the footer holds it. Lines are counted in a thread alongside the job, packed ones as they are unpacked: it yields to
the job, ends when the job does, and reports nothing of files that cannot be read, which the job itself will report.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lookahead.corpus.read import open_text
from lookahead.errors import LookaheadError
from lookahead.files.outputs import kind_of
from lookahead.job.inputs import input_rows

BLOCK = 1 << 20  # bytes that are counted at a time
LOWEST_PRIORITY = 19
AT_ONCE = 0.2  # seconds in which files of usual size are counted, so that the total stands there from the beginning


class RowCount:
    """Counts the rows of files in a thread of its own. Use as a context manager: leaving it ends the thread.

    rows: None until they are known, and of stdin for good.
    """

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
    """Rows of files, as `inputs.input_rows` gives them; None for stdin and devices, or if it was stopped.

    Raises CorpusError for a file that cannot be read.
    """
    rows = 0
    for name in names:
        if name == "-" or not Path(name).is_file():
            return None
        found = _rows_of(name, stopped)
        if found is None:
            return None
        rows += found
    return rows


def _rows_of(name: str, stopped: Callable[[], bool]) -> int | None:
    kind = kind_of(name)
    if kind == ".parquet":
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError:  # whoever reads the rows reports it
            return None
        try:
            with open(name, "rb") as file:
                return int(pyarrow.parquet.read_metadata(file).num_rows)
        except (pyarrow.ArrowException, OSError):
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
