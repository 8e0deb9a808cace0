"""Inner loops of attention as LLVM code over vectors of 16 float32. For kernels; keys and values may be of half precision.

numba leaves it to LLVM which loops become vectors, and so in which order sums run. Here each function sets it itself, which
makes its results the same bits on every call. A product of a query with a key adds d = i, i + 16, i + 32 ... for each i < 16,
rounding once for each multiply-add, then folds the 16 sums: i + 8 onto i, then i + 4, i + 2, i + 1. `dots`, `dot` and
`tile_scores` give the same bits. An output adds key after key.

kind: an array element whose type defines what keys and values are: float32, uint16 (bits of bfloat16) or int16 (bits of
float16). Those that read keys and values take quantized ones, too: int8 (8 bits) or uint8 (4 bits, see vector_code.py).
Addresses and strides are in bytes. width: numbers of a key or value. Vectors in scratch memory are padded with zeros to a
multiple of 16 numbers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from lookahead.native.vector_code import FLOAT, LANES, LONG, VECTOR, WHOLE, each_chunk, emitted

LEAST = -3.0e38  # below every score
# 2 ** f for -0.5 <= f <= 0.5, lowest power last: the largest error is 2e-8
EXP2 = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


def _rows(code, key, stride, count):
    """Addresses of 16 keys; from `count` on that of the last one again."""
    builder = code.builder
    last = builder.sub(count, ir.Constant(LONG, 1))
    for number in [ir.Constant(LONG, lane) for lane in range(LANES)]:
        index = builder.select(builder.icmp_signed("<", number, last), number, last)
        yield builder.add(key, builder.mul(index, stride))


@emitted(of_kind=True)
def dots(code, query, key, stride, count, width, scores):
    """16 scores of one query, float32 in scratch memory, with 16 keys; from `count` on the last of them again."""
    builder, rows, totals = code.builder, [*_rows(code, key, stride, count)], []
    for first in range(0, LANES, 4):
        four = rows[first : first + 4]
        sums = [code.variable(VECTOR, code.constant(0.0)) for _ in four]

        def add(at, some, four=four, sums=sums):
            part = code.load(code.at(query, at, 4))
            for address, slot in zip(four, sums, strict=True):
                product = code.fma(part, code.numbers(address, at, some), builder.load(slot))
                builder.store(product, slot)

        each_chunk(code, width, add)
        totals += [builder.load(slot) for slot in sums]
    code.store(code.folded(totals), scores)


@emitted(types.float32, of_kind=True)
def dot(code, query, key, width):
    """float32: the score of one query with one key."""
    builder = code.builder
    slot = code.variable(VECTOR, code.constant(0.0))

    def add(at, some):
        part = code.load(code.at(query, at, 4))
        builder.store(code.fma(part, code.numbers(key, at, some), builder.load(slot)), slot)

    each_chunk(code, width, add)
    return code.reduced(builder.load(slot), builder.fadd)


@emitted(of_kind=True)
def transpose(code, key, stride, count, width, turned):
    """16 keys side by side: float32 [width padded, 16] in scratch memory; from `count` on the last key again."""
    builder, rows = code.builder, [*_rows(code, key, stride, count)]

    def add(at, some):
        block = [code.numbers(row, at, some) for row in rows]
        for half in (8, 4, 2, 1):  # swap the halves of pairs of rows: 16 x 16 numbers are turned in four rounds
            low = [lane if lane & half == 0 else lane - half + LANES for lane in range(LANES)]
            high = [lane + half if lane & half == 0 else lane + LANES for lane in range(LANES)]
            turned_block = list(block)
            for number in range(LANES):
                if number & half == 0:
                    a, b = block[number], block[number + half]
                    turned_block[number], turned_block[number + half] = code.shuffled(a, b, low), code.shuffled(a, b, high)
            block = turned_block
        start = code.at(turned, at, 4 * LANES)
        for number, vector in enumerate(block):
            code.store(vector, builder.add(start, ir.Constant(LONG, 4 * LANES * number)))

    each_chunk(code, width, add)


@emitted()
def tile_scores(code, query, stride, turned, chunks, scores, scores_stride):
    """[4, 16] scores of 4 queries with the 16 keys that `transpose` gave. chunks: of 16 numbers in a key.

    Sums of i and i + 8 are added and written down, 8 times: if all were open until the end, LLVM would move additions there and
    run out of registers.
    """
    builder, half = code.builder, LANES // 2
    queries = [builder.add(query, builder.mul(stride, ir.Constant(LONG, number))) for number in range(4)]
    kept = [cgutils.alloca_once(builder, VECTOR, size=half) for _ in queries]
    whole = builder.and_(chunks, ir.Constant(LONG, -4))
    with code.loop(ir.Constant(LONG, half)) as lane:
        slots = [[code.variable(VECTOR, code.constant(0.0)) for _ in range(2)] for _ in queries]

        def add(chunk):
            for other in range(2):
                at = builder.add(builder.mul(chunk, ir.Constant(LONG, LANES)), ir.Constant(LONG, other * half))
                at = builder.add(at, lane)
                keys = code.load(code.at(turned, at, 4 * LANES))
                for address, pair in zip(queries, slots, strict=True):
                    number = code.splat(code.load(code.at(address, at, 4), FLOAT))
                    builder.store(code.fma(number, keys, builder.load(pair[other])), pair[other])

        with code.loop(whole, 4) as chunk:
            for further in range(4):
                add(builder.add(chunk, ir.Constant(LONG, further)))
        with code.loop(builder.sub(chunks, whole)) as chunk:
            add(builder.add(whole, chunk))
        for pair, sums in zip(slots, kept, strict=True):
            builder.store(builder.fadd(builder.load(pair[0]), builder.load(pair[1])), builder.gep(sums, [lane]))
    for number, sums in enumerate(kept):
        parts = [builder.load(builder.gep(sums, [ir.Constant(LONG, lane)])) for lane in range(half)]
        while len(parts) > 1:
            parts = [builder.fadd(a, b) for a, b in zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)]
        code.store(parts[0], builder.add(scores, builder.mul(scores_stride, ir.Constant(LONG, number))))


@emitted(types.float32)
def largest(code, scores, count):
    """float32: the largest of `count` scores, at least LEAST."""
    builder = code.builder
    slot = code.variable(VECTOR, code.constant(LEAST))

    def add(at, some):
        where, most = code.at(scores, at, 4), builder.load(slot)
        new = code.load(where) if some is None else code.masked(where, code.below(some), most)
        builder.store(code.larger(new, most), slot)

    each_chunk(code, count, add)
    return code.reduced(builder.load(slot), code.larger)


@emitted(most=types.float32)
def powers(code, scores, count, most):
    """Overwrite with 2 ** (score - most) of `count` scores."""
    builder = code.builder
    most = code.splat(most)

    def add(at, some):
        where = code.at(scores, at, 4)
        mask = None if some is None else code.below(some)
        score = code.load(where) if mask is None else code.masked(where, mask, most)
        power = builder.fsub(score, most)
        least = code.constant(-126.0)
        live = builder.fcmp_unordered(">=", power, least)  # what is not a number stays so
        power = builder.select(live, power, least)
        whole = code.call("llvm.rint.v16f32", VECTOR, power)
        rest = builder.fsub(power, whole)
        result = code.constant(EXP2[0])
        for factor in EXP2[1:]:
            result = code.fma(result, rest, code.constant(factor))
        exponent = builder.shl(builder.fptosi(whole, WHOLE), ir.Constant(WHOLE, [23] * LANES))
        result = builder.bitcast(builder.add(builder.bitcast(result, WHOLE), exponent), VECTOR)
        result = builder.select(live, result, code.constant(0.0))
        code.store_numbers(result, where, 4, mask)

    each_chunk(code, count, add)


def _mixer(rows: int, vectors: int) -> Any:
    @emitted(of_kind=True)
    def mix(code, weights, weights_stride, value, stride, count, at, some, outputs, outputs_stride, totals):
        """Add `count` values, weighted, to the outputs of a few queries, and the weights to their totals.

        at: the first number of each value that is added, a multiple of the numbers of these vectors. outputs: float32
        [rows, numbers], a few vectors of each; totals: [rows, 16], each total 16 times. some: numbers in a vector, where it is
        only one.
        """
        builder = code.builder
        lines = [builder.mul(ir.Constant(LONG, row), weights_stride) for row in range(rows)]
        lines = [builder.add(weights, line) for line in lines]
        whence = [builder.add(totals, ir.Constant(LONG, 4 * LANES * row)) for row in range(rows)]
        for row in range(rows):
            start = builder.add(outputs, builder.mul(ir.Constant(LONG, row), outputs_stride))
            whence += [builder.add(start, ir.Constant(LONG, 4 * LANES * vector)) for vector in range(vectors)]
        slots = [code.variable(VECTOR, code.load(address)) for address in whence]
        with code.loop(count) as number:
            start = builder.add(value, builder.mul(number, stride))
            if vectors == 1:
                parts = [code.numbers(start, at, some)]
            else:
                parts = [code.numbers(start, at, None, vector) for vector in range(vectors)]
            for row, line in enumerate(lines):
                weight = code.splat(code.load(code.at(line, number, 4), FLOAT))
                builder.store(builder.fadd(builder.load(slots[row]), weight), slots[row])
                for vector, part in enumerate(parts):
                    slot = slots[rows + row * vectors + vector]
                    builder.store(code.fma(weight, part, builder.load(slot)), slot)
        for address, slot in zip(whence, slots, strict=True):
            code.store(builder.load(slot), address)

    return mix


mix_1x4, mix_2x4, mix_4x4 = _mixer(1, 4), _mixer(2, 4), _mixer(4, 4)  # queries x vectors of 16 numbers
mix_1x1, mix_4x1 = _mixer(1, 1), _mixer(4, 1)


@emitted(types.boolean, of_kind=True)
def are_quantized(code):
    """Tell whether this is a kind of quantized numbers: known when a kernel is compiled."""
    return ir.Constant(ir.IntType(1), code.quantized)


@emitted(of_kind=True, factor=types.float32)
def widen(code, source, count, factor, target):
    """float32 in scratch memory, padded to a multiple of 16 numbers: `count` numbers of this kind times a factor.

    What fills it up are zeros, but for a quantized key or value.
    """
    builder = code.builder
    factor = code.splat(factor)

    def add(at, some):
        code.store(builder.fmul(code.numbers(source, at, some), factor), code.at(target, at, 4))

    each_chunk(code, count, add)


@emitted(of_kind=True, factor=types.float32)
def narrow(code, source, count, factor, target):
    """`count` float32 from scratch memory, padded to a multiple of 16, times a factor, as numbers of this kind."""
    builder = code.builder
    factor = code.splat(factor)

    def add(at, some):
        result = builder.fmul(code.load(code.at(source, at, 4)), factor)
        result = result if code.size == 4 else code.narrowed(result)
        mask = None if some is None else code.below(some)
        code.store_numbers(result, code.at(target, at, code.size), code.size, mask)

    each_chunk(code, count, add)
