"""From the draft trees of many slots to one packed row: token ids, positions, positions in the cache, attention masks.

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

from lookahead.budget.attention import runs_of
from lookahead.budget.profile import Work
from lookahead.budget.shapes import bucket, evened
from lookahead.draft.tree import TreeBatch
from lookahead.forward.batch_kernel import NO_LIMIT, attention_masks, pad_index
from lookahead.forward.tree_meta import FIELDS, arrange

SMALL = 64  # tokens that each slot of a step of few shapes brings at most
MOST_TOKENS = 256  # of a step of few shapes, where attention is one call of lookahead::tree_attention
KEYS = 256  # keys of such a step come in multiples of that many
ALL_AT_ONCE = 1e18  # what a call of attention costs that all slots are to share, see `runs_of`


@dataclasses.dataclass(frozen=True)
class MaskPlan:
    """Masks that a model wants.

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

    @functools.cached_property
    def limits(self) -> np.ndarray:
        """int64 [2, kinds]: windows and chunks, NO_LIMIT where there are none."""
        return np.array([[limit or NO_LIMIT for limit in limits.values()] for limits in (self.windows, self.chunks)])


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
    """The input of the model in one step.

    inputs: int64 [4, tokens], of each token its id, its position, and the slot and position that its keys and values go to.
    kept: of how many tokens, the first ones, these are kept; those behind them only fill it up. groups: see Group; in the order
    of the tokens. meta: instead of these, for lookahead::tree_attention, what tokens see: int32 [kinds of layers, tokens,
    FIELDS] (tree_meta.py). one: where only one slot brings tokens, its number and their positions.
    """

    inputs: torch.Tensor
    kept: int
    groups: list[Group] = dataclasses.field(default_factory=list)
    one: tuple[int, slice] | None = None
    meta: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.inputs.shape[1]

    @functools.cached_property
    def input_ids(self) -> torch.Tensor:
        """int64 [1, tokens]"""
        return self.inputs[:1]

    @functools.cached_property
    def position_ids(self) -> torch.Tensor:
        """int64 [1, tokens]"""
        return self.inputs[1:2]

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        """int64 [tokens kept]"""
        return self.inputs[2, : self.kept]

    @functools.cached_property
    def cache_positions(self) -> torch.Tensor:
        """int64 [tokens kept]"""
        return self.inputs[3, : self.kept]

    @functools.cached_property
    def offsets(self) -> torch.Tensor:
        """int64 [tokens]: what lies before each token, for models that find positions by counting up from there."""
        return self.inputs[1] - torch.arange(self.tokens, device=self.inputs.device)


def pack(
    trees: TreeBatch,
    pasts: Sequence[int],
    plan: MaskPlan,
    dtype: torch.dtype,
    device: torch.device,
    spare: int | None = None,
    even: bool = False,
    call: float = 0.0,
    by_op: bool = False,
) -> Pack:
    """Pack the tree of each slot behind the `pasts` tokens that the cache holds of it.

    spare: a slot that nobody uses. If given, small steps get one of a few shapes, as CUDA graphs and compiled kernels want: all
    slots share one call of attention; tokens, queries and keys are padded to a bucket, and padding tokens go to this slot.
    even: a step that is not of these shapes is filled up, at the end, see `evened`. call: see `runs_of`.
    by_op: attention is computed by lookahead::tree_attention, which takes any trees in one call: only tokens are padded then.
    """
    sizes, held, total = trees.sizes.tolist(), np.array(pasts), len(trees.token_ids)
    if by_op:
        inputs, meta = step_inputs(trees, pasts, plan, spare, even)
        kept = total if spare is None else inputs.shape[1]
        if device.type != "cpu":
            return pack_of(upload(block_of(inputs, meta), device), inputs.shape[1], len(meta), kept)
        return Pack(torch.from_numpy(inputs), kept, one=_one_slot(sizes, pasts, kept), meta=torch.from_numpy(meta))
    bucketed = spare is not None and max(sizes) <= SMALL
    filled = bucket(total) if bucketed else evened(total) if even else total
    inputs, _ = _laid_out(trees, held, filled, spare, np.full((2, 1), NO_LIMIT))
    runs = _one_run(sizes, pasts, bucketed) if bucketed or len(sizes) == 1 else runs_of(trees.sizes, held, call)
    masks = _masks((runs, trees.parents, inputs[1], trees.sizes, held), plan, dtype, device, bucketed)
    groups, start = [], 0
    for (first, last, width, length), seen in zip(runs.tolist(), masks, strict=True):
        end = filled if bucketed else start + sum(sizes[first:last])
        spread = gather = None
        if bucketed or end - start < width * (last - first):
            spread, gather = (upload(a, device) for a in pad_index(trees.sizes[first:last], width, end - start))
        groups.append(Group(slice(first, last), width, length, start, end, seen, spread, gather))
        start = end
    kept = filled if bucketed else total
    return Pack(upload(inputs, device), kept, groups, _one_slot(sizes, pasts, kept))


