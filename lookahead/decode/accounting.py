"""What steps took and gave. In: each step as it went. Out: clocks and counts, and what the draft budget learns from them.

The engine's step hands its clock readings to `Accounting.record` at its end; nothing here decides anything.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lookahead.budget.cost import EMITTED, PREFILLED, RECYCLING, SECONDS, MeasuredStep
from lookahead.budget.gain import Gain
from lookahead.budget.goodput import GoodputBudget
from lookahead.budget.profile import Forward
from lookahead.budget.rates import Rates
from lookahead.decode.drafted_layout import ADDING, BEGAN, COMPUTED, DRAWN, RECYCLED, VERIFIED
from lookahead.decode.row import RunningRow, StepInput
from lookahead.decode.verify import Accepted
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import Step
from lookahead.draft.sources import Sources
from lookahead.draft.tree import root_only
from lookahead.forward.batch import ALL_AT_ONCE
from lookahead.forward.batch_kernel import attended
from lookahead.forward.target import TargetModel

PLAIN_APART = 4  # one in this many steps without drafts is timed


@dataclasses.dataclass
class Clock:
    """Seconds that went into drafting (the budget included), forwards (prefill included) and verification, and how often.

    taken_in: tokens of prompts that were prefilled.
    """

    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    steps: int = 0
    taken_in: int = 0

    def add(self, draft: float, forward: float, verify: float, taken_in: int = 0, steps: int = 1) -> None:
        self.draft += draft
        self.forward += forward
        self.verify += verify
        self.steps += steps
        self.taken_in += taken_in


class StepTimes(NamedTuple):
    """Clock readings of one step, in seconds: when it began, and when each of its stages was over."""

    began: float
    drafted: float
    computed: float  # the forward
    noted: float  # runner-up tokens
    verified: float

    @property
    def drafting(self) -> float:
        return self.drafted - self.began

    @property
    def runner_up(self) -> float:
        return self.noted - self.computed

    @property
    def after_drafting(self) -> float:
        """Forward, runner-up tokens and verification: what the costs of a forward include."""
        return self.verified - self.drafted


class Accounting:
    """Clocks, costs and counts of an engine; teaches its budget and the drafter's sources.

    clock: seconds by stage. gain: how many times faster than plain decoding. rates: of steps with drafts and without. steps:
    begun so far. plain_seconds: of the latest step without drafts; 0: there was none.
    """

    def __init__(self, target: TargetModel, drafter: Drafter, budget: GoodputBudget):
        self.target, self.drafter, self.budget = target, drafter, budget
        self.clock = Clock()
        self.gain = Gain(budget.curve)
        self.rates = Rates()
        self.steps = 0
        self.plain_seconds = 0.0
        self._sources: Sources | None = getattr(drafter, "sources", None)  # of the user's own
        self._before: tuple[list[RunningRow], float] = [], 0.0  # rows of the latest step if all decoded, and when it was over

    def record(
        self,
        rows: Sequence[RunningRow],
        inputs: Sequence[StepInput],
        accepted: Sequence[Accepted],
        times: StepTimes,
        is_first: bool = False,
        steps: int = 1,
    ) -> None:
        """A step has ended: count it, notify observers, and learn from what it took and gave. rows[k] is in slot k.

        is_first: the first step of its size, whose time tells nothing about others (`Scores.is_first`). steps: that many plain
        steps have ended (`Slots.plain_steps`); inputs are those of the first one.
        """
        active = any(row.is_drafted_for for row in rows)
        by_source = self._count(rows, inputs, accepted, times.verified, steps)
        adding = self.drafter.runner_up.seconds if self.drafter.options.adaptive else 0.0
        *agreed, counted, adding = self.target.agreed_all((*times, self.target.now(), adding))
        times = StepTimes(*agreed)
        prefilled = sum(len(each) for each in inputs if each.wanted != "all")
        self.clock.add(times.drafting, times.computed - times.drafted, times.verified - times.computed, prefilled, steps)
        if active:
            self.budget.drafted_in(times.drafting)
        drafts = self.drafter.options.strategy != "off"
        # A step that prefills tells nothing about the cost of those that do not. Of steps without drafts only some are timed.
        only_decodes = not is_first and all(each.wanted == "all" for each in inputs)
        seconds, emitted = (times.verified - times.began) / steps, sum(len(each.token_ids) for each in accepted) / steps
        (before, over), self._before = self._before, ([*rows] if only_decodes else [], times.verified)
        if before and before == self._before[0]:  # with what happened in between: accounting takes longer with drafts, too
            seconds = (times.verified - over) / steps
            for _ in range(steps):
                self.rates.note(len(rows), active, seconds, emitted)
        if only_decodes and not active:
            self.plain_seconds = seconds
        if drafts and only_decodes and (active or steps > 1 or self.steps % PLAIN_APART == 0):
            self._learn_cost(rows, inputs, times, seconds, emitted, steps)
            if active:
                self._learn_utility(by_source, times.runner_up + adding, seconds, emitted, len(rows))
            return
        if drafts and prefilled:
            self._note_prefill(rows, inputs, accepted, times, counted - times.began, prefilled)

    def record_drafted(self, rows: Sequence[RunningRow], steps: np.ndarray, times: np.ndarray) -> None:
        """Steps with drafts have ended that one native call took; see `record` and drafted_kernel.py.

        steps: float64 [steps, 12], see `StepLog`. times: float64 [steps, 7], clock readings, and what runner-up tokens gave.
        """
        readings, prefilled = times.tolist(), int(steps[0, PREFILLED])
        first, ended = int(prefilled > 0), readings[-1][VERIFIED]  # first: that only decodes
        (before, over), self._before = self._before, ([*rows] if len(steps) > first else [], ended)
        goes_on = not first and before and before == self._before[0]
        if goes_on:
            steps[:, SECONDS] += (readings[0][BEGAN] - over) / len(steps)  # what Python does once for all of them
        for row in rows:
            row.generation.seconds = ended - row.began
        stages = (BEGAN, DRAWN), (DRAWN, COMPUTED), (COMPUTED, VERIFIED)
        drafting, forward, verification = (sum(of_step[end] - of_step[begin] for of_step in readings) for begin, end in stages)
        self.clock.add(drafting, forward, verification, prefilled, len(steps))
        self.gain.steps(steps)
        self.budget.observe_all(steps[first:])
        decoding = [(line[SECONDS], line[EMITTED], line[RECYCLING]) for line in steps[first:].tolist()]
        self.rates.note_drafted(len(rows), [(seconds, emitted) for seconds, emitted, _ in decoding[0 if goes_on else 1 :]])
        if self.drafter.options.adaptive:
            for (seconds, emitted, recycling), reading in zip(decoding, readings[first:], strict=True):
                self.drafter.runner_up.observe(recycling + reading[ADDING], reading[RECYCLED], seconds, emitted, len(rows))

    def plain_forward(self, rows: Sequence[RunningRow]) -> Forward:
        """The forward of these rows without drafts: each brings one token."""
        keys, calls = self._attended(rows)
        return Forward(len(rows), len(rows), keys, calls=calls)

    def _attended(self, rows: Sequence[RunningRow]) -> tuple[int, int]:
        """(keys that attention reads for these rows, its calls), where each brings one token."""
        lengths = [row.length for row in rows]
        if len(rows) == 1 or self.budget.curve.separate:
            return sum(lengths), 1
        return attended(np.array(lengths), ALL_AT_ONCE if self.budget.curve.bucketed else self.target.call)

    def _count(
        self, rows: Sequence[RunningRow], inputs: Sequence[StepInput], accepted: Sequence[Accepted], now: float, steps: int
    ) -> Counter[str]:
        """Returns the accepted draft tokens of this step by draft source. steps: as of `record`."""
        names = self.drafter.source_names
        by_source: Counter[str] = Counter()
        for row, each, found in zip(rows, inputs, accepted, strict=True):
            generation = row.generation
            generation.seconds = now - row.began
            if not found.token_ids or each.wanted != "all":
                continue
            assert each.tree is not None
            if steps > 1 and not generation.observer:
                generation.steps += len(found.token_ids)
                continue
            taken = [(found.nodes, found.token_ids)] if steps == 1 else [([0], [token]) for token in found.token_ids]
            output = len(generation.token_ids) - len(found.token_ids)
            for nodes, emitted in taken:
                for source in generation.count(each.tree, nodes, names):
                    by_source[source] += 1
                output += len(emitted)
                if generation.observer:
                    before = generation.token_ids[:output]
                    tree = each.tree if steps == 1 else root_only(before[-2])
                    generation.observer(Step.of(generation.steps, generation.prompt_ids, before, tree, nodes, emitted, names))
        return by_source

    def _learn_cost(
        self,
        rows: Sequence[RunningRow],
        inputs: Sequence[StepInput],
        times: StepTimes,
        seconds: float,
        emitted: float,
        steps: int,
    ) -> None:
        """From a step that only decodes, or several plain ones. Once costs are known, one plain step in PLAIN_APART stands for
        all that are taken one by one.
        """
        sizes, stands_for = [len(each) for each in inputs], steps
        if steps == 1 and max(sizes) == 1 and not self.budget.tries:
            if self.steps % PLAIN_APART:
                return
            stands_for = PLAIN_APART
        keys, calls = self._attended(rows)
        forward = Forward(sum(sizes), len(rows), keys, max(sizes), calls)
        active = any(row.is_drafted_for for row in rows)
        parts = times.after_drafting / steps, times.drafting if active else 0.0, times.runner_up
        measured = MeasuredStep(forward, emitted, seconds, *parts, stands_for=stands_for)
        self.budget.observe(measured)
        self.gain.step(measured)

    def _note_prefill(
        self,
        rows: Sequence[RunningRow],
        inputs: Sequence[StepInput],
        accepted: Sequence[Accepted],
        times: StepTimes,
        seconds: float,
        prefilled: int,
    ) -> None:
        """From a step that prefilled, maybe alongside rows that decode."""
        decoding = [slot for slot, each in enumerate(inputs) if each.wanted == "all"]
        own, keys = [len(inputs[slot]) for slot in decoding], sum(rows[slot].length for slot in decoding)
        emitted = sum(len(accepted[slot].token_ids) for slot in decoding)
        forward = Forward(sum(own) + prefilled, len(decoding), keys, max(own, default=0))
        parts = seconds, times.after_drafting, times.drafting, times.runner_up
        self.gain.step(MeasuredStep(forward, emitted, *parts, prefilled=prefilled))

    def _learn_utility(self, by_source: Counter[str], recycling: float, seconds: float, emitted: float, rows: int) -> None:
        """Whether the draft sources that take time of their own pay for it. Where lengths are fixed, all are always used.

        recycling: seconds that went into runner-up tokens.
        """
        if self.drafter.options.adaptive:
            self.drafter.runner_up.observe(recycling, by_source["recycled"], seconds, emitted, rows)
        if self._sources:
            counts = [by_source[name] for name in self._sources.names]
            self._sources.observe_step(counts, seconds, emitted, rows, self.target.agreed)
