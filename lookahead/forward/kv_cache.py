"""Keys and values in buffers that are written in-place: of many sequences in slots (`SlotCache`), or of one (`SequenceCache`).

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
from transformers.cache_utils import Cache, DynamicLayer

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


class LayerShape(NamedTuple):
    """Shape of what a layer keeps of a token. number: of the layer. heads: of keys; width, value_width: numbers of each.

    dtype: of the numbers before any quantization.
    """

    number: int
    heads: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device


class SlotCache(KeysAndValuesOnly):
    """Keys and values of many sequences, one to a slot, for packed forwards. pack: what the forward at hand brings.

    The keys and values of a layer are views of buffers, [slots, heads, capacity, head_dim]; [..., bytes] of quantized ones.
    A slot's buffers hold what was written last; masks define what is seen of it. shapes: of the layers that keep anything,
    where they are known: then buffers are made once, before the first forward. version: a number that no cache with other
    buffers has.
    kv_dtype: none, or int8 or int4 of keys and values that are quantized (quantized_cache.py); kept: the dtype of buffers then.
    """

    pack: Pack

    def __init__(self, shapes: Sequence[LayerShape] = (), kv_dtype: str = "none") -> None:
        super().__init__(layers=[])
        self.kept = DTYPES.get(kv_dtype)
        self.version = next(VERSIONS)
        self.slots = self.capacity = 0
        self.merged = True  # there is one buffer of each shape
        self.buffers: list[torch.Tensor] = []  # [buffers, slots, heads, capacity, head_dim]
        self._shapes: dict[int, LayerShape] = {}
        for shape in shapes:
            self.open_layer(shape)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write of [1, heads, tokens, head_dim] what is kept where the pack tells; returns the buffers of all slots.

        Those of quantized keys and values in the shape of what they hold (`quantized_cache.as_keys`).
        """
        held_keys, held_values = self.buffers_of(layer_idx, key_states, value_states)
        pack, kept = self.pack, self.kept
        keys, values = (states[0, :, : len(pack.slots)] for states in (key_states, value_states))
        if kept is not None:
            keys, values = quantized(keys, kept), quantized(values, kept)
        if pack.one is not None:
            slot, positions = pack.one
            held_keys[slot, :, positions], held_values[slot, :, positions] = keys, values
        else:
            held_keys[pack.slots, :, pack.cache_positions] = keys.transpose(0, 1)
            held_values[pack.slots, :, pack.cache_positions] = values.transpose(0, 1)
        if kept is not None:
            return as_keys(held_keys, key_states.shape[3]), as_keys(held_values, value_states.shape[3])
        return held_keys, held_values

    def buffers_of(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, Any]:
        """The keys and values of all slots of a layer that hands over such ones, [1, heads, tokens, head_dim]."""
        if number not in self._shapes:
            self.open_layer(LayerShape(number, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device))
        layer = self.layers[number]
        return layer.keys, layer.values

    def open_layer(self, shape: LayerShape) -> None:
        """Make buffers for a layer, all zeros."""
        self.layers += [DynamicLayer() for _ in range(shape.number + 1 - len(self.layers))]
        layer, self._shapes[shape.number] = self.layers[shape.number], shape
        like = torch.empty(0, dtype=self.kept or shape.dtype, device=shape.device)
        for name, width in (("keys", shape.width), ("values", shape.value_width)):
            size = width if self.kept is None else bytes_of(width, self.kept)
            self.buffers.append(zeros(like, 1, self.slots, shape.heads, self.capacity, size))
            setattr(layer, name, self.buffers[-1][0])
        layer.is_initialized = True
        self.merged, self.version = False, next(VERSIONS)

    def open_layers(self, placed: Mapping[int, tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
        """Buffers for all layers of a program. placed: (heads, width) of layer k's keys by 2 k, of its values by 2 k + 1."""
        for number in sorted(placed)[::2] if not self._shapes else ():
            (heads, width), (_, value_width) = placed[number], placed[number + 1]
            self.open_layer(LayerShape(number // 2, heads, width, value_width, dtype, device))

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        return self.pack.offsets

    def reserve(self, slots: int, capacity: int, held: Sequence[int], fits_both: bool = True) -> None:
        """Make room for that many slots of `capacity` positions each, and merge buffers. held: positions of each slot that
        stay.

        fits_both: there is memory for the new buffers and the old ones; else what stays waits in this machine's memory.
        """
        self.slots, self.capacity = max(slots, self.slots), max(capacity, self.capacity)
        self.version = next(VERSIONS)
        by_shape: dict[tuple[Any, ...], list[tuple[Any, str]]] = {}
        for layer in map(self.layers.__getitem__, self._shapes):  # layers that share another one's keys hold nothing
            for name in ("keys", "values"):
                old = getattr(layer, name)
                by_shape.setdefault((old.shape[1], old.shape[3], old.dtype, old.device), []).append((layer, name))
        self.buffers = []
        stays = {key: [_held(getattr(*owner), held, fits_both) for owner in owners] for key, owners in by_shape.items()}
        for layer, name in itertools.chain.from_iterable(by_shape.values()) if not fits_both else ():
            setattr(layer, name, None)
        for key, owners in by_shape.items():
            heads, size, dtype, device = key
            like = torch.empty(0, dtype=dtype, device=device)
            buffer = zeros(like, len(owners), self.slots, heads, self.capacity, size)
            for number, (layer, name) in enumerate(owners):
                for slot, old in enumerate(stays[key][number]):
                    buffer[number, slot, :, : old.shape[1]] = old
                setattr(layer, name, buffer[number])
            self.buffers.append(buffer)
        self.merged = True

    def shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers that keep anything. Known after a first forward."""
        return tuple(self._shapes.values())

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move for each (slot, source, target) what stands at position `source` to position `target` before it. Positions of
        a slot ascend.
        """
        if not moves:
            return
        of_each = np.array([*zip(*moves, strict=True)])
        for buffer in self.buffers:
            if buffer.device.type == "cpu":
                move(buffer.view(torch.int16).numpy(), *of_each)
            else:
                slot, source, target = upload(of_each, buffer.device)
                buffer[:, slot, :, target] = buffer[:, slot, :, source]

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of slot `source` become those of slot `target`."""
        for buffer in self.buffers:
            buffer[:, target, :, :length] = buffer[:, source, :, :length]

    def kv_bytes(self) -> int:
        """Memory of one position of one slot. Known after a first forward."""
        return sum(b.element_size() * b.shape[0] * b.shape[2] * b.shape[4] for b in self.buffers)


class SequenceCache(SlotCache):
    """Keys and values of one sequence. past: positions that are kept, behind which a forward writes.

    offsets: of the tree in the forward at hand, as `Pack.offsets`; None: a chain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.past = 0
        self.offsets: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, new, head_dim]; returns views of all `past` + new positions."""
        keys, values = self.buffers_of(layer_idx, key_states, value_states)
        end = self.past + key_states.shape[2]
        keys[:, :, self.past : end], values[:, :, self.past : end] = key_states, value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.past if self.offsets is None else self.offsets

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.past + query_length, 0

    def make_room(self, capacity: int) -> None:
        """Give all layers `capacity` positions, or more."""
        if capacity > self.capacity:
            self.reserve(1, max(capacity, 2 * self.capacity), [self.past])

    def keep(self, nodes: Sequence[int]) -> None:
        """Keep, of the positions behind `past`, `nodes` in this order; drop the rest."""
        self.move([(0, self.past + node, self.past + index) for index, node in enumerate(nodes) if index != node])
        self.past += len(nodes)


def _held(buffer: torch.Tensor, held: Sequence[int], fits_both: bool) -> list[torch.Tensor]:
    """[heads, positions, values] of each slot: that many positions. fits_both: views; else copies in this machine's memory."""
    views = [buffer[slot, :, :length] for slot, length in enumerate(held[: len(buffer)])]
    return views if fits_both else [view.to("cpu", copy=True) for view in views]
