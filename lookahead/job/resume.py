"""Beginning a job that writes to a file, or going on with it. In: its options. Out: what is done, and a journal to write to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from lookahead.errors import UsageError
from lookahead.files.atomic import followed
from lookahead.job.fields import RowFields
from lookahead.job.files import JobFiles
from lookahead.job.inputs import Shard
from lookahead.job.journal import Done, Journal, read_done
from lookahead.job.lock import OutputLock
from lookahead.job.manifest import Manifest
from lookahead.job.rows import left_to_do, read_requests


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
