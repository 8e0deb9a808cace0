"""From a draft tree to what the model is fed: token ids, positions and attention masks. Knows nothing of caches or logits.

A node sees the prompt, the accepted tokens, its own ancestors and itself; its position is its depth behind the accepted
tokens. Masks are additive (0 or the dtype's minimum), which is right for sdpa and eager attention alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from lookahead.draft.tree import DraftTree
from lookahead.trie.suffixes import kernel


@dataclasses.dataclass(frozen=True)
class MaskPlan:
    """Which masks a model wants.

    windows: of each kind of layer, how far back it sees in tokens (None: everything).
    chunks: of each kind of layer, the size of the blocks of positions it sees only within (None: no blocks).
    by_type: the model takes {kind: mask}; otherwise it takes one mask.
    """

    windows: dict[str, int | None]
    chunks: dict[str, int | None]
    by_type: bool

    @staticmethod
    def of(config: Any) -> MaskPlan:
        """Read off a transformers config (its text part)."""
        types = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if not types:
            return MaskPlan({"all": window}, {"all": None}, by_type=False)
        kinds = sorted(set(types))
        return MaskPlan(
            {kind: window if "sliding" in kind else None for kind in kinds},
            {kind: getattr(config, "attention_chunk_size", None) if "chunk" in kind else None for kind in kinds},
            by_type=True,
        )


@kernel
def depths_and_ancestors(parents):
    """(depths int64 [nodes], visible bool [nodes, nodes]): visible[i, j] if j is i or an ancestor of i."""
    n = len(parents)
    depths = np.zeros(n, np.int64)
    visible = np.zeros((n, n), np.bool_)
    for node in range(n):
        parent = parents[node]
        if parent >= 0:
            depths[node] = depths[parent] + 1
            visible[node, : parent + 1] = visible[parent, : parent + 1]
        visible[node, node] = True
    return depths, visible


@dataclasses.dataclass(frozen=True)
class TreeInputs:
    """input_ids, position_ids: int64 [1, nodes]; attention_mask: [1, 1, nodes, past + nodes], or one for each layer kind."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | dict[str, torch.Tensor]


def tree_inputs(tree: DraftTree, past: int, plan: MaskPlan, dtype: torch.dtype, device: torch.device) -> TreeInputs:
    """What the model is fed to score every node of `tree` behind `past` tokens that the cache holds."""
    depths, visible = depths_and_ancestors(tree.parents)
    positions = past + depths
    input_ids = torch.from_numpy(tree.token_ids.astype(np.int64))[None].to(device)
    position_ids = torch.from_numpy(positions)[None].to(device)
    hidden = torch.from_numpy(~visible).to(device)
    lowest = torch.finfo(dtype).min
    full = torch.zeros(len(tree), past + len(tree), dtype=dtype, device=device)
    full[:, past:].masked_fill_(hidden, lowest)
    masks = {
        kind: _narrowed(full, position_ids[0], past, window, plan.chunks[kind], lowest)[None, None]
        for kind, window in plan.windows.items()
    }
    return TreeInputs(input_ids, position_ids, masks if plan.by_type else next(iter(masks.values())))


def _narrowed(
    full: torch.Tensor, positions: torch.Tensor, past: int, window: int | None, chunk: int | None, lowest: float
) -> torch.Tensor:
    """`full` with what lies outside a layer's window or chunk hidden as well."""
    longest = full.shape[1]
    if (window is None or longest <= window) and (chunk is None or longest <= chunk):
        return full
    seen = torch.cat([torch.arange(past, device=positions.device), positions])  # position of each key
    outside = torch.zeros_like(full, dtype=torch.bool)
    if window is not None:
        outside |= positions[:, None] - seen[None, :] >= window
    if chunk is not None:
        outside |= positions[:, None] // chunk != seen[None, :] // chunk
    return full.masked_fill(outside, lowest)
