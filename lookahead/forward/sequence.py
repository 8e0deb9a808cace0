"""One sequence in the model's cache, for models whose sequences cannot be packed into one forward.

tree and chain modes keep their own buffers (kv_cache.py) and drop what was rejected. A recurrent state cannot drop anything:
replay mode tries a draft on a copy of the state, and what was accepted of it is prefilled with the next forward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lookahead.draft.tree import DraftTree, side_by_side
from lookahead.forward.backends import without_cudnn
from lookahead.forward.batch import pack
from lookahead.forward.kv_cache import SequenceCache
from lookahead.forward.target import TargetModel

LAST_ONLY = {"logits_to_keep": 1}
MOST_PENDING = 16  # accepted tokens that wait for the next forward


class BufferState:
    """Trees (or chains) over buffers that are written in place. capacity: tokens to make room for; it grows where needed."""

    def __init__(self, target: TargetModel, capacity: int):
        self.target = target
        self.cache = SequenceCache()
        self._capacity = capacity

    @without_cudnn()
    def forward(self, tree: DraftTree, every: bool) -> torch.Tensor:
        """Scores [nodes, vocab] of the token after each node of `tree`, whose root is the next token to prefill.

        every: all of them are wanted; else the last, perhaps no others are computed. In chain mode, at the beginning of a text
        and where not all are wanted, `tree` must be a chain.
        """
        target, past = self.target, self.cache.past
        self.cache.make_room(max(self._capacity, past + len(tree)))
        if target.mode == "chain" or past == 0 or not every:
            assert tree.is_chain()
            extra = None if every or "logits_to_keep" not in target.arguments else LAST_ONLY
            return _feed(target, tree.token_ids, past, self.cache, extra)[0]
        packed = pack(side_by_side([tree], ["all"]), [past], target.mask_plan, target.dtype, target.device)
        masks = {
            kind: torch.zeros(1, 1, len(tree), past + len(tree), dtype=target.dtype, device=target.device)
            if mask is None
            else mask
            for kind, mask in packed.groups[0].masks.items()
        }
        self.cache.offsets = packed.offsets
        output = target.model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=masks if target.mask_plan.by_type else next(iter(masks.values())),
            use_cache=True,
            **{target.state_name: self.cache},
        )
        self.cache.offsets = None
        logits: torch.Tensor = output.logits[0]
        return logits

    def keep(self, nodes: Sequence[int]) -> None:
        """Keep the keys and values of these nodes of the last tree (a path from its root); drop the others."""
        self.cache.keep(nodes)


class ReplayState:
    """Chains over a state that can only go forward."""

    def __init__(self, target: TargetModel):
        self.target = target
        self._state: Any = None  # the model makes it
        self._past = 0  # tokens that it has prefilled
        self._pending: list[int] = []  # kept tokens that it has not
        self._trial: Any = None
        self._tried: list[int] = []  # prefilled by `_trial` on top

    def forward(self, tree: DraftTree, every: bool) -> torch.Tensor:
        """See `BufferState.forward`; chains only."""
        assert tree.is_chain()
        if len(self._pending) > MOST_PENDING:
            _, self._state = _feed(self.target, self._pending, self._past, self._state)
            self._past += len(self._pending)
            self._pending = []
        certain = len(tree) == 1  # a root is always kept
        state = self._state if certain else copy.deepcopy(self._state)
        self._tried = [*self._pending, *tree.token_ids.tolist()]
        logits, self._trial = _feed(self.target, self._tried, self._past, state)
        return logits[len(self._pending) :]

    def keep(self, nodes: Sequence[int]) -> None:
        """See `BufferState.keep`."""
        kept = self._tried[: len(self._pending) + len(nodes)]
        if len(kept) == len(self._tried):
            self._state, self._pending = self._trial, []
            self._past += len(kept)
        else:
            self._pending = kept
        self._trial = None


@without_cudnn()
def _feed(
    target: TargetModel, token_ids: Sequence[int] | np.ndarray, past: int, state: Any, extra: dict[str, Any] | None = None
) -> tuple[torch.Tensor, Any]:
    """(scores [tokens, vocab] by the model's own causal mask, its state after them). state: after `past` tokens; None: new."""
    ids = torch.from_numpy(np.asarray(token_ids, np.int64))[None].to(target.device)
    arguments = {**(extra or {}), target.state_name: state}
    if "position_ids" in target.arguments:
        arguments["position_ids"] = torch.arange(past, past + len(token_ids), device=target.device)[None]
    output = target.model(input_ids=ids, use_cache=True, **arguments)
    return output.logits[0], getattr(output, target.state_name)
