"""Inner loops of products of tokens with a weight matrix, as LLVM code. For kernels.

A matrix [out, in] is cut into panels of 64 outputs, which lie [in, 64]: a product with a number of a token takes the next 64
weights of memory. In a panel of pairs, [in / 2, 64, 2], two weights of an output are neighbours, as AVX-512 BF16 multiplies
them. Each output adds one product (or pair of them) after the other, from the first number of the token to the last, so that
its bits are the same regardless of which other tokens share the call, and however panels are divided among threads.

Weights of half precision are widened where they are read, exactly. Addresses and strides are in bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types

from lookahead.backends.lowering.ops import AS_BFLOAT16, AS_FLOAT16, AS_FLOAT32, LIKE_BFLOAT16, LIKE_FLOAT16
from lookahead.forward.processor import has_avx512, multiplies_pairs
from lookahead.native.vector_code import FLOAT, INT, LANES, LONG, VECTOR, WHOLE, Code, emitted

PANEL = 64  # outputs
VECTORS = PANEL // LANES
UNROLLED = 4  # lines of a panel: of numbers of a token, of pairs or of four of them
LINE = 64  # bytes of a line of a processor's cache
# Vectors of a tile of 1, 2, ... tokens: as many sums as there are registers for.
AVX512 = has_avx512()
TILES = (4, 4, 4, 4, 4, 4) if AVX512 else (4, 2, 2, 1, 1, 1)


class BFloatType(ir.types._BaseFloatType):
    """Stand for LLVM's bfloat, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


BFloatType._create_instance()
PAIRS = ir.VectorType(BFloatType(), 2 * LANES)


def constant(number: int) -> Any:
    return ir.Constant(LONG, number)


class Ahead:
    """Fetches what a thread multiplies next, a block of weights, while it multiplies this one, a part in each tile."""

    def __init__(self, code: Code, address: Any, size: Any, turns: Any):
        """address: of the next block, 0: nothing is fetched. size: its bytes. turns: how often `fetch` is called, about."""
        builder = code.builder
        self._code, self._at = code, code.variable(LONG, address)
        self._end = builder.add(address, size)
        lines = builder.sdiv(size, constant(LINE))
        each = builder.sdiv(builder.add(lines, builder.sub(turns, constant(1))), turns)
        self._each = builder.select(builder.icmp_signed("==", address, constant(0)), constant(0), each)

    def fetch(self) -> None:
        code, builder = self._code, self._code.builder
        with code.loop(self._each):
            at = builder.load(self._at)
            code.fetch(at)
            beyond = builder.icmp_signed(">=", at, self._end)
            builder.store(builder.select(beyond, at, builder.add(at, constant(LINE))), self._at)


def _add_up(
    code: Code, token: Any, stride: Any, weights: Any, inner: Any, sums: Any, goes_on: Any, shape: Any, ahead: Ahead
) -> None:
    """Code of one tile, see `multiply`. shape: its tokens and vectors."""
    builder, pairs = code.builder, code.kind == "int32"
    tokens, vectors = shape
    size = 2 * code.size if pairs else code.size
    lines = [builder.add(token, builder.mul(stride, constant(number))) for number in range(tokens)]
    homes = [
        builder.add(sums, constant(4 * (PANEL * row + LANES * vector))) for row in range(tokens) for vector in range(vectors)
    ]
    registers = [code.variable(VECTOR, code.constant(0.0)) for _ in homes]
    with builder.if_then(builder.icmp_signed("!=", goes_on, constant(0)), likely=False):
        for home, register in zip(homes, registers, strict=True):
            builder.store(code.load(home), register)

    def step(at: Any) -> None:
        line = builder.add(weights, builder.mul(at, constant(size * PANEL)))
        read = []
        for vector in range(vectors):
            where = builder.add(line, constant(size * LANES * vector))
            read.append(builder.bitcast(code.load(where, WHOLE), PAIRS) if pairs else code.keys(where))
        for row, address in enumerate(lines):
            number = code.splat(code.load(code.at(address, at, 4), INT if pairs else FLOAT))
            for part, register in zip(read, registers[row * vectors : (row + 1) * vectors], strict=True):
                total = builder.load(register)
                if pairs:
                    name = "llvm.x86.avx512bf16.dpbf16ps.512"
                    total = code.call(name, VECTOR, total, builder.bitcast(number, PAIRS), part)
                else:
                    total = code.fma(number, part, total)
                builder.store(total, register)

    rest = builder.srem(inner, constant(UNROLLED))
    whole = builder.sub(inner, rest)
    with code.loop(whole, UNROLLED) as at:
        ahead.fetch()
        for number in range(UNROLLED):
            step(builder.add(at, constant(number)))
    with code.loop(rest) as at:
        step(builder.add(whole, at))
    for home, register in zip(homes, registers, strict=True):
        code.store(builder.load(register), home)


def _tile_count(builder: Any, count: Any, most: int) -> Any:
    return builder.sdiv(builder.add(count, constant(most - 1)), constant(most))


