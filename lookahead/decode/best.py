"""The best few tokens behind each node. In: scores on the CPU, of any float type. Out: token ids and their scores, best first.

Floats of one sign are ordered as their bits are, so numbers are compared as integers, which a processor does many at a time
in any type. Blocks whose largest score cannot be among the best are not looked into.
"""

from __future__ import annotations

import numpy as np
import torch

from lookahead.trie.suffixes import inlined, kernel

BLOCK = 128  # scores whose maximum is taken at once
NOTHING = np.iinfo(np.int64).min


def best_tokens(logits: torch.Tensor, places: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [places, most] token ids, float32 [places, most] scores) of these rows of `logits`, [any, vocab], best first."""
    most = min(most, logits.shape[1])
    bits = logits.contiguous().view(torch.int32 if logits.element_size() == 4 else torch.int16).numpy()
    ids, scores = np.empty((len(places), most), np.int32), np.empty((len(places), most), bits.dtype)
    _find(
        bits, places, np.empty(-(-bits.shape[1] // BLOCK), bits.dtype), bits.dtype.type(np.iinfo(bits.dtype).max), ids, scores
    )
    return ids, torch.from_numpy(scores).view(logits.dtype).float().numpy()


@kernel
def _find(bits, places, highest, magnitude, ids, scores):
    """Fill ids and scores. bits: integers [any, vocab]. highest: room for one of each block. magnitude: all bits but the sign."""
    most, vocabulary, whole = ids.shape[1], bits.shape[1], bits.shape[1] // BLOCK
    kept = np.empty(most, np.int64)
    for row in range(len(places)):
        values = bits[places[row]]
        for block in range(whole):  # the number of turns is known, so the compiler compares many at a time
            top = values[block * BLOCK]
            for place in range(block * BLOCK, block * BLOCK + BLOCK):
                top = max(top, values[place])
            highest[block] = top
        if whole < len(highest):
            highest[whole] = values[whole * BLOCK :].max()
        kept[:] = NOTHING
        for block in range(len(highest)):
            if highest[block] < 0:  # all are negative: of those, the least is the largest
                least = values[block * BLOCK : (block + 1) * BLOCK].min()
                highest[block] = least ^ magnitude
            if highest[block] > kept[most - 1]:
                _insert(kept, np.int64(highest[block]))
        enough = kept[most - 1]  # so many scores are as large as this one, or there are not as many blocks
        kept[:] = NOTHING
        for block in range(len(highest)):
            if highest[block] < enough or highest[block] <= kept[most - 1]:
                continue
            for place in range(block * BLOCK, min(vocabulary, (block + 1) * BLOCK)):
                value = np.int64(values[place])
                if value < 0:
                    value ^= np.int64(magnitude)
                if value > kept[most - 1]:
                    rank = _insert(kept, value)
                    for k in range(most - 1, rank, -1):
                        ids[row, k], scores[row, k] = ids[row, k - 1], scores[row, k - 1]
                    ids[row, rank], scores[row, rank] = place, values[place]


@inlined
def _insert(kept, value):
    """Put a value that is larger than the last of `kept` where it belongs, behind those that equal it; returns where."""
    rank = len(kept) - 1
    while rank > 0 and value > kept[rank - 1]:
        kept[rank] = kept[rank - 1]
        rank -= 1
    kept[rank] = value
    return rank
