"""What pages and terminals show of benches, and figures of benches and jobs. In: measured runs, or counts of a job's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead.bench.plot import (
    BLUE,
    GREY,
    INK,
    bare,
    comparison_figure,
    drawing,
    from_zero,
    head,
    in_words,
    shades,
    sweep_figure,
)
from lookahead.bench.plot import title_of as title_of_bench
from lookahead.job.record import LENGTHS, JobRecord, Part, Table, name_of, title_of
from lookahead.printable import in_one_line, shares, size

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.lossless import Divergence
    from lookahead.bench.run import Run, TimeSplit


PARTS = {"draft": "#e08a1e", "forward": BLUE, "verify": "#2fa36b", "rest": GREY}  # of a run's time
MOST_SHOWN = 12  # runs in such a figure
DIVERGENCES = 5  # below a table on a terminal
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # that are listed of all
DEEPEST = 32  # depth that the figure goes to


def comparison_parts(comparison: Comparison, swept: bool = False, whole: bool = False) -> Iterator[Table | str]:
    """Tables of speed and of where the time went, who and how deep was accepted, verdict on losslessness, environment.

    swept: also how auto compares with the best fixed setting. whole: for a page, with memory and divergences of each run.
    """
    repeats = f", median of {comparison.repeats} repeats" if comparison.repeats > 1 else ""
    yield Table(
        f"{title_of_bench(comparison)}, batch {comparison.batch_size}{repeats}",
        ["decoding", "tokens/s", "speedup", "quartiles", "EDL", "drafted", "wasted", *(["peak MiB"] if whole else [])],
        [_of_run(run, run is comparison.runs[0], whole) for run in comparison.runs],
    )
    if timed := [(run, run.time_split) for run in comparison.runs if run.time_split]:
        columns = ["decoding", *PARTS, "draft us", "forward ms"]
        rows = [_of_split(run, split) for run, split in timed]
        yield Table("where the time went (draft us: per row and step; forward ms: median)", columns, rows)
    if swept:
        yield in_words(comparison)
    best, checked, about = comparison.best, comparison.lossless, comparison.environment
    if by_source := shares(best.counts.accepted_by_source):
        yield f"accepted by source ({best.name}): {by_source}"
    if depths := best.accepted_by_depth:
        listed = (f"{depth} {accepted / offered:.0%}" for depth, offered, accepted in depths if depth in DEPTHS)
        yield f"accepted by depth ({best.name}): {', '.join(listed)}"
    if checked:
        first = comparison.lossless_rows
        of_first = f" (first {first} of {comparison.rows} prompts; all: --check-lossless)" if first < comparison.rows else ""
        yield f"lossless: {checked}{of_first}"
        shown = checked.shown if whole else checked.shown[:DIVERGENCES]
        yield from map(_where, shown)
        if len(checked.divergences) > len(shown):
            yield f"... and {len(checked.divergences) - len(shown)} more (--json shows 20)"
    if comparison.predicted:
        values = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items() if name != "cost_profile")
        yield f"predicted from a cost profile ({about['cost_profile']}): {values}"
        return
    memory = f"peak memory {size(max(run.peak_memory_bytes for run in comparison.runs))}"
    last = f"{comparison.mode} {about[comparison.mode]}" if comparison.mode in about else memory  # of an engine, its version
    loaded = f"torch {about['torch']}, transformers {about['transformers']}"
    yield f"{about['processor']}, {about['threads']} threads, {loaded}, {last}"


def _of_run(run: Run, is_plain: bool, whole: bool) -> tuple[str, ...]:
    peak = [f"{run.peak_memory_bytes / 2**20:,.0f}" if run.peak_memory_bytes else "-"] if whole else []
    spread = "" if is_plain else "{:.2f}-{:.2f}".format(*run.speedup_spread)
    drafted = f"{run.counts.draft_tokens_per_step:.1f}", f"{run.draft_tokens_wasted / max(1, run.steps):.1f}"
    return run.name, f"{run.tokens_per_second:.1f}", f"{run.speedup:.2f}x", spread, f"{run.edl:.2f}", *drafted, *peak


def _of_split(run: Run, split: TimeSplit) -> tuple[str, ...]:
    """Shares of a run's time, and of its steps what drafts (us) and forwards (ms) took."""
    draft = f"{split.draft / max(1, run.steps) * 1e6:.0f}" if run.drafts else "-"
    forward = f"{forward_ms:.2f}" if (forward_ms := run.forward_ms()) else "-"
    return run.name, *(f"{getattr(split, part) / run.seconds:.1%}" for part in PARTS), draft, forward


