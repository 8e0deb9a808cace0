"""Functions of many float32 numbers as LLVM code over vectors of 16. For kernels; see vectors.py.

Errors are below 2e-7 of the result, of `tanh` and what is made of it 2e-7 of 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from lookahead.backends.lowering import ops
from lookahead.native.vector_code import FLOAT, LANES, LONG, VECTOR, WHOLE, Code, each_chunk, emitted

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; the first has few bits, so that products with it are exact
# e ** r for |r| <= ln 2 / 2, lowest power last
EXP = (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665795e-2, 1.6666666e-1, 0.5, 1.0, 1.0)
# erf(x) = x P(x x) / Q(x x) for |x| <= 4, beyond which it is 1: the rational approximation that Eigen and XLA use
ERF_P = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
ERF_Q = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02)


def _polynomial(code: Code, x: Any, factors: tuple[float, ...]) -> Any:
    result = code.constant(factors[0])
    for factor in factors[1:]:
        result = code.fma(result, x, code.constant(factor))
    return result


def _clamped(code: Code, x: Any, least: float, most: float) -> Any:
    """Clamp numbers; what is not a number stays so."""
    for sign, bound in (("<", least), (">", most)):
        limit = code.constant(bound)
        x = code.builder.select(code.builder.fcmp_ordered(sign, x, limit), limit, x)
    return x


def _exp(code: Code, x: Any) -> Any:
    x = _clamped(code, x, -87.3, 88.7)
    whole = code.call("llvm.rint.v16f32", VECTOR, code.builder.fmul(x, code.constant(LOG2_E)))
    rest = code.fma(whole, code.constant(-LN2_HIGH), x)
    rest = code.fma(whole, code.constant(-LN2_LOW), rest)
    exponent = code.builder.shl(code.builder.fptosi(whole, WHOLE), ir.Constant(WHOLE, [23] * LANES))
    result = code.builder.bitcast(_polynomial(code, rest, EXP), WHOLE)
    return code.builder.bitcast(code.builder.add(result, exponent), VECTOR)


def _sigmoid(code: Code, x: Any, times: Any = None) -> Any:
    one = code.constant(1.0)
    return code.builder.fdiv(times or one, code.builder.fadd(one, _exp(code, code.builder.fneg(x))))


def _tanh(code: Code, x: Any) -> Any:
    """1 - 2 / (1 + e ** 2x)"""
    builder, one = code.builder, code.constant(1.0)
    power = _exp(code, builder.fmul(_clamped(code, x, -10.0, 10.0), code.constant(2.0)))
    return builder.fsub(one, builder.fdiv(code.constant(2.0), builder.fadd(one, power)))


def _erf(code: Code, x: Any) -> Any:
    builder = code.builder
    x = _clamped(code, x, -4.0, 4.0)
    square = builder.fmul(x, x)
    return builder.fdiv(builder.fmul(x, _polynomial(code, square, ERF_P)), _polynomial(code, square, ERF_Q))


def _half(code: Code, x: Any, of_one: Any) -> Any:
    """x / 2 (1 + of_one)"""
    half = code.builder.fmul(x, code.constant(0.5))
    return code.builder.fmul(half, code.builder.fadd(code.constant(1.0), of_one))


def _gelu(code: Code, x: Any) -> Any:
    return _half(code, x, _erf(code, code.builder.fmul(x, code.constant(math.sqrt(0.5)))))


def _gelu_tanh(code: Code, x: Any) -> Any:
    builder = code.builder
    cube = builder.fmul(builder.fmul(x, x), x)
    inner = builder.fmul(code.fma(cube, code.constant(0.044715), x), code.constant(math.sqrt(2 / math.pi)))
    return _half(code, x, _tanh(code, inner))


ROUNDED = {ops.TO_BFLOAT16: types.uint16, ops.TO_FLOAT16: types.int16}
OF_ONE: dict[int, Callable[[Code, Any], Any]] = {
    ops.COPY: lambda code, x: x,
    ops.NEGATE: lambda code, x: code.builder.fneg(x),
    ops.SQUARE_ROOT: lambda code, x: code.call("llvm.sqrt.v16f32", VECTOR, x),
    ops.EXP: _exp,
    ops.SIGMOID: _sigmoid,
    ops.SILU: lambda code, x: _sigmoid(code, x, x),
    ops.TANH: _tanh,
    ops.ERF: _erf,
    ops.GELU: _gelu,
    ops.GELU_TANH: _gelu_tanh,
    ops.RELU: lambda code, x: code.larger(code.constant(0.0), x),  # what is not a number stays so
}
OF_TWO = {ops.ADD: "fadd", ops.SUBTRACT: "fsub", ops.MULTIPLY: "fmul", ops.DIVIDE: "fdiv"}


def _rounded(code: Code, x: Any, rounds: Any) -> Any:
    result = code.variable(VECTOR, x)
    for kind, of_half in ROUNDED.items():
        with code.builder.if_then(code.builder.icmp_signed("==", rounds, ir.Constant(LONG, kind))):
            half = Code(code.builder, of_half)
            code.builder.store(half.widened(half.narrowed(x)), result)
    return code.builder.load(result)


@emitted()
def compute(code, op, rounds, count, target, left, left_step, right, right_step):
    """target = left op right, or op of left (lowering/ops.py): float32 [count], rounded. A step of 0: one number for all."""
    builder = code.builder
    none = code.constant(0.0)

    def operand(address, step):
        """Return what reads it: 16 numbers, `some` of them."""
        same = code.splat(code.load(address, FLOAT))
        is_one = builder.icmp_signed("==", step, ir.Constant(LONG, 0))

        def read(at, some):
            result = code.variable(VECTOR, same)
            with builder.if_then(builder.not_(is_one), likely=True):
                where = code.at(address, at, 4)
                builder.store(code.load(where) if some is None else code.masked(where, code.below(some), none), result)
            return builder.load(result)

        return read

    def run(function, operands):
        def add(at, some):
            result = _rounded(code, function(*(read(at, some) for read in operands)), rounds)
            code.store_numbers(result, code.at(target, at, 4), 4, None if some is None else code.below(some))

        each_chunk(code, count, add)

    done = builder.append_basic_block("done")
    switch = builder.switch(op, done)
    both = (left, left_step), (right, right_step)
    cases: list[tuple[int, Any, Any]] = [
        (number, functools.partial(of_one, code), both[:1]) for number, of_one in OF_ONE.items()
    ]
    cases += [(number, getattr(builder, name), both) for number, name in OF_TWO.items()]
    for number, function, operands in cases:
        block = builder.append_basic_block()
        switch.add_case(ir.Constant(LONG, number), block)
        with builder.goto_block(block):
            run(function, [operand(*each) for each in operands])
            builder.branch(done)
    builder.position_at_end(done)


@emitted(types.float32)
def total(code, source, count):
    """float32: the sum of `count` numbers. Those at i, i + 16, i + 32 ... first, for each i < 16."""
    builder = code.builder
    slot = code.variable(VECTOR, code.constant(0.0))

    def add(at, some):
        where = code.at(source, at, 4)
        read = code.load(where) if some is None else code.masked(where, code.below(some), code.constant(0.0))
        builder.store(builder.fadd(builder.load(slot), read), slot)

    each_chunk(code, count, add)
    return code.reduced(builder.load(slot), builder.fadd)
