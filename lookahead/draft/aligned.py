"""Where a match that has broken off would be now. In: the places of a context and the next token. Out: its aligned places.

Text that was copied with one word changed goes on where the broken match would be: an expert of its own (mixture.py).
"""

from __future__ import annotations

import numpy as np

from lookahead.draft.cells import ALIGNED, HITS, MISSES, ORDERS, order_bucket
from lookahead.draft.own_text import TOKEN
from lookahead.draft.places import END, HIGH, LOW, ORDER, PREFIX, suffix_at, token_at
from lookahead.kernels import inlined

# Columns of an aligned place: where the broken match would be now, its order when it broke, misses, hits since the last miss.
AT, BEFORE, MISSED, HIT = range(4)
ALIGN_FROM = 3  # match length from which a broken match is kept
ALIGN_MOST = 4  # places that such a match may have had


@inlined
def aligned_cell(aligned, node, text, group):
    """Cell of an aligned expert."""
    hits, misses = min(aligned[node, text, HIT], HITS - 1), min(aligned[node, text, MISSED], MISSES - 1)
    return ALIGNED + ((hits * 2 + group) * ORDERS + order_bucket(aligned[node, text, BEFORE])) * MISSES + misses


@inlined
def move_aligned(texts, steps, made, aligned, used, node, own, own_match, own_place, token, moved, child):
    """moved[child]: the aligned places behind `token`, from those of `node` and its steps, made as far as they were needed.

    A match of ALIGN_FROM tokens or more that the token breaks leaves an aligned place; one that goes on removes it.
    """
    for k in range(used + 1):
        text = k if k < used else len(texts)  # the own text stands last
        at, missed = aligned[node, text, AT], aligned[node, text, MISSED]
        broken_at, order, goes_on = np.int64(-1), np.int64(0), False
        if k < used:
            if made[node, text, 0] > 0:
                low, high = steps[node, text, 0, LOW], steps[node, text, 0, HIGH]
                order, prefix = steps[node, text, 0, ORDER], steps[node, text, 0, PREFIX]
                if order >= ALIGN_FROM and high - low <= ALIGN_MOST:
                    for rank in range(low, high):
                        goes_on = goes_on or token_at(texts, text, suffix_at(texts, text, rank) + prefix) == token
                    broken_at = suffix_at(texts, text, low) + prefix
                    if token_at(texts, text, broken_at) == END:  # the document has ended, the match is not broken
                        broken_at = np.int64(-1)
        elif own_match >= ALIGN_FROM and own_place + 1 < own.length:
            goes_on = own.log[TOKEN, own_place + 1] == token
            broken_at, order = own_place + 1, own_match
        hits = np.int64(0)
        if broken_at >= 0:
            missed = missed + 1 if at >= 0 and at + 1 == broken_at else np.int64(1)
            at = np.int64(-1) if goes_on else broken_at
        elif at >= 0:
            at, order = at + 1, aligned[node, text, BEFORE]
            if k < used:
                expected = token_at(texts, text, at)
            else:
                expected = np.int64(own.log[TOKEN, at]) if at < own.length else END
            hits = aligned[node, text, HIT] + 1 if expected == token else np.int64(0)
            missed += expected != token
            if expected == END or missed >= MISSES:
                at = np.int64(-1)
        moved[child, text, AT], moved[child, text, BEFORE] = at, order
        moved[child, text, MISSED], moved[child, text, HIT] = missed, hits
