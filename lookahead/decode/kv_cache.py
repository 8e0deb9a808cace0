"""Keys and values of one sequence in buffers that are written in place.

In: each layer's new keys and values. Out: views over everything so far. Draft tokens are written behind the accepted ones
and the rejected are dropped by `keep`. Knows nothing of tokens. Every layer keeps the whole sequence, sliding-window layers
too: masks, not the cache, say what a layer sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class BufferLayer(CacheLayerMixin):
    """keys, values: [1, heads, capacity, head_dim], of which the first `length` places are filled."""

    is_sliding = False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, new, head_dim]; returns views of all `length` + new places."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.capacity:
            self._grow(end)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, past: int, places: Sequence[int]) -> None:
        """Keep the first `past` places and, behind them, `places` in this order; drop the rest."""
        end = past + len(places)
        if self.is_initialized and end and places and places[-1] != end - 1:
            assert self.keys is not None
            assert self.values is not None
            self.keys[:, :, past:end] = self.keys[:, :, places]
            self.values[:, :, past:end] = self.values[:, :, places]
        self.length = end

    def _grow(self, needed: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.capacity = max(needed, 2 * self.capacity)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], self.capacity, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)


class SequenceCache(Cache):
    """The cache that is handed to the model. Layers appear when the model first writes to them."""

    def __init__(self, capacity: int):
        super().__init__(layer_class_to_replicate=lambda: BufferLayer(capacity))

    def keep(self, past: int, places: Sequence[int]) -> None:
        """As BufferLayer.keep, in every layer that holds anything."""
        for layer in self.layers:
            layer.keep(past, places)
