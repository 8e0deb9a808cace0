"""Drafts inside vLLM: chains of tokens that vLLM itself verifies. In: its calls. Out: draft tokens, for each of its runners.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "lookahead.engines.vllm.Proposer",
        "num_speculative_tokens": 8}' --additional-config '{"lookahead": {"tries": ["answers.trie"]}}'

V1 runner: vLLM makes the `Proposer`, by its own hook for custom classes. V2 runner: `register`, an entry point of the group
vllm.general_plugins, lets it take the same line and makes the speculator of vllm_speculator.py. This runs in servers of others,
and vLLM's versions come every two weeks and move what we use. So a version counts as known only if its number is, and if all
that we call or replace still looks as it did. Another vLLM is left as it is, with one warning, and answers without drafts. No
exception of ours reaches it, but for settings that are wrong when it starts. vLLM loads plugins in all its processes, drafting
or not, so importing this file loads nothing that drafting needs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lookahead.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from lookahead.engines.requests import Requests

log = logging.getLogger(__name__)

PROPOSER = f"{__name__}.Proposer"  # as vLLM's speculative config names it
EXTENSION = f"{__name__}.DrafterOfWorker"  # as its arguments name it
EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"
RUNNER = "vllm.v1.worker.gpu.model_runner"
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


class Proposer:
    """Drafts for vLLM's V1 runner, which makes it and asks it for drafts after each forward (`method: custom_class`).

    requests: None where nothing is drafted: another vLLM than those known, or another rank than the first, whose drafts count.
    """

    def __init__(self, vllm_config: Any):
        self._model = vllm_config.model_config  # whose limit vLLM may reduce later
        self.requests = requests_of(vllm_config, timed=True)
        if self.requests is not None:
            from lookahead.engines.batch_rows import ByText

            self._rows = ByText(self.requests)

    def load_model(self, *args: Any, **options: Any) -> None:
        """Do nothing: there is none."""

    def dummy_run(self, *args: Any, **options: Any) -> None:
        """Do nothing: there is nothing to run."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray | None = None,
        token_ids_cpu: np.ndarray | None = None,
        slot_mappings: Any = None,
        **further: Any,
    ) -> list[list[int]]:
        """Return draft tokens of each row of the batch, none where they do not pay.

        sampled_token_ids: what each row has emitted, nothing while it prefills. num_tokens_no_spec: int32 [rows], of its text.
        token_ids_cpu: int32 [rows, longest text], texts.
        """
        if self.requests is None or num_tokens_no_spec is None or token_ids_cpu is None:
            return [[] for _ in sampled_token_ids]
        try:
            return self._rows.step(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, int(self._model.max_model_len))
        except Exception as error:
            self.requests = None
            report_failure(error)
            return [[] for _ in sampled_token_ids]


class DrafterOfWorker:
    """Lets a job ask our drafter by `collective_rpc`: vLLM mixes it into its worker class (`worker_extension_cls`)."""

    model_runner: Any

    def lookahead_answer(self, method: str, *arguments: Any) -> Any:
        """Return what our drafter does, see `Requests.answer`; None where nothing of ours drafts."""
        drafter = getattr(self.model_runner, "speculator", None) or getattr(self.model_runner, "drafter", None)  # of V2, of V1
        suffixes = getattr(drafter, "suffix_cache", None) if method == "forget" else None
        if suffixes is not None:  # of vLLM's suffix decoding
            for request_id in list(suffixes.active_requests):
                suffixes.stop_request(request_id)
            for request_id in list(suffixes.cached_requests):
                suffixes.evict_cached_response(request_id)
        requests: Any = getattr(drafter, "requests", None)
        return requests.answer(method, *arguments) if hasattr(requests, "answer") else None


def register() -> None:
    """Let vLLM's V2 runner take our speculator, as the entry point. Raises nothing.

    Nothing is changed where vLLM is not known: the Proposer reports it, where it is used.
    """
    try:
        _patch_runner()
    except Exception:  # a server of others
        log.debug("vLLM's V2 runner is left as it is", exc_info=True)


