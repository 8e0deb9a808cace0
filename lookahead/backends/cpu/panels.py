"""Weight matrices laid out in panels for a CPU, and their products. In: a matrix [out, in], tokens. Out: tokens [..., out].

See panel_code.py for the layout. Threads share a product by its panels (panel_kernel.py).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from lookahead.backends.cpu.huge_pages import in_huge_pages
from lookahead.backends.cpu.panel_code import PANEL
from lookahead.backends.cpu.panel_kernel import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    PAIRS,
    TASK_BYTES,
    look_up_all,
    multiplier_of,
    product,
)
from lookahead.backends.lowering.plan import STORED
from lookahead.forward.processor import multiplies_pairs, multiplies_tiles
from lookahead.native.threads import run_in

AT_ONCE = 1024  # outputs whose weights are compared
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
ALONE = 100_000  # multiplications up to which a product is not worth other threads


def _in_16_bits(weight: torch.Tensor) -> torch.Tensor:
    """float32 numbers in half precision, where it holds them all."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(some.to(dtype).float().equal(some) for some in weight.split(AT_ONCE)):
            return weight.to(dtype)
    return weight


def kind_of(dtype: torch.dtype) -> int:
    """How weights of this dtype lie."""
    if dtype == torch.bfloat16 and multiplies_pairs():
        return PAIRS
    return KINDS[dtype]


class Panels:
    """A matrix [out, in] in panels, of float32, bfloat16 or float16.

    float32 numbers that are all numbers of bfloat16 or float16, too, as those of most checkpoints, lie in 16 bits: products are
    the same to the last bit, and half as much is read.
    """

    library: ClassVar[str] = "panels"
    held = 0  # of quantized weights, how they lie, see ops.IN_8_BITS
    paired = False

    def __init__(self, weight: torch.Tensor):
        self.outputs, self.inner = weight.shape
        self.dtype = weight.dtype
        self.paired = kind_of(weight.dtype) == PAIRS
        if weight.dtype == torch.float32:
            weight = _in_16_bits(weight)
        self.kind = PAIRS if self.paired else KINDS[weight.dtype]
        panels, two = -(-self.outputs // PANEL), 2 if self.paired else 1
        self.lines = -(-self.inner // two)  # of a panel
        padded = torch.nn.functional.pad(weight, (0, self.lines * two - self.inner, 0, panels * PANEL - self.outputs))
        self.weight = in_huge_pages(padded.view(panels, PANEL, self.lines, two).transpose(1, 2))

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Return those with which forwards on this CPU take less time than with other libraries."""
        return Panels.takes_here() and not (weight.dtype == torch.bfloat16 and multiplies_tiles())

    @staticmethod
    def takes_here() -> bool:
        """Tell whether this CPU has the instructions."""
        return torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2")

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def to_dense(self) -> torch.Tensor:
        """[out, in]"""
        panels, lines, _, two = self.weight.shape
        dense = self.weight.transpose(1, 2).reshape(panels * PANEL, lines * two)[: self.outputs, : self.inner]
        return dense.to(self.dtype).contiguous()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[..., in] of int64 ids [...], which choose among outputs: an embedding, quantized. Raises IndexError for others."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.outputs:
            raise IndexError(f"a token id that there is no row for: they end at {self.outputs - 1}")
        ids = ids.contiguous()
        target = torch.empty(*ids.shape, self.inner)
        look_up_all(self.held, self.weight.data_ptr(), ids.data_ptr(), ids.numel(), self.inner, target.data_ptr())
        return target.to(self.dtype)

    def given(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [count, in] as they are multiplied: each in memory that is one piece."""
        if self.paired:
            if self.inner % 2:
                tokens = torch.nn.functional.pad(tokens, (0, 1))
        elif self.kind != FLOAT32:
            tokens = tokens.float()
        return tokens if tokens.stride(1) == 1 else tokens.contiguous()

    def product(self, tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., out]. tokens: [..., in], bias: [out], of the weight's dtype."""
        flat = self.given(tokens.reshape(-1, self.inner))
        addends = None if bias is None else bias.float()
        output = tokens.new_empty(*tokens.shape[:-1], self.outputs)
        count, size = len(flat), output.element_size()
        stride, output_stride = flat.stride(0) * flat.element_size(), self.outputs * size
        task = TASK_BYTES.pack(
            *(0, multiplier_of(self.kind), flat.data_ptr(), stride, count, self.weight.data_ptr(), self.lines, self.outputs),
            *(0 if addends is None else addends.data_ptr(), output.data_ptr(), output_stride, STORED[self.dtype], self.held),
        )
        run_in(torch.get_num_threads() if count * self.inner * self.outputs > ALONE else 1, product, task)
        return output
