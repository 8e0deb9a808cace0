"""Threads of the OpenMP library that torch computes with, for kernels of ours.

They wait between calls of torch, some of the time busily: others would take turns with them.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lookahead.forward.vectors import LONG
from lookahead.kernels import woven

PATIENCE = 2_000  # looks at a counter, a few us


@functools.cache
def _library() -> Any:
    """The library; None if torch brings none that has what is used here."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        try:
            library = ctypes.CDLL(str(path))
            library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            library.GOMP_parallel.restype = None
        except (OSError, AttributeError):
            continue
        return library
    return None


@functools.cache
def openmp() -> Any:
    """GOMP_parallel(function, argument, threads, flags), which runs the function in so many threads; None if there is none."""
    library = _library()
    return None if library is None else library.GOMP_parallel


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


@woven
def wait_for(address, count, yields):
    """Until the counter at this address has come to `count`. Who waits for long calls `yields`, the address of `gives_way`."""
    looked = np.int64(0)
    while read(address) < count:
        looked += 1
        if looked % PATIENCE == 0:
            call(yields)
