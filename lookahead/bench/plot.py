"""Figures of a comparison as PNG. In: measured runs. Out: a file."""

from __future__ import annotations

import matplotlib

from lookahead.atomic import replacing
from lookahead.bench.compare import Comparison

matplotlib.use("Agg")  # draws files, needs no screen


def draw_comparison(comparison: Comparison, path: str) -> None:
    """Bars of tokens/s (labelled with the speedup) and EDL of every contender, atomically written to `path`."""
    from matplotlib import pyplot

    runs = comparison.runs[::-1]
    names = [run.name for run in runs]
    colours = ["#888888" if run.strategy in ("off", "peer") else "#2a6fdb" for run in runs]
    figure, (speed, length) = pyplot.subplots(1, 2, figsize=(10, 0.45 * len(runs) + 1.6), sharey=True, layout="constrained")
    bars = speed.barh(names, [run.tokens_per_second for run in runs], color=colours)
    speed.bar_label(bars, [f"{run.speedup:.2f}x" for run in runs], padding=3)
    speed.set_xlabel("tokens/s (label: speedup over plain)")
    bars = length.barh(names, [run.edl for run in runs], color=colours)
    length.bar_label(bars, fmt="%.2f", padding=3)
    length.set_xlabel("EDL (tokens per decode step)")
    for axis in (speed, length):
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{comparison.model}, {comparison.rows} prompts, {comparison.device}, {comparison.dtype}", fontsize=10)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
