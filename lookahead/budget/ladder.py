"""Measures what steps cost on this machine, before the first row. In: a function that times a forward. Out: a `StepCost`.

The job's first plain steps tell what those take. Other sizes are visited in turn, the most telling first, until the time is up:
a slow moment then slows all of them alike. Of each the median counts. What was not reached is interpolated, or continues as
between the two before it.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from lookahead.budget.policy import MEASURED, OF_BATCH, OF_ONE, TOKENS, StepCost
from lookahead.budget.profile import CostProfile, Forward, Setting, cache_folder
from lookahead.files.atomic import replacing
from lookahead.version import __version__

# Tokens of a forward of one row, and of each size times the rows of a batch up to MOST.
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64)
ORDER = (1, 4, 16, 2, 8, 32, 12, 64, 24)
FIRST = 4  # tokens of each row in the forward that is measured in any case: plain steps alone tell nothing about others
CONTEXT = 512  # tokens of each row in the cache, for profiles
MOST = 128  # tokens of a forward
SECONDS, SHARE = 1.0, 0.01  # that it may take, and of the time of the job
KEPT = 2
APART = 0.2  # log of what a forward may cost more or less, relative to a plain step, than in an earlier job
ROUNDS = 9  # how often each size is measured at most
TRUSTED = 3  # of the measurements of a size, for how many steps they stand: the machine may have changed
MANY, MOST_CHANGE = 9, 0.05  # pairs of forwards that tell what a change of size costs, and what it costs at most


def measure(
    forward: Callable[[int, int], float],
    batch: int,
    plain_steps: float,
    plain_seconds: float,
    buckets: bool = False,
    most: float = SECONDS,
) -> StepCost:
    """forward(rows, tokens): seconds of one. plain_steps, plain_seconds: steps that the job would take without drafts, about,
    and the forward of one of them. most: seconds that it may take, but for one forward.
    """
    cells = [(batch, FIRST * batch), *((batch, size * batch) for size in ORDER if size * batch <= max(MOST, 4 * batch))]
    if batch > 1:
        cells[2:2] = [(1, 1)]
        cells += ((1, size) for size in ORDER[1:] if size <= MOST // 2)
    cells = list(dict.fromkeys(cells))
    times = {(batch, batch): [plain_seconds] * TRUSTED}
    spent, limit = 0.0, min(most, SHARE * plain_steps * plain_seconds)
    changed: list[float] = []  # first forwards of a size, in times of the second one
    waiting = deque(cells)
    for turn in range(ROUNDS * len(cells)):
        if not waiting:
            break
        cell = waiting.popleft()
        if turn and spent + _expected(times, cell[1]) > limit:
            continue
        waiting.append(cell)
        seconds = forward(*cell)
        spent += seconds
        if spent + seconds < limit / 2:
            first, seconds = seconds, forward(*cell)
            spent += seconds
            changed.append(first / seconds)
        times.setdefault(cell, []).append(seconds)
    change = float(np.median(changed)) - 1 if len(changed) >= MANY else 0.0
    return _cost(times, batch, buckets, min(max(change, 0.0), MOST_CHANGE))


def _expected(times: dict[tuple[int, int], list[float]], tokens: int) -> float:
    """Seconds of a forward of that many tokens by those that were measured; of more tokens than any, at most."""
    sizes, seconds = np.array(sorted((size, min(of_cell)) for (_, size), of_cell in times.items()), np.float64).T
    return float(np.interp(tokens, sizes, seconds) * max(1.0, tokens / sizes[-1]))


def of_profile(profile: CostProfile, batch: int) -> StepCost:
    """Take the costs from a profile, with CONTEXT tokens of each row in the cache."""
    forwards = [[Forward(max(size, rows), rows, CONTEXT * rows) for size in SIZES] for rows in (1, batch)]
    seconds = [[profile.forward_seconds(each) for each in line] for line in forwards]
    return StepCost(np.array(SIZES, np.float64), not_falling_lines(seconds), batch, profile.bucketed)


def _path_of(setting: Setting, batch: int) -> Path | None:
    """Path of the kept costs of this setting and these versions; None if there is no folder."""
    folder = cache_folder()
    return folder / f"steps-{setting.file_name.removesuffix('.json')}-{batch}-{_versions()}.json" if folder else None


@functools.cache
def _versions() -> str:
    return f"{__version__}-torch-{version('torch')}"


def read(setting: Setting, batch: int) -> StepCost | None:
    """Read what `write` left; None if it cannot be read."""
    try:
        path = _path_of(setting, batch)
        if path is None or not path.is_file():
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
        sizes, seconds, measured = (np.array(value[name], np.float64) for name in ("sizes", "seconds", "measured"))
        found = bool((np.diff(sizes) > 0).all() and (seconds > 0).all() and np.isfinite(seconds).all() and len(sizes) > 1)
        if not found or seconds.shape != (2, len(sizes)) or measured.shape != sizes.shape:
            return None
        return StepCost(sizes, seconds, int(value["batch"]), bool(value["buckets"]), measured, float(value["change"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def holds(cost: StepCost, forward: Callable[[int, int], float], plain_seconds: float) -> bool:
    """Check that a forward still takes what it did, relative to a plain step."""
    tokens, table = FIRST * cost.batch, cost.table
    expected = np.interp(tokens, table[TOKENS], table[OF_BATCH]) / np.interp(cost.batch, table[TOKENS], table[OF_BATCH])
    return bool(abs(np.log(forward(cost.batch, tokens) / plain_seconds / expected)) < APART)


def write(setting: Setting, cost: StepCost) -> None:
    """Keep it for later jobs, where that can be done, if each size was measured KEPT times."""
    table, path = cost.table, _path_of(setting, cost.batch)
    if path is None or table[MEASURED].min() < KEPT:
        return
    value = {
        "sizes": table[TOKENS].tolist(),
        "seconds": table[OF_ONE : OF_BATCH + 1].tolist(),
        "measured": table[MEASURED].tolist(),
        "batch": cost.batch,
        "buckets": cost.buckets,
        "change": cost.change,
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "w") as file:
            file.write(json.dumps(value))


def _cost(times: dict[tuple[int, int], list[float]], batch: int, buckets: bool, change: float) -> StepCost:
    sizes = np.array(sorted({tokens for _, tokens in times} | {*SIZES}), np.float64)
    lines, measured = [], np.full(len(sizes), 0.5)
    for rows in (1, batch):
        of_rows = {tokens: of_cell for (r, tokens), of_cell in times.items() if r == rows}
        if len(of_rows) < 3:  # what a row costs apart from its tokens is unknown
            of_rows = {tokens: times.get((batch, tokens)) or of_cell for (_, tokens), of_cell in times.items()}
        at = np.array(sorted(of_rows), np.float64)
        of_size = not_falling(np.array([float(np.median(of_rows[int(tokens)])) for tokens in at]))
        slopes = np.diff(of_size) / np.diff(at)
        # Beyond what was measured a token costs no less than on average; fewer tokens save half at most.
        line = np.interp(sizes, at, of_size)
        line += max(slopes[-1], (of_size[-1] - of_size[0]) / (at[-1] - at[0])) * np.maximum(sizes - at[-1], 0)
        line -= np.minimum(slopes[0] * np.maximum(at[0] - sizes, 0), of_size[0] / 2)
        lines.append(line)
    for (_, tokens), of_cell in times.items():
        measured[sizes == tokens] = np.maximum(measured[sizes == tokens], min(len(of_cell), TRUSTED))
    return StepCost(sizes, np.array(lines), batch, buckets, measured, change)


def not_falling_lines(lines: Sequence[Sequence[float]]) -> np.ndarray:
    """`not_falling` of each."""
    return np.array([not_falling(np.array(line)) for line in lines])


def not_falling(values: np.ndarray) -> np.ndarray:
    """The nearest to these that never falls (isotonic regression: neighbours that fall take their mean)."""
    pools: list[list[float]] = []  # mean, how many
    for value in values.tolist():
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, count = pools.pop()
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * count) / (pools[-1][1] + count), pools[-1][1] + count]
    return np.concatenate([np.full(int(count), mean) for mean, count in pools])
