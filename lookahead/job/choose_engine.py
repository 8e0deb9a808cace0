"""Which engine answers a job. In: its options. Out: an error for those that it does not have, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from lookahead.engines.abilities import ABILITIES, OFF
from lookahead.errors import UsageError
from lookahead.job.spec import OPTIONS, JobSpec
from lookahead.models.options import ModelOptions
from lookahead.options import typed

ENGINES = ("hf", "vllm", "sglang")
NO_OPTION = {  # options that no other engine has: what does the same there
    "adapter": "merge it into the model",
    "engine_mode": "",
    "exact": "",
    "ray": "",
    "explain": "",
}
INSTEAD = {  # likewise, by engine
    "vllm": {
        **NO_OPTION,
        "device": "vLLM takes the devices of its platform",
        "attn": "--engine-arg attention_backend=NAME",
        "quantize": "--engine-arg quantization=NAME",
        "kv_dtype": "--engine-arg kv_cache_dtype=NAME",
        "workers": "--engine-arg data_parallel_size=N",
        "device_map": "--engine-arg pipeline_parallel_size=N",
        "tp_plan": "--engine-arg tensor_parallel_size=N",
        "prefill_chunk": "--engine-arg max_num_batched_tokens=N",
        "bad_words_ids": "--bad-words",
    },
    "sglang": {
        **NO_OPTION,
        "device": "--engine-arg device=NAME",
        "attn": "--engine-arg attention_backend=NAME",
        "quantize": "--engine-arg quantization=NAME",
        "kv_dtype": "--engine-arg kv_cache_dtype=NAME",
        "workers": "",
        "device_map": "--engine-arg pp_size=N",
        "tp_plan": "--engine-arg tp_size=N",
        "prefill_chunk": "--engine-arg chunked_prefill_size=N",
    },
}
STRATEGIES = {  # those it has: why not the others
    "vllm": (("auto", "single", "off"), "vLLM verifies single branches"),
    "sglang": (("auto", "hierarchical", "off"), "SGLang is given one tree of all branches"),
}


def check_other_engine(model: ModelOptions, given: Collection[str]) -> None:
    """Raises UsageError for an unknown engine, for arguments of none, and for options that it does not have. given: names."""
    engine = model.engine
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: choose {', '.join(ENGINES[:-1])} or {ENGINES[-1]}.")
    if engine == "hf" and model.engine_arg:
        raise UsageError("--engine-arg is of vLLM and SGLang: name it with --engine vllm or sglang.")
    if engine == "hf":
        return
    for name, instead in {**dict.fromkeys(ABILITIES[engine].missing, ""), **INSTEAD[engine]}.items():
        if name in given:
            raise UsageError(f"--engine {engine} has no {typed(name)}{f': {instead}' if instead else ''}.")


def check_engine(spec: JobSpec) -> None:
    """Raises UsageError for an unknown engine, and for options that it does not have."""
    model, drafting, sampling = spec.model, spec.drafting, spec.sampling
    engine = model.engine
    check_other_engine(model, [name for name in OPTIONS if _given(spec, name)])
    if engine == "hf":
        return
    able = ABILITIES[engine]
    for name in able.not_with_drafts:
        value = getattr(sampling, name)
        if value and value != OFF.get(name) and drafting.strategy != "off":
            raise UsageError(
                f"--engine {engine}: {able.title} {able.objection} {typed(name)} with drafts. Leave it out, or set "
                "--strategy off."
            )
    if sampling.sampling == "model":
        raise UsageError(f"--engine {engine} has no --sampling model: give --temperature and its like.")
    known, why = STRATEGIES[engine]
    if drafting.strategy not in known:
        raise UsageError(f"--strategy {drafting.strategy}: {why}. Choose {', '.join(known[:-1])} or {known[-1]}.")
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
