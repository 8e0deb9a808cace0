"""Accounts for steps. In: each step as it went. Out: clocks and counts, and what the draft budget learns from them.

The engine's step hands its clock readings to `Accounting.record` at its end; nothing here decides anything.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from lookahead.budget.policy import Budget
from lookahead.budget.speedup import PlainTime, Speedup
from lookahead.decode.row import RunningRow
from lookahead.draft.drafter import Drafter
from lookahead.draft.sources import Sources
from lookahead.forward.parallel import all_agreed
from lookahead.forward.target import TargetModel
from lookahead.step.batch import StepBatch

MOSTLY, FEW_STEPS = 0.5, 50  # of the steps without drafts it is reported why, if they are as many
AT_ONCE = 32  # plain steps that are counted together
ROW_TOKENS = 64  # of an answer, where nothing is known
DRAFT_TOKENS = 16  # whose cost is reported then
LATEST, FEWEST = 16, 3  # how many times of a kind of work tell what it usually takes
UNUSUAL = 8.0  # times as long as in the best quarter of those: what takes longer counts as if by so much


@dataclasses.dataclass
class Clock:
    """Seconds that went into drafting (the budget included), forwards (prefill included) and verification, and how often.

    prefilled: tokens of prompts that were prefilled. taken_over: those that were not, as texts that begin alike had been.
    """

    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    steps: int = 0
    prefilled: int = 0
    taken_over: int = 0

    def add(self, draft: float, forward: float, verify: float, prefilled: int = 0, steps: int = 1) -> None:
        self.draft += draft
        self.forward += forward
        self.verify += verify
        self.steps += steps
        self.prefilled += prefilled


class StepTimes(NamedTuple):
    """Clock readings of one step, in seconds: when it began, and when each of its stages was over."""

    began: float
    drafted: float
    computed: float  # the forward
    accepted: float

    @property
    def drafting(self) -> float:
        return self.drafted - self.began


class UsualTime:
    """Tells what work of one kind usually takes.

    Kernels that are compiled on the way, or a machine that was asleep, tell nothing about the next time.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LATEST)

    def of(self, seconds: float) -> float:
        """What counts of these seconds; nothing as long as it is not known what is usual."""
        self._latest.append(seconds)
        if len(self._latest) < FEWEST:
            return 0.0
        return min(seconds, UNUSUAL * sorted(self._latest)[len(self._latest) // 4])


class Accounting:
    """Clocks, costs and counts of an engine; teaches its budget and the drafter's sources.

    clock: seconds by stage. plain: what plain decoding would take. steps: begun."""

    def __init__(self, target: TargetModel, drafter: Drafter, budget: Budget, prefill_chunk: int):
        self.target, self.drafter, self.budget = target, drafter, budget
        self.clock = Clock()
        self.plain = PlainTime(lambda rows: budget.seconds(rows, rows), prefill_chunk)
        self.steps = 0
        self._before: list[RunningRow] = []  # rows of the latest step, if all decoded
        self._over = 0.0  # clock reading at its end
        self._plain_left, self._plain_steps = 0, 0  # steps that need no decision: still to come, and taken since `_plain_began`
        # Seconds of these: a clock reading, those of their forwards, those in which Python chose tokens.
        self._plain_began = self._plain_forward = self._plain_choosing = 0.0
        self.drafted = [0, 0]  # steps that only decoded: without draft tokens, and with some
        self._of_rows, self._emitted = 0.0, ROW_TOKENS  # seconds that drafts take once for each row; tokens so far
        self._usual: defaultdict[str, UsualTime] = defaultdict(UsualTime)  # of those seconds, by the kind of work
        self._was_plain = False  # the latest step that only decoded
        self._begun = 0  # rows
        self._running: list[RunningRow] = []
        self._at: float | None = None  # clock reading up to which `plain` has the seconds of the run

    @property
    def speedup(self) -> Speedup | None:
        """Speedup of all runs so far over plain decoding; None if nothing else was done."""
        if self.drafter.options.strategy == "off":
            return None
        self._read_clock()
        found = self.plain.speedup((row.prefill_tokens, len(row.generation.token_ids)) for row in self._running)
        return found if found is None or self.drafter.options.adaptive else found._replace(why="drafts of a fixed length")

    @property
    def why_no_drafts(self) -> dict[str, Any]:
        """Explain, where most decode steps had no draft tokens though some were possible: the share of those, how many
        rows there were at most, and times as long as without that a forward of all of them takes with DRAFT_TOKENS more; None:
        unknown.
        """
        share = self.drafted[False] / max(1, sum(self.drafted))
        if not self.drafter.options.adaptive or share < MOSTLY or sum(self.drafted) < FEW_STEPS:
            return {}
        budget, rows = self.budget, self.plain.batch_size
        ratio = budget.seconds(rows + DRAFT_TOKENS, rows) / budget.seconds(rows, rows)
        known = round(ratio, 2) if budget.is_measured else None
        return {"steps_without_drafts": round(share, 3), "rows_at_once": rows, "cost_of_16_draft_tokens": known}

    def begin(self, rows: list[RunningRow]) -> None:
        """A run begins. rows: those that hold slots, kept up to date by who gives them out."""
        self._running, self._at = rows, self.target.now()

    def pause(self) -> None:
        """Somebody else has the processor before the next step, which so does not follow the latest one."""
        self._note_plain_steps()
        self._before = []

    def end(self) -> None:
        self._note_plain_steps()
        self._read_clock()
        self._running, self._at = [], None

    def _read_clock(self) -> None:
        if self._at is not None:
            now = self.target.now()
            self.plain.seconds, self._at = self.plain.seconds + now - self._at, now

    def started(self, began: float) -> int:
        """The drafter has read a prompt, since `began`; returns the number of its row."""
        self._spend("start", self.target.now() - began)
        self._begun += 1
        return self._begun - 1

    def retired(self, rows: Sequence[RunningRow], began: float) -> None:
        """Rows have ended, and the drafter has their outputs, since `began`."""
        self._spend("end", self.target.now() - began)
        for row in rows:
            self.clock.taken_over += row.taken_over
            row.generation.seconds = self._over - row.began
            self.plain.row_ended(row.number, row.prefill_tokens, len(row.generation.token_ids))

    def begin_step(self, rows: int) -> tuple[int, bool]:
        """(Its number, whether rows are drafted for). rows: that hold slots."""
        self.steps += 1
        return self.steps, not self.drafter.options.adaptive or (self._plain_left == 0 and self.budget.drafts(rows))

    def measured(self, began: float) -> None:
        """Costs have been measured since `began`, between two steps."""
        self._over = self.target.now()
        self.plain.draft_seconds += self._over - began

    def _spend(self, work: str, seconds: float) -> None:
        """On a row's drafts, outside of steps."""
        self.plain.draft_seconds += seconds
        self._of_rows += self._usual[work].of(seconds)

    def record(
        self, rows: Sequence[RunningRow], batch: StepBatch, prefilled: int, times: StepTimes, is_first: bool = False
    ) -> None:
        """A step has ended: count it, and learn from what it took and gave. rows[k] is in slot k.

        prefilled: tokens of prompts. is_first: the first step of its size, whose time tells nothing about others
        (`Scores.is_first`).
        """
        reading, runner_up, choosing = batch.reading_seconds, batch.runner_up_seconds, batch.choosing_seconds
        if self.target.is_shared:
            found = all_agreed((*times, reading, runner_up, choosing, self._of_rows))
            times, (reading, runner_up, choosing, self._of_rows) = StepTimes(*found[:4]), found[4:]
        options = self.drafter.options
        self.clock.add(times.drafting, times.computed - times.drafted, times.accepted - times.computed, prefilled)
        if options.strategy == "off":
            self._over = times.accepted
            return
        active = batch.active > 0
        if self._plain_left and not active and not prefilled and rows == self._before:
            self._over, self._plain_left, self._plain_steps = times.accepted, self._plain_left - 1, self._plain_steps + 1
            self._plain_forward += times.accepted - times.drafted - choosing
            self._plain_choosing += choosing
            return
        self._note_plain_steps()
        decodes = batch.decoding == len(rows)
        self.plain.rows_at_once(len(rows))
        seconds, emitted, only_decodes = times.accepted - times.began, batch.emitted, decodes and not is_first
        before, over, self._before, self._over = self._before, self._over, [*rows] if only_decodes else [], times.accepted
        follows = bool(before) and before == self._before
        if follows:  # with what happened in between: accounting takes longer with drafts, too
            seconds = times.accepted - over
        if decodes:
            self.plain.decode_seconds += seconds
            self.drafted[batch.tokens > len(rows)] += 1
        else:
            drafted = (batch.tokens - prefilled - batch.decoding) / max(1, batch.tokens)
            self.plain.prefill_step(seconds, times.drafting, drafted)
            self._of_rows += self._usual["prefill"].of(times.drafting)
        if not only_decodes:
            return
        # For the speedup, plain steps are timed in a plain run: one alone behind a drafted step takes longer.
        was_plain, self._was_plain = self._was_plain, not active
        if active:
            self.plain.next_block()
        elif was_plain and follows:
            self.plain.plain_step(len(rows), seconds)
        self._emitted += emitted
        if options.adaptive:
            if active:  # with its share of what drafts take once for each row
                if reading:
                    self._of_rows += self._usual["read"].of(reading)
                seconds += emitted * self._of_rows / self._emitted - reading
            parts = batch.expected, seconds - choosing, times.accepted - times.drafted - choosing
            self.budget.observe(len(rows), batch.tokens, emitted, *parts, active)
            if active:  # whether draft sources that take time of their own pay; with fixed lengths all are always used
                tokens = batch.accepted_from("recycled")
                self.drafter.recycled_utility.observe(runner_up, tokens, seconds, emitted, len(batch))
            else:
                self._plain_left, self._plain_began = min(self.budget.plain_steps_left(len(rows)), AT_ONCE), times.accepted
        sources: Sources | None = getattr(self.drafter, "sources", None)  # of the user's own
        if active and sources:
            counts = [batch.accepted_from(name) for name in sources.names]
            sources.observe_step(counts, seconds, emitted, len(batch), self.target.agreed)

    def _note_plain_steps(self) -> None:
        """Count the steps whose time `record` has only summed up, as it takes a twentieth of a small model's step."""
        steps, rows, forward, choosing = self._plain_steps, len(self._before), self._plain_forward, self._plain_choosing
        self._plain_steps = self._plain_left = 0
        self._plain_forward = self._plain_choosing = 0.0
        if not steps:
            return
        seconds = self._over - self._plain_began
        self.plain.decode_seconds += seconds
        self.drafted[False] += steps
        self.plain.plain_step(rows, seconds, steps)
        self._emitted += rows * steps
        self.budget.observe(rows, rows, rows, 0.0, (seconds - choosing) / steps, forward / steps, False, steps)
