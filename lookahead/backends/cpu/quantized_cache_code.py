"""Keys and values in 8 or 4 bits, as LLVM code and a kernel. In: addresses of numbers. Out: the bytes that a cache holds of
them, see quantized_cache.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from lookahead.native.kernels import kernel
from lookahead.native.vector_code import (
    BYTE,
    FLOAT,
    GROUP,
    GROUP4,
    GROUP8,
    INT,
    LANES,
    LONG,
    SHORT,
    VECTOR,
    WHOLE,
    Code,
    emitted,
)

SMALLEST = 1e-30  # scale: of a group whose numbers differ by less, all are taken for the same


class _Group:
    """Code for a group of up to 32 numbers. source: its address; count: of numbers from there on."""

    def __init__(self, code: Code, source: Any, count: Any):
        self.code = code
        first = code.splat(code.load(source, FLOAT))  # stands for what is not there
        self.more = code.builder.icmp_signed(">", count, ir.Constant(LONG, LANES))  # than 16
        parts = [code.builder.add(source, ir.Constant(LONG, 4 * LANES * number)) for number in range(2)]
        rest = code.builder.sub(count, ir.Constant(LONG, LANES))
        self.numbers = [
            code.masked(parts[0], code.below(count), first),
            code.masked(parts[1], code.below(rest), first),
        ]

    def most(self, vectors: list[Any]) -> Any:
        """The largest of all lanes."""
        return self.code.reduced(self.code.larger(*vectors), self.code.larger)

    def half(self, number: Any, address: Any) -> Any:
        """Store a float32 as bfloat16, rounded to the nearest, halves to even; gives what is stored as float32."""
        builder = self.code.builder
        bits = builder.bitcast(number, INT)
        odd = builder.and_(builder.lshr(bits, ir.Constant(INT, 16)), ir.Constant(INT, 1))
        bits = builder.lshr(builder.add(builder.add(bits, odd), ir.Constant(INT, 0x7FFF)), ir.Constant(INT, 16))
        builder.store(builder.trunc(bits, SHORT), self.code.pointer(address, SHORT), align=2)
        return builder.bitcast(builder.shl(bits, ir.Constant(INT, 16)), FLOAT)

    def factor(self, scale: Any) -> Any:
        """16 times 1 / scale; 0 for none."""
        builder = self.code.builder
        counts = builder.fcmp_ordered(">=", scale, ir.Constant(FLOAT, SMALLEST))
        one, none = ir.Constant(FLOAT, 1.0), ir.Constant(FLOAT, 0.0)
        return self.code.splat(builder.select(counts, builder.fdiv(one, scale), none))

    def whole(self, number: Any, least: float, most: float) -> Any:
        """Whole numbers, the nearest, halves to even, within bounds."""
        code, builder = self.code, self.code.builder
        rounded = code.call("llvm.rint.v16f32", VECTOR, number)
        for bound, sign in ((code.constant(least), ">"), (code.constant(most), "<")):
            rounded = builder.select(builder.fcmp_ordered(sign, rounded, bound), rounded, bound)
        return builder.fptosi(rounded, WHOLE)

    def store(self, parts: list[Any], target: Any, size: int) -> None:
        """Store vectors of bytes, `size` bytes apart; the second one only where it is needed."""
        code, builder = self.code, self.code.builder
        builder.store(parts[0], code.pointer(target, parts[0].type), align=1)
        with builder.if_then(self.more):
            where = builder.add(target, ir.Constant(LONG, size))
            builder.store(parts[1], code.pointer(where, parts[1].type), align=1)


def _groups(code: Code, size: int, source: Any, count: Any, target: Any) -> Iterator[tuple[_Group, Any]]:
    """Yields (group, address of its bytes) inside a loop over all of them."""
    builder = code.builder
    with code.loop(count, GROUP) as at:
        home = code.at(target, builder.lshr(at, ir.Constant(LONG, 5)), size)
        yield _Group(code, code.at(source, at, 4), builder.sub(count, at)), home


@emitted()
def quantize8(code, source, count, target):
    """`count` float32 numbers as groups in 8 bits."""
    builder = code.builder
    for group, home in _groups(code, GROUP8, source, count, target):
        most = group.most([code.call("llvm.fabs.v16f32", VECTOR, part) for part in group.numbers])
        scale = group.half(builder.fdiv(most, ir.Constant(FLOAT, 127.0)), home)
        factor, bytes_ = group.factor(scale), ir.VectorType(BYTE, LANES)
        whole = [group.whole(builder.fmul(part, factor), -127.0, 127.0) for part in group.numbers]
        group.store([builder.trunc(part, bytes_) for part in whole], builder.add(home, ir.Constant(LONG, 2)), LANES)


@emitted()
def quantize4(code, source, count, target):
    """`count` float32 numbers as groups in 4 bits."""
    builder = code.builder
    for group, home in _groups(code, GROUP4, source, count, target):
        least = builder.fneg(group.most([builder.fneg(part) for part in group.numbers]))
        offset = group.half(least, builder.add(home, ir.Constant(LONG, 2)))
        span = builder.fsub(group.most(group.numbers), offset)
        scale = group.half(builder.fdiv(span, ir.Constant(FLOAT, 15.0)), home)
        factor, begin, packed = group.factor(scale), code.splat(offset), []
        for part in group.numbers:
            whole = group.whole(builder.fmul(builder.fsub(part, begin), factor), 0.0, 15.0)
            low, high = (
                builder.shuffle_vector(whole, whole, ir.Constant(ir.VectorType(INT, 8), list(lanes)))
                for lanes in (range(8), range(8, LANES))
            )
            high = builder.shl(high, ir.Constant(ir.VectorType(INT, 8), [4] * 8))
            packed.append(builder.trunc(builder.or_(low, high), ir.VectorType(BYTE, 8)))
        group.store(packed, builder.add(home, ir.Constant(LONG, 4)), LANES // 2)


@kernel
def quantize_all(source, count, width, target, size, in_8_bits):
    """`count` keys or values that lie one behind the other."""
    for number in range(count):
        if in_8_bits:
            quantize8(source + number * width * 4, width, target + number * size)
        else:
            quantize4(source + number * width * 4, width, target + number * size)
