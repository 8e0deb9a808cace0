"""The grid of a sweep and its figures, those of arXiv 2312.12728. In: lengths, then measured runs. Out: pairs, a figure.

A branch cannot be longer than what is drafted, so longer branch lengths than fit give the same setting: it is measured once and
stands in the figures for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lookahead.bench.plot import BLUE, GREY, INK, bare, drawing, from_zero, head, legend_beside, shades, title_of
from lookahead.bench.run import Run

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison

DECODING_LENGTHS = (2, 4, 8, 16, 32, 64)
BRANCH_LENGTHS = (4, 8, 16, 64)

Cells = dict[tuple[int, int], Run]  # by decoding length and branch length


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


def in_words(comparison: Comparison) -> str:
    """How auto compares with the best fixed setting."""
    best, auto = comparison.best_fixed, comparison.auto
    assert best is not None
    assert auto is not None
    reaches = auto.tokens_per_second / best.tokens_per_second
    return f"best fixed setting: {best.name}, {best.speedup:.2f}x; auto reaches {reaches:.2f} of it"


def sweep_figure(comparisons: Sequence[Comparison]) -> Any:
    """Forward time against decoding length; speed and EDL against decoding and branch length, of each batch size."""
    pyplot = drawing()

    swept = [
        (comparison, strategy, _cells_of(comparison, strategy))
        for comparison in comparisons
        for strategy in dict.fromkeys(run.strategy for run in comparison.runs if run.drafts and not run.adaptive)
    ]
    figure = pyplot.figure(figsize=(12, 6.4 * len(swept) + 0.4), layout="constrained")
    parts = figure.subfigures(len(swept), 1, squeeze=False)[:, 0]
    for part, (comparison, strategy, cells) in zip(parts, swept, strict=True):
        axes = part.subplots(2, 3).T.flatten()
        _draw(axes, comparison, cells)
        part.suptitle(f"{strategy}, batch {comparison.batch_size}", fontsize=11, x=0.01, ha="left", color=INK)
    head(figure, title_of(comparisons[0]))
    return figure


def _draw(axes: Any, comparison: Comparison, cells: Cells) -> None:
    """Six axes: five figures and the legend."""
    lengths, branches = sorted({length for length, _ in cells}), sorted({branch for _, branch in cells})
    by_branch = [(f"branch length {b}", [(n, _at(cells, n, b)) for n in lengths]) for b in branches]
    by_length = [(f"decoding length {n}", [(b, _at(cells, n, b)) for b in branches]) for n in lengths]
    plain, auto = comparison.runs[0], comparison.auto
    forward, key, speed_by_length, speed_by_branch, edl_by_length, edl_by_branch = axes
    longest = [(1, plain), *by_branch[-1][1]]
    known = [(length, run.forward_ms()) for length, run in longest if run.forward_ms() is not None]
    forward.plot([length for length, _ in known], [ms for _, ms in known], "o-", color=BLUE, markersize=4)
    _finish(forward, [length for length, _ in longest], "decoding length (tokens)", "forward time (ms, median)")
    from_zero(forward)
    for axis, lines, what in (
        (speed_by_length, by_branch, "tokens_per_second"),
        (edl_by_length, by_branch, "edl"),
        (speed_by_branch, by_length, "tokens_per_second"),
        (edl_by_branch, by_length, "edl"),
    ):
        for (name, points), colour in zip(lines, shades(len(lines), second=lines is by_length), strict=True):
            values = [getattr(run, what) for _, run in points]
            axis.plot([x for x, _ in points], values, "o-", color=colour, label=name, markersize=4, linewidth=1.3)
        if auto:
            axis.axhline(getattr(auto, what), color="#d0492f", linestyle="--", linewidth=1.5, label="auto")
        axis.axhline(getattr(plain, what), color=GREY, linestyle=":", linewidth=1.5, label="plain")
        along = "decoding length (tokens)" if lines is by_branch else "branch length (tokens)"
        _finish(axis, lengths if lines is by_branch else branches, along, "tokens/s" if what != "edl" else "EDL")
        from_zero(axis)
    legend_beside(key, [speed_by_length, speed_by_branch])


def _cells_of(comparison: Comparison, strategy: str) -> Cells:
    cells: Cells = {}
    for run in comparison.runs:
        if run.drafts and not run.adaptive and run.strategy == strategy:
            assert run.decoding_length is not None
            assert run.branch_length is not None
            cells[run.decoding_length, run.branch_length] = run
    return cells


def _at(cells: Cells, length: int, branch: int) -> Run:
    """The run of this setting, or that of the longest branch length measured below it, which is the same."""
    return cells[length, max(b for n, b in cells if n == length and b <= branch)]


def _finish(axis: Any, ticks: list[int], along: str, up: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel(along)
    axis.set_ylabel(up)
    bare(axis)
