"""Keys and values in buffers that are written in-place: of one sequence (`SequenceCache`), or of many in slots (`SlotCache`).

In: each layer's new keys and values. Out: views over everything so far. Draft tokens are written behind the accepted ones and
the rejected are overwritten. Knows nothing of tokens. Every layer keeps the whole sequence, sliding-window layers too: masks,
not the cache, define what a layer sees.

Buffers of one shape, from all layers, are slices of one tensor, so that the accepted positions of all of them move at once.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lookahead.errors import ModelError
from lookahead.forward.batch import Pack, upload
from lookahead.forward.batch_kernel import move
from lookahead.forward.quantized_cache import DTYPES, as_keys, bytes_of, quantized

VERSIONS = itertools.count()


def zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """A buffer. On a CPU, where the system can do so, memory is only taken for what is written.

    Where slots of different lengths share a call, attention reads, for the sake of the longest, positions of others that
    nothing was written to. All of these are one page then, which is in the cache. Raises MemoryError.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size or not hasattr(mmap, "MAP_PRIVATE"):
        return like.new_zeros(shape)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size:,} bytes of keys and values: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


class KeysAndValuesOnly(Cache):
    """Raises clearly for anything else."""

    def has_previous_state(self, *args: object, **kwargs: object) -> Any:
        raise ModelError("its layers keep a recurrent state")

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = has_previous_state


