"""Attention of packed draft trees on a CPU. In: addresses of queries, slot buffers and metadata. Out: outputs, in place.

Every sum runs in an order that a query's own keys decide (vectors.py): its scores, then their maximum, then the weighted
values from its first visible position to its last, one after the other. So the bits of an output are the same regardless of
which other queries, rows and slots share the call, and however the work is divided: that is for speed alone. Only what a query
sees is added up; other positions of the buffers may hold anything.

Most of what a token sees lies side by side in the buffers: the text, and the nodes that the tree begins with before it first
branches. That range is the same, or nearly, for many tokens, and is worked on for up to ROWS queries at a time, 4 queries and
16 keys in the innermost loops. What is behind it, a few ancestors of each node, goes query by query.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from lookahead.forward.tree_meta import FIELDS, FIRST, NODE, PARENT, PAST, POSITION, SIZE, SLOT, TRUNK
from lookahead.native.kernels import carray, float64_at, inlined, int32_at, int64_at, part
from lookahead.native.threads import add
from lookahead.native.vectors import (
    are_quantized,
    dot,
    dots,
    largest,
    mix_1x1,
    mix_1x4,
    mix_2x4,
    mix_4x1,
    mix_4x4,
    narrow,
    powers,
    tile_scores,
    transpose,
    widen,
)

ROWS = 64  # queries that are worked on at a time, heads that share keys counted
FEW = 8  # queries up to which keys are read as they lie, rather than side by side

# What the array that describes a call holds: numbers, addresses and strides in bytes
TICKETS, TASK_TOKENS, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH, SCALE = range(7)
QUERY, QUERY_TOKEN, QUERY_HEAD = 7, 8, 9
KEY, KEY_SLOT, KEY_HEAD, KEY_POSITION = 10, 11, 12, 13
VALUE, VALUE_SLOT, VALUE_HEAD, VALUE_POSITION = 14, 15, 16, 17
OUTPUT, TASK_META, BYTES = 18, 19, 20
BEGIN, END = 21, 22  # shares that are done by this call; END 0: threads take them as they come, by TICKETS
LEAST = 23  # shares into which the call is divided, if it can be
TASK = 24
TASK_BYTES = struct.Struct("=6qd17q")

LOG2_E = 1.4426950408889634


@inlined
def _mix(task, kind, segment, weights_stride, outputs, padded, totals, unused):
    """Add values to the outputs and weights to the totals of 1, 2 or 4 queries, side by side in scratch memory.

    segment: int64 [5], first query, queries, values; addresses of the first weight and of the first value. unused: room for
    totals that nobody wants.
    """
    first, rows, count, weights, value = segment[0], segment[1], segment[2], segment[3], segment[4]
    stride, width, line = task[VALUE_POSITION], task[VALUE_WIDTH], padded * 4
    into = totals + first * 64
    at = 0
    while at < width:
        there = outputs + first * line + at * 4
        if width - at >= 64:
            if rows == 4:
                mix_4x4(kind, weights, weights_stride, value, stride, count, at, 16, there, line, into)
            elif rows == 2:
                mix_2x4(kind, weights, weights_stride, value, stride, count, at, 16, there, line, into)
            else:
                mix_1x4(kind, weights, weights_stride, value, stride, count, at, 16, there, line, into)
            at += 64
        else:
            some = min(16, width - at)
            if rows == 4:
                mix_4x1(kind, weights, weights_stride, value, stride, count, at, some, there, line, into)
            else:
                for row in range(rows):
                    own = weights + row * weights_stride
                    mix_1x1(
                        kind, own, weights_stride, value, stride, count, at, some, there + row * line, line, into + row * 64
                    )
            at += 16
        into = unused  # further numbers of the values: the weights are counted already


@inlined
def _tail(meta, start, token, ancestors):
    """Ancestors of a token, itself included, that are not in its trunk: fills `ancestors`, first to last; returns how many."""
    line = meta[token]
    count = line[POSITION] + 1 - max(line[FIRST], line[PAST] + line[TRUNK])
    count = max(count, 0)
    node = line[NODE]
    for number in range(count - 1, -1, -1):
        ancestors[number] = line[PAST] + node
        node = meta[start + node][PARENT]
    return count


@part
def _scores(task, kind, head, queries, count, slot, low, high, scores):
    """Scores [queries, keys] of `count` queries with the keys from position `low` to `high`, some of which they may not see.

    queries, scores: scratch memory, for whole tiles of 4 queries and of 16 keys.
    """
    stride = task[KEY_POSITION]
    keys = task[KEY] + slot * task[KEY_SLOT] + head * task[KEY_HEAD]
    query, score, padded = queries.ctypes.data, scores.ctypes.data, queries.shape[1]
    line, row = padded * 4, scores.shape[1] * 4
    if count <= FEW and count > 1 and are_quantized(kind):  # what is read several times becomes float32 once
        block, one = np.empty((16, padded), np.float32), np.float32(1)
        for at in range(low, high, 16):
            some = min(16, high - at)
            for number in range(some):
                widen(kind, keys + (at + number) * stride, task[WIDTH], one, block.ctypes.data + number * line)
            for number in range(count):
                into = score + number * row + (at - low) * 4
                dots(np.float32(0), query + number * line, block.ctypes.data, line, some, task[WIDTH], into)
    elif count <= FEW:
        for at in range(low, high, 16):
            for number in range(count):
                into = score + number * row + (at - low) * 4
                dots(kind, query + number * line, keys + at * stride, stride, min(16, high - at), task[WIDTH], into)
    else:
        turned = np.empty((padded, 16), np.float32)
        for at in range(low, high, 16):
            transpose(kind, keys + at * stride, stride, min(16, high - at), task[WIDTH], turned.ctypes.data)
            for number in range(0, count, 4):
                into = score + number * row + (at - low) * 4
                tile_scores(query + number * line, line, turned.ctypes.data, padded // 16, into, row)


@part
def _weights(task, meta, kind, start, first, head, queries, low, scores, tails, ancestors, seen):
    """Scores behind the trunk; then all scores of each query become weights, the largest being 1.

    tails: their weights [queries, most]; ancestors: those of each token [tokens, most]; seen: how many of them.
    """
    keys = task[KEY] + meta[start, SLOT] * task[KEY_SLOT] + head * task[KEY_HEAD]
    query, line, grouped = queries.ctypes.data, queries.shape[1] * 4, len(tails) // len(ancestors)
    for number in range(len(tails)):
        token = number // grouped
        about = meta[first + token]
        if number % grouped == 0:
            seen[token] = _tail(meta, start, first + token, ancestors[token])
        begin, end = about[FIRST], about[PAST] + about[TRUNK]
        dense = max(0, end - begin)
        row = scores.ctypes.data + number * scores.shape[1] * 4 + (begin - low) * 4
        for other in range(seen[token]):
            key = keys + ancestors[token, other] * task[KEY_POSITION]
            tails[number, other] = dot(kind, query + number * line, key, task[WIDTH])
        tail = tails.ctypes.data + number * tails.shape[1] * 4
        top = max(largest(row, dense), largest(tail, seen[token]))
        powers(row, dense, top)
        powers(tail, seen[token], top)


@inlined
def _segments(task, meta, first, head, number, rows, low, scores, tails, ancestors, seen, segments):
    """List what the outputs of a tile of queries, 1, 2 or 4 from `number` on, are added up from, in this order; returns how
    many.

    segments: int64 [most, 6], see `_mix`; the last is the distance between the weights of two queries.
    """
    stride, grouped = task[VALUE_POSITION], len(tails) // len(ancestors)
    values = task[VALUE] + meta[first, SLOT] * task[VALUE_SLOT] + head * task[VALUE_HEAD]
    row, tail = scores.shape[1] * 4, tails.shape[1] * 4
    begin, end = np.int64(0), np.int64(1) << 60
    for query in range(number, number + rows):  # what all of them see
        own = meta[first + query // grouped]
        begin = max(begin, own[FIRST])
        end = min(end, own[PAST] + own[TRUNK])
    count = 0
    for phase in range(3):  # what some see before that, that, and behind it
        shared = phase == 1
        for query in range(number, number + (1 if shared else rows)):
            token = query // grouped
            own = meta[first + token]
            start, stop = begin, end
            if phase == 0:
                start, stop = np.int64(own[FIRST]), min(begin, own[PAST] + own[TRUNK])
            elif phase == 2:
                start, stop = max(end, begin, own[FIRST]), np.int64(own[PAST] + own[TRUNK])
            if stop > start:
                segments[count, 0], segments[count, 1], segments[count, 2] = query, rows if shared else 1, stop - start
                segments[count, 3] = scores.ctypes.data + query * row + (start - low) * 4
                segments[count, 4], segments[count, 5] = values + start * stride, row
                count += 1
            for other in range(seen[token] if phase == 2 else 0):
                segments[count, 0], segments[count, 1], segments[count, 2] = query, 1, 1
                segments[count, 3] = tails.ctypes.data + query * tail + other * 4
                segments[count, 4], segments[count, 5] = values + ancestors[token, other] * stride, tail
                count += 1
    return count


@part
def _outputs(task, meta, kind, first, head, low, scores, tails, ancestors, seen, outputs, totals):
    """Weighted sums of values, [queries, numbers], and of the weights, for tiles of 4 queries, 2 and 1."""
    segments = np.empty((4 * (tails.shape[1] + 2) + 1, 6), np.int64)
    number, count = 0, len(tails)
    while number < count:
        rows = 4 if count - number >= 4 else 2 if count - number >= 2 else 1
        some = _segments(task, meta, first, head, number, rows, low, scores, tails, ancestors, seen, segments)
        for index in range(some):
            segment, unused = segments[index], totals.ctypes.data + (len(totals) - 4) * 64
            _mix(task, kind, segment, segment[5], outputs.ctypes.data, outputs.shape[1], totals.ctypes.data, unused)
        number += rows


@inlined
def _share(task, meta, kind, kept, scale, start, first, last, head, begin, end):
    """Outputs of the tokens from `first` to `last` of the tree at `start`, for heads `begin` to `end` of those that share this
    head's keys.
    """
    grouped, own = end - begin, head * (task[HEADS] // task[KEY_HEADS]) + begin
    count = (last - first) * grouped
    padded, value_padded = (task[WIDTH] + 15) // 16 * 16, (task[VALUE_WIDTH] + 15) // 16 * 16
    low, high, longest = np.int64(1) << 60, np.int64(0), np.int64(1)
    for token in range(first, last):
        about = meta[token]
        low = min(low, about[FIRST])
        high = max(high, about[PAST] + about[TRUNK])
        longest = max(longest, about[POSITION] + 1 - about[PAST] - about[TRUNK])
    low = min(low, high)
    queries = np.zeros(((count + 3) // 4 * 4, padded), np.float32)
    for number in range(count):
        token, query = first + number // grouped, own + number % grouped
        source = task[QUERY] + token * task[QUERY_TOKEN] + query * task[QUERY_HEAD]
        widen(kind, source, task[WIDTH], scale, queries.ctypes.data + number * padded * 4)
    keys = (high - low + 15) // 16
    scores = np.empty((len(queries), (keys + 1 - keys % 2) * 16), np.float32)  # an odd number of lines of the processor's cache
    tails = np.empty((count, longest), np.float32)
    ancestors, seen = np.empty((last - first, longest), np.int64), np.empty(last - first, np.int64)
    _scores(task, kept, head, queries, count, meta[start, SLOT], low, high, scores)
    _weights(task, meta, kept, start, first, head, queries, low, scores, tails, ancestors, seen)
    outputs, totals = np.zeros((count, value_padded), np.float32), np.zeros((count + 4, 16), np.float32)
    _outputs(task, meta, kept, first, head, low, scores, tails, ancestors, seen, outputs, totals)
    for number in range(count):
        token, query = first + number // grouped, own + number % grouped
        into = task[OUTPUT] + (token * task[HEADS] + query) * task[VALUE_WIDTH] * task[BYTES]
        factor = np.float32(1) / totals[number, 0]
        narrow(kind, outputs.ctypes.data + number * value_padded * 4, task[VALUE_WIDTH], factor, into)


@inlined
def _division(task):
    """(tokens of a share, up to ROWS queries; shares that the heads are divided among which share keys)"""
    grouped, units = task[HEADS] // task[KEY_HEADS], task[TASK_TOKENS] * task[KEY_HEADS]
    most = min(max(1, ROWS // grouped), (units + task[LEAST] - 1) // task[LEAST])
    return max(1, most), max(1, min(grouped, task[LEAST] // units))


@part
def count_shares(task):
    """Return how many shares a call has."""
    meta = carray(int32_at(task[TASK_META]), (task[TASK_TOKENS], FIELDS))
    most, parts = _division(task)
    start, count = 0, 0
    while start < task[TASK_TOKENS] and meta[start, SLOT] >= 0:
        count += (meta[start, SIZE] + most - 1) // most
        start += meta[start, SIZE]
    return count * parts * task[KEY_HEADS]


@functools.cache
def attention(kind: Callable[[int], Any], kept: Callable[[int], Any]) -> Callable[[Any], None]:
    """The kernel for queries and outputs of one type of numbers, keys and values of another or the same (see vectors.py)."""
    like, like_kept = kind(0), kept(0)

    def attend(address):
        """Do shares of the call that the array at `address` describes: from BEGIN to END, or until all are taken."""
        task = carray(int64_at(address), (TASK,))
        scale = np.float32(carray(float64_at(address), (TASK,))[SCALE])
        meta = carray(int32_at(task[TASK_META]), (task[TASK_TOKENS], FIELDS))
        (most, parts), grouped, end = _division(task), task[HEADS] // task[KEY_HEADS], task[END]
        mine, share = task[BEGIN] if end else add(address, 1), np.int64(0)
        start = 0
        while start < task[TASK_TOKENS] and meta[start, SLOT] >= 0:  # what is behind fills the pack up
            size = meta[start, SIZE]
            for head in range(task[KEY_HEADS]):
                for first in range(start, start + size, most):
                    for each in range(parts):
                        if mine == share:
                            last, begin = min(first + most, start + size), grouped * each // parts
                            until = grouped * (each + 1) // parts
                            _share(task, meta, like, like_kept, scale, start, first, last, head, begin, until)
                            mine = mine + 1 if end else add(address, 1)
                            if mine == end and end:
                                return
                        share += 1
            start += size

    return attend
