"""One writer per output. In: an output. Out: names of the job's files, and a lock, held from before they are read to its end.

The lock is an flock on the journal, which is emptied in place and never replaced meanwhile, and on the file of rows, which has
several names with hard links. At each save a job checks that its files are those that it opened, as not all systems have locks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from io import FileIO
from pathlib import Path

from lookahead.errors import LookaheadError, UsageError
from lookahead.files.atomic import reason, remove, try_lock, uninterrupted
from lookahead.files.outputs import PACKED


@dataclasses.dataclass(frozen=True)
class JobFiles:
    out: Path
    journal = property(lambda self: self._sibling(".journal"))
    manifest = property(lambda self: self._sibling(".manifest.json"))
    learned = property(lambda self: self._sibling(".learned.jsonl"))

    @property
    def is_made_at_the_end(self) -> bool:
        """A table or packed file, to which no rows can be added."""
        return self.out.suffix.lower() in (".parquet", *PACKED)

    @property
    def rows(self) -> Path:
        """JSON lines, one a row."""
        return self._sibling(".partial.jsonl") if self.is_made_at_the_end else self.out

    def existing(self) -> Path | None:
        """The output, or what is there of it."""
        return next((path for path in (self.out, self.rows) if path.exists()), None)

    def hold_rows(self) -> bool:
        return any(path.exists() and path.stat().st_size for path in (self.out, self.rows))

    def size(self) -> int:
        """Bytes of rows and journal."""
        return sum(path.stat().st_size for path in {self.existing(), self.journal} if path and path.exists())

    def _sibling(self, ending: str) -> Path:
        return self.out.with_name(self.out.name + ending)


class OutputLock:
    """The right to write the files of a job. used: a job has begun to write, so its journal stays when the lock is closed."""

    def __init__(self, files: JobFiles, resume: bool = False, overwrite: bool = False):
        """Raises LookaheadError if another process holds the lock or a file cannot be opened, UsageError for what exists."""
        self.files, self.used = files, False
        self.rows: FileIO | None = None
        if not files.journal.exists():
            self._check_absent(resume or overwrite)
        self.journal, self._created = self._open_journal()
        try:
            self._check_absent(resume or overwrite)
            if files.rows.exists():
                self.open_rows()
        except BaseException:
            self.close()
            raise

    def open_rows(self) -> FileIO:
        """The file of rows as it is now, open for appending; made if it is missing."""
        if self.rows is not None:
            uninterrupted(self.rows.close)
        try:
            self.rows = self.files.rows.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error
        self._lock(self.rows)
        return self.rows

    def remove_files(self) -> None:
        """Forget what was written before: the journal is emptied in place, the output goes last."""
        files = self.files
        try:
            for path in (files.manifest, files.learned):
                remove(path)
            uninterrupted(self.journal.truncate, 0)
            if self.rows is not None:
                uninterrupted(self.rows.close)
                self.rows = None
            for path in (files.rows, files.out):
                remove(path)
        except OSError as error:
            raise self._unwritable(error) from error

    def check(self, *others: tuple[FileIO | None, Path]) -> None:
        """Raise LookaheadError unless the names of the files still lead to those that are open here. others: further files."""
        for file, path in ((self.journal, self.files.journal), (self.rows, self.files.rows), *others):
            if file is not None and not is_at(file, path):
                raise LookaheadError(
                    f"{path}: was moved, removed or replaced by another program while the job was writing it. Put it back and "
                    "run the same command with --resume, or start again with --overwrite."
                )

    @property
    def is_held(self) -> bool:
        """The journal is still the file of this name, so the other files of the job are this job's."""
        return is_at(self.journal, self.files.journal)

    def close(self) -> None:
        """Give the lock back. A journal that was made for locks alone, maybe by one that was refused, is removed."""
        empty = not os.fstat(self.journal.fileno()).st_size
        with contextlib.suppress(OSError, LookaheadError):
            if empty and not self.used and self.is_held and (self._created or not self.files.existing()):
                remove(self.files.journal)
        for file in (self.rows, self.journal):
            if file is not None:
                uninterrupted(file.close)

    def __enter__(self) -> OutputLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_absent(self, may_exist: bool) -> None:
        if (found := self.files.existing()) and not may_exist:
            raise UsageError(
                f"{found}: exists. Give --resume to continue with it, --overwrite to replace it, or choose another -o."
            )

    def _open_journal(self) -> tuple[FileIO, bool]:
        """(the journal, whether it was made), locked and still at its name: another process may remove one that it made."""
        path = self.files.journal
        while True:
            created = not path.exists()
            flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT | os.O_EXCL if created else 0)
            try:
                journal = FileIO(os.open(path, flags, 0o666), "ab")
            except (FileExistsError, FileNotFoundError) as error:
                if not path.parent.is_dir():
                    raise self._unwritable(error) from error
                continue  # made or removed by another process in this moment
            except OSError as error:
                raise self._unwritable(error) from error
            try:
                self._lock(journal)
            except BaseException:
                journal.close()
                raise
            if is_at(journal, path):
                return journal, created
            uninterrupted(journal.close)

    def _unwritable(self, error: OSError) -> LookaheadError:
        return LookaheadError(f"{self.files.out}: cannot be written ({error.strerror}). Choose another -o.")

    def _lock(self, file: FileIO) -> None:
        if not try_lock(file.fileno()):
            raise LookaheadError(f"{self.files.out}: another process is writing it. Wait for it, or choose another -o.")


def is_at(file: FileIO, path: Path) -> bool:
    """`path` leads to this open file. Raises LookaheadError where the disk does not tell."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), uninterrupted(os.stat, path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise LookaheadError(f"{path}: cannot be read ({reason(error)}).") from error
