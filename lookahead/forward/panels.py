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
from lookahead.kernels import carray, int64_at, part, woven
from lookahead.threads import run_in

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
TICKETS, KIND, TOKEN, STRIDE, COUNT, WEIGHTS, INNER, OUTPUTS, BIAS, OUTPUT, OUTPUT_STRIDE, AS = range(12)
TASK = 12
TASK_BYTES = struct.Struct("=12q")


@part
def _add_up(kind, token, stride, count, weights, inner, sums):
    """Sums [count, 64] of products with a panel. inner: numbers of a token, or pairs of them."""
    line = (4 if kind in (FLOAT32, PAIRS) else 2) * PANEL
    at = np.int64(0)
    while at < inner:
        some = min(NUMBERS, inner - at)
        first, begin = token + at * 4, weights + at * line
        if kind == FLOAT32:
            multiply(np.float32(0), first, stride, count, begin, some, sums, at)
        elif kind == BFLOAT16:
            multiply(np.uint16(0), first, stride, count, begin, some, sums, at)
        elif kind == FLOAT16:
            multiply(np.int16(0), first, stride, count, begin, some, sums, at)
        else:
            multiply(np.int32(0), first, stride, count, begin, some, sums, at)
        at += some


@part
def _add_up_groups(kind, token, stride, count, weights, groups, sums):
    """The same for a panel of quantized weights. groups: of 64 inputs."""
    clear(sums, count * (PANEL // LANES))
    size = GROUP8 if kind == INT8 else GROUP4
    at = np.int64(0)
    while at < groups:
        some = min(GROUPS, groups - at)
        first, begin = token + at * TOKEN_GROUP, weights + at * size
        if kind == INT8:
            multiply_groups(np.uint8(0), first, stride, count, begin + SCALES, some, sums)
        else:
            multiply_groups(np.int8(0), first, stride, count, begin, some, sums)
        at += some
    if kind == INT8:
        for index in range(count):
            scale_by(sums + index * PANEL * 4, weights)


@part
def panel_bytes(kind, inner):
    """Of a panel. inner: numbers of a token, pairs or groups of them."""
    if kind == INT8:
        return SCALES + inner * GROUP8
    if kind == INT4:
        return inner * GROUP4
    return inner * PANEL * (4 if kind in (FLOAT32, PAIRS) else 2)


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


@woven
def multiply_panel(task, number, sums):
    """Outputs 64 * number and 63 more of a product. sums: the address of scratch memory for float32 [TOKENS, 64]."""
    kind, inner = task[KIND], task[INNER]
    weights = task[WEIGHTS] + number * panel_bytes(kind, inner)
    begin = number * PANEL
    columns, size = min(PANEL, task[OUTPUTS] - begin), 2 if task[AS] in (AS_BFLOAT16, AS_FLOAT16) else 4
    first = np.int64(0)
    while first < task[COUNT]:
        count = min(TOKENS, task[COUNT] - first)
        token = task[TOKEN] + first * task[STRIDE]
        if kind in (INT8, INT4):
            _add_up_groups(kind, token, task[STRIDE], count, weights, inner, sums)
        else:
            _add_up(kind, token, task[STRIDE], count, weights, inner, sums)
        for index in range(count):
            row = sums + index * PANEL * 4
            if task[BIAS] != 0:
                add_to(row, task[BIAS] + begin * 4, columns)
            store(row, columns, task[OUTPUT] + (first + index) * task[OUTPUT_STRIDE] + begin * size, task[AS])
        first += count


def _product(address: Any) -> None:
    """Do panels of the product that the array at `address` describes until all are taken."""
    task = carray(int64_at(address), (TASK,))
    panels = (task[OUTPUTS] + PANEL - 1) // PANEL
    sums = np.empty((min(TOKENS, task[COUNT]), PANEL), np.float32)
    number = take_ticket(address)
    while number < panels:
        multiply_panel(task, number, sums.ctypes.data)
        number = take_ticket(address)


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
        task = TASK_BYTES.pack(
            *(0, self.kind, flat.data_ptr(), flat.stride(0) * flat.element_size(), count, self.weight.data_ptr(), self.lines),
            *(self.outputs, 0 if addends is None else addends.data_ptr(), output.data_ptr(), self.outputs * size),
            STORED[self.dtype],
        )
        run_in(torch.get_num_threads() if count * self.inner * self.outputs > ALONE else 1, _product, task)
        return output
