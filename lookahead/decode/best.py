"""The best few tokens behind each node. In: scores on the CPU, of any float type. Out: token ids and their scores, best first.

Floats of one sign are ordered as their bits are, so numbers are compared as integers, which a processor does many at a time
in any type. Blocks whose largest score cannot be among the best are not looked into.
"""

from __future__ import annotations

import numpy as np
import torch

from lookahead.trie.suffixes import inlined, kernel

BLOCK, FEW = 128, 16  # scores whose maximum is taken at once; of those that hold one of the best, so many


def best_tokens(logits: torch.Tensor, places: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [places, most] token ids, float32 [places, most] scores) of these rows of `logits`, [any, vocab], best first."""
    most = min(most, logits.shape[1])
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        logits = logits.float()
    bits = logits.contiguous().view(torch.int32 if logits.element_size() == 4 else torch.int16).numpy()
    ids, found = np.empty((len(places), most), np.int32), np.empty((len(places), most), bits.dtype)
    _find(bits, places, bits.dtype.type(np.iinfo(bits.dtype).max), ids, found)
    return ids, torch.from_numpy(found).view(logits.dtype).float().numpy()


@kernel
def _find(bits, places, magnitude, ids, found):
    """Fill ids and found, the bits of their scores. bits: integers [any, vocab]. magnitude: all bits but the sign."""
    most, vocabulary, whole = ids.shape[1], bits.shape[1], bits.shape[1] // BLOCK
    kept = np.empty(most, np.int64)
    for row in range(len(places)):
        values = bits[places[row]]
        kept[:] = -np.int64(magnitude) - 2
        for block in range(whole):
            top = values[block * BLOCK]
            for place in range(block * BLOCK, block * BLOCK + BLOCK):  # so many that the compiler compares several at a time
                top = max(top, values[place])
            if top > kept[most - 1] or top < 0:
                for begin in range(block * BLOCK, block * BLOCK + BLOCK, FEW):
                    top = values[begin]
                    for place in range(begin, begin + FEW):
                        top = max(top, values[place])
                    if top > kept[most - 1] or top < 0:
                        _look_into(values, begin, begin + FEW, magnitude, kept, ids[row], found[row])
        _look_into(values, whole * BLOCK, vocabulary, magnitude, kept, ids[row], found[row])


@inlined
def _look_into(values, begin, end, magnitude, kept, ids, found):
    """Take the best of the scores `begin` to `end` among those kept."""
    for place in range(begin, end):
        value = np.int64(values[place])
        if value < 0:
            value ^= np.int64(magnitude)
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
