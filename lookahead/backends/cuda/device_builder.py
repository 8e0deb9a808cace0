"""Writes down the steps of a program for a GPU. In: a traced forward, as for CPUs. Out: steps whose products are of matrices
as they lie, and read what is stored in any dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.lowering.builder import Builder
from lookahead.backends.lowering.plan import LIKE, Buffer, Instruction, Product, Stage, Unsupported, View

# On a GPU: programs of LINES outputs that a product has if they are of LEAST_OF_PART numbers each, multiples of OF_PART
PROGRAMS, LINES, LEAST_OF_PART, OF_PART = 256, 64, 1024, 128


class Matrix:
    """A matrix [out, in] as a GPU multiplies by it: as it lies, in `parts` along `in`, of `of_part` numbers each at most."""

    def __init__(self, weight: torch.Tensor, parts: int | None = None):
        self.weight = weight
        self.outputs, self.inner = weight.shape
        self.dtype = weight.dtype
        self.parts = parts or max(1, min(PROGRAMS * LINES // self.outputs, self.inner // LEAST_OF_PART))
        self.of_part = -(-self.inner // self.parts // OF_PART) * OF_PART
        self.parts = -(-self.inner // self.of_part)


class DeviceBuilder(Builder):
    """See `Builder`. What a product fills holds partial sums, which only instructions read."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self._of_products: set[Buffer] = set()

    def lies_flat(self, view: View) -> bool:
        return view.home not in self._of_products and super().lies_flat(view)

    def weight_of(self, matrix: torch.Tensor) -> Matrix:
        if matrix.stride(0) != 1 or matrix.dtype not in LIKE:
            raise Unsupported("weights in another layout")
        return Matrix(matrix.detach().t())

    def whole(self, weight: Matrix) -> Matrix:
        return Matrix(weight.weight, parts=1)

    def given(self, tokens: View, weight: Matrix) -> View:
        return self.narrow(tokens, weight.dtype)

    def product(self, tokens: View, weight: Matrix, bias: torch.Tensor | None, shape: Sequence[int]) -> View:
        result = super().product(tokens, weight, bias, shape)
        assert isinstance(result.home, Buffer)
        result.home.numbers *= weight.parts
        self._of_products.add(result.home)
        return result


@torch.no_grad()
def merged_products(stages: list[Stage], model: Any) -> None:
    """Make one product of those of a stage that multiply the same tokens. Their weights then lie behind each other, where the
    model's own layers find them: nothing is kept twice.
    """
    owners: dict[int, list[torch.nn.Parameter]] = {}
    for parameter in dict.fromkeys(model.parameters()):
        owners.setdefault(parameter.data_ptr(), []).append(parameter)
    moved: dict[Buffer, tuple[Buffer, int]] = {}
    for stage in stages:
        groups: dict[Any, list[Product]] = {}
        for step in stage.steps:
            if (
                isinstance(step, Product)
                and step.target is not None
                and len(owners.get(step.weight.weight.data_ptr(), ())) == 1
            ):
                groups.setdefault((step.tokens.home, step.tokens.start, step.weight.dtype), []).append(step)
        for group in groups.values():
            if len(group) > 1:
                stage.steps = [step for step in stage.steps if step not in group]
                stage.steps.append(_merged(group, owners, moved))
    for stage in stages:
        for step in stage.steps:
            if isinstance(step, Instruction):
                step.sources = [(_moved(view, moved), outer, inner) for view, outer, inner in step.sources]


def _merged(
    group: list[Product], owners: dict[int, list[torch.nn.Parameter]], moved: dict[Buffer, tuple[Buffer, int]]
) -> Product:
    parameters = [owners[step.weight.weight.data_ptr()][0] for step in group]
    weight = Matrix(torch.cat([step.weight.weight for step in group]))
    home, start, biases = Buffer(weight.outputs * weight.parts), 0, []
    for step, parameter in zip(group, parameters, strict=True):
        assert step.target is not None
        outputs = step.weight.outputs
        parameter.data = weight.weight[start : start + outputs]
        biases.append(weight.weight.new_zeros(outputs, dtype=torch.float32) if step.bias is None else step.bias)
        moved[step.target] = home, start
        start += outputs
    bias = None if all(step.bias is None for step in group) else torch.cat(biases)
    return dataclasses.replace(group[0], weight=weight, bias=bias, target=home)


def _moved(view: View, moved: dict[Buffer, tuple[Buffer, int]]) -> View:
    if not isinstance(view.home, Buffer) or view.home not in moved:
        return view
    home, start = moved[view.home]
    return dataclasses.replace(view, home=home, start=view.start + start)
