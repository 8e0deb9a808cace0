"""How many drafts pay. In: the rows' draft trees and how steps went. Out: the part of each tree that the next forward holds.

Every node has the probability that the model says it. All rows' nodes stand in one queue, the most probable first, and the
forward takes so many of them that tokens per second are highest: the rows themselves plus the probabilities, over what a
forward of that size costs (goodput, arXiv 2406.14066). So a row whose text is predictable gets more than one whose text is not,
and where drafts do not pay none are verified. Costs are learned from the job's own steps: the first ones try several sizes,
later ones look left and right now and then.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from lookahead.budget.cost import CostCurve
from lookahead.draft.tree import DraftTree

TRIALS = (64, 1, 16, 4, 64, 1, 16, 4, 8, 32, 8, 32)  # tokens of the first steps; each twice, as the first of a shape is slow
TRIAL_ROWS = 8  # more rows than these make the trials larger
LOOKS = (2.0, 0.5, 2.0, 0.0)  # later: these multiples of the best number of draft tokens, in turn
LOOK_EVERY = 50  # steps
REFIT_EVERY = 40  # steps
MEMORY = 0.998  # weight of the past at each step: about 500 steps count
CAUTION = 0.25  # a node is drafted if its probability is worth this part of what it costs now


class GoodputBudget:
    """The size of each forward with the highest goodput. most: tokens of a row at most.

    price: path probability below which nodes need not be drafted.
    """

    def __init__(self, most: int) -> None:
        self.curve = CostCurve()
        self.price = 0.0
        self._most = most
        self._looks = itertools.cycle(LOOKS)
        self._steps = 0  # observed
        self._seconds = np.empty(0)  # of a forward by its tokens
        self._refit_at = len(TRIALS)
        self._other_seconds = self._weight = 0.0  # of steps outside the forward, the past fading

    def cut(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The most probable nodes of all trees, as many as pay."""
        rows = len(trees)
        paths = [np.minimum.accumulate(tree.probabilities[1:]) for tree in trees]
        queue = np.concatenate(paths)
        order = np.argsort(-queue, kind="stable")
        kept = min(self._draft_tokens(queue[order], rows), len(queue))
        if kept == len(queue):
            return list(trees)
        owners = np.repeat(np.arange(rows), [len(path) for path in paths])
        counts = np.bincount(owners[order[:kept]], minlength=rows)
        return [tree.first(1 + int(count)) for tree, count in zip(trees, counts, strict=True)]

    def observe(self, tokens: int, forward_seconds: float, step_seconds: float) -> None:
        """A forward over `tokens` tokens of all rows, and the whole step, took so long."""
        self._steps += 1
        self.curve.observe(tokens, forward_seconds)
        self._other_seconds = MEMORY * self._other_seconds + step_seconds - forward_seconds
        self._weight = MEMORY * self._weight + 1

    def goodput(self, probabilities: np.ndarray, rows: int) -> np.ndarray:
        """float64 [nodes + 1]: tokens per second expected with none, 1, 2, ... of the nodes. Needs one observed step."""
        if self._steps >= self._refit_at or len(self._seconds) <= rows * self._most:
            self._refit_at = self._steps + REFIT_EVERY
            self._seconds = self.curve.seconds(rows * self._most)
        gain = rows + np.concatenate([[0.0], np.cumsum(probabilities)])
        return gain / (self._seconds[rows : rows + len(gain)] + self._other_seconds / self._weight)

    def _draft_tokens(self, probabilities: np.ndarray, rows: int) -> int:
        """How many of the nodes, the most probable first, the next forward takes."""
        if self._steps < len(TRIALS):
            return max(0, round(TRIALS[self._steps] * max(1.0, rows / TRIAL_ROWS)) - rows)
        goodput = self.goodput(probabilities, rows)
        best = int(goodput.argmax())
        after = min(rows + best + 1, len(self._seconds) - 1)
        self.price = CAUTION * float(goodput[best] * (self._seconds[after] - self._seconds[after - 1]))
        if self._steps % LOOK_EVERY == 0:
            return round(max(best, 3) * next(self._looks))
        return best
