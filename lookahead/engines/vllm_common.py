"""What the drafters of vLLM's two runners share: which models they refuse, on which rank they draft, with what."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lookahead.engines import vllm_patches, vllm_versions
from lookahead.errors import UsageError

if TYPE_CHECKING:
    from lookahead.engines.pace import Pace
    from lookahead.engines.requests import Requests

log = logging.getLogger(__name__)
_warned: set[str] = set()


def requests_of(vllm_config: Any, timed: bool) -> Requests:
    """What drafts for vLLM. timed: drafts are to be as long as pays by the clock, where the settings leave it so.

    Raises UsageError for settings that are wrong, LookaheadError for a trie that cannot be used.
    """
    from lookahead.engines.pace import Pace
    from lookahead.engines.requests import Requests
    from lookahead.engines.settings import DraftSettings, check_tries

    settings = DraftSettings.of(vllm_config.additional_config)
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    drafter = settings.drafter("single", int(speculative.num_speculative_tokens))
    tokenizer = None if model.skip_tokenizer_init else str(model.tokenizer)
    check_tries(drafter, str(model.model), int(model.get_vocab_size()), tokenizer, bool(model.trust_remote_code))
    vllm_patches.hide_llvmlite()  # which is loaded by now, from another engine in this process
    pace: Pace | None = Pace() if timed and settings.adaptive else None
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
    return vllm_versions.problem() or vllm_patches.sampling_problem()


def warn_once(what: str) -> None:
    """One line in the server's log."""
    if not _warned:
        log.warning("lookahead: %s. vLLM continues without drafts.", what)
    _warned.add(what)
