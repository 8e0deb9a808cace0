"""What steps cost on this machine, measured before the first row. In: a function that times a forward. Out: a `StepCost`.

Sizes are visited in turn, the most telling first, until the time is up: a slow moment then slows all of them alike. Of each the
median counts. What was not reached is interpolated, or continues as between the two before it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lookahead.budget.policy import StepCost

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64)  # tokens of a forward of one row, and of each size times the rows of a batch up to MOST
ORDER = (1, 8, 4, 16, 2, 32, 12, 64, 24)
MOST = 128  # tokens of a forward
SECONDS, SHARE = 1.0, 0.01  # that it may take, and of the time of the job


def measure(forward: Callable[[int, int], float], batch: int, plain_steps: float, buckets: bool = False) -> StepCost:
    """forward(rows, tokens): seconds of one. plain_steps: that the job would take without drafts, about."""
    cells = [(batch, size * batch) for size in ORDER if size * batch <= max(MOST, 4 * batch)]
    if batch > 1:
        cells += [(1, size) for size in ORDER if size <= MOST // 2]
    times: dict[tuple[int, int], list[float]] = {}
    spent, limit, turn = 0.0, np.inf, 0
    while spent < limit and turn < 9 * len(cells):
        cell = cells[turn % len(cells)]
        seconds = forward(*cell)
        if turn == 0:
            limit = min(SECONDS, SHARE * plain_steps * seconds)
        elif turn < len(cells) and spent + float(np.median(times[cells[0]])) * 1.0 > limit and len(times) >= 3:
            break
        times.setdefault(cell, []).append(seconds)
        spent, turn = spent + seconds, turn + 1
    return _cost({cell: float(np.median(of_cell)) for cell, of_cell in times.items()}, batch, buckets)


def _cost(seconds: dict[tuple[int, int], float], batch: int, buckets: bool) -> StepCost:
    sizes = np.unique([tokens for _, tokens in seconds])
    lines = []
    for rows in dict.fromkeys((1, batch)):
        known = sorted((tokens, of_cell) for (r, tokens), of_cell in seconds.items() if r == rows)
        if not known:
            continue
        at, of_size = np.array(known, np.float64).T
        line = np.interp(sizes, at, np.maximum.accumulate(of_size))
        if len(at) > 1:
            slope = max(0.0, (line[sizes == at[-1]][0] - line[sizes == at[-2]][0]) / (at[-1] - at[-2]))
            line += slope * np.maximum(sizes - at[-1], 0)
        lines.append(line)
    return StepCost(sizes, np.array(lines if len(lines) == 2 else [lines[0]] * 2), batch, buckets)
