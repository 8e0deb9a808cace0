"""Weight matrices of 8 or 4 bits in panels. In: a matrix [out, in] of floats, or whole numbers and scales. Out: panels.

Weights of 8 bits have a scale for each output and stand around zero. Those of 4 bits have a scale and a number that stands for
zero for each 64 inputs of an output; of a few ranges that do not hold the outermost weights, the one with the least squared
error is taken. quantize/rounding.py rounds by what inputs are like, too. Tokens are quantized to 8 bits, see quantized_code.py,
which also defines how weights lie.
"""

from __future__ import annotations

import dataclasses

import torch

from lookahead.backends.cpu.huge_pages import in_huge_pages
from lookahead.backends.cpu.panel_code import PANEL
from lookahead.backends.cpu.panel_kernel import INT4, INT8
from lookahead.backends.cpu.panels import Panels
from lookahead.backends.cpu.quantized_code import GROUP, TOKEN_GROUP, quantize
from lookahead.backends.lowering.ops import IN_4_BITS, IN_8_BITS
from lookahead.forward.backend import QUANTIZED
from lookahead.native.kernels import kernel

RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # that are tried, as shares of the whole one
SMALLEST = 1e-30  # scale
AT_ONCE = 1 << 22  # weights, of which several copies are made


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix as whole numbers: weight = (number - zero) * scale.

    numbers: [out, in], int8 in -127 .. 127 for 8 bits, uint8 in 0 .. 15 for 4. scales: [out, groups] float32, of which bfloat16
    holds those of 4 bits. zeros: uint8 [out, groups]; None for 8 bits. A matrix of 8 bits is one group.
    order: int64 [in], which input each column is of; None: columns are in the order of the inputs.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None = None

    def to_dense(self) -> torch.Tensor:
        """float32 [out, in], inputs in their own order."""
        inner = self.numbers.shape[1]
        if self.zeros is None:
            dense = self.numbers.float() * self.scales
        else:
            zeros, scales = (each.repeat_interleave(GROUP, 1)[:, :inner] for each in (self.zeros.float(), self.scales))
            dense = (self.numbers.float() - zeros) * scales
        return dense if self.order is None else dense[:, self.order.argsort()]


