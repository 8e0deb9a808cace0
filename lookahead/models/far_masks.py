"""Whether our masks are the model's own far beyond the texts of the probe. In: a target. Out: what differs, or "".

A window of 4096 tokens shows in no short text. But transformers hands whoever makes a mask the rule it is made by, "does the
query at p see the key at k?", and a rule can be asked about any p: we run the model on one token, note the rule of each layer's
mask, and ask.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from lookahead.forward.target import TargetModel

NAME = "lookahead_far_masks"
FARTHEST = 1 << 17  # positions; a few windows of any model
Rule = Callable[..., torch.Tensor]  # (batch, head, query, keys) -> bool [keys]

_seen = threading.local()  # .masks, .rules: as `_watched` returns them


def far_masks_differ(target: TargetModel) -> str:
    """Ask the rule of each layer about far positions and compare with `target.mask_plan`."""
    attention, plan = target.packed_attention, target.mask_plan
    own, rules = _watched(target, None)
    ours, _ = _watched(target, attention.masks)
    if own:
        asked = {(rules.get(id(mask)), attention.kind_of(ours[layer])) for layer, mask in own.items()}
    else:  # its attention is not transformers': no telling which layer is handed what
        asked = set(itertools.product(rules.values(), plan.windows))
    if not asked or any(rule is None for rule, _ in asked):
        return "it makes masks in a way of its own"
    end = min(target.longest_text, FARTHEST)
    for (rule, kind), query in itertools.product(asked, (end - 1, end // 2 - 1, end // 3)):
        assert rule is not None
        keys = torch.arange(query + 1, device=target.device)
        zero = torch.zeros_like(keys[:1])
        seen = rule(zero, zero, keys[query:], keys)
        window, chunk = plan.limits[:, [*plan.windows].index(kind)].tolist()
        first = max(0, query - window + 1, query // chunk * chunk)
        if not torch.equal(seen, keys >= first):
            return f"at position {query} a layer sees {int(seen.sum())} tokens, by the config {query + 1 - first}"
    return ""


def _watched(target: TargetModel, masks: Any) -> tuple[dict[torch.nn.Module, torch.Tensor | None], dict[int, Rule]]:
    """Run the model on one token, given `masks`: (the mask that each layer's attention is handed, the rule of each mask
    made).
    """
    _seen.masks, _seen.rules = {}, {}
    text = torch.ones(1, 1, dtype=torch.int64, device=target.device)
    positions = {"position_ids": text - 1} if "position_ids" in target.arguments else {}
    try:
        with target.packed_attention.named(NAME):
            target.model(input_ids=text, attention_mask=masks, use_cache=False, **positions)
        return _seen.masks, _seen.rules
    finally:
        del _seen.masks, _seen.rules


def _noted_mask(*, q_length: int, kv_length: int, mask_function: Rule, device: torch.device, **others: Any) -> torch.Tensor:
    mask = torch.zeros(1, 1, q_length, kv_length, device=device)
    _seen.rules[id(mask)] = mask_function
    return mask


def _noted_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **arguments: Any
) -> tuple[torch.Tensor, None]:
    """Attention to one token is its value."""
    _seen.masks[module] = attention_mask
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


AttentionMaskInterface.register(NAME, _noted_mask)
AttentionInterface.register(NAME, _noted_attention)
