"""Weights laid out once for CPUs. In: a loaded model. Out: the same, whose forwards over few tokens take half as long or less.

A decode step multiplies few tokens with large matrices. torch lays such a matrix out again at each product, or reads it as it
lies, which suits neither one token nor eight. So each matrix is copied once into a layout of its own, and products then are the
same up to rounding:

    panels   ours (backends/cpu/panels.py), on x86 CPUs: float32 from AVX2 on, half precision with AVX-512
    oneDNN   as `torch.compile` uses it when it freezes weights: float32 elsewhere, bfloat16 on CPUs that multiply it in tiles
             (AMX), or are not x86

A token is to get the same bits alone and alongside others (exact.py). In panels it does, and by oneDNN alongside one other or
more; where a single token gets other bits, as in sums of 2,048 products, it goes through twice.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lookahead.backends.cpu.panels import Panels
from lookahead.forward.processor import multiplies_bfloat16

# Of each dtype that is laid out: how far products may be from torch's, as a share of the largest.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
TRIED = 24  # tokens whose products are compared: in half precision most are alike even where sums are split otherwise
AT_ONCE = 1 << 20  # weights that are widened at once
TOKENS = 16  # that oneDNN's layout is chosen for: from 4 on it is the same, and best for one token, too


class OneDnnWeight:
    """A float32 or bfloat16 matrix [out, in] as oneDNN reads it."""

    library: ClassVar[str] = "onednn"

    def __init__(self, weight: torch.Tensor):
        self.nbytes = weight.nbytes  # as it does as a matrix
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS)
        kind = weight.shape, weight.dtype, torch.get_num_threads()
        if kind not in _differ_alone:
            _differ_alone[kind] = _differs_alone(self, weight)
        self._pairs = _differ_alone[kind]  # one token goes through twice, so that it gets the same bits as alongside others

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Return those that it multiplies faster on this CPU than torch does otherwise."""
        if not torch.backends.mkldnn.is_available():
            return False
        return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bfloat16())

    def product(self, tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._pairs and tokens.numel() == tokens.shape[-1]:
            twice = self._product(tokens.reshape(1, -1).repeat(2, 1), bias)
            return twice[0].reshape(*tokens.shape[:-1], -1)
        return self._product(tokens, bias)

    def _product(self, tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(tokens, self._weight, bias, "none", [], "")
        return product

    def to_dense(self) -> torch.Tensor:
        return self._weight.to_dense()


LaidOut = Panels | OneDnnWeight
_differ_alone: dict[tuple[torch.Size, torch.dtype, int], bool] = {}  # by shape, dtype and threads, see `_differs_alone`


def _differs_alone(laid_out: OneDnnWeight, weight: torch.Tensor) -> bool:
    """Tell whether a token that goes alone gets other bits than alongside others. oneDNN splits long sums for
    one token only.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(TRIED, weight.shape[1], generator=generator).to(weight.dtype)
    alone = torch.cat([laid_out._product(token, None) for token in tokens.split(1)])
    return not alone.equal(laid_out._product(tokens, None))


class LaidOutLinear(torch.nn.Module):
    """A linear layer for inference on a CPU: [..., in_features] to [..., out_features]. Moves to no other device or dtype.

    laid_out: its weight as `laid_out` gives it.
    """

    def __init__(self, linear: torch.nn.Linear, laid_out: LaidOut):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.laid_out = laid_out
        self._weight: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], for models that look into their layers; a copy that stays from then on."""
        if self._weight is None:
            self._weight = self.laid_out.to_dense()
        return self._weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.laid_out.product(tokens, self.bias)

    @_disable_current_modes()  # weights are unpacked as they are
    def wide(self, tokens: torch.Tensor) -> torch.Tensor:
        """The same by torch, in the dtype of the tokens. Panels are multiplied by as they lie, a few at a time: widened, they
        stay in the processor's cache.
        """
        held, bias = self.laid_out, None if self.bias is None else self.bias.to(tokens.dtype)
        if type(held) is not Panels:
            return torch.nn.functional.linear(tokens, held.to_dense().to(tokens.dtype), bias)
        _, lines, _, step = held.weight.shape  # [panels, lines, outputs, inputs]
        flat = torch.nn.functional.pad(tokens.reshape(-1, held.inner), (0, lines * step - held.inner))
        parts = []
        for panels in held.weight.split(max(1, AT_ONCE // held.weight[0].numel())):
            of_step = [flat[:, k::step] @ panels[..., k].to(tokens.dtype) for k in range(step)]
            parts.append(torch.stack(of_step).sum(0).transpose(0, 1).flatten(1))
        output = torch.cat(parts, 1)[:, : held.outputs].reshape(*tokens.shape[:-1], -1)
        return output if bias is None else output + bias


@torch.no_grad()
def laid_out(weight: torch.Tensor) -> LaidOut | None:
    """A copy of a matrix [out, in] in the first layout that takes it; None where none does, or its products are others."""
    if weight.device.type != "cpu" or weight.dtype not in ROUNDING:
        return None
    tokens = torch.linspace(-1, 1, 3 * weight.shape[1]).reshape(3, -1).to(weight.dtype)
    for kind in (Panels, OneDnnWeight):
        try:
            if kind.takes(weight):
                copy = kind(weight)
                ours, theirs = copy.product(tokens, None).float(), torch.nn.functional.linear(tokens, weight).float()
                if (ours - theirs).abs().max() <= ROUNDING[weight.dtype] * theirs.abs().max():
                    return copy
        except (AttributeError, RuntimeError):  # another version or build of torch, or another kind of CPU
            continue
    return None


def plain_linears(model: Any) -> list[list[tuple[torch.nn.Module, str]]]:
    """Find for each weight of a linear layer the modules that have such a layer, and what they call it."""
    users: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, linear in module.named_children():
            if type(linear) is torch.nn.Linear and "forward" not in vars(linear):  # not one that somebody has changed
                users.setdefault(id(linear.weight), []).append((module, name))
    return list(users.values())


def lay_out(model: Any) -> Any:
    """Give a model's linear layers weights that are laid out for its CPU; returns the model. No other kind of layer is touched.

    Weights as they were are released one by one, but for those that another kind of layer shares (tied
    embeddings). Nothing learns any more: where gradients are asked for, torch takes a hundred times as long for such products.
    """
    for users in plain_linears(model):
        weight = laid_out(getattr(*users[0]).weight)
        if weight is None:
            continue
        for module, name in users:
            setattr(module, name, LaidOutLinear(getattr(module, name), weight).train(module.training))
        model.requires_grad_(False)
    return model
