"""From a traced forward to a program. In: a graph of torch operations. Out: what the program computes (plan.py).

Every operation that a token's numbers go through becomes views, instructions, products and attention; what depends on no token
is computed here, once. Raises Unsupported for what there is no instruction for, and for anything that mixes tokens.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lookahead.backends.lowering import ops
from lookahead.backends.lowering.builder import Builder, Ids, Result
from lookahead.backends.lowering.memory_plan import planned_memory
from lookahead.backends.lowering.plan import (
    ROUNDS,
    STORED,
    Attention,
    Buffer,
    Instruction,
    Plan,
    Product,
    Unsupported,
    View,
    flat_dims,
    reads,
)
from lookahead.backends.lowering.trace import Traced

aten = torch.ops.aten
ours = torch.ops.lookahead
FLOATS = tuple(ROUNDS)


@dataclasses.dataclass(frozen=True)
class Placed:
    """Keys or values that a layer has handed to the cache, see `Plan.placed`."""

    number: int


@dataclasses.dataclass(frozen=True)
class Lines:
    """Attention metadata: what tokens see, in layers of this kind."""

    kind: int


def lowered(forward: Traced, build: Builder, kinds: int, dtype: torch.dtype, *how: Any) -> Plan:
    """The program of a traced forward of a model of this dtype. kinds: of layers. how: see `planned_memory`.
    Raises Unsupported.
    """
    given = iter([Ids(ops.IDS), Ids(ops.POSITIONS), Ids("offsets"), *map(Lines, range(kinds))])
    values: dict[torch.fx.Node, Any] = {}
    output: Any = None
    for node in forward.graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(forward.graph, node.target)
        else:
            arguments = torch.fx.map_arg((node.args, node.kwargs), lambda each: values[each])
            if node.op == "output":
                output = arguments[0][0]
            else:
                values[node] = _value(build, node, *arguments)
    if not isinstance(output, View) or output.count != output.sizes[-1]:
        raise Unsupported("scores that are none of single tokens")
    _return(build, output)
    stages, row_bytes, thread_bytes = planned_memory(build.steps, *how)
    return Plan(stages, row_bytes, thread_bytes, build.placed, output.count, dtype, output.dtype, build.alive, build.most)


def _return(build: Builder, output: View) -> None:
    """Make a step fill what the program returns: the product that the scores come from, if nothing else reads it."""
    for step in build.steps:
        if isinstance(step, Product) and step.target is output.home and output.is_flat and output.start == 0:
            is_read = any(step.target in reads(other) for other in build.steps)
            if not is_read and step.weight.outputs == output.count and step.weight.dtype == output.dtype:
                step.target, step.stored, step.weight = None, STORED[output.dtype], build.whole(step.weight)
                return
    view, size = build.flat(output), torch.finfo(output.dtype).bits // 8
    more = STORED[output.dtype], size
    build.steps.append(Instruction(ops.STORE, 1, view.count, None, [(view, 0, 1)], more=more))


def _value(build: Builder, node: torch.fx.Node, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return what a node computes."""
    flat = torch.utils._pytree.tree_leaves((arguments, named))
    target: Any = node.target
    if not any(isinstance(each, View | Ids | Placed | Lines) for each in flat):
        return target(*arguments, **named)  # depends on no token, or on how many there are
    if target is operator.getitem:
        return arguments[0][arguments[1]]
    if target not in HANDLERS:
        raise Unsupported(f"no instruction for {target}")
    meta: Any = node.meta.get("tensor_meta")
    shape: list[int] = []
    dtype: Any = None
    if hasattr(meta, "shape"):
        shape, dtype = [int(size) for size in meta.shape], meta.dtype
    if dtype is not None and dtype not in FLOATS and not any(isinstance(each, Ids) for each in flat):
        raise Unsupported(f"{target} of {dtype}")
    return HANDLERS[target](Result(build, shape, dtype), *arguments, **named)


def _two(op: int) -> Callable[..., Any]:
    def handler(out: Result, left: Any, right: Any, alpha: float = 1) -> Any:
        if isinstance(left, Ids) or isinstance(right, Ids):
            return _added(out.build, op, left, right)
        if alpha != 1:
            raise Unsupported("a sum with a factor")
        return out.two(op, left, right)

    return handler


