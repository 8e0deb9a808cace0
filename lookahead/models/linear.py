"""Weights laid out once for CPUs. In: a loaded model. Out: the same, whose forwards over few tokens take half as long or less.

A decode step multiplies few tokens with large matrices. torch lays such a matrix out anew at each product, or reads it as it
lies, which suits neither one token nor eight. Two libraries that are parts of torch have layouts of their own that can be
kept: products then say the same up to rounding, and eight tokens cost hardly more than one. oneDNN (`torch.compile` uses it so
when it freezes weights) takes float32, and bfloat16 on CPUs that multiply it (AVX-512 BF16). FBGEMM takes float16 weights,
from AVX2 on, and float32 tokens: it serves float16, and bfloat16 on all other CPUs, for float16 holds each such weight to the
last bit, or to 3e-8 where it is below 8e-6.

All linear layers of a 134M Llama, ms, as torch does it / laid out. Two cores of an AMD EPYC with AVX-512 (there bfloat16 is
equal to the last bit):

    tokens        1            4            8            16           64
    float32       25.3 / 11.1  38.3 / 10.4  36.0 / 12.5  44.6 / 14.7  93.1 / 35.0
    bfloat16       8.9 /  5.5   9.5 /  5.9  10.3 /  6.4  12.2 /  7.7  22.5 / 18.3

Two cores of an AMD EPYC with AVX2 only:

    float32       30.1 / 23.9  52.5 / 28.7  60.3 / 34.6  67.0 / 40.9  151.9 / 100.9
    bfloat16      12.9 / 14.2  43.8 / 16.7  84.2 / 24.3   152 / 30.6    600 / 88.5
    float16       10.2 / 11.3  31.6 / 13.4  69.3 / 18.1   151 / 33.8    496 / 85.1

Two cores of an Intel Xeon with AVX-512, not AVX-512 BF16:

    float32       16.5 / 19.0  29.4 / 23.5  38.1 / 25.7   39.3 / 29.8  67.7 / 61.3
    bfloat16      15.1 / 13.4  42.9 / 17.0  56.2 / 19.8   85.6 / 30.9   268 / 74.0

A token is to get the same bits alone and beside others (exact.py). By FBGEMM it does, and by oneDNN beside one other or more;
where a single token gets other bits, as in sums of 2,048 products, it goes through twice. By torch's own way, MKL, it does not:
1 to 3 tokens get other bits than more.

On Intel CPUs small float32 matrices stay with MKL, through which torch multiplies: forwards of a 15M Llama take 4.5 ms for 5.9
(1 token) and 6.4 for 8.0 (8 tokens) if only its output layer is laid out.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from lookahead.forward.processor import has_fast_mkl, multiplies_bfloat16

# Of each dtype that is laid out: how far products may be from torch's, as a share of the largest.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
SMALL = 2 << 20  # bytes; of smaller matrices, oneDNN's calls take longer than what MKL saves by not asking for a layout
TRIED = 24  # tokens whose products are compared: in half precision most are alike even where sums are split otherwise
TOKENS = 16  # that oneDNN's layout is chosen for: from 4 on it is the same, and best for one token, too


class OneDnnWeight:
    """A float32 or bfloat16 matrix [out, in] as oneDNN reads it."""

    library: ClassVar[str] = "onednn"

    def __init__(self, weight: torch.Tensor):
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS)
        kind = weight.shape, weight.dtype, torch.get_num_threads()
        if kind not in _differ_alone:
            _differ_alone[kind] = _differs_alone(self, weight)
        self._pairs = _differ_alone[kind]  # one token goes through twice, so that it gets the bits that it gets beside others

    @staticmethod
    def takes(weight: torch.Tensor, exact: bool = False) -> bool:
        """Those that it multiplies faster on this CPU than torch does otherwise. exact: all that it can."""
        if not torch.backends.mkldnn.is_available():
            return False
        if weight.dtype == torch.float32:
            return exact or weight.nbytes >= SMALL or not has_fast_mkl()
        return weight.dtype == torch.bfloat16 and multiplies_bfloat16()

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


class FbgemmWeight:
    """A float16 or bfloat16 matrix [out, in] as FBGEMM reads it: in float16. Products are summed in float32."""

    library: ClassVar[str] = "fbgemm"

    def __init__(self, weight: torch.Tensor):
        self._dtype = weight.dtype
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)

    @staticmethod
    def takes(weight: torch.Tensor, exact: bool = False) -> bool:
        """All but bfloat16 weights that are too large for float16."""
        half = torch.finfo(torch.float16)
        return weight.dtype in (torch.float16, torch.bfloat16) and bool((weight.abs() <= half.max).all())

    def product(self, tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16.default(tokens.float(), self._weight)
        return (product if bias is None else product.add_(bias)).to(tokens.dtype)

    def to_dense(self) -> torch.Tensor:
        weight: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(self._weight)[0]
        return weight.to(self._dtype)


LaidOut = OneDnnWeight | FbgemmWeight
_differ_alone: dict[tuple[torch.Size, torch.dtype, int], bool] = {}  # by shape, dtype and threads, see `_differs_alone`


def _differs_alone(laid_out: OneDnnWeight, weight: torch.Tensor) -> bool:
    """Whether a token that goes alone gets other bits than beside others. oneDNN splits long sums for one token only."""
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

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@torch.no_grad()
def laid_out(weight: torch.Tensor, exact: bool = False) -> LaidOut | None:
    """A copy of a matrix [out, in] as the first library that takes it reads it; None where none does, or says otherwise.

    exact: also where torch is faster, but gives a token other bits alone than beside others.
    """
    if weight.device.type != "cpu" or weight.dtype not in ROUNDING:
        return None
    tokens = torch.linspace(-1, 1, 3 * weight.shape[1]).reshape(3, -1).to(weight.dtype)
    for kind in (OneDnnWeight, FbgemmWeight):
        try:
            if kind.takes(weight, exact):
                copy = kind(weight)
                ours, theirs = copy.product(tokens, None).float(), torch.nn.functional.linear(tokens, weight).float()
                if (ours - theirs).abs().max() <= ROUNDING[weight.dtype] * theirs.abs().max():
                    return copy
        except (AttributeError, RuntimeError):  # another version or build of torch, or another kind of CPU
            continue
    return None


def lay_out(model: Any, exact: bool = False) -> Any:
    """Give a model's linear layers weights that are laid out for its CPU; returns the model. No other kind of layer is touched.

    exact: see `laid_out`. Weights as they were are let go one by one, but for those that another kind of layer shares (tied
    embeddings). Nothing learns any more: where gradients are asked for, torch takes a hundred times as long for such products.
    """
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}  # of each weight: where it is used
    for module in model.modules():
        for name, linear in module.named_children():
            if type(linear) is torch.nn.Linear and "forward" not in vars(linear):  # not one that somebody has changed
                places.setdefault(id(linear.weight), []).append((module, name))
    for users in places.values():
        weight = laid_out(getattr(*users[0]).weight, exact)
        if weight is None:
            continue
        for module, name in users:
            setattr(module, name, LaidOutLinear(getattr(module, name), weight).train(module.training))
        model.requires_grad_(False)
    return model


def kind_of_linear(model: Any) -> str:
    """Who computes its linear layers: the library that they are laid out for, "torch" if they are not."""
    kinds = (module.laid_out.library for module in model.modules() if isinstance(module, LaidOutLinear))
    return next(kinds, "torch")
