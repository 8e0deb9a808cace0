"""Attention over a pack: slot by slot through the model's own function. In: one packed row. Out: the same.

The function is registered with transformers under a name of its own, and a model uses it only inside `PackedAttention.over`, so
that calls which are not ours see nothing of it. Models whose attention lookahead::tree_attention can compute take that op for
the whole pack instead (tree_attention.py).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.errors import ModelError
from lookahead.forward.backends import without_cudnn
from lookahead.forward.batch import Group, MaskPlan, Pack
from lookahead.forward.tree_attention import NAME as TREE
from lookahead.forward.tree_attention import OTHERS

NAME = "lookahead_packed"
FIELD = "_attn_implementation_internal"  # of a config: the function its layers use

_running = threading.local()  # .attention: the PackedAttention whose forward this thread runs


class PackedAttention:
    """One model's attention, to be swapped for the packed one and back."""

    def __init__(self, model: Any, plan: MaskPlan):
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        # Their fields themselves: a config's own way of setting one takes longer than a layer's attention.
        self._configs = [vars(c) for c in configs.values() if getattr(c, "_attn_implementation", None) and FIELD in vars(c)]
        if not self._configs:
            raise ModelError("its attention cannot be replaced")
        own = model.config.get_text_config(decoder=True)._attn_implementation
        self.base = own if own == "eager" else "sdpa"  # kernels such as flash-attention take no tree mask
        # What the model hands to its layers names their kind by its width, no more: it may reach them as a copy.
        self._kinds = list(plan.windows)
        self._inputs = {
            kind: torch.empty(1, 1, 1, 1 + number, device=model.device, dtype=model.dtype)
            for number, kind in enumerate(self._kinds)
        }
        self._by_type = plan.by_type
        self.masks = self._inputs if plan.by_type else next(iter(self._inputs.values()))
        self.pack: Pack

    @contextlib.contextmanager
    def over(self, pack: Pack) -> Iterator[Any]:
        """While open, the model's attention works on `pack`. Gives what the model is to be handed as its attention mask."""
        if pack.meta is not None:
            kinds = [lines[None, None] for lines in pack.meta]
            with self.named(TREE):
                yield dict(zip(self._kinds, kinds, strict=True)) if self._by_type else kinds[0]
            return
        self.pack, _running.attention = pack, self
        with self.named(NAME):
            yield self.masks

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """While open, the model uses the attention and mask functions of this name, and these no cuDNN."""
        before = [fields[FIELD] for fields in self._configs]
        for fields in self._configs:
            fields[FIELD] = name
        try:
            with without_cudnn():
                yield
        finally:
            for fields, own in zip(self._configs, before, strict=True):
                fields[FIELD] = own

    def kind_of(self, mask: torch.Tensor | None) -> str:
        """Return which kind of layer was handed this mask."""
        if mask is None:
            raise ModelError("its layers are not handed the mask")
        return self._kinds[mask.shape[-1] - 1]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, heads, tokens, head_dim]; key, value: [slots, key heads, capacity, head_dim].

    Returns [1, tokens, heads, head_dim] and, instead of weights, None.
    """
    attention: PackedAttention = _running.attention
    groups, tokens = attention.pack.groups, query.shape[2]
    kind = attention.kind_of(attention_mask)
    direct = attention.base == "sdpa" and all(arguments.get(name) is None for name in OTHERS)
    outputs = []
    for group in groups:
        keys, values, mask = key[group.slots, :, : group.length], value[group.slots, :, : group.length], group.masks[kind]
        queries = _queries(query, group, len(keys))
        if direct:
            output = _sdpa(queries, keys, values, mask, arguments.get("scaling"))
        else:
            if mask is None:  # eager attention of some models wants one
                mask = queries.new_zeros(len(keys), 1, group.width, group.length)
            output = _own(module, attention.base)(module, queries, keys, values, mask, **arguments)[0]
        if len(keys) == len(groups) == 1 and group.end == tokens:
            return output.contiguous(), None  # some models take a view of it
        output = output.flatten(0, 1)
        outputs.append(output if group.gather is None else output.index_select(0, group.gather))
    if group.end < tokens:
        outputs.append(output.new_zeros(tokens - group.end, *output.shape[1:]))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


AttentionInterface.register(NAME, packed_attention)


def _queries(query: torch.Tensor, group: Group, slots: int) -> torch.Tensor:
    """[slots, heads, width, head_dim], the queries of a group."""
    if slots == 1 and group.spread is None:
        return query if query.shape[2] == group.width else query[:, :, group.start : group.end]
    own = query[0].transpose(0, 1)[group.start : group.end]  # this is how projections lay them out: rows are copied whole
    if group.spread is not None:
        own = own.index_select(0, group.spread)
    return own.unflatten(0, (slots, group.width)).transpose(1, 2)


def _sdpa(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """[slots, width, heads, head_dim]. Heads that share keys become more queries of one head: nothing is copied for them."""
    slots, heads, width, _ = queries.shape
    shared = heads // keys.shape[1]
    if shared == 1:
        if width == 1 and queries.dtype != torch.float32 and queries.device.type == "cpu":
            queries = queries.expand(-1, -1, 2, -1)  # takes half the time that one query takes
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
        return output[:, :, :width].transpose(1, 2)
    folded = queries.reshape(slots, keys.shape[1], shared * width, -1)
    if mask is not None and width > 1:
        mask = mask.repeat(1, 1, shared, 1)
    output = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    return output.reshape(slots, heads, width, -1).transpose(1, 2)


def _own(module: torch.nn.Module, base: str) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The attention function that the model would use itself."""
    if base == "eager":
        function: Callable[..., tuple[torch.Tensor, Any]] = sys.modules[type(module).__module__].eager_attention_forward
        return function
    return ALL_ATTENTION_FUNCTIONS[base]
