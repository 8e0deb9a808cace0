"""Keys and values in 8 or 4 bits. In: those of a token, as a layer computes them. Out: the bytes that a cache holds of them.

A key or value of one head is quantized alone, in groups of 32 numbers, once, when it is written: its bytes depend on nothing
but its own numbers, and moving or copying them changes nothing. vector_code.py defines how they lie; attention reads them as
they are.

    int8   numbers from -127 to 127 and a scale, 34 bytes for 32 numbers
    int4   numbers from 0 to 15, a scale and an offset, the least of the group: 20 bytes

The kernels take a buffer of such bytes for one of int8 (8 bits) or uint8 (4 bits), see `as_keys`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lookahead.forward.vector_code import (
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
)
from lookahead.kernels import kernel

DTYPES = {"int8": torch.int8, "int4": torch.uint8}  # of buffers
SMALLEST = 1e-30  # scale: of a group whose numbers differ by less, all are taken for the same


def bytes_of(width: int, kept: torch.dtype) -> int:
    """Of a key or value: 2 (in 4 bits 4) for each 32 of its `width` numbers, and 16 (8) for each 16. An even number."""
    header, size = (2, LANES) if kept == torch.int8 else (4, LANES // 2)
    return -(-width // GROUP) * header + -(-width // LANES) * size


def as_keys(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """A buffer [slots, heads, capacity, bytes] in the shape of what it holds, [slots, heads, capacity, width].

    So models, which look at shapes, hand it on to the kernels, which look at addresses and at strides but for the last.
    """
    *sizes, _ = buffer.shape
    *strides, _ = buffer.stride()
    return buffer.as_strided((*sizes, width), (*strides, 0))


def quantized(states: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    """[heads, tokens, bytes] of keys or values [heads, tokens, width]."""
    heads, tokens, width = states.shape
    source = states.float().contiguous()
    target = torch.zeros(heads, tokens, bytes_of(width, kept), dtype=kept)
    _quantize_all(source.data_ptr(), heads * tokens, width, target.data_ptr(), target.shape[2], kept == torch.int8)
    return target


def restored(held: torch.Tensor, width: int) -> torch.Tensor:
    """float32 [..., width] of bytes [..., bytes], as the kernels read them."""
    header, size, whole = (2, LANES, GROUP8) if held.dtype == torch.int8 else (4, LANES // 2, GROUP4)
    parts = []
    for group in range(-(-width // GROUP)):
        about = held[..., group * whole : (group + 1) * whole]
        halves = about[..., :header].contiguous().view(torch.bfloat16).float()
        numbers = about[..., header:].unflatten(-1, (-1, size))
        if size == LANES:
            parts.append(numbers.flatten(-2).float() * halves)
        else:
            both = torch.cat([numbers & 15, numbers >> 4], -1).flatten(-2)
            parts.append(both.float().double().mul(halves[..., :1].double()).add(halves[..., 1:].double()).float())
    return torch.cat(parts, -1)[..., :width]


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
        code, builder = self.code, self.code.builder
        most = builder.select(builder.fcmp_ordered(">", vectors[0], vectors[1]), vectors[0], vectors[1])
        for half in (8, 4, 2, 1):
            other = code.shuffled(most, most, [(lane + half) % LANES for lane in range(LANES)])
            most = builder.select(builder.fcmp_ordered(">", other, most), other, most)
        return builder.extract_element(most, ir.Constant(INT, 0))

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


@intrinsic
def quantize8(typing_context, source, count, target):
    """`count` float32 numbers as groups in 8 bits."""

    def codegen(context, builder, signature, values):
        code = Code(builder)
        for group, home in _groups(code, GROUP8, *values):
            most = group.most([code.call("llvm.fabs.v16f32", VECTOR, part) for part in group.numbers])
            scale = group.half(builder.fdiv(most, ir.Constant(FLOAT, 127.0)), home)
            factor, bytes_ = group.factor(scale), ir.VectorType(BYTE, LANES)
            whole = [group.whole(builder.fmul(part, factor), -127.0, 127.0) for part in group.numbers]
            group.store([builder.trunc(part, bytes_) for part in whole], builder.add(home, ir.Constant(LONG, 2)), LANES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def quantize4(typing_context, source, count, target):
    """`count` float32 numbers as groups in 4 bits."""

    def codegen(context, builder, signature, values):
        code = Code(builder)
        for group, home in _groups(code, GROUP4, *values):
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
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@kernel
def _quantize_all(source, count, width, target, size, in_8_bits):
    """`count` keys or values that lie one behind the other."""
    for number in range(count):
        if in_8_bits:
            quantize8(source + number * width * 4, width, target + number * size)
        else:
            quantize4(source + number * width * 4, width, target + number * size)
