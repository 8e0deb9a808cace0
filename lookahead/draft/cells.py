"""Layouts that the mixture's kernels share: the cells of experts, the slots of tokens, and where a text is aligned.

A *cell* is what a learned weight belongs to; an expert's follows from its features, each of which falls into a bucket.
"""

from __future__ import annotations

import numpy as np

from lookahead.draft.recycled import BEST as PLACED
from lookahead.draft.recycled import KINDS
from lookahead.native.kernels import inlined

OWN, OTHER = 0, 1  # groups
ORDERS, COUNTS, SHARES, RANKS = 8, 7, 4, 4  # values of each feature of a cell
ALIGNED = ORDERS * 2 * COUNTS * SHARES * RANKS  # first cell of the aligned experts
HITS, MISSES, SEENS = 4, 4, 5
RECYCLED_CELLS = ALIGNED + HITS * 2 * ORDERS * MISSES  # first cell of the recycled experts
SKIP_CELLS = RECYCLED_CELLS + len(KINDS) * SEENS * SHARES * RANKS  # first cell of the expert that skips a token
CELLS = SKIP_CELLS + SEENS
PROMPT, OUTPUT, SESSION, RECYCLED = range(4)  # sources; tries follow

# Columns of a slot: one token that some expert proposes.
SLOT_TOKEN, SLOT_SOURCE, SLOT_MATCH, SLOT_OWN, SLOT_OTHER, SLOT_POSITION, SLOT_COUNT, SLOT_OFFERED, SLOT_RECYCLED = range(9)
P, BEST, COUNT, MOST = range(4)  # MOST: what one text alone counts
NEVER = ORDERS  # order bucket of a group that does not propose the token

# Columns of a text's trust: shares that its longest matches gave to emitted tokens, and what the mixture gave; latest share.
GAVE, MIXTURE_GAVE, LATEST = range(3)
# Columns of an aligned position: where the broken match would be now, its order when it broke, misses, hits since the last
# miss.
AT, BEFORE, MISSED, HIT = range(4)
BINARY = 14  # buckets of how far back a token stood
# Of each kind of key, what a rank counts in the number of a factor. There are PLACED ranks; one more: not among them.
RANKED = np.array([PLACED + 1, 0, 1, (PLACED + 1) ** 2])
UNRANKED = (PLACED + 1) ** 3 - 1


# Buckets are sums of comparisons: a chain of branches is mispredicted too often to be cheap.
@inlined
def order_bucket(order):
    """0, 1, 2, 3, 4-5, 6-8, 9-16, 17 and more."""
    return min(np.int64(order), np.int64(4)) + (order > 5) + (order > 8) + (order > 16)


@inlined
def _count_bucket(count):
    """1, 2, 3-4, 5-9, 10-29, 30-149, 150 and more; counts may be weighted."""
    return np.int64(count >= 1.5) + (count >= 2.5) + (count >= 4.5) + (count >= 9.5) + (count >= 29.5) + (count >= 149.5)


@inlined
def _share_bucket(share):
    """All, more than 70 %, more than 35 %, less."""
    return (share <= 0.999) + np.int64(share <= 0.7) + (share <= 0.35)


@inlined
def binary_bucket(number):
    """1 and the binary logarithm of a number of 1 or more; 0 of less."""
    return min(BINARY - 1, max(0, (np.float32(number).view(np.int32) >> 23) - 126))


@inlined
def cell_of(order, group, count, share, rank):
    """Cell of an expert. order: a bucket; count: occurrences, possibly weighted; share: of its most frequent successor."""
    features = ((order * 2 + group) * COUNTS + _count_bucket(count)) * SHARES + _share_bucket(share)
    return features * RANKS + min(rank, RANKS - 1)


@inlined
def aligned_cell(aligned, node, text, group):
    """Cell of an aligned expert."""
    hits, misses = min(aligned[node, text, HIT], HITS - 1), min(aligned[node, text, MISSED], MISSES - 1)
    return ALIGNED + ((hits * 2 + group) * ORDERS + order_bucket(aligned[node, text, BEFORE])) * MISSES + misses


@inlined
def _seen_bucket(seen):
    """1, 2-3, 4-9, 10-29, 30 and more."""
    return (seen >= 2) + np.int64(seen >= 4) + (seen >= 10) + (seen >= 30)


@inlined
def recycled_cell(kind, seen, share, rank):
    """Cell of what was recycled behind a key that came up that often. share: of the first candidate."""
    return RECYCLED_CELLS + ((kind * SEENS + _seen_bucket(seen)) * SHARES + _share_bucket(share)) * RANKS + min(rank, RANKS - 1)


@inlined
def skip_cell(tokens):
    """Cell of the expert that skips the last token and proposes that many different ones."""
    return SKIP_CELLS + _seen_bucket(tokens)
