"""Products of a step's tokens with weight matrices on a GPU, in Triton. In: tokens, a matrix. Out: partial sums of outputs.

A step has few tokens, so a product takes as long as reading the matrix does. Programs take some lines of the matrix and one of
its `parts` along the tokens' numbers, so that there are enough of them to keep memory busy; whoever reads a product adds its
parts up (device_rows.py). How a matrix is divided depends on its shape alone, and the numbers of an output are added up in one
order regardless of what else is computed: a token gets the same bits next to any other tokens.

Imported where a GPU asks for it, as it needs Triton.
"""

# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.cuda.device_builder import Matrix

# (tokens, outputs, numbers of a token that are worked on at once, warps, stages of Triton), by the most tokens
TILES = ((16, 64, 128, 4, 4), (32, 64, 128, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (256, 128, 64, 8, 3))
IN_FLOAT32 = (16, 32, 32, 4, 2)


@triton.jit
def _product(
    tokens, weight, bias, target, count, outputs, inner, of_part, token_stride, weight_stride, target_stride,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """tokens: [count, inner]; weight: [outputs, inner]; target: [count, PARTS, outputs]. of_part: numbers of a part.

    WHOLE: a part is a multiple of NUMBERS. HAS_BIAS: bias [outputs] is added, to anything but partial sums.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    begin = tl.program_id(2) * of_part
    number = begin + tl.arange(0, NUMBERS)
    weights = weight + output[:, None].to(tl.int64) * weight_stride + number[None, :]
    numbers = tokens + token[None, :].to(tl.int64) * token_stride + number[:, None]
    sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    end = tl.minimum(begin + of_part, inner)
    for at in range(begin, end, NUMBERS):
        if WHOLE:
            lines = tl.load(weights, mask=(output < outputs)[:, None], other=0.0)
            some = tl.load(numbers, mask=(token < count)[None, :], other=0.0)
        else:
            inside = at + tl.arange(0, NUMBERS) < end
            lines = tl.load(weights, mask=(output < outputs)[:, None] & inside[None, :], other=0.0)
            some = tl.load(numbers, mask=(token < count)[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(lines, some, sums, input_precision="ieee")
        weights += NUMBERS
        numbers += NUMBERS
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0)[:, None]
    into = target + token[None, :].to(tl.int64) * target_stride + tl.program_id(2) * outputs + output[:, None]
    tl.store(into, sums.to(target.dtype.element_ty), mask=(token < count)[None, :] & (output < outputs)[:, None])


def multiply(tokens: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, target: torch.Tensor, target_stride: int) -> None:
    """Fill target[token, part, output], whose tokens are `target_stride` numbers apart, with the parts of tokens @ weight.T.

    tokens: [count, inner], whose numbers lie side by side. bias: float32 [outputs], for a matrix of one part.
    """
    count, weight = len(tokens), matrix.weight
    tiles = IN_FLOAT32 if matrix.dtype == torch.float32 else next((tile for tile in TILES if count <= tile[0]), TILES[-1])
    of_tokens, of_outputs, numbers, warps, stages = tiles
    grid = triton.cdiv(count, of_tokens), triton.cdiv(matrix.outputs, of_outputs), matrix.parts
    _product[grid](
        tokens, weight, target if bias is None else bias, target, count, matrix.outputs, matrix.inner, matrix.of_part,
        tokens.stride(0), weight.stride(0), target_stride,
        of_tokens, of_outputs, numbers, matrix.parts, matrix.inner % numbers == 0 and matrix.of_part % numbers == 0,
        bias is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
