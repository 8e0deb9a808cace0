"""Files that are either the old one or the new one, whole.

The new bytes go to a temporary sibling, are synced to disk and take the final name in one rename. The sibling is locked
while it is written: one that nobody locks was left by a process that was killed, and the next write to the name removes it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from lookahead.errors import LookaheadError

try:
    import fcntl
except ImportError:  # no such locks on this system: then nothing is taken for left behind
    fcntl = None  # type: ignore[assignment]


PIECE = 1 << 16  # bytes


def write_pieces(file: IO[bytes], data: memoryview) -> int:
    """Write all of `data` (bytes) in small pieces; returns its length.

    The page cache keeps a file in pieces as large as they were written, and maps the whole piece when one page is touched: of a
    mapped file written in large ones, a few look-ups would make hundreds of MiB resident.
    """
    for begin in range(0, len(data), PIECE):
        file.write(data[begin : begin + PIECE])
    return len(data)


@contextlib.contextmanager
def replacing(path: str | Path, mode: str = "w+b", check: Callable[[], None] = lambda: None) -> Iterator[IO]:
    """Open a temporary sibling of `path`; on success it replaces `path`, on any error it is removed.

    check: called just before the rename; what it raises keeps the old file.
    Raises LookaheadError if the folder is missing or cannot be written, or the disk is full.
    """
    path = Path(path)
    if path.is_dir():
        raise LookaheadError(f"{path}: is a folder. Name a file to write.")
    if path.exists() and not path.is_file():
        raise LookaheadError(f"{path}: is a device or pipe, which cannot be replaced. Name a file to write.")
    descriptor, temporary = _locked_sibling(path)
    try:
        with os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            check()
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise LookaheadError(f"{path}: write failed ({error.strerror}). The old file is unchanged.") from error
        raise


@contextlib.contextmanager
def scratch_sibling(path: str | Path) -> Iterator[IO[bytes]]:
    """A temporary file beside `path`, removed at the end; after a kill, by the next write to `path`."""
    descriptor, name = _locked_sibling(Path(path))
    try:
        with open(name, "w+b") as file:
            yield file
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _locked_sibling(path: Path) -> tuple[int, str]:
    """(descriptor, name) of a new temporary file beside `path`, locked as long as this process holds it, however it ends.

    Removes those that other processes left. Raises LookaheadError if the folder is missing or cannot be written.
    """
    _remove_abandoned(path)
    while True:
        try:
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        except OSError as error:
            raise LookaheadError(f"{path}: cannot write here ({error.strerror}). Choose another place with -o.") from error
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # taken for abandoned by another process in the moment before it was locked


def _remove_abandoned(path: Path) -> None:
    """Remove temporary siblings of `path` that no process is writing."""
    if fcntl is None:
        return
    for name in glob.glob(glob.escape(str(path.parent / f".{path.name}.")) + "????????.tmp"):
        with contextlib.suppress(OSError), open(name, "rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last through a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