def in_8_bits(weight: torch.Tensor) -> Quantized:
    """weight: [out, in]."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).clamp_min(SMALLEST)
    return Quantized((weight.float() / scales).round().clamp(-127, 127).to(torch.int8), scales, None)


def in_4_bits(weight: torch.Tensor, importance: torch.Tensor | None = None) -> Quantized:
    """weight: [out, in]; the last group may be shorter than 64. importance: float32 [in], of squared errors of a column."""
    parts = [_in_4_bits(some, importance) for some in weight.split(max(1, AT_ONCE // weight.shape[1]))]
    numbers, scales, zeros = (torch.cat(each) for each in zip(*parts, strict=True))
    return Quantized(numbers, scales, zeros)


def _in_4_bits(weight: torch.Tensor, importance: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(numbers, scales, zeros)"""
    outputs, inner = weight.shape
    groups = -(-inner // GROUP)
    parts = torch.nn.functional.pad(weight.float(), (0, groups * GROUP - inner)).view(outputs, groups, GROUP)
    if importance is not None:
        importance = torch.nn.functional.pad(importance, (0, groups * GROUP - inner)).view(groups, GROUP)
    least, most = parts.amin(-1, keepdim=True).clamp_max(0), parts.amax(-1, keepdim=True).clamp_min(0)
    best = torch.full_like(least, torch.inf)
    numbers, scales, zeros = torch.empty_like(parts), torch.empty_like(least), torch.empty_like(least)
    for share in RANGES:
        scale = ((most - least) * (share / 15)).clamp_min(SMALLEST).bfloat16().float()
        zero = (-least * share / scale).round_().clamp_(0, 15)
        tried = (parts / scale).round_().add_(zero).clamp_(0, 15)
        errors = (tried - zero).mul_(scale).sub_(parts).square_()
        error = (errors if importance is None else errors.mul_(importance)).sum(-1, keepdim=True)
        better = error < best
        for kept, new in ((best, error), (numbers, tried), (scales, scale), (zeros, zero)):
            torch.where(better, new, kept, out=kept)
    flat = numbers.view(outputs, -1)[:, :inner].to(torch.uint8)
    return flat, scales.squeeze(-1), zeros.squeeze(-1).to(torch.uint8)


def _in_panels(numbers: torch.Tensor, groups: int) -> torch.Tensor:
    """uint8 [out, in], filled up with zeros: [panels, groups, 16, 64, 4]."""
    padded = torch.nn.functional.pad(numbers, (0, groups * GROUP - numbers.shape[1], 0, -len(numbers) % PANEL))
    return padded.view(-1, PANEL, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4).contiguous()


def _of_groups(values: torch.Tensor, groups: int) -> torch.Tensor:
    """[out, groups], filled up with zeros: [panels, groups, 64]."""
    return torch.nn.functional.pad(values, (0, 0, 0, -len(values) % PANEL)).view(-1, PANEL, groups).transpose(1, 2).contiguous()


def _lines8(matrix: Quantized, groups: int) -> torch.Tensor:
    """uint8 [panels, bytes]"""
    parts = _in_panels(matrix.numbers.view(torch.uint8) ^ 128, groups).flatten(1)
    return torch.cat([_of_groups(matrix.scales, 1).view(torch.uint8).flatten(1), parts], 1)


def _lines4(matrix: Quantized, groups: int) -> torch.Tensor:
    """uint8 [panels, groups, bytes]"""
    assert matrix.zeros is not None
    parts = _in_panels(matrix.numbers, groups).unflatten(2, (GROUP // 8, 2))
    packed = (parts[:, :, :, 0] | (parts[:, :, :, 1] << 4)).flatten(2)
    scales = _of_groups(matrix.scales.bfloat16(), groups).view(torch.uint8)
    return torch.cat([packed, scales, _of_groups(matrix.zeros, groups)], 2)


@kernel
def _quantize_tokens(source, stride, count, numbers, target, row, eight):
    for token in range(count):
        quantize(source + token * stride, numbers, target + token * row, eight)


class QuantizedPanels(Panels):
    """A matrix [out, in] of 8 or 4 bits in panels. dtype: of the tokens, and of the products.

    eight: groups of 64 columns whose tokens have 8 bits, the first ones; the others have 4. None: all.
    """

    def __init__(self, matrix: Quantized, dtype: torch.dtype, eight: int | None = None):
        self.outputs, self.inner = matrix.numbers.shape
        self.dtype = dtype
        self.kind, self.held = (INT8, IN_8_BITS) if matrix.zeros is None else (INT4, IN_4_BITS)
        self.library = QUANTIZED[matrix.zeros is None]  # type: ignore[misc]
        self.lines = -(-self.inner // GROUP)
        self.order, self.eight = matrix.order, self.lines if eight is None else eight
        self.weight = in_huge_pages((_lines8 if self.kind == INT8 else _lines4)(matrix, self.lines))

    def to_dense(self) -> torch.Tensor:
        dense = self.rows(torch.arange(self.outputs))
        return dense if self.order is None else dense[:, self.order.argsort()]

    def given(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [count, in], quantized: uint8 [count, bytes]."""
        tokens = tokens.float() if self.order is None else tokens[:, self.order].float()
        tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
        target = torch.empty(len(tokens), self.lines * TOKEN_GROUP, dtype=torch.uint8)
        source, row = (tokens.data_ptr(), tokens.stride(0) * 4), (target.data_ptr(), target.stride(0))
        _quantize_tokens(*source, len(tokens), self.inner, *row, self.eight)
        return target
