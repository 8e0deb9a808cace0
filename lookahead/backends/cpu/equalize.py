"""Channels with large inputs made smaller before weights are rounded. In: a model. Out: factors; its function stays the same.

A norm's output goes to linear layers alone. Where its channel c is divided by a factor, by the norm's own weight, and column c
of the layers multiplied by it, the products are the same, but steps of the rounded weights are finer for that channel, and
tokens have no outlier there. Factors are powers of two, so both changes are exact. Channels are divided whose inputs are at
least twice as large as the median: on texts, or, where there are none, by the norm's weight.
Source: activation-aware weight quantization (AWQ), arXiv 2306.00978, and SmoothQuant, arXiv 2211.10438.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from lookahead.backends.cpu.linear import plain_linears

STRENGTH = 0.5  # how much of an outlier weights take over, as an exponent


def factors_of(sizes: torch.Tensor) -> torch.Tensor | None:
    """float32 [channels], 1 for most; None where all are 1. sizes: of channels, or what is proportional to them."""
    sizes = sizes.detach().float().abs()
    median = sizes.median()
    if not median > 0:
        return None
    factors = torch.exp2((STRENGTH * (sizes / median).log2()).round().clamp(min=0, max=8))
    return factors if bool((factors > 1).any()) else None


class _Uses(TorchFunctionMode):
    """Counts calls of torch that make tensors of one of those that are `watched`, by its id."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, torch.Tensor] = {}
        self.counts: Counter[int] = Counter()

    def __torch_function__(self, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        result = call(*given, **(named or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        if any(isinstance(each, torch.Tensor) for each in results):  # not a size or dtype
            for each in (*given, *(named or {}).values()):
                for one in each if isinstance(each, tuple | list) else (each,):
                    if isinstance(one, torch.Tensor) and id(one) in self.watched:
                        self.counts[id(one)] += 1
        return result


def norms_before(model: Any) -> dict[str, list[str]]:
    """Map names of norms to the linear layers that, and nothing else, read their outputs. Each has a weight of its own.

    model: of `torch.nn.Linear`, on any device, meta included. Empty for a model that cannot run so.
    """
    norms = {name: module for name, module in model.named_modules() if _may_be_norm(module)}
    shared = [users for users in plain_linears(model) if len(users) == 1]
    own = {id(getattr(*users[0])) for users in shared} - {id(model.get_output_embeddings())}
    tied = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    uses, reads, made = _Uses(), dict[str, Any](), dict[int, str]()

    def keep(name: str, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            uses.watched[id(output)] = output  # held, so that no other tensor gets its id
            made[id(output)] = name

    hooks = [norm.register_forward_hook(lambda _, given, output, name=name: keep(name, output)) for name, norm in norms.items()]
    for name, layer in model.named_modules():
        if id(layer) in own and id(layer.weight) not in tied:
            hooks.append(layer.register_forward_pre_hook(lambda _, given, name=name: reads.update({name: given[0]})))
    try:
        device = next(model.parameters()).device
        fake = FakeTensorMode(allow_non_fake_inputs=True) if device.type == "meta" else contextlib.nullcontext()
        with torch.no_grad(), fake, uses:
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False)
    except Exception:  # models raise many kinds; most have no code for the meta device
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    found = dict[str, list[str]]()
    for tensor, name in made.items():
        layers = [layer for layer, read in reads.items() if id(read) == tensor]
        once = sum(other == name for other in made.values()) == 1
        if layers and once and uses.counts[tensor] == len(layers) and _scales(norms[name]):
            found[name] = layers
    return found


def _may_be_norm(module: Any) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and not list(module.children())


def _scales(norm: Any) -> bool:
    """Tell whether its outputs are multiplied by what its parameters are."""
    tried = copy.deepcopy(norm).to_empty(device="cpu").float()
    width = len(norm.weight)
    factors = torch.exp2(torch.arange(width) % 3)
    try:
        for parameter in tried.parameters():
            parameter.data = torch.linspace(0.5, 1.5, parameter.numel())
        tokens = torch.linspace(-2, 3, 2 * width).view(2, width)
        before = tried(tokens)
        for parameter in tried.parameters():
            parameter.data = parameter.data * factors
        return bool((before * factors).equal(tried(tokens)))
    except Exception:  # of a norm that takes more than tokens, or has parameters of other sizes
        return False


@torch.no_grad()
def equalize(model: Any) -> None:
    """Divide the outputs of norms whose weights have outliers, and multiply columns of the layers that read them.

    model: of `torch.nn.Linear`, in memory.
    """
    factors = {name: factors_of(norm.weight) for name, norm in model.named_modules() if _may_be_norm(norm)}
    if all(each is None for each in factors.values()):
        return
    for name, layers in norms_before(model).items():
        each = factors[name]
        if each is not None:
            for parameter in model.get_submodule(name).parameters():
                parameter.div_(each.to(parameter.dtype))
            for layer in map(model.get_submodule, layers):
                layer.weight.mul_(each.to(layer.weight.dtype))
