"""Which engine answers a job. In: its options. Out: an error for those that it does not have, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lookahead.errors import UsageError
from lookahead.job.options import typed
from lookahead.job.spec import OPTIONS, JobSpec

ENGINES = ("hf", "vllm")
INSTEAD = {  # options that vLLM does not have: what does the same there
    "adapter": "merge it into the model",
    "device": "vLLM takes the devices of its platform",
    "attn": "--engine-arg attention_backend=NAME",
    "engine_mode": "",
    "quantize": "--engine-arg quantization=NAME",
    "kv_dtype": "--engine-arg kv_cache_dtype=NAME",
    "exact": "",
    "workers": "--engine-arg data_parallel_size=N",
    "ray": "",
    "device_map": "--engine-arg pipeline_parallel_size=N",
    "tp_plan": "--engine-arg tensor_parallel_size=N",
    "prefill_chunk": "--engine-arg max_num_batched_tokens=N",
    "explain": "",
    "typical_p": "",
    "no_repeat_ngram_size": "",
    "bad_words_ids": "--bad-words",
}
WITHOUT_DRAFTS = ("min_p", "logit_bias")  # vLLM refuses them with any drafts


def check_engine(spec: JobSpec) -> None:
    """Raises UsageError for an unknown engine, and for options that it does not have."""
    model, drafting, sampling = spec.model, spec.drafting, spec.sampling
    if model.engine not in ENGINES:
        raise UsageError(f"--engine {model.engine}: choose {' or '.join(ENGINES)}.")
    if model.engine == "hf":
        if model.engine_arg:
            raise UsageError("--engine-arg is of vLLM: name it with --engine vllm.")
        return
    for name, instead in INSTEAD.items():
        if _given(spec, name):
            raise UsageError(f"--engine vllm has no {typed(name)}{f': {instead}' if instead else ''}.")
    for name in WITHOUT_DRAFTS:
        if _given(spec, name) and drafting.strategy != "off":
            raise UsageError(f"--engine vllm: vLLM refuses {typed(name)} with drafts. Leave it out, or set --strategy off.")
    if sampling.sampling == "model":
        raise UsageError("--engine vllm has no --sampling model: give --temperature and its like.")
    if drafting.strategy in ("hierarchical", "parallel"):
        raise UsageError(f"--strategy {drafting.strategy}: vLLM verifies single branches. Choose auto, single or off.")
    engine_args(model.engine_arg or ())


def _given(spec: JobSpec, name: str) -> bool:
    each = OPTIONS[name]
    value = getattr(getattr(spec, each.group), name)
    return bool(value != each.field.default and not (name == "workers" and value == 1))


def engine_args(items: Sequence[str]) -> dict[str, Any]:
    """["max_model_len=512", "quantization=fp8"] -> {"max_model_len": 512, "quantization": "fp8"}.

    Raises UsageError for what has no name or value, and for a name given twice.
    """
    found: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not name.isidentifier() or not equals or not text.strip():
            raise UsageError(f"--engine-arg {item}: give NAME=VALUE, such as max_model_len=4096.")
        if name in found:
            raise UsageError(f"--engine-arg {item}: {name} is given twice.")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = {"True": True, "False": False, "None": None}.get(text, text)
    return found
