"""Figures as PNG. In: measured runs, or EDL by size of a trie. Out: a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib

from lookahead.atomic import replacing
from lookahead.bench.coverage import Capacity
from lookahead.budget.profile import CDL_FACTOR, CostProfile

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison

matplotlib.use("Agg")  # draws files, needs no screen


def draw_comparisons(comparisons: Sequence[Comparison], path: str) -> None:
    """Bars of tokens/s (labelled with the speedup) and EDL of every contender, a row for each batch size, to `path`."""
    from matplotlib import pyplot

    runs_each = [len(comparison.runs) for comparison in comparisons]
    figure, rows = pyplot.subplots(
        len(comparisons), 2, figsize=(10, sum(0.45 * runs + 1.6 for runs in runs_each)), sharey="row", squeeze=False,
        layout="constrained", height_ratios=runs_each,
    )  # fmt: skip
    for comparison, (speed, length) in zip(comparisons, rows, strict=True):
        runs = comparison.runs[::-1]
        names = [run.name for run in runs]
        colours = ["#888888" if run.strategy in ("off", "peer") else "#2a6fdb" for run in runs]
        bars = speed.barh(names, [run.tokens_per_second for run in runs], color=colours)
        speed.bar_label(bars, [f"{run.speedup:.2f}x" for run in runs], padding=3)
        speed.set_xlabel("tokens/s (label: speedup over plain)")
        speed.set_title(f"batch {comparison.batch_size}", loc="left", fontsize=10)
        bars = length.barh(names, [run.edl for run in runs], color=colours)
        length.bar_label(bars, fmt="%.2f", padding=3)
        length.set_xlabel("EDL (tokens per decode step)")
        for axis in (speed, length):
            axis.margins(x=0.15)
            axis.spines[["top", "right"]].set_visible(False)
    first = comparisons[0]
    weights, asked = (" (random weights)", "logged answers") if first.forced else ("", "prompts")
    figure.suptitle(f"{first.model}{weights}, {first.rows} {asked}, {first.device}, {first.dtype}", fontsize=10)
    _save(figure, path)


def draw_capacity(curve: Sequence[Capacity], title: str, path: str) -> None:
    """EDL against the size of the trie, the first point being no trie at all; atomically written to `path`."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    cold, sizes = curve[0], curve[1:]
    axis.axhline(cold.edl, color="#888888", linestyle="--", linewidth=1)
    axis.annotate(f"no trie: {cold.edl:.2f}", (1, cold.edl), (-4, 4), axis.get_yaxis_transform(), "offset points", ha="right")
    axis.plot([c.tokens for c in sizes], [c.edl for c in sizes], "o-", color="#2a6fdb")
    for c in sizes:
        label = f"{c.edl:.2f}\n{c.bytes / 2**20:.3g} MiB"
        axis.annotate(label, (c.tokens, c.edl), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axis.set_xscale("log", base=2)
    axis.set_xticks([c.tokens for c in sizes], [_short(c.tokens) for c in sizes])
    axis.minorticks_off()
    axis.set_xlabel("tokens kept (the whole trie at the right)")
    axis.set_ylabel("EDL (tokens per decode step)")
    axis.margins(x=0.08, y=0.2)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def draw_profile(profile: CostProfile, path: str, rows: Sequence[int] = (1, 8, 32), context: int = 512) -> None:
    """Forward time against decoding length for several numbers of rows, each with its CDL, to `path`."""
    from matplotlib import pyplot

    figure, (time, share) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    lengths = [n for n in profile.tokens if n <= 128]
    for number, colour in zip(rows, ("#2a6fdb", "#d9822b", "#3f9b4f"), strict=False):
        seconds = [profile.forward_seconds(number * n, number, number * context) for n in lengths]
        label = f"{number} row{'s' * (number > 1)}, CDL {profile.cdl(number, context)}"
        time.plot(lengths, [each * 1e3 for each in seconds], "o-", color=colour, label=label, markersize=3)
        share.plot(lengths, [each / seconds[0] for each in seconds], "o-", color=colour, markersize=3)
    share.axhline(CDL_FACTOR, color="#888888", linestyle="--", linewidth=1)
    place, shift = (0, CDL_FACTOR), (4, 4)
    share.annotate(f"CDL: up to {CDL_FACTOR:g} times", place, shift, share.get_yaxis_transform(), "offset points")
    time.set_ylabel("forward (ms)")
    share.set_ylabel("forward / that of one token per row")
    for axis in (time, share):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks([n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= lengths[-1]])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("decoding length (tokens of each row in one forward)")
        axis.spines[["top", "right"]].set_visible(False)
    time.legend(frameon=False)
    about = profile.setting
    kind = "" if profile.kind == "measured" else f" ({profile.kind})"
    figure.suptitle(f"{about.model}, {about.device}, {about.dtype}, {context} tokens in the cache{kind}", fontsize=10)
    _save(figure, path)


def _short(count: int) -> str:
    """Tokens for people: 1536000 -> "1.54 M"."""
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _save(figure: Any, path: str) -> None:
    from matplotlib import pyplot

    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
