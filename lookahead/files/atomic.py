"""Files that are either the old one or the new one, whole.

The new bytes go to a temporary sibling, are synced to disk and take the final name in one rename. The sibling is locked while
it is written: one that nobody locks was left by a killed process, and the next write removes it. Symbolic links are followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from lookahead.errors import LookaheadError

Made = TypeVar("Made")
PIECE = 1 << 16  # bytes
PATIENCE = 1.0  # seconds that a lock is waited for without a word
MOST_LINKS = 40  # symbolic links one after the other, as Linux allows
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # of file systems without hard links
DISK_FAILS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # others report that folders cannot be synced here


def write_pieces(file: IO[bytes], data: memoryview) -> int:
    """Write in small pieces, as the page cache maps whole pieces when one page is touched; returns the length (bytes)."""
    for begin in range(0, len(data), PIECE):
        file.write(data[begin : begin + PIECE])
    return len(data)


def followed(path: str | Path) -> Path:
    """The file that a write to `path` replaces: the end of its links, existing or not. Raises LookaheadError for a circle."""
    given = path = Path(path)
    if path.exists() and not path.is_file():  # of a pipe, /dev/stdout leads to no name
        return path
    for _ in range(MOST_LINKS):
        if not path.is_symlink():
            return path
        path = path.parent / os.readlink(path)
    raise LookaheadError(f"{given}: is a symbolic link that leads in a circle.")


@contextlib.contextmanager
def replacing(path: str | Path, mode: str = "w+b", check: Callable[[], None] = lambda: None, new: bool = False) -> Iterator[IO]:
    """Open a temporary sibling of `path`; on success it replaces `path`, on any error it is removed.

    check: called just before the rename. new: a file that another process has made meanwhile is not replaced (FileExistsError).
    Raises LookaheadError if the folder is missing or cannot be written, the disk is full or fails.
    """
    path = Path(path)
    with _telling(path):
        path = followed(path)
        there = path.exists()
        if path.is_dir():
            raise LookaheadError(f"{path}: is a folder. Name a file to write.")
        if there and not path.is_file():
            raise LookaheadError(f"{path}: is a device or pipe, which cannot be replaced. Name a file to write.")
    fate = "The old file is unchanged." if there else "No file was written."
    descriptor, temporary = _locked_sibling(path)
    lock = -1
    file: IO | None = None
    try:
        lock = os.dup(descriptor)  # a file that is closed loses its lock, and may fail to close: before the rename
        as_text: Any = {} if "b" in mode else {"encoding": "utf-8", "errors": "backslashreplace"}  # names may be no UTF-8
        file = os.fdopen(descriptor, mode, **as_text)
        yield file
        file.flush()
        os.fsync(file.fileno())
        check()
        uninterrupted(file.close)
        identity = os.fstat(lock)
        try:
            if new:
                _link(temporary, path)
            else:
                uninterrupted(os.replace, temporary, path)
        except OSError:
            fate = _fate(path, identity, there)
            raise
        _sync_folder(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # what could not be written is known already
            os.close(descriptor) if file is None else file.close()
        _remove(temporary)
        if isinstance(error, FileExistsError) and new:
            raise
        if isinstance(error, OSError):
            what = _what_failed(error, path, temporary)
            raise LookaheadError(f"{what or f'{path}: write failed'} ({reason(error)}). {fate}".rstrip()) from error
        raise
    finally:
        _unlock(lock)


@contextlib.contextmanager
def scratch_sibling(path: str | Path) -> Iterator[IO[bytes]]:
    """A temporary file next to `path`, removed at the end. Raises LookaheadError where it cannot be made or written."""
    path = Path(path)
    with _telling(path):
        path = followed(path)
    descriptor, name = _locked_sibling(path)
    file: IO[bytes] | None = None
    try:
        file = open(name, "w+b")  # noqa: SIM115 - closed below, where what that raises must not hide what went wrong before
        yield file
    except OSError as error:
        what = _what_failed(error, path, name) or f"{path}: a temporary file next to it failed"
        raise LookaheadError(f"{what} ({reason(error)}).") from error
    finally:
        if file is not None:
            with contextlib.suppress(OSError):  # nobody will read it
                file.close()
        _remove(name)
        _unlock(descriptor)


@contextlib.contextmanager
def locked(path: str | Path, waiting: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Keep others that lock `path` from replacing it. waiting: called once after a second. Not to be nested for one path."""
    path = Path(path)
    descriptor = -1
    args = False
    begun = time.monotonic()
    try:
        while (descriptor := _openable(path)) >= 0:
            while not try_lock(descriptor):
                if not args and time.monotonic() > begun + PATIENCE:
                    args = True
                    waiting(f"{path}: another process is writing it; waiting for it to end.")
                time.sleep(0.05)
            with _telling(path):
                if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                    break
            _unlock(descriptor)  # of a file that was replaced meanwhile
            descriptor = -1
        yield
    finally:
        _unlock(descriptor)


