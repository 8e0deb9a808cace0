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
from numba.extending import intrinsic

from lookahead.native.cache import KernelCache
from lookahead.native.compiler import KernelCompiler
from lookahead.native.interpreted import Interpreted
from lookahead.native.kernels import PYTHON_IMPLS, SOURCES, inlined, memory_at

LONG = ir.IntType(64)
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
    """Where the function `openmp` is; 0 if there is none."""
    return int(ctypes.cast(openmp(), ctypes.c_void_p).value or 0) if openmp() else 0


def most_threads() -> int:
    """How many threads torch computes with when this thread asks it to; 1 if there is no such library."""
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
    """Run a kernel of one address (see `c_function`) in that many threads at once; in this one where there is no library.

    A kernel that Python runs (see interpreted.py) is run in this thread, too.
    """
    if isinstance(kernel, Interpreted):
        kernel.call_with(task)
        return
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


@intrinsic
def add(typing_context, address, number):
    """int64: the counter at this address before `number` is added to it; what was written before is seen by who reads it."""

    def codegen(context, builder, signature, values):
        counter = builder.inttoptr(values[0], LONG.as_pointer())
        return builder.atomic_rmw("add", counter, values[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


def _add(address: int, number: int) -> np.int64:
    """`add` in Python, for one thread."""
    counter = memory_at(address, (1,), np.int64)
    before = counter[0]
    counter[0] += number
    return before


PYTHON_IMPLS[id(add)] = _add


@intrinsic
def read(typing_context, address):
    """int64: the counter at this address, and with it what was written before it was raised."""

    def codegen(context, builder, signature, values):
        return builder.load_atomic(builder.inttoptr(values[0], LONG.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def call(typing_context, function):
    """Call the C function at this address, which takes and returns nothing that matters."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), []).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def call_with(typing_context, function, address):
    """Call the C function at this address, which takes one address and returns nothing."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [LONG]).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def in_threads(typing_context, parallel, function, address, threads):
    """Call the C function at `function`, which takes one address, in that many threads by GOMP_parallel, which is at
    `parallel`.
    """

    def codegen(context, builder, signature, values):
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [LONG, LONG, number, number]).as_pointer()
        count = builder.trunc(values[3], number)
        builder.call(builder.inttoptr(values[0], kind), [values[1], values[2], count, ir.Constant(number, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@inlined
def wait_for(address, count, yields):
    """Until the counter at this address has come to `count`. Who waits for long calls `yields`, the address of `gives_way`."""
    looked = np.int64(0)
    while read(address) < count:
        looked += 1
        if looked % PATIENCE == 0:
            call(yields)
