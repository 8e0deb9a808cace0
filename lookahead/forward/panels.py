"""Weight matrices laid out in panels for a CPU, and their products. In: a matrix [out, in], tokens. Out: tokens [..., out].

See panel_code.py for the layout, and for the order of sums by which a token gets the same bits next to any other tokens.
Threads share a product by its panels. A whole forward multiplies by the same function (program_kernel.py).
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import numpy as np
import torch

from lookahead.forward.panel_code import PANEL, add_to, multiply
from lookahead.forward.processor import multiplies_pairs, multiplies_tiles
from lookahead.forward.quantized_code import (
    GROUP4,
    GROUP8,
    SCALES,
    TOKEN_GROUP,
    clear,
    multiply_groups,
    scale_by,
)
from lookahead.forward.vector_code import LANES
from lookahead.forward.vectors import narrow, take_ticket, widen
from lookahead.kernels import address_of, carray, inlined, int64_at, part
from lookahead.threads import c_function, call_with, run_in

# How weights lie. Tokens are float32; bfloat16 where weights lie in pairs; quantized where weights are (quantized_code.py).
FLOAT32, BFLOAT16, FLOAT16, PAIRS, INT8, INT4 = range(6)
# How results are stored: as numbers of this dtype, or as float32 numbers that it holds
AS_FLOAT32, AS_BFLOAT16, AS_FLOAT16, LIKE_BFLOAT16, LIKE_FLOAT16 = range(5)
STORED = {torch.float32: AS_FLOAT32, torch.bfloat16: AS_BFLOAT16, torch.float16: AS_FLOAT16}

NUMBERS = 1024  # of a token (or pairs of them) that are multiplied before the next tokens are: that much of a panel stays in a
# core's cache, and so do the sums of that many tokens:
TOKENS = 240
GROUPS = 16  # of quantized tokens, likewise
ALONE = 100_000  # multiplications up to which a product is not worth other threads

# What the array that describes a product holds: numbers, addresses and strides in bytes
TICKETS, MULTIPLY, TOKEN, STRIDE, COUNT, WEIGHTS, INNER, OUTPUTS, BIAS, OUTPUT, OUTPUT_STRIDE, AS = range(12)
TASK = 12
TASK_BYTES = struct.Struct("=12q")
PRODUCT, BEGIN, END, SUMS, ASKED = range(5)  # what MULTIPLY, the address of a function of `multiplier_of`, is given


@part
def panel_bytes(kind, groups):
    """Of a panel of quantized weights. groups: of 64 inputs."""
    return SCALES + groups * GROUP8 if kind == INT8 else groups * GROUP4


@part
def store(source, count, target, stored):
    """Numbers from float32 scratch memory that is padded to a multiple of 16, and so is `target` for LIKE_..."""
    one = np.float32(1)
    if stored == AS_FLOAT32:
        narrow(np.float32(0), source, count, one, target)
    elif stored == AS_BFLOAT16:
        narrow(np.uint16(0), source, count, one, target)
    elif stored == AS_FLOAT16:
        narrow(np.int16(0), source, count, one, target)
    elif stored == LIKE_BFLOAT16:
        narrow(np.uint16(0), source, count, one, source)
        widen(np.uint16(0), source, count, one, target)
    else:
        narrow(np.int16(0), source, count, one, source)
        widen(np.int16(0), source, count, one, target)


@part
def multiply_panels(task, begin, end, sums, room):
    """Some panels of a product. sums, room: addresses of scratch memory for float32 [TOKENS, 64] and int64 [ASKED]."""
    asked = carray(int64_at(room), (ASKED,))
    asked[PRODUCT], asked[BEGIN], asked[END], asked[SUMS] = address_of(task), begin, end, sums
    call_with(task[MULTIPLY], room)


def _product(address: Any) -> None:
    """Do panels of the product that the array at `address` describes until all are taken."""
    task = carray(int64_at(address), (TASK,))
    panels = (task[OUTPUTS] + PANEL - 1) // PANEL
    sums, room = np.empty((min(TOKENS, task[COUNT]), PANEL), np.float32), np.empty(ASKED, np.int64)
    number = take_ticket(address)
    while number < panels:
        multiply_panels(task, number, number + 1, sums.ctypes.data, room.ctypes.data)
        number = take_ticket(address)


@inlined
def _numbers(address, like, size):
    """Panels of weights that are numbers of the type of `like`. size: bytes of one, or of a pair."""
    asked = carray(int64_at(address), (ASKED,))
    task, sums = carray(int64_at(asked[PRODUCT]), (TASK,)), asked[SUMS]
    inner, stride = task[INNER], task[STRIDE]
    for number in range(asked[BEGIN], asked[END]):
        weights, first = task[WEIGHTS] + number * inner * PANEL * size, np.int64(0)
        while first < task[COUNT]:
            count, at = min(TOKENS, task[COUNT] - first), np.int64(0)
            while at < inner:
                some, token = min(NUMBERS, inner - at), task[TOKEN] + first * stride + at * 4
                multiply(like, token, stride, count, weights + at * PANEL * size, some, sums, at)
                at += some
            _give(task, number, first, count, sums)
            first += count


@inlined
def _groups(address, like, size, scaled):
    """Panels of quantized weights, `size` bytes for each group. scaled: bytes of scales of whole columns before them."""
    asked = carray(int64_at(address), (ASKED,))
    task, sums = carray(int64_at(asked[PRODUCT]), (TASK,)), asked[SUMS]
    groups, stride = task[INNER], task[STRIDE]
    for number in range(asked[BEGIN], asked[END]):
        weights, first = task[WEIGHTS] + number * (scaled + groups * size), np.int64(0)
        while first < task[COUNT]:
            count, at = min(TOKENS, task[COUNT] - first), np.int64(0)
            clear(sums, count * (PANEL // LANES))
            while at < groups:
                some, token = min(GROUPS, groups - at), task[TOKEN] + first * stride + at * TOKEN_GROUP
                multiply_groups(like, token, stride, count, weights + scaled + at * size, some, sums)
                at += some
            for index in range(count if scaled > 0 else 0):
                scale_by(sums + index * PANEL * 4, weights)
            _give(task, number, first, count, sums)
            first += count


@part
def _give(task, number, first, count, sums):
    """Add the bias to the sums of some tokens with a panel and store them where the product's results go."""
    begin = number * PANEL
    columns, size = min(PANEL, task[OUTPUTS] - begin), 2 if task[AS] in (AS_BFLOAT16, AS_FLOAT16) else 4
    for index in range(count):
        row = sums + index * PANEL * 4
        if task[BIAS] != 0:
            add_to(row, task[BIAS] + begin * 4, columns)
        store(row, columns, task[OUTPUT] + (first + index) * task[OUTPUT_STRIDE] + begin * size, task[AS])


