"""Which vLLM this is. In: the installed package. Out: what about it is not as it was in the versions that were read and tested.

Versions come every two weeks and move what we use. So a version counts as known only if its number is, and if all that we call
or replace still looks as it did.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

KNOWN = ("0.32", "0.33")
PROPOSE = (  # of a speculator of the V2 runner
    *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled"),
    *("num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds", "dp_sync_state", "dummy_run"),
    *("skip_attn_for_dummy_run", "mm_inputs", "is_profile", "num_speculative_tokens"),
)
SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
SIGNATURES: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {  # of functions: module, name, parameters
    "v1": [("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", ("vllm_config",))],
    "v2": [
        ("vllm.config", "VllmConfig._get_v2_model_runner_unsupported_features", ("self",)),
        (SPECULATORS, "init_speculator", ("vllm_config", "device", "req_states")),
        (f"{SPECULATORS}.speculator", "BaseSpeculator.propose", PROPOSE),
        (f"{SPECULATORS}.speculator", "BaseSpeculator.init_cudagraph_manager", ("self", "cudagraph_mode")),
        (f"{SPECULATORS}.speculator", "BaseSpeculator.capture", ("self",)),
    ],
}


def problem(runner: str = "v1") -> str:
    """Why this vLLM is not known, for a runner, v1 or v2; "" if it is."""
    return unknown_version() or changed(runner)


def unknown_version() -> str:
    import vllm

    version = str(vllm.__version__)
    if ".".join(version.split(".")[:2]) in KNOWN:
        return ""
    return f"vLLM {version} is not one of the versions that are known ({', '.join(KNOWN)})"


@functools.cache
def changed(runner: str) -> str:
    """The first thing that does not look as it did; "" if all does."""
    for module, name, parameters in SIGNATURES[runner]:
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            now = tuple(inspect.signature(found).parameters)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            return f"{module}.{name} cannot be found ({type(error).__name__})"
        if now != parameters:
            return f"{module}.{name} takes other parameters"
    return ""
