"""Drafts inside vLLM: chains of tokens that vLLM itself verifies. In: its calls. Out: draft tokens, for each of its runners.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "lookahead.engines.vllm.Proposer",
        "num_speculative_tokens": 8}' --additional-config '{"lookahead": {"tries": ["answers.trie"]}}'

V1 runner: vLLM makes the `Proposer`, by its own hook for custom classes. V2 runner: `register`, an entry point of the group
vllm.general_plugins, lets it take the same line and makes the speculator of vllm_speculator.py. This runs in servers of others:
a vLLM that vllm_common.py does not know is left as it is, with one warning, and answers without drafts. No exception of ours
reaches it, but for settings that are wrong when it starts. As vLLM loads plugins in all its processes, whether they draft or
not, importing this file loads nothing that drafting needs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lookahead.engines.vllm_common import check_model, patch_runner, problem, rank_of, requests_of, warn_once

if TYPE_CHECKING:
    import numpy as np

    from lookahead.engines.requests import Requests

log = logging.getLogger(__name__)

PROPOSER = f"{__name__}.Proposer"  # as vLLM's speculative config names it


class Proposer:
    """vLLM's V1 runner makes it and asks it for drafts after each forward (`method: custom_class`).

    requests: None where nothing is drafted: another vLLM than those known, or another rank than the first, whose drafts count.
    """

    def __init__(self, vllm_config: Any):
        self.requests: Requests | None = None
        if unknown := problem():
            warn_once(unknown)
            return
        check_model(vllm_config)
        if rank_of() != 0:
            return
        from lookahead.engines.batch_rows import ByText

        self.requests = requests_of(vllm_config, timed=True)
        self._model = vllm_config.model_config  # whose limit vLLM may reduce later
        self._rows = ByText(self.requests)

    def load_model(self, *args: Any, **options: Any) -> None:
        """There is none."""

    def dummy_run(self, *args: Any, **options: Any) -> None:
        """There is nothing to run."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray | None = None,
        token_ids_cpu: np.ndarray | None = None,
        slot_mappings: Any = None,
        **further: Any,
    ) -> list[list[int]]:
        """Draft tokens of each row of the batch, none where they do not pay.

        sampled_token_ids: what each row has emitted, nothing while it prefills. num_tokens_no_spec: int32 [rows], of its text.
        token_ids_cpu: int32 [rows, longest text], texts.
        """
        if self.requests is None or num_tokens_no_spec is None or token_ids_cpu is None:
            return [[] for _ in sampled_token_ids]
        try:
            return self._rows.step(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, int(self._model.max_model_len))
        except Exception as error:
            self.requests = None
            warn_once(f"drafting has failed ({type(error).__name__}: {error})")
            log.debug("drafting has failed", exc_info=True)
            return [[] for _ in sampled_token_ids]


def register() -> None:
    """The entry point: let vLLM's V2 runner take our speculator. Raises nothing.

    Nothing is changed where vLLM is not known: the Proposer reports it, where it is used.
    """
    try:
        patch_runner(PROPOSER, _speculator_of)
    except Exception:  # a server of others
        log.debug("vLLM's V2 runner is left as it is", exc_info=True)


def _speculator_of(vllm_config: Any, device: Any, req_states: Any) -> Any:
    from lookahead.engines.vllm_speculator import speculator_of

    return speculator_of(vllm_config, device, req_states)
