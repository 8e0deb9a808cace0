"""Weights laid out once for CPUs. In: a loaded model. Out: the same, whose forwards over few tokens take half as long.

A decode step multiplies few tokens with large matrices. torch lays such a matrix out anew at each product, or reads it as it
lies, which suits neither one token nor eight. oneDNN, a part of torch, has a layout of its own that can be kept: products then
say the same up to rounding, and eight tokens cost hardly more than one. `torch.compile` does so when it freezes weights.

Measured on two cores of an AMD EPYC with AVX-512, all linear layers of a 134M Llama, ms, as torch does it / laid out:

    tokens        1            4            8            16           64
    float32       25.3 / 11.1  38.3 / 10.4  36.0 / 12.5  44.6 / 14.7  93.1 / 35.0
    bfloat16       8.9 /  5.5   9.5 /  5.9  10.3 /  6.4  12.2 /  7.7  22.5 / 18.3     (equal to the last bit)
"""

from __future__ import annotations

from typing import Any

import torch

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of each dtype that has such products, for the largest score
TOKENS = 16  # that the layout is chosen for: from 4 on it is the same, and best for one token, too


class LaidOutLinear(torch.nn.Module):
    """A linear layer for inference on a CPU: [..., in_features] to [..., out_features]. Moves to no other device or dtype.

    laid_out: its weight as `laid_out` gives it.
    """

    def __init__(self, linear: torch.nn.Linear, laid_out: torch.Tensor):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._laid_out = laid_out
        self._weight: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], for models that look into their layers; a copy that stays from then on."""
        if self._weight is None:
            self._weight = self._laid_out.to_dense()
        return self._weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return _product(tokens, self._laid_out, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _product(tokens: torch.Tensor, laid_out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(tokens, laid_out, bias, "none", [], "")
    return product


@torch.no_grad()
def laid_out(weight: torch.Tensor) -> torch.Tensor | None:
    """A copy of a matrix [out, in] in oneDNN's layout; None where there is no such product, or not the same one."""
    if weight.device.type != "cpu" or weight.dtype not in ROUNDING or not torch.backends.mkldnn.is_available():
        return None
    tokens = torch.linspace(-1, 1, 3 * weight.shape[1]).reshape(3, -1).to(weight.dtype)
    try:
        if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        copy: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS)
        ours, theirs = _product(tokens, copy, None).float(), torch.nn.functional.linear(tokens, weight).float()
    except (AttributeError, RuntimeError):  # another version or build of torch
        return None
    return copy if (ours - theirs).abs().max() <= ROUNDING[weight.dtype] * theirs.abs().max() else None


def lay_out(model: Any) -> Any:
    """Give a model's linear layers weights that are laid out for its CPU; returns the model. No other kind of layer is touched.

    Weights as they were are let go one by one, but for those that another kind of layer shares (tied embeddings). Nothing
    learns any more: where gradients are asked for, torch takes a hundred times as long for such products.
    """
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}  # of each weight: where it is used
    for module in model.modules():
        for name, linear in module.named_children():
            if type(linear) is torch.nn.Linear and "forward" not in vars(linear):  # not one that somebody has changed
                places.setdefault(id(linear.weight), []).append((module, name))
    for users in places.values():
        weight = laid_out(getattr(*users[0]).weight)
        if weight is None:
            continue
        for module, name in users:
            setattr(module, name, LaidOutLinear(getattr(module, name), weight).train(module.training))
        model.requires_grad_(False)
    return model


def kind_of_linear(model: Any) -> str:
    """Who computes its linear layers: "onednn" where they are laid out, else "torch"."""
    return "onednn" if any(isinstance(module, LaidOutLinear) for module in model.modules()) else "torch"
