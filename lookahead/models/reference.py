"""What the scores of a model should be. In: a loaded model. Out: scores, keys and values of whole texts, in three ways.

    stock      by the model's own modules in its own dtype, without a cache, drafts or neighbours
    wide       the same in float32, for a model in half precision or with quantized tokens
    perturbed  the same as stock, of a text whose embeddings are a few units of rounding off

The distance of two of them is what rounding costs in this model, and so the yardstick of any other way to compute its scores.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lookahead.forward.backend import packed_layers
from lookahead.forward.kv_cache import NotedCache
from lookahead.forward.target import state_name_of

HALF = (torch.bfloat16, torch.float16)
ROUNDS_OF_CHOICE = 3  # forwards by which random text becomes text that the model might have written


@dataclasses.dataclass(frozen=True)
class Reference:
    """scores: [texts, tokens, vocab]. layers: [texts, heads, tokens, width] keys, and values, of each layer that hands any to a
    cache; empty where the model takes no cache of ours.
    """

    scores: torch.Tensor
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]


class _Wide(TorchDispatchMode):
    """While open, operations compute in float32 what they would compute in half precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default:  # rows are widened, not the table
            return _widened(func(*args, **(kwargs or {})))
        args, kwargs = torch.utils._pytree.tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


class _WideConvolutions(TorchFunctionMode):
    """The same for what refuses operands of two dtypes before it becomes operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv1d:
            args, kwargs = torch.utils._pytree.tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in HALF:
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value


@contextlib.contextmanager
def _by_torch(model: Any) -> Iterator[None]:
    """While open, torch multiplies by what its linear layers have laid out, in the dtype of the tokens."""
    layers, _ = packed_layers(model)
    for layer in layers:
        vars(layer)["forward"] = layer.wide
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def stock(model: Any, texts: Sequence[Sequence[int]], with_layers: bool) -> Reference:
    """Compute by the model's own modules. with_layers: keys and values, too. Raises what the model raises."""
    longest = max(map(len, texts))  # behind shorter texts stands what no causal model looks at
    ids = torch.tensor([[*map(int, text), *[1] * (longest - len(text))] for text in texts], device=model.device)
    if not with_layers:
        return Reference(model(input_ids=ids, use_cache=False).logits, {})
    cache = NotedCache()
    scores = model(input_ids=ids, use_cache=True, **{state_name_of(model): cache}).logits
    return Reference(scores, cache.noted)


def wide(model: Any, texts: Sequence[Sequence[int]], with_layers: bool) -> Reference:
    """Compute in float32, tokens not quantized. Raises what operations raise that cannot be widened."""
    with widened(model):
        return stock(model, texts, with_layers)


@contextlib.contextmanager
def widened(model: Any) -> Iterator[None]:
    """While open, a model in half precision computes in float32: a weight is widened while it is multiplied by."""
    with torch.inference_mode(False), torch.no_grad(), _by_torch(model), _Wide(), _WideConvolutions():
        yield


def perturbed(model: Any, texts: Sequence[Sequence[int]], with_layers: bool) -> Reference:
    """`stock` with embeddings that are multiplied by 1 +- a few units of rounding."""

    def perturb(_: Any, given: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows * (1 + 4 * torch.finfo(rows.dtype).eps * torch.linspace(-1, 1, rows.shape[-1], device=rows.device)).to(rows)

    hook = model.get_input_embeddings().register_forward_hook(perturb)
    try:
        return stock(model, texts, with_layers)
    finally:
        hook.remove()


def likely_texts(model: Any, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Texts that the model might have written: on random tokens real models are chaotic, and rounding moves scores far.

    The tokens of random texts are sampled again a few times over, each after those before it, by the same random numbers.
    """
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, vocab_size, (len(lengths), max(lengths)), generator=generator).to(model.device)
    chance: torch.Tensor | None = None
    for _ in range(ROUNDS_OF_CHOICE):
        logits = model(input_ids=texts, use_cache=False).logits[:, :-1].float()
        if chance is None:  # Gumbel's: the best sum is a sample
            chance = -torch.empty(logits.shape).exponential_(generator=generator).log_().to(logits.device)
        texts[:, 1:] = (logits + chance)[..., :vocab_size].argmax(-1)
    return [text[:length] for text, length in zip(texts.tolist(), lengths, strict=True)]
