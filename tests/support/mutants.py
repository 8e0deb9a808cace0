"""Models that are a little wrong. In: a model of Llama's kind. Out: the same model with one mistake, by what the mistake is.

What a wrong lowering could make of a model, made by changing the model: a program of the mutant is what the probe of the true
model must refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Mutant = Callable[[Any], None]  # changes a model in place
MUTANTS: dict[str, Mutant] = {}
# Move a tiny model less than rounding to half precision may
HIDDEN_BY_HALF = {"bias of the last output", "scale of attention 1.001", "epsilon of a tenth"}


def mutant(name: str) -> Callable[[Mutant], Mutant]:
    def add(mutate: Mutant) -> Mutant:
        MUTANTS[name] = mutate
        return mutate

    return add


def _norms(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "variance_epsilon") or hasattr(module, "eps")]


def _middle(model: Any) -> int:
    return len(model.model.layers) // 2


class _After(nn.Module):
    """A layer, and what is done to its output."""

    def __init__(self, layer: Any, change: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.layer, self.change = layer, change
        self.weight = layer.weight

    def forward(self, *given: Any) -> torch.Tensor:
        return self.change(self.layer(*given))


def _scale_epsilon(factor: float) -> Mutant:
    def mutate(model: Any) -> None:
        for norm in _norms(model):
            name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
            setattr(norm, name, getattr(norm, name) * factor)

    return mutate


def _change_frequencies(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Mutant:
    def mutate(model: Any) -> None:
        rotary = model.model.rotary_emb
        rotary.inv_freq = change(rotary.inv_freq, len(rotary.inv_freq))

    return mutate


def _rebased(frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    count = len(frequencies)
    return frequencies * factor ** (-torch.arange(count) / count)


def _scale_attention(factor: float, last_only: bool = False) -> Mutant:
    def mutate(model: Any) -> None:
        for layer in model.model.layers[-1 if last_only else 0 :]:
            layer.self_attn.scaling *= factor

    return mutate


def _each_layer(change: Callable[[Any], None]) -> Mutant:
    def mutate(model: Any) -> None:
        for layer in model.model.layers:
            change(layer)

    return mutate


MUTANTS.update(
    {
        "rope base times 2": _change_frequencies(lambda f, n: _rebased(f, 2)),
        "rope base times 1.05": _change_frequencies(lambda f, n: _rebased(f, 1.05)),
        "rope scaled linearly": _change_frequencies(lambda f, n: f / 2),
        "rope of half the width": _change_frequencies(lambda f, n: torch.where(torch.arange(n) < n // 2, f, torch.zeros(()))),
        "rope frequencies backwards": _change_frequencies(lambda f, n: f.flip(0)),
        "rope's sign": _change_frequencies(lambda f, n: -f),
        "epsilon times 10": _scale_epsilon(10),
        "epsilon times 100": _scale_epsilon(100),
        "epsilon of a tenth": _scale_epsilon(0.1),
        "scale of attention 1.001": _scale_attention(1.001),
        "scale of attention 1.05": _scale_attention(1.05),
        "scale of attention 2": _scale_attention(2),
        "scale of attention in the last layer 1.2": _scale_attention(1.2, last_only=True),
        "attention without a scale": _each_layer(lambda layer: setattr(layer.self_attn, "scaling", 1.0)),
    }
)


@mutant("no last norm")
def _(model: Any) -> None:
    model.model.norm = nn.Identity()


@mutant("no norm in a layer")
def _(model: Any) -> None:
    model.model.layers[_middle(model)].post_attention_layernorm = nn.Identity()


@mutant("norms' weights and one")
def _(model: Any) -> None:
    for norm in _norms(model):
        norm.weight.data += 1


@mutant("norms exchanged")
def _(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = layer.post_attention_layernorm, layer.input_layernorm


def _with_bias(linear: nn.Linear, size: float) -> None:
    linear.bias = nn.Parameter(torch.full_like(linear.weight[:, 0], size))


@mutant("bias of queries")
def _(model: Any) -> None:
    for layer in model.model.layers:
        _with_bias(layer.self_attn.q_proj, 0.05)


@mutant("bias of values in a layer")
def _(model: Any) -> None:
    _with_bias(model.model.layers[_middle(model)].self_attn.v_proj, 0.02)


@mutant("bias of the last output")
def _(model: Any) -> None:
    _with_bias(model.model.layers[-1].mlp.down_proj, 1e-3)


@mutant("bias of the head")
def _(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.linspace(-0.5, 0.5, model.lm_head.out_features).to(model.dtype))


@mutant("soft cap of scores")
def _(model: Any) -> None:
    spread = 2 * float(model(torch.arange(3, 20)[None]).logits.abs().max())
    model.lm_head = _After(model.lm_head, lambda scores: torch.tanh(scores / spread) * spread)


@mutant("scores scaled")
def _(model: Any) -> None:
    model.lm_head = _After(model.lm_head, lambda scores: scores * 1.1)


@mutant("embedding scaled")
def _(model: Any) -> None:
    model.model.embed_tokens = _After(model.model.embed_tokens, lambda rows: rows * rows.shape[-1] ** 0.5)


@mutant("embedding scaled a little")
def _(model: Any) -> None:
    model.model.embed_tokens = _After(model.model.embed_tokens, lambda rows: rows * 1.02)


@mutant("heads of queries in another order")
def _(model: Any) -> None:
    attention = model.model.layers[_middle(model)].self_attn
    weight = attention.q_proj.weight.data
    weight.copy_(weight.view(-1, attention.head_dim, weight.shape[1]).flip(0).reshape(weight.shape))


@mutant("heads of keys in another order")
def _(model: Any) -> None:
    attention = model.model.layers[-1].self_attn
    weight = attention.k_proj.weight.data
    weight.copy_(weight.view(-1, attention.head_dim, weight.shape[1]).flip(0).reshape(weight.shape))


@mutant("keys for values")
def _(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj = layer.self_attn.k_proj


@mutant("sign of what attention gives")
def _(model: Any) -> None:
    model.model.layers[_middle(model)].self_attn.o_proj.weight.data.neg_()


@mutant("attention of a layer skipped")
def _(model: Any) -> None:
    model.model.layers[-1].self_attn.o_proj.weight.data.zero_()


@mutant("last layer skipped")
def _(model: Any) -> None:
    model.model.layers[-1].self_attn.o_proj.weight.data.zero_()
    model.model.layers[-1].mlp.down_proj.weight.data.zero_()


@mutant("weights of two layers exchanged")
def _(model: Any) -> None:
    one, other = model.model.layers[_middle(model)], model.model.layers[_middle(model) - 1]
    one.mlp, other.mlp = other.mlp, one.mlp


@mutant("weights of attention of two layers exchanged")
def _(model: Any) -> None:
    one, other = (model.model.layers[_middle(model) - k].self_attn for k in (0, 1))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        ours, theirs = getattr(one, name), getattr(other, name)
        setattr(one, name, theirs)
        setattr(other, name, ours)


@mutant("norms of queries and keys")
def _(model: Any) -> None:
    width = model.model.layers[0].self_attn.head_dim

    def normed(states: torch.Tensor) -> torch.Tensor:
        heads = states.view(*states.shape[:-1], -1, width).float()
        return (heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2).to(states)

    for layer in model.model.layers:
        layer.self_attn.q_proj = _After(layer.self_attn.q_proj, normed)
        layer.self_attn.k_proj = _After(layer.self_attn.k_proj, normed)


@mutant("another activation")
def _(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()


@mutant("another activation in the last layer")
def _(model: Any) -> None:
    model.model.layers[-1].mlp.act_fn = nn.GELU()


@mutant("gate and up exchanged")
def _(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


@mutant("a head of its own")
def _(model: Any) -> None:
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = nn.Parameter(weight + 0.05 * weight.std() * torch.randn_like(weight))


@mutant("embedding for the head")
def _(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().roll(1, 0).clone())
