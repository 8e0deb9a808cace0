"""Threads of the OpenMP library that torch computes with, for kernels of ours.

They wait between calls of torch, some of the time busily: others would take turns with them.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


@functools.cache
def _library() -> Any:
    """The library; None if torch brings none that has what is used here."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        try:
            library = ctypes.CDLL(str(path))
            library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            library.GOMP_parallel.restype = None
            library.GOMP_barrier  # noqa: B018
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
def barrier() -> int:
    """The address of a C function in which threads that `openmp` runs wait for each other. Needs `openmp`."""
    return int(ctypes.cast(_library().GOMP_barrier, ctypes.c_void_p).value or 0)


@intrinsic
def call(typing_context, function):
    """Call the C function at this address, which takes and returns nothing."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), []).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def call_with(typing_context, function, address):
    """Call the C function at this address, which takes one address and returns nothing."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
