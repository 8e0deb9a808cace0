"""Where vLLM is changed while it runs: for our speculator, for its sampling on CPUs. Only versions that are known are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from lookahead.engines import vllm_versions
from lookahead.engines.vllm_versions import SPECULATORS

RUNNER = "vllm.v1.worker.gpu.model_runner"
EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"
DONE = "_lookahead"  # an attribute of what was replaced


def apply(proposer: str, speculator_of: Callable[[Any, Any, Any], Any]) -> None:
    """Let the V2 runner take the custom class `proposer`, by a speculator of ours. Once in each process; again does nothing."""
    if vllm_versions.unknown_version():
        return
    hide_llvmlite()
    if vllm_versions.changed("v2"):
        return
    from vllm.config import VllmConfig

    spec_decode: Any = importlib.import_module(SPECULATORS)

    if getattr(spec_decode.init_speculator, DONE, False):
        return
    refused, init_speculator = VllmConfig._get_v2_model_runner_unsupported_features, spec_decode.init_speculator

    def is_ours(config: Any) -> bool:
        speculative = config.speculative_config
        return speculative is not None and speculative.method == "custom_class" and speculative.model == proposer

    def unsupported(self: Any) -> list[str]:
        return [each for each in refused(self) if not (is_ours(self) and "custom_class" in each)]

    def speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not is_ours(vllm_config):
            return init_speculator(vllm_config, device, req_states)
        return speculator_of(vllm_config, device, req_states)

    setattr(speculator, DONE, True)
    VllmConfig._get_v2_model_runner_unsupported_features = unsupported
    spec_decode.init_speculator = speculator
    runner: Any = sys.modules.get(RUNNER)
    if runner is not None and hasattr(runner, "init_speculator"):
        runner.init_speculator = speculator  # it has imported the name


def hide_llvmlite() -> None:
    """Let vLLM look through all modules on a CPU where numba is loaded, which fails at llvmlite's library.

    To replace kernels it reads the attributes of everything (triton_utils/dispatcher.py), and llvmlite's library answers to any
    name with a function, to "__dict__", too. From now on it has no such attribute.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    library = getattr(ffi, "lib", None)
    if library is None or isinstance(getattr(library, "__dict__", {}), dict):
        return
    kind: Any = type(library)
    found = kind.__getattr__

    def get(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return found(self, name)

    kind.__getattr__ = get


def sampling_problem() -> str:
    """Repair how vLLM samples behind drafts on a CPU, where that is wrong. Returns what is still wrong; "" if nothing is.

    Without Triton's CPU backend, vLLM 0.32 and 0.33 write temperature and top_p of drafted positions into a copy that is
    dropped, so they are uninitialised memory, and samples have another distribution. Greedy answers are not affected.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON or _expands():
        return ""
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = _expand  # where it is still to be registered
    register_kernels({EXPAND: _expand})
    return "" if _expands() else "sampling is wrong behind drafts on this CPU (temperature and top_p are not expanded)"


def _expands() -> bool:
    """vLLM repeats a row's temperature for each of its drafted positions."""
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    asked = torch.tensor([0.0, 0.5, 2.0]), torch.tensor([1, 1, 3], dtype=torch.int32)
    return bool(expand_batch_to_tokens(*asked, 3, 0, 1).tolist() == [1.0, 2.0, 2.0])


def _expand(
    output: Any, input_val: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None
) -> None:
    """What vLLM's `expand_kernel` does: values [rows] to output [tokens], a row's for each of its tokens."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts.long()))