def uninterrupted(call: Callable[..., Made], *arguments: Any) -> Made:
    """Make a system call again where a signal has interrupted it, as Python does for many, not for all."""
    while True:
        try:
            return call(*arguments)
        except InterruptedError:
            continue


def remove(path: Path) -> None:
    uninterrupted(path.unlink, True)


def reason(error: OSError) -> str:
    lines = str(error).strip().splitlines()
    return error.strerror or (lines[0] if lines else type(error).__name__)


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LookaheadError(f"{path}: cannot be used ({reason(error)}).") from error


def _what_failed(error: OSError, path: Path, temporary: str) -> str:
    """Return which other file an error is about that was raised while `path` was written; "" if it is not about another one."""
    other = isinstance(error.filename, str) and error.filename not in (temporary, str(path))
    return f"{error.filename}: cannot be used; {path}: write failed" if other else ""


def _fate(path: Path, identity: os.stat_result, there: bool) -> str:
    """Return what has become of `path` after a rename that has failed, which may have been done all the same."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return "" if there else "No file was written."
    except OSError:
        return "Look whether it is the old file or the new one."
    if os.path.samestat(now, identity):
        return "The new file is there all the same, whole."
    return "The old file is unchanged." if there else ""


def _link(temporary: str, path: Path) -> None:
    """Give the file its name if no other has it. Raises FileExistsError."""
    try:
        uninterrupted(os.link, temporary, path)
    except OSError as error:
        if error.errno not in NO_LINKS:  # nor FileExistsError
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        uninterrupted(os.replace, temporary, path)
    else:
        _remove(temporary)


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        uninterrupted(os.unlink, name)


def _unlock(descriptor: int) -> None:
    """Unlock and close, also where the file is mapped, which keeps it open."""
    if descriptor < 0:
        return
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """True once this process holds the lock, or the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _openable(path: Path) -> int:
    """A descriptor of an existing file, for a lock; -1 if there is none that can be opened."""
    for flags in (os.O_RDWR, os.O_RDONLY):  # network file systems lock only what may be written
        with contextlib.suppress(OSError):
            return os.open(path, flags) if path.is_file() else -1
    return -1


def _locked_sibling(path: Path) -> tuple[int, str]:
    """(descriptor, name) of a new temporary file next to `path`, locked. Raises LookaheadError where it cannot be made."""
    for name in glob.glob(glob.escape(str(path.parent / f".{path.name}.")) + "????????.tmp"):
        with contextlib.suppress(OSError), open(name, "rb") as file:  # an abandoned one can be locked
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            uninterrupted(os.unlink, name)
    while True:
        name = str(path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # as the umask has it
        except FileExistsError:
            continue
        except OSError as error:
            raise LookaheadError(f"{path}: cannot write here ({reason(error)}). Choose another folder.") from error
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):  # of a disk that fails: the first write reports it
            if not os.fstat(descriptor).st_nlink:
                _unlock(descriptor)  # taken for abandoned by another process in the moment before it was locked
                continue
        return descriptor, name


def _sync_folder(path: Path) -> None:
    """Make the rename itself last through a loss of power, where the system can. Raises LookaheadError where the disk fails."""
    try:
        descriptor = uninterrupted(os.open, path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    except OSError as error:
        if error.errno in DISK_FAILS:
            raise LookaheadError(
                f"{path}: is written, but its folder could not be put on disk ({reason(error)}): a loss of power may undo it."
            ) from error
