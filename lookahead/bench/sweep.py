"""Grids of decoding and branch lengths, and their figures. In: lengths, then measured runs or replays. Out: pairs, a figure.

A branch cannot be longer than what is drafted, so longer branch lengths than fit give the same setting: it is measured once and
stands in the figures for all of them. A replay runs no forward, so its figure shows no speed. Figures of arXiv 2312.12728.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead.bench.plot import BLUE, GREY, INK, bare, drawing, from_zero, head, legend_beside, shades, title_of
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
    """(decoding length, branch length) of each setting that differs from the others: of branch lengths that hold all that is
    drafted, the least.

    Example: decoding lengths 4 and 16 with branch lengths 4, 8 and 16 give (4, 4), (16, 4), (16, 8), (16, 16).
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
        """This very setting was measured."""
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
    """Draft tokens per step."""
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
            parts.append((f"{strategy}, batch {comparison.batch_size}", comparison, Grid("", strategy, "", cells)))
    figure, axes_of_parts = _figure([title for title, _, _ in parts], 12, 6.4)
    for axes, (_, comparison, cells) in zip(axes_of_parts, parts, strict=True):
        _draw_speed(axes.T.flatten(), comparison, cells)
    head(figure, title_of(comparisons[0]))
    return figure


def replay_sweep_figure(replays: Sequence[WorkloadReplay]) -> Any:
    """For each grid: EDL as a map and as lines along both lengths, draft tokens and draft time along the decoding length."""
    swept = grids(replays)
    figure, parts = _figure([f"{in_one_line(each.workload)}: {each.strategy}, {each.start}" for each in swept], 13, 7)
    for axes, each in zip(parts, swept, strict=True):
        _draw_edl(axes, each)
    rows, tokens = sum(each.rows for each in replays), sum(each.tokens for each in replays)
    head(figure, f"replay of {rows:,} logged answers, {tokens:,} tokens (no model)")
    return figure


def _figure(titles: Sequence[str], width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure, and the axes [2, 3] of each part; the parts stand one below the other, each of this height in inches."""
    figure = drawing().figure(figsize=(width, height * len(titles) + 0.4), layout="constrained")
    parts = figure.subfigures(len(titles), 1, squeeze=False)[:, 0]
    axes = [part.subplots(2, 3) for part in parts]
    for part, title in zip(parts, titles, strict=True):
        part.suptitle(title, fontsize=11, x=0.01, ha="left", color=INK)
    return figure, axes


def _draw_speed(axes: Any, comparison: Comparison, cells: Grid) -> None:
    """Six axes: five figures and the legend."""
    by_branch, by_length = cells.by_branch(), cells.by_length()
    plain, auto = comparison.runs[0], comparison.auto
    forward, key, speed_by_length, speed_by_branch, edl_by_length, edl_by_branch = axes
    longest = [(1, plain), *by_branch[-1][1]]
    known = [(length, run.forward_ms()) for length, run in longest if run.forward_ms() is not None]
    forward.plot([length for length, _ in known], [ms for _, ms in known], "o-", color=BLUE, markersize=4)
    _finish(forward, [length for length, _ in longest], ALONG_LENGTHS, "forward time (ms, median)")
    for axis, second, what, up in (
        (speed_by_length, False, "tokens_per_second", "tokens/s"),
        (edl_by_length, False, "edl", "EDL"),
        (speed_by_branch, True, "tokens_per_second", "tokens/s"),
        (edl_by_branch, True, "edl", "EDL"),
    ):
        marks = [(run, *style) for run, *style in ((auto, "#d0492f", "--", "auto"), (plain, GREY, ":", "plain")) if run]
        value = operator.attrgetter(what)
        levels = [(value(run), *style) for run, *style in marks]
        _lines(axis, by_length if second else by_branch, value, up, second, levels)
    legend_beside(key, [speed_by_length, speed_by_branch])


def _draw_edl(axes: Any, cells: Grid) -> None:
    (edl_map, by_length, by_branch), (tokens, time, key) = axes
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
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if not np.isnan(value):
                ink = "white" if value < middle else "black"
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=9)
    axis.set_xticks(range(len(lengths)), [str(n) for n in lengths])
    axis.set_yticks(range(len(branches)), [str(b) for b in branches])
    axis.set_xlabel(ALONG_LENGTHS)
    axis.set_ylabel(ALONG_BRANCHES)
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
    for (name, points), colour in zip(lines, shades(len(lines), second=second), strict=True):
        values = [value(result) for _, result in points]
        axis.plot([x for x, _ in points], values, "o-", color=colour, label=name, markersize=4, linewidth=1.3)
    for level, colour, style, name in levels:
        axis.axhline(level, color=colour, linestyle=style, linewidth=1.5, label=name)
    _finish(axis, [x for x, _ in lines[0][1]], ALONG_BRANCHES if second else ALONG_LENGTHS, up)


def _finish(axis: Any, ticks: list[int], along: str, up: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel(along)
    axis.set_ylabel(up)
    bare(axis)
    from_zero(axis)
