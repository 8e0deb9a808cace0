"""The best few tokens behind each node, and the path along which a draft tree holds the best: the kernels.

Floats of one sign are ordered as their bits are, so numbers are compared as integers, which a processor does many at a time
in any type. Blocks whose largest score cannot be among the best are not looked into. Of scores that are equal (0 and -0 are)
the first comes first, so the best of all is the result of argmax.
"""

from __future__ import annotations

import numpy as np

from lookahead.native.kernels import carray, inlined, int16_at, int32_at, int64_at, kernel
from lookahead.native.vectors import widen

BLOCK = 128  # scores whose maximum is taken at once


@kernel
def best_token(bits, magnitude, place):
    """The best token of one row of `bits`. See `bits_of`."""
    places, ids, found = np.full(1, place), np.empty((1, 1), np.int32), np.empty((1, 1), bits.dtype)
    find(bits, places, magnitude, ids, found)
    return np.int64(ids[0, 0])


# The arguments of `follow_floats` and `follow_halves`, 8 bytes each: where scores begin and how many there are of a token;
# where best tokens are noted that are known, and of how many tokens; numbers of trees, of all their nodes, of tokens instead
# of the best.
SCORES, VOCAB, KNOWN, PLACES, TREES, NODES, GIVEN, HEAD = range(8)


def follow_floats(address):
    told = carray(int64_at(address), (HEAD,))
    _follow(address, carray(int32_at(told[SCORES]), (told[PLACES], told[VOCAB])), np.int32(0x7FFFFFFF))


def follow_halves(address):
    told = carray(int64_at(address), (HEAD,))
    _follow(address, carray(int16_at(told[SCORES]), (told[PLACES], told[VOCAB])), np.int16(0x7FFF))


@inlined
def _follow(address, bits, magnitude):
    """Behind the arguments stand, int64 [trees, 5]: where a tree begins and ends among all nodes, its root's row of scores, and
    where the tokens begin and end that it is followed by instead of the best (none: by the best); these tokens, int64; the
    nodes' token ids and parents, int32. Then come, int64, the results: of each tree from where it begins the tokens, and the
    nodes of the path; of each tree how many of both; and room for the depths of nodes that are walked to.
    """
    told = carray(int64_at(address), (HEAD,))
    count, nodes = told[TREES], told[NODES]
    known, at = carray(int64_at(told[KNOWN]), (told[PLACES],)), address + 8 * HEAD
    trees, at = carray(int64_at(at), (count, 5)), at + 40 * count
    given, at = carray(int64_at(at), (told[GIVEN],)), at + 8 * told[GIVEN]
    token_ids, parents, at = carray(int32_at(at), (nodes,)), carray(int32_at(at + 4 * nodes), (nodes,)), at + 8 * nodes
    tokens, path, at = carray(int64_at(at), (nodes,)), carray(int64_at(at + 8 * nodes), (nodes,)), at + 16 * nodes
    counts, depths = carray(int64_at(at), (count, 2)), carray(int64_at(at + 16 * count), (nodes,))
    for tree in range(count):
        begin, end, first = trees[tree, 0], trees[tree, 1], trees[tree, 2]
        following, stop = trees[tree, 3], trees[tree, 4]
        for node in range(begin, end):
            depths[node] = -1
        depths[begin] = depth = 0
        by_best, node, token = following == stop, begin, np.int64(-1)
        while by_best or following < stop:
            if len(known) > 0:  # looked for even where it is given what comes next, as that is to take as long
                place = first + node - begin
                if known[place] < 0:
                    known[place] = best_token(bits, magnitude, place)
                token = known[place]
            if not by_best:
                token = given[following]
                following += 1
            tokens[begin + depth] = token
            child = np.int64(-1)
            for below in range(node + 1, end):
                if token_ids[below] == token and depths[begin + parents[below]] == depth:
                    depths[below] = depth + 1
                    child = below if child < 0 else child
            depth += 1
            if child < 0:
                break
            node = child
        counts[tree, 0], counts[tree, 1] = depth, depths[node] + 1
        for step in range(depths[node], -1, -1):
            path[begin + step] = node - begin
            node = begin + parents[node]