def _added(build: Builder, op: int, left: Any, right: Any) -> Ids:
    """Ids to which something is added."""
    ids, other = (left, right) if isinstance(left, Ids) else (right, left)
    counted = isinstance(other, torch.Tensor) and other.flatten().tolist() == list(range(build.tokens))
    if op == ops.ADD and counted and ids == Ids("offsets"):
        return Ids(ops.POSITIONS)
    if op in (ops.ADD, ops.SUBTRACT) and ids is left and isinstance(other, int | torch.Tensor):
        added = torch.as_tensor(other)
        if added.numel() == 1 and not added.is_floating_point():
            return dataclasses.replace(ids, added=ids.added + (1 if op == ops.ADD else -1) * int(added))
    raise Unsupported("other arithmetic with ids or positions")


def _one(op: int) -> Callable[..., Any]:
    def handler(out: Result, view: View) -> View:
        return out.build.one(op, view)

    return handler


def _reshaped(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Lower an operation that shows the same numbers, or some of them, in another shape."""

    def handler(out: Result, view: View | Ids, *given: Any, **named: Any) -> Any:
        if isinstance(view, Ids):
            if out.build.tokens not in out.shape:
                raise Unsupported("some of the tokens")
            return view
        shown = operation(out.build.strided(view), *given, **named)
        if isinstance(shown, torch.Tensor):
            return out.build.like(view, shown)
        return tuple(out.build.like(view, each) for each in shown)

    return handler


def _viewed(out: Result, view: View | Ids, *given: Any) -> View | Ids:
    """Another out.shape of the same numbers in the same order, copied where they lie too far apart for that."""
    if isinstance(view, Ids):
        return view
    for tried in (view, None):
        source = tried or out.build.flat(view)
        try:
            return out.build.like(source, out.build.strided(source).view(out.shape))
        except RuntimeError:  # of torch: it takes a copy
            continue
    raise Unsupported("tokens among numbers")


def _same(out: Result, view: Any, *given: Any, **named: Any) -> Any:
    return view


def _joined(out: Result, views: Sequence[Any], dim: int = 0) -> View:
    if not all(isinstance(view, View) for view in views):
        raise Unsupported("tokens behind tokens")
    build, target, at = out.build, out.build.of_shape(out.shape, out.dtype), 0
    for view in map(build.wide, views):
        size = build.strided(view).shape[dim]
        build.rows(ops.COPY, build.like(target, build.strided(target).narrow(dim, at, size)), [view])
        at += size
    return target


def _stacked(out: Result, views: Sequence[Any], dim: int = 0) -> View:
    return _joined(out, [_reshaped(torch.unsqueeze)(out, view, dim) for view in views], dim)


def _gelu(out: Result, view: View, approximate: str = "none") -> View:
    return out.build.one(ops.GELU if approximate == "none" else ops.GELU_TANH, view)


def _rsqrt(out: Result, view: View) -> View:
    root = out.build.one(ops.SQUARE_ROOT, view, rounds=ops.NOT)
    return out.two(ops.DIVIDE, 1.0, root)


def _power(out: Result, view: View, exponent: float) -> View:
    if exponent == 2:
        return out.two(ops.MULTIPLY, view, view)
    if exponent == 3:
        square = out.build.two(ops.MULTIPLY, out.shape, torch.float32, view, view)
        return out.two(ops.MULTIPLY, square, view)
    if exponent == 0.5:
        return out.build.one(ops.SQUARE_ROOT, view)
    if exponent == -0.5:
        return _rsqrt(out, view)
    raise Unsupported(f"a power of {exponent}")


def _reduced(is_mean: bool) -> Callable[..., View]:
    def handler(out: Result, view: View, dims: Sequence[int] | None, keepdim: bool = False, **named: Any) -> View:
        every = len(view.dims) + 1  # of the model's own counting, with the axis of tokens
        axes = [dim % every for dim in (dims or range(every))]
        if view.axis in axes:
            raise Unsupported("a sum over tokens")
        without = [dim - (dim > view.axis) for dim in axes]
        total = out.build.sums(view, without, keepdim)
        if is_mean:
            return out.two(ops.DIVIDE, total, float(math.prod(view.dims[dim][0] for dim in without)))
        return out.build.one(ops.COPY, dataclasses.replace(total, dtype=out.dtype)) if out.dtype != torch.float32 else total

    return handler


def _layer_norm(out: Result, view: View, sizes: Sequence[int], weight: Any, bias: Any, epsilon: float) -> tuple[View]:
    count = float(math.prod(sizes))
    axes = list(range(len(view.dims) - len(sizes), len(view.dims)))
    if len(sizes) > len(view.dims) - view.axis:
        raise Unsupported("a norm over tokens")
    whole = _shape(out.build, view)
    small = [1 if dim >= len(whole) - len(sizes) else size for dim, size in enumerate(whole)]
    single = torch.float32  # rounded once, at the end
    mean = out.build.two(ops.DIVIDE, small, single, out.build.sums(view, axes, True), count)
    centred = out.build.two(ops.SUBTRACT, whole, single, view, mean)
    squares = out.build.two(ops.MULTIPLY, whole, single, centred, centred)
    variance = out.build.two(ops.DIVIDE, small, single, out.build.sums(squares, axes, True), count)
    variance = out.build.two(ops.ADD, small, single, variance, epsilon)
    scale = out.build.two(ops.DIVIDE, small, single, 1.0, out.build.one(ops.SQUARE_ROOT, variance))
    steps = [(ops.MULTIPLY, scale), (ops.MULTIPLY, weight), (ops.ADD, bias)]
    steps = [(op, other) for op, other in steps if other is not None]
    result = centred
    for number, (op, other) in enumerate(steps):
        result = out.build.two(op, whole, view.dtype if number == len(steps) - 1 else single, result, other)
    return (result,)


def _shape(build: Builder, view: View) -> list[int]:
    """Return the shape with the axis of tokens."""
    sizes = view.sizes
    return [*sizes[: view.axis], build.tokens, *sizes[view.axis :]]


def _converted(out: Result, value: View | Ids, *given: Any, **named: Any) -> Any:
    """_to_copy: to another dtype, or the same."""
    if isinstance(value, Ids):
        if out.dtype not in FLOATS:
            return value
        if value.which != ops.POSITIONS or out.dtype != torch.float32:
            raise Unsupported("numbers made of ids")
        axis = out.build.axis_of(out.shape)
        target = out.build.new([1] * (len(out.shape) - 1), axis, out.dtype)
        out.build.steps.append(Instruction(ops.POSITION, 1, 1, (target, 1, 1), [], more=(value.added,)))
        return target
    if out.dtype == value.dtype or value.dtype != torch.float32:
        return dataclasses.replace(out.build.wide(value), dtype=out.dtype) if out.dtype == torch.float32 else value
    target = out.build.new(value.sizes, value.axis, out.dtype)
    out.build.rows(ops.MULTIPLY, target, [value, out.build.dims_in(1.0, out.shape, value.axis)], ROUNDS[out.dtype])
    return target


def _embedding(out: Result, table: Any, ids: Any, *given: Any, **named: Any) -> View:
    if not isinstance(table, torch.Tensor):
        raise Unsupported("a look-up in other numbers")
    rows = table.detach()
    if rows.stride(1) != 1 or rows.dtype not in FLOATS:
        raise Unsupported("a table that lies otherwise")
    return _look_up(out, ids, rows, len(rows), (rows.stride(0) * rows.element_size(), ROUNDS[rows.dtype]))


def _looked_up(out: Result, ids: Any, number: int, *given: Any) -> View:
    """Lower a look-up in a quantized table."""
    table = out.build.tables[number]
    return _look_up(out, ids, table.weight, table.outputs, (0, table.held))


def _look_up(out: Result, ids: Any, table: torch.Tensor, rows: int, about: tuple[int, int]) -> View:
    """about: of the table, see ops.EMBED in program_kernel.py."""
    if not isinstance(ids, Ids) or not isinstance(ids.which, int):
        raise Unsupported("a look-up by other numbers")
    build = out.build
    build.alive.append(table)
    build.most[ids.which] = min(rows - ids.added, build.most.get(ids.which, rows))
    target = build.of_shape(out.shape, out.dtype)
    more = table.data_ptr(), *about, ids.added, ids.which
    source = View(table, 0, (), target.axis, out.dtype), 0, 1
    build.steps.append(Instruction(ops.EMBED, 1, target.count, (target, 0, 1), [source], ROUNDS[out.dtype], more))
    return target


def _linear(out: Result, tokens: View, number: int, outputs: int) -> View:
    layer = out.build.linears[number]
    return out.build.product(tokens, layer.laid_out, layer.bias, out.shape)


def _matrix(out: Result, tokens: Any, matrix: Any, bias: Any = None) -> View:
    given = isinstance(matrix, torch.Tensor) and matrix.ndim == 2 and isinstance(bias, torch.Tensor | None)
    if not (given and isinstance(tokens, View)):
        raise Unsupported("a product of tokens with tokens")
    return out.build.product(tokens, out.build.weight_of(matrix), bias, out.shape)


def _outer(out: Result, left: Any, right: Any) -> View:
    """A product of matrices of which one is a column and the other a row: of each number with each."""
    if any(_width(out.build, each, dim) != 1 for each, dim in ((left, -1), (right, -2))):
        raise Unsupported("a product of tokens with tokens")
    return out.two(ops.MULTIPLY, left, right)


def _width(build: Builder, value: Any, dim: int) -> int:
    return int((_shape(build, value) if isinstance(value, View) else list(value.shape))[dim])


def _placed(out: Result, states: View, number: int) -> Placed:
    view = out.build.wide(states)
    if view.axis != 2 or len(view.dims) != 3:
        raise Unsupported("keys or values of another shape")
    (_, _), (heads, stride), (width, inner) = view.dims
    if inner != 1:
        view = out.build.flat(view)
        stride = width
    instruction = Instruction(ops.WRITE, heads, width, None, [(view, stride, 1)], placed=number)
    out.build.steps.append(instruction)
    out.build.placed[number] = heads, width
    return Placed(number)


def _attended(out: Result, query: View, keys: Placed, values: Placed, lines: Lines, scale: float) -> View:
    if query.axis != 2 or len(query.dims) != 3 or keys.number % 2 or not isinstance(lines, Lines):
        raise Unsupported("attention of another shape")
    heads, width = query.dims[1][0], query.dims[2][0]
    query = out.build.narrow(query.with_dims(query.dims[1:], 0), out.dtype)
    (key_heads, _), (_, value_width) = (out.build.placed[each.number] for each in (keys, values))
    target = Buffer(heads * value_width, torch.finfo(out.dtype).bits // 8, exact=True)
    sizes = heads, key_heads, width, value_width
    out.build.steps.append(Attention(query, target, keys.number, values.number, *sizes, lines.kind, scale))
    return View(target, 0, flat_dims([1, heads, value_width]), 1, out.dtype)


HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _two(ops.ADD),
    aten.sub.Tensor: _two(ops.SUBTRACT),
    aten.rsub.Scalar: lambda out, view, other, alpha=1: _two(ops.SUBTRACT)(out, other, view, alpha),
    aten.mul.Tensor: _two(ops.MULTIPLY),
    aten.div.Tensor: _two(ops.DIVIDE),
    aten.pow.Tensor_Scalar: _power,
    aten.rsqrt.default: _rsqrt,
    aten.sqrt.default: _one(ops.SQUARE_ROOT),
    aten.neg.default: _one(ops.NEGATE),
    aten.cos.default: _one(ops.COSINE),
    aten.sin.default: _one(ops.SINE),
    aten.exp.default: _one(ops.EXP),
    aten.sigmoid.default: _one(ops.SIGMOID),
    aten.silu.default: _one(ops.SILU),
    aten.tanh.default: _one(ops.TANH),
    aten.erf.default: _one(ops.ERF),
    aten.relu.default: _one(ops.RELU),
    aten.gelu.default: _gelu,
    aten.mean.dim: _reduced(True),
    aten.sum.dim_IntList: _reduced(False),
    aten.native_layer_norm.default: _layer_norm,
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.reshape.default: _viewed,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.cat.default: _joined,
    aten.stack.default: _stacked,
    **{
        each: _reshaped(each)
        for each in (
            *(aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.expand.default, aten.slice.Tensor),
            *(aten.select.int, aten.split.Tensor, aten.split_with_sizes.default),
        )
    },
    aten._to_copy.default: _converted,
    aten.embedding.default: _embedding,
    aten.mm.default: _matrix,
    aten.addmm.default: lambda out, bias, tokens, matrix: _matrix(out, tokens, matrix, bias),
    aten.bmm.default: _outer,
    ours.linear.default: _linear,
    ours.looked_up.default: _looked_up,
    ours.placed.default: _placed,
    ours.attended.default: _attended,
}
