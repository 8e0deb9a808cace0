"""Products of tokens with weight matrices in panels: the kernels. In: addresses. Out: sums, where the product's results go.

See panel_code.py for the layout, and for the order of sums by which a token gets the same bits next to any other tokens. A
whole forward multiplies by the same function (program_kernel.py). Needs no torch, as all of *_kernel.py and *_code.py: kernels
are compiled where the package is built, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from lookahead.backends.cpu.block_code import HEADS, LARGE, SIZES, unpack
from lookahead.backends.cpu.panel_code import LINE, PANEL, give_panel
from lookahead.backends.cpu.quantized_code import GROUP, GROUP4, GROUP8, SCALES, TOKEN_GROUP, multiply
from lookahead.backends.lowering.ops import AS_BFLOAT16, AS_FLOAT16, IN_8_BITS, IN_BLOCKS
from lookahead.native.kernels import address_of, carray, float32_at, inlined, int64_at, kernel, part, uint8_at, uint16_at
from lookahead.native.threads import add, c_function, call_with

# How weights lie. Tokens are float32; bfloat16 where weights lie in pairs; quantized where weights are (quantized_code.py).
# From BLOCKS on weights are unpacked to the first of these kinds (block_code.py).
FLOAT32, BFLOAT16, FLOAT16, PAIRS, INT8, INT4, BLOCKS = range(7)
NUMBERS = np.float32, np.uint16, np.int16, np.int32  # what stands for the first four, see `multiply`

TOKENS = 240  # that are multiplied at once: their sums stay in a core's cache
# So does a block of a panel, which all of them are multiplied by: lines of numbers (or pairs), and groups of quantized tokens.
# From FETCHED tokens on the next block is fetched meanwhile; fewer are multiplied faster than any weights are read.
LINES, GROUPS = 64, 4
FETCHED = 3

# What the array that describes a product holds: numbers, addresses and strides in bytes
# (INNER: lines of a panel, groups, numbers of a token). HELD: see ops.IN_8_BITS
TICKETS, MULTIPLY, TOKEN, STRIDE, COUNT, WEIGHTS, INNER, OUTPUTS, BIAS, OUTPUT, OUTPUT_STRIDE, AS, HELD = range(13)
TASK = 13
TASK_BYTES = struct.Struct("=13q")
PRODUCT, BEGIN, END, SUMS, ASKED = range(5)  # what MULTIPLY, the address of a function of `multiplier_of`, is given


@part
def multiply_panels(task, begin, end, sums, room):
    """Some panels of a product. sums, room: addresses of scratch memory for float32 [TOKENS, 64] and int64 [ASKED]."""
    asked = carray(int64_at(room), (ASKED,))
    asked[PRODUCT], asked[BEGIN], asked[END], asked[SUMS] = address_of(task), begin, end, sums
    call_with(task[MULTIPLY], room)


def product(address: Any) -> None:
    """Do panels of the product that the array at `address` describes until all are taken."""
    task = carray(int64_at(address), (TASK,))
    panels = (task[OUTPUTS] + PANEL - 1) // PANEL
    sums, room = np.empty((min(TOKENS, task[COUNT]), PANEL), np.float32), np.empty(ASKED, np.int64)
    number = add(address, 1)
    while number < panels:
        multiply_panels(task, number, number + 1, sums.ctypes.data, room.ctypes.data)
        number = add(address, 1)


@inlined
def _unpack(like, form, panel, group, target):
    """Group number `group` of a panel in blocks."""
    large = group * GROUP // LARGE
    head = panel + large * (HEADS[form] + LARGE // GROUP * SIZES[form])
    unpack(like, form, panel + (large + 1) * HEADS[form] + group * SIZES[form], head, target)


@part
def _block_panel_bytes(form, inner):
    return (inner + GROUP - 1) // GROUP * SIZES[form] + (inner + LARGE - 1) // LARGE * HEADS[form]


@kernel
def unpack_panel(form, panel, inner, target):
    """A panel in blocks as float32 [inputs, 64], inputs filled up to a multiple of 64."""
    for group in range((inner + GROUP - 1) // GROUP):
        _unpack(np.float32(0), form, panel, group, target + group * GROUP * PANEL * 4)


@part
def _give(task, number, first, count, sums, scales):
    """Store the sums of some tokens with a panel where the product's results go; see `give_panel`."""
    begin = number * PANEL
    columns, size = min(PANEL, task[OUTPUTS] - begin), 2 if task[AS] in (AS_BFLOAT16, AS_FLOAT16) else 4
    target = task[OUTPUT] + first * task[OUTPUT_STRIDE] + begin * size
    bias = task[BIAS] + begin * 4 if task[BIAS] != 0 else np.int64(0)
    give_panel(sums, count, columns, scales, bias, target, task[OUTPUT_STRIDE], task[AS])


