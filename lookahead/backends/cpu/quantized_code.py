"""Inner loops of products of tokens of 8 bits with weights of 8 or 4 bits, as LLVM code. For kernels.

A token is quantized in groups of 64 numbers: 64 int8, the scale that they are to be multiplied by (float32), and their sum
(int32). Groups of 4 bits are int8 in -7 .. 7. Products of a group are added as whole numbers, which is exact in any order;
groups are added one after the other in float32. So an output has the same bits regardless of which other tokens share the
call, and which instructions the processor has.

Weights lie in panels of 64 outputs, a group of 64 inputs after the other, as unsigned numbers. In a group of 8 bits, which is
[16, 64, 4], four inputs of an output are neighbours, as VNNI multiplies them, and 128 is added to each. In a group of 4 bits,
[8, 64, 4], a byte holds the number of one input in its lower half and of the input four further on in its upper half; behind
them are 64 scales (bfloat16) and 64 zero points (uint8). A panel of 8 bits begins with 64 scales (float32).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lookahead.backends.cpu.panel_code import AVX512, PANEL, TILES, UNROLLED, Ahead, constant, multiply_numbers, tiles, turns
from lookahead.forward.processor import multiplies_bytes
from lookahead.native.vector_code import FLOAT, INT, LANES, SHORT, VECTOR, WHOLE, Code, emitted

GROUP = 64  # inputs
TOKEN_GROUP = GROUP + 8  # bytes of a token's group
SCALES = 4 * PANEL  # bytes at the beginning of a panel of 8 bits
GROUP8 = GROUP * PANEL  # bytes of a group of weights
GROUP4 = GROUP * PANEL // 2 + 3 * PANEL
# UNROLLED steps of a group: of 4 bits, 8 products of two bytes, 15 * 127 each at most, which int16 has room for
TILES4 = TILES if AVX512 else (4, 2, 2)  # weights of 4 bits take registers to unpack
LEAST = 1e-30  # a group of a token whose numbers are all smaller is taken for zeros
FULL4 = 7.49  # what the largest number of a group of 4 bits is, before it is rounded to 7: steps are smaller than by 7.0
BYTE = ir.IntType(8)
SHORTS = ir.VectorType(SHORT, 2 * LANES)


def _whole(number: int) -> Any:
    return ir.Constant(WHOLE, [number] * LANES)


class Bytes:
    """Sums of products of four bytes, in each of 16 lanes. bits: of weights."""

    def __init__(self, code: Code, bits: int):
        self.code = code
        self._in_pairs = bits == 4 and not (AVX512 and multiplies_bytes())  # sums of UNROLLED steps fit into int16

    def _call(self, name: str, left: Any, right: Any, kind: Any, result: Any) -> Any:
        """An intrinsic on all 16 lanes, or on halves of them. kind, result: bits of a number that it takes and gives."""
        builder, size = self.code.builder, 512 if AVX512 else 256
        given, given_back = (ir.VectorType(ir.IntType(bits), size // bits) for bits in (kind, result))
        if AVX512:
            return self.code.call(name, given_back, builder.bitcast(left, given), builder.bitcast(right, given))
        halves = []
        for lanes in (range(8), range(8, 16)):
            mask = ir.Constant(ir.VectorType(INT, 8), list(lanes))
            parts = (builder.bitcast(builder.shuffle_vector(each, each, mask), given) for each in (left, right))
            halves.append(builder.bitcast(self.code.call(name, given_back, *parts), ir.VectorType(INT, 8)))
        return builder.shuffle_vector(*halves, ir.Constant(WHOLE, list(range(16))))

    def _pairs(self, left: Any, right: Any) -> Any:
        """Sums of two products of int16, in each lane."""
        name = "llvm.x86.avx512.pmaddw.d.512" if AVX512 else "llvm.x86.avx2.pmadd.wd"
        return self.code.builder.bitcast(self._call(name, left, right, 16, 32), WHOLE)

    def begin(self, total: Any) -> Any:
        """Return what sums of up to UNROLLED steps begin at."""
        return ir.Constant(SHORTS, [0] * 2 * LANES) if self._in_pairs else total

    def add(self, sums: Any, weights: Any, numbers: Any) -> Any:
        """sums: as begun. weights: unsigned, numbers: signed bytes."""
        builder = self.code.builder
        if self._in_pairs:
            name = "llvm.x86.avx512.pmaddubs.w.512" if AVX512 else "llvm.x86.avx2.pmadd.ub.sw"
            return builder.add(sums, builder.bitcast(self._call(name, weights, numbers, 8, 16), SHORTS))
        if AVX512 and multiplies_bytes():
            return self.code.call("llvm.x86.avx512.vpdpbusd.512", WHOLE, sums, weights, numbers)
        eight = ir.Constant(SHORTS, [8] * 2 * LANES)
        low, high = builder.bitcast(weights, SHORTS), builder.bitcast(numbers, SHORTS)
        even = self._pairs(
            builder.bitcast(builder.lshr(builder.shl(low, eight), eight), WHOLE),
            builder.bitcast(builder.ashr(builder.shl(high, eight), eight), WHOLE),
        )
        odd = self._pairs(builder.bitcast(builder.lshr(low, eight), WHOLE), builder.bitcast(builder.ashr(high, eight), WHOLE))
        return builder.add(sums, builder.add(even, odd))

    def end(self, total: Any, sums: Any) -> Any:
        """The total with the sums that were begun at it."""
        builder = self.code.builder
        return builder.add(total, self._pairs(builder.bitcast(sums, WHOLE), _whole(0x00010001))) if self._in_pairs else sums


def _scales4(code: Code, line: Any, vector: Any) -> tuple[Any, Any]:
    """Scales of 16 outputs, and the numbers that stand for zero, as float32."""
    builder, behind = code.builder, code.builder.add(line, constant(GROUP * PANEL // 2))
    scales = code.load(code.at(behind, vector, 2 * LANES), ir.VectorType(SHORT, LANES))
    wide = builder.shl(builder.zext(scales, WHOLE), _whole(16))
    zeros = code.load(code.at(builder.add(behind, constant(2 * PANEL)), vector, LANES), ir.VectorType(BYTE, LANES))
    return builder.bitcast(wide, VECTOR), builder.uitofp(zeros, VECTOR)


def _add_up(
    code: Code,
    token: Any,
    stride: Any,
    weights: Any,
    groups: Any,
    sums: Any,
    shape: Any,
    bits: int,
    column: Any,
    ahead: Ahead,
    goes_on: Any,
) -> None:
    """Code of one tile, see `multiply`. shape: its tokens and vectors; column: its first vector."""
    builder, (tokens, vectors), multiplied = code.builder, shape, Bytes(code, bits)
    lines = [builder.add(token, builder.mul(stride, constant(number))) for number in range(tokens)]
    registers = [code.variable(WHOLE, _whole(0)) for _ in range(tokens * vectors)]
    columns = [builder.add(column, constant(vector)) for vector in range(vectors)]
    homes = [
        code.at(builder.add(sums, constant(4 * PANEL * row)), each, 4 * LANES) for row in range(tokens) for each in columns
    ]
    with builder.if_then(builder.icmp_signed("==", goes_on, constant(0)), likely=False):
        for home in homes:
            code.store(code.constant(0.0), home)

    def step(begins: list[Any], line: Any, at: Any, totals: list[Any]) -> None:
        line = builder.add(line, builder.mul(at, constant(4 * PANEL)))
        where = [code.at(line, vector, 4 * LANES) for vector in columns]
        packed = [code.load(address, WHOLE) for address in where]
        halves = [(0, packed)]
        if bits == 4:
            mask = _whole(0x0F0F0F0F)
            low = [builder.and_(each, mask) for each in packed]
            high = [builder.and_(builder.lshr(each, _whole(4)), mask) for each in packed]
            halves = [(0, low), (4, high)]
        for more, read in halves:
            for row, begin in enumerate(begins):
                offset = builder.add(builder.mul(at, constant(4 * len(halves))), constant(more))
                numbers = code.splat(code.load(builder.add(begin, offset), INT))
                for vector, part in enumerate(read):
                    number = row * vectors + vector
                    totals[number] = multiplied.add(totals[number], part, numbers)

    with code.loop(groups) as group:
        begins = [builder.add(line, builder.mul(group, constant(TOKEN_GROUP))) for line in lines]
        line = builder.add(weights, builder.mul(group, constant(GROUP8 if bits == 8 else GROUP4)))
        for row, begin in enumerate(begins):
            first = _whole(0)
            if bits == 8:
                total = code.load(builder.add(begin, constant(GROUP + 4)), INT)
                first = code.splat(builder.mul(total, ir.Constant(INT, -128)))
            for register in registers[row * vectors : (row + 1) * vectors]:
                builder.store(first, register)
        with code.loop(constant(16 if bits == 8 else 8), UNROLLED) as at:
            ahead.fetch()
            totals = [multiplied.begin(builder.load(register)) for register in registers]
            for number in range(UNROLLED):
                step(begins, line, builder.add(at, constant(number)), totals)
            for register, found in zip(registers, totals, strict=True):
                builder.store(multiplied.end(builder.load(register), found), register)
        known = [_scales4(code, line, vector) for vector in columns] if bits == 4 else []
        for row, begin in enumerate(begins):
            scale = code.splat(code.load(builder.add(begin, constant(GROUP)), FLOAT))
            if bits == 4:
                less = builder.sitofp(code.load(builder.add(begin, constant(GROUP + 4)), INT), FLOAT)
                less = code.splat(builder.fneg(less))
            for vector in range(vectors):
                home = homes[row * vectors + vector]
                total = builder.sitofp(builder.load(registers[row * vectors + vector]), VECTOR)
                if bits == 4:
                    scales, zeros = known[vector]
                    total = builder.fmul(code.fma(zeros, less, total), scale)  # whole numbers below 2 ** 24: exact
                    code.store(code.fma(total, scales, code.load(home)), home)
                else:
                    code.store(code.fma(total, scale, code.load(home)), home)


@emitted(of_kind=True)
def multiply(code, token, stride, count, weights, lines, sums, goes_on, ahead):
    """Add up products of `count` tokens with a panel, over some of its lines, into sums float32 [count, 64].

    kind: an array element whose type defines what weights are: float32, uint16 (bits of bfloat16), int16 (bits of float16),
    int32 (pairs of bfloat16), or in groups, which count as lines: uint8 (8 bits) or int8 (4 bits). token: float32; bfloat16 for
    pairs; quantized for groups. weights: the first line. What is added for 8 bits is to be multiplied by the outputs' scales.
    goes_on: 0 where sums begin at zero. ahead: address of what is multiplied next, as much again, which is fetched meanwhile;
    0: nothing is.
    """
    if not code.quantized:
        multiply_numbers(code, token, stride, count, weights, lines, sums, goes_on, ahead)
        return
    bits, builder = 8 if code.kind == "uint8" else 4, code.builder
    vectors, steps, size = (TILES, 16, GROUP8) if bits == 8 else (TILES4, 8, GROUP4)
    often = turns(code, count, builder.mul(lines, constant(steps)), vectors)
    fetched = Ahead(code, ahead, builder.mul(lines, constant(size)), often)
    for begin, home, shape, column in tiles(code, token, stride, count, sums, vectors):
        _add_up(code, begin, stride, weights, lines, home, shape, bits, column, fetched, goes_on)


@emitted()
def quantize(code, source, count, target, eight):
    """A token of `count` float32 numbers to groups of int8, the last filled up with zeros.

    A group's scale is its largest number by 127, from group `eight` on by 7.49. Numbers are rounded to the nearest, halves to
    even.
    """
    builder = code.builder
    groups = builder.sdiv(builder.add(count, constant(GROUP - 1)), constant(GROUP))
    with code.loop(groups) as group:
        at = builder.mul(group, constant(GROUP))
        home = code.at(target, group, TOKEN_GROUP)
        read = []
        for part in range(GROUP // LANES):
            here = builder.add(at, constant(LANES * part))
            read.append(code.masked(code.at(source, here, 4), code.below(builder.sub(count, here)), code.constant(0.0)))
        most = code.constant(0.0)
        for part in read:
            most = code.larger(code.call("llvm.fabs.v16f32", VECTOR, part), most)
        most = code.reduced(most, code.larger)
        counts = builder.fcmp_ordered(">=", most, ir.Constant(FLOAT, LEAST))
        in_8_bits = builder.icmp_signed("<", group, eight)
        full = builder.select(in_8_bits, ir.Constant(FLOAT, 127.0), ir.Constant(FLOAT, FULL4))
        none = ir.Constant(FLOAT, 0.0)
        factor = code.splat(builder.select(counts, builder.fdiv(full, most), none))
        total = _whole(0)
        for number, part in enumerate(read):
            rounded = code.call("llvm.rint.v16f32", VECTOR, builder.fmul(part, factor))
            is_number = builder.fcmp_ordered("ord", rounded, rounded)  # of infinity, and what is none: 0
            whole = builder.fptosi(builder.select(is_number, rounded, code.constant(0.0)), WHOLE)
            total = builder.add(total, whole)
            code.store(builder.trunc(whole, ir.VectorType(BYTE, LANES)), builder.add(home, constant(LANES * number)))
        summed = code.call("llvm.vector.reduce.add.v16i32", INT, total)
        code.store(builder.select(counts, builder.fdiv(most, full), none), builder.add(home, constant(GROUP)))
        code.store(summed, builder.add(home, constant(GROUP + 4)))
