"""Compiled kernels on disk. In: what numba has compiled. Out: the same in later processes.

numba's own cache writes next to the package or below the home folder, raises where it can do neither (containers that run by a
user id without a home), and executes any file there. Here kernels are kept in the first of these folders that can be
written, and are read from all of them:

    $NUMBA_CACHE_DIR/lookahead            if it is set
    lookahead/__pycache__                 of the installed package
    $LOOKAHEAD_CACHE/kernels              or ~/.cache/lookahead/kernels
    TMPDIR/lookahead-kernels-UID          made for this user alone

Loading a kernel executes it, so a folder counts only if nobody but this user and root can change it or a folder above it
(`folders.not_ours`), and a file only if it belongs to one of them and nobody else may write to it. A package that root has
installed and in which root has run a command once serves all users, who only read it.

A kernel is one file, named after the kernel and a hash of everything that its machine code depends on. It appears under that
name by a rename, when it is whole, so processes that compile the same kernel at once do not disturb each other. A hash of the
content stands at its beginning: what a crash of the machine has cut is compiled again.

Of numba this uses what its own cache uses, not all of it public: `Dispatcher._cache` with its methods `load_overload` and
`save_overload`, `CompileResult._reduce` and `_rebuild`, `numba.core.serialize.dumps` (the same from numba 0.60 to 0.68).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import multiprocessing
import os
import pickle
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite.binding import get_host_cpu_name
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from lookahead.files.folders import cache_folder, not_ours, others_may_write, temporary_folder

log = logging.getLogger(__name__)

# Seconds: files that somebody began to write so long ago are removed, and kernels of other versions that are so old: until then
# an install of another version may share the folder, and would compile them again at each turn.
ABANDONED, OUTDATED = 3600.0, 7 * 24 * 3600.0
INSTEAD = "set LOOKAHEAD_CACHE to a folder that belongs to you and that nobody else can write to"

# Waits for a kernel of this module that another process may be compiling, until the function is true. See compile_ahead.py.
wait_for: Callable[[str, Callable[[], bool]], None] | None = None
_notice = ""  # where kernels are not kept, or not for long: why


def notice() -> str:
    """Why kernels are not kept, or not for long; "" if they are."""
    return _notice


def _notify(text: str) -> None:
    """Notify once a process. Workers do not: who started them does, see `notice`."""
    global _notice
    if not _notice:
        _notice = text
        if multiprocessing.parent_process() is None:
            log.warning("%s", text)


class KernelCache(NullCache):
    """The cache of one kernel, instead of numba's. sources: a hash of the source files that the kernel is made of."""

    def __init__(self, function: Callable[..., Any], sources: bytes):
        code = function.__code__
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        self._kept = all(isinstance(each, int | np.generic) for each in held)  # what else it holds has no name
        self._module = function.__module__
        parts = function.__module__, function.__qualname__, *(f"{type(each).__name__}_{each}" for each in held)
        name = re.sub(r"[^\w.]", "_", ".".join(parts))
        self._name = f"{name}.{sys.implementation.cache_tag}-numba-{numba.__version__}"
        made_of = sources + hashlib.sha256(code.co_code + str(code.co_firstlineno).encode()).digest()
        self._stamp = hashlib.sha256(made_of).hexdigest()[:12]

    @property
    def cache_path(self) -> str | None:
        return next((str(folder) for folder in _candidates() if not not_ours(folder)), None)

    def load_overload(self, signature: Any, target_context: Any) -> CompileResult | None:
        """The kernel for this signature; None if it is not there."""
        target_context.refresh()
        name = self._file_name(signature, target_context.codegen())
        content = found(name) if self._kept else None
        if content is None and self._kept and wait_for is not None:
            wait_for(self._module, lambda: _is_there(name))
            content = found(name)
        return None if content is None else CompileResult._rebuild(target_context, *pickle.loads(content))

    def save_overload(self, signature: Any, compiled: CompileResult) -> None:
        """Keep the kernel. Where that is not possible, report it once."""
        if not self._kept or compiled.lifted or compiled.library.has_dynamic_globals:
            return
        name = self._file_name(signature, compiled.codegen)
        content = dumps(compiled._reduce())
        why = ""
        for folder in _candidates():
            problem = _problem_of(folder) or _write(folder, name, content)
            if not problem:
                self._tidy(folder)
                if folder == temporary_folder("kernels"):
                    _notify(f"compiled kernels are kept in {folder}, which may not last. To keep them longer, {INSTEAD}.")
                return
            why = f"{why}; {problem}" if why else problem
        _notify(f"compiled kernels cannot be kept, so each run compiles them again ({why}). To keep them, {INSTEAD}.")

    def _file_name(self, signature: Any, codegen: Any) -> str:
        key = hashlib.sha256(repr((str(signature), codegen.magic_tuple())).encode()).hexdigest()[:20]
        return f"{self._name}-{self._stamp}-{key}.kernel"

    def _tidy(self, folder: Path) -> None:
        """Remove what earlier versions of the kernel have left, and what processes that were killed have."""
        with contextlib.suppress(OSError):
            for path in folder.glob(f"{self._name}-*"):
                if not path.name.startswith(f"{self._name}-{self._stamp}-") or path.suffix == ".tmp":
                    age = time.time() - path.lstat().st_mtime
                    if age > (ABANDONED if path.suffix == ".tmp" else OUTDATED):
                        path.unlink(missing_ok=True)


