"""Print benches and replays: tables, verdict on losslessness, environment; replays of workloads side by side, or swept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lookahead.printable import shares, size
from lookahead_cli import render
from lookahead_cli.bench_options import write

if TYPE_CHECKING:
    import typer

    from lookahead.bench.compare import Comparison
    from lookahead.bench.logged import WorkloadReplay
    from lookahead.bench.on_model import Scheme
    from lookahead.bench.options import BenchOptions
    from lookahead.bench.replay import ReplayResult

NARROWEST = 6  # characters of a workload's column: an EDL of two digits before the point
BUSY = 0.05  # share of the time that threads waited for a core, from which on a user is warned


def show(
    context: typer.Context,
    value: dict[str, Any],
    comparisons: Sequence[Comparison],
    bench: BenchOptions,
    json: bool,
    failed: Sequence[str] = (),
    replays: Sequence[WorkloadReplay] = (),
) -> None:
    """Print and write what was measured, or replayed. failed: what is wrong with rows that were left out."""
    from lookahead.bench import plot
    from lookahead.bench.page import bench_page

    if json:
        render.print_json(value)
    else:
        if replays:
            (print_sweeps if bench.sweep else print_replays)(replays)
        for comparison in comparisons:
            print_comparison(comparison, bench.sweep)
    _notify_left_out(failed)
    figure = None
    if bench.plot and comparisons:
        figure = (plot.sweep_figure if bench.sweep else plot.comparison_figure)(comparisons)
    elif bench.plot:
        figure = plot.replay_sweep_figure(replays)
    write(bench, value, figure, bench_page(comparisons, context.obj, failed, bench.sweep) if bench.report else "")


def _notify_left_out(rows: Sequence[str]) -> None:
    for problem in rows:
        render.notice(f"left out {problem}")


def show_schemes(schemes: list[Scheme], failed: list[str], bench: BenchOptions, json: bool) -> None:
    """The same of a model in several quantizations: one table for each batch size."""
    value = {"schemes": [each.as_json() for each in schemes]}
    if json:
        render.print_json(value)
    for number, comparison in enumerate(() if json else schemes[0].comparisons):
        render.table(
            f"{comparison.model} ({comparison.dtype}), {comparison.rows} rows, batch {comparison.batch_size}, tokens/s",
            ["weights", "KV", "plain", "drafts", "EDL", "same", "memory", "KV/token", "loss"],
            [_scheme_row(scheme, scheme.comparisons[number]) for scheme in schemes],
            left=2,
        )
    _notify_left_out(failed)
    write(bench, value)


def _scheme_row(scheme: Scheme, comparison: Comparison) -> tuple[str, ...]:
    best, kept, checked = comparison.best, scheme.kv_bytes_per_token, comparison.lossless
    return (
        *(scheme.quantize, scheme.kv_dtype),
        *(f"{comparison.runs[0].tokens_per_second:.1f}", f"{best.tokens_per_second:.1f}", f"{best.edl:.2f}"),
        f"{checked.identical}/{checked.checked}" if checked else "-",
        *(size(scheme.weight_bytes), size(kept) if kept else "-"),
        "-" if scheme.loss is None else f"{scheme.loss:.4f}",
    )


def print_comparison(comparison: Comparison, swept: bool = False) -> None:
    """See `comparison_parts`."""
    from lookahead.bench.report import comparison_parts
    from lookahead.job.record import Table

    for part in comparison_parts(comparison, swept):
        if isinstance(part, Table):
            render.table(part.title, part.columns, part.rows, part.left)
        else:
            render.out.print(part)
    if (waited := comparison.environment.get("waited_for_cores") or 0) > BUSY:
        render.notice(
            f"the machine was busy: threads waited for a core in {waited:.0%} of the time that they had work. Figures that are "
            "taken while other processes run are not reliable: stop those, or set OMP_NUM_THREADS lower, and repeat."
        )


def print_replays(replays: Sequence[WorkloadReplay]) -> None:
    """Tables of one workload, or of several side by side."""
    from lookahead.bench.replay import BASELINES

    if len(replays) == 1:
        _print_one(replays[0])
    else:
        _print_several(replays)
    if any(result.strategy in BASELINES for result in replays[0].results):
        render.out.print("The baselines are plain Python: compare their EDL, not their microseconds.")


def _print_one(replay: WorkloadReplay) -> None:
    from lookahead.bench.logged import label

    render.table(
        f"replay of {replay.rows:,} rows, {replay.tokens:,} tokens (no model)",
        ["strategy", "start", "length", "EDL", "drafted", "draft us", "p99", "update\nus"],
        [
            (
                *(r.strategy, r.start, r.decoding_length, f"{r.edl:.2f}", f"{r.draft_tokens_per_step:.1f}"),
                *map(_microseconds, r.as_json()["draft_us"].values()),
                _microseconds(r.as_json()["update_us"]["p50"]),
            )
            for r in replay.results
        ],
        left=2,
    )
    best = max(replay.results, key=lambda r: r.edl)
    if listed := shares(best.accepted_by_source):
        name = label(best.strategy, best.decoding_length, best.start)
        render.out.print(f"accepted by source ({name}): {listed}")


def _print_several(replays: Sequence[WorkloadReplay]) -> None:
    """EDL: a line per contender and start, a column per workload; more tables than one where the screen is too narrow."""
    from lookahead.bench.logged import geometric_means, label

    lines: dict[str, dict[str, ReplayResult]] = {}  # by label; the results by workload, warm ones first
    of_all = [(each.name, r) for each in replays for r in each.results]
    for name, r in sorted(of_all, key=lambda pair: pair[1].start != "warm"):
        lines.setdefault(label(r.strategy, r.decoding_length, r.start), {})[name] = r
    means = {label(r.strategy, r.decoding_length, r.start): edl for r, edl in geometric_means(replays)}
    room = render.width() - (1 + max(map(len, lines)) + 3 + len("geom.") + 1)  # columns are 3 apart
    across = math.ceil(len(replays) / math.ceil(len(replays) / max(1, room // (NARROWEST + 3))))
    rows, tokens = sum(each.rows for each in replays), sum(each.tokens for each in replays)
    for begin in range(0, len(replays), across):
        shown = [each.name for each in replays[begin : begin + across]]
        columns = [_best_in_bold([of[each].edl if each in of else None for of in lines.values()]) for each in shown]
        names = [render.folded(each, max(NARROWEST, room // len(shown) - 3)) for each in shown]
        if begin + across >= len(replays):
            columns.append(_best_in_bold([means.get(line) for line in lines]))
            names.append("geom.\nmean")
        render.table(
            f"EDL: replay of {len(replays)} workloads, {rows:,} rows, {tokens:,} tokens (no model)",
            ["strategy", *names],
            list(zip(lines, *columns, strict=True)),
        )
    render.table(
        "drafts (mean of the workloads)",
        ["strategy", "drafted", "draft us", "p99"],
        [
            (
                line,
                f"{fmean(r.draft_tokens_per_step for r in found.values()):.1f}",
                *(_microseconds(fmean(r.as_json()["draft_us"][which] for r in found.values())) for which in ("p50", "p99")),
            )
            for line, found in lines.items()
        ],
    )


def _best_in_bold(values: Sequence[float | None]) -> list[Any]:
    """Cells of a column; the best, and what prints as the best does, in bold; "-" where there is nothing."""
    best = f"{max((value for value in values if value is not None), default=0):.2f}"
    cells = ["-" if value is None else f"{value:.2f}" for value in values]
    return [render.bold(cell) if cell == best else cell for cell in cells]


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def print_sweeps(replays: Sequence[WorkloadReplay]) -> None:
    """Print for each workload, strategy and start two tables over both lengths: EDL; draft tokens and draft time."""
    from lookahead.bench.plot import draft_us, grids

    sizes = {replay.name: f"{replay.rows:,} rows, {replay.tokens:,} tokens" for replay in replays}
    for grid in grids(replays):
        branches = [f"branch\nlength {branch}" for branch in grid.branches]
        for what, cell in (
            ("EDL", lambda result: f"{result.edl:.2f}"),
            ("draft tokens per step | draft us (median)", lambda r: f"{r.draft_tokens_per_step:.1f} | {draft_us(r):.0f}"),
        ):
            render.table(
                f"{what}: {grid.workload}, {grid.strategy}, {grid.start}, replay of {sizes[grid.workload]} (no model)",
                ["decoding length", *branches],
                [
                    (str(n), *(cell(grid.at(n, b)) if (n, b) in grid.cells else "" for b in grid.branches))
                    for n in grid.lengths
                ],
            )  # fmt: skip
        best = grid.best
        render.out.print(
            f"highest EDL {best.edl:.2f}: decoding length {best.decoding_length}, branch length {best.branch_length}"
        )
