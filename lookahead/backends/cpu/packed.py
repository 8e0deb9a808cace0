"""Checkpoints of quantized weights in the "pack-quantized" format of compressed-tensors. In: a folder. Out: its matrices.

A linear layer NAME has, instead of NAME.weight:

    NAME.weight_packed      int32 [out, in * bits / 32]: numbers of an output one after the other, the first in the lowest bits,
                            each as far above -2 ** (bits - 1) as it states
    NAME.weight_scale       [out, groups]
    NAME.weight_zero_point  int32 [out * bits / 32, groups], packed along the outputs; none where "symmetric"
    NAME.weight_shape       int64 [2]
    NAME.weight_g_idx       int32 [in], the group of each input, where inputs are sorted

Read are weights of 8 bits with a scale for each output, and of 4 bits in groups of 64 or multiples of it. Others are left to
transformers, which loads them by compressed-tensors.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lookahead.backends.cpu.quantized import GROUP, Quantized
from lookahead.errors import ModelError
from lookahead.models.checkpoint import shards_of, tensors_in

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
EMBEDDING_BITS = "lookahead_embedding_bits"  # what config.json calls those to hold the embedding in, 8 or 4, if it is to be
ACTIVATIONS_FIELD = "lookahead_activations"  # of config.json: "none" if tokens are not to be quantized; without it: 8 bits
BLOCK = 128  # inputs whose tokens have 4 or 8 bits together, see quantize/mixed.py
PARTS = ("packed", "scale", "zero_point", "shape", "g_idx")  # of a weight


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, columns] below 2 ** bits (4 or 8), as int32 [rows, columns * bits / 32]."""
    if bits == 4:
        numbers = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
        numbers = numbers[:, ::2] | (numbers[:, 1::2] << 4)
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % 4))
    return padded.flatten().view(torch.int32).view(len(numbers), -1)


def unpacked(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Return what `packed` was given."""
    numbers = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], -1).flatten(1)
    return numbers[:, :columns].contiguous()


def tensors_of(name: str, matrix: Quantized) -> dict[str, torch.Tensor]:
    """A linear layer's tensors, by their names."""
    sorted_inputs, numbers = dict[str, torch.Tensor](), matrix.numbers
    if matrix.order is not None:
        inverse = matrix.order.argsort()
        sorted_inputs, numbers = {f"{name}.weight_g_idx": (inverse // GROUP).int()}, numbers[:, inverse]
    known = {f"{name}.weight_shape": torch.tensor(numbers.shape), **sorted_inputs}
    if matrix.zeros is None:
        words = packed(numbers.view(torch.uint8) ^ 128, 8)
        return {f"{name}.weight_packed": words, f"{name}.weight_scale": matrix.scales, **known}
    return {
        f"{name}.weight_packed": packed(numbers, 4),
        f"{name}.weight_scale": matrix.scales.bfloat16(),
        f"{name}.weight_zero_point": packed(matrix.zeros.T.contiguous(), 4).T.contiguous(),
        **known,
    }


def matrix_of(tensors: dict[str, torch.Tensor], bits: int) -> Quantized | None:
    """The matrix of a layer's tensors, by `PARTS`; None if it is quantized otherwise than our kernels take it.

    Raises KeyError, RuntimeError for tensors that are missing or do not fit.
    """
    outputs, inner = tensors["shape"].tolist()
    scales = tensors["scale"].float().view(outputs, -1)
    groups = scales.shape[1]
    numbers = unpacked(tensors["packed"], bits, inner)
    if numbers.shape != (outputs, inner):
        raise RuntimeError(f"weight_packed has no {outputs} x {inner} numbers")
    order = None
    if "g_idx" in tensors and int(tensors["g_idx"].min()) >= 0:
        if len(tensors["g_idx"]) != inner:
            raise RuntimeError(f"weight_g_idx has no {inner} numbers")
        order = tensors["g_idx"].argsort(stable=True)
        numbers = numbers[:, order]
    if bits == 8:
        if groups > 1 or "zero_point" in tensors:
            return None
        return Quantized((numbers ^ 128).view(torch.int8), scales, None, order)
    if order is not None and len(set(tensors["g_idx"].bincount(minlength=groups).tolist())) > 1:
        return None
    if inner % groups or (inner // groups) % GROUP or not scales.bfloat16().float().equal(scales):
        return None
    zeros = torch.full((outputs, groups), 8, dtype=torch.uint8)
    if "zero_point" in tensors:
        zeros = unpacked(tensors["zero_point"].T.contiguous(), bits, outputs).T.contiguous()
    repeats = inner // groups // GROUP
    return Quantized(numbers, scales.repeat_interleave(repeats, 1), zeros.repeat_interleave(repeats, 1), order)


def read_packed(folder: Path) -> tuple[dict[str, Quantized], dict[str, torch.Tensor]] | None:
    """(the quantized matrices, by the names of their layers; all other tensors); None if a matrix is quantized in another way.

    Raises ModelError for a checkpoint that is damaged.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {}
    others: dict[str, torch.Tensor] = {}
    for name, file in tensors_in(shards_of(folder)):
        layer, _, part = name.rpartition(".weight_")
        if part in PARTS:
            parts.setdefault(layer, {})[part] = file.get_tensor(name)
        else:
            others[name] = file.get_tensor(name)
    matrices = {}
    for layer, tensors in parts.items():
        try:
            bits = 32 * tensors["packed"].shape[1] // int(tensors["shape"][1])
            matrix = matrix_of(tensors, bits) if bits in (4, 8) else None
        except (KeyError, RuntimeError, ValueError, IndexError) as error:
            raise ModelError(f"{folder}: the weights of {layer} are damaged ({error}).") from error
        if matrix is None:
            return None
        matrices[layer] = matrix
    return matrices, others
