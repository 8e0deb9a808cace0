"""Finding contexts among sorted suffixes. In: the arrays of one segment of a trie file. Out: ranges of its suffixes.

A mapped file may lie about positions: every kernel here clamps what it reads before it follows it.
"""

from __future__ import annotations

import numpy as np

from lookahead.native.kernels import kernel


@kernel
def matching_range(tokens, suffixes, first, pattern, start, stop):
    """(low, high): the sorted suffixes that begin with pattern[start:stop]; low == high if there is none.

    Binary search inside the range of the first token. 1 <= stop - start <= the depth that the suffixes are sorted to.
    """
    n = np.int64(len(tokens))
    size = np.int64(len(suffixes))
    t = pattern[start]
    if t < 0 or t >= len(first) - 1:
        return np.int64(0), np.int64(0)
    low = min(max(np.int64(first[t]), np.int64(0)), size)
    high = min(max(np.int64(first[t + 1]), np.int64(0)), size)
    if stop - start == 1 or low >= high:
        return low, max(low, high)
    end = high
    while low < high:  # first suffix >= pattern
        middle = (low + high) >> 1
        if _compare(tokens, n, np.int64(suffixes[middle]), pattern, start, stop) < 0:
            low = middle + 1
        else:
            high = middle
    begin = low
    step = np.int64(1)  # gallop: most ranges are short
    high = begin
    while high < end and _compare(tokens, n, np.int64(suffixes[high]), pattern, start, stop) == 0:
        low = high + 1
        high = min(end, high + step)
        step <<= 1
    while low < high:  # first suffix > pattern
        middle = (low + high) >> 1
        if _compare(tokens, n, np.int64(suffixes[middle]), pattern, start, stop) == 0:
            low = middle + 1
        else:
            high = middle
    return begin, low


@kernel
def _compare(tokens, n, position, pattern, start, stop):
    """-1, 0, 1 as the suffix at `position` sorts before, begins with, sorts after pattern[start:stop]."""
    if position < 0 or position > n - (stop - start):
        # Too near the end to hold the pattern: compare what there is.
        for j in range(start, stop):
            at = position + j - start
            if at < 0 or at >= n:
                return -1
            difference = np.int64(tokens[at]) - np.int64(pattern[j])
            if difference != 0:
                return -1 if difference < 0 else 1
        return 0
    for j in range(start, stop):
        difference = np.int64(tokens[position + j - start]) - np.int64(pattern[j])
        if difference != 0:
            return -1 if difference < 0 else 1
    return 0


@kernel
def child_ranges(tokens, suffixes, length, low, high):
    """(token, low, high) arrays of the ranges inside low..high that share the token `length` positions on, in token order.

    Binary search for each end: time grows with the number of children, not with the range.
    """
    found_tokens = np.empty(16, np.int64)
    found_lows = np.empty(16, np.int64)
    found_highs = np.empty(16, np.int64)
    found = 0
    n = np.int64(len(tokens))
    high = min(high, np.int64(len(suffixes)))
    while low < high:
        position = np.int64(suffixes[low]) + length
        if position < 0 or position >= n:
            low += 1
            continue
        token = tokens[position]
        inside, outside = low, high
        while outside - inside > 1:
            middle = (inside + outside) >> 1
            position = np.int64(suffixes[middle]) + length
            if 0 <= position < n and tokens[position] == token:
                inside = middle
            else:
                outside = middle
        if found == len(found_tokens):
            found_tokens = np.concatenate((found_tokens, np.empty(found, np.int64)))
            found_lows = np.concatenate((found_lows, np.empty(found, np.int64)))
            found_highs = np.concatenate((found_highs, np.empty(found, np.int64)))
        found_tokens[found] = token
        found_lows[found] = low
        found_highs[found] = outside
        found += 1
        low = outside
    return found_tokens[:found], found_lows[:found], found_highs[:found]