class NotedCache(KeysAndValuesOnly):
    """Notes the keys and values that layers hand over, and holds nothing. past: tokens that lie before those of the forward."""

    def __init__(self, past: Any = 0) -> None:
        super().__init__(layers=[])
        self.past = past
        self.noted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: object, **kwargs: object) -> tuple[Any, Any]:
        self.noted[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class BufferLayer(CacheLayerMixin):
    """keys, values: [1, heads, capacity, head_dim], of which the first `length` positions are filled.

    Until the cache first makes room (`SequenceCache.reserve`), they are what the first forward gave, with no position to spare.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, new, head_dim]; returns views of all `length` + new positions."""
        start, self.length = self.length, self.length + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class SequenceCache(KeysAndValuesOnly):
    """The cache that is handed to the model. Layers appear when the model first writes to them."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=BufferLayer)
        self.capacity = 0
        self.offsets: torch.Tensor | None = None  # of the tree in the forward at hand, as `Pack.offsets`
        self._buffers: list[torch.Tensor] = []  # [buffers, heads, capacity, head_dim], one tensor for each shape

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        length: int = super().get_seq_length(layer_idx)
        return length if self.offsets is None else self.offsets

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions in every layer. Needs a first forward, which shows the layers' shapes."""
        if capacity <= self.capacity:
            return
        self.capacity = max(capacity, 2 * self.capacity)
        by_shape: dict[tuple[Any, ...], list[tuple[BufferLayer, str]]] = {}
        for layer in self.layers:
            assert isinstance(layer, BufferLayer)
            if layer.is_initialized:  # layers that share another one's keys hold nothing
                for name in ("keys", "values"):
                    held: torch.Tensor = getattr(layer, name)
                    by_shape.setdefault((held.shape[1], held.shape[3], held.device), []).append((layer, name))
        self._buffers = []
        for (heads, head_dim, _), places in by_shape.items():
            first: torch.Tensor = getattr(*places[0])
            buffer = zeros(first, len(places), heads, self.capacity, head_dim)
            for number, (layer, name) in enumerate(places):
                view = buffer[number : number + 1]
                view[:, :, : layer.length] = getattr(layer, name)[:, :, : layer.length]
                setattr(layer, name, view)
            self._buffers.append(buffer)

    def keep(self, past: int, nodes: Sequence[int]) -> None:
        """Keep the first `past` positions and, of those behind them, `nodes` in this order; drop the rest."""
        end = past + len(nodes)
        if nodes and nodes[-1] != len(nodes) - 1:
            places = torch.tensor([past + node for node in nodes])
            for buffer in self._buffers:
                buffer[:, :, past:end] = buffer.index_select(2, places.to(buffer.device))
        for layer in self.layers:
            if layer.is_initialized:
                layer.length = end


class LayerShape(NamedTuple):
    """What a layer keeps of a token. number: of the layer. heads: of keys; width, value_width: numbers of each.

    dtype: of the numbers before any quantization.
    """

    number: int
    heads: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device


class SlotLayer(CacheLayerMixin):
    """keys, values: [slots, heads, capacity, head_dim], views of the cache's buffers; [..., bytes] of quantized ones.

    widths: numbers of a key and of a value.
    """

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache
        self.widths: tuple[int, int] = 0, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.widths = key_states.shape[3], value_states.shape[3]
        self.keys, self.values = (self.cache.new_buffer(states)[0] for states in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write of [1, heads, tokens, head_dim] what is kept where the pack tells; returns the buffers of all slots.

        Those of quantized keys and values in the shape of what they hold (`quantized_cache.as_keys`).
        """
        assert self.keys is not None
        assert self.values is not None
        pack, kept = self.cache.pack, self.cache.kept
        keys, values = (states[0, :, : len(pack.slots)] for states in (key_states, value_states))
        if kept is not None:
            keys, values = quantized(keys, kept), quantized(values, kept)
        if pack.one is not None:
            slot, places = pack.one
            self.keys[slot, :, places], self.values[slot, :, places] = keys, values
        else:
            self.keys[pack.slots, :, pack.places] = keys.transpose(0, 1)
            self.values[pack.slots, :, pack.places] = values.transpose(0, 1)
        if kept is not None:
            return as_keys(self.keys, self.widths[0]), as_keys(self.values, self.widths[1])
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(KeysAndValuesOnly):
    """Keys and values of many sequences, one to a slot, for packed forwards. pack: what the forward at hand brings.

    A slot's buffers hold what was written last; masks define what is seen of it. shapes: of the layers that keep anything,
    where they are known: then buffers are made once, before the first forward. version: a number that no cache with other
    buffers has.
    kv_dtype: none, or int8 or int4 of keys and values that are quantized (quantized_cache.py); kept: the dtype of buffers then.
    """

    pack: Pack

    def __init__(self, shapes: Sequence[LayerShape] = (), kv_dtype: str = "none") -> None:
        super().__init__(layers=[])
        self._shapes = shapes
        self.kept = DTYPES.get(kv_dtype)
        self.version = next(VERSIONS)
        self.slots = self.capacity = 0
        self.merged = True  # there is one buffer of each shape
        self.buffers: list[torch.Tensor] = []  # [buffers, slots, heads, capacity, head_dim]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.open_layer(layer_idx, key_states, value_states)
        return self.layers[layer_idx].update(key_states, value_states)

    def open_layer(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Buffers for a layer that hands over such keys and values, [1, heads, tokens, head_dim], if it has none."""
        while len(self.layers) <= number:
            self.layers.append(SlotLayer(self))
        if not self.layers[number].is_initialized:
            self.layers[number].lazy_initialization(keys, values)

    def open_layers(self, placed: Mapping[int, tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
        """Buffers for all layers of a program. placed: (heads, width) of layer k's keys by 2 k, of its values by 2 k + 1."""
        layers = 1 + max(placed) // 2
        for layer in range(layers if len(self.layers) < layers else 0):
            if 2 * layer in placed:
                shapes = [placed[2 * layer], placed[2 * layer + 1]]
                states = [torch.empty(1, heads, 0, width, dtype=dtype, device=device) for heads, width in shapes]
                self.open_layer(layer, *states)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        return self.pack.offsets

    def new_buffer(self, states: torch.Tensor) -> torch.Tensor:
        """Zeros for what a layer brings as [1, heads, tokens, head_dim]."""
        like, size = self._held_as(states.shape[3], states.dtype, states.device)
        buffer = zeros(like, 1, self.slots, states.shape[1], self.capacity, size)
        self.buffers.append(buffer)
        self.merged, self.version = False, next(VERSIONS)
        return buffer

    def _held_as(self, width: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, int]:
        """(a tensor of the buffers' dtype, the last size of a buffer) for keys or values of `width` numbers."""
        if self.kept is None:
            return torch.empty(0, dtype=dtype, device=device), width
        return torch.empty(0, dtype=self.kept, device=device), bytes_of(width, self.kept)

    def reserve(self, slots: int, capacity: int, held: Sequence[int], beside: bool = True) -> None:
        """Make room for that many slots of `capacity` positions each, and merge buffers. held: positions of each slot that
        stay.

        beside: there is memory for the new buffers in addition to the old ones; else what stays waits in this machine's memory.
        """
        self.slots, self.capacity = max(slots, self.slots), max(capacity, self.capacity)
        self.version = next(VERSIONS)
        for shape in self._shapes if not self.layers else ():
            self._add_layer(shape)
        by_shape: dict[tuple[Any, ...], list[tuple[SlotLayer, str]]] = {}
        for layer in self.layers:
            if layer.is_initialized:  # layers that share another one's keys hold nothing
                for name in ("keys", "values"):
                    by_shape.setdefault(self._shape(getattr(layer, name)), []).append((layer, name))
        self.buffers = []
        stays = {key: [_held(getattr(*place), held, beside) for place in places] for key, places in by_shape.items()}
        likes = {key: getattr(*places[0])[:0] for key, places in by_shape.items()}
        if not beside:
            likes = {key: like.new_empty(0) for key, like in likes.items()}
            for layer, name in itertools.chain.from_iterable(by_shape.values()):
                setattr(layer, name, None)
        for key, places in by_shape.items():
            buffer = zeros(likes[key], len(places), self.slots, key[0], self.capacity, key[1])
            for number, (layer, name) in enumerate(places):
                for slot, old in enumerate(stays[key][number]):
                    buffer[number, slot, :, : old.shape[1]] = old
                setattr(layer, name, buffer[number])
            self.buffers.append(buffer)
        self.merged = True

    def _add_layer(self, shape: LayerShape) -> None:
        """A layer whose buffers are still of no size."""
        while len(self.layers) <= shape.number:
            self.layers.append(SlotLayer(self))
        layer = self.layers[shape.number]
        layer.dtype, layer.device, layer.widths = shape.dtype, shape.device, (shape.width, shape.value_width)
        held = [self._held_as(width, shape.dtype, shape.device) for width in layer.widths]
        layer.keys, layer.values = (like.new_empty(0, shape.heads, 0, size) for like, size in held)
        layer.is_initialized = True

    def shapes(self) -> tuple[LayerShape, ...]:
        """Of the layers that keep anything. Known after a first forward."""
        return tuple(
            LayerShape(index, each.keys.shape[1], each.widths[0], each.widths[1], each.dtype, each.keys.device)
            for index, each in enumerate(self.layers)
            if each.is_initialized
        )

    def move(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """In slots[k], what stands at position sources[k] goes to position targets[k] before it. Positions of a slot ascend."""
        if not slots:
            return
        moves = np.array([slots, sources, targets])
        if self.buffers[0].device.type == "cpu":
            for buffer in self.buffers:
                move(buffer.view(torch.int16).numpy(), *moves)
            return
        slot, source, target = upload(moves, self.buffers[0].device)
        for buffer in self.buffers:
            buffer[:, slot, :, target] = buffer[:, slot, :, source]

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of slot `source` become those of slot `target`."""
        for buffer in self.buffers:
            buffer[:, target, :, :length] = buffer[:, source, :, :length]

    def place_bytes(self) -> int:
        """Memory of one position of one slot. Known after a first forward."""
        return sum(b.element_size() * b.shape[0] * b.shape[2] * b.shape[4] for b in self.buffers)

    @staticmethod
    def _shape(buffer: torch.Tensor) -> tuple[Any, ...]:
        return buffer.shape[-3], buffer.shape[-1], buffer.dtype, buffer.device


def _held(buffer: torch.Tensor, held: Sequence[int], beside: bool) -> list[torch.Tensor]:
    """[heads, positions, values] of each slot: that many positions. beside: as a view; else a copy in this machine's memory."""
    views = [buffer[slot, :, :length] for slot, length in enumerate(held[: len(buffer)])]
    return views if beside else [view.to("cpu", copy=True) for view in views]
