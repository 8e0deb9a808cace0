"""Replays of one or more workloads. In: logged pairs and tries of each. Out: what every contender reached, and the means."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lookahead.bench.baselines import baseline_class
from lookahead.bench.replay import Pair, ReplayResult, replay
from lookahead.draft.options import DraftOptions
from lookahead.trie.file import Trie

Contender = tuple[str | None, DraftOptions]  # (name of a baseline or None for our drafter, its lengths)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is replayed. build_seconds: what opening the tries took. weights: of the tries, see `Drafter`."""

    name: str
    pairs: list[Pair]
    tries: list[Trie]
    build_seconds: float = 0.0
    weights: list[float] | None = None

    @property
    def starts(self) -> list[list[Trie]]:
        """The tries of each start: warm, if there are any, and cold."""
        return [self.tries, []] if self.tries else [[]]

    def replay(self, contenders: Sequence[Contender]) -> Iterator[ReplayResult]:
        """One result for each start and contender, in this order."""
        for tries in self.starts:
            for baseline, options in contenders:
                yield replay(self.pairs, tries, options, baseline, self.weights if tries else None)


@dataclasses.dataclass(frozen=True)
class WorkloadReplay:
    """All results on one workload. tokens: of its responses, the first ones included."""

    name: str
    rows: int
    tokens: int
    results: list[ReplayResult]
    build_seconds: float

    def as_json(self) -> dict[str, Any]:
        """The object that `bench --replay --json` prints for one workload."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "strategies": [result.as_json() for result in self.results],
            "build_seconds": round(self.build_seconds, 4),
        }


@dataclasses.dataclass(frozen=True)
class Mean:
    """A contender over all workloads; edl is the geometric mean."""

    strategy: str
    decoding_length: int
    branch_length: int
    start: str
    edl: float


def replay_workloads(
    workloads: Sequence[Workload], contenders: Sequence[Contender], progress: Callable[[int], None] = lambda done: None
) -> list[WorkloadReplay]:
    """Replay each workload with each contender, warm if it has tries and cold; progress(runs done).

    Raises UsageError for a baseline without a checkout, before anything is replayed.
    """
    replays, done = [], 0
    for name, _ in contenders:
        if name:
            baseline_class(name)
    for workload in workloads:
        results = []
        for result in workload.replay(contenders):
            results.append(result)
            done += 1
            progress(done)
        tokens = sum(len(response) for _, response in workload.pairs)
        replays.append(WorkloadReplay(workload.name, len(workload.pairs), tokens, results, workload.build_seconds))
    return replays


def geometric_means(replays: Sequence[WorkloadReplay]) -> list[Mean]:
    """One for each contender and start that all workloads have: a mean over fewer would not compare."""
    means = []
    for result in max((each.results for each in replays), key=len):
        found = [same for each in replays for same in each.results if same.contender == result.contender]
        if len(found) == len(replays):
            means.append(Mean(*result.contender, math.prod(same.edl for same in found) ** (1 / len(found))))
    return means


def as_json(replays: Sequence[WorkloadReplay]) -> dict[str, Any]:
    """The object that `bench --replay --json` prints: of one workload, or of several with their means."""
    if len(replays) == 1:
        return replays[0].as_json()
    means = [dataclasses.asdict(mean) for mean in geometric_means(replays)]
    return {
        "workloads": [{"name": each.name, **each.as_json()} for each in replays],
        "geometric_mean": [{**mean, "edl": round(mean["edl"], 4)} for mean in means],
    }
