"""Threads of the OpenMP library that torch computes with, for kernels of ours.

They wait between calls of torch, some of the time busily: others would take turns with them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.ccallback import CFunc

from lookahead.native.cache import KernelCache
from lookahead.native.compiler import KernelCompiler
from lookahead.native.kernels import SOURCES, inlined
from lookahead.native.vector_code import INT, LONG, emitted

PATIENCE = 2_000  # looks at counters, a few us
SHARES = 3  # that work is cut into, for each thread


@functools.cache
def _library() -> Any:
    """The library; None if torch brings none that has what is used here. torch itself need not be loaded."""
    found = importlib.util.find_spec("torch")
    for path in (Path(str(found and found.origin)).parent / "lib").glob("libgomp*.so*"):
        try:
            library = ctypes.CDLL(str(path))
            library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            library.GOMP_parallel.restype = None
            library.omp_get_max_threads.restype = ctypes.c_int
        except (OSError, AttributeError):
            continue
        return library
    return None


def openmp() -> Any:
    """GOMP_parallel(function, argument, threads, flags), which runs the function in that many threads; None if there is
    none.
    """
    return getattr(_library(), "GOMP_parallel", None)


def _address_of(function: Any) -> int:
    """Where a C function lies; 0 for None."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@functools.cache
def openmp_address() -> int:
    """Return where the function `openmp` is; 0 if there is none."""
    return _address_of(openmp())


@functools.cache
def thread_number() -> int:
    """The address of a C function that gives the number of the thread that calls it, among those that run a kernel; or 0."""
    return _address_of(getattr(_library(), "omp_get_thread_num", None))


def most_threads() -> int:
    """Return how many threads torch computes with when this thread asks it to; 1 if there is no such library."""
    library = _library()
    return 1 if library is None else int(library.omp_get_max_threads())


@functools.cache
def c_function(kernel: Callable[[int], None]) -> tuple[Callable[[Any], None], int]:
    """A kernel of one address as a C function, from the cache of kernels if it is there: to be called, and where it lies.

    It releases the GIL. It takes an address, or bytes to read and write, which nobody else may hold.
    """
    compiled: Any = CFunc(
        kernel, ((types.int64,), types.void), {}, {"nopython": True, "error_model": "numpy"}, pipeline_class=KernelCompiler
    )
    compiled._cache = KernelCache(kernel, SOURCES)
    compiled.compile()
    _kept.append(compiled)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address), int(compiled.address)


def run_in(threads: int, kernel: Callable[[int], None], task: Any) -> None:
    """Run a kernel of one address (see `c_function`) in that many threads at once; in this one where there is no library."""
    function, address = c_function(kernel)
    if threads > 1 and (parallel := openmp()):
        parallel(address, task, threads, 0)
    else:
        function(task)


_kept: list[Any] = []  # machine code lives as long as what compiled it


@functools.cache
def gives_way() -> int:
    """The address of a C function that lets other threads have the processor."""
    return _address_of(ctypes.CDLL(None).sched_yield)


@emitted(types.int64)
def add(code, address, number):
    """int64: the counter at this address before `number` is added to it; what was written before is seen by who reads it."""
    return code.builder.atomic_rmw("add", code.pointer(address, LONG), number, "acq_rel")


@emitted(types.int64)
def read(code, address):
    """int64: what the address holds; what was written before it was, is seen, too."""
    return code.builder.load_atomic(code.pointer(address, LONG), "acquire", 8)


@emitted()
def write(code, address, number):
    """Write an int64, and with it what was written before; see `read`."""
    code.builder.store_atomic(number, code.pointer(address, LONG), "release", 8)


@emitted(types.boolean)
def replace(code, address, old, new):
    """Write `new` where the address holds `old`; tells whether it did."""
    pair = code.builder.cmpxchg(code.pointer(address, LONG), old, new, "acq_rel", "acquire")
    return code.builder.extract_value(pair, 1)


@emitted()
def call(code, function):
    """Call the C function at this address, which takes and returns nothing that matters."""
    code.builder.call(code.pointer(function, ir.FunctionType(ir.VoidType(), [])), [])


@emitted(types.int64)
def number_by(code, function):
    """int64: what the C function at this address returns, an int."""
    number = code.builder.call(code.pointer(function, ir.FunctionType(INT, [])), [])
    return code.builder.sext(number, LONG)


@emitted()
def call_with(code, function, address):
    """Call the C function at this address, which takes one address and returns nothing."""
    code.builder.call(code.pointer(function, ir.FunctionType(ir.VoidType(), [LONG])), [address])


@emitted()
def in_threads(code, parallel, function, address, threads):
    """Call the C function at `function`, which takes one address, in that many threads by GOMP_parallel, at `parallel`."""
    kind = ir.FunctionType(ir.VoidType(), [LONG, LONG, INT, INT])
    count = code.builder.trunc(threads, INT)
    code.builder.call(code.pointer(parallel, kind), [function, address, count, ir.Constant(INT, 0)])


# Shares of work are dealt out to threads. For each thread a line of the processor's cache counts how many of its shares are
# taken, and how many shares it has done. It takes its own shares first, and then what others have left of theirs: so threads
# that keep pace do not write to each other's lines, and nobody waits for a thread that has taken nothing. Counts are above a
# base that grows from use to use; what is below it means none, and nothing is reset.
COUNTS = 8  # int64 of a line
TAKEN, DONE = 0, 8  # bytes


@inlined
def take_share(line, base, most):
    """Take the next of `most` shares of the thread whose counts are at `line`: its number, or -1 if all are taken."""
    while True:
        seen = read(line + TAKEN)
        taken = max(seen - base, 0)
        if taken >= most:
            return np.int64(-1)
        if replace(line + TAKEN, seen, base + taken + 1):
            return taken


@inlined
def wait_for(lines, threads, base, shares, yields):
    """Until threads have done that many shares. Who waits for long calls `yields`, the address of `gives_way`."""
    looked, done = np.int64(0), np.int64(-1)
    while done < shares:
        done = np.int64(0)
        for thread in range(threads):
            done += max(read(lines + thread * COUNTS * 8 + DONE) - base, 0)
        looked += 1
        if looked % PATIENCE == 0:
            call(yields)
