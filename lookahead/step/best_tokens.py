"""The best few tokens behind each node of draft trees: the kernels.

Floats of one sign are ordered as their bits are, so numbers are compared as integers, which a processor does many at a time
in any type. Blocks whose largest score cannot be among the best are not looked into. Of scores that are equal (0 and -0 are)
the first comes first, so the best of all is the result of argmax.
"""

from __future__ import annotations

import numpy as np

from lookahead.draft.recycled import BEST
from lookahead.native.kernels import carray, float32_at, inlined, int16_at, int32_at, kernel

BLOCK = 128  # scores whose maximum is taken at once


@kernel
def best_token(bits, magnitude, index):
    """The best token of one row of `bits`. See `bits_of`."""
    indices, ids, found = np.full(1, index), np.empty((1, 1), np.int32), np.empty((1, 1), bits.dtype)
    find(bits, indices, magnitude, ids, found)
    return np.int64(ids[0, 0])


NONE, FLOAT32, BFLOAT16, FLOAT16 = range(4)  # kinds of scores; none: only best tokens are known


@inlined
def best_token_of(kind, address, rows, vocab, row):
    """The best token of one row of scores of this kind, which are [rows, vocab] at the address."""
    if kind == FLOAT32:
        return best_token(carray(int32_at(address), (rows, vocab)), np.int32(0x7FFFFFFF), row)
    return best_token(carray(int16_at(address), (rows, vocab)), np.int16(0x7FFF), row)


@inlined
def best_few(kind, address, rows, vocab, asked, ids, scores_at, best):
    """Fill ids, int32 [asked, BEST], and the float32 likewise at `scores_at` with the best tokens of the rows `asked`; note the
    first of each in `best`.
    """
    found, scores = carray(int32_at(scores_at), (len(asked), BEST)), carray(float32_at(scores_at), (len(asked), BEST))
    if kind == FLOAT32:
        find(carray(int32_at(address), (rows, vocab)), asked, np.int32(0x7FFFFFFF), ids, found)
    else:
        halves = carray(int16_at(scores_at), (2 * len(asked), BEST))  # widened in index, from the last on
        find(carray(int16_at(address), (rows, vocab)), asked, np.int16(0x7FFF), ids, halves)
        for row in range(len(asked) - 1, -1, -1):
            for k in range(BEST - 1, -1, -1):
                bits = np.int32(halves[row, k])
                if kind == BFLOAT16:
                    found[row, k] = bits << 16
                else:
                    scores[row, k] = _float_of(bits)
    for row in range(len(asked)):
        best[asked[row]] = ids[row, 0]


@inlined
def _float_of(bits):
    """float32: the float16 of these bits."""
    exponent, fraction = (bits >> 10) & 31, np.float32(bits & 1023)
    if exponent == 0:
        value = fraction * np.float32(2.0**-24)
    elif exponent == 31:
        value = np.float32(np.inf) if fraction == 0 else np.float32(np.nan)
    else:
        value = (fraction + np.float32(1024)) * np.float32(2.0) ** np.float32(exponent - 25)
    return -value if bits < 0 else value


@kernel
def find(bits, indices, magnitude, ids, found):
    """Fill ids and found, the bits of their scores. bits: integers [any, vocab]. magnitude: all bits but the sign."""
    most, vocabulary, whole = ids.shape[1], bits.shape[1], bits.shape[1] // BLOCK
    kept, tops = np.empty(most, np.int64), np.empty(whole, np.int64)
    for row in range(len(indices)):
        values = bits[indices[row]]
        least = -np.int64(magnitude)
        kept[:] = least - 1
        for block in range(whole):
            tops[block] = _largest(values[block * BLOCK : block * BLOCK + BLOCK], magnitude)
            if tops[block] > kept[most - 1]:
                _insert(kept, tops[block])
        if whole >= most:
            least = kept[most - 1]  # at least that many scores are not less
        kept[:] = least - 1
        for block in range(whole):
            if tops[block] >= least:
                _look_into(values, block * BLOCK, block * BLOCK + BLOCK, magnitude, kept, ids[row], found[row])
        _look_into(values, whole * BLOCK, vocabulary, magnitude, kept, ids[row], found[row])


@inlined
def _ordered(bits, magnitude):
    """An integer that is larger where the float is; the same for 0 and -0."""
    return -(bits & magnitude) if bits < 0 else bits


@inlined
def _largest(values, magnitude):
    """The largest of a block's scores, ordered. If all are negative, it is the one whose bits are the least integer."""
    highest = lowest = values[0]
    for index in range(BLOCK):  # a plain loop, of which the compiler does several turns at a time
        value = values[np.uint64(index)]
        highest, lowest = max(highest, value), min(lowest, value)
    return np.int64(highest if highest >= 0 else _ordered(lowest, magnitude))


@inlined
def _look_into(values, begin, end, magnitude, kept, ids, found):
    """Take the best of the scores `begin` to `end` among those kept."""
    for index in range(begin, end):
        value = np.int64(_ordered(values[index], magnitude))
        if value > kept[len(kept) - 1]:
            rank = _insert(kept, value)
            for k in range(len(kept) - 1, rank, -1):
                ids[k], found[k] = ids[k - 1], found[k - 1]
            ids[rank], found[rank] = index, values[index]


@inlined
def _insert(kept, value):
    """Put a value that is larger than the last of `kept` where it belongs, behind those that equal it; returns where."""
    rank = len(kept) - 1
    while rank > 0 and value > kept[rank - 1]:
        kept[rank] = kept[rank - 1]
        rank -= 1
    kept[rank] = value
    return rank
