"""Weights in the blocks of GGUF files, unpacked where they are multiplied, as LLVM code. For kernels.

A product unpacks 64 inputs of 64 outputs at a time into memory that stays in a core's first cache, as the numbers that
panel_code.py multiplies: float32, half precision, or pairs of bfloat16. So they are the same numbers, and products the same
bits, as those of a model whose file was unpacked, and weights take the memory of the file.

Panels are those of panel_code.py: 64 outputs, a group of 64 inputs after the other. In a group lie

    numbers   [64 or 32, 64] bytes: an input's number, or in the lower half that of input i, in the upper half of input i + 32
    high      [64 * bits / 8, 64] bytes, where a number has 5 or 6 bits: what is above its lowest 4, for inputs i, i + rows,
              i + 2 rows, ..., the first in the lowest bits
    scales    [64 / 32 or 64 / 16, 64]: float16, or bytes that are to be multiplied by the scale of a row of 256 inputs
    offsets   [64 / 32, 64], in the same way, where a format has them

and, in formats with blocks of 256 inputs, float16 [64] scales, and those of the offsets, before each four groups. A weight is
(number - zero) * scale, or number * scale + offset: all products are exact in float32, so it is rounded once, as by the `gguf`
package.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llvmlite import ir
from numba.core import types

from lookahead.backends.cpu.panel_code import AVX512, LINE, PAIRS, PANEL, VECTORS, constant
from lookahead.forward.processor import multiplies_pairs
from lookahead.native.vector_code import BYTE, INT, LANES, SHORT, VECTOR, WHOLE, Code, emitted

GROUP = 64  # inputs
LARGE = 256  # inputs of a block with scales of scales


@dataclasses.dataclass(frozen=True)
class Format:
    """A type of GGUF's blocks.

    name: as GGUF calls it. low, high: bits of a number that lie together. zero: what stands for zero. part: inputs of a scale.
    large: scales are bytes, with a scale of their own for 256 inputs. offsets: there are some. signed: numbers, or scales
    that are bytes, are.
    """

    name: str
    low: int
    high: int
    zero: int
    part: int
    large: bool
    offsets: bool
    signed: bool = False

    @property
    def parts(self) -> int:
        return GROUP // self.part

    @property
    def begin_of_scales(self) -> int:
        """Bytes of a group before its scales."""
        return GROUP * PANEL * (self.low + self.high) // 8

    @property
    def size(self) -> int:
        """Bytes of a group."""
        return self.begin_of_scales + self.parts * PANEL * (1 if self.large else 2) * (1 + self.offsets)

    @property
    def head(self) -> int:
        """Bytes before the groups of 256 inputs."""
        return 2 * PANEL * (1 + self.offsets) if self.large else 0

    @property
    def inputs(self) -> int:
        """Of a block."""
        return LARGE if self.large else 32

    @property
    def bytes_in_file(self) -> int:
        """Of a block."""
        of_parts = 0 if not self.large else 12 if self.offsets else 16
        return self.inputs * (self.low + self.high) // 8 + of_parts + 2 * (1 + self.offsets)

    def panel_bytes(self, inner: int) -> int:
        return -(-inner // GROUP) * self.size + -(-inner // LARGE) * self.head


FORMATS = (
    Format("Q8_0", 8, 0, 0, 32, False, False, True),
    Format("Q4_0", 4, 0, 8, 32, False, False),
    Format("Q4_1", 4, 0, 0, 32, False, True),
    Format("Q5_0", 4, 1, 16, 32, False, False),
    Format("Q5_1", 4, 1, 0, 32, False, True),
    Format("Q4_K", 4, 0, 0, 32, True, True),
    Format("Q5_K", 4, 1, 0, 32, True, True),
    Format("Q6_K", 4, 2, 32, 16, True, False, True),
)
SIZES, HEADS = tuple(each.size for each in FORMATS), tuple(each.head for each in FORMATS)
WIDTH = 2 if AVX512 else 1  # vectors of outputs that are unpacked at once
AHEAD = 2  # groups between the one that is unpacked and the one that is fetched meanwhile
AT_ONCE = 2  # rows of a group's bytes


class _Unpacker:
    """Writes the code for `WIDTH` vectors of outputs of a group in one format. column: the first of them."""

    def __init__(self, code: Code, of: Format, group: Any, head: Any, column: Any):
        self._code, self._of, builder = code, of, code.builder
        self._bytes_at = code.at(group, column, LANES)
        self._halves_at, self._head_at = (code.at(address, column, 2 * LANES) for address in (group, head))
        self.rows = GROUP * of.high // 8 or GROUP // 2  # of bytes; the inputs i, i + rows, i + 2 rows, ... are read together
        size, begin = of.parts * PANEL * (1 if of.large else 2), of.begin_of_scales
        self._scales = [self._of_parts(begin, 0, vector) for vector in range(WIDTH)]
        self._offsets: list[list[Any]] = []
        if of.offsets:
            self._offsets = [self._of_parts(begin + size, 2 * PANEL, vector) for vector in range(WIDTH)]
        if of.offsets and of.large:
            self._offsets = [[builder.fneg(each) for each in offsets] for offsets in self._offsets]

    def _of_parts(self, first: int, in_head: int, vector: int) -> list[Any]:
        """Scales or offsets of each part. first, in_head: bytes before them in a group, and in the head."""
        code, of, half = self._code, self._of, Code(self._code.builder, types.int16)

        def halves(address: Any, byte: int) -> Any:
            return half.keys(code.builder.add(address, constant(byte + 2 * LANES * vector)))

        if not of.large:
            return [halves(self._halves_at, first + 2 * PANEL * part) for part in range(of.parts)]
        factor = halves(self._head_at, in_head)
        numbers = (self._bytes(first + PANEL * part, vector, of.signed) for part in range(of.parts))
        return [code.builder.fmul(code.builder.sitofp(each, VECTOR), factor) for each in numbers]

    def _bytes(self, first: int, vector: int, signed: bool = False, row: Any = None) -> Any:
        """16 bytes of a group as int32, `first` bytes from where it begins; row: of 64 bytes, from there on."""
        builder = self._code.builder
        where = builder.add(self._bytes_at, constant(first + LANES * vector))
        where = where if row is None else self._code.at(where, row, PANEL)
        read = builder.load(self._code.pointer(where, ir.VectorType(BYTE, LANES)), align=1)
        return (builder.sext if signed else builder.zext)(read, WHOLE)

    def weights(self, row: Any, vector: int) -> list[Any]:
        """float32 weights of the inputs row, row + rows, ... below 64."""
        of, code, builder = self._of, self._code, self._code.builder

        def whole(number: int) -> Any:
            return code.constant(number, WHOLE)

        if of.low == 8:
            numbers = [self._bytes(first * PANEL, vector, of.signed, row) for first in (0, GROUP // 2)]
        else:
            both = [self._bytes(first * PANEL, vector, row=row) for first in range(0, GROUP // 2, self.rows)]
            both += [builder.lshr(each, whole(4)) for each in both]
            if AVX512 and not of.high:  # of an index the lower 4 bits count
                table = ir.Constant(VECTOR, [float(number - of.zero) for number in range(LANES)])
                found = [code.call("llvm.x86.avx512.permvar.sf.512", VECTOR, table, each) for each in both]
                return [self._weight(number, vector, turn) for turn, number in enumerate(found)]
            numbers = [builder.and_(each, whole(15)) for each in both]
        if of.high:
            high, mask = self._bytes(GROUP * PANEL // 2, vector, row=row), whole(((1 << of.high) - 1) << 4)
            for turn, number in enumerate(numbers):
                left = 4 - turn * of.high
                moved = builder.shl(high, whole(left)) if left > 0 else builder.lshr(high, whole(-left))
                numbers[turn] = builder.or_(number, builder.and_(moved, mask))
        less = [builder.sub(number, whole(of.zero)) if of.zero else number for number in numbers]
        return [self._weight(builder.sitofp(number, VECTOR), vector, turn) for turn, number in enumerate(less)]

    def _weight(self, number: Any, vector: int, turn: int) -> Any:
        """A number, less what stands for zero, as a weight of the `turn`-th inputs."""
        part, code = turn * self.rows // self._of.part, self._code
        scale = self._scales[vector][part]
        return code.fma(number, scale, self._offsets[vector][part]) if self._offsets else code.builder.fmul(number, scale)


def _paired(code: Code, first: Any, second: Any) -> Any:
    """16 pairs of bfloat16 of two vectors of float32."""
    both = code.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, second, first)
    halves = code.builder.bitcast(both, ir.VectorType(SHORT, 2 * LANES))
    order = [lane + LANES * number for lane in range(LANES) for number in range(2)]
    mask = ir.Constant(ir.VectorType(INT, 2 * LANES), order)
    return code.builder.shuffle_vector(halves, halves, mask)


@emitted(of_kind=True)
def unpack(code, number, group, head, target):
    """A group of 64 inputs of 64 outputs, in the format of this number, to numbers [inputs, outputs] or pairs [32, outputs].

    kind: an array element whose type defines which, see `multiply`. head: address of the scales of scales, if there are any.
    """
    pairs = code.kind == "int32"
    if pairs and not multiplies_pairs():  # nothing of this machine is multiplied so, and LLVM has no code for it
        return
    builder, size = code.builder, 4 if pairs else code.size
    for index, of in enumerate(FORMATS):
        with builder.if_then(builder.icmp_signed("==", number, constant(index))), code.loop(constant(VECTORS), WIDTH) as column:
            unpacker = _Unpacker(code, of, group, head, column)
            home = code.at(target, column, size * LANES)
            fetched = AT_ONCE * -(-of.size * WIDTH // (VECTORS * unpacker.rows))  # bytes for each turn of the loop
            begin = builder.add(code.at(group, column, of.size // VECTORS), constant(AHEAD * of.size))
            with code.loop(constant(unpacker.rows), AT_ONCE) as row:
                here = code.at(begin, row, fetched // AT_ONCE)
                for line in range(0, fetched, LINE):
                    code.fetch(builder.add(here, constant(line)))
                for vector in range(WIDTH):
                    read = [unpacker.weights(builder.add(row, constant(more)), vector) for more in range(AT_ONCE)]
                    for turn, found in enumerate(zip(*read, strict=True)):
                        first = builder.add(row, constant(turn * unpacker.rows))
                        results = [_paired(code, *found)] if pairs else found if size == 4 else map(code.narrowed, found)
                        line = code.at(home, builder.sdiv(first, constant(2)) if pairs else first, size * PANEL)
                        for more, result in enumerate(results):
                            where = builder.add(line, constant(size * (PANEL * more + LANES * vector)))
                            builder.store(result, code.pointer(where, result.type), align=size)
