"""Keys and values in 8 or 4 bits: the kernels. In: addresses of numbers. Out: the bytes that a cache holds of them.

vector_code.py defines how these lie, see also quantized_cache.py.
"""

from __future__ import annotations

import numpy as np

from lookahead.native.kernels import carray, float32_at, inlined, kernel, part, uint8_at, uint16_at
from lookahead.native.vector_code import GROUP, GROUP4, GROUP8, LANES

SMALLEST = 1e-30  # scale: of a group whose numbers differ by less, all are taken for the same


@inlined
def _read(x, begin, numbers):
    """Fill `numbers` [32] with those from `begin` on; the first stands for what is not there. Returns how many 16s are."""
    for i in range(GROUP):
        numbers[i] = x[begin + i] if begin + i < len(x) else x[begin]
    return 2 if len(x) - begin > LANES else 1


@inlined
def _largest(numbers):
    """Return the largest of 32 numbers, which are overwritten."""
    for half in (16, 8, 4, 2, 1):
        for i in range(half):
            numbers[i] = numbers[i + half] if numbers[i + half] > numbers[i] else numbers[i]
    return numbers[0]


@inlined
def _half(number, address):
    """Store a float32 as bfloat16, rounded to the nearest, halves to even; returns what is stored as float32."""
    bits = np.int64(np.float32(number).view(np.uint32))
    bits = (bits + (bits >> 16 & 1) + 0x7FFF) >> 16
    carray(uint16_at(address), (1,))[0] = bits
    return np.uint32(bits << 16).view(np.float32)


@inlined
def _whole(number, least, most):
    """The nearest whole number, halves to even, within bounds."""
    rounded = np.rint(number)
    rounded = rounded if rounded > np.float32(least) else np.float32(least)
    return np.int32(rounded if rounded < np.float32(most) else np.float32(most))


@inlined
def _factor(scale):
    return np.float32(1) / scale if scale >= np.float32(SMALLEST) else np.float32(0)


@part
def quantize8(source, count, target):
    """`count` float32 numbers as groups in 8 bits."""
    x, numbers, sizes = carray(float32_at(source), (count,)), np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    for group in range((count + GROUP - 1) // GROUP):
        home = target + group * GROUP8
        parts = _read(x, group * GROUP, numbers)
        for i in range(GROUP):
            sizes[i] = abs(numbers[i])
        factor = _factor(_half(_largest(sizes) / np.float32(127), home))
        z = carray(uint8_at(home + 2), (GROUP,))
        for begin in range(0, parts * LANES, LANES):
            for i in range(LANES):
                z[begin + i] = _whole(numbers[begin + i] * factor, -127, 127) & 255


@part
def quantize4(source, count, target):
    """`count` float32 numbers as groups in 4 bits."""
    x, numbers, signed = carray(float32_at(source), (count,)), np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    for group in range((count + GROUP - 1) // GROUP):
        home = target + group * GROUP4
        parts = _read(x, group * GROUP, numbers)
        for i in range(GROUP):
            signed[i] = -numbers[i]
        offset = _half(-_largest(signed), home + 2)
        for i in range(GROUP):
            signed[i] = numbers[i]
        factor = _factor(_half((_largest(signed) - offset) / np.float32(15), home))
        z = carray(uint8_at(home + 4), (LANES,))
        for begin in range(0, parts * LANES, LANES):
            for i in range(LANES // 2):
                low = _whole((numbers[begin + i] - offset) * factor, 0, 15)
                z[begin // 2 + i] = low | _whole((numbers[begin + LANES // 2 + i] - offset) * factor, 0, 15) << 4


@kernel
def quantize_all(source, count, width, target, size, in_8_bits):
    """`count` keys or values that lie one behind the other."""
    for number in range(count):
        if in_8_bits:
            quantize8(source + number * width * 4, width, target + number * size)
        else:
            quantize4(source + number * width * 4, width, target + number * size)
