"""Models that are a little wrong. In: a model of Llama's kind. Out: the same model with one mistake, by what the mistake is.

What a wrong lowering could make of a model, made by changing the model: a program of the mutant is what the probe of the true
model must refuse.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Mutant = Callable[[Any], object]  # changes a model in place
HIDDEN_BY_HALF = {"bias of the last output"}  # moves a tiny model less than rounding to half precision may


def _middle(model: Any) -> Any:
    return model.model.layers[len(model.model.layers) // 2]


def _last(model: Any) -> Any:
    return model.model.layers[-1]


class _After(nn.Module):
    """A layer, and what is done to its output."""

    def __init__(self, layer: Any, change: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.layer, self.change = layer, change
        self.weight = layer.weight

    def forward(self, *given: Any) -> torch.Tensor:
        return self.change(self.layer(*given))


def _scale_epsilon(model: Any) -> None:
    for norm in model.modules():
        for name in {"variance_epsilon", "eps"} & vars(norm).keys():
            setattr(norm, name, getattr(norm, name) * 10)


def _change_frequencies(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Mutant:
    def mutate(model: Any) -> None:
        rotary = model.model.rotary_emb
        rotary.inv_freq = change(rotary.inv_freq, len(rotary.inv_freq))

    return mutate


def _each_layer(change: Callable[[Any], None]) -> Mutant:
    def mutate(model: Any) -> None:
        for layer in model.model.layers:
            change(layer)

    return mutate


def _scale_attention(layer: Any) -> None:
    layer.self_attn.scaling *= 1.05


def _exchange_within(owner: Any, first: str, second: str) -> None:
    one, other = getattr(owner, first), getattr(owner, second)
    setattr(owner, first, other)
    setattr(owner, second, one)


def _exchange_layers(model: Any) -> None:
    """The MLP of the middle layer and of the one before."""
    middle = len(model.model.layers) // 2
    one, other = model.model.layers[middle], model.model.layers[middle - 1]
    one.mlp, other.mlp = other.mlp, one.mlp


def _add_bias(linear: nn.Linear, size: float) -> None:
    linear.bias = nn.Parameter(torch.full_like(linear.weight[:, 0], size))


def _flip_heads(linear: nn.Linear, width: int) -> None:
    weight = linear.weight.data
    weight.copy_(weight.view(-1, width, weight.shape[1]).flip(0).reshape(weight.shape))


def _after(owner: Any, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    setattr(owner, name, _After(getattr(owner, name), change))


def _cap_scores(model: Any) -> None:
    spread = 2 * float(model(torch.arange(3, 20)[None]).logits.abs().max())
    _after(model, "lm_head", lambda scores: torch.tanh(scores / spread) * spread)


def _norm_heads(attention: Any) -> None:
    def normed(states: torch.Tensor) -> torch.Tensor:
        heads = states.view(*states.shape[:-1], -1, attention.head_dim).float()
        return (heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2).to(states)

    _after(attention, "q_proj", normed)
    _after(attention, "k_proj", normed)


def _separate_head(model: Any) -> None:
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = nn.Parameter(weight + 0.05 * weight.std() * torch.randn_like(weight))


def _head_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.linspace(-0.5, 0.5, model.lm_head.out_features).to(model.dtype))


MUTANTS: dict[str, Mutant] = {
    "rope base times 1.05": _change_frequencies(lambda f, n: f * 1.05 ** (-torch.arange(n) / n)),
    "rope scaled linearly": _change_frequencies(lambda f, n: f / 2),
    "rope of half the width": _change_frequencies(lambda f, n: torch.where(torch.arange(n) < n // 2, f, torch.zeros(()))),
    "epsilon times 10": _scale_epsilon,
    "scale of attention 1.05": _each_layer(_scale_attention),
    "no norm in a layer": lambda model: setattr(_middle(model), "post_attention_layernorm", nn.Identity()),
    "norms exchanged": _each_layer(lambda layer: _exchange_within(layer, "input_layernorm", "post_attention_layernorm")),
    "bias of values in a layer": lambda model: _add_bias(_middle(model).self_attn.v_proj, 0.02),
    "bias of the last output": lambda model: _add_bias(_last(model).mlp.down_proj, 1e-3),
    "bias of the head": _head_bias,
    "soft cap of scores": _cap_scores,
    "embedding scaled a little": lambda model: _after(model.model, "embed_tokens", lambda rows: rows * 1.02),
    "heads of keys in another order": lambda model: _flip_heads(_last(model).self_attn.k_proj, _last(model).self_attn.head_dim),
    "keys for values": _each_layer(lambda layer: setattr(layer.self_attn, "v_proj", layer.self_attn.k_proj)),
    "attention of a layer skipped": lambda model: _last(model).self_attn.o_proj.weight.data.zero_(),
    "weights of two layers exchanged": _exchange_layers,
    "norms of queries and keys": _each_layer(lambda layer: _norm_heads(layer.self_attn)),
    "another activation in the last layer": lambda model: setattr(_last(model).mlp, "act_fn", nn.GELU()),
    "gate and up exchanged": _each_layer(lambda layer: _exchange_within(layer.mlp, "gate_proj", "up_proj")),
    "a head of its own": _separate_head,
}
