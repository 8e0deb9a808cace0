"""What a request asks, in vLLM's words. In: a `Generation`. Out: `SamplingParams`, or what vLLM cannot do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lookahead.decode.constraint import Constraint
from lookahead.decode.limits import LOGPROBS
from lookahead.decode.request import Generation
from lookahead.decode.sampling import Sampling
from lookahead.errors import UsageError

MOST_LOGPROBS = LOGPROBS
NOT_IN_VLLM = ("typical_p", "no_repeat_ngram_size", "bad_words_ids", "processors")
NOT_WITH_DRAFTS = ("min_p", "logit_bias")


def check_sampling(sampling: Sampling, drafts: bool = True) -> None:
    """Raises UsageError for what vLLM cannot do. drafts: it is asked to verify some."""
    if sampling.sampling == "model":
        raise UsageError("sampling is model: vLLM does not sample by all of the model's generation config, give a temperature.")
    off = {"typical_p": 1.0, "min_p": 0.0}
    for name in NOT_IN_VLLM + (NOT_WITH_DRAFTS if drafts else ()):
        value = getattr(sampling, name)
        if value and value != off.get(name):
            where = "vLLM has none" if name in NOT_IN_VLLM else "vLLM refuses it with drafts, so set --strategy off"
            raise UsageError(f"{name} is set, and {where} (engine hf has it).")


def params_of(generation: Generation, own: Mapping[str, Any]) -> Any:
    """vLLM's SamplingParams. own: those of the model's generation config, of which repetition_penalty counts."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = generation.sampling
    temperature = sampling.temperature or 0.0
    penalty = sampling.repetition_penalty
    if penalty is None:
        penalty = own.get("repetition_penalty", 1.0)
    return SamplingParams(
        temperature=temperature,
        top_k=sampling.top_k or 0,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        min_p=sampling.min_p or 0.0,
        repetition_penalty=float(penalty),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=generation.seed if temperature else None,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        bad_words=list(sampling.bad_words) or None,
        min_tokens=min(sampling.min_new_tokens or 0, generation.room),
        max_tokens=generation.room,
        logprobs=generation.logprobs,
        detokenize=bool(sampling.stop),
        structured_outputs=structured(sampling.constraint),
        output_kind=RequestOutputKind.DELTA,
    )


def structured(constraint: Constraint | None) -> Any:
    """vLLM's StructuredOutputsParams."""
    if constraint is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    if constraint.kind == "choice":
        return StructuredOutputsParams(choice=json.loads(constraint.text))
    if constraint.kind == "json_schema":
        return StructuredOutputsParams(json=constraint.text)
    return StructuredOutputsParams(**{constraint.kind: constraint.text})