# Multiply panels BEGIN to END of PRODUCT, the address of its array, in scratch memory at SUMS: a function for each kind.
def _float32(address: Any) -> None:
    _numbers(address, np.float32(0), 4)


def _bfloat16(address: Any) -> None:
    _numbers(address, np.uint16(0), 2)


def _float16(address: Any) -> None:
    _numbers(address, np.int16(0), 2)


def _pairs(address: Any) -> None:
    _numbers(address, np.int32(0), 4)


def _int8(address: Any) -> None:
    _groups(address, np.uint8(0), GROUP8, SCALES)


def _int4(address: Any) -> None:
    _groups(address, np.int8(0), GROUP4, 0)


def multiplier_of(kind: int) -> int:
    """The address of the C function for `MULTIPLY`, compiled if it is not yet."""
    return c_function((_float32, _bfloat16, _float16, _pairs, _int8, _int4)[kind])[1]


class Panels:
    """A matrix [out, in] in panels, of float32, bfloat16 or float16."""

    library: ClassVar[str] = "panels"

    def __init__(self, weight: torch.Tensor):
        self.outputs, self.inner = weight.shape
        self.dtype = weight.dtype
        pairs = weight.dtype == torch.bfloat16 and multiplies_pairs()
        self.kind = PAIRS if pairs else {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}[weight.dtype]
        panels, two = -(-self.outputs // PANEL), 2 if pairs else 1
        self.lines = -(-self.inner // two)  # of a panel
        padded = weight.new_zeros(panels * PANEL, self.lines * two)
        padded[: self.outputs, : self.inner] = weight
        self.weight = padded.view(panels, PANEL, self.lines, two).transpose(1, 2).contiguous()

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Those that it multiplies faster on this CPU than other libraries do."""
        capability = torch.backends.cpu.get_cpu_capability()
        if weight.dtype == torch.bfloat16 and multiplies_tiles():
            return False
        return capability == "AVX512" or (capability == "AVX2" and weight.dtype == torch.float32)

    def to_dense(self) -> torch.Tensor:
        """[out, in]"""
        panels, lines, _, two = self.weight.shape
        return self.weight.transpose(1, 2).reshape(panels * PANEL, lines * two)[: self.outputs, : self.inner].contiguous()

    def given(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [count, in] as they are multiplied: each in memory that is one piece."""
        if self.kind == PAIRS:
            if self.inner % 2:
                tokens = torch.nn.functional.pad(tokens, (0, 1))
        elif self.kind != FLOAT32:
            tokens = tokens.float()
        return tokens if tokens.stride(1) == 1 else tokens.contiguous()

    def product(self, tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., out]. tokens: [..., in], bias: [out], of the weight's dtype."""
        flat = self.given(tokens.reshape(-1, self.inner))
        addends = None if bias is None else bias.float()
        output = tokens.new_empty(*tokens.shape[:-1], self.outputs)
        count, size = len(flat), output.element_size()
        stride, output_stride = flat.stride(0) * flat.element_size(), self.outputs * size
        task = TASK_BYTES.pack(
            *(0, multiplier_of(self.kind), flat.data_ptr(), stride, count, self.weight.data_ptr(), self.lines, self.outputs),
            *(0 if addends is None else addends.data_ptr(), output.data_ptr(), output_stride, STORED[self.dtype]),
        )
        run_in(torch.get_num_threads() if count * self.inner * self.outputs > ALONE else 1, _product, task)
        return output
