"""Writes LLVM code over vectors of 16 float32, for the inner loops of kernels (vectors.py, panel_code.py, quantized_code.py).

Keys and values may be of half precision, or quantized to 8 or 4 bits: they become float32 as they are read. Quantized ones lie
in groups of 32 numbers, each with a scale in front, and in 4 bits with an offset behind that (bfloat16). What is read is the
whole number times the scale, plus the offset. 16 numbers are 16 bytes, int8, or 8 bytes: the first eight numbers in the lower
halves, the others in the upper. The last group may be one of 16 numbers; what fills it up means nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from lookahead.native.kernels import fetch

LANES = 16
GROUP = 32  # quantized numbers
GROUP8, GROUP4 = 2 + GROUP, 4 + GROUP // 2  # bytes of a group
FLOAT, HALF, BYTE, SHORT, INT, LONG = ir.FloatType(), ir.HalfType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
VECTOR, WHOLE = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)


class Code:
    """Writes LLVM code. kind: numba's type of the array element that defines what keys and values are."""

    def __init__(self, builder: Any, kind: Any = types.float32):
        self.builder = builder
        self.kind = str(kind)
        self.quantized = self.kind in ("int8", "uint8")  # in 8 bits, in 4
        self.size = 1 if self.quantized else 4 if self.kind == "float32" else 2

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(result, [a.type for a in arguments]), name
        )
        return self.builder.call(function, arguments)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("llvm.fma.v16f32", VECTOR, a, b, c)

    def splat(self, value: Any) -> Any:
        vector = ir.VectorType(value.type, LANES)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(WHOLE, [0] * LANES))

    def constant(self, value: float, vector: Any = VECTOR) -> Any:
        return ir.Constant(vector, [value] * LANES)

    def shuffled(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(WHOLE, lanes))

    def at(self, address: Any, index: Any, size: int) -> Any:
        """The address of a number of `size` bytes."""
        return self.builder.add(address, self.builder.mul(index, ir.Constant(LONG, size)))

    def pointer(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: Any, kind: Any = VECTOR) -> Any:
        return self.builder.load(self.pointer(address, kind), align=4)

    def fetch(self, address: Any) -> None:
        """A hint to the processor that the cache line at this address is read soon; it may lie anywhere."""
        fetch(self.builder, self.pointer(address, BYTE))

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.pointer(address, value.type), align=4)

    def store_numbers(self, value: Any, address: Any, size: int, mask: Any = None) -> None:
        """16 numbers of `size` bytes, 4 or 2; those where the mask is set, if there is one."""
        pointer = self.pointer(address, value.type)
        if mask is None:
            self.builder.store(value, pointer, align=size)
        else:
            name = "llvm.masked.store.v16f32.p0" if size == 4 else "llvm.masked.store.v16i16.p0"
            self.call(name, ir.VoidType(), value, pointer, ir.Constant(INT, size), mask)

    def below(self, count: Any) -> Any:
        """Lanes whose number is below `count`, int64."""
        lanes = ir.Constant(ir.VectorType(LONG, LANES), list(range(LANES)))
        return self.builder.icmp_signed("<", lanes, self.splat(count))

    def masked(self, address: Any, mask: Any, other: Any) -> Any:
        """16 float32, those of `other` where the mask is not set."""
        return self.call("llvm.masked.load.v16f32.p0", VECTOR, self.pointer(address, VECTOR), ir.Constant(INT, 4), mask, other)

    def keys(self, address: Any, count: Any = None) -> Any:
        """16 numbers of a key or value as float32; count: only that many, int64, then zeros."""
        narrow = VECTOR if self.size == 4 else ir.VectorType(SHORT, LANES)
        where = self.pointer(address, narrow)
        if count is None:
            read = self.builder.load(where, align=self.size)
        else:
            name = "llvm.masked.load.v16f32.p0" if self.size == 4 else "llvm.masked.load.v16i16.p0"
            none = ir.Constant(narrow, [0] * LANES) if self.size == 2 else self.constant(0.0)
            read = self.call(name, narrow, where, ir.Constant(INT, self.size), self.below(count), none)
        return read if self.size == 4 else self.widened(read)

    def widened(self, halves: Any) -> Any:
        """16 float32 of numbers of half precision."""
        if self.kind == "uint16":
            wide = self.builder.shl(self.builder.zext(halves, WHOLE), ir.Constant(WHOLE, [16] * LANES))
            return self.builder.bitcast(wide, VECTOR)
        return self.builder.fpext(self.builder.bitcast(halves, ir.VectorType(HALF, LANES)), VECTOR)

    def narrowed(self, numbers: Any) -> Any:
        """16 float32 in half precision, each the nearest, the even of two; what is not a number stays so."""
        builder, halves = self.builder, ir.VectorType(SHORT, LANES)
        if self.kind == "int16":
            return builder.bitcast(builder.fptrunc(numbers, ir.VectorType(HALF, LANES)), halves)
        whole, sixteen = builder.bitcast(numbers, WHOLE), ir.Constant(WHOLE, [16] * LANES)
        odd = builder.and_(builder.lshr(whole, sixteen), ir.Constant(WHOLE, [1] * LANES))
        rounded = builder.add(builder.add(whole, odd), ir.Constant(WHOLE, [0x7FFF] * LANES))
        is_number = builder.fcmp_ordered("ord", numbers, numbers)
        rounded = builder.select(is_number, rounded, ir.Constant(WHOLE, [0x7FC00000] * LANES))
        return builder.trunc(builder.lshr(rounded, sixteen), halves)

    def numbers(self, line: Any, at: Any, count: Any = None, vector: int | None = None) -> Any:
        """16 numbers, from the one numbered `at` on, of the key or value that begins at the address `line`, as `keys`.

        vector: that many vectors further on; `at` is then a multiple of 64. What fills a quantized one up may be any number.
        """
        builder = self.builder
        if not self.quantized:
            start = self.at(line, at, self.size)
            return self.keys(builder.add(start, ir.Constant(LONG, self.size * LANES * (vector or 0))), count)
        size, own = (GROUP8, LANES) if self.kind == "int8" else (GROUP4, LANES // 2)
        group = builder.lshr(at, ir.Constant(LONG, 5))
        if vector is None:
            inside = builder.mul(
                builder.and_(builder.lshr(at, ir.Constant(LONG, 4)), ir.Constant(LONG, 1)), ir.Constant(LONG, own)
            )
        else:
            group = builder.add(group, ir.Constant(LONG, vector // 2))
            inside = ir.Constant(LONG, vector % 2 * own)
        start = self.at(line, group, size)
        where = self.at(start, inside, 1)
        about = self.splat(builder.load(self.pointer(start, INT), align=2))  # the scale, and the offset or two numbers
        scale = builder.bitcast(builder.shl(about, ir.Constant(WHOLE, [16] * LANES)), VECTOR)
        if self.kind == "int8":
            read = builder.load(self.pointer(builder.add(where, ir.Constant(LONG, 2)), ir.VectorType(BYTE, LANES)), align=1)
            return builder.fmul(builder.sitofp(builder.sext(read, WHOLE), VECTOR), scale)
        eight = ir.VectorType(INT, 8)
        read = builder.load(self.pointer(builder.add(where, ir.Constant(LONG, 4)), ir.VectorType(BYTE, 8)), align=1)
        both = builder.zext(read, eight)
        low = builder.and_(both, ir.Constant(eight, [15] * 8))
        high = builder.lshr(both, ir.Constant(eight, [4] * 8))
        whole = self.shuffled(low, high, list(range(LANES)))
        offset = builder.bitcast(builder.and_(about, ir.Constant(WHOLE, [-65536] * LANES)), VECTOR)
        return self.fma(builder.sitofp(whole, VECTOR), scale, offset)

    def variable(self, kind: Any, value: Any) -> Any:
        slot = cgutils.alloca_once(self.builder, kind)
        self.builder.store(value, slot)
        return slot

    @contextmanager
    def loop(self, count: Any, step: int = 1) -> Iterator[Any]:
        """Over int64 0, step, 2 step ... below count."""
        with cgutils.for_range_slice(self.builder, ir.Constant(LONG, 0), count, ir.Constant(LONG, step), LONG) as (index, _):
            yield index

    def larger(self, a: Any, b: Any) -> Any:
        """`a` where it is above `b`, else `b`."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduced(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """One number of 16: combine(one half, the other), four times."""
        for half in (8, 4, 2, 1):
            other = self.shuffled(vector, vector, [(lane + half) % LANES for lane in range(LANES)])
            vector = combine(other, vector)
        return self.builder.extract_element(vector, ir.Constant(INT, 0))

    def folded(self, sums: list[Any]) -> Any:
        """[16] totals of 16 vectors."""
        for half in (8, 4, 2, 1):
            low = [lane for lane in range(2 * LANES) if lane % (2 * half) < half]
            high = [lane + half for lane in low]
            pairs = zip(sums[::2], sums[1::2], strict=True)
            sums = [self.builder.fadd(self.shuffled(a, b, low), self.shuffled(a, b, high)) for a, b in pairs]
        return sums[0]


def each_chunk(code: Code, width: Any, add: Any) -> None:
    """Run add(offset in numbers, count or None) over a vector of `width` numbers, 16 at a time."""
    builder = code.builder
    rest = builder.srem(width, ir.Constant(LONG, LANES))
    whole = builder.sub(width, rest)
    with code.loop(whole, LANES) as at:
        add(at, None)
    with builder.if_then(builder.icmp_signed(">", rest, ir.Constant(LONG, 0)), likely=False):
        add(whole, rest)


def emitted(result: Any = types.void, of_kind: bool = False, **kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: calls of the function in kernels are replaced by the code that it writes, given a `Code` and values.

    Arguments are int64, but for those that `kinds` names. of_kind: calls have one more, the first: its type is `Code.kind`.
    The function returns the value of the call; None if `result` is void.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        _, *parameters = inspect.signature(write).parameters.values()
        arguments = [kinds.get(parameter.name, types.int64) for parameter in parameters]

        @functools.wraps(write)
        def typed(typing_context: Any, *of: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = write(Code(builder, *signature.args[:of_kind]), *values[of_kind:])
                return context.get_dummy_value() if value is None else value

            return result(*of[:of_kind], *arguments), codegen

        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("typing_context", "kind")]
        typed.__signature__ = inspect.Signature([*first[: 1 + of_kind], *parameters])  # type: ignore[attr-defined]
        return intrinsic(typed)

    return decorate
