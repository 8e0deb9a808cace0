"""The best few tokens behind each node, and the path along which a draft tree holds the best. In: scores on the CPU, of any
float type. Out: token ids and their scores, best first; tokens and nodes of paths. The kernels are in best_kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lookahead.forward.best_kernel import find, follow_floats, follow_halves


def best_tokens(logits: torch.Tensor, places: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [rows, most] token ids, float32 [rows, most] scores) of these rows of `logits`, [any, vocab], best first."""
    most = min(most, logits.shape[1])
    bits, magnitude = bits_of(logits)
    ids, found = np.empty((len(places), most), np.int32), np.empty((len(places), most), bits.dtype)
    find(bits, places, magnitude, ids, found)
    if logits.dtype == torch.bfloat16:  # the upper half of a float32
        return ids, (found.astype(np.int32) << 16).view(np.float32)
    return ids, found.view(np.float16).astype(np.float32) if logits.dtype == torch.float16 else found.view(np.float32)


def bits_of(logits: torch.Tensor) -> tuple[np.ndarray, np.integer[Any]]:
    """(int32 or int16 [any, vocab], the bits of scores; all of one but the sign)."""
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        logits = logits.float()
    if logits.dtype == torch.float32:
        return np.ascontiguousarray(logits.numpy()).view(np.int32), np.int32(0x7FFFFFFF)
    return logits.contiguous().view(torch.int16).numpy(), np.int16(0x7FFF)


def follow_in(dtype: torch.dtype) -> Callable[[int], None]:
    """Walks each draft tree from its root as long as it holds the best token behind the node (`DraftTree.follow`).

    It takes an address: see `best_kernel`. dtype: of scores, float32, bfloat16 or float16.
    """
    return follow_floats if dtype == torch.float32 else follow_halves
