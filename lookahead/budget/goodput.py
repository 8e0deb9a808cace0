"""How many tokens a forward should hold. In: how each step went. Out: the decoding length of the next one, possibly 1.

Trees list their nodes best first, so a tree of n nodes is the beginning of a larger one. How often the node at each place was
accepted therefore says what every decoding length would have gained, and the cost curve what it would have cost; the length
with the most tokens per second is used (goodput, arXiv 2406.14066). Both are learned from the job's own steps: the first ones
try several lengths, later ones look left and right now and then.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from lookahead.budget.cost import CostCurve, isotonic

TRIALS = (64, 1, 16, 4, 64, 1, 16, 4, 8, 32, 8, 32)  # first steps; each length twice, as the first of a shape is slow
LOOKS = (2.0, 0.5, 2.0, 0.0)  # later: these multiples of the best length, in turn (0: a plain step)
LOOK_EVERY = 50  # steps
REFIT_EVERY = 40  # steps
MEMORY = 0.998  # weight of the past at each step: about 500 steps count


class GoodputBudget:
    """The decoding length with the highest goodput, up to `most` tokens."""

    def __init__(self, most: int) -> None:
        self.curve = CostCurve()
        self.best = most
        self._rows = 1
        self._most = most
        self._looks = itertools.cycle(LOOKS)
        self._steps = 0  # observed
        self._verified = np.zeros(most)  # steps in which a node stood at each place, the past fading
        self._accepted = np.zeros(most)  # and those in which it was accepted
        self._other_seconds = 0.0  # of steps, outside the forward
        self._weights = 0.0  # of all steps
        self._weight = 1.0  # of the next step; it grows, so that the past need not be faded at each

    def decoding_length(self, rows: int = 1) -> int:
        """Tokens that each of `rows` rows may bring to the next forward: the root + the draft tokens."""
        number = self._steps + 1
        if number <= len(TRIALS):
            return min(TRIALS[number - 1], self._most)
        if number % REFIT_EVERY == 0 or number == len(TRIALS) + 1 or rows != self._rows:
            self._rows = rows
            self.best = int(np.argmax(self.goodput(rows))) + 1
        if number % LOOK_EVERY == 0:
            return int(np.clip(round(max(self.best, 4) * next(self._looks)), 1, self._most))
        return self.best

    def observe(self, sizes: Sequence[int], nodes: Sequence[list[int]], forward_seconds: float, step_seconds: float) -> None:
        """A forward over `sizes` tokens of each row accepted `nodes` of each (root included); what it and the step took."""
        self._steps += 1
        self.curve.observe(sum(sizes), forward_seconds)
        for size, accepted in zip(sizes, nodes, strict=True):
            self._verified[:size] += self._weight
            self._accepted[accepted] += self._weight
        self._other_seconds += self._weight * (step_seconds - forward_seconds)
        self._weights += self._weight
        self._weight /= MEMORY
        if self._weight > 1e6:
            self._rescale()

    def goodput(self, rows: int = 1) -> np.ndarray:
        """float64 [most]: tokens per second expected of `rows` rows at decoding lengths 1, 2, ... `most` each.

        Needs one observed step.
        """
        weight = self._verified / self._weight + 1e-3
        share = -isotonic(
            -self._accepted / self._weight / weight, weight
        )  # later nodes are accepted less often; what says else is noise
        cost = self.curve.seconds(rows * self._most)[rows::rows] + self._other_seconds / self._weights
        return rows * np.cumsum(share) / cost

    def _rescale(self) -> None:
        """Give the next step the weight 1 again; all ratios stay."""
        self._verified /= self._weight
        self._accepted /= self._weight
        self._other_seconds /= self._weight
        self._weights /= self._weight
        self._weight = 1.0
