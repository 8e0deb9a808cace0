"""A simulated model. In: a cost profile. Out: what the engine needs of a model whose answers are given (forced).

The engine runs as always: it drafts, chooses draft lengths, packs prefill chunks alongside drafts, shares prefixes and learns
costs, and all of that takes real time. Only the forward computes nothing: it advances the clock by what the profile gives.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import torch

from lookahead.budget import ladder
from lookahead.budget.attention import runs_of
from lookahead.budget.policy import StepCost
from lookahead.budget.profile import CostProfile, Forward, Setting
from lookahead.budget.shapes import shape_of
from lookahead.draft.tree import TreeBatch
from lookahead.forward.batch import ALL_AT_ONCE, SMALL, work_of
from lookahead.forward.kv_cache import SlotCache
from lookahead.forward.slots import PackedSlots, Scores
from lookahead.forward.target import DTYPES, TargetModel
from lookahead.step.best_tokens import NONE

CACHES = 48 << 20  # bytes of a CPU's caches


CHANGED = 1.03  # times what it takes otherwise: a forward of another size than the one before, unless shapes are bucketed


class Clock:
    """Real seconds plus those that simulated forwards took."""

    def __init__(self) -> None:
        self.simulated = 0.0
        self._swept = np.zeros(CACHES // 8)

    def __call__(self) -> float:
        return time.perf_counter() + self.simulated

    def pass_by(self, seconds: float, on_cpu: bool) -> None:
        """A forward takes `seconds`. One on the CPU leaves nothing else in its caches, which slows down what comes next."""
        began = time.perf_counter()
        if on_cpu:
            self._swept += 1
        self.simulated += seconds - (time.perf_counter() - began)


@dataclasses.dataclass(frozen=True)
class SimulatedModel(TargetModel):
    """Made by `simulated_model`."""

    profile: CostProfile = None  # type: ignore[assignment]
    now: Clock = dataclasses.field(default_factory=Clock)

    device = torch.device("cpu")
    eos_token_ids = frozenset()

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.profile.setting.dtype]

    @property
    def vocab_size(self) -> int:
        return self.profile.vocab_size

    @property
    def longest_text(self) -> int:
        return self.profile.longest_text

    @property
    def setting(self) -> Setting:
        return self.profile.setting

    @property
    def call(self) -> float:
        profile = self.profile
        return profile.per_call / profile.per_query_key if profile.per_query_key else ALL_AT_ONCE

    def step_cost(self, batch: int) -> StepCost:
        return ladder.of_profile(self.profile, batch)

    def decodes_plainly(self, length: int) -> bool:
        return False


def simulated_model(profile: CostProfile) -> SimulatedModel:
    """A model that costs what `profile` gives."""
    return SimulatedModel(None, profile.setting.model, "packed", slots_factory=SimulatedSlots, profile=profile)


class SimulatedSlots(PackedSlots):
    """Slots without keys and values. A forward moves the clock on, by what forwards of the same size in a row take, or more."""

    def __init__(self, target: SimulatedModel):
        super().__init__(target)
        self.cache = NothingHeld(target)
        self._profile, self._clock = target.profile, target.now
        self._before = 0  # tokens of the latest forward

    def forward(self, trees: TreeBatch) -> Scores:
        profile = self._profile
        sizes = trees.sizes
        held = np.array([len(each) for each in self._held[: self.open]])
        total, rows = int(sizes.sum()), int(np.count_nonzero(sizes))
        scored = int(trees.wanted.sum())
        if rows:
            tokens = shape_of(total, total - scored, profile.bucketed)
            if profile.separate:
                seconds = profile.forward_seconds(Forward(tokens, rows, int(held[sizes > 0].sum())), total - scored)
            else:
                at_once = profile.bucketed and max(sizes) <= SMALL
                work = work_of(runs_of(sizes, held, ALL_AT_ONCE if at_once else self.call), sizes, held)
                seconds = profile.seconds_of(tokens, rows, work)
                seconds -= profile.per_score * (total - scored)
            if self._before not in (0, tokens) and not profile.bucketed:
                seconds *= CHANGED
            self._before = tokens
            self._clock.pass_by(seconds, profile.setting.threads > 0)
        self._trees = trees
        return NoScores(trees.wanted.tolist())

    def keep(self, nodes: Sequence[Sequence[int]]) -> None:
        """Asking for the best tokens takes its time, but for the first."""
        asked = sum(min(len(kept), wanted) for kept, wanted in zip(nodes, self._trees.wanted.tolist(), strict=True))
        self._clock.simulated += self._profile.per_said * max(0, asked - 1)
        super().keep(nodes)

    def _make_room(self, needed: int) -> None:
        pass


class NothingHeld(SlotCache):
    """Buffers of no size."""

    def __init__(self, target: SimulatedModel):
        super().__init__()
        self._profile, self._clock = target.profile, target.now

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        if moves:
            self._clock.simulated += self._profile.per_move + len({slot for slot, *_ in moves}) * self._profile.per_moved_row


class NoScores(Scores):
    """Scores of forced answers."""

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__(torch.empty(0, 0), counts)
        self._scored = sum(counts)

    def native(self) -> tuple[int, int, int]:
        return NONE, 0, 0

    def best_tokens(self) -> np.ndarray:
        return np.zeros(self._scored, np.int64)

    def best(self, slot: int, node: int) -> int:
        return 0
