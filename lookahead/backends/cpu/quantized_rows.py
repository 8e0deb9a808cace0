"""Rows of a quantized matrix in panels, for embedding tables. In: the address of the panels, a row. Out: float32 numbers.

quantized_code.py defines how weights lie: four numbers of a row (in 4 bits, eight) lie side by side, and the next behind those
of 63 other rows. Each number is rounded once, to float32.
"""

from __future__ import annotations

import numpy as np

from lookahead.backends.cpu.panel_code import PANEL
from lookahead.backends.cpu.panel_kernel import INT8, panel_bytes
from lookahead.backends.cpu.quantized_code import GROUP, GROUP4, SCALES
from lookahead.native.kernels import carray, float32_at, int64_at, kernel, part, uint8_at, uint16_at


@part
def look_up(kind, weights, groups, row, count, target):
    """`count` float32 numbers of a row. kind: INT8 or INT4; groups: of a row."""
    lane, begin = row % PANEL, weights + row // PANEL * panel_bytes(kind, groups)
    z = carray(float32_at(target), (count,))
    if kind == INT8:
        scale = carray(float32_at(begin), (PANEL,))[lane]
        numbers = carray(uint8_at(begin + SCALES), (groups * GROUP * PANEL,))
        for i in range(count):
            z[i] = (int(numbers[(i // 4 * PANEL + lane) * 4 + i % 4]) - 128) * scale
    else:
        for group in range(groups):
            line = begin + group * GROUP4
            numbers, behind = carray(uint8_at(line), (GROUP4,)), GROUP * PANEL // 2
            scale = np.uint32(np.int64(carray(uint16_at(line + behind), (PANEL,))[lane]) << 16).view(np.float32)
            zero = int(numbers[behind + 2 * PANEL + lane])
            for i in range(min(GROUP, count - group * GROUP)):
                both = int(numbers[(i // 8 * PANEL + lane) * 4 + i % 4])
                z[group * GROUP + i] = ((both >> 4 if i % 8 >= 4 else both & 15) - zero) * scale


@kernel
def look_up_all(kind, weights, groups, ids, rows, count, target):
    """The same for `rows` ids (int64) that lie one behind the other."""
    numbers = carray(int64_at(ids), (rows,))
    for index in range(rows):
        look_up(kind, weights, groups, numbers[index], count, target + index * count * 4)
