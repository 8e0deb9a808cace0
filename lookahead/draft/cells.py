"""How experts, and the tokens that they propose, are told apart. In: features. Out: numbers of cells, factors and slots."""

from __future__ import annotations

import numpy as np

from lookahead.draft.arrays import HASHES, SLOTS
from lookahead.draft.recycled import BEST as PLACED
from lookahead.draft.recycled import KINDS
from lookahead.kernels import inlined

OWN, OTHER = 0, 1  # groups
ORDERS, COUNTS, SHARES, RANKS = 8, 7, 4, 4  # values of each feature of a cell
ALIGNED = ORDERS * 2 * COUNTS * SHARES * RANKS  # first cell of the aligned experts
HITS, MISSES, SEENS = 4, 4, 5
RECYCLED_CELLS = ALIGNED + HITS * 2 * ORDERS * MISSES  # first cell of the recycled experts
CELLS = RECYCLED_CELLS + len(KINDS) * SEENS * SHARES * RANKS
PROMPT, OUTPUT, SESSION, RECYCLED = range(4)  # sources; tries follow

# Columns of a slot: one token that some expert proposes.
SLOT_TOKEN, SLOT_SOURCE, SLOT_MATCH, SLOT_OWN, SLOT_OTHER, SLOT_PLACE, SLOT_COUNT, SLOT_OFFERED, SLOT_RECYCLED = range(9)
P, BEST, COUNT, MOST = range(4)  # MOST: what one text alone counts
NEVER = ORDERS  # order bucket of a group that does not propose the token

# Rescoring factors: by orders at which own and other propose a token and the longest order there is; by recency; by last token;
# by its ranks among what was recycled behind the last two tokens, the last one, and the two before it.
BY_ORDERS = 0
BY_RECENCY = BY_ORDERS + (NEVER + 1) * (NEVER + 1) * ORDERS
RECENCIES = 24
BY_LAST = BY_RECENCY + (NEVER + 1) * RECENCIES
LAST_TOKENS = 1024
BY_RECYCLED = BY_LAST + 4 * LAST_TOKENS
# Of each kind of key, what a rank counts in a factor's number. There are PLACED ranks; one more: not among them.
RANKED = np.array([0, PLACED + 1, 0, 1, (PLACED + 1) ** 2])
UNPLACED = (PLACED + 1) ** 3 - 1
FACTORS = BY_RECYCLED + 4 * (UNPLACED + 1)

# Columns of a text's trust: shares that its longest matches gave to what was said, and what the mixture gave; latest share.
GAVE, MIXTURE_GAVE, LATEST = range(3)


# Buckets are sums of comparisons: a chain of branches is mispredicted too often to be cheap.
@inlined
def order_bucket(order):
    """0, 1, 2, 3, 4-5, 6-8, 9-16, 17 and more."""
    return min(np.int64(order), np.int64(4)) + (order > 5) + (order > 8) + (order > 16)


@inlined
def _count_bucket(count):
    """1, 2, 3-4, 5-9, 10-29, 30-149, 150 and more; counts may be weighted."""
    return (count >= 1.5) + (count >= 2.5) + (count >= 4.5) + (count >= 9.5) + (count >= 29.5) + (count >= 149.5)


@inlined
def _share_bucket(share):
    """All, more than 70 %, more than 35 %, less."""
    return (share <= 0.999) + np.int64(share <= 0.7) + (share <= 0.35)


@inlined
def recency_bucket(distance):
    """2 and the binary logarithm of a distance of 1 or more."""
    return min(RECENCIES - 1, (np.float32(distance).view(np.int32) >> 23) - 125)


@inlined
def cell_of(order, group, count, share, rank):
    """Cell of an expert. order: a bucket; count: places, possibly weighted; share: of its commonest successor."""
    features = ((order * 2 + group) * COUNTS + _count_bucket(count)) * SHARES + _share_bucket(share)
    return features * RANKS + min(rank, RANKS - 1)


@inlined
def recycled_cell(kind, seen, share, rank):
    """Cell of what was recycled behind a key that came up so often. share: of the first candidate."""
    seen = (seen >= 2) + np.int64(seen >= 4) + (seen >= 10) + (seen >= 30)
    return RECYCLED_CELLS + ((kind * SEENS + seen) * SHARES + _share_bucket(share)) * RANKS + min(rank, RANKS - 1)


@inlined
def slot_of(scratch, stamp, token):
    """The slot of a token, made if need be; when all are taken, one behind them that nobody reads.

    Slots are unsigned, as every index that is used often: a signed one may count from the end, and is checked for it.
    """
    key = (stamp << 40) | token
    h = np.uint64(token * 40503) & np.uint64(HASHES - 1)
    while scratch.hashes[h] != key:
        if scratch.hashes[h] >> 40 != stamp:
            slot = np.uint64(scratch.counters[1])
            if slot < np.uint64(SLOTS):
                scratch.counters[1] += 1
                scratch.hashes[h], scratch.numbers[h] = key, slot
            slots, values = scratch.slots, scratch.values
            slots[slot, SLOT_TOKEN], slots[slot, SLOT_PLACE], slots[slot, SLOT_COUNT] = token, -1, 0
            slots[slot, SLOT_OWN], slots[slot, SLOT_OTHER] = NEVER, NEVER
            slots[slot, SLOT_RECYCLED] = UNPLACED
            values[slot, P], values[slot, BEST], values[slot, COUNT] = 0, 0, 0
            return slot
        h = (h + np.uint64(1)) & np.uint64(HASHES - 1)
    return np.uint64(scratch.numbers[h])
