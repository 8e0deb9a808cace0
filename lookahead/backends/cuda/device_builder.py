"""Writes down the steps of a program for a GPU. In: a traced forward, as for CPUs. Out: steps whose products are of matrices
as they lie, and read what is stored in any dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.cpu import program_kernel as kernel
from lookahead.backends.cpu.builder import LIKE, Builder
from lookahead.backends.cpu.plan import Buffer, Instruction, Matrix, Product, Stage, Unsupported, View, flat_dims


class DeviceBuilder(Builder):
    """See `Builder`. What a product fills holds partial sums, which only instructions read."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens, ())
        self._of_products: set[Buffer] = set()

    def wide(self, view: View) -> View:
        """Instructions read numbers as they are stored."""
        return view

    def flat(self, view: View) -> View:
        if view.home not in self._of_products or not view.is_flat:
            return super().flat(view)
        key = ("flat", view.home, view.start, view.dims)
        if key not in self._copies:
            copy = self.new(view.sizes, view.axis, view.dtype)
            self.rows(kernel.COPY, copy, [view])
            self._copies[key] = copy
        return self._copies[key].with_dims(flat_dims(view.sizes), view.axis)

    def narrow(self, view: View, dtype: torch.dtype) -> View:
        return super().narrow(self.flat(view) if view.home in self._of_products else view, dtype)

    def panels(self, matrix: torch.Tensor) -> Any:
        """Of a matrix [in, out]: itself."""
        if matrix.stride(0) != 1 or matrix.dtype not in LIKE:
            raise Unsupported("weights in another layout")
        return Matrix(matrix.detach().t())

    def product(self, tokens: View, weight: Any, bias: torch.Tensor | None, shape: Sequence[int]) -> View:
        dims = tokens.dims
        if not dims or dims[-1][0] != weight.inner or tokens.count != weight.inner:
            raise Unsupported("a product with numbers of several tokens")
        given = self.narrow(tokens, weight.dtype)
        axis = self.axis_of(shape)
        home = Buffer(weight.outputs * weight.parts)
        self._of_products.add(home)
        addends = None if bias is None else self.constant(bias)
        self.steps.append(Product(given, weight, addends, home, LIKE[weight.dtype]))
        sizes = [size for place, size in enumerate(shape) if place != axis]
        return View(home, 0, flat_dims(sizes), axis, weight.dtype)


@torch.no_grad()
def merged_products(stages: list[Stage], model: Any) -> None:
    """Make one product of those of a stage that multiply the same tokens. Their weights then lie behind each other, where the
    model's own layers find them: nothing is kept twice.
    """
    owners: dict[int, list[torch.nn.Parameter]] = {}
    for parameter in dict.fromkeys(model.parameters()):
        owners.setdefault(parameter.data_ptr(), []).append(parameter)
    places: dict[Buffer, tuple[Buffer, int]] = {}
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
                stage.steps.append(_merged(group, owners, places))
    for stage in stages:
        for step in stage.steps:
            if isinstance(step, Instruction):
                step.sources = [(_moved(view, places), outer, inner) for view, outer, inner in step.sources]


def _merged(
    group: list[Product], owners: dict[int, list[torch.nn.Parameter]], places: dict[Buffer, tuple[Buffer, int]]
) -> Product:
    parameters = [owners[step.weight.weight.data_ptr()][0] for step in group]
    weight = Matrix(torch.cat([step.weight.weight for step in group]))
    home, start, biases = Buffer(weight.outputs * weight.parts), 0, []
    for step, parameter in zip(group, parameters, strict=True):
        assert step.target is not None
        outputs = step.weight.outputs
        parameter.data = weight.weight[start : start + outputs]
        biases.append(weight.weight.new_zeros(outputs, dtype=torch.float32) if step.bias is None else step.bias)
        places[step.target] = home, start
        start += outputs
    bias = None if all(step.bias is None for step in group) else torch.cat(biases)
    return dataclasses.replace(group[0], weight=weight, bias=bias, target=home)


def _moved(view: View, places: dict[Buffer, tuple[Buffer, int]]) -> View:
    if not isinstance(view.home, Buffer) or view.home not in places:
        return view
    home, start = places[view.home]
    return dataclasses.replace(view, home=home, start=view.start + start)
