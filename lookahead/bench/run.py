"""One contender of a bench: what it did in each turn. In: answered turns. Out: sums, speedup with its spread, JSON.

A turn that was repeated counts as its repeat of median time did, so that seconds, their parts and all counts belong together.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lookahead.decode.engine import Clock
from lookahead.draft.counts import DraftCounts
from lookahead.draft.explain import Step
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import DraftTree


@dataclasses.dataclass
class StepLog(Clock):
    """An engine's clock that keeps the forward's seconds, tree and accepted length of each step. see: observer of requests."""

    seen: list[tuple[DraftTree, int]] = dataclasses.field(default_factory=list)
    decode_forwards: list[float] = dataclasses.field(default_factory=list)  # those in which a row decoded
    _seen_before: int = 0

    def see(self, step: Step) -> None:
        self.seen.append((step.tree, len(step.accepted)))

    def add(self, draft: float, forward: float, verify: float, prefilled: int = 0, steps: int = 1) -> None:
        super().add(draft, forward, verify, prefilled, steps)
        if len(self.seen) > self._seen_before:
            self.decode_forwards += [forward / steps] * steps
            self._seen_before = len(self.seen)

    def by_depth(self) -> tuple[Counter[int], Counter[int]]:
        """Count by depth the steps whose tree has a node there, steps in which one was accepted."""
        deepest = Counter(int(tree.depths().max()) for tree, _ in self.seen)
        accepted = Counter(length for _, length in self.seen)
        return _at_least(deepest), _at_least(accepted)


@dataclasses.dataclass
class Sample(DraftCounts):
    """Work of a contender on some rows. forwards: of the model, several rows in one. clock: None for a peer."""

    outputs: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    forwards: int = 0
    offered_by_depth: Counter[int] = dataclasses.field(default_factory=Counter)
    accepted_by_depth: Counter[int] = dataclasses.field(default_factory=Counter)
    clock: Clock | None = None
    decode_forwards: list[float] = dataclasses.field(default_factory=list)  # seconds
    peak_memory_bytes: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def take(self, other: Sample) -> None:
        """Add what was decoded after it."""
        self.add_counts(other)
        self.outputs += other.outputs
        self.seconds += other.seconds
        self.forwards += other.forwards
        self.offered_by_depth.update(other.offered_by_depth)
        self.accepted_by_depth.update(other.accepted_by_depth)
        self.decode_forwards += other.decode_forwards
        self.peak_memory_bytes = max(self.peak_memory_bytes, other.peak_memory_bytes)


class TimeSplit(NamedTuple):
    """Seconds of a run by what they went into. rest: notifying the drafter, admitting and retiring requests."""

    draft: float
    forward: float
    verify: float
    rest: float


@dataclasses.dataclass(eq=False)
class Run:
    """One contender over all prompts. options: how it drafts, None for a peer.

    answer: a turn over some rows; yields how far it has come (see `progress`), as others may have the machine then, and at last
    the turn. forget: drop what earlier answers left. speedup: tokens/s over those of plain decoding; speedup_spread: its
    quartiles over all turns and repeats. `settle` sets these and `turns`.
    """

    name: str
    options: DraftOptions | None
    answer: Callable[[Sequence[int]], Iterator[int | Sample]] = dataclasses.field(repr=False)
    forget: Callable[[], None] = dataclasses.field(repr=False)
    turns: list[Sample] = dataclasses.field(default_factory=list, repr=False)
    total: Sample = dataclasses.field(default_factory=Sample, repr=False)  # of these
    speedup: float = 1.0
    speedup_spread: tuple[float, float] = (1.0, 1.0)
    _repeats: list[list[Sample]] = dataclasses.field(default_factory=list, repr=False)

    def add(self, number: int, turn: Sample) -> None:
        while len(self._repeats) <= number:
            self._repeats.append([])
        self._repeats[number].append(turn)

    def settle(self, plain: Run) -> None:
        """All turns are over. plain: what this run is compared with, settled before (or this run itself)."""
        # The repeat of median time; of an even number the faster of the two in the middle.
        ordered = (sorted(repeats, key=lambda turn: turn.seconds) for repeats in self._repeats)
        self.turns, self.total = [repeats[(len(repeats) - 1) // 2] for repeats in ordered], Sample()
        for turn in self.turns:
            self.total.take(turn)
        self.speedup = self.tokens_per_second / plain.tokens_per_second
        pairs = zip(itertools.chain(*self._repeats), itertools.chain(*plain._repeats), strict=True)
        ratios = [turn.tokens_per_second / other.tokens_per_second for turn, other in pairs]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        self.speedup_spread = low, high

    @property
    def strategy(self) -> str:
        return self.options.strategy if self.options else "peer"

    @property
    def drafts(self) -> bool:
        """It is one of ours, other than plain decoding."""
        return self.options is not None and self.options.strategy != "off"

    @property
    def adaptive(self) -> bool:
        """Its decoding length is a limit, and each step finds its own."""
        return self.options is not None and self.options.adaptive

    @property
    def decoding_length(self) -> int | None:
        return None if self.options is None else self.options.decoding_length if self.drafts else 1

    @property
    def branch_length(self) -> int | None:
        return None if self.options is None else self.options.branch_length if self.drafts else 0

    outputs = property(lambda self: self.total.outputs)
    tokens = property(lambda self: self.total.tokens)
    seconds = property(lambda self: self.total.seconds)
    counts = property(lambda self: self.total)
    steps = property(lambda self: self.total.steps)
    forwards = property(lambda self: self.total.forwards)
    tokens_per_second = property(lambda self: self.total.tokens_per_second)
    peak_memory_bytes = property(lambda self: self.total.peak_memory_bytes)

    @property
    def draft_tokens_wasted(self) -> int:
        return self.counts.draft_tokens - self.counts.accepted_tokens

    @property
    def edl(self) -> float:
        return (self.tokens - len(self.outputs)) / self.steps if self.steps else 0.0

    @property
    def accepted_by_depth(self) -> list[tuple[int, int, int]]:
        """(depth, decode steps whose tree has a node there, those in which one was accepted), from depth 1."""
        offered, accepted = self.total.offered_by_depth, self.total.accepted_by_depth
        return [(depth, offered[depth], accepted[depth]) for depth in sorted(offered)]

    @property
    def time_split(self) -> TimeSplit | None:
        clocks = [turn.clock for turn in self.turns if turn.clock]
        if not clocks:
            return None
        draft, forward, verify = (sum(getattr(clock, part) for clock in clocks) for part in ("draft", "forward", "verify"))
        return TimeSplit(draft, forward, verify, max(0.0, self.seconds - draft - forward - verify))

    def forward_ms(self, percentile: float = 50) -> float | None:
        """Milliseconds of the forwards of decode steps; None where they are not known: of peers, and of plain models."""
        forwards = self.total.decode_forwards
        return float(np.percentile(forwards, percentile)) * 1e3 if forwards else None

    def as_json(self) -> dict[str, Any]:
        """One entry of "runs" in the JSON of `bench`."""
        split, forward_ms, counts = self.time_split, self.forward_ms(), self.counts
        depths = [dict(zip(OF_A_DEPTH, each, strict=True)) for each in self.accepted_by_depth]
        wasted = self.draft_tokens_wasted
        names = ("name", "strategy", "adaptive", "decoding_length", "branch_length", "tokens", "steps", "forwards")
        return {
            **{name: getattr(self, name) for name in names},
            **{name: round(getattr(self, name), 4) for name in ("seconds", "edl", "speedup")},
            "tokens_per_second": round(self.tokens_per_second, 2),
            "speedup_spread": [round(ratio, 4) for ratio in self.speedup_spread],
            "peak_memory_bytes": self.peak_memory_bytes,
            "draft_tokens": counts.draft_tokens,
            "draft_tokens_wasted": wasted,
            "draft_tokens_wasted_per_step": round(wasted / max(1, counts.steps), 4),
            "accepted_by_source": dict(counts.accepted_by_source),
            "accepted_by_depth": depths if split else None,
            **{f"{part}_seconds": round(getattr(split, part), 4) if split else None for part in TimeSplit._fields},
            "forward_ms": {"p50": round(forward_ms, 4), "p99": round(self.forward_ms(99) or 0.0, 4)} if forward_ms else None,
        }


PREFILLED_AS_ONE = 64  # tokens of prompts, that many of which are about as much work as a token that is emitted
OF_A_DEPTH = ("depth", "offered", "accepted")


def progress(emitted: int, prefilled: int) -> int:
    """Return how far a turn has come, in tokens. prefilled: tokens of prompts, of which a forward prefills many."""
    return emitted + prefilled // PREFILLED_AS_ONE


def _at_least(counts: Counter[int]) -> Counter[int]:
    """Return how many have 1 or more, 2 or more, ... of what is counted by number."""
    numbers = range(max(counts, default=0), 0, -1)
    return Counter(dict(zip(numbers, itertools.accumulate(counts[number] for number in numbers), strict=True)))
