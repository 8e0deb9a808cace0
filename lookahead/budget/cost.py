"""What a forward costs by its size, learned from the job's own steps. In: sizes and seconds. Out: a cost for any size.

Steps of similar size share a bucket; a bucket's cost is the median of its latest steps, so single slow steps do not count.
Costs never fall with size (isotonic fit, buckets weighted by their steps); between buckets they are interpolated, beyond the
largest they go on at the mean slope.
"""

from __future__ import annotations

from collections import deque

import numpy as np

SIZES = np.array([1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024])
LATEST = 64  # steps that a bucket remembers


class CostCurve:
    """Seconds of a forward over the tokens of all rows, on one machine."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[int, float]]] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """A forward over `tokens` tokens took `seconds`."""
        bucket = int(np.searchsorted(SIZES, tokens))
        self._steps.setdefault(bucket, deque(maxlen=LATEST)).append((tokens, seconds))

    def seconds(self, most: int) -> np.ndarray:
        """float64 [most + 1]: cost of a forward over 0 (meaningless), 1, ... `most` tokens. Needs one observed step."""
        buckets = [np.array(self._steps[b]) for b in sorted(self._steps)]
        sizes = np.array([steps[:, 0].mean() for steps in buckets])
        # The lower median: of two steps the faster, as the first of its shape is slow.
        costs = np.array([np.quantile(steps[:, 1], 0.5, method="lower") for steps in buckets])
        costs = isotonic(costs, np.array([float(len(steps)) for steps in buckets]))
        wanted = np.arange(most + 1, dtype=float)
        curve = np.interp(wanted, sizes, costs)
        if len(sizes) > 1:
            slope = (costs[-1] - costs[0]) / (sizes[-1] - sizes[0])
            curve += np.maximum(0, wanted - sizes[-1]) * slope
        return curve


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The closest sequence that never falls, by weighted squares (pool adjacent violators).

    Example: values 3, 5, 4 with equal weights become 3, 4.5, 4.5.
    """
    pools: list[list[float]] = []  # value, weight, members
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            value, weight, members = pools.pop()
            before = pools[-1]
            before[0] = (before[0] * before[1] + value * weight) / (before[1] + weight)
            before[1] += weight
            before[2] += members
    return np.concatenate([np.full(int(members), value) for value, _, members in pools])
