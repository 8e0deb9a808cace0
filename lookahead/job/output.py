"""Where the rows of a job go. In: its options. Out: a journal that begins or resumes, with what is done; or a stream."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import IO

import numpy as np

from lookahead.errors import LookaheadError, UsageError
from lookahead.files.atomic import followed
from lookahead.job.fields import RowFields
from lookahead.job.inputs import Shard
from lookahead.job.journal import AnswerStore, Done, FinishedRow, Journal, read_done
from lookahead.job.lock import JobFiles, OutputLock
from lookahead.job.manifest import Manifest
from lookahead.job.progress import JobTotals
from lookahead.job.rows import left_to_do, read_requests
from lookahead.json_text import json_text
from lookahead.token_documents import OUTPUTS, TokenDocument


def files_of(out: str | None, resume: bool, retry_errors: bool, overwrite: bool) -> JobFiles | None:
    """The files of a job that writes to `out`, where a symbolic link leads; None for stdout or a device.

    Raises UsageError for options that do not go together.
    """
    if retry_errors and not resume:
        raise UsageError("--retry-errors goes with --resume.")
    if resume and overwrite:
        raise UsageError("--resume continues with what is there and --overwrite starts again: give one of them.")
    if resume and (out is None or (Path(out).exists() and not Path(out).is_file())):
        raise UsageError("--resume needs a file to continue with: name it with -o.")
    if out is None:
        return None
    files = JobFiles(followed(out))
    return files if files.out.is_file() or not files.out.exists() else None


def what_is_done(
    files: JobFiles, names: Sequence[str], shard: Shard, retry_errors: bool, fields: RowFields | None = None
) -> Done:
    """What an earlier run has done and need not be done again; changes no file. fields: see `rows.read_requests`.

    Raises LookaheadError if output and journal do not belong together, or rows of the input files have changed since.
    """
    done = read_done(files)
    if done.requests and all(Path(name).is_file() for name in names):  # a pipe can be read once: as the rows are answered
        last = max(done.requests)
        answered = takewhile(lambda request: request.number <= last, read_requests(*names, fields=fields))
        for _ in left_to_do(answered, shard, done.requests):
            pass
    if retry_errors:
        left = {number: content for number, content in done.requests.items() if number not in done.faults}
        return dataclasses.replace(done, requests=left)
    return done


def open_journal(lock: OutputLock, done: Done | None, manifest: Manifest, retry_errors: bool, learn: bool) -> Journal:
    """Begin to write: behind what is done, without failed rows that are tried again; or, where nothing is (None), again."""
    if done is None:
        lock.remove_files()
        return Journal(lock, Done(), manifest, learn)
    return Journal(lock, done, manifest, learn, done.faults if retry_errors else frozenset())


class Stream(AnswerStore):
    """Writes rows at once and without a way to resume, such as to stdout or a device. learn: keep the answers."""

    def __init__(self, file: IO[str], name: str, learn: bool = False):
        """file: open for text; one other than stdout is closed at the end."""
        self._file, self._name, self._learn = file, name, learn
        self.totals = JobTotals()
        self._learned: list[TokenDocument] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not sys.stdout:
            with contextlib.suppress(OSError):  # what could not be written was reported then
                self._file.close()

    def learned(self) -> list[TokenDocument]:
        return self._learned

    def forget_learned(self) -> None:
        self._learned = []

    def write(self, ended: FinishedRow) -> None:
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
            self._learned += [TokenDocument(np.array([*before, *ids], np.int32), OUTPUTS) for before, ids in ended.emitted]