# The arguments of `best_few_floats` and `best_few_halves`, 8 bytes each: addresses of scores, which come in rows of VOCAB, of
# the rows that are asked for (int64), of what is left there: tokens (int32 [rows, FEW]), their scores (float32, with room for
# 15 more), and the best token of each row of scores (int64); how many rows are asked for, and of how many; of halves, the
# address of room for their bits (int16 [rows, FEW]), and whether they are bfloat16.
FEW = 4
(FEW_SCORES, FEW_VOCAB, ASKED, BEST_IDS, BEST_SCORES, BEST_KNOWN, ASKED_ROWS, ALL_ROWS, FEW_BITS, IS_BFLOAT16) = range(10)
FEW_TASK = 10


def best_few_floats(address):
    told = carray(int64_at(address), (FEW_TASK,))
    bits = carray(int32_at(told[FEW_SCORES]), (told[ALL_ROWS], told[FEW_VOCAB]))
    _best_few(told, bits, np.int32(0x7FFFFFFF), carray(int32_at(told[BEST_SCORES]), (told[ASKED_ROWS], FEW)))


def best_few_halves(address):
    told = carray(int64_at(address), (FEW_TASK,))
    bits = carray(int16_at(told[FEW_SCORES]), (told[ALL_ROWS], told[FEW_VOCAB]))
    _best_few(told, bits, np.int16(0x7FFF), carray(int16_at(told[FEW_BITS]), (told[ASKED_ROWS], FEW)))
    if told[IS_BFLOAT16]:
        widen(np.uint16(0), told[FEW_BITS], told[ASKED_ROWS] * FEW, np.float32(1), told[BEST_SCORES])
    else:
        widen(np.int16(0), told[FEW_BITS], told[ASKED_ROWS] * FEW, np.float32(1), told[BEST_SCORES])


@inlined
def _best_few(told, bits, magnitude, found):
    """found: takes the bits of the scores."""
    rows = told[ASKED_ROWS]
    asked, ids = carray(int64_at(told[ASKED]), (rows,)), carray(int32_at(told[BEST_IDS]), (rows, FEW))
    known = carray(int64_at(told[BEST_KNOWN]), (told[ALL_ROWS],))
    find(bits, asked, magnitude, ids, found)
    for row in range(rows):
        known[asked[row]] = ids[row, 0]


@kernel
def find(bits, places, magnitude, ids, found):
    """Fill ids and found, the bits of their scores. bits: integers [any, vocab]. magnitude: all bits but the sign."""
    most, vocabulary, whole = ids.shape[1], bits.shape[1], bits.shape[1] // BLOCK
    kept, tops = np.empty(most, np.int64), np.empty(whole, np.int64)
    for row in range(len(places)):
        values = bits[places[row]]
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
    for place in range(BLOCK):  # a plain loop, of which the compiler does several turns at a time
        value = values[np.uint64(place)]
        highest, lowest = max(highest, value), min(lowest, value)
    return np.int64(highest if highest >= 0 else _ordered(lowest, magnitude))


@inlined
def _look_into(values, begin, end, magnitude, kept, ids, found):
    """Take the best of the scores `begin` to `end` among those kept."""
    for place in range(begin, end):
        value = np.int64(_ordered(values[place], magnitude))
        if value > kept[len(kept) - 1]:
            rank = _insert(kept, value)
            for k in range(len(kept) - 1, rank, -1):
                ids[k], found[k] = ids[k - 1], found[k - 1]
            ids[rank], found[rank] = place, values[place]


@inlined
def _insert(kept, value):
    """Put a value that is larger than the last of `kept` where it belongs, behind those that equal it; returns where."""
    rank = len(kept) - 1
    while rank > 0 and value > kept[rank - 1]:
        kept[rank] = kept[rank - 1]
        rank -= 1
    kept[rank] = value
    return rank
