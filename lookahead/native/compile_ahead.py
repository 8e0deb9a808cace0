"""Kernels compiled by other processes while this one loads a model. In: names of groups of kernels. Out: files of kernels.

numba compiles in one thread at a time, so it takes processes to compile two kernels at once. They write to the folders of
cache.py, each kernel when it is whole, and a mark when a group is done. A kernel that this process needs while its group
is being compiled is waited for; if the process that compiles it has failed, or has not compiled it, this one compiles it.

What the groups hold is known to the module that the processes run (`MODULE`). They end with this process, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lookahead.native import cache as kernel_cache
from lookahead.native.cores import usable_cores
from lookahead.native.kernels import SOURCES

MODULE = "lookahead.job.compile_groups"
GROUPS = {  # name -> modules whose kernels it holds, seconds that it takes
    "sorting": (("trie.suffixes", "trie.stats", "trie.search"), 6.0),
    "drafting": (("draft", "trie.session"), 24.0),
    "forward": (("forward", "backends"), 13.0),
    "budget": (("budget",), 7.0),
    "steps": (("step",), 9.0),
}
POLL, LONGEST = 0.02, 180.0  # seconds: between looks for a file, and from the start until nothing is waited for any more


def start(groups: Sequence[str]) -> bool:
    """Compile what is missing of these groups, in as many processes as there are processors.

    Groups that are needed first come first. Returns False, and does nothing, where all of it is there, where there is one
    processor only, or where kernels cannot be kept.
    """
    folder = kernel_cache.folder_to_write()
    missing = [name for name in groups if not is_done(name)]
    if not missing or folder is None or usable_cores() < 2:
        return False
    started = _Started(missing)
    kernel_cache.wait_for = started.wait_for
    return bool(started.running())


def compile_all() -> None:
    """Compile all groups, in as many processes as there are processors, and wait for them."""
    _Started(list(GROUPS)).wait()


def shares_of(groups: Sequence[str], processes: int) -> list[list[str]]:
    """Groups for each process, so that all take about as long. Each share keeps the order of `groups`."""
    shares: list[list[str]] = [[] for _ in range(min(processes, len(groups)))]
    for name in sorted(groups, key=lambda name: -GROUPS[name][1]):
        min(shares, key=lambda share: sum(GROUPS[each][1] for each in share)).append(name)
    return [sorted(share, key=list(groups).index) for share in shares]


def is_done(group: str) -> bool:
    """Tell whether all of a group has been compiled, by this version of the kernels."""
    return kernel_cache.found(kernel_cache.mark_name(group, SOURCES)) is not None


@contextlib.contextmanager
def alone_with(group: str) -> Iterator[None]:
    """While open, no other process compiles this group; where the system has no such locks, it may."""
    folder = kernel_cache.folder_to_write()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            assert folder is not None
            file = stack.enter_context(open(folder / f"{group}.lock", "a", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Started:
    """Processes that compile these groups, one for each processor."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._until = time.monotonic() + LONGEST
        self._processes: list[tuple[subprocess.Popen[bytes], list[str]]] = []
        atexit.register(self._end)
        for share in shares_of(groups, usable_cores()):
            self._start(share)

    def _start(self, groups: list[str]) -> None:
        """Start a process. Where that is not possible, as in some sandboxes, this process compiles."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        quiet: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with contextlib.suppress(OSError, ValueError):
            process = subprocess.Popen([sys.executable, "-m", MODULE, *groups], env=environment, **quiet)
            self._processes.append((process, groups))

    def running(self) -> list[str]:
        """The groups that are being compiled, or will be."""
        left = [groups for process, groups in self._processes if process.poll() is None]
        return [name for groups in left for name in groups if not is_done(name)]

    def wait_for(self, module: str, is_there: Callable[[], bool]) -> None:
        """Until a kernel of this module is there, or nobody compiles it any more."""
        mine = [name for name, (modules, _) in GROUPS.items() if module.startswith(tuple(f"lookahead.{m}" for m in modules))]
        while not is_there() and time.monotonic() < self._until and set(mine) & set(self.running()):
            time.sleep(POLL)

    def wait(self) -> None:
        """Until all have ended."""
        for process, _ in self._processes:
            process.wait()

    def _end(self) -> None:
        for process, _ in self._processes:
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
