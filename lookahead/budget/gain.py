"""How many times faster than plain decoding a run has been. In: each step as it went. Out: seconds, with drafts and without.

The seconds with drafts are those that the run has taken. Those that plain decoding would have taken for the same tokens
follow from the costs that the job has learned (cost.py). A step in which n rows accept t tokens stands for t / n plain steps of
n rows, each of which takes

    seconds of the step, less drafting and recycling  x  predicted seconds of a plain step / predicted seconds of this step

Prefill takes as long either way. Sums go over the whole run, so the figure does not depend on which texts came last. A plain
step never counts as longer than the step with drafts, so a run is never reported as faster than it accepts tokens per step.
"""

from __future__ import annotations

import numpy as np

from lookahead.budget.cost import (
    BELIEVED,
    KNOWN,
    SEEN,
    SIZE,
    CostCurve,
    MeasuredStep,
    StepLog,
    faster_of,
    resized,
    seconds_of,
    step_of,
)
from lookahead.budget.profile import Forward
from lookahead.kernels import inlined, kernel

AT_ONCE = 64  # steps that are added up together
ENOUGH = 30  # steps in which rows decoded, before there is a figure
FEW = 8  # steps: from less than that many it is not learned what they take outside of forward and drafting
NEAR = 0.66  # from that many times a plain step's tokens to twice as many, a size tells of it
SURE = 0.5  # of the seconds of those: the cost of their plain steps must have been measured

# Sums over steps; the last is not a sum: seconds that a step takes outside of forward and drafting, recently.
PLAIN_SUM, TAKEN_SUM, DECODING_SUM, MEASURED_SUM, STEPS_SUM, OTHER = range(6)


class Gain:
    """Sums over the steps of a run; adding to it takes a microsecond."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._steps = StepLog(AT_ONCE)
        self._sums = np.zeros(OTHER + 1)

    def step(self, step: MeasuredStep) -> None:
        """A step of the run. Rows, keys, width and calls of its forward are those of the rows that decode; none may."""
        self._steps.add(step)
        if len(self._steps) == AT_ONCE:
            self._add()

    def steps(self, steps: np.ndarray) -> None:
        """Several that are logged already: float64 [steps, 12], see `StepLog`."""
        self._add()
        add_up(steps, self._curve.table, self._curve.terms, self._sums)

    @property
    def seconds(self) -> tuple[float, float] | None:
        """(of plain decoding, taken) by the steps so far; None as long as too little has been measured."""
        self._add()
        plain, taken, decoding, measured, steps = self._sums[:OTHER].tolist()
        return (plain, taken) if steps >= ENOUGH and measured >= SURE * decoding else None

    def _add(self) -> None:
        if len(self._steps):
            add_up(self._steps.take(), self._curve.table, self._curve.terms, self._sums)


def warm_up() -> None:
    """Compile the kernel (once per machine)."""
    gain = Gain(CostCurve())
    gain.step(MeasuredStep(Forward(1), 1, 1.0, 1.0))
    gain._add()


@kernel
def add_up(steps, table, terms, sums):
    """Add steps, float64 [steps, 12], see `StepLog`, to the sums, float64 [6]."""
    beside, decoding, recycling = np.empty(len(steps)), np.int64(0), 0.0
    for k in range(len(steps)):  # seconds outside of forward and drafting: plain steps take them, too
        step = step_of(steps[k])
        recycling += step.recycling_seconds / len(steps)
        if step.forward.rows > 0 and step.prefilled == 0:
            beside[decoding] = step.seconds - step.forward_seconds - step.draft_seconds
            decoding += 1
    if decoding >= FEW or (decoding > 0 and sums[OTHER] == 0):
        sums[OTHER] = max(0.0, faster_of(beside, decoding))
    other = sums[OTHER] - recycling  # costs of forwards include recycling
    for k in range(len(steps)):
        step = step_of(steps[k])
        forward, prefilled = step.forward, int(step.prefilled)
        seconds, weight, rows = step.seconds, step.stands_for, forward.rows
        sums[TAKEN_SUM] += weight * seconds
        if rows == 0:
            sums[PLAIN_SUM] += weight * seconds
            continue
        taken = seconds_of(forward, forward.tokens - prefilled, table, terms, 0) + other
        plain = seconds_of(resized(forward, rows + prefilled, 0), rows, table, terms, 0) + other
        alone = seconds_of(resized(forward, rows, 0), rows, table, terms, 0) + other
        plain, alone = min(1.0, plain / taken), min(1.0, alone / taken)  # of the step's own seconds
        own = seconds - step.draft_seconds - step.recycling_seconds
        sums[PLAIN_SUM] += weight * own * (plain + max(0.0, step.emitted / rows - 1) * alone)
        sums[DECODING_SUM] += weight * seconds
        sums[STEPS_SUM] += weight
        if _is_measured(rows, table, terms):
            sums[MEASURED_SUM] += weight * seconds


@inlined
def _is_measured(rows, table, terms):
    """What a plain step of that many rows takes follows from a profile, or from steps of about that size."""
    measured = terms[KNOWN] > 0
    for column in range(table.shape[1]):
        if 2 * rows >= table[SIZE, column] >= NEAR * rows and table[SEEN, column] >= BELIEVED:
            measured = True
    return measured
