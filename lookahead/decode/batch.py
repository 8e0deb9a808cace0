"""From the draft trees of many slots to one packed row: token ids, positions, places in the cache, attention masks.

All new tokens of all slots stand in one row, so linear layers do no padded work; only attention sees slots side by side. A node
sees its slot's earlier tokens, its own ancestors and itself; its position is its depth behind the earlier tokens. Masks are
additive (0 or the dtype's minimum), which is right for sdpa and eager attention alike. Knows nothing of caches or logits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lookahead.budget.cost import bucket, evened
from lookahead.budget.profile import SPARE, WASTE
from lookahead.draft.tree import DraftTree
from lookahead.kernels import kernel

NO_LIMIT = 1 << 60
SMALL = 64  # tokens that each slot of a step of few shapes brings at most
KEYS = 256  # keys of such a step come in multiples of so many


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

    def first_seen(self, kind: str, position: int) -> int:
        """The first position that the query at `position` sees in layers of this kind."""
        window, chunk = self.windows[kind], self.chunks[kind]
        return max(0, position - window + 1 if window else 0, position // chunk * chunk if chunk else 0)


@dataclasses.dataclass(slots=True)
class Group:
    """Neighbouring slots that share one call of attention.

    slots: theirs. width: queries of each, padding included. length: keys of each. start, end: their tokens in the pack.
    masks: of each kind of layer, [slots, 1, width, length]; None where every query sees every key.
    spread: int64 [slots * width], the token in the pack (from `start`) of each query; None if all slots bring `width` tokens.
    gather: int64 [end - start], where each token stands among the queries; None likewise.
    """

    slots: slice
    width: int
    length: int
    start: int
    end: int
    masks: dict[str, torch.Tensor | None]
    spread: torch.Tensor | None
    gather: torch.Tensor | None


@dataclasses.dataclass
class Pack:
    """What the model is fed in one step.

    input_ids, position_ids: int64 [1, tokens]. slots, places: int64 [tokens kept], where each token's keys and values go; at
    the end there may be tokens that only fill it up, of which nothing is kept.
    groups: see Group; in the order of the tokens. one: where only one slot brings tokens, its number and their places.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor
    groups: list[Group]
    one: tuple[int, slice] | None

    @functools.cached_property
    def offsets(self) -> torch.Tensor:
        """int64 [tokens]: what lies before each token, for models that find positions by counting up from there."""
        positions = self.position_ids[0]
        return positions - torch.arange(len(positions), device=positions.device)


def pack(
    trees: Sequence[DraftTree | None],
    pasts: Sequence[int],
    plan: MaskPlan,
    dtype: torch.dtype,
    device: torch.device,
    spare: int | None = None,
    even: bool = False,
) -> Pack:
    """Pack the tree of each slot behind the `pasts` tokens that the cache holds of it. None: nothing new in this slot.

    spare: a slot that nobody uses. If given, small steps get one of a few shapes, as CUDA graphs and compiled kernels want: all
    slots share one call of attention; tokens, queries and keys are padded to a bucket, and padding tokens go to this slot.
    even: a step that is not of these shapes is filled up, at the end, as `evened` says.
    """
    sizes = [0 if tree is None else len(tree) for tree in trees]
    total = sum(sizes)
    bucketed = spare is not None and max(sizes) <= SMALL
    filled = bucket(total) if bucketed else evened(total) if even else total
    fed = np.zeros((4, filled), np.int64)  # ids, positions, slots, places
    shown = [tree for tree in trees if tree is not None]
    parents = shown[0].parents if len(shown) == 1 else np.concatenate([tree.parents for tree in shown])
    fed[0, :total] = shown[0].token_ids if len(shown) == 1 else np.concatenate([tree.token_ids for tree in shown])
    fed[2, total:] = spare or 0
    _place(parents, np.array(sizes), np.array(pasts), fed)
    start, groups, runs = 0, [], [(0, len(sizes))] if bucketed else runs_of(sizes)
    for first, last in runs:
        end = start + sum(sizes[first:last])
        told = (parents[start:end], fed[1, start:end], first, slice(start, filled if bucketed else end))
        groups.append(_group(*told, sizes[first:last], pasts[first:last], plan, dtype, device, bucketed))
        start = end
    ids, positions, slots, places = upload(fed, device)
    if not bucketed:
        slots, places = slots[:total], places[:total]
    one = None
    if len(shown) == 1 and not bucketed:
        slot = runs[0][0]
        one = slot, slice(pasts[slot], pasts[slot] + total)
    return Pack(ids[None], positions[None], slots, places, groups, one)


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """To a device, without waiting for what it computes."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def runs_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last + 1) of the slots that share a call of attention: neighbours whose padding costs less than a call.

    sizes: tokens that each slot brings; those that bring none are left out.

    Example: sizes 1, 1, 256, 0, 4 become (0, 2), (2, 3), (4, 5).
    """
    runs: list[tuple[int, int]] = []
    tokens = widest = 0
    for slot, size in enumerate(sizes):
        if not size:
            continue
        joined = bool(runs) and runs[-1][1] == slot
        if joined:
            padded = (slot + 1 - runs[-1][0]) * max(widest, size)
            joined = padded <= WASTE * (tokens + size) + SPARE
        if joined:
            runs[-1] = (runs[-1][0], slot + 1)
            tokens, widest = tokens + size, max(widest, size)
        else:
            runs.append((slot, slot + 1))
            tokens = widest = size
    return runs


