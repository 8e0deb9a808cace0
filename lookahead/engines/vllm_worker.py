"""What a job asks of our drafter inside vLLM. In: calls by name, from the process that runs the job. Out: plain values.

vLLM mixes `DrafterOfWorker` into its worker class (`worker_extension_cls`) and calls its methods by `collective_rpc`, in
any process the worker lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
