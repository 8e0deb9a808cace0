"""One sequence in the model's cache, for models whose sequences cannot be packed into one forward.

tree and chain modes keep their own buffers (kv_cache.py) and drop what was rejected. A recurrent state cannot drop anything:
replay mode tries a draft on a copy of the state, and what was accepted of it is taken in with the next forward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from lookahead.decode.batch import pack
from lookahead.decode.kv_cache import SequenceCache
from lookahead.draft.tree import DraftTree

if TYPE_CHECKING:
    from lookahead.decode.model import TargetModel

LAST_ONLY = {"logits_to_keep": 1}
MOST_PENDING = 16  # accepted tokens that wait for the next forward


class BufferState:
    """Trees (or chains) over buffers that are written in place. capacity: tokens to make room for; it grows where needed."""

    def __init__(self, target: TargetModel, capacity: int):
        self.target = target
        self.cache = SequenceCache()
        self._capacity = capacity
        self.past = 0  # tokens whose keys and values are kept

    def prefill(self, tree: DraftTree) -> torch.Tensor:
        """Take in a chain; returns the scores of the token after it, [1, vocab]."""
        if self.past:
            self.cache.reserve(self.past + len(tree))
        logits = self._chain(tree, LAST_ONLY if self.target.takes_logits_to_keep else None)[-1:]
        self.cache.reserve(max(self._capacity, self.past + len(tree) + 1))
        return logits

    def forward(self, tree: DraftTree) -> torch.Tensor:
        """Scores [nodes, vocab] of the token after each node of `tree`, whose root is the next token to take in.

        In chain mode `tree` must be a chain.
        """
        target = self.target
        self.cache.reserve(self.past + len(tree))
        if target.mode == "chain":
            return self._chain(tree)
        packed = pack([tree], [self.past], target.mask_plan, target.dtype, target.device)
        masks = {
            kind: torch.zeros(1, 1, len(tree), self.past + len(tree), dtype=target.dtype, device=target.device)
            if mask is None
            else mask
            for kind, mask in packed.groups[0].masks.items()
        }
        output = target.model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=masks if target.mask_plan.by_type else next(iter(masks.values())),
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def keep(self, nodes: Sequence[int]) -> None:
        """Keep the keys and values of these nodes of the last tree (a path from its root); drop the others."""
        self.cache.keep(self.past, nodes)
        self.past += len(nodes)

    def _chain(self, tree: DraftTree, extra: dict[str, Any] | None = None) -> torch.Tensor:
        assert tree.is_chain()
        return _feed(self.target, tree.token_ids, self.cache, extra)


class ReplayState:
    """Chains over a state that can only go forward."""

    def __init__(self, target: TargetModel, capacity: int):
        self.target = target
        self._state = DynamicCache(config=target.model.config)
        self._pending: list[int] = []  # kept tokens that the state has not taken in
        self._trial: Any = None
        self._tried = np.empty(0, np.int32)

    def prefill(self, tree: DraftTree) -> torch.Tensor:
        """As `BufferState.prefill`."""
        return self.forward(tree)[-1:]

    def forward(self, tree: DraftTree) -> torch.Tensor:
        """As `BufferState.forward`, for chains."""
        assert tree.is_chain()
        if len(self._pending) > MOST_PENDING:
            _feed(self.target, self._pending, self._state)
            self._pending = []
        self._tried = tree.token_ids
        certain = len(tree) == 1  # a root is always kept
        self._trial = self._state if certain else copy.deepcopy(self._state)
        logits = _feed(self.target, [*self._pending, *tree.token_ids.tolist()], self._trial)
        return logits[len(self._pending) :]

    def keep(self, nodes: Sequence[int]) -> None:
        """As `BufferState.keep`."""
        if len(nodes) == len(self._tried):
            self._state, self._pending = self._trial, []
        else:
            self._pending += self._tried[list(nodes)].tolist()
        self._trial = None


SequenceState = BufferState | ReplayState


def sequence_state(target: TargetModel, capacity: int) -> SequenceState:
    """State of one sequence of about `capacity` tokens in a model of any mode but "packed" and "plain"."""
    return ReplayState(target, capacity) if target.mode == "replay" else BufferState(target, capacity)


def _feed(
    target: TargetModel, token_ids: Sequence[int] | np.ndarray, cache: Any, extra: dict[str, Any] | None = None
) -> torch.Tensor:
    """Scores [tokens, vocab] by the model's own causal mask."""
    ids = torch.from_numpy(np.asarray(token_ids, np.int64))[None].to(target.device)
    logits: torch.Tensor = target.model(input_ids=ids, past_key_values=cache, use_cache=True, **(extra or {})).logits[0]
    return logits