def _group(
    parents: np.ndarray,
    positions: np.ndarray,
    first: int,
    own: slice,
    sizes: Sequence[int],
    pasts: Sequence[int],
    plan: MaskPlan,
    dtype: torch.dtype,
    device: torch.device,
    bucketed: bool,
) -> Group:
    """The group of the slots from `first` on, of these sizes and pasts; `own`: their tokens in the pack, padding included."""
    last, width = first + len(sizes), max(sizes)
    length = max(past + size for past, size in zip(pasts, sizes, strict=True))
    if bucketed:
        width, length = bucket(width), -(-length // KEYS) * KEYS
    spread = gather = None
    if bucketed or len(parents) < width * len(sizes):
        spread, gather = (upload(a, device) for a in _spread(np.array(sizes), width, own.stop - own.start))
    made: dict[tuple[int, int], torch.Tensor | None] = {}
    masks = {}
    for kind, window in plan.windows.items():
        chunk = plan.chunks[kind]
        limits = (window if window and length > window else NO_LIMIT, chunk if chunk and length > chunk else NO_LIMIT)
        if limits not in made:
            sees_all = width == 1 and min(pasts) == max(pasts) and limits == (NO_LIMIT, NO_LIMIT) and not bucketed
            made[limits] = None
            if not sees_all:
                mask = np.full((len(sizes), 1, width, length), torch.finfo(dtype).min, np.float32)
                _open(mask, parents, positions, np.array(sizes), np.array(pasts), *limits)
                made[limits] = upload(mask, device).to(dtype)
        masks[kind] = made[limits]
    return Group(slice(first, last), width, length, own.start, own.stop, masks, spread, gather)


@kernel
def _place(parents, sizes, pasts, fed):
    """Fill positions, slots and places of `fed`, int64 [4, tokens]. parents: within each tree, trees one after the other."""
    token = 0
    for slot in range(len(sizes)):
        start = token
        for node in range(sizes[slot]):
            parent = parents[token]
            fed[1, token] = fed[1, start + parent] + 1 if parent >= 0 else pasts[slot]
            fed[2, token] = slot
            fed[3, token] = pasts[slot] + node
            token += 1


@kernel
def _spread(sizes, width, tokens):
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
def _open(mask, parents, positions, sizes, pasts, window, chunk):
    """Write 0 where a query sees a key. mask: float32 [slots, 1, width, length].

    A query at position p sees keys at p - window + 1 ... p within its block of `chunk` positions; a padding query, the first.
    """
    start = 0
    for slot in range(len(sizes)):
        past = pasts[slot]
        for node in range(sizes[slot]):
            seen = mask[slot, 0, node]
            position = positions[start + node]
            first = max(0, position - window + 1, position // chunk * chunk)
            seen[first:past] = 0.0
            ancestor = node
            while ancestor >= 0 and positions[start + ancestor] >= first:
                seen[past + ancestor] = 0.0
                ancestor = parents[start + ancestor]
        for query in range(sizes[slot], mask.shape[2]):
            mask[slot, 0, query, 0] = 0.0
        start += sizes[slot]