def step_inputs(
    trees: TreeBatch, pasts: Sequence[int], plan: MaskPlan, spare: int | None, even: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [4, tokens]: ids, positions, slots and cache positions; int32 [kinds, tokens, FIELDS]) of a step whose attention
    is lookahead::tree_attention. See `pack`; steps of up to MOST_TOKENS get one of 16 sizes where there is a spare slot."""
    total = len(trees.token_ids)
    small = spare is not None and total <= MOST_TOKENS
    filled = bucket(total) if small else evened(total) if even or spare is not None else total
    return _laid_out(trees, pasts, filled, spare, plan.limits)


def block_of(inputs: np.ndarray, meta: np.ndarray) -> np.ndarray:
    """uint8: both, one behind the other, to be copied at once. See `step_inputs`."""
    return np.concatenate([inputs.reshape(-1).view(np.uint8), meta.reshape(-1).view(np.uint8)])


def pack_of(block: torch.Tensor, tokens: int, kinds: int, kept: int) -> Pack:
    """The pack of a block that lies on a device (`block_of`). kept: how many tokens are."""
    numbers = 4 * tokens * 8
    meta = block[numbers:].view(torch.int32).view(kinds, tokens, FIELDS)
    return Pack(block[:numbers].view(torch.int64).view(4, tokens), kept, meta=meta)


def _laid_out(
    trees: TreeBatch, pasts: Sequence[int] | np.ndarray, filled: int, spare: int | None, limits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """See `step_inputs`. limits: as `MaskPlan.limits`."""
    inputs, meta = np.empty((4, filled), np.int64), np.zeros((len(limits[0]), filled, FIELDS), np.int32)
    arrange(trees.token_ids, trees.parents, trees.sizes, np.asarray(pasts), *limits, spare or 0, inputs, meta)
    return inputs, meta


def _one_slot(sizes: Sequence[int], pasts: Sequence[int], kept: int) -> tuple[int, slice] | None:
    """See `Pack.one`."""
    if sum(map(bool, sizes)) != 1 or kept != sum(sizes):
        return None
    slot = next(slot for slot, size in enumerate(sizes) if size)
    return slot, slice(pasts[slot], pasts[slot] + kept)


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Upload to a device, without waiting for what it computes."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def work_of(runs: np.ndarray, sizes: np.ndarray, pasts: np.ndarray) -> Work:
    """Return what the runs of `runs_of` take."""
    slots, width = runs[:, 1] - runs[:, 0], runs[:, 2]
    width = width + width % 2 * ((width > 1) & (slots > 1))
    keys = slots * [pasts[first:last].max() for first, last, *_ in runs]
    return Work(int(keys.sum()), int((keys * width).sum()), int((slots * width).sum() - sizes.sum()), len(runs) - 1)


def _one_run(sizes: Sequence[int], pasts: Sequence[int], bucketed: bool) -> np.ndarray:
    """Make the runs of `runs_of`, of slots that all share a call. bucketed: in a step of few shapes."""
    width, length = max(sizes), max(map(sum, zip(sizes, pasts, strict=True)))
    if bucketed:
        width, length = bucket(width), -(-length // KEYS) * KEYS
    return np.array([[0, len(sizes), width, length]])


def _masks(
    args: tuple[np.ndarray, ...], plan: MaskPlan, dtype: torch.dtype, device: torch.device, bucketed: bool
) -> list[dict[str, torch.Tensor | None]]:
    """Make for each run the masks of each kind of layer, see `Group`. args: the first arguments of `attention_masks`. The
    others: see `pack`.
    """
    longest = int(args[0][:, 3].max())
    limits = [tuple(each if each < longest else NO_LIMIT for each in of_kind) for of_kind in plan.limits.T.tolist()]
    made = {each: _masks_within(each, args, dtype, device, bucketed) for each in dict.fromkeys(limits)}
    return [dict(zip(plan.windows, masks, strict=True)) for masks in zip(*map(made.__getitem__, limits), strict=True)]


def _masks_within(
    limits: tuple[int, ...], args: tuple[np.ndarray, ...], dtype: torch.dtype, device: torch.device, bucketed: bool
) -> list[torch.Tensor | None]:
    """Make the masks of each run. limits: how far back a layer sees, and the size of the blocks that it sees within."""
    runs, parents, *_ = args
    limited = bucketed or limits != (NO_LIMIT, NO_LIMIT)
    if not limited and len(parents) == len(runs):  # one token of each slot, which go alone
        return [None] * len(runs)
    begins, masks_of_runs = attention_masks(*args, torch.finfo(dtype).min, limited, *limits)
    masks = upload(masks_of_runs, device).to(dtype)
    return [
        None if at < 0 else masks.as_strided((last - first, 1, width, length), (width * length, width * length, length, 1), at)
        for at, (first, last, width, length) in zip(begins.tolist(), runs.tolist(), strict=True)
    ]
