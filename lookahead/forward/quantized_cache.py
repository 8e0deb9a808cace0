"""Keys and values in 8 or 4 bits. In: those of a token, as a layer computes them. Out: the bytes that a cache holds of them.

A key or value of one head is quantized alone, in groups of 32 numbers, once, when it is written: its bytes depend on nothing
but its own numbers, and moving or copying them changes nothing. vector_code.py defines how they lie; attention reads them as
they are.

    int8   numbers from -127 to 127 and a scale, 34 bytes for 32 numbers
    int4   numbers from 0 to 15, a scale and an offset, the least of the group: 20 bytes

The kernels take a buffer of such bytes for one of int8 (8 bits) or uint8 (4 bits), see `as_keys`.
"""

from __future__ import annotations

import torch

from lookahead.forward.backend import backend_of
from lookahead.native.vector_code import GROUP, GROUP4, GROUP8, LANES

DTYPES = {"int8": torch.int8, "int4": torch.uint8}  # of buffers


def bytes_of(width: int, kept: torch.dtype) -> int:
    """Return the bytes of a key or value: 2 (in 4 bits 4) for each 32 of its `width` numbers, and 16 (8) for each 16. An even
    number.
    """
    header, size = (2, LANES) if kept == torch.int8 else (4, LANES // 2)
    return -(-width // GROUP) * header + -(-width // LANES) * size


def as_keys(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """A buffer [slots, heads, capacity, bytes] in the shape of what it holds, [slots, heads, capacity, width].

    So models, which look at shapes, hand it on to the kernels, which look at addresses and at strides but for the last.
    """
    *sizes, _ = buffer.shape
    *strides, _ = buffer.stride()
    return buffer.as_strided((*sizes, width), (*strides, 0))


def quantized(states: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    """[heads, tokens, bytes] of keys or values [heads, tokens, width]."""
    heads, tokens, width = states.shape
    source = states.float().contiguous()
    target = torch.zeros(heads, tokens, bytes_of(width, kept), dtype=kept)
    cpu = backend_of("cpu")
    assert cpu
    cpu.quantize_keys(source.data_ptr(), heads * tokens, width, target.data_ptr(), target.shape[2], kept == torch.int8)
    return target


def restored(held: torch.Tensor, width: int) -> torch.Tensor:
    """float32 [..., width] of bytes [..., bytes], as the kernels read them."""
    header, size, whole = (2, LANES, GROUP8) if held.dtype == torch.int8 else (4, LANES // 2, GROUP4)
    parts = []
    for group in range(-(-width // GROUP)):
        about = held[..., group * whole : (group + 1) * whole]
        halves = about[..., :header].contiguous().view(torch.bfloat16).float()
        numbers = about[..., header:].unflatten(-1, (-1, size))
        if size == LANES:
            parts.append(numbers.flatten(-2).float() * halves)
        else:
            both = torch.cat([numbers & 15, numbers >> 4], -1).flatten(-2)
            parts.append(both.float().double().mul(halves[..., :1].double()).add(halves[..., 1:].double()).float())
    return torch.cat(parts, -1)[..., :width]
