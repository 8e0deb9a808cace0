"""Memory in huge pages, where the system gives them, for what is read whole in each step. In: a tensor. Out: a copy of it.

Each page of 4 KiB costs a look-up; huge pages have 2 MiB.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

CHUNK = 32 << 20  # bytes that are reserved at once; those that nothing is written to take no memory
LINE = 64  # bytes of a cache line, where tensors begin

_lock = threading.Lock()
_chunk: tuple[mmap.mmap, int] | None = None  # the latest, and how many of its bytes are given out


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of the CPU: contiguous, in ordinary memory where the system has no such pages."""
    size = tensor.numel() * tensor.element_size()
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor.contiguous()
    memory, begin = _reserve(size)
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin)
    return copy.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _reserve(size: int) -> tuple[mmap.mmap, int]:
    """(memory, where in it `size` bytes begin). It is released with the last tensor in it."""
    global _chunk
    if size > CHUNK:
        return _mapped(size), 0
    with _lock:
        memory, begin = _chunk or (None, 0)
        if memory is None or begin + size > CHUNK:
            memory, begin = _mapped(CHUNK), 0
        _chunk = memory, -(-(begin + size) // LINE) * LINE
        return memory, begin


def _mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
