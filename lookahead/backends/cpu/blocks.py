"""Weight matrices in the blocks of GGUF files. In: bytes of a file. Out: panels that take as much memory, and no other copy.

How a block lies in a file is defined by ggml (ggml-common.h); how a group of a panel does, by block_code.py.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from lookahead.backends.cpu.block_code import FORMATS, GROUP, Format
from lookahead.backends.cpu.huge_pages import in_huge_pages
from lookahead.backends.cpu.panel_code import PANEL
from lookahead.backends.cpu.panel_kernel import BLOCKS, PAIRS, unpack_panel
from lookahead.backends.cpu.panels import Panels, kind_of
from lookahead.backends.lowering.ops import IN_BLOCKS

NUMBER_OF = {each.name: number for number, each in enumerate(FORMATS)}
Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


def _halves(low: np.ndarray, count: int) -> np.ndarray:
    """Bytes [..., n * count]: numbers in their lower halves, then those in their upper ones, `count` bytes at a time."""
    both = low.reshape(*low.shape[:-1], -1, 1, count)
    return np.concatenate([both & 15, both >> 4], -2).reshape(*low.shape[:-1], -1)


def scales_of(name: str, blocks: np.ndarray) -> torch.Tensor:
    """float16 [blocks, 1 or 2]: all of that type that a matrix uint8 [out, bytes] holds, scales and offsets."""
    form = FORMATS[NUMBER_OF[name]]
    known = blocks.reshape(-1, form.bytes_in_file)
    known = known[:, 208:] if form.name == "Q6_K" else known[:, : 2 * (1 + form.offsets)]
    return torch.from_numpy(known.copy().view(np.float16))


def _small(form: Format, blocks: np.ndarray) -> Parts:
    """Blocks of 32 inputs: float16 scale, float16 offset, 32 high bits, numbers."""
    begin = 2 * (1 + form.offsets)
    known = blocks[..., :begin].copy().view(np.uint16)
    numbers = blocks[..., begin + 4 * form.high :]
    if form.low == 4:
        numbers = _halves(numbers, 16)
    if form.high:
        numbers = numbers | (np.unpackbits(blocks[..., begin : begin + 4], axis=-1, bitorder="little") << 4)
    return numbers, known[..., :1], known[..., 1:] if form.offsets else None, None


def _large(form: Format, blocks: np.ndarray) -> Parts:
    """Blocks of 256 inputs."""
    if form.name == "Q6_K":  # 128 low halves, 64 bytes of high bits, 16 int8 scales, a float16 scale
        low, high = blocks[..., :128], blocks[..., 128:192]
        numbers = _halves(low, 64)
        parts = [(each >> shift & 3) << 4 for each in np.split(high, 2, -1) for shift in (0, 2, 4, 6)]
        return numbers | np.concatenate(parts, -1), blocks[..., 192:208], None, blocks[..., 208:].copy().view(np.uint16)
    # two float16 scales, eight scales and eight offsets of 6 bits in 12 bytes, 32 bytes of high bits, low halves
    six, high = blocks[..., 4:16], blocks[..., 16:48]
    scales, offsets, upper = six[..., :4], six[..., 4:8], six[..., 8:]
    numbers = _halves(blocks[..., 16 + 32 * form.high :], 32)
    if form.high:
        numbers = numbers | np.concatenate([(high >> part & 1) << 4 for part in range(8)], -1)
    return (
        numbers,
        np.concatenate([scales & 63, (upper & 15) | (scales >> 6 << 4)], -1),
        np.concatenate([offsets & 63, (upper >> 4) | (offsets >> 6 << 4)], -1),
        blocks[..., :4].copy().view(np.uint16),
    )


def _in_rows(values: np.ndarray, columns: int) -> np.ndarray:
    """[64, ...] as [groups, columns, 64], as they lie in a panel, the last group filled up with zeros."""
    flat = values.reshape(PANEL, -1)
    return np.pad(flat, ((0, 0), (0, -flat.shape[1] % columns))).reshape(PANEL, -1, columns).transpose(1, 2, 0)


def _panel(form: Format, rows: np.ndarray) -> np.ndarray:
    """Bytes of a panel. rows: uint8 [64, bytes], of a file."""
    numbers, scales, offsets, of_block = (_large if form.large else _small)(form, rows)
    lines = _in_rows(numbers, GROUP)  # [groups, inputs, outputs]
    parts = [lines] if form.low == 8 else [lines[:, : GROUP // 2] & 15 | lines[:, GROUP // 2 :] << 4]
    if form.high:
        high = (lines >> 4).reshape(len(lines), 8 // form.high, -1, PANEL)
        parts.append(np.bitwise_or.reduce([high[:, turn] << turn * form.high for turn in range(8 // form.high)]))
    known = [_in_rows(each, form.parts) for each in (scales, offsets) if each is not None]
    groups = np.concatenate([np.ascontiguousarray(each).view(np.uint8).reshape(len(lines), -1) for each in parts + known], 1)
    if of_block is None:
        return groups.reshape(-1)
    heads = np.ascontiguousarray(_in_rows(of_block, 1 + form.offsets)).view(np.uint8).reshape(len(of_block[0]), -1)
    return np.concatenate([heads, groups.reshape(len(heads), -1)], 1).reshape(-1)


class BlockPanels(Panels):
    """A matrix [out, in] in panels of blocks; dtype: of the tokens, and of the products."""

    library: ClassVar[str] = "gguf"

    def __init__(self, name: str, blocks: np.ndarray, dtype: torch.dtype, order: np.ndarray):
        """name: of the format, one of FORMATS. blocks: uint8 [out, bytes]. order: which row each output is."""
        form = FORMATS[NUMBER_OF[name]]
        inner = blocks.shape[1] // form.bytes_in_file * form.inputs
        self.outputs, self.inner, self.dtype = len(blocks), inner, dtype
        kind = kind_of(dtype)
        self.kind, self.paired = BLOCKS + kind, kind == PAIRS
        self.lines, self.held = inner, IN_BLOCKS - NUMBER_OF[name]
        panels = -(-self.outputs // PANEL)
        self.weight = in_huge_pages(torch.zeros(1, 1, dtype=torch.uint8).expand(panels, form.panel_bytes(inner)))
        for number in range(panels):
            some = blocks[order[number * PANEL : (number + 1) * PANEL]]
            some = np.concatenate([some, np.zeros((PANEL - len(some), some.shape[1]), np.uint8)])
            self.weight[number] = torch.from_numpy(_panel(form, some.reshape(PANEL, -1, form.bytes_in_file)))

    def to_dense(self) -> torch.Tensor:
        dense = torch.empty(len(self.weight) * PANEL, -(-self.inner // GROUP) * GROUP, dtype=self.dtype)
        unpacked = torch.empty(dense.shape[1], PANEL)
        for number, some in enumerate(dense.split(PANEL)):
            unpack_panel(IN_BLOCKS - self.held, self.weight[number].data_ptr(), self.inner, unpacked.data_ptr())
            some.copy_(unpacked.T)
        return dense[: self.outputs, : self.inner].contiguous()
