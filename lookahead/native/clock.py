"""The clock of steps, for kernels: the one that `time.perf_counter` reads, where that is a C function that can be called."""

from __future__ import annotations

import ctypes
import functools
import time

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lookahead.native.kernels import carray, inlined, int64_at
from lookahead.native.threads import LONG

MONOTONIC = 1  # its number on Linux


@functools.cache
def clock_address() -> int:
    """Where `clock_gettime` is; 0 if `time.perf_counter` reads another clock."""
    if time.get_clock_info("perf_counter").implementation != "clock_gettime(CLOCK_MONOTONIC)":
        return 0
    return int(ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0)


@intrinsic
def _read(typing_context, function, address):
    """Let `clock_gettime`, which is at `function`, write seconds and nanoseconds, int64, to `address`."""

    def codegen(context, builder, signature, values):
        number = ir.IntType(32)
        kind = ir.FunctionType(number, [number, LONG]).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), [number(MONOTONIC), values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@inlined
def seconds_at(function, address):
    """Seconds, float64, by the clock at `function` (`clock_address`). address: of two int64 to write to."""
    _read(function, address)
    parts = carray(int64_at(address), (2,))
    return parts[0] + 1e-9 * parts[1]