def turns(code: Code, count: Any, lines: Any, vectors: Sequence[int] = TILES) -> Any:
    """How often tiles of `tiles` take UNROLLED lines of a block, about."""
    builder = code.builder
    times = builder.mul(_tile_count(builder, count, len(vectors)), constant(VECTORS // vectors[-1]))
    return builder.mul(times, builder.add(builder.sdiv(lines, constant(UNROLLED)), constant(1)))


def tiles(
    code: Code, token: Any, stride: Any, count: Any, sums: Any, vectors: Sequence[int] = TILES
) -> Iterator[tuple[Any, Any, tuple[int, int], Any]]:
    """The code of a walk over `count` tokens and a panel's outputs: what is built at each turn is run for its tiles.

    vectors: of outputs, of tiles of 1, 2, ... tokens. As few tiles as possible, of nearly as many tokens each. Yields where
    their tokens begin, where their sums [tokens, 64] do, (tokens, vectors of outputs), and the first vector, int64.
    """
    builder, done = code.builder, constant(0)
    number = _tile_count(builder, count, len(vectors))
    small = builder.sdiv(count, number)  # tokens of most tiles; of the first ones, one more
    large = builder.srem(count, number)
    for tokens in range(len(vectors), 0, -1):
        is_small = builder.icmp_signed("==", small, constant(tokens))
        is_large = builder.icmp_signed("==", small, constant(tokens - 1))
        others = builder.select(is_large, large, constant(0))
        rounds = builder.select(is_small, builder.sub(number, large), others)
        width = vectors[tokens - 1]
        with code.loop(rounds) as index:
            first = builder.add(done, builder.mul(index, constant(tokens)))
            begin = builder.add(token, builder.mul(first, stride))
            home = code.at(sums, first, 4 * PANEL)
            if width == VECTORS:
                yield begin, home, (tokens, width), constant(0)
            else:
                with code.loop(constant(VECTORS), width) as column:
                    yield begin, home, (tokens, width), column
        done = builder.add(done, builder.mul(rounds, constant(tokens)))


def multiply_numbers(
    code: Code, token: Any, stride: Any, count: Any, weights: Any, inner: Any, sums: Any, goes_on: Any, ahead: Any
) -> None:
    """Code of `quantized_code.multiply` for weights that are not quantized."""
    if code.kind == "int32" and not multiplies_pairs():  # no weights of this machine lie so, and LLVM has no code for it
        return
    size = 4 if code.kind in ("float32", "int32") else 2
    block = code.builder.mul(inner, constant(size * PANEL))
    fetched = Ahead(code, ahead, block, turns(code, count, inner))
    for begin, home, (tokens, vectors), column in tiles(code, token, stride, count, sums):
        here, there = code.at(weights, column, size * LANES), code.at(home, column, 4 * LANES)
        _add_up(code, begin, stride, here, inner, there, goes_on, (tokens, vectors), fetched)


HALVES = {AS_BFLOAT16: types.uint16, LIKE_BFLOAT16: types.uint16, AS_FLOAT16: types.int16, LIKE_FLOAT16: types.int16}


@emitted()
def give_panel(code, sums, count, columns, scales, bias, target, stride, stored):
    """Store the first columns of sums [count, 64] where the product's results go, times scales and with the bias added.

    scales, bias: addresses of as many float32; 0: none. stored: how, see ops.AS_FLOAT32.
    """
    builder = code.builder
    none = [builder.icmp_signed("==", address, constant(0)) for address in (scales, bias)]
    for kind, is_whole in itertools.product((AS_FLOAT32, *HALVES), (True, False)):
        half, size = Code(builder, HALVES.get(kind, types.float32)), 2 if kind in (AS_BFLOAT16, AS_FLOAT16) else 4
        of_kind = builder.icmp_signed("==", stored, constant(kind))
        of_size = builder.icmp_signed("==" if is_whole else "!=", columns, constant(PANEL))
        with builder.if_then(builder.and_(of_kind, of_size)), code.loop(count) as row:
            line, home = code.at(sums, row, 4 * PANEL), builder.add(target, builder.mul(row, stride))
            for number in range(VECTORS):
                column = constant(4 * LANES * number)
                mask = None if is_whole else code.below(builder.sub(columns, constant(LANES * number)))
                slot = code.variable(VECTOR, code.load(builder.add(line, column)))
                for address, is_none, combine in zip((scales, bias), none, (builder.fmul, builder.fadd), strict=True):
                    with builder.if_then(builder.not_(is_none)):
                        where = builder.add(address, column)
                        read = code.load(where) if mask is None else code.masked(where, mask, code.constant(0.0))
                        builder.store(combine(builder.load(slot), read), slot)
                result = builder.load(slot)
                if kind != AS_FLOAT32:
                    result = half.narrowed(result)
                    result = result if size == 2 else half.widened(result)
                code.store_numbers(result, builder.add(home, constant(size * LANES * number)), size, mask)
