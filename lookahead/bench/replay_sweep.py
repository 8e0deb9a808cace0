"""A sweep of replays: EDL, draft tokens and draft time against decoding and branch length. In: replays. Out: grids, a figure.

No forward runs, so there is no speed here: a cost profile or a model adds what forwards of these lengths cost (sweep.py).
A branch cannot be longer than what is drafted, so a cell above the diagonal is that of the longest branch length that fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lookahead.bench.plot import INK, bare, drawing, from_zero, head, legend_beside, shades
from lookahead.bench.replay import ReplayResult
from lookahead.bench.workloads import WorkloadReplay
from lookahead.printable import in_one_line


@dataclasses.dataclass(frozen=True)
class Grid:
    """The results of one workload, strategy and start, by decoding and branch length."""

    workload: str
    strategy: str
    start: str
    cells: dict[tuple[int, int], ReplayResult]

    @property
    def lengths(self) -> list[int]:
        return sorted({length for length, _ in self.cells})

    @property
    def branches(self) -> list[int]:
        return sorted({branch for _, branch in self.cells})

    @property
    def best(self) -> ReplayResult:
        """The longest EDL; of equal ones that of the smaller lengths."""
        return max((self.cells[key] for key in sorted(self.cells)), key=lambda result: round(result.edl, 4))

    def at(self, length: int, branch: int) -> ReplayResult:
        """The result of this setting, or of the longest branch length below it that differs."""
        return self.cells[length, max(b for n, b in self.cells if n == length and b <= branch)]

    def measured(self, length: int, branch: int) -> bool:
        """This very setting was replayed."""
        return (length, branch) in self.cells


def grids(replays: Sequence[WorkloadReplay]) -> list[Grid]:
    """One for each workload, strategy and start, in this order."""
    found: dict[tuple[str, str, str], Grid] = {}
    for replay in replays:
        for result in replay.results:
            key = replay.name, result.strategy, result.start
            grid = found.setdefault(key, Grid(*key, cells={}))
            grid.cells[result.decoding_length, result.branch_length] = result
    return list(found.values())


def drafted(result: ReplayResult) -> float:
    """Draft tokens per step."""
    return result.draft_tokens_per_step


def draft_us(result: ReplayResult) -> float:
    """Median time of a draft, microseconds."""
    return float(np.median(result.draft_us)) if len(result.draft_us) else 0.0


def replay_sweep_figure(replays: Sequence[WorkloadReplay]) -> Any:
    """For each grid: EDL as a map and as lines along both lengths, draft tokens and draft time along the decoding length."""
    pyplot = drawing()

    swept = grids(replays)
    figure = pyplot.figure(figsize=(13, 7 * len(swept) + 0.4), layout="constrained")
    parts = figure.subfigures(len(swept), 1, squeeze=False)[:, 0]
    for part, grid in zip(parts, swept, strict=True):
        _draw(part.subplots(2, 3), grid)
        part.suptitle(f"{in_one_line(grid.workload)}: {grid.strategy}, {grid.start}", fontsize=11, x=0.01, ha="left", color=INK)
    rows, tokens = sum(each.rows for each in replays), sum(each.tokens for each in replays)
    head(figure, f"replay of {rows:,} logged answers, {tokens:,} tokens (no model)")
    return figure


def _draw(axes: Any, grid: Grid) -> None:
    (edl_map, by_length, by_branch), (tokens, time, key) = axes
    _draw_map(edl_map, grid)
    of_branch = [(f"branch length {b}", [(n, grid.at(n, b)) for n in grid.lengths]) for b in grid.branches]
    of_length = [(f"decoding length {n}", [(b, grid.at(n, b)) for b in grid.branches]) for n in grid.lengths]
    along = "decoding length (tokens)"
    _lines(by_length, of_branch, lambda r: r.edl, along, "EDL (tokens per decode step)")
    _lines(by_branch, of_length, lambda r: r.edl, "branch length (tokens)", "EDL (tokens per decode step)", second=True)
    _lines(tokens, of_branch, drafted, along, "draft tokens per step")
    _lines(time, of_branch, draft_us, along, "draft time (us, median)")
    legend_beside(key, [by_length, by_branch])


def _draw_map(axis: Any, grid: Grid) -> None:
    """A heat map with its values; settings that do not differ from the one on their left are left white."""
    values = [[grid.at(n, b).edl if grid.measured(n, b) else np.nan for n in grid.lengths] for b in grid.branches]
    shown = axis.imshow(values, origin="lower", aspect="auto", cmap="viridis")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if not np.isnan(value):
                ink = "white" if value < middle else "black"
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=9)
    axis.set_xticks(range(len(grid.lengths)), [str(n) for n in grid.lengths])
    axis.set_yticks(range(len(grid.branches)), [str(b) for b in grid.branches])
    axis.set_xlabel("decoding length (tokens)")
    axis.set_ylabel("branch length (tokens)")
    axis.figure.colorbar(shown, ax=axis, label="EDL")


def _lines(
    axis: Any,
    lines: Sequence[tuple[str, Sequence[tuple[int, ReplayResult]]]],
    value: Callable[[ReplayResult], float],
    along: str,
    up: str,
    second: bool = False,
) -> None:
    for (name, points), colour in zip(lines, shades(len(lines), second=second), strict=True):
        axis.plot(
            [x for x, _ in points], [value(result) for _, result in points], "o-", color=colour, label=name, markersize=4,
            linewidth=1.3,
        )  # fmt: skip
    ticks = [x for x, _ in lines[0][1]]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    from_zero(axis)
    axis.set_xlabel(along)
    axis.set_ylabel(up)
    bare(axis)
