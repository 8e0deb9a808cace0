"""Writes down the steps of a program (plan.py). In: views of tokens' numbers. Out: instructions and products on them.

Raises Unsupported for what mixes tokens, and for numbers that lie too far apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.lowering import ops
from lookahead.backends.lowering.plan import (
    LIKE,
    ROUNDS,
    STORED,
    Buffer,
    Dim,
    Instruction,
    Product,
    Step,
    Unsupported,
    View,
    flat_dims,
    merged_dims,
)

MOST_COPIES = 128  # instructions that one operation may become because its numbers lie in no two dims
FAR = 1 << 40  # from token to token in `Builder.strided`: farther than any numbers of a token
MEMORY = torch.empty(1 << 50, device="meta")
EXACT = (ops.COPY, ops.NEGATE, ops.RELU)  # what they give is what they were given: nothing to round


@dataclasses.dataclass(frozen=True)
class Ids:
    """Whole numbers of each token, ops.IDS or POSITIONS, and what is added to them; or what lies before it: "offsets"."""

    which: int | str
    added: int = 0


class Builder:
    """Writes down steps; each backend has its own. tokens: of the traced forward, a size that nothing else has.

    linears, tables: as lookahead::linear and looked_up number.
    """

    def __init__(self, tokens: int, linears: Sequence[Any] = (), tables: Sequence[Any] = ()):
        self.tokens, self.linears, self.tables = tokens, linears, tables
        self.steps: list[Step] = []
        self.placed: dict[int, Dim] = {}
        self.alive: list[torch.Tensor] = []
        self.most: dict[int, int] = {}
        self._copies: dict[tuple[Any, ...], View] = {}

    def new(self, sizes: Sequence[int], axis: int, dtype: torch.dtype) -> View:
        return View(Buffer(max(1, math.prod(sizes))), 0, flat_dims(sizes), axis, dtype)

    def of_shape(self, shape: Sequence[int], dtype: torch.dtype) -> View:
        """shape: with the axis of tokens."""
        axis = self.axis_of(shape)
        return self.new([*shape[:axis], *shape[axis + 1 :]], axis, dtype)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """float32, in memory that stays."""
        self.alive.append(tensor.detach().float().contiguous())
        return self.alive[-1]

    def strided(self, view: View) -> torch.Tensor:
        """A meta tensor with the sizes and strides of a view: by it torch computes those of slices, permutations and so on."""
        dims = [*view.dims[: view.axis], (self.tokens, FAR), *view.dims[view.axis :]]
        return MEMORY.as_strided([size for size, _ in dims], [stride for _, stride in dims], view.start)

    def like(self, view: View, tensor: torch.Tensor) -> View:
        """The view that shows the numbers that such a tensor shows. Raises Unsupported if it does not show all tokens."""
        dims = [(size, 0 if size == 1 else stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        if dims.count((self.tokens, FAR)) != 1:
            raise Unsupported("tokens among numbers, or some of the tokens")
        axis = dims.index((self.tokens, FAR))
        del dims[axis]
        return view.with_dims(dims, axis, int(tensor.storage_offset()))

    def dims_in(self, value: View | torch.Tensor | float, shape: Sequence[int], axis: int) -> View:
        """A value as one of this shape, whose axis of tokens is left out: sizes of 1 are spread."""
        if isinstance(value, View):
            view = self.wide(value)
            tensor, stride = self.strided(view), FAR
        else:
            tensor, stride = self.constant(torch.as_tensor(value, dtype=torch.float32)), 0
            view = View(tensor, 0, (), axis, torch.float32)
        try:
            tensor = tensor.expand(*shape)
        except RuntimeError as error:
            raise Unsupported(f"shapes that do not fit: {list(tensor.shape)}, {list(shape)}") from error
        dims = [*zip(tensor.shape, tensor.stride(), strict=True)]
        if dims.pop(axis)[1] != stride:
            raise Unsupported("tokens next to numbers, or a constant that differs from token to token")
        return view.with_dims(dims, axis)

    def rows(self, op: int, target: View, sources: Sequence[View], rounds: int = ops.NOT, more: tuple[int, ...] = ()) -> None:
        """Instructions over all dims of views of one shape, two at a time."""
        operands = [target, *sources]
        merged = merged_dims([view.dims for view in operands])
        if len(sources) == 2 and merged and any(dim[1] not in (0, 1) for dim in merged[-1]):
            copies = [view if _inner(view) in (0, 1) else self.flat(view) for view in sources]
            merged = merged_dims([view.dims for view in (target, *copies)])
            operands = [target, *copies]
        while len(merged) < 2:
            merged.insert(0, tuple((1, 0) for _ in operands))
        *unrolled, outer, inner = merged
        if inner[0][0] == 1:
            inner = tuple((1, 1) for _ in operands)
        if (inner[0][1] != 1 and op != ops.COPY) or math.prod(dim[0][0] for dim in unrolled) > MOST_COPIES:
            raise Unsupported(f"numbers that lie too far apart: {merged}")
        for index in itertools.product(*(range(dim[0][0]) for dim in unrolled)):
            starts = [
                view.start + sum(at * dim[number][1] for at, dim in zip(index, unrolled, strict=True))
                for number, view in enumerate(operands)
            ]
            views = [
                (view.with_dims(view.dims, start=start), outer[number][1], inner[number][1])
                for number, (view, start) in enumerate(zip(operands, starts, strict=True))
            ]
            self.steps.append(
                Instruction(op, outer[0][0], inner[0][0], views[0], views[1:], ops.NOT if op in EXACT else rounds, more)
            )

    def lies_flat(self, view: View) -> bool:
        """Tell whether it can be read where numbers must lie side by side."""
        return isinstance(view.home, Buffer) and view.is_flat

    def flat(self, view: View) -> View:
        """The same numbers side by side, copied if they are not."""
        view = self.wide(view)
        if self.lies_flat(view):
            return view
        key = ("flat", view.home, view.start, view.dims) if isinstance(view.home, Buffer) else None
        if key is None or key not in self._copies:
            copy = self.new(view.sizes, view.axis, view.dtype)
            self.rows(ops.COPY, copy, [view])
            if key is None:
                return copy
            self._copies[key] = copy
        return self._copies[key].with_dims(flat_dims(view.sizes), view.axis)

    def wide(self, view: View) -> View:
        """The same numbers as instructions read them."""
        return view

    def narrow(self, view: View, dtype: torch.dtype) -> View:
        """The same numbers side by side as the model stores them."""
        size = torch.finfo(dtype).bits // 8
        if self.lies_flat(view) and isinstance(view.home, Buffer) and view.home.size == size:
            return view
        view = self.flat(view)
        if size == 4:
            return view
        key = ("narrow", view.home, view.start, view.count)
        if key not in self._copies:
            copy = View(Buffer(view.count, size), 0, flat_dims([view.count]), 0, dtype)
            source = view.with_dims(flat_dims([view.count]), 0)
            self.steps.append(Instruction(ops.STORE, 1, view.count, (copy, 0, 1), [(source, 0, 1)], more=(STORED[dtype], size)))
            self._copies[key] = copy
        return self._copies[key].with_dims(flat_dims(view.sizes), view.axis)

    def two(self, op: int, shape: Sequence[int], dtype: torch.dtype, left: Any, right: Any) -> View:
        target = self.of_shape(shape, dtype)
        self.rows(op, target, [self.dims_in(each, shape, target.axis) for each in (left, right)], ROUNDS[dtype])
        return target

    def one(self, op: int, view: View, rounds: int | None = None) -> View:
        view = self.wide(view)
        target = self.new(view.sizes, view.axis, view.dtype)
        self.rows(op, target, [view], ROUNDS[view.dtype] if rounds is None else rounds)
        return target

    def sums(self, view: View, dims: Sequence[int], keep: bool) -> View:
        """Sums of numbers along some dims, counted without the axis of tokens."""
        view = self.wide(view)
        kept = [dim for dim in range(len(view.dims)) if dim not in dims]
        count = math.prod(view.dims[dim][0] for dim in dims)
        turned = self.flat(view.with_dims([view.dims[dim] for dim in (*kept, *dims)], 0))
        outer = turned.count // count
        sizes = [(1 if dim in dims else size) for dim, size in enumerate(view.sizes) if keep or dim not in dims]
        axis = view.axis if keep else view.axis - sum(dim < view.axis for dim in dims)
        target = self.new(sizes, axis, torch.float32)
        self.steps.append(Instruction(ops.SUM, outer, count, (target, 1, 1), [(turned, count, 1)]))
        return target

    def axis_of(self, shape: Sequence[int]) -> int:
        axes = [dim for dim, size in enumerate(shape) if size == self.tokens]
        if len(axes) != 1:
            raise Unsupported("no one axis of tokens" if not axes else "tokens next to tokens")
        return axes[0]

    def product(self, tokens: View, weight: Any, bias: torch.Tensor | None, shape: Sequence[int]) -> View:
        given, dims = self.given(tokens, weight), tokens.dims
        if not dims or dims[-1][0] != weight.inner or tokens.count != weight.inner:
            raise Unsupported("a product with numbers of several tokens")
        target = self.of_shape(shape, weight.dtype)
        assert isinstance(target.home, Buffer)
        addends = None if bias is None else self.constant(bias)
        self.steps.append(Product(given, weight, addends, target.home, LIKE[weight.dtype]))
        return target

    def given(self, tokens: View, weight: Any) -> View:
        """Tokens as they are multiplied by this weight. Raises Unsupported for one that programs do not multiply by."""
        raise NotImplementedError

    def weight_of(self, matrix: torch.Tensor) -> Any:
        """A matrix [in, out] as it is multiplied by. Raises Unsupported."""
        raise NotImplementedError

    def whole(self, weight: Any) -> Any:
        """Take a product whose numbers nobody adds up."""
        return weight


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of an operation of a traced forward. shape: with the axis of tokens."""

    build: Builder
    shape: list[int]
    dtype: torch.dtype

    def two(self, op: int, left: Any, right: Any) -> View:
        return self.build.two(op, self.shape, self.dtype, left, right)


def _inner(view: View) -> int:
    merged = merged_dims([view.dims])
    return merged[-1][0][1] if merged else 1
