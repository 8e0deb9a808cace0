"""What a program computes, before it has an address. In: rows of numbers as views. Out: instructions on views.

A `Buffer` holds one row of numbers for each token. A `View` shows some of them as a tensor of a model's shape, whose axis of
tokens is left out: so views, transpositions, slices and expansions cost nothing. Constants are seen through views as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.lowering import ops
from lookahead.errors import ModelError

Dim = tuple[int, int]  # size and stride, in numbers
# By dtype: to what results are rounded, and how they are stored
ROUNDS = {torch.float32: ops.NOT, torch.bfloat16: ops.TO_BFLOAT16, torch.float16: ops.TO_FLOAT16}
STORED = {torch.float32: ops.AS_FLOAT32, torch.bfloat16: ops.AS_BFLOAT16, torch.float16: ops.AS_FLOAT16}
LIKE = {torch.float32: ops.AS_FLOAT32, torch.bfloat16: ops.LIKE_BFLOAT16, torch.float16: ops.LIKE_FLOAT16}


class Unsupported(ModelError):
    """A model computes what no instruction does."""


@dataclasses.dataclass(eq=False)
class Buffer:
    """Rows of `numbers`, of that many bytes each. exact: rows lie side by side; else each begins at a multiple of 64 bytes.
    late: it has rows of the tokens whose scores are wanted alone.

    Filled in by `arrange`: local, whether only one stage uses it, whose threads then have a row each; offset in bytes, of a row
    in a thread's memory, else to be multiplied by the most tokens that there may be.
    """

    numbers: int
    size: int = 4
    exact: bool = False
    late: bool = False
    local: bool = False
    offset: int = 0

    @property
    def stride(self) -> int:
        """Bytes from row to row."""
        return self.numbers * self.size if self.exact else -(-self.numbers * self.size // 64) * 64


@dataclasses.dataclass(frozen=True)
class View:
    """home: a buffer, or float32 numbers that are the same for all tokens. start: the first number that is shown.

    dims: without the axis of tokens, which `axis` dims stand before. dtype: what the numbers are in the model.
    """

    home: Buffer | torch.Tensor
    start: int
    dims: tuple[Dim, ...]
    axis: int
    dtype: torch.dtype

    @property
    def sizes(self) -> list[int]:
        return [size for size, _ in self.dims]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def with_dims(self, dims: Sequence[Dim], axis: int | None = None, start: int | None = None) -> View:
        return dataclasses.replace(
            self, dims=tuple(dims), axis=self.axis if axis is None else axis, start=self.start if start is None else start
        )

    @property
    def is_flat(self) -> bool:
        """Its numbers lie side by side in the order of its dims."""
        return merged_dims([self.dims]) in ([], [((self.count, 1),)])


def flat_dims(sizes: Sequence[int]) -> tuple[Dim, ...]:
    """Dims of numbers that lie side by side."""
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    return tuple(zip(sizes, strides, strict=True))


def merged_dims(operands: Sequence[Sequence[Dim]]) -> list[tuple[Dim, ...]]:
    """Find as few dims as show the same numbers of all operands, whose sizes are alike: of each dim what it is for every
    operand.
    """
    result: list[tuple[Dim, ...]] = []
    for dims in zip(*operands, strict=True):
        if dims[0][0] == 1:
            continue
        size = dims[0][0]
        if result and all(outer[1] == size * inner[1] for outer, inner in zip(result[-1], dims, strict=True)):
            result[-1] = tuple((outer[0] * size, inner[1]) for outer, inner in zip(result[-1], dims, strict=True))
        else:
            result.append(tuple(dims))
    return result


@dataclasses.dataclass(eq=False)
class Instruction:
    """One for single tokens. target, sources: (view, outer stride, inner stride); no target: the scores.

    rounds: to what results are rounded. more: what its kind needs besides. placed: of WRITE, which keys or values.
    """

    op: int
    outer: int
    inner: int
    target: tuple[View, int, int] | None
    sources: list[tuple[View, int, int]]
    rounds: int = 0
    more: tuple[int, ...] = ()
    placed: int | None = None


@dataclasses.dataclass(eq=False)
class Product:
    """tokens: flat, float32; bfloat16 for pairs, groups of 8 bits for quantized weights; on a GPU, of the weight's dtype.

    target: its buffer, None for the scores that the program returns.
    """

    tokens: View
    weight: Any  # cpu/panels.py, or cuda/device_builder.py
    bias: torch.Tensor | None
    target: Buffer | None
    stored: int


@dataclasses.dataclass(eq=False)
class Attention:
    """query: flat [heads, width]; target: exact rows [heads, value width]; both of the model's dtype. keys, values: which.

    kind: of layers, which tells what tokens see.
    """

    query: View
    target: Buffer
    keys: int
    values: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    kind: int
    scale: float


Step = Instruction | Product | Attention


@dataclasses.dataclass
class Stage:
    """Steps of one kind that do not wait for each other. late: for the tokens whose scores are wanted alone."""

    steps: list[Any]
    late: bool = False


@dataclasses.dataclass
class Plan:
    """stages: in their order. row_bytes: of all buffers, for a token; thread_bytes: of local ones, for a thread.

    placed: heads and numbers of each of the keys and values that layers write, two for a layer. vocab: scores of a token.
    dtype: of keys and values. alive: what instructions hold addresses of. most: ids and positions (ops.IDS, POSITIONS) that
    there are no rows for in tables, from these on.
    """

    stages: list[Stage]
    row_bytes: int
    thread_bytes: int
    placed: dict[int, Dim]
    vocab: int
    dtype: torch.dtype
    scores_dtype: torch.dtype
    alive: list[torch.Tensor]
    most: dict[int, int]


def reads(step: Step) -> list[Buffer]:
    """Buffers that a step reads."""
    if isinstance(step, Instruction):
        return [view.home for view, _, _ in step.sources if isinstance(view.home, Buffer)]
    view = step.tokens if isinstance(step, Product) else step.query
    assert isinstance(view.home, Buffer)
    return [view.home]


def written(step: Step) -> Buffer | None:
    """The buffer that a step writes to; None if it writes elsewhere."""
    if not isinstance(step, Instruction):
        return step.target
    home = step.target[0].home if step.target else None
    return home if isinstance(home, Buffer) else None
