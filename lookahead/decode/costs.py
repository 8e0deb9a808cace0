"""Measures the cost of steps where the job's first rows stand. In: slots whose rows are about to decode. Out: a `StepCost`.

Forwards of chains behind what each row holds, of which nothing is kept: they take what verifying drafts takes.
"""

from __future__ import annotations

import numpy as np

from lookahead.budget import ladder
from lookahead.budget.policy import StepCost
from lookahead.draft.tree import chain, side_by_side
from lookahead.forward.slots import PackedSlots, Slots
from lookahead.forward.target import TargetModel

ROOM = 128  # positions that must be left behind each row


def measured_cost(
    target: TargetModel, slots: Slots, lengths: list[int], plain_steps: float, plain_seconds: float
) -> StepCost | None:
    """None where that cannot be measured here. What an earlier job has kept is taken, unless it is not of this machine now.

    lengths: tokens of each row's text. plain_steps, plain_seconds: steps that the job would take without drafts, about, and the
    forward of one of them.
    """
    if target.is_shared or not isinstance(slots, PackedSlots) or max(lengths) + ROOM > target.longest_text:
        return None
    captured: set[int] = set()

    def forward(rows: int, tokens: int) -> float:
        sizes = [tokens // rows + (row < tokens % rows) for row in range(rows)] + [0] * (len(lengths) - rows)
        trees = [chain(np.zeros(size, np.int32)) if size else None for size in sizes]
        batch = side_by_side(trees, ["all"] * len(sizes))
        while True:
            began = target.now()
            scores = slots.forward(batch)
            scores.wait()
            seconds = target.now() - began
            slots.keep([[]] * len(sizes))
            if not scores.is_first or tokens in captured:
                return seconds
            captured.add(tokens)

    kept = ladder.read(target.setting, len(lengths))
    if kept and ladder.holds(kept, forward, plain_seconds):
        return kept
    cost = ladder.measure(forward, len(lengths), plain_steps, plain_seconds, target.bucketed)
    ladder.write(target.setting, cost)
    return cost
