"""Sorting, merging and searching suffixes. In and out: numpy arrays. Knows nothing of files or text.

`tokens` holds documents one after the other, each closed by `separator`, which is larger than every token id. Suffixes are
ordered by their first `depth` tokens, never looking past their own separator, then by position; so the order of any two
suffixes of one document is the same in whatever file they stand.
"""

from __future__ import annotations

import numba
import numpy as np

DEPTH = 32

# Kernels release the GIL and are compiled once per machine. Arrays of a mapped file may lie about positions, so a kernel
# clamps each position that it reads from one before it uses it as an index.
kernel = numba.njit(cache=True, nogil=True, error_model="numpy")


def sort_suffixes(tokens: np.ndarray, separator: int, depth: int = DEPTH) -> np.ndarray:
    """Positions of all suffixes that start with a real token, sorted; int64 [len(tokens) - documents].

    Prefix doubling (Manber and Myers 1990): the first round packs two or four tokens into one 64-bit key, each later
    round doubles the compared length and sorts only those suffixes that still share their rank.
    """
    n = len(tokens)
    ends = np.flatnonzero(tokens == separator)
    remaining = np.repeat(ends, np.diff(ends, prepend=-1)) - np.arange(n)  # tokens before the separator
    length = 4 if separator + 2 <= 1 << 16 else 2
    key = np.zeros(n, np.uint64)
    for j in range(length):
        key *= np.uint64(separator + 2)  # digits: 0 behind the separator, else token + 1
        inside = max(0, n - j)
        key[:inside] += np.where(remaining[:inside] >= j, tokens[j:].astype(np.uint64) + np.uint64(1), np.uint64(0))
    order = np.argsort(key)
    group = _group_starts(key[order])
    rank = np.empty(n, np.int64)
    rank[order] = group
    while length < depth:
        places = _shared_places(group)
        suffixes = order[places]
        inside = remaining[suffixes] >= length
        following = np.where(inside, rank[np.where(inside, suffixes + length, 0)] + 1, 0)
        key = (group[places].astype(np.uint64) << np.uint64(32)) | following.astype(np.uint64)
        by_key = np.argsort(key)
        starts = places[_group_starts(key[by_key])] if len(places) else places
        order[places] = suffixes[by_key]
        group[places] = starts
        rank[order[places]] = starts
        length *= 2
    places = _shared_places(group)
    by_position = (group[places].astype(np.uint64) << np.uint64(32)) | order[places].astype(np.uint64)
    by_position.sort()
    order[places] = (by_position & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return order[: n - len(ends)]  # separators sort last: they are no branches


def _group_starts(key: np.ndarray) -> np.ndarray:
    """For a sorted key: the first place that holds the same value, per place."""
    starts = np.arange(len(key))
    starts[1:][key[1:] == key[:-1]] = 0
    return np.maximum.accumulate(starts)


def _shared_places(group: np.ndarray) -> np.ndarray:
    """Places whose group has more than one member."""
    same = group[1:] == group[:-1]
    shared = np.zeros(len(group), bool)
    shared[1:] |= same
    shared[:-1] |= same
    return np.flatnonzero(shared)


def first_table(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """int64 [vocab_size + 1]: sorted suffixes first[t] to first[t + 1] start with token t."""
    counts = np.bincount(tokens, minlength=vocab_size + 1)[:vocab_size]
    return np.concatenate([[0], np.cumsum(counts)])


@kernel
def merge_sorted(tokens, separator, left, right, depth):
    """One sorted array out of two sorted arrays of positions in `tokens`; on equal text `left` comes first."""
    merged = np.empty(len(left) + len(right), np.int64)
    i = j = 0
    n = len(tokens)
    for k in range(len(merged)):
        if i == len(left):
            merged[k] = right[j]
            j += 1
            continue
        if j == len(right):
            merged[k] = left[i]
            i += 1
            continue
        a, b = np.int64(left[i]), np.int64(right[j])
        take_left = True
        for d in range(depth):
            x = tokens[a + d] if a + d < n else separator
            y = tokens[b + d] if b + d < n else separator
            if x != y:
                take_left = x < y
                break
            if x == separator:
                break
        if take_left:
            merged[k] = a
            i += 1
        else:
            merged[k] = b
            j += 1
    return merged


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
            place = position + j - start
            if place < 0 or place >= n:
                return -1
            difference = np.int64(tokens[place]) - np.int64(pattern[j])
            if difference != 0:
                return -1 if difference < 0 else 1
        return 0
    for j in range(start, stop):
        difference = np.int64(tokens[position + j - start]) - np.int64(pattern[j])
        if difference != 0:
            return -1 if difference < 0 else 1
    return 0
