"""How a step is packed: the kernels. In: tokens that slots bring and hold. Out: calls of attention, masks. See batch.py."""

from __future__ import annotations

import numpy as np

from lookahead.forward.tree_meta import first_seen
from lookahead.native.kernels import kernel

NO_LIMIT = 1 << 60
ALIGNED = 16  # a group's masks begin at a multiple of that many numbers, as kernels on GPUs want


@kernel
def pad_index(sizes, width, tokens):
    """(int64 [slots * width]: token of each query; int64 [tokens]: query of each token). Padding has any token, any query."""
    spread = np.zeros(len(sizes) * width, np.int64)
    gather = np.zeros(tokens, np.int64)
    token = 0
    for slot in range(len(sizes)):
        for query in range(sizes[slot]):
            gather[token] = slot * width + query
            spread[slot * width + query] = token
            token += 1
    return spread, gather


@kernel
def attention_masks(runs, parents, positions, sizes, pasts, shut, limited, window, chunk):
    """(Where the masks of each run begin, int64 [runs]: -1 where every query sees every key; float32, all masks, one behind the
    other: 0 where a query sees a key, else `shut`).

    A query at position p sees keys at p - window + 1 ... p within its block of `chunk` positions; a padding query, the first.
    limited: not all queries see all keys for these reasons alone.
    """
    begins, end = np.full(len(runs), -1), 0
    for run in range(len(runs)):
        first, last, width, length = runs[run]
        if limited or width > 1 or pasts[first:last].min() < pasts[first:last].max():
            begins[run] = end
            end += ((last - first) * width * length + ALIGNED - 1) // ALIGNED * ALIGNED
    masks, start = np.full(end, np.float32(shut), np.float32), 0
    for run in range(len(runs)):
        first_slot, last_slot, width, length = runs[run]
        at = begins[run]
        for slot in range(first_slot, last_slot):
            past = pasts[slot]
            for node in range(width if at >= 0 else 0):
                seen = masks[at : at + length]
                at += length
                if node >= sizes[slot]:
                    seen[0] = 0.0
                    continue
                position = positions[start + node]
                first = first_seen(position, window, chunk)
                seen[first:past] = 0.0
                ancestor = node
                while ancestor >= 0 and positions[start + ancestor] >= first:
                    seen[past + ancestor] = 0.0
                    ancestor = parents[start + ancestor]
            start += sizes[slot]
    return begins, masks


@kernel
def move(buffer, slots, sources, targets):
    """See `SlotCache.move`. buffer: int16 [buffers, slots, heads, capacity, values], with any content."""
    for number in range(buffer.shape[0]):
        for k in range(len(slots)):
            for head in range(buffer.shape[2]):
                for column in range(buffer.shape[4]):
                    buffer[number, slots[k], head, targets[k], column] = buffer[number, slots[k], head, sources[k], column]