@part
def look_up(held, weights, row, count, target):
    """`count` float32 numbers of a row of quantized weights, for embedding tables, each rounded once.

    held: how they lie, see ops.IN_8_BITS. Four numbers of a row (in 4 bits, eight) lie side by side, and the next behind those
    of 63 other rows.
    """
    lane, groups, z = row % PANEL, (count + GROUP - 1) // GROUP, carray(float32_at(target), (count,))
    if held <= IN_BLOCKS:
        form, memory = IN_BLOCKS - held, np.empty((GROUP, PANEL), np.float32)
        panel = weights + row // PANEL * _block_panel_bytes(form, count)
        for group in range(groups):
            _unpack(np.float32(0), form, panel, group, memory.ctypes.data)
            for i in range(min(GROUP, count - group * GROUP)):
                z[group * GROUP + i] = memory[i, lane]
    elif held == IN_8_BITS:
        begin = weights + row // PANEL * (SCALES + groups * GROUP8)
        scale = carray(float32_at(begin), (PANEL,))[lane]
        numbers = carray(uint8_at(begin + SCALES), (groups * GROUP * PANEL,))
        for i in range(count):
            z[i] = (int(numbers[(i // 4 * PANEL + lane) * 4 + i % 4]) - 128) * scale
    else:
        begin = weights + row // PANEL * groups * GROUP4
        for group in range(groups):
            line = begin + group * GROUP4
            numbers, behind = carray(uint8_at(line), (GROUP4,)), GROUP * PANEL // 2
            scale = np.uint32(np.int64(carray(uint16_at(line + behind), (PANEL,))[lane]) << 16).view(np.float32)
            zero = int(numbers[behind + 2 * PANEL + lane])
            for i in range(min(GROUP, count - group * GROUP)):
                both = int(numbers[(i // 8 * PANEL + lane) * 4 + i % 4])
                z[group * GROUP + i] = ((both >> 4 if i % 8 >= 4 else both & 15) - zero) * scale


@kernel
def look_up_all(held, weights, ids, rows, count, target):
    """The same for `rows` ids (int64) that lie one behind the other."""
    numbers = carray(int64_at(ids), (rows,))
    for index in range(rows):
        look_up(held, weights, numbers[index], count, target + index * count * 4)


def _multiplier(like: np.generic, line: int, some_lines: int, token_line: int, scales: int = 0) -> Callable[[Any], None]:
    """Multiplies panels BEGIN to END of PRODUCT, the address of its array, in scratch memory at SUMS.

    like: of the type of weights (see `multiply`). line: bytes of a line of a panel, or of a group; some_lines: of a block;
    token_line: bytes of a token that are multiplied by a line. scales: bytes of scales of whole columns before a panel.
    """

    def multiply_lines(address):
        asked = carray(int64_at(address), (ASKED,))
        task, sums = carray(int64_at(asked[PRODUCT]), (TASK,)), asked[SUMS]
        lines, stride = task[INNER], task[STRIDE]
        for number in range(asked[BEGIN], asked[END]):
            panel, first = task[WEIGHTS] + number * (scales + lines * line), np.int64(0)
            while first < task[COUNT]:
                count, at = min(TOKENS, task[COUNT] - first), np.int64(0)
                while at < lines:
                    some, token = min(some_lines, lines - at), task[TOKEN] + first * stride + at * token_line
                    block, is_last = panel + scales + at * line, number == asked[END] - 1 and at + some == lines
                    ahead = np.int64(0) if count < FETCHED or is_last else block + some * line
                    multiply(like, token, stride, count, block, some, sums, at, ahead)
                    at += some
                _give(task, number, first, count, sums, panel if scales > 0 else np.int64(0))
                first += count

    return multiply_lines


def _block_multiplier(like: np.generic, numbers: int) -> Callable[[Any], None]:
    """The same for panels in blocks. numbers: of a token that a line of unpacked weights is multiplied by, 2 where in pairs."""

    def multiply_blocks(address):
        asked = carray(int64_at(address), (ASKED,))
        task, sums = carray(int64_at(asked[PRODUCT]), (TASK,)), asked[SUMS]
        inner, stride, form = task[INNER], task[STRIDE], IN_BLOCKS - task[HELD]
        memory = np.empty(GROUP * PANEL + LINE, np.float32)
        unpacked, size = (memory.ctypes.data + LINE - 1) // LINE * LINE, _block_panel_bytes(form, inner)
        for number in range(asked[BEGIN], asked[END]):
            panel, first = task[WEIGHTS] + number * size, np.int64(0)
            while first < task[COUNT]:
                count = min(TOKENS, task[COUNT] - first)
                for group in range((inner + GROUP - 1) // GROUP):
                    _unpack(like, form, panel, group, unpacked)
                    at = group * GROUP
                    token = task[TOKEN] + first * stride + at * 4 // numbers
                    multiply(like, token, stride, count, unpacked, min(GROUP, inner - at) // numbers, sums, at, np.int64(0))
                _give(task, number, first, count, sums, np.int64(0))
                first += count

    return multiply_blocks


# By kind
MULTIPLIERS = (
    *(_multiplier(like(0), size * PANEL, LINES, 4) for like, size in zip(NUMBERS, (4, 2, 2, 4), strict=True)),
    *(_multiplier(np.uint8(0), GROUP8, GROUPS, TOKEN_GROUP, SCALES), _multiplier(np.int8(0), GROUP4, GROUPS, TOKEN_GROUP)),
    *(_block_multiplier(like(0), 2 if like is np.int32 else 1) for like in NUMBERS),
)


def multiplier_of(kind: int) -> int:
    """The address of the C function for `MULTIPLY`, compiled if it is not yet."""
    return c_function(MULTIPLIERS[kind])[1]
