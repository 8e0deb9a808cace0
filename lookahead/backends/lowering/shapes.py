"""Operations that show the same numbers in another shape, or put them side by side. In: views. Out: views, hardly ever a copy.

Each takes a builder, the shape and dtype of its result with the axis of tokens, and what torch's operation takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.lowering import ops
from lookahead.backends.lowering.builder import Builder, Ids
from lookahead.backends.lowering.plan import Unsupported, View, split_dims


def viewed(build: Builder, shape: list[int], dtype: torch.dtype, /, view: View | Ids, *given: Any, **named: Any) -> Any:
    """Another shape of the same numbers in the same order."""
    if isinstance(view, Ids):
        return view
    axis = build.axis_of(shape)
    before, behind = shape[:axis], shape[axis + 1 :]
    if math.prod(before) != math.prod(view.sizes[: view.axis]):
        raise Unsupported("tokens among numbers")
    for tried in (view, None):
        of = tried or build.flat(view)
        first, second = split_dims(of.dims[: of.axis], before), split_dims(of.dims[of.axis :], behind)
        if first is not None and second is not None:
            return of.with_dims([*first, *second], axis)
    raise Unsupported("a view")


def same(build: Builder, shape: list[int], dtype: torch.dtype, /, view: Any, *given: Any, **named: Any) -> Any:
    return view


def _permuted(build: Builder, view: View, order: Sequence[int]) -> View:
    full: list[Any] = [*view.dims[: view.axis], None, *view.dims[view.axis :]]
    turned = [full[place] for place in order]
    return view.with_dims([dim for dim in turned if dim is not None], turned.index(None))


def transposed(build: Builder, shape: list[int], dtype: torch.dtype, /, view: View, first: int, second: int) -> View:
    order = list(range(len(shape)))
    order[first], order[second] = order[second], order[first]
    return _permuted(build, view, order)


def permuted(build: Builder, shape: list[int], dtype: torch.dtype, /, view: View, order: Sequence[int]) -> View:
    return _permuted(build, view, [place % len(shape) for place in order])


def unsqueezed(build: Builder, shape: list[int], dtype: torch.dtype, /, view: View | Ids, dim: int) -> View | Ids:
    if isinstance(view, Ids):
        return view
    place = dim % len(shape)
    own = place - (place > view.axis)
    dims = [*view.dims[:own], (1, 0), *view.dims[own:]]
    return view.with_dims(dims, view.axis + (place <= view.axis))


def expanded(
    build: Builder, shape: list[int], dtype: torch.dtype, /, view: View | Ids, *given: Any, **named: Any
) -> View | Ids:
    if isinstance(view, Ids):
        return view
    return build.dims_in(view, shape, build.axis_of(shape))


def sliced(
    build: Builder,
    shape: list[int],
    dtype: torch.dtype,
    /,
    view: View | Ids,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> View | Ids:
    if isinstance(view, Ids):
        if build.tokens not in shape:
            raise Unsupported("some of the tokens")
        return view
    place = dim % (len(view.dims) + 1)
    if place == view.axis:
        if shape[place] != build.tokens:
            raise Unsupported("some of the tokens")
        return view
    own = place - (place > view.axis)
    size, stride = view.dims[own]
    first = range(size)[slice(start, end, step)].start
    dims = [*view.dims[:own], (shape[place], stride * step), *view.dims[own + 1 :]]
    return view.with_dims(dims, start=view.start + first * stride)


def selected(build: Builder, shape: list[int], dtype: torch.dtype, /, view: View, dim: int, index: int) -> View:
    place = dim % (len(view.dims) + 1)
    if not isinstance(view, View) or place == view.axis:
        raise Unsupported("one of the tokens")
    own = place - (place > view.axis)
    size, stride = view.dims[own]
    dims = [*view.dims[:own], *view.dims[own + 1 :]]
    return view.with_dims(dims, view.axis - (place < view.axis), view.start + index % size * stride)


def split(
    build: Builder, shape: list[int], dtype: Any, /, view: View, sizes: int | Sequence[int], dim: int = 0
) -> tuple[View, ...]:
    place = dim % (len(view.dims) + 1)
    if not isinstance(view, View) or place == view.axis:
        raise Unsupported("some of the tokens")
    own = place - (place > view.axis)
    total, stride = view.dims[own]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
    pieces, at = [], 0
    for size in sizes:
        dims = [*view.dims[:own], (size, stride), *view.dims[own + 1 :]]
        pieces.append(view.with_dims(dims, start=view.start + at * stride))
        at += size
    return tuple(pieces)


def joined(build: Builder, shape: list[int], dtype: torch.dtype, /, views: Sequence[Any], dim: int = 0) -> View:
    axis, place = build.axis_of(shape), dim % len(shape)
    if place == axis or not all(isinstance(view, View) for view in views):
        raise Unsupported("tokens behind tokens")
    own = place - (place > axis)
    target = build.new([size for number, size in enumerate(shape) if number != axis], axis, dtype)
    at, stride = 0, target.dims[own][1]
    for view in views:
        source = build.wide(view)
        size = source.dims[own][0]
        part = target.with_dims([*target.dims[:own], (size, stride), *target.dims[own + 1 :]], start=at * stride)
        build.rows(ops.COPY, part, [source])
        at += size
    return target


def stacked(build: Builder, shape: list[int], dtype: torch.dtype, /, views: Sequence[View], dim: int = 0) -> View:
    place = dim % len(shape)
    return joined(build, shape, dtype, [unsqueezed(build, shape, dtype, view, place) for view in views], place)
