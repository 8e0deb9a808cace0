"""Finding contexts among sorted suffixes. In: the arrays of one segment of a trie file. Out: ranges of its suffixes.

A mapped file may lie about positions: every kernel here clamps what it reads before it follows it.
"""

from __future__ import annotations

import numpy as np

from lookahead.kernels import kernel
from lookahead.trie.suffixes import SAMPLE, bit_length, key_digits

WAVE = 16  # match lengths searched side by side


@kernel
def match_orders(tokens, suffixes, first, samples, context, length, longest, lows, highs):
    """Where the ends of context[:length] stand: lows[m]:highs[m] are the sorted suffixes that begin with its last m tokens.

    lows, highs: int64 [longest + 1], zeros; they stay zero where there is no match. Returns the longest m with one.
    The sampled keys, few enough to stay in the cache, bound each search to a few hundred suffixes, mostly.
    A wave of lengths is searched side by side, both ends of each range: so the reads of far memory overlap, and a wave takes
    little longer than one binary search.
    """
    n = np.int64(len(tokens))
    size = np.int64(len(suffixes))
    bits = bit_length(len(first) - 1)
    digits = key_digits(bits)
    longest = min(longest, length)
    # Of the pattern of length base + k, search 2k is for the first suffix that is not before it, 2k + 1 for the first after it.
    low = np.empty(2 * WAVE, np.int64)
    high = np.empty(2 * WAVE, np.int64)
    places = np.empty(2 * WAVE, np.int64)
    seconds = np.empty(2 * WAVE, np.int64)
    found = 0
    while found < longest:
        base = found + 1
        wave = min(WAVE, longest - found)
        for k in range(wave):
            token = np.int64(context[length - base - k])
            begin = end = np.int64(0)
            if 0 <= token < len(first) - 1:
                begin = min(max(np.int64(first[token]), np.int64(0)), size)
                end = min(max(np.int64(first[token + 1]), begin), size)
            low[2 * k], high[2 * k], low[2 * k + 1], high[2 * k + 1] = begin, end, begin, end
            if base + k == 1:  # the table itself bounds one token
                high[2 * k], low[2 * k + 1] = begin, end
            elif end - begin > SAMPLE:
                start = length - base - k
                taken = min(digits, base + k)
                key, known = np.uint64(0), True
                for j in range(taken):
                    token = np.int64(context[start + j])
                    known &= 0 <= token < len(first) - 1
                    key = (key << np.uint64(bits)) | np.uint64(token)
                if not known:  # such a text is nowhere
                    high[2 * k] = high[2 * k + 1] = begin
                    continue
                shift = np.uint64(bits * (digits - taken))
                least = _count_samples(samples, begin // SAMPLE, end // SAMPLE, shift, key)
                most = _count_samples(samples, least, end // SAMPLE, shift, key + np.uint64(1))
                whole = taken == base + k  # else keys tell the pattern's beginning only
                low[2 * k] = max(begin, (least - 1) * SAMPLE + 1)
                high[2 * k] = min(end, (least if whole else most) * SAMPLE)
                low[2 * k + 1] = max(begin, ((most if whole else least) - 1) * SAMPLE + 1)
                high[2 * k + 1] = min(end, most * SAMPLE)
        searching = True
        while searching:
            searching = False
            for k in range(2 * wave):
                if low[k] < high[k]:
                    places[k] = np.int64(suffixes[(low[k] + high[k]) >> 1])
            for k in range(2 * wave):
                if low[k] < high[k]:
                    seconds[k] = np.int64(tokens[places[k] + 1]) if 0 <= places[k] < n - 1 else np.int64(-1)
            for k in range(2 * wave):
                if low[k] < high[k]:
                    searching = True
                    start = length - base - (k >> 1)
                    order = seconds[k] - np.int64(context[start + 1])
                    if order == 0:
                        order = _compare(tokens, n, places[k], context, start, length)
                    middle = (low[k] + high[k]) >> 1
                    if order < (k & 1):
                        low[k] = middle + 1
                    else:
                        high[k] = middle
        for k in range(wave):
            if low[2 * k] >= low[2 * k + 1]:
                return found
            found += 1
            lows[found], highs[found] = low[2 * k], low[2 * k + 1]
    return found


@kernel
def _count_samples(samples, low, high, shift, key):
    """The first of samples low to high + 1 that is not below `key` when `shift` bits are dropped."""
    high = min(high + 1, np.int64(len(samples)))
    while low < high:
        middle = (low + high) >> 1
        if samples[middle] >> shift < key:
            low = middle + 1
        else:
            high = middle
    return low


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


@kernel
def child_ranges(tokens, suffixes, length, low, high):
    """(token, low, high) arrays of the ranges inside low..high that share the token `length` places on, in token order.

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
