"""Rows to a stream, such as stdout or a device: written at once, and no way to resume."""

from __future__ import annotations

import contextlib
import sys
from typing import IO

import numpy as np

from lookahead.errors import LookaheadError
from lookahead.job.journal import Ended
from lookahead.job.totals import JobTotals
from lookahead.json_text import json_text
from lookahead.token_documents import OUTPUTS, TokenDocument


class Stream:
    """Writes rows as `journal.Journal` does. file: open for text; one other than stdout is closed at the end. learn: keep the
    answers.
    """

    def __init__(self, file: IO[str], name: str, learn: bool = False):
        self._file, self._name, self._learn = file, name, learn
        self.totals = JobTotals()
        self._learned: list[TokenDocument] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not sys.stdout:
            with contextlib.suppress(OSError):  # what could not be written was reported then
                self._file.close()

    def save(self) -> None:
        """There is nothing but the stream."""

    def finish(self, in_order: bool) -> None:
        """Rows have gone out as they were written."""

    def half_saved(self) -> None:
        """There is no earlier run."""

    def note_saving(self, copies: int) -> None:
        """There is no later run."""

    def forget_half_saved(self) -> None:
        """There is nothing of that kind."""

    def learned(self) -> list[TokenDocument]:
        return self._learned

    def forget_learned(self) -> None:
        self._learned = []

    def write(self, ended: Ended) -> None:
        """Raises LookaheadError if it cannot be written, BrokenPipeError if the reader has gone."""
        try:
            self._file.write(json_text(ended.row, getattr(self._file, "encoding", None)) + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LookaheadError(f"{self._name}: write failed ({error.strerror}) after {self.totals.rows} rows.") from error
        self.totals.merge(ended.counts)
        if self._learn:
            self._learned += [TokenDocument(np.array([*before, *ids], np.int32), OUTPUTS) for before, ids in ended.said]
