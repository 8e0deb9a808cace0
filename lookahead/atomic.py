"""Files that are either the old one or the new one, whole.

The new bytes go to a temporary sibling, are synced to disk and take the final name in one rename.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lookahead.errors import LookaheadError


@contextlib.contextmanager
def replacing(path: str | Path, mode: str = "wb") -> Iterator[IO]:
    """Open a temporary sibling of `path`; on success it replaces `path`, on any error it is removed.

    Raises LookaheadError if the folder is missing or cannot be written, or the disk is full.
    """
    path = Path(path)
    if path.is_dir():
        raise LookaheadError(f"{path}: is a folder. Name a file to write.")
    if path.exists() and not path.is_file():
        raise LookaheadError(f"{path}: is a device or pipe, which cannot be replaced. Name a file to write.")
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise LookaheadError(f"{path}: cannot write here ({error.strerror}). Choose another place with -o.") from error
    try:
        with os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise LookaheadError(f"{path}: write failed ({error.strerror}). The old file is unchanged.") from error
        raise


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
