"""Writes down the steps of a program for a CPU. In: a traced forward. Out: steps whose products are of weights in panels."""

from __future__ import annotations

from typing import Any

import torch

from lookahead.backends.cpu.panels import Panels
from lookahead.backends.cpu.quantized import QuantizedPanels
from lookahead.backends.cpu.quantized_code import TOKEN_GROUP
from lookahead.backends.lowering import ops
from lookahead.backends.lowering.builder import Builder
from lookahead.backends.lowering.plan import ROUNDS, Buffer, Instruction, Unsupported, View, flat_dims

SMALL = 1 << 20  # numbers of a matrix that is copied, in addition to the model's own


class PanelBuilder(Builder):
    """See `Builder`. Instructions read float32."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._matrices: dict[int, tuple[torch.Tensor, Panels]] = {}

    def wide(self, view: View) -> View:
        """The same numbers as float32."""
        home = view.home
        if not isinstance(home, Buffer) or home.size == 4:
            return view
        if ("wide", home) not in self._copies:
            copy = self.new([home.numbers], 0, view.dtype)
            source = View(home, 0, flat_dims([home.numbers]), 0, view.dtype)
            self.steps.append(
                Instruction(ops.WIDEN, 1, home.numbers, (copy, 0, 1), [(source, 0, 1)], more=(ROUNDS[view.dtype],))
            )
            self._copies["wide", home] = copy
        wide = self._copies["wide", home].home
        return View(wide, view.start, view.dims, view.axis, view.dtype)

    def weight_of(self, matrix: torch.Tensor) -> Panels:
        if matrix.numel() > SMALL:
            raise Unsupported("a matrix that is not laid out")
        if id(matrix) not in self._matrices:
            self._matrices[id(matrix)] = matrix, Panels(matrix.detach().t())
        return self._matrices[id(matrix)][1]

    def given(self, tokens: View, weight: Any) -> View:
        if not isinstance(weight, Panels):
            raise Unsupported("weights in another layout")
        if weight.paired and weight.inner % 2:
            raise Unsupported("an odd number of pairs")
        if isinstance(weight, QuantizedPanels):
            return self._quantized(tokens, weight)
        return self.narrow(tokens, torch.bfloat16) if weight.paired else self.flat(tokens)

    def _quantized(self, view: View, weight: QuantizedPanels) -> View:
        """The same numbers as groups of 8 and 4 bits in the order of this weight's columns."""
        view = self.flat(view)
        order = None if weight.order is None else weight.order.numpy().tobytes()
        key = ("quantized", view.home, view.start, view.count, order, weight.eight)
        if key not in self._copies:
            words, count = weight.lines * TOKEN_GROUP // 4, view.count
            copy = View(Buffer(words), 0, flat_dims([words]), 0, torch.float32)
            source = view.with_dims(flat_dims([count]), 0)
            if weight.order is not None:
                self.alive.append(weight.order)
                gathered, more = self.new([count], 0, torch.float32), (weight.order.data_ptr(),)
                self.steps.append(Instruction(ops.GATHER, 1, count, (gathered, 0, 1), [(source, 0, 1)], more=more))
                source = gathered
            more = (weight.eight,)
            self.steps.append(Instruction(ops.QUANTIZE, 1, count, (copy, 0, 1), [(source, 0, 1)], more=more))
            self._copies[key] = copy
        return self._copies[key]
