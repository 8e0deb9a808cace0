"""Grids of decoding and branch lengths, and their figures. In: lengths, then measured runs or replays. Out: pairs, a figure.

A branch cannot be longer than what is drafted: longer branch lengths give the same setting, which is measured once. A replay
runs no forward, so its figure shows no speed. Figures of arXiv 2312.12728.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead.bench.plot import GREY, INK, bare, drawing, from_zero, head, legend_beside, shades, title_of
from lookahead.printable import in_one_line

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.logged import WorkloadReplay
    from lookahead.bench.replay import ReplayResult

DECODING_LENGTHS = (2, 4, 8, 16, 32, 64)
BRANCH_LENGTHS = (4, 8, 16, 64)
ALONG_LENGTHS, ALONG_BRANCHES = "decoding length (tokens)", "branch length (tokens)"

Line = tuple[str, list[tuple[int, Any]]]  # its name, and the results along an axis


def grid(decoding_lengths: Iterable[int], branch_lengths: Iterable[int]) -> list[tuple[int, int]]:
    """(decoding length, branch length) of each setting that differs: 4 and 16 with 4, 8, 16: (4, 4), (16, 4), (16, 8), (16,
    16).
    """
    pairs = []
    for length in sorted(set(decoding_lengths)):
        for branch in sorted(set(branch_lengths)):
            pairs.append((length, branch))
            if branch >= length - 1:
                break
    return pairs


@dataclasses.dataclass(frozen=True)
class Grid:
    """Results of one workload, strategy and start, by decoding and branch length: of replays, or runs of a bench."""

    workload: str
    strategy: str
    start: str
    cells: dict[tuple[int, int], Any]

    @property
    def lengths(self) -> list[int]:
        return sorted({length for length, _ in self.cells})

    @property
    def branches(self) -> list[int]:
        return sorted({branch for _, branch in self.cells})

    @property
    def best(self) -> Any:
        """The longest EDL; of equal ones that of the smaller lengths."""
        return max((self.cells[key] for key in sorted(self.cells)), key=lambda result: round(result.edl, 4))

    def at(self, length: int, branch: int) -> Any:
        """The result of this setting, or of the longest branch length below it, which is the same."""
        return self.cells[length, max(b for n, b in self.cells if n == length and b <= branch)]

    def measured(self, length: int, branch: int) -> bool:
        return (length, branch) in self.cells

    def by_branch(self) -> list[Line]:
        """A line for each branch length, along the decoding lengths."""
        return [(f"branch length {b}", [(n, self.at(n, b)) for n in self.lengths]) for b in self.branches]

    def by_length(self) -> list[Line]:
        """A line for each decoding length, along the branch lengths."""
        return [(f"decoding length {n}", [(b, self.at(n, b)) for b in self.branches]) for n in self.lengths]


def grids(replays: Sequence[WorkloadReplay]) -> list[Grid]:
    """One for each workload, strategy and start, in this order."""
    found: dict[tuple[str, str, str], Grid] = {}
    for replay in replays:
        for result in replay.results:
            key = replay.name, result.strategy, result.start
            found.setdefault(key, Grid(*key, cells={})).cells[result.decoding_length, result.branch_length] = result
    return list(found.values())


def in_words(comparison: Comparison) -> str:
    """How auto compares with the best fixed setting."""
    best, auto = comparison.best_fixed, comparison.auto
    assert best is not None
    assert auto is not None
    reaches = auto.tokens_per_second / best.tokens_per_second
    return f"best fixed setting: {best.name}, {best.speedup:.2f}x; auto reaches {reaches:.2f} of it"


def drafted(result: ReplayResult) -> float:
    return result.draft_tokens_per_step


def draft_us(result: ReplayResult) -> float:
    """Median time of a draft, microseconds."""
    return float(np.median(result.draft_us)) if len(result.draft_us) else 0.0


def sweep_figure(comparisons: Sequence[Comparison]) -> Any:
    """Forward time against decoding length; speed and EDL against decoding and branch length, of each batch size."""
    parts = []
    for comparison in comparisons:
        fixed = [run for run in comparison.runs if run.drafts and not run.adaptive]
        for strategy in dict.fromkeys(run.strategy for run in fixed):
            cells: Any = {(run.decoding_length, run.branch_length): run for run in fixed if run.strategy == strategy}
            draw = partial(_draw_speed, comparison, Grid("", strategy, "", cells))
            parts.append((f"{strategy}, batch {comparison.batch_size}", draw))
    return _figure(title_of(comparisons[0]), parts, 12, 6.4)


def replay_sweep_figure(replays: Sequence[WorkloadReplay]) -> Any:
    """For each grid: EDL as a map and as lines along both lengths, draft tokens and draft time along the decoding length."""
    parts = [
        (f"{in_one_line(each.workload)}: {each.strategy}, {each.start}", partial(_draw_edl, each)) for each in grids(replays)
    ]
    rows, tokens = sum(each.rows for each in replays), sum(each.tokens for each in replays)
    return _figure(f"replay of {rows:,} logged answers, {tokens:,} tokens (no model)", parts, 13, 7)


def _figure(title: str, parts: Sequence[tuple[str, Callable[[Any], None]]], width: float, height: float) -> Any:
    """Parts (title, what draws six axes) one below the other, each of this height in inches."""
    figure = drawing().figure(figsize=(width, height * len(parts) + 0.4), layout="constrained")
    for part, (name, draw) in zip(figure.subfigures(len(parts), 1, squeeze=False)[:, 0], parts, strict=True):
        draw(part.subplots(2, 3).flatten())
        part.suptitle(name, fontsize=11, x=0.01, ha="left", color=INK)
    head(figure, title)
    return figure


def _draw_speed(comparison: Comparison, cells: Grid, axes: Any) -> None:
    """Five figures and their legend."""
    forward, speed, edl, key, speed_by_branch, edl_by_branch = axes
    plain, auto = comparison.runs[0], comparison.auto
    timed = [each for each in [(1, plain), *cells.by_branch()[-1][1]] if each[1].forward_ms() is not None]
    _lines(forward, [("", timed)], lambda run: run.forward_ms(), "forward time (ms, median)")
    marks = [(run, *style) for run, *style in ((auto, "#d0492f", "--", "auto"), (plain, GREY, ":", "plain")) if run]
    for axis, second, what, up in (
        (speed, False, "tokens_per_second", "tokens/s"),
        (edl, False, "edl", "EDL"),
        (speed_by_branch, True, "tokens_per_second", "tokens/s"),
        (edl_by_branch, True, "edl", "EDL"),
    ):
        value = operator.attrgetter(what)
        levels = [(value(run), *style) for run, *style in marks]
        _lines(axis, cells.by_length() if second else cells.by_branch(), value, up, second, levels)
    legend_beside(key, [speed, speed_by_branch])


def _draw_edl(cells: Grid, axes: Any) -> None:
    edl_map, by_length, by_branch, tokens, time, key = axes
    _draw_map(edl_map, cells)
    _lines(by_length, cells.by_branch(), lambda r: r.edl, "EDL (tokens per decode step)")
    _lines(by_branch, cells.by_length(), lambda r: r.edl, "EDL (tokens per decode step)", second=True)
    _lines(tokens, cells.by_branch(), drafted, "draft tokens per step")
    _lines(time, cells.by_branch(), draft_us, "draft time (us, median)")
    legend_beside(key, [by_length, by_branch])


def _draw_map(axis: Any, cells: Grid) -> None:
    """A heat map with its values; settings that do not differ from the one on their left are left white."""
    lengths, branches = cells.lengths, cells.branches
    values = [[cells.at(n, b).edl if cells.measured(n, b) else np.nan for n in lengths] for b in branches]
    shown = axis.imshow(values, origin="lower", aspect="auto", cmap="viridis")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for row, column in np.argwhere(~np.isnan(values)).tolist():
        value = values[row][column]
        ink = "white" if value < middle else "black"
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=9)
    axis.set_xticks(range(len(lengths)), lengths)
    axis.set_yticks(range(len(branches)), branches)
    axis.set(xlabel=ALONG_LENGTHS, ylabel=ALONG_BRANCHES)
    axis.figure.colorbar(shown, ax=axis, label="EDL")


def _lines(
    axis: Any,
    lines: Sequence[Line],
    value: Callable[[Any], float],
    up: str,
    second: bool = False,
    levels: Sequence[tuple[Any, ...]] = (),
) -> None:
    """second: lines along the branch lengths. levels: (value, colour, line style, name) of what does not depend on lengths."""
    ticks = [x for x, _ in lines[0][1]]
    for (name, points), colour in zip(lines, shades(len(lines), second=second), strict=True):
        values = [value(result) for _, result in points]
        axis.plot(ticks, values, "o-", color=colour, label=name, markersize=4, linewidth=1.3)
    for level, colour, style, name in levels:
        axis.axhline(level, color=colour, linestyle=style, linewidth=1.5, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, ticks)
    axis.minorticks_off()
    axis.set(xlabel=ALONG_BRANCHES if second else ALONG_LENGTHS, ylabel=up)
    bare(axis)
    from_zero(axis)
