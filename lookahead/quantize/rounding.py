"""Rounding weights so that errors compensate each other. In: a matrix, second moments of its inputs. Out: whole numbers.

Columns are rounded one after the other, and what a column's rounding changes in the products is made up for by the columns that
are not rounded yet, as far as their inputs vary together with its own. A group of 64 columns gets its scales and zero points
when it is reached. Groups with large inputs come first, and in a group the columns with large inputs.
Source: GPTQ, arXiv 2210.17323.
"""

from __future__ import annotations

import dataclasses

import torch

from lookahead.backends.cpu.quantized import GROUP, Quantized, in_4_bits, in_8_bits

DAMPING = 0.01  # that is added to the diagonal of the moments, as a share of its mean
DAMPINGS = 4  # that are tried, each ten times the last


@torch.no_grad()
def quantized(weight: torch.Tensor, bits: int, moments: torch.Tensor | None = None) -> Quantized:
    """weight: [out, in]. bits: 8 or 4. moments: float32 [in, in], means of products of two inputs; None: each weight is rounded
    to the nearest. Of 4 bits, `in` is then a multiple of 64.
    """
    plain = in_8_bits(weight) if bits == 8 else None
    if moments is None or not moments.any():
        return plain or in_4_bits(weight)
    sizes = moments.diagonal()
    order = _order(sizes)
    weight, sizes = weight.float()[:, order], sizes[order]
    factor = _factor(moments[order][:, order])
    if factor is None:
        return plain or in_4_bits(weight[:, order.argsort()])
    inner, groups = weight.shape[1], -(-weight.shape[1] // GROUP)
    numbers = torch.empty(weight.shape, dtype=torch.uint8 if plain is None else torch.int8)
    scales, zeros = torch.empty(len(weight), groups), torch.empty(len(weight), groups, dtype=torch.uint8)
    for start in range(0, inner, GROUP):
        part = slice(start, min(start + GROUP, inner))
        if plain is None:
            group = in_4_bits(weight[:, part], sizes[part])
            assert group.zeros is not None
            scale, zero, least, most = group.scales[:, 0], group.zeros[:, 0].float(), 0, 15
            index = int(order[start]) // GROUP
            scales[:, index], zeros[:, index] = scale, group.zeros[:, 0]
        else:
            scale, zero, least, most = plain.scales[:, 0], torch.zeros(()), -127, 127
        errors = torch.empty(len(weight), part.stop - start)
        for column in range(start, part.stop):
            number = (weight[:, column] / scale).round_().add_(zero).clamp_(least, most)
            numbers[:, column] = number
            errors[:, column - start] = (weight[:, column] - (number - zero) * scale) / factor[column, column]
            weight[:, column + 1 : part.stop].addr_(errors[:, column - start], factor[column, column + 1 : part.stop], alpha=-1)
        weight[:, part.stop :].addmm_(errors, factor[part, part.stop :], alpha=-1)
    back = order.argsort()
    if plain is not None:
        return dataclasses.replace(plain, numbers=numbers[:, back].contiguous())
    return Quantized(numbers[:, back].contiguous(), scales, zeros)


def _order(sizes: torch.Tensor) -> torch.Tensor:
    """int64 [in]: columns with large inputs first, but those of a group of 64 together. sizes: means of squared inputs."""
    groups = torch.arange(len(sizes)) // GROUP
    counts = groups.bincount()
    means = torch.zeros(len(counts)).index_add_(0, groups, sizes) / counts
    by_size = sizes.argsort(descending=True, stable=True)
    rank = torch.empty_like(counts)
    rank[means.argsort(descending=True, stable=True)] = torch.arange(len(means))
    return by_size[rank[groups[by_size]].argsort(stable=True)]


def _factor(moments: torch.Tensor) -> torch.Tensor | None:
    """The upper triangular matrix U with U^T U = moments^-1; None if the moments, damped ever more, stay without inverse."""
    damping = DAMPING * float(moments.diagonal().mean())
    for _ in range(DAMPINGS):
        damped = moments.clone()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                return upper
        damping *= 10
    return None
