"""lookahead::tree_attention, attention of packed draft trees as one torch op, and the function by which models call it.

In: queries of all tokens of a step, the slots' buffers of keys and values as they lie, and a line of numbers for each token
that tells what it sees (tree_meta.py). No masks, no padding, no copies. The sums of a query run in an order that only its own
keys decide (attention_kernel.py on CPUs, triton_attention.py on GPUs), so that an output is the same to the last bit alone, in
a tree and in a batch.

The lines of a step reach the layers instead of the attention mask, which transformers hands on as it is: each kind of layer is
handed its own. Nothing else is shared between the step and the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface

from lookahead.errors import ModelError
from lookahead.forward.backend import backend_of
from lookahead.forward.quantized_cache import DTYPES
from lookahead.forward.tree_meta import FIELDS

NAME = "lookahead_tree"
QUANTIZED = frozenset(DTYPES.values())  # keys and values
# Arguments for what neither sdpa nor the op computes: soft caps, sinks, biases
OTHERS = frozenset(("softcap", "s_aux", "position_bias"))

_library = torch.library.Library("lookahead", "DEF")
_library.define("tree_attention(Tensor query, Tensor key, Tensor value, Tensor meta, float scale) -> Tensor")


def attention_of_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, meta: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of each token to what it sees: the op, by the backend of the device.

    query: [tokens, heads, width]. key: [slots, key heads, capacity, width], value: [slots, key heads, capacity, value width],
    the numbers of each side by side; heads that share keys are neighbours. meta: int32 [tokens, FIELDS or more], see
    tree_meta.py. scale: of the products. Returns [tokens, heads, value width]; 0 for tokens that fill the pack up. What no
    token sees may hold anything.
    """
    backend = backend_of(query.device.type)
    assert backend
    query = query if query.stride(2) == 1 else query.contiguous()
    if query.is_cuda:
        return backend.tree_attention(query, key, value, meta.contiguous(), scale)
    return backend.tree_attention(query.transpose(0, 1)[None], key, value, meta[:, :FIELDS].contiguous(), scale)[0]


for _device in ("CPU", "CUDA"):
    _library.impl("tree_attention", attention_of_tokens, _device)


@torch.library.register_fake("lookahead::tree_attention")
def _shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, meta: torch.Tensor, scale: float) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[3])


def checked_scale(
    query: torch.Tensor, attention_mask: torch.Tensor | None, scaling: float | None, arguments: Mapping[str, Any]
) -> float:
    """Return what products are multiplied by. Raises ModelError as `tree_attention` does, whose arguments these are."""
    if attention_mask is None or attention_mask.dtype != torch.int32 or attention_mask.shape[-1] < FIELDS:
        raise ModelError("its layers are not handed what tokens see")
    if not OTHERS.isdisjoint(arguments) and any(arguments.get(name) is not None for name in OTHERS):
        raise ModelError("its attention is not a sum of values weighted by products")
    return query.shape[3] ** -0.5 if scaling is None else scaling


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention that layers of a model call. query: [1, heads, tokens, width]; key, value: as of `attention_of_tokens`.

    key, value: on a CPU also quantized ones, of all slots in the shape of what they hold (quantized_cache.py).
    attention_mask: int32 [1, 1, tokens, FIELDS], the lines of the step. Returns [1, tokens, heads, value width] and, instead
    of weights, None. Raises ModelError for attention that the op does not compute, and where layers are not handed the lines.
    """
    scale = checked_scale(query, attention_mask, scaling, arguments)
    assert attention_mask is not None
    if query.dtype != key.dtype and key.dtype not in QUANTIZED:
        raise ModelError("its queries are of another dtype than its keys")
    cpu = backend_of("cpu") if query.device.type == "cpu" else None
    if cpu and not torch.compiler.is_compiling():  # not by way of the dispatcher, which takes as long
        queries = query if query.stride(3) == 1 else query.contiguous()
        return cpu.tree_attention(queries, key, value, attention_mask, scale), None
    output = torch.ops.lookahead.tree_attention(query[0].transpose(0, 1), key, value, attention_mask[0, 0], scale)
    return output[None], None


AttentionInterface.register(NAME, tree_attention)
