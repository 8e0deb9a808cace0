"""Our drafts as a speculator of vLLM's V2 runner. In: each step's batch, on the device. Out: draft tokens [rows, K], likewise.

A host drafter waits for the device once a step, for two numbers of each row: how many tokens it has emitted, and the last one.
With `enable_adaptive_verification` vLLM chooses how many tokens of each row are verified, from `draft_token_confidence_probs`:
those are our calibrated probabilities. The first rank of tensor parallel ones drafts, and the others take its arrays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from lookahead.engines.batch_rows import ById, Running
from lookahead.engines.requests import Requests

PROPOSE = inspect.signature(BaseSpeculator.propose)


class Speculator(BaseSpeculator):
    """Drafts for vLLM's V2 runner.

    requests: None on ranks that take the drafts of the first one, and where nothing is drafted: then all is filler.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        req_states: Any,
        requests: Requests | None,
        report_failure: Callable[[Exception], None],
    ):
        self.requests, self._report_failure = requests, report_failure
        speculative = vllm_config.speculative_config
        self.vllm_config, self.device, self.req_states = vllm_config, device, req_states
        self.speculative_config, self.method = speculative, speculative.method
        self.num_speculative_steps = steps = int(speculative.num_speculative_tokens)
        self.enable_adaptive_verification = speculative.enable_adaptive_verification
        rows, pinned = int(vllm_config.scheduler_config.max_num_seqs), device.type == "cuda"
        self._tokens = torch.zeros(rows, steps, dtype=torch.int64, pin_memory=pinned)
        self._confidences = torch.zeros(rows, steps, dtype=torch.float32, pin_memory=pinned)
        self._rows = ById(requests, self._tokens.numpy(), self._confidences.numpy()) if requests is not None else None
        self.draft_tokens = torch.zeros(rows, steps, dtype=torch.int64, device=device)
        self.draft_token_confidence_probs = torch.zeros(rows, steps, dtype=torch.float32, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: nothing of ours is in a graph."""

    def capture(self) -> None:
        """Do nothing, likewise."""

    def load_model(self, *args: Any, **options: Any) -> None:
        """Do nothing: there is none."""

    @torch.inference_mode()
    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return int64 [rows, K], filler where nothing is drafted.

        num_sampled: [rows]. last_sampled: [any, 1], by `idx_mapping`; further arguments as of vLLM.
        """
        called = PROPOSE.bind(self, *args, **kwargs).arguments
        input_batch, num_sampled, last_sampled = (called[name] for name in ("input_batch", "num_sampled", "last_sampled"))
        count = int(input_batch.num_reqs)
        drafts, confidences = self.draft_tokens[:count], self.draft_token_confidence_probs[:count]
        if called.get("dummy_run"):
            return drafts
        if self._rows is not None:
            last = last_sampled.view(-1)[input_batch.idx_mapping[:count]]
            emitted, last_ids = torch.stack([num_sampled[:count].long(), last.long()]).cpu().numpy()  # waits for the device
            try:
                running = self.req_states.req_id_to_index
                self._rows.step(list(input_batch.req_ids[:count]), emitted, last_ids, running, self._about)
            except Exception as error:
                self.requests = self._rows = None
                self._confidences.zero_()
                self._report_failure(error)
        group = get_tp_group()
        if group.rank_in_group == 0:
            drafts.copy_(self._tokens[:count], non_blocking=True)
            confidences.copy_(self._confidences[:count], non_blocking=True)
        if group.world_size > 1:
            group.broadcast(drafts, src=0)
            group.broadcast(confidences, src=0)
        return drafts

    def _about(self, request_id: str) -> Running:
        states = self.req_states
        index = states.req_id_to_index[request_id]
        prefilled = int(states.prefill_len.np[index])
        return Running(prefilled, int(states.max_seq_len[index]), functools.partial(self._text, index, prefilled))

    def _text(self, index: int, length: int) -> Any:
        return self.req_states.all_token_ids.gpu[index, :length].cpu().numpy()
