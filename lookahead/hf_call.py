"""What a call of `generate` asks for. In: its arguments. Out: prompts, criteria, and a refusal of what drafts cannot serve."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from transformers import GenerationMixin, StopStringCriteria
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from lookahead.draft.drafter import Drafter
from lookahead.errors import UsageError
from lookahead.forward.target import TargetModel

# In addition to the text, what `generate` hands on to `_sample` and has no part in what is emitted: how the forwards are to
# run.
HARMLESS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states")
CACHES = ("past_key_values", "cache_params", "cache")  # the last since 5.24, for both
OTHER_CACHES = ("quantized", "offloaded", "offloaded_static")  # that a user wants for more than speed


def not_handed_on() -> dict[str, Any]:
    """Arguments of the call of `generate` we are in that transformers does not hand on to a function, or not as given.

    `GenerationMixin._extract_generation_mode_kwargs` (5.23) drops streamer, assistant_model, synced_gpus and the tokenizer for
    every `custom_generate` that is a function, regardless of its signature; of caches, it hands on its own where none was
    given. No public way leads to them: without the streamer its reader would wait forever. So they are read off the frame of
    `generate`, which is found by its code object. Where it is not found, nothing is known of them, and they count as not given.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return {}
    given = {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
    caller = frame.f_back.f_locals.get("kwargs")  # of the decorator: `generate` has taken some out of its own
    return {**given, **{name: caller.get(name) for name in ("tokenizer", *CACHES)}} if isinstance(caller, dict) else given


def stop_criteria(texts: str | Sequence[str], tokenizer: Any) -> StopStringCriteria:
    if tokenizer is None:
        raise UsageError(
            "stop_strings needs the model's tokenizer, which did not arrive: "
            "give stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]."
        )
    return StopStringCriteria(tokenizer, texts)


def refuse_what_cannot_be(model: Any, config: Any, given: dict[str, Any]) -> None:
    """Raise UsageError if this is not decoding row by row that drafts could speed up."""
    if model.config.is_encoder_decoder:
        raise UsageError("lookahead_generate takes decoder-only models: leave custom_generate out.")
    mode = config.get_generation_mode(given.get("assistant_model")).value
    if mode not in ("greedy_search", "sample"):
        raise UsageError(f"lookahead_generate does greedy decoding and sampling, not {mode}: leave one of the two out.")
    if given.get("synced_gpus") or _is_sharded(model):
        raise UsageError(
            "lookahead_generate takes no synced_gpus, as processes would need unequal numbers of forwards: "
            "load the model with tp_plan or device_map."
        )
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise UsageError(
            "lookahead_generate returns no attentions and hidden states, as one forward serves several tokens: "
            "run the model once over the output."
        )
    for name in CACHES:  # `generate` makes one of its own where none was given
        if given.get(name) is not None:
            raise UsageError(f"lookahead_generate keeps its own cache: leave out {name} and give the whole text.")
    if config.cache_implementation in OTHER_CACHES:
        raise UsageError(
            f"lookahead_generate keeps its own cache: leave out cache_implementation='{config.cache_implementation}'."
        )


def is_wrapped(model: Any) -> bool:
    """A wrapper, such as one of PEFT, adds to what `generate` gives the model: a prompt, a prefix, an adapter for each row."""
    prepares = vars(model).get("prepare_inputs_for_generation", model.prepare_inputs_for_generation)
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    of_peft = any(getattr(hook, "func", hook).__module__.startswith("peft.") for hook in hooks)
    return of_peft or getattr(prepares, "__self__", None) is not model


def _is_sharded(model: Any) -> bool:
    """Processes must run each forward together (FSDP, ZeRO 3), so that `generate` syncs them unasked."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
        return False
    return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)


def prompts_of(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """Each row's prompt without its padding. Raises UsageError for inputs that are more than this text."""
    for name, value in model_kwargs.items():
        if name not in (*HARMLESS, *CACHES) and value is not None:
            raise UsageError(f"lookahead_generate decodes text given as input_ids: leave out {name}, or custom_generate.")
    mask = model_kwargs.get("attention_mask")
    lengths = [input_ids.shape[1]] * len(input_ids) if mask is None else (mask != 0).sum(-1).tolist()
    positions = model_kwargs.get("position_ids")
    for row, length in enumerate(lengths):
        if not length or (mask is not None and not bool((mask[row, -length:] != 0).all())):
            raise UsageError(f"row {row} of attention_mask is not 0 ... 0 1 ... 1: pad on the left (padding_side='left').")
        if positions is not None:
            own = positions[..., min(row, positions.shape[-2] - 1), -length:]
            if not bool((own == torch.arange(length, device=own.device)).all()):
                raise UsageError(f"row {row} of position_ids does not count from 0: leave position_ids out.")
    return [ids[-length:].tolist() for ids, length in zip(input_ids, lengths, strict=True)]


def refuse_unknown_ids(target: TargetModel, prompts: list[list[int]], drafter: Any) -> None:
    """Raise LookaheadError for ids that the model does not know."""
    unknown = [t for prompt in prompts for t in prompt if not 0 <= t < target.vocab_size]
    if unknown:
        raise UsageError(f"input_ids has {unknown[0]}, which is outside the model's vocabulary of {target.vocab_size}.")
    if drafter is not None and not isinstance(drafter, Drafter):
        raise UsageError(f"drafter is a {type(drafter).__name__}: give a lookahead.Drafter, such as Drafter([Trie('a.trie')]).")
    for trie in getattr(drafter, "tries", ()):
        trie.check_tokenizer("", target.vocab_size, target.name)
