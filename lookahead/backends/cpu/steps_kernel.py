"""Steps of plain decoding in one native call: the kernel. In: the address of an array that describes them.

Each step is a run of the program (program_kernel.py) with one token of each row; its best tokens are what the next step brings.
So nothing between two steps is Python's. The call ends behind the step in which a row emits a token that may end its answer.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lookahead.backends.cpu.program_kernel import ALL, HEAD, IDS, META, OUTSIDE, SCORES, THREADS, TICKET
from lookahead.forward.best_kernel import best_token
from lookahead.forward.tree_meta import FIELDS, FIRST, PAST, POSITION, first_seen
from lookahead.native.kernels import carray, inlined, int16_at, int32_at, int64_at
from lookahead.native.threads import LONG, call_with

# The array that describes them: the address of a run's head and how many scores there are of a token; steps that are to be
# taken at most, and that were; kinds of layers and the address of their limits (int64 [2, kinds], see `meta_of`); tokens that
# may end an answer, how many and the address (int64); the address that takes what is emitted (int64 [steps, rows]; what is not
# negative there is taken instead of the best token); addresses of C functions: `program_kernel.prepare` and `run`, and
# GOMP_parallel.
TOLD = 12
(RUN_HEAD, VOCAB, MOST, TAKEN, KINDS, LIMITS, STOPS, STOPS_AT, EMITTED, PREPARE, RUN, PARALLEL) = range(TOLD)


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


def steps_floats(address):
    told = carray(int64_at(address), (TOLD,))
    head = carray(int64_at(told[RUN_HEAD]), (HEAD,))
    _steps(told, carray(int32_at(head[SCORES]), (head[ALL], told[VOCAB])), np.int32(0x7FFFFFFF))


def steps_halves(address):
    told = carray(int64_at(address), (TOLD,))
    head = carray(int64_at(told[RUN_HEAD]), (HEAD,))
    _steps(told, carray(int16_at(head[SCORES]), (head[ALL], told[VOCAB])), np.int16(0x7FFF))


@inlined
def _steps(told, bits, magnitude):
    """bits, magnitude: of the scores, see `best.bits_of`. The run's ids, positions and lines of meta move on with each step."""
    head = carray(int64_at(told[RUN_HEAD]), (HEAD,))
    rows, kinds, threads = head[ALL], told[KINDS], head[THREADS]
    ids = carray(int64_at(head[IDS]), (2, rows))  # and positions
    meta = carray(int32_at(head[META]), (kinds, rows, FIELDS))
    limits = carray(int64_at(told[LIMITS]), (2, kinds))
    stops = carray(int64_at(told[STOPS_AT]), (told[STOPS],))
    emitted = carray(int64_at(told[EMITTED]), (told[MOST], rows))
    ended = False
    while told[TAKEN] < told[MOST] and not ended:
        head[TICKET] = 0
        call_with(told[PREPARE], told[RUN_HEAD])
        if head[OUTSIDE] != 0:
            return
        if threads > 1:
            in_threads(told[PARALLEL], told[RUN], told[RUN_HEAD], threads)
        else:
            call_with(told[RUN], told[RUN_HEAD])
        for row in range(rows):
            token, given = best_token(bits, magnitude, row), emitted[told[TAKEN], row]
            if given >= 0:
                token = given
            emitted[told[TAKEN], row] = token
            for k in range(len(stops)):
                ended = ended or token == stops[k]
            ids[0, row] = token
            ids[1, row] += 1
            for kind in range(kinds):
                line = meta[kind, row]
                line[PAST] += 1
                line[POSITION] += 1
                line[FIRST] = first_seen(np.int64(line[POSITION]), limits[0, kind], limits[1, kind])
        told[TAKEN] += 1