def _patch_runner() -> None:
    """Let the V2 runner take the Proposer's name, by a speculator of ours. Once in each process; again does nothing."""
    if unknown_version():
        return
    hide_llvmlite()
    if changed("v2"):
        return
    from vllm.config import VllmConfig

    spec_decode: Any = importlib.import_module(SPECULATORS)
    if getattr(spec_decode.init_speculator, "_lookahead", False):
        return
    refused, init_speculator = VllmConfig._get_v2_model_runner_unsupported_features, spec_decode.init_speculator

    def is_ours(config: Any) -> bool:
        speculative = config.speculative_config
        return speculative is not None and speculative.method == "custom_class" and speculative.model == PROPOSER

    def unsupported(self: Any) -> list[str]:
        return [each for each in refused(self) if not (is_ours(self) and "custom_class" in each)]

    def speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not is_ours(vllm_config):
            return init_speculator(vllm_config, device, req_states)
        check_model(vllm_config)
        from lookahead.engines.vllm_speculator import Speculator

        return Speculator(vllm_config, device, req_states, requests_of(vllm_config, timed=False), report_failure)

    speculator._lookahead = True  # type: ignore[attr-defined]
    VllmConfig._get_v2_model_runner_unsupported_features = unsupported
    spec_decode.init_speculator = speculator
    runner: Any = sys.modules.get(RUNNER)
    if runner is not None and hasattr(runner, "init_speculator"):
        runner.init_speculator = speculator  # it has imported the name


def requests_of(vllm_config: Any, timed: bool) -> Requests | None:
    """Make what drafts for vLLM; None where nothing does: another vLLM than those known, or another rank than the first.

    timed: drafts are to be as long as pays by the clock, where the settings leave it so. Raises UsageError for settings or a
    model that cannot be used, LookaheadError for a trie.
    """
    if unknown := unknown_version() or changed("v1") or sampling_problem():
        warn_once(unknown)
        return None
    check_model(vllm_config)
    from vllm.distributed.parallel_state import get_tp_group

    with contextlib.suppress(AssertionError):  # no group: one process
        if get_tp_group().rank_in_group != 0:  # whose drafts do not count
            return None
    from lookahead.engines.requests import ExternalBudget, Requests
    from lookahead.engines.settings import DraftSettings, check_tries

    settings = DraftSettings.of(vllm_config.additional_config)
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    drafter = settings.drafter("single", int(speculative.num_speculative_tokens))
    tokenizer = None if model.skip_tokenizer_init else str(model.tokenizer)
    check_tries(drafter, str(model.model), int(model.get_vocab_size()), tokenizer, bool(model.trust_remote_code))
    hide_llvmlite()  # which is loaded by now, from another engine in this process
    return Requests(drafter, ExternalBudget() if timed and settings.adaptive else None)


def check_model(vllm_config: Any) -> None:
    """Raises UsageError for a model that vLLM answers wrongly when rows have drafts of different lengths."""
    model = vllm_config.model_config
    if model.is_hybrid or model.has_inner_state or model.is_attention_free:
        raise UsageError(
            f"{model.model}: keeps more state than its KV cache (hybrid, Mamba or linear attention), and vLLM does not restore "
            "it rightly behind drafts of different lengths. Leave the speculative config out for this model."
        )


def unknown_version() -> str:
    import vllm

    version = str(vllm.__version__)
    if ".".join(version.split(".")[:2]) in KNOWN:
        return ""
    return f"vLLM {version} is not one of the versions that are known ({', '.join(KNOWN)})"


@functools.cache
def changed(runner: str) -> str:
    """Return the first thing that does not look as it did; "" if all does."""
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
    """Return whether vLLM repeats a row's temperature for each of its drafted positions."""
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    asked = torch.tensor([0.0, 0.5, 2.0]), torch.tensor([1, 1, 3], dtype=torch.int32)
    return bool(expand_batch_to_tokens(*asked, 3, 0, 1).tolist() == [1.0, 2.0, 2.0])


def _expand(
    output: Any, input_val: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None
) -> None:
    """Do what vLLM's `expand_kernel` does: values [rows] to output [tokens], a row's for each of its tokens."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts.long()))


_warned: list[str] = []


def warn_once(what: str) -> None:
    """Write one line to the server's log."""
    if not _warned:
        log.warning("lookahead: %s. vLLM continues without drafts.", what)
    _warned.append(what)


def report_failure(error: Exception) -> None:
    """Write why nothing is drafted any more to the server's log. error: the one that is being handled."""
    warn_once(f"drafting has failed ({type(error).__name__}: {error})")
    log.debug("drafting has failed", exc_info=True)
