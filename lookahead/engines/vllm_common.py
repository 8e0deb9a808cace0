"""What our drafters inside vLLM share: which versions and models they know, what they change in vLLM, on which rank they draft.

vLLM's versions come every two weeks and move what we use. So a version counts as known only if its number is, and if all that
we call or replace still looks as it did; only such a vLLM is changed: for our speculator, for its sampling on CPUs.
A job asks our drafter by `collective_rpc`: vLLM mixes `DrafterOfWorker` into its worker class (`worker_extension_cls`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lookahead.errors import UsageError

if TYPE_CHECKING:
    from lookahead.engines.pace import ExternalBudget
    from lookahead.engines.requests import Requests


RUNNER = "vllm.v1.worker.gpu.model_runner"
EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"
DONE = "_lookahead"  # an attribute of what was replaced


def patch_runner(proposer: str, speculator_of: Callable[[Any, Any, Any], Any]) -> None:
    """Let the V2 runner take the custom class `proposer`, by a speculator of ours. Once in each process; again does nothing."""
    if unknown_version():
        return
    hide_llvmlite()
    if changed("v2"):
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


def version_problem(runner: str = "v1") -> str:
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


log = logging.getLogger(__name__)
_warned: set[str] = set()


def requests_of(vllm_config: Any, timed: bool) -> Requests:
    """What drafts for vLLM. timed: drafts are to be as long as pays by the clock, where the settings leave it so.

    Raises UsageError for settings that are wrong, LookaheadError for a trie that cannot be used.
    """
    from lookahead.engines.pace import ExternalBudget
    from lookahead.engines.requests import Requests
    from lookahead.engines.settings import DraftSettings, check_tries

    settings = DraftSettings.of(vllm_config.additional_config)
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    drafter = settings.drafter("single", int(speculative.num_speculative_tokens))
    tokenizer = None if model.skip_tokenizer_init else str(model.tokenizer)
    check_tries(drafter, str(model.model), int(model.get_vocab_size()), tokenizer, bool(model.trust_remote_code))
    hide_llvmlite()  # which is loaded by now, from another engine in this process
    pace: ExternalBudget | None = ExternalBudget() if timed and settings.adaptive else None
    return Requests(drafter, pace)


def check_model(vllm_config: Any) -> None:
    """Raises UsageError for a model that vLLM answers wrongly when rows have drafts of different lengths."""
    model = vllm_config.model_config
    if model.is_hybrid or model.has_inner_state or model.is_attention_free:
        raise UsageError(
            f"{model.model}: keeps more state than its KV cache (hybrid, Mamba or linear attention), and vLLM does not restore "
            "it rightly behind drafts of different lengths. Leave the speculative config out for this model."
        )


def rank_of() -> int:
    """Of this process among those that share the model's layers; 0: its drafts count."""
    from vllm.distributed.parallel_state import get_tp_group

    try:
        return int(get_tp_group().rank_in_group)
    except AssertionError:  # no group: one process
        return 0


def problem() -> str:
    """Why nothing is drafted in this vLLM; "": it is known, and sampling is right, or repaired now."""
    return version_problem() or sampling_problem()


def warn_once(what: str) -> None:
    """One line in the server's log."""
    if not _warned:
        log.warning("lookahead: %s. vLLM continues without drafts.", what)
    _warned.add(what)


EXTENSION = f"{__name__}.DrafterOfWorker"  # as vLLM's arguments name it


class DrafterOfWorker:
    """Methods of a worker of vLLM. Where nothing of ours drafts, they find nothing."""

    model_runner: Any

    def lookahead_count_accepted(self) -> bool:
        """From now on count who drafted what is accepted. Returns whether something of ours drafts here."""
        requests = getattr(self._lookahead_drafter(), "requests", None)
        if requests is not None and hasattr(requests, "count_accepted"):
            requests.count_accepted()
            return True
        return False

    def lookahead_accepted(self, texts: Sequence[tuple[bytes, int]]) -> list[dict[str, int]] | None:
        """Of requests that have ended: accepted tokens by draft source; None where nothing of ours drafts.

        texts: of each its prompt and answer, int32, as bytes, and how many tokens the prompt has.
        """
        requests = getattr(self._lookahead_drafter(), "requests", None)
        if requests is None or not hasattr(requests, "accepted_of"):
            return None
        found: list[dict[str, int]] = requests.accepted_of_each(texts)
        return found

    def lookahead_forget(self) -> None:
        """Forget the answers of earlier requests. None may be running."""
        drafter = self._lookahead_drafter()
        requests, suffixes = getattr(drafter, "requests", None), getattr(drafter, "suffix_cache", None)
        if requests is not None and hasattr(requests, "forget"):
            requests.forget()
        if suffixes is not None:  # of vLLM's suffix decoding
            for request_id in list(suffixes.active_requests):
                suffixes.stop_request(request_id)
            for request_id in list(suffixes.cached_requests):
                suffixes.evict_cached_response(request_id)

    def _lookahead_drafter(self) -> Any:
        """Of the V2 runner, or of V1."""
        return getattr(self.model_runner, "speculator", None) or getattr(self.model_runner, "drafter", None)
