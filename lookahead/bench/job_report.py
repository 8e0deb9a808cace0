"""A job as figures. In: the counts of its rows. Out: a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from lookahead.bench.plot import BLUE, GREY, INK, bare, drawing, from_zero, head
from lookahead.job.record import JobRecord, Part, title_of
from lookahead.printable import in_one_line

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
    spread.set_xlabel("EDL of a row")
    spread.set_ylabel("rows")
    parts = record.by_prompt_length()
    bars = by_length.bar([part.name.replace(" to ", "-") for part in parts], [part.counts.edl for part in parts], color=BLUE)
    by_length.bar_label(bars, [f"{part.counts.edl:.2f}\n{part.rows:,} rows" for part in parts], padding=2, fontsize=8)
    by_length.margins(y=0.2)
    by_length.tick_params(axis="x", labelsize=8, rotation=30 if len(parts) > 5 else 0)
    by_length.set_xlabel("prompt length (tokens)")
    by_length.set_ylabel("EDL")
    _draw_sources(by_source, record.by_time())
    for axis in (by_row, spread, by_length, by_source):
        bare(axis)
    if titled:
        head(figure, title_of(record))
    return figure


def _draw_rows(axis: Any, record: JobRecord) -> None:
    """A point a row, and the EDL of that many rows together."""
    rows = [(place, row) for place, row in enumerate(record.rows, 1) if row.edl is not None]
    timed = bool(rows) and rows[-1][1].ended is not None
    along = [row.ended if timed else place for place, row in rows]
    many = len(rows) > MANY  # then as pixels: a page with each as a shape of its own takes long to show
    axis.plot(
        along, [row.edl for _, row in rows], ".", color=GREY, markersize=1.5 if many else 4, label="a row", rasterized=many
    )  # fmt: skip
    window = max(WINDOW, len(rows) // 20)
    tokens = _over_window([row.counts.tokens - row.counts.first_tokens for _, row in rows], window)
    steps = _over_window([row.counts.steps for _, row in rows], window)
    axis.plot(along, tokens / np.maximum(1, steps), color=BLUE, linewidth=1.8, label=f"{window} rows together")
    axis.set_xlabel("seconds of answering" if timed else "rows")
    axis.set_ylabel("EDL")
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
    axis.set_xlabel("rows, as they were completed")
    axis.set_ylabel("accepted tokens per step")
    axis.margins(y=0.1)
    if names:
        axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), labelcolor=INK)
