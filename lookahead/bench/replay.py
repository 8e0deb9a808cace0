"""Replay: logged answers play the model. In: (prompt ids, response ids) pairs. Out: EDL, draft sizes and latencies.

Drafting and verification go by token ids alone, so this needs no model and no torch. The first response token is free, as
a prefill gives it; everything after it is counted.
"""

from __future__ import annotations

import dataclasses
import functools
import runpy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lookahead.draft.counts import DraftCounts
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import ObserverOf, Step, nobody
from lookahead.draft.options import DraftOptions
from lookahead.errors import UsageError
from lookahead.trie.file import Trie

BASELINES = ("prompt-lookup", "original-trie")
CHECKOUT = Path(__file__).parents[2]


def baseline_class(name: str) -> Any:
    """The class of a baseline: (tries, options) -> a drafter. Raises UsageError where there is no checkout."""
    return _classes(CHECKOUT)[name]


@functools.cache
def _classes(checkout: Path) -> dict[str, Any]:
    file = checkout / "benchmarks" / "baselines.py"
    if not (file.is_file() and (checkout / "pyproject.toml").is_file()):  # another package may have a folder of this name
        raise UsageError(
            "--baselines: they are not part of the installed package. Run it from a checkout: pip install -e . in its folder."
        )
    found: dict[str, Any] = runpy.run_path(str(file), run_name="lookahead_baselines")["BASELINES"]
    return found


CONTENDER = ("strategy", "decoding_length", "branch_length", "start")
Pair = tuple[list[int], list[int]]


@dataclasses.dataclass
class ReplayResult(DraftCounts):
    """One strategy or baseline over all pairs. Latencies in microseconds; edl as in METHOD: tokens after the first / steps."""

    strategy: str
    decoding_length: int
    branch_length: int
    start: str  # warm: with tries; cold: without
    tokens: int
    draft_us: np.ndarray  # per step
    update_us: np.ndarray  # per step

    @property
    def contender(self) -> tuple[str, int, int, str]:
        """Name of this result among others of the same pairs."""
        return self.strategy, self.decoding_length, self.branch_length, self.start

    @property
    def edl(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def as_json(self) -> dict[str, Any]:
        """One entry of "strategies" in the JSON of `bench --replay`."""
        value = {name: getattr(self, name) for name in (*CONTENDER, "steps")}
        value |= {"edl": round(self.edl, 4), "draft_tokens_per_step": round(self.draft_tokens_per_step, 2)}
        for name in ("draft_us", "update_us"):
            times = getattr(self, name)
            p50, p99 = np.percentile(times, (50, 99)).round(1).tolist() if len(times) else (0.0, 0.0)
            value[name] = {"p50": p50, "p99": p99}
        return {**value, "accepted_by_source": dict(self.accepted_by_source)}


def replay(
    pairs: Sequence[Pair],
    tries: Sequence[Trie],
    options: DraftOptions,
    baseline: str | None = None,
    weights: Sequence[float] | None = None,
    observer_of: ObserverOf = nobody,
) -> ReplayResult:
    """Draft along each response and accept what it holds; earlier outputs are remembered. baseline: drafts instead, by name."""
    drafter = baseline_class(baseline)(tries, options) if baseline else Drafter(tries, options, weights)
    return replay_with(drafter, pairs, "warm" if tries else "cold", baseline or options.strategy, observer_of)


def replay_with(
    drafter: Any, pairs: Sequence[Pair], start: str = "cold", strategy: str = "", observer_of: ObserverOf = nobody
) -> ReplayResult:
    """`replay` with a `Drafter` or baseline that is kept, and what it learns with it."""
    tokens, counts = 0, DraftCounts()
    draft_us, update_us = [], []
    for number, (prompt, response) in enumerate(pairs, 1):
        observer = observer_of(number)
        row = drafter.start(prompt)
        row.accept(response[:1])
        done, before = 1, counts.steps
        while done < len(response):
            began = time.perf_counter()
            tree = row.draft(branch_length=len(response) - done)
            drafted = time.perf_counter()
            ahead = iter(response[done:])
            accepted, path = tree.follow(lambda node, emitted, ahead=ahead: next(ahead, None))
            updating = time.perf_counter()
            row.accept(accepted)
            update_us.append((time.perf_counter() - updating) * 1e6)
            draft_us.append((drafted - began) * 1e6)
            counts.count(tree, path, drafter.source_names)
            tokens += len(accepted)
            done += len(accepted)
            if observer:
                observer(Step.of(counts.steps - before, prompt, response[:done], tree, path, accepted, drafter.source_names))
        row.finish()
    lengths = drafter.options.decoding_length, drafter.options.branch_length
    return ReplayResult(strategy, *lengths, start, tokens, np.array(draft_us), np.array(update_us), **vars(counts))
