"""Inner loops of products of tokens with a weight matrix, as LLVM code. For kernels.

A matrix [out, in] is cut into panels of 64 outputs, which lie [in, 64]: a product with a number of a token takes the next 64
weights of memory. In a panel of pairs, [in / 2, 64, 2], two weights of an output are neighbours, as AVX-512 BF16 multiplies
them. Each output adds one product (or pair of them) after the other, from the first number of the token to the last, so that
its bits are the same regardless of which other tokens share the call, and however panels are divided among threads.

Weights of half precision are widened where they are read, exactly. Addresses and strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from lookahead.forward.processor import has_avx512, multiplies_pairs
from lookahead.native.vector_code import FLOAT, INT, LANES, LONG, VECTOR, WHOLE, Code, emitted

PANEL = 64  # outputs
VECTORS = PANEL // LANES
UNROLLED = 4  # numbers of a token
# Tokens and vectors of a tile, the largest first: as many sums as there are registers for.
AVX512 = has_avx512()
TILES = ((6, 4), (4, 4), (2, 4), (1, 4)) if AVX512 else ((6, 1), (5, 1), (4, 1), (3, 2), (1, 4))


class BFloatType(ir.types._BaseFloatType):
    """Stand for LLVM's bfloat, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


BFloatType._create_instance()
PAIRS = ir.VectorType(BFloatType(), 2 * LANES)


def constant(number: int) -> Any:
    return ir.Constant(LONG, number)


def _add_up(code: Code, token: Any, stride: Any, weights: Any, inner: Any, sums: Any, goes_on: Any, shape: Any) -> None:
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
        for number in range(UNROLLED):
            step(builder.add(at, constant(number)))
    with code.loop(rest) as at:
        step(builder.add(whole, at))
    for home, register in zip(homes, registers, strict=True):
        code.store(builder.load(register), home)


def tiles(
    code: Code, token: Any, stride: Any, count: Any, sums: Any, shapes: Sequence[tuple[int, int]] = TILES
) -> Iterator[tuple[Any, Any, tuple[int, int], Any]]:
    """The code of a walk over `count` tokens and a panel's outputs: what is built at each turn is run for its tiles.

    shapes: of tiles, the largest first, the last one of one token. Yields where its tokens begin, where their sums [tokens, 64]
    do, (tokens, vectors of outputs), and the first vector, int64.
    """
    builder, done = code.builder, constant(0)
    for shape in shapes:
        tokens, vectors = shape
        rounds = builder.sdiv(builder.sub(count, done), constant(tokens))
        with code.loop(rounds) as number:
            first = builder.add(done, builder.mul(number, constant(tokens)))
            begin = builder.add(token, builder.mul(first, stride))
            home = code.at(sums, first, 4 * PANEL)
            if vectors == VECTORS:
                yield begin, home, shape, constant(0)
            else:
                with code.loop(constant(VECTORS), vectors) as column:
                    yield begin, home, shape, column
        done = builder.add(done, builder.mul(rounds, constant(tokens)))


@emitted(of_kind=True)
def multiply(code, token, stride, count, weights, inner, sums, goes_on):
    """Add up products of `count` tokens with a panel, over `inner` numbers (pairs: twice as many), into sums [count, 64].

    kind: an array element whose type defines what weights are: float32, uint16 (bits of bfloat16), int16 (bits of float16),
    int32 (pairs of bfloat16). token: float32; bfloat16 for pairs. weights: the first line. goes_on: 0 where sums begin at zero.
    """
    if code.kind == "int32" and not multiplies_pairs():  # no weights of this machine lie so, and LLVM has no code for it
        return
    size = 4 if code.kind in ("float32", "int32") else 2
    for begin, home, (tokens, vectors), column in tiles(code, token, stride, count, sums):
        here, there = code.at(weights, column, size * LANES), code.at(home, column, 4 * LANES)
        _add_up(code, begin, stride, here, inner, there, goes_on, (tokens, vectors))
