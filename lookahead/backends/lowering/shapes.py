"""Operations that show the same numbers in another shape, or put them side by side. In: views. Out: views, hardly ever a copy.

Each takes what is known of its result, and what torch's operation takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lookahead.backends.lowering import ops
from lookahead.backends.lowering.builder import Ids, Result
from lookahead.backends.lowering.plan import Unsupported, View, split_dims


def viewed(out: Result, view: View | Ids, *given: Any, **named: Any) -> Any:
    """Another out.shape of the same numbers in the same order."""
    if isinstance(view, Ids):
        return view
    axis = out.build.axis_of(out.shape)
    before, behind = out.shape[:axis], out.shape[axis + 1 :]
    if math.prod(before) != math.prod(view.sizes[: view.axis]):
        raise Unsupported("tokens among numbers")
    for tried in (view, None):
        of = tried or out.build.flat(view)
        first, second = split_dims(of.dims[: of.axis], before), split_dims(of.dims[of.axis :], behind)
        if first is not None and second is not None:
            return of.with_dims([*first, *second], axis)
    raise Unsupported("a view")


def same(out: Result, view: Any, *given: Any, **named: Any) -> Any:
    return view


def _permuted(view: View, order: Sequence[int]) -> View:
    full: list[Any] = [*view.dims[: view.axis], None, *view.dims[view.axis :]]
    turned = [full[place] for place in order]
    return view.with_dims([dim for dim in turned if dim is not None], turned.index(None))


def transposed(out: Result, view: View, first: int, second: int) -> View:
    order = list(range(len(out.shape)))
    order[first], order[second] = order[second], order[first]
    return _permuted(view, order)


def permuted(out: Result, view: View, order: Sequence[int]) -> View:
    return _permuted(view, [place % len(out.shape) for place in order])


def unsqueezed(out: Result, view: View | Ids, dim: int) -> View | Ids:
    if isinstance(view, Ids):
        return view
    place = dim % len(out.shape)
    own = place - (place > view.axis)
    dims = [*view.dims[:own], (1, 0), *view.dims[own:]]
    return view.with_dims(dims, view.axis + (place <= view.axis))


def expanded(out: Result, view: View | Ids, *given: Any, **named: Any) -> View | Ids:
    if isinstance(view, Ids):
        return view
    return out.build.dims_in(view, out.shape, out.build.axis_of(out.shape))


def sliced(
    out: Result, view: View | Ids, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> View | Ids:
    if isinstance(view, Ids):
        if out.build.tokens not in out.shape:
            raise Unsupported("some of the tokens")
        return view
    place = dim % (len(view.dims) + 1)
    if place == view.axis:
        if out.shape[place] != out.build.tokens:
            raise Unsupported("some of the tokens")
        return view
    own = place - (place > view.axis)
    size, stride = view.dims[own]
    first = range(size)[slice(start, end, step)].start
    dims = [*view.dims[:own], (out.shape[place], stride * step), *view.dims[own + 1 :]]
    return view.with_dims(dims, start=view.start + first * stride)


def selected(out: Result, view: View, dim: int, index: int) -> View:
    place = dim % (len(view.dims) + 1)
    if not isinstance(view, View) or place == view.axis:
        raise Unsupported("one of the tokens")
    own = place - (place > view.axis)
    size, stride = view.dims[own]
    dims = [*view.dims[:own], *view.dims[own + 1 :]]
    return view.with_dims(dims, view.axis - (place < view.axis), view.start + index % size * stride)


def split(out: Result, view: View, sizes: int | Sequence[int], dim: int = 0) -> tuple[View, ...]:
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


def joined(out: Result, views: Sequence[Any], dim: int = 0) -> View:
    target, place = out.build.of_shape(out.shape, out.dtype), dim % len(out.shape)
    axis = target.axis
    if place == axis or not all(isinstance(view, View) for view in views):
        raise Unsupported("tokens behind tokens")
    own = place - (place > axis)
    at, stride = 0, target.dims[own][1]
    for view in views:
        source = out.build.wide(view)
        size = source.dims[own][0]
        part = target.with_dims([*target.dims[:own], (size, stride), *target.dims[own + 1 :]], start=at * stride)
        out.build.rows(ops.COPY, part, [source])
        at += size
    return target


def stacked(out: Result, views: Sequence[View], dim: int = 0) -> View:
    place = dim % len(out.shape)
    return joined(out, [unsqueezed(out, view, place) for view in views], place)
