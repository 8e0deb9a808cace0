"""What a request asks, in SGLang's words. In: a `Generation`. Out: an object of its sampling parameters."""

from __future__ import annotations

import json
import re
from typing import Any

from lookahead.decode.constraint import Constraint
from lookahead.decode.request import Generation
from lookahead.errors import UsageError


def params_of(generation: Generation, repetition_penalty: float) -> dict[str, Any]:
    """Fields of SGLang's SamplingParams. repetition_penalty: of the model, where the request sets nothing."""
    sampling = generation.sampling
    temperature = sampling.temperature or 0.0
    found: dict[str, Any] = {
        "temperature": temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": repetition_penalty if sampling.repetition_penalty is None else sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "sampling_seed": generation.seed if temperature else None,  # SGLang uses it with enable_deterministic_inference
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "min_new_tokens": min(sampling.min_new_tokens or 0, generation.room),
        "max_new_tokens": generation.room,
        "no_stop_trim": True,
    }
    return {**found, **structured(sampling.constraint)}


def structured(constraint: Constraint | None) -> dict[str, str]:
    """SGLang's field for a constraint. Raises UsageError for a grammar in Lark's form, which it does not read."""
    if constraint is None:
        return {}
    if constraint.kind == "choice":
        return {"regex": f"({'|'.join(map(re.escape, json.loads(constraint.text)))})"}
    if constraint.kind == "grammar":
        if "::=" not in constraint.text:
            raise UsageError("grammar: SGLang reads EBNF (root ::= ...), not Lark's form (engine hf reads both)")
        return {"ebnf": constraint.text}
    return {constraint.kind: constraint.text}
