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

PATIENCE = 2_000  # looks at a counter, a few us


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


@functools.cache
def openmp() -> Any:
    """GOMP_parallel(function, argument, threads, flags), which runs the function in that many threads; None if there is
    none.
    """
    library = _library()
    return None if library is None else library.GOMP_parallel


@functools.cache
def openmp_address() -> int:
    """Return where the function `openmp` is; 0 if there is none."""
    return int(ctypes.cast(openmp(), ctypes.c_void_p).value or 0) if openmp() else 0


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
    return int(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0)


@emitted(types.int64)
def add(code, address, number):
    """int64: the counter at this address before `number` is added to it; what was written before is seen by who reads it."""
    return code.builder.atomic_rmw("add", code.pointer(address, LONG), number, "acq_rel")


@emitted(types.int64)
def read(code, address):
    """int64: the counter at this address, and with it what was written before it was raised."""
    return code.builder.load_atomic(code.pointer(address, LONG), "acquire", 8)


@emitted()
def call(code, function):
    """Call the C function at this address, which takes and returns nothing that matters."""
    code.builder.call(code.pointer(function, ir.FunctionType(ir.VoidType(), [])), [])


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


@inlined
def wait_for(address, count, yields):
    """Until the counter at this address has come to `count`. Who waits for long calls `yields`, the address of `gives_way`."""
    looked = np.int64(0)
    while read(address) < count:
        looked += 1
        if looked % PATIENCE == 0:
            call(yields)
