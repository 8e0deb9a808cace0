"""What steps took and gave. In: each step as it went. Out: clocks and counts, and what the draft budget learns from them.

The engine's step hands its clock readings to `Accounting.record` at its end; nothing here decides anything.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lookahead.budget.cost import (
    DRAFT_SECONDS,
    EMITTED,
    FORWARD_ROWS,
    FORWARD_TOKENS,
    PREFILLED,
    RECYCLING,
    SECONDS,
    MeasuredStep,
)
from lookahead.budget.goodput import GoodputBudget
from lookahead.budget.profile import Forward
from lookahead.budget.rates import Rates
from lookahead.budget.speedup import PlainTime, Speedup
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

MOSTLY, FEW_STEPS = 0.5, 50  # of the steps without drafts it is reported why, if they are as many
DRAFT_TOKENS = 16  # whose cost is reported then
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

    clock: seconds by stage. plain: what plain decoding would take. rates: of steps with drafts and without. steps: begun.
    plain_seconds: of the latest step without drafts; 0: there was none.
    """

    def __init__(self, target: TargetModel, drafter: Drafter, budget: GoodputBudget, prefill_chunk: int):
        self.target, self.drafter, self.budget = target, drafter, budget
        self.clock = Clock()
        self.plain = PlainTime(budget.curve, prefill_chunk)
        self.rates = Rates()
        self.steps = 0
        self.plain_seconds = 0.0
        self._sources: Sources | None = getattr(drafter, "sources", None)  # of the user's own
        self._before: tuple[list[RunningRow], float] = [], 0.0  # rows of the latest step if all decoded, and when it was over
        self.drafted = [0, 0]  # steps that only decoded: without draft tokens, and with some
        self._was_plain = False  # the latest step that only decoded
        self._begun = 0  # rows
        self._running: list[RunningRow] = []
        self._at: float | None = None  # clock reading up to which `plain` has the seconds of the run

    @property
    def speedup(self) -> Speedup | None:
        """Of all runs so far over plain decoding; None if nothing else was done."""
        if self.drafter.options.strategy == "off":
            return None
        self._read_clock()
        found = self.plain.speedup((row.prefill_tokens, len(row.generation.token_ids)) for row in self._running)
        return found if found is None or self.drafter.options.adaptive else found._replace(why="drafts of a fixed length")

    @property
    def why_no_drafts(self) -> dict[str, Any]:
        """Where most steps that decode had no draft tokens, though there could be some: the share of those, how many rows there
        were at most, and times as long as without that a forward of all of them takes with DRAFT_TOKENS more; None: unknown.
        """
        share = self.drafted[False] / max(1, sum(self.drafted))
        if not self.drafter.options.adaptive or share < MOSTLY or sum(self.drafted) < FEW_STEPS:
            return {}
        curve, rows = self.budget.curve, self.plain.batch_size
        plain, more = Forward(rows, rows), Forward(rows + DRAFT_TOKENS, rows)
        known = curve.known or all(curve.has_seen(each.tokens) for each in (plain, more))
        ratio = round(curve.seconds(more) / curve.seconds(plain), 2) if known else None
        return {"steps_without_drafts": round(share, 3), "rows_at_once": rows, "cost_of_16_draft_tokens": ratio}

    def begin(self, rows: list[RunningRow]) -> None:
        """A run begins. rows: those that hold slots, kept up to date by who gives them out."""
        self._running, self._at = rows, self.target.now()

    def end(self) -> None:
        self._read_clock()
        self._running, self._at = [], None

    def _read_clock(self) -> None:
        if self._at is not None:
            now = self.target.now()
            self.plain.seconds, self._at = self.plain.seconds + now - self._at, now

    def started(self, began: float) -> int:
        """The drafter has read a prompt, since `began`; returns the number of its row."""
        self.plain.draft_seconds += self.target.now() - began
        self._begun += 1
        return self._begun - 1

    def retired(self, rows: Sequence[RunningRow], began: float) -> None:
        """Rows have ended, and the drafter has their outputs, since `began`."""
        self.plain.draft_seconds += self.target.now() - began
        for row in rows:
            self.plain.row_ended(row.number, row.prefill_tokens, len(row.generation.token_ids))

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
        self.plain.rows_at_once(len(rows))
        by_source = self._count(rows, inputs, accepted, times.verified, steps)
        adding = self.drafter.runner_up.seconds if self.drafter.options.adaptive else 0.0
        *agreed, adding = self.target.agreed_all((*times, adding))
        times = StepTimes(*agreed)
        prefilled = sum(len(each) for each in inputs if each.wanted != "all")
        self.clock.add(times.drafting, times.computed - times.drafted, times.verified - times.computed, prefilled, steps)
        if active:
            self.budget.drafted_in(times.drafting)
        drafts = self.drafter.options.strategy != "off"
        # A step that prefills tells nothing about the cost of those that do not. Of steps without drafts only some are timed.
        decodes = all(each.wanted == "all" for each in inputs)
        only_decodes = decodes and not is_first
        seconds, emitted = (times.verified - times.began) / steps, sum(len(each.token_ids) for each in accepted) / steps
        (before, over), self._before = self._before, ([*rows] if only_decodes else [], times.verified)
        follows = before and before == self._before[0]
        if follows:  # with what happened in between: accounting takes longer with drafts, too
            seconds = (times.verified - over) / steps
            for _ in range(steps):
                self.rates.note(len(rows), active, seconds, emitted)
        if decodes:
            self.plain.decode_seconds += seconds * steps
            self.drafted[max(map(len, inputs)) > 1] += steps
        else:
            drafted = sum(len(each) - 1 for each in inputs if each.wanted == "all") / sum(map(len, inputs))
            self.plain.prefill_step(seconds, times.drafting + times.runner_up, drafted)
        if drafts and only_decodes:
            self._time_plain_steps(rows, active, seconds, steps, bool(follows))
        if only_decodes and not active:
            self.plain_seconds = seconds
        if drafts and only_decodes and (active or steps > 1 or self.steps % PLAIN_APART == 0):
            self._learn_cost(rows, inputs, times, seconds, emitted, steps)
            if active:
                self._learn_utility(by_source, times.runner_up + adding, seconds, emitted, len(rows))

    def _time_plain_steps(self, rows: Sequence[RunningRow], active: bool, seconds: float, steps: int, follows: bool) -> None:
        """For the speedup: plain steps of about the length that they have in a plain run. One alone behind a step with drafts
        takes longer. follows: the step before was one of the same rows.
        """
        was_plain, self._was_plain = self._was_plain, not active
        if active:
            self.plain.next_block()
        elif steps > 1 or (was_plain and follows):
            self.plain.plain_steps(self.plain_forward(rows), seconds, steps)

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
        self._was_plain = False
        self.plain.rows_at_once(len(rows))
        self.plain.next_block()
        self.plain.decode_seconds += float(steps[first:, SECONDS].sum())
        with_drafts = int((steps[first:, FORWARD_TOKENS] > len(rows)).sum())
        self.drafted[True] += with_drafts
        self.drafted[False] += len(steps) - first - with_drafts
        if first:
            line = steps[0].tolist()
            drafted = 1 - (prefilled + line[FORWARD_ROWS]) / line[FORWARD_TOKENS]
            self.plain.prefill_step(line[SECONDS], line[DRAFT_SECONDS] + line[RECYCLING], drafted)
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

    def _learn_utility(self, by_source: Counter[str], recycling: float, seconds: float, emitted: float, rows: int) -> None:
        """Whether the draft sources that take time of their own pay for it. Where lengths are fixed, all are always used.

        recycling: seconds that went into runner-up tokens.
        """
        if self.drafter.options.adaptive:
            self.drafter.runner_up.observe(recycling, by_source["recycled"], seconds, emitted, rows)
        if self._sources:
            counts = [by_source[name] for name in self._sources.names]
            self._sources.observe_step(counts, seconds, emitted, rows, self.target.agreed)
