"""How much memory there is, was used, whether an error reports that it ran out; and how not to wait while it is tidied up."""

from __future__ import annotations

import contextlib
import gc
import platform
import re
import resource
import threading
from collections.abc import Iterator

import torch

_open = 0  # blocks of `gc_frozen`
_counting = threading.Lock()


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """While open, the garbage collector looks only at what is made meanwhile.

    Models and libraries are a million objects, and going through them all takes a quarter of a second, again and again. Within
    such a block another does nothing, and neither does one where an application has frozen objects itself: unfreezing would
    undo that. Python counts the frozen objects one by one, so only the outermost block asks for them.
    """
    global _open
    with _counting:
        _open += 1
        freezes = _open == 1 and not gc.get_freeze_count()
    try:
        if freezes:
            gc.collect()
            gc.freeze()
        yield
    finally:
        with _counting:
            _open -= 1
        if freezes:
            gc.unfreeze()


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return min([available, *_left_in_group()])


def _left_in_group() -> list[int]:
    """Bytes left to the control group of this process, if it has a limit."""
    folder = "/sys/fs/cgroup/"
    for most, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            with open(folder + most, encoding="ascii") as limit, open(folder + used, encoding="ascii") as current:
                return [int(limit.read()) - int(current.read())]
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return []


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device since its peak was last reset, or of this process since it started."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if platform.system() == "Darwin" else used * 1024


# How libraries report it that raise plain RuntimeErrors: torch on CPUs, CUDA itself (pinned memory too), and those above it.
NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|cudaErrorMemoryAllocation"
    r"|CU(BLAS|BLASLT|DNN|SOLVER|SPARSE|FFT)_STATUS_\w*ALLOC(ATION)?_FAILED",
    re.IGNORECASE,
)


def ran_out(error: Exception) -> bool:
    """True if an error reports that memory ran out, of the device or of this machine."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None
    )