def _where(found: Divergence) -> str:
    """One line: where an output left plain decoding's."""
    where = f"{found.kind}: prompt {found.row}, {found.run}, after {found.place} tokens"
    if found.expected is None or found.got is None:
        return f"{where}: one answer continues, the other has ended"
    if found.got_score is found.expected_score is found.tolerance is None:
        return f"{where}: token {found.got} for {found.expected}, not judged"
    scores = [f"{score:.6g}" if score is not None else "not finite" for score in (found.got_score, found.expected_score)]
    near = f"{found.tolerance:.2g}" if found.tolerance is not None else "-"
    return f"{where}: token {found.got} ({scores[0]}) for {found.expected} ({scores[1]}), within rounding up to {near}"


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
PARTS_OF_TIME, MOST_POINTS = 24, 100  # of a job, as bars and along a line
NAMED, NAME_LENGTH = 3, 24  # slowest rows whose ids are drawn, and characters of these

Panels = dict[str, list[tuple[str, Callable[[Any, JobRecord], None]]]]


def panels(record: JobRecord) -> Panels:
    """What there is to draw about a job, on an axis each, by what it is about: (title, draw)."""
    drafts = record.totals.draft_tokens > 0
    timed, slowest = _timed(record) and record.totals.tokens > 0, record.slowest()
    of: Panels = {"time": [], "sources": [], "drafts": [], "lengths": []}
    if record.speedup_over_time:
        of["time"].append(("Speedup over plain decoding, so far in each run", _draw_speedup))
    if timed:
        of["time"].append(("Tokens of answers", _draw_tokens))
    if record.totals.accepted_tokens:
        of["sources"].append(("Accepted tokens per step, by source", _draw_sources))
    if drafts:
        of["drafts"] += [("EDL of each row", _draw_rows), ("Draft tokens that were accepted", _draw_accepted)]
    if drafts and record.totals.steps:
        of["lengths"] += [(f"EDL by {each} length", partial(_draw_lengths, of=each)) for each in LENGTHS]
    if slowest:
        of["lengths"] += [(f"Seconds of each row, by {each} length", partial(_draw_seconds, of=each)) for each in LENGTHS]
    return of


