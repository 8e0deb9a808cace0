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


@dataclasses.dataclass(frozen=True)
class TreeInputs:
    """input_ids, position_ids: int64 [1, nodes]; attention_mask: [1, 1, nodes, past + nodes], or one for each layer kind."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | dict[str, torch.Tensor]


def tree_inputs(tree: DraftTree, past: int, plan: MaskPlan, dtype: torch.dtype, device: torch.device) -> TreeInputs:
    """What the model is fed to score every node of `tree` behind `past` tokens that the cache holds."""
    lowest = torch.finfo(dtype).min
    full = torch.zeros(len(tree), past + len(tree), dtype=dtype, device=device)
    if len(tree) == 1:  # a plain step: nothing to hide
        ids, positions = torch.tensor([[int(tree.token_ids[0])], [past]], device=device)
    else:
        ids_and_positions, among_nodes = packed(tree.token_ids, tree.parents, past, lowest)
        ids, positions = torch.from_numpy(ids_and_positions).to(device)
        full[:, past:] = torch.from_numpy(among_nodes)
    masks = {
        kind: _narrowed(full, positions, past, window, plan.chunks[kind], lowest)[None, None]
        for kind, window in plan.windows.items()
    }
    return TreeInputs(ids[None], positions[None], masks if plan.by_type else next(iter(masks.values())))


@kernel
def packed(token_ids, parents, past, lowest):
    """(int64 [2, nodes]: token ids and positions; float32 [nodes, nodes]: 0 where the row's node sees the column's)."""
    nodes = len(parents)
    ids_and_positions = np.empty((2, nodes), np.int64)
    mask = np.full((nodes, nodes), np.float32(lowest))
    for node in range(nodes):
        parent = parents[node]
        ids_and_positions[0, node] = token_ids[node]
        ids_and_positions[1, node] = past
        if parent >= 0:
            ids_and_positions[1, node] = ids_and_positions[1, parent] + 1
            mask[node, : parent + 1] = mask[parent, : parent + 1]
        mask[node, node] = 0.0
    return ids_and_positions, mask


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
