"""A model whose keys and values are kept in 8 or 4 bits. In: a probed model. Out: the same, with such a cache.

Its own forward over a whole text, in which attention takes each key and value as the cache would hold it, defines what packed
steps must give. Where tokens round differently, some numbers fall on the other side of a step, and all that follows moves a
little: so the two may differ by about as much as quantizing moves scores at all. Beyond that, a token must get the same bits in
any forward (exact.py).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.backends.cpu.program import Program
from lookahead.draft.tree import chain, side_by_side
from lookahead.errors import UsageError
from lookahead.forward.quantized_cache import DTYPES, quantized, restored
from lookahead.forward.slots import slots_of
from lookahead.forward.target import TargetModel
from lookahead.models.exact import batch_invariance_violation

LENGTH = 48  # tokens of the text that is tried
ROUNDING = 0.02  # of the spread of scores: what other causes may move them by, in half precision


def with_kv_dtype(target: TargetModel, kv_dtype: str) -> TargetModel:
    """The same model with such a cache; it is exact then. kv_dtype: int8 or int4.

    Raises UsageError if its attention is not lookahead::tree_attention, or a token's scores are not the same in any forward.
    """
    if target.mode != "packed":
        raise UsageError(f"--kv-dtype {kv_dtype}: {target.name} verifies by {target.mode}: {target.reason}. Leave it out.")
    if not target.attends_by_op:
        raise UsageError(f"--kv-dtype {kv_dtype}: {target.name}'s attention is not lookahead::tree_attention. Leave it out.")
    program = Program(target.program.plan, kv_dtype) if isinstance(target.program, Program) else None
    held = dataclasses.replace(target, kv_dtype=kv_dtype, program=program)
    moved, bound, kv_bytes = _moved(held)
    where = "" if moved <= bound else f"scores differ by {moved:.2g} of their spread from the model's own"
    if where := where or batch_invariance_violation(held):
        raise UsageError(
            f"--kv-dtype {kv_dtype}: {target.name}'s scores cannot be had with such a cache ({where}). Leave it out."
        )
    return dataclasses.replace(held, exact=True, kv_bytes=kv_bytes)


@torch.inference_mode()
def _moved(target: TargetModel) -> tuple[float, float, int]:
    """(how far packed steps are from the model's own forward, how far they may be, bytes of a token): of the scores' spread."""
    text = np.random.default_rng(0).integers(1, target.vocab_size, min(LENGTH, target.longest_text)).astype(np.int32)
    slots = slots_of(target)
    slots.begin(slots.add(text.tolist()))
    found = slots.forward(side_by_side([chain(text)], ["all"])).of(0).float()
    ids = torch.from_numpy(text.astype(np.int64))[None]
    plain = target.model(input_ids=ids, use_cache=False).logits[0].float()
    with target.packed_attention.named(_name(target.kv_dtype)):
        expected = target.model(input_ids=ids, use_cache=False).logits[0].float()
    spread = float(plain.std()) or 1.0
    apart, bound = (float((expected - other).square().mean().sqrt()) / spread for other in (found, plain))
    return apart, 2 * bound + ROUNDING, slots.kv_bytes()


def _name(kv_dtype: str) -> str:
    return f"lookahead_rounded_{kv_dtype}"


def _rounded(
    kept: torch.dtype,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *given: Any,
    **named: Any,
) -> Any:
    """sdpa of keys and values [1, heads, tokens, width] as they are kept."""
    key, value = (restored(quantized(each[0], kept), each.shape[3])[None].to(each.dtype) for each in (key, value))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *given, **named)


for _kv_dtype, _kept in DTYPES.items():
    AttentionInterface.register(_name(_kv_dtype), functools.partial(_rounded, _kept))
    AttentionMaskInterface.register(_name(_kv_dtype), eager_mask)