def job_figure(record: JobRecord) -> Any:
    """All panels of a job in one figure."""
    pyplot = drawing()
    drawn = [panel for some in panels(record).values() for panel in some]
    lines = max(1, (len(drawn) + 1) // 2)
    figure, axes = pyplot.subplots(lines, 2, figsize=(11, 3.4 * lines), layout="constrained", squeeze=False)
    for axis in axes.flat[len(drawn) :]:
        axis.axis("off")
    for axis, panel in zip(axes.flat, drawn, strict=False):
        _draw_panel(axis, record, *panel)
    head(figure, title_of(record))
    return figure


def panel_figure(record: JobRecord, draw: Callable[[Any, JobRecord], None]) -> Any:
    """One panel, small enough for a narrow page."""
    figure, axis = drawing().subplots(figsize=(5.2, 3), layout="constrained")
    _draw_panel(axis, record, "", draw)
    return figure


def _draw_panel(axis: Any, record: JobRecord, title: str, draw: Callable[[Any, JobRecord], None]) -> None:
    draw(axis, record)
    axis.set_title(title, loc="left", fontsize=10, color=INK)
    bare(axis)


def _draw_speedup(axis: Any, record: JobRecord) -> None:
    for number, points in enumerate(record.speedup_over_time):
        seconds, low, high = (np.array(values) for values in zip(*points, strict=True))
        label = "two standard deviations" if not number else None
        axis.fill_between(seconds, low, high, color=BLUE, alpha=0.3, linewidth=0, label=label)
        axis.plot(seconds, (low + high) / 2, ".-" if len(points) < WINDOW else "-", color=BLUE, linewidth=1.8)
    axis.axhline(1, color=GREY, linestyle="--", linewidth=1, label="plain decoding")
    axis.set(xlabel="seconds of answering", ylabel="times as fast")
    from_zero(axis)
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _draw_tokens(axis: Any, record: JobRecord) -> None:
    """Tokens so far, whose slope is the speed. Those of a row count when it is written, which may be after later rows end."""
    parts = record.by_time(MOST_POINTS)
    tokens = np.cumsum([part.counts.tokens for part in parts])
    axis.plot([0, *(part.ended for part in parts)], [0, *tokens], color=BLUE, linewidth=1.8)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set(xlabel="seconds of answering", ylabel="tokens so far")
    from_zero(axis)


def _draw_accepted(axis: Any, record: JobRecord) -> None:
    _steps(axis, record, lambda part: 100 * part.counts.accepted_tokens / max(1, part.counts.draft_tokens))
    axis.set(ylabel="accepted (% of draft tokens)")


def _draw_lengths(axis: Any, record: JobRecord, of: str) -> None:
    parts = record.by_length(of)
    bars = axis.bar([part.name.replace(" to ", "-") for part in parts], [part.counts.edl for part in parts], color=BLUE)
    many = len(parts) > 5
    rows = ["" if many else f"\n{part.rows:,} row{'s' * (part.rows > 1)}" for part in parts]
    axis.bar_label(bars, [f"{bar:.2f}{row}" for bar, row in zip(bars.datavalues, rows, strict=True)], padding=2, fontsize=8)
    axis.margins(y=0.25)
    axis.tick_params(axis="x", labelsize=8, rotation=30 if many else 0)
    axis.set(xlabel=f"{of} length (tokens)", ylabel="EDL")


def _draw_seconds(axis: Any, record: JobRecord, of: str) -> None:
    """By prompt length also names of the slowest rows; by answer length, often the same for many, they would overlap."""
    rows = [row for row in record.rows if row.seconds is not None and row.counts.steps]
    _points(axis, [row.length(of) for row in rows], [row.seconds for row in rows], BLUE)
    for row in record.slowest(NAMED) if of == "prompt" else ():
        name = (name_of(row) or f"row {row.number}")[:NAME_LENGTH]
        at = row.length(of), row.seconds
        axis.annotate(name, at, (-5, 3), textcoords="offset points", ha="right", fontsize=8, color=INK)
    axis.set(xlabel=f"{of} length (tokens)", ylabel="seconds of a row")
    from_zero(axis)


def _draw_rows(axis: Any, record: JobRecord) -> None:
    rows = [(number, row) for number, row in enumerate(record.rows, 1) if row.edl is not None]
    timed = _timed(record)
    along = [row.ended if timed else number for number, row in rows]
    _points(axis, along, [row.edl for _, row in rows], GREY, "a row")
    window = max(WINDOW, len(rows) // 20)
    tokens = _over_window([row.counts.tokens - row.counts.first_tokens for _, row in rows], window)
    steps = _over_window([row.counts.steps for _, row in rows], window)
    axis.plot(along, tokens / np.maximum(1, steps), color=BLUE, linewidth=1.8, label=f"{window} rows together")
    axis.set(xlabel=_along(record), ylabel="EDL")
    from_zero(axis)
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _points(axis: Any, along: Sequence[Any], values: Sequence[Any], colour: str, label: str | None = None) -> None:
    many = len(values) > MANY  # then as pixels: a page with each as a shape of its own takes long to show
    axis.plot(along, values, ".", color=colour, markersize=1.5 if many else 4, label=label, rasterized=many)


def _over_window(values: Sequence[int], window: int) -> np.ndarray:
    """int64 [values]: the sum of each value and up to window - 1 before it."""
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    ends = np.arange(1, len(values) + 1)
    return sums[ends] - sums[np.maximum(0, ends - window)]


def _draw_sources(axis: Any, record: JobRecord) -> None:
    """Tokens gained per step by who drafted them, in parts of the job; what is left to 1 is the model's own."""
    names = [name for name, _ in record.totals.accepted_by_source.most_common()]
    shown, others = names[: len(SOURCE_COLOURS) - 1], names[len(SOURCE_COLOURS) - 1 :]
    groups = {**{name: [name] for name in shown}, **({"others": others} if others else {})}
    below: Any = 0
    for (name, members), colour in zip(groups.items(), SOURCE_COLOURS, strict=False):

        def gained(part: Part, members: Sequence[str] = members) -> float:
            return sum(part.counts.accepted_by_source[member] for member in members) / max(1, part.counts.steps)

        below = _steps(axis, record, gained, below, colour, in_one_line(name))
    axis.set(ylabel="accepted tokens per step")
    axis.margins(y=0.1)
    axis.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, labelcolor=INK, borderpad=0)


def _steps(
    axis: Any, record: JobRecord, value: Callable[[Part], float], below: Any = 0, colour: str = BLUE, label: str | None = None
) -> np.ndarray:
    """Draw a value of each part of the job, on top of what is `below`; returns the top."""
    parts = record.by_time(PARTS_OF_TIME)
    ends = [part.ended for part in parts] if _timed(record) else np.cumsum([part.rows for part in parts])
    top = np.array([value(part) for part in parts]) + below
    axis.stairs(top, [0, *ends], baseline=below, fill=True, color=colour, label=label, alpha=0.85)
    axis.set(xlabel=_along(record))
    return top


def _timed(record: JobRecord) -> bool:
    return bool(record.rows and record.rows[-1].ended)


def _along(record: JobRecord) -> str:
    return "seconds of answering" if _timed(record) else "rows, as they were completed"
