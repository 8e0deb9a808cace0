"""Our drafts in SGLang's worker for trees. In: each step's batch. Out: draft tokens and tree masks, in the form of its NGRAM.

SGLang verifies, samples and keeps the KV cache. Each rank of tensor parallel ones drafts for itself, from the same texts and in
the same order, as SGLang's own NGRAM does; drafting is deterministic.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from lookahead.engines.batch_rows import ByTree, Text, only_filler
from lookahead.engines.requests import Requests, serve
from lookahead.engines.settings import check_tries, settings_of

log = logging.getLogger(__name__)


class Worker(NGRAMWorker):
    """Drafts in each of SGLang's scheduler processes. rows: None where drafting has failed: then all is filler."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        drafter = settings_of().drafter("hierarchical", self.draft_token_num - 1)
        model = target_worker.model_config
        tokenizer = None if server_args.skip_tokenizer_init else str(server_args.tokenizer_path or server_args.model_path)
        check_tries(drafter, str(model.model_path), int(model.vocab_size), tokenizer, bool(server_args.trust_remote_code))
        self.rows: ByTree | None = ByTree(Requests(drafter), self.draft_token_num)
        self._lock = threading.Lock()  # a job's questions come in a thread
        self.ngram_corpus = Corpus(self.rows, self._lock)  # instead of SGLang's own
        if not getattr(target_worker, "tp_rank", 0):
            serve(self.rows.requests, self._lock)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens int64 [rows * n], mask int64 [rows * n * n])"""
        late = self._late_tokens(batch)
        texts = [
            Text(request.origin_input_ids_unpadded, request.output_ids, tokens)
            for request, tokens in zip(batch.reqs, late, strict=True)
        ]
        if self.rows is not None:
            try:
                with self._lock:
                    return self.rows.step([request.rid for request in batch.reqs], texts)
            except Exception as error:
                self.rows = self.ngram_corpus.rows = None
                log.warning("lookahead: drafting has failed (%s: %s). SGLang continues.", type(error).__name__, error)
                log.debug("drafting has failed", exc_info=True)
        return only_filler([text.emitted(len(text.output) + len(text.late) - 1)[0] for text in texts], self.draft_token_num)

    def _late_tokens(self, batch: Any) -> list[list[int]]:
        """Return of each request the tokens of the step before that its output does not hold yet, as schedules overlap."""
        if not self.enable_overlap or batch.grammar_needs_sync():
            return [[] for _ in batch.reqs]
        accepted, lengths = batch.spec_info.accept_tokens.cpu(), batch.spec_info.accept_lens.cpu()  # waits for the device
        rows = accepted.reshape(len(batch.reqs), self.draft_token_num).tolist()
        return [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Do nothing: a row's text is prefilled before its next draft."""


class Corpus:
    """Answers what SGLang asks of its own corpus, besides drafts."""

    def __init__(self, rows: ByTree, lock: threading.Lock):
        self.rows: ByTree | None = rows
        self._lock = lock

    def erase_match_state(self, request_ids: list[str]) -> None:
        """End requests that have left the batch."""
        if self.rows is not None:
            with self._lock:
                self.rows.finish(request_ids)

    def reset(self) -> None:
        """End all requests: SGLang has flushed its cache."""
        if self.rows is not None:
            with self._lock:
                self.rows.clear()

    def list_external_corpora(self) -> dict[str, int]:
        return {}

    def load_external_corpus_named(self, corpus_id: str, chunks: Any) -> int:
        raise ValueError(
            "lookahead drafts from trie files, which LOOKAHEAD_SETTINGS names: build one with lookahead build-trie."
        )

    def remove_external_corpus(self, corpus_id: str) -> None:
        raise ValueError(f"there is no external corpus {corpus_id!r}")
