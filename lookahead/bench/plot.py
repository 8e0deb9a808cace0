"""Figures as PNG, PDF or SVG. In: measured runs, or EDL by size of a trie. Out: a file, or the text of an SVG for a page, in
whose ink lines and words are drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import operator
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead.budget.profile import CDL_FACTOR, CostProfile, Forward
from lookahead.files.atomic import replacing
from lookahead.printable import in_one_line

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.logged import WorkloadReplay
    from lookahead.bench.replay import ReplayResult
    from lookahead.bench.trie_report import Capacity


BLUE, GREY, INK = "#2a6fdb", "#8c8c8c", "#1b1b1f"


@functools.cache
def drawing() -> Any:
    """matplotlib's pyplot, in our style. It is loaded when something is drawn."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")  # draws files, needs no screen
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    matplotlib.rcParams.update({**dict.fromkeys(inked, INK), "text.parse_math": False})  # a dollar in a name is a dollar
    return pyplot


def comparison_figure(comparisons: Sequence[Comparison], titled: bool = True) -> Any:
    """Bars of tokens/s (labelled with the speedup, whose spread is the whisker) and EDL of all runs, a row a batch size."""
    pyplot = drawing()
    runs_each = [len(comparison.runs) for comparison in comparisons]
    figure, rows = pyplot.subplots(
        len(comparisons), 2, figsize=(10, sum(0.4 * runs + 1.3 for runs in runs_each)), sharey="row", squeeze=False,
        layout="constrained", height_ratios=runs_each,
    )  # fmt: skip
    for comparison, (speed, length) in zip(comparisons, rows, strict=True):
        runs = comparison.runs[::-1]
        names = [run.name for run in runs]
        colours = [BLUE if run.drafts else GREY for run in runs]
        speed.barh(names, [run.tokens_per_second for run in runs], color=colours)
        plain = comparison.runs[0].tokens_per_second
        for row, run in enumerate(runs):
            low, high = (plain * ratio for ratio in run.speedup_spread)
            if high > low:
                speed.plot([low, high], [row, row], "|-", color=INK, linewidth=1.2, markersize=7)
            end = max(high, run.tokens_per_second)
            speed.annotate(f"{run.speedup:.2f}x", (end, row), (6, 0), textcoords="offset points", va="center")
        speed.set_xlabel("tokens/s (speedup over plain; whisker: quartiles of turns)")
        speed.set_title(f"batch {comparison.batch_size}", loc="left", fontsize=10, color=INK)
        bars = length.barh(names, [run.edl for run in runs], color=colours)
        length.bar_label(bars, fmt="%.2f", padding=3)
        length.set_xlabel("EDL (tokens per decode step)")
        length.tick_params(axis="y", length=0)
        for axis in (speed, length):
            axis.margins(x=0.15, y=0.02)
            bare(axis)
    if titled:
        head(figure, title_of(comparisons[0]))
    return figure


def title_of(comparison: Comparison) -> str:
    """Return what was measured, all batch sizes alike."""
    weights, asked = (" (random weights)", "logged answers") if comparison.forced else ("", "prompts")
    if comparison.predicted:
        weights = " (predicted)"
    return f"{comparison.model}{weights}: {comparison.rows} {asked}, {comparison.device}, {comparison.precision}"


def draw_capacity(curve: Sequence[Capacity], title: str, path: str) -> None:
    """EDL against the size of the trie, the first point being no trie at all; atomically written to `path`."""
    pyplot = drawing()
    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    cold, sizes = curve[0], curve[1:]
    axis.axhline(cold.edl, color=GREY, linestyle="--", linewidth=1, label=f"no trie: {cold.edl:.2f}", zorder=1)
    axis.plot([c.tokens for c in sizes], [c.edl for c in sizes], "o-", color=BLUE, label="with the trie", zorder=1)
    for c in sizes:  # more tokens draft better: to the left above a point nothing is drawn
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axis.annotate(
            f"{c.edl:.2f}", (c.tokens, c.edl), (-7, 5), textcoords="offset points", ha="right", fontsize=8, bbox=ground
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks([c.tokens for c in sizes], [f"{_short(c.tokens)}\n{c.bytes / 2**20:.3g} MiB" for c in sizes])
    axis.minorticks_off()
    axis.set(xlabel="tokens kept, and size of the file (the whole trie at the right)", ylabel="EDL (tokens per decode step)")
    axis.margins(x=0.08, y=0.2)
    axis.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0)
    bare(axis)
    head(figure, title)
    save_figure(figure, path)


