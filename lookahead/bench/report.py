"""Figures of the pages of benches and jobs. In: measured runs, or the counts of a job's rows. Out: figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead.bench.plot import BLUE, GREY, INK, bare, comparison_figure, drawing, from_zero, head, shades, sweep_figure
from lookahead.job.record import JobRecord, Part, title_of
from lookahead.printable import in_one_line

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.run import Run


PARTS = {"draft": "#e08a1e", "forward": BLUE, "verify": "#2fa36b", "rest": GREY}  # of a run's time
MOST_SHOWN = 12  # runs in such a figure
DEEPEST = 32  # depth that the figure goes to


def figures_of(comparison: Comparison, swept: bool) -> Iterator[tuple[str, Any]]:
    batch = f"batch {comparison.batch_size}"
    if swept:
        yield f"Decoding and branch length, {batch}", sweep_figure([comparison])
    yield f"Speed and EDL, {batch}", comparison_figure([comparison], titled=False)
    if any(run.time_split for run in _shown(comparison)):
        yield f"Where the time went, {batch}", _time_figure(comparison)
    if any(run.counts.accepted_by_source for run in _shown(comparison)):
        yield f"Whose drafts were accepted, and how deep, {batch}", _accepted_figure(comparison)


def _time_figure(comparison: Comparison) -> Any:
    pyplot = drawing()
    known = [(run, run.time_split) for run in _shown(comparison)[::-1] if run.time_split]
    figure, axis = pyplot.subplots(figsize=(10, 0.34 * len(known) + 1.1), layout="constrained")
    begin = [0.0] * len(known)
    for part, colour in PARTS.items():
        shares = [100 * getattr(split, part) / run.seconds for run, split in known]
        axis.barh([run.name for run, _ in known], shares, left=begin, color=colour, label=part)
        begin = [left + share for left, share in zip(begin, shares, strict=True)]
    axis.set(xlabel="share of the time (%)", xlim=(0, 100))
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
    by_source.set(xlim=(0, 100), xlabel="share of accepted tokens by source (%)")
    by_source.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8)
    for run, colour in zip(runs, shades(len(runs), second=True), strict=True):
        found = [(depth, 100 * accepted / offered) for depth, offered, accepted in run.accepted_by_depth if depth <= DEEPEST]
        by_depth.plot([depth for depth, _ in found], [share for _, share in found], "-", color=colour, label=run.name)
    by_depth.set(xlabel="depth (draft tokens below the root)", ylabel="accepted (% of steps that deep)", ylim=(0, 100))
    by_depth.legend(frameon=False, fontsize=8)
    for axis in (by_source, by_depth):
        bare(axis)
    return figure


def _shown(comparison: Comparison) -> list[Run]:
    """Runs in the figures that show how each of them worked: where there are many, plain, auto and the fastest."""
    chosen = (comparison.runs[0], comparison.auto, comparison.best)
    return [run for run in comparison.runs if len(comparison.runs) <= MOST_SHOWN or run in chosen]


SOURCE_COLOURS = ("#2a6fdb", "#e08a1e", "#2fa36b", "#a05cc8", "#d0492f", "#4bb4c4", "#8c8c8c")
WINDOW = 20  # rows of the line through the rows' EDL, or a twentieth of them if that is more
MANY = 2000  # rows beyond which points are small


def job_figure(record: JobRecord, titled: bool = True) -> Any:
    """EDL of each row as it was completed, how many rows have which, by prompt length, and whose drafts were accepted."""
    pyplot = drawing()
    figure, ((by_row, spread), (by_length, by_source)) = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    _draw_rows(by_row, record)
    found = [row.edl for row in record.rows if row.edl is not None]
    spread.hist(found, bins=min(40, max(5, len(found) // 5)), color=BLUE)
    spread.set(xlabel="EDL of a row", ylabel="rows")
    parts = record.by_prompt_length()
    bars = by_length.bar([part.name.replace(" to ", "-") for part in parts], [part.counts.edl for part in parts], color=BLUE)
    by_length.bar_label(bars, [f"{part.counts.edl:.2f}\n{part.rows:,} rows" for part in parts], padding=2, fontsize=8)
    by_length.margins(y=0.2)
    by_length.tick_params(axis="x", labelsize=8, rotation=30 if len(parts) > 5 else 0)
    by_length.set(xlabel="prompt length (tokens)", ylabel="EDL")
    _draw_sources(by_source, record.by_time())
    for axis in (by_row, spread, by_length, by_source):
        bare(axis)
    if titled:
        head(figure, title_of(record))
    return figure


def _draw_rows(axis: Any, record: JobRecord) -> None:
    rows = [(number, row) for number, row in enumerate(record.rows, 1) if row.edl is not None]
    timed = bool(rows) and rows[-1][1].ended is not None
    along = [row.ended if timed else number for number, row in rows]
    many = len(rows) > MANY  # then as pixels: a page with each as a shape of its own takes long to show
    axis.plot(
        along, [row.edl for _, row in rows], ".", color=GREY, markersize=1.5 if many else 4, label="a row", rasterized=many
    )  # fmt: skip
    window = max(WINDOW, len(rows) // 20)
    tokens = _over_window([row.counts.tokens - row.counts.first_tokens for _, row in rows], window)
    steps = _over_window([row.counts.steps for _, row in rows], window)
    axis.plot(along, tokens / np.maximum(1, steps), color=BLUE, linewidth=1.8, label=f"{window} rows together")
    axis.set(xlabel="seconds of answering" if timed else "rows", ylabel="EDL")
    from_zero(axis)
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _over_window(values: Sequence[int], window: int) -> np.ndarray:
    """int64 [values]: the sum of each value and up to window - 1 before it."""
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    ends = np.arange(1, len(values) + 1)
    return sums[ends] - sums[np.maximum(0, ends - window)]


def _draw_sources(axis: Any, parts: Sequence[Part]) -> None:
    """Tokens gained per step by who drafted them, in parts of the job; what is left to 1 is the model's own."""
    counts = [part.counts.accepted_by_source for part in parts]
    names = [name for name, _ in sum(counts, Counter[str]()).most_common()]
    shown, others = names[: len(SOURCE_COLOURS) - 1], names[len(SOURCE_COLOURS) - 1 :]
    below = [0.0] * len(parts)
    for name, colour in zip([*shown, *(["others"] if others else [])], SOURCE_COLOURS, strict=False):
        members = others if name == "others" else [name]
        gained = []
        for count, part in zip(counts, parts, strict=True):
            gained.append(sum(count[member] for member in members) / max(1, part.counts.steps))
        axis.bar(range(len(parts)), gained, bottom=below, color=colour, label=in_one_line(name), width=0.85)
        below = [low + more for low, more in zip(below, gained, strict=True)]
    axis.set_xticks(range(len(parts)), [part.name.replace(" to ", "-") for part in parts], rotation=30, fontsize=8)
    axis.set(xlabel="rows, as they were completed", ylabel="accepted tokens per step")
    axis.margins(y=0.1)
    if names:
        axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), labelcolor=INK)
