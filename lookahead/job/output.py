"""Where the rows of a job go. In: its options. Out: a journal that begins or resumes, with what is done; or a stream.

`save_learned` adds kept answers to a trie that other jobs may add to at the same time. How many copies the trie holds is
noted before they are added: a run that finds the note, after a kill, adds them only if there are no more copies now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
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
from lookahead.token_documents import OUTPUTS, TokenDocument, TokenizerIdentity
from lookahead.trie.file import Trie
from lookahead.trie.segment import Effort


def files_of(out: str | None, resume: bool, retry_errors: bool, overwrite: bool) -> JobFiles | None:
    """The files of a job that writes to `out`, where a symbolic link leads; None for stdout or a device. Raises UsageError for
    options that do not go together.
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
    """What an earlier run has done and need not be done again; changes no file. Raises LookaheadError if output and journal do
    not belong together, or rows of the input files have changed since.
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


def save_learned(
    output: AnswerStore, path: str, identity: TokenizerIdentity, model: str, effort: Effort | None = None, source: str = OUTPUTS
) -> None:
    """Add the answers that `output` has kept to the trie at `path`, or make it. Raises LookaheadError if it cannot be written
    or is of another tokenizer; the answers stay, and the next run adds them.
    """
    from lookahead.trie.build import append_trie, build_trie

    before = output.half_saved()
    if before is not None and copies_in(path, before[1]) > before[0]:
        output.forget_half_saved()

    def documents() -> Iterable[TokenDocument]:
        return (dataclasses.replace(document, source=source) for document in output.learned())

    while next(iter(output.learned()), None) is not None:
        output.note_saving(copies_in(path, output.learned))
        with contextlib.suppress(FileExistsError):  # made by another job meanwhile: then it is added to
            if Path(path).exists():
                append_trie(documents(), path, identity, effort)
            else:
                options = {"learned_from": model}
                build_trie(documents(), path, identity, 1, options, effort, new=True)
            break
    output.forget_learned()


def copies_in(path: str, documents: Callable[[], Iterable[TokenDocument]]) -> int:
    """How many segments of a trie end in these documents; 0 if there is no trie."""
    if not Path(path).exists():
        return 0
    trie = Trie(path)
    length = sum(len(document.token_ids) + 1 for document in documents() if len(document.token_ids))
    found = 0
    for segment in trie.segments:
        begin = len(segment.tokens) - length
        found += begin >= 0 and _stands_at(segment.tokens, begin, documents(), trie.header.separator)
    return found


def _stands_at(tokens: np.ndarray, begin: int, documents: Iterable[TokenDocument], separator: int) -> bool:
    for document in documents:
        end = begin + len(document.token_ids)
        if end == begin:
            continue  # it is in no trie
        if tokens[end] != separator or not np.array_equal(tokens[begin:end], document.token_ids):
            return False
        begin = end + 1
    return True