def draw_profile(profile: CostProfile, path: str, rows: Sequence[int] = (1, 8, 32), context: int = 512) -> None:
    """Forward time against decoding length for several numbers of rows, each with its CDL, to `path`."""
    pyplot = drawing()
    figure, (time, share) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    lengths = [n for n in profile.tokens if n <= 128]
    for number, colour in zip(rows, (BLUE, "#d9822b", "#3f9b4f"), strict=False):
        seconds = [profile.forward_seconds(Forward(number * n, number, number * context)) for n in lengths]
        label = f"{number} row{'s' * (number > 1)}, CDL {profile.cdl(number, context)}"
        time.plot(lengths, [each * 1e3 for each in seconds], "o-", color=colour, label=label, markersize=3)
        share.plot(lengths, [each / seconds[0] for each in seconds], "o-", color=colour, markersize=3)
    share.axhline(CDL_FACTOR, color=GREY, linestyle="--", linewidth=1, label=f"{CDL_FACTOR:g} times: CDLs end here")
    time.set_ylabel("forward (ms)")
    share.set_ylabel("forward / that of one token per row")
    for axis in (time, share):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks([n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= lengths[-1]])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("decoding length (tokens of each row in one forward)")
        bare(axis)
    for axis in (time, share):  # lines rise, so the upper left is free
        axis.legend(frameon=False, loc="upper left")
    about = profile.setting
    kind = "" if profile.kind == "measured" else f" ({profile.kind})"
    head(figure, f"{about.model}, {about.device}, {about.dtype}, {context} tokens in the cache{kind}")
    save_figure(figure, path)


def _short(count: int) -> str:
    """Tokens for people: 1536000 -> "1.54 M"."""
    size, unit = next(
        each for each in ((10**9, " G"), (10**6, " M"), (10**3, " k"), (1, "")) if count >= each[0] or not each[1]
    )
    return f"{count / size:.3g}{unit}" if unit else str(count)


def bare(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)


def from_zero(axis: Any) -> None:
    """The vertical axis begins at 0 and ends above what is drawn, so that a level line is not the border."""
    highest = axis.dataLim.ymax
    axis.set_ylim(0, 1.08 * highest if 0 < highest < math.inf else 1)  # of nothing it is -inf or no number


def shades(count: int, second: bool = False) -> list[Any]:
    """Colours from light to dark, of one of two scales that are read on light and on dark ground."""
    scale = drawing().get_cmap("plasma" if second else "viridis")
    return [scale(0.82 - 0.5 * number / max(1, count - 1)) for number in range(count)]


def legend_outside(axis: Any, drawn: Sequence[Any]) -> None:
    handles = {label: handle for each in drawn for handle, label in zip(*each.get_legend_handles_labels(), strict=True)}
    axis.axis("off")
    axis.legend(handles.values(), handles, loc="center left", frameon=False, fontsize=9)


def save_figure(figure: Any, path: str) -> None:
    """Atomically to `path`, in the format of its ending: .png, .pdf or .svg."""
    with replacing(path) as file:
        _draw(figure, file, Path(path).suffix.lower().removeprefix("."), dpi=120)


def _draw(figure: Any, file: Any, kind: str, **options: Any) -> None:
    """Draw all of a figure, what is beyond its border too. A character that the font lacks is a box, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(file, format=kind, bbox_inches="tight", pad_inches=0.15, **options)
    drawing().close(figure)


def head(figure: Any, title: str) -> None:
    width = int(12 * figure.get_figwidth())  # characters of this size that fit
    figure.suptitle("\n".join(textwrap.wrap(in_one_line(title), width)), fontsize=10)


def as_svg(figure: Any, name: str) -> str:
    """A figure for a page: an <svg> element without a ground, in the page's ink. name: keeps its ids apart from others'."""
    text = io.StringIO()
    with drawing().rc_context({"svg.hashsalt": name}):
        _draw(figure, text, "svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :].replace(INK, "currentColor")
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)


ALONG_LENGTHS, ALONG_BRANCHES = "decoding length (tokens)", "branch length (tokens)"

Line = tuple[str, list[tuple[int, Any]]]  # its name, and the results along an axis


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

    def by_branch(self) -> list[Line]:
        return [(f"branch length {b}", [(n, self.at(n, b)) for n in self.lengths]) for b in self.branches]

    def by_length(self) -> list[Line]:
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
    """Return how auto compares with the best fixed setting."""
    best, auto = comparison.best_fixed, comparison.auto
    assert best is not None
    assert auto is not None
    reaches = auto.tokens_per_second / best.tokens_per_second
    return f"best fixed setting: {best.name}, {best.speedup:.2f}x; auto reaches {reaches:.2f} of it"


def draft_us(result: ReplayResult) -> float:
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
    """For each grid EDL as a map and along both lengths, draft tokens and draft time along the decoding length."""
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
    legend_outside(key, [speed, speed_by_branch])


def _draw_edl(cells: Grid, axes: Any) -> None:
    edl_map, by_length, by_branch, tokens, time, key = axes
    _draw_map(edl_map, cells)
    _lines(by_length, cells.by_branch(), lambda r: r.edl, "EDL (tokens per decode step)")
    _lines(by_branch, cells.by_length(), lambda r: r.edl, "EDL (tokens per decode step)", second=True)
    _lines(tokens, cells.by_branch(), lambda r: r.draft_tokens_per_step, "draft tokens per step")
    _lines(time, cells.by_branch(), draft_us, "draft time (us, median)")
    legend_outside(key, [by_length, by_branch])


def _draw_map(axis: Any, cells: Grid) -> None:
    """A heat map with its values; settings that do not differ from the one on their left are left white."""
    lengths, branches = cells.lengths, cells.branches
    values = [[cells.at(n, b).edl if (n, b) in cells.cells else np.nan for n in lengths] for b in branches]
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
    axis: Any, lines: Sequence[Line], value: Callable[[Any], float], up: str, second: bool = False, levels: Sequence[Any] = ()
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