@functools.cache
def _candidates() -> tuple[Path, ...]:
    """Folders in which kernels may lie, or be kept, in this order."""

    def all_of_them() -> Iterator[Path | None]:
        if numba.config.CACHE_DIR:
            yield Path(numba.config.CACHE_DIR) / "lookahead"
        yield Path(__file__).parents[1] / "__pycache__"
        yield cache_folder("kernels")
        yield temporary_folder("kernels")

    return tuple(Path(os.path.abspath(folder)) for folder in all_of_them() if folder is not None)


@functools.cache
def _readable() -> tuple[Path, ...]:
    return tuple(folder for folder in _candidates() if folder.is_dir() and not not_ours(folder))


def folder_to_write() -> Path | None:
    """Return where kernels are kept, made if it is missing; None if they cannot be."""
    return next((folder for folder in _candidates() if not _problem_of(folder)), None)


def found(name: str) -> bytes | None:
    """The content of a file in any folder that is read from."""
    return next((content for folder in _readable() if (content := _read(folder / name)) is not None), None)


def _is_there(name: str) -> bool:
    return any((folder / name).exists() for folder in _readable())


def mark_name(group: str, sources: bytes) -> str:
    """The file that notes that this version of this group of kernels is compiled, see `write_mark`."""
    about = f"{sys.implementation.cache_tag}-numba-{numba.__version__}-{get_host_cpu_name()}"
    return f"{group}.{about}-{hashlib.sha256(sources).hexdigest()[:12]}.done"


def write_mark(group: str, sources: bytes) -> None:
    """Note that this group of kernels is compiled, where they are kept."""
    folder = folder_to_write()
    if folder is None:
        return
    _write(folder, mark_name(group, sources), b"")
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{group}.*.done"):  # of earlier versions
            if time.time() - path.lstat().st_mtime > OUTDATED:
                path.unlink(missing_ok=True)


@functools.cache
def _problem_of(folder: Path) -> str:
    """Why kernels cannot be kept there; "" if they can. Makes the folder, for this user alone, if it is missing."""
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        for each in reversed(missing):
            each.mkdir(mode=0o700 if each.name != "__pycache__" else 0o755, exist_ok=True)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if missing:
        _readable.cache_clear()
    return not_ours(folder)


def _read(path: Path) -> bytes | None:
    """Return what was written there; None if that is missing, is not whole, or others could have written it."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
        with open(number, "rb") as file:
            about = os.fstat(number)
            own = about.st_uid in (0, os.getuid()) and not others_may_write(about)
            if not (own and stat.S_ISREG(about.st_mode)):
                return None
            digest, content = file.read(hashlib.sha256().digest_size), file.read()
    except OSError:
        return None
    return content if hashlib.sha256(content).digest() == digest else None


def _write(folder: Path, name: str, content: bytes) -> str:
    """Why it could not be written; "" if it is, under its name when it is whole."""
    temporary = folder / f"{name}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(temporary, flags, 0o644), "wb") as file:
            os.chmod(temporary, 0o644)  # regardless of the umask: all may read, nobody else may write
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(temporary, folder / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return f"{folder}: {error.strerror}"
    return ""
