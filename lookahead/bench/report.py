"""The figures of a bench's page. In: measured runs. Out: figures, each with its title."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lookahead.bench.plot import BLUE, GREY, bare, comparison_figure, drawing, shades
from lookahead.bench.sweep import sweep_figure
from lookahead.printable import in_one_line

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.run import Run

PARTS = {"draft": "#e08a1e", "forward": BLUE, "verify": "#2fa36b", "rest": GREY}  # of a run's time
MOST_SHOWN = 12  # runs in such a figure
DEEPEST = 32  # depth that the figure goes to


def figures_of(comparison: Comparison, swept: bool) -> Iterator[tuple[str, Any]]:
    """swept: the runs are those of a sweep."""
    batch = f"batch {comparison.batch_size}"
    if swept:
        yield f"Decoding and branch length, {batch}", sweep_figure([comparison])
    yield f"Speed and EDL, {batch}", comparison_figure([comparison], titled=False)
    if any(run.time_split for run in _shown(comparison)):
        yield f"Where the time went, {batch}", _time_figure(comparison)
    if any(run.counts.accepted_by_source for run in _shown(comparison)):
        yield f"Whose drafts were accepted, and how deep, {batch}", _accepted_figure(comparison)


def _time_figure(comparison: Comparison) -> Any:
    """Bars of the shares of time."""
    pyplot = drawing()

    known = [(run, run.time_split) for run in _shown(comparison)[::-1] if run.time_split]
    figure, axis = pyplot.subplots(figsize=(10, 0.34 * len(known) + 1.1), layout="constrained")
    begin = [0.0] * len(known)
    for part, colour in PARTS.items():
        shares = [100 * getattr(split, part) / run.seconds for run, split in known]
        axis.barh([run.name for run, _ in known], shares, left=begin, color=colour, label=part)
        begin = [left + share for left, share in zip(begin, shares, strict=True)]
    axis.set_xlabel("share of the time (%)")
    axis.set_xlim(0, 100)
    axis.margins(y=0.02)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    bare(axis)
    return figure


def _accepted_figure(comparison: Comparison) -> Any:
    """Bars of accepted tokens by source; of the steps that drafted so deep, the share in which that was accepted."""
    pyplot = drawing()

    runs = [run for run in _shown(comparison) if run.counts.accepted_by_source]
    sources = list(dict.fromkeys(source for run in runs for source, _ in run.counts.accepted_by_source.most_common()))
    figure, (by_source, by_depth) = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    begin = [0.0] * len(runs)
    for source, colour in zip(sources, shades(len(sources)), strict=True):
        shares = [100 * run.counts.accepted_by_source[source] / sum(run.counts.accepted_by_source.values()) for run in runs]
        by_source.barh([run.name for run in runs], shares, left=begin, color=colour, label=in_one_line(source))
        begin = [left + share for left, share in zip(begin, shares, strict=True)]
    by_source.invert_yaxis()
    by_source.set_xlim(0, 100)
    by_source.set_xlabel("share of accepted tokens by source (%)")
    by_source.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8)
    for run, colour in zip(runs, shades(len(runs), second=True), strict=True):
        found = [(depth, 100 * accepted / offered) for depth, offered, accepted in run.accepted_by_depth if depth <= DEEPEST]
        by_depth.plot([depth for depth, _ in found], [share for _, share in found], "-", color=colour, label=run.name)
    by_depth.set_xlabel("depth (draft tokens below the root)")
    by_depth.set_ylabel("accepted (% of steps that deep)")
    by_depth.set_ylim(0, 100)
    by_depth.legend(frameon=False, fontsize=8)
    for axis in (by_source, by_depth):
        bare(axis)
    return figure


def _shown(comparison: Comparison) -> list[Run]:
    """Runs in the figures that show how each of them worked: where there are many, plain, auto and the fastest."""
    chosen = (comparison.runs[0], comparison.auto, comparison.best)
    return [run for run in comparison.runs if len(comparison.runs) <= MOST_SHOWN or run in chosen]
