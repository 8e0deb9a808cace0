"""The speculative algorithm that SGLang is given. In: SGLang's registry. Out: a class that answers as its own NGRAM does.

SGLang asks an algorithm what it is (`is_ngram` and its like) and handles it so. Our trees are verified in the way of its NGRAM,
so ours answers as NGRAM. The worker and all that drafting needs are imported when SGLang makes the worker.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from lookahead.engines.settings import settings_of

NODES = 16  # of a tree, by default
ROWS = 48  # at once, by default: SGLang's own limit for NGRAM
NGRAM = SpeculativeAlgorithm.NGRAM
ANSWERS = [name for name in vars(SpeculativeAlgorithm) if name.startswith(("is_", "supports_", "has_", "need", "carries_"))]


class Algorithm(CustomSpecAlgo):
    """Answers all that SGLang asks as its NGRAM does, but for options and the worker."""

    def create_future_map(self, *args: Any, **options: Any) -> Any:
        """Make what relays accepted tokens to the next step."""
        return NGRAM.create_future_map(*args, **options)

    def get_platform_worker_cls(self) -> None:
        """Return None: no platform has a worker of its own for it."""

    def handle_server_args(self, server_args: Any) -> None:
        """Set what verifying trees needs. Raises ValueError for a device, or a combination, that has no trees."""
        settings_of()  # settings that are wrong stop SGLang at its start
        args = server_args
        if args.device not in ("cuda", "cpu", "xpu"):
            raise ValueError(
                f"{self.name}: SGLang verifies draft trees on CUDA, CPU and XPU devices only, not on {args.device}."
            )
        if args.enable_dp_attention or (args.attn_dp_size or 1) > 1:
            raise ValueError(f"{self.name}: SGLang verifies no draft trees with data parallel attention.")
        if args.device == "cpu":
            args.disable_overlap_schedule = True
        if args.max_running_requests is None:
            args.max_running_requests = ROWS
        if args.speculative_num_draft_tokens is None:
            args.speculative_num_draft_tokens = NODES
        args.enable_mixed_chunk = False
        args.speculative_eagle_topk = args.speculative_ngram_max_bfs_breadth
        if args.speculative_num_steps is None:
            args.speculative_num_steps = max(1, args.speculative_num_draft_tokens // args.speculative_eagle_topk)
        if (args.page_size or 1) > 1 and args.attention_backend != "flashinfer":
            raise ValueError(f"{self.name}: trees need --page-size 1, or --attention-backend flashinfer.")


for _name in ANSWERS:
    setattr(Algorithm, _name, lambda self, *args, _name=_name, **options: getattr(NGRAM, _name)(*args, **options))


def register_algorithm(name: str) -> None:
    """Raises ValueError if there is one of this name."""

    def worker(server_args: Any) -> type:
        from lookahead.engines.sglang_worker import Worker

        return Worker

    SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=Algorithm)(worker)
