"""Print benches and replays: tables, verdict on losslessness, environment; replays of workloads side by side, or swept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lookahead_cli import render

if TYPE_CHECKING:
    import typer

    from lookahead.bench.compare import Comparison
    from lookahead.bench.logged import WorkloadReplay
    from lookahead.bench.lossless import Divergence
    from lookahead.bench.on_model import Scheme
    from lookahead.bench.replay import ReplayResult
    from lookahead.bench.run import Run
    from lookahead_cli.bench_options import BenchOptions

NARROWEST = 6  # characters of a workload's column: an EDL of two digits before the point
SHOWN = 5  # divergences below a table
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
    bench.write(value, figure, page_of(comparisons, context.obj, failed, bench.sweep) if bench.report else "")


def _notify_left_out(rows: Sequence[str]) -> None:
    for problem in rows:
        render.notice(f"left out {problem}")


def page_of(comparisons: Sequence[Comparison], command_line: str, problems: Sequence[str], sweep: bool) -> str:
    """Return what `print_comparison` prints, and figures, as one HTML page. problems: rows that were left out."""
    from lookahead.bench.report import figures_of

    figures = (figure for comparison in comparisons for figure in figures_of(comparison, sweep))
    with render.on_page(f"lookahead bench: {comparisons[0].model}", figures) as page:
        for each in comparisons:
            run = each.auto or each.best
            render.out.print(f"{run.speedup:.2f}x plain decoding ({run.name}, batch {each.batch_size})\n", style="bold")
            print_comparison(each, sweep, whole=True)
            render.out.print()
        render.facts([("command", command_line), *((name, str(value)) for name, value in comparisons[0].environment.items())])
        for problem in problems:
            render.out.print(f"left out {problem}")
        return page()


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
    bench.write(value)


def _scheme_row(scheme: Scheme, comparison: Comparison) -> tuple[str, ...]:
    best, kept, checked = comparison.best, scheme.kv_bytes_per_token, comparison.lossless
    return (
        *(scheme.quantize, scheme.kv_dtype),
        *(f"{comparison.runs[0].tokens_per_second:.1f}", f"{best.tokens_per_second:.1f}", f"{best.edl:.2f}"),
        f"{checked.identical}/{checked.checked}" if checked else "-",
        *(render.size(scheme.weight_bytes), render.size(kept) if kept else "-"),
        "-" if scheme.loss is None else f"{scheme.loss:.4f}",
    )


def print_comparison(comparison: Comparison, swept: bool = False, whole: bool = False) -> None:
    """Tables of speed and of where the time went, who and how deep was accepted, verdict on losslessness, environment.

    swept: also how auto compares with the best fixed setting. whole: for a page, with memory and divergences of each run.
    """
    from lookahead.bench.plot import title_of

    repeats = f", median of {comparison.repeats} repeats" if comparison.repeats > 1 else ""
    render.table(
        f"{title_of(comparison)}, batch {comparison.batch_size}{repeats}",
        ["decoding", "tokens/s", "speedup", "quartiles", "EDL", "drafted", "wasted", *(["peak MiB"] if whole else [])],
        [
            (
                run.name,
                f"{run.tokens_per_second:.1f}",
                f"{run.speedup:.2f}x",
                "{:.2f}-{:.2f}".format(*run.speedup_spread) if run is not comparison.runs[0] else "",
                f"{run.edl:.2f}",
                f"{run.counts.draft_tokens_per_step:.1f}",
                f"{run.draft_tokens_wasted / max(1, run.steps):.1f}",
                *([f"{run.peak_memory_bytes / 2**20:,.0f}" if run.peak_memory_bytes else "-"] if whole else []),
            )
            for run in comparison.runs
        ],
    )
    _print_time(comparison.runs)
    if swept:
        from lookahead.bench.plot import in_words

        render.out.print(in_words(comparison))
    best, checked, about = comparison.best, comparison.lossless, comparison.environment
    render.accepted_by_source(best.name, best.counts.accepted_by_source)
    render.accepted_by_depth(best.name, best.accepted_by_depth)
    if checked:
        first = comparison.lossless_rows
        of_first = f" (first {first} of {comparison.rows} prompts; all: --check-lossless)" if first < comparison.rows else ""
        render.out.print(f"lossless: {checked}{of_first}")
        shown = checked.shown if whole else checked.shown[:SHOWN]
        for each in shown:
            render.out.print(_where(each))
        if len(checked.divergences) > len(shown):
            render.out.print(f"... and {len(checked.divergences) - len(shown)} more (--json shows 20)")
    if comparison.predicted:
        values = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items() if name != "cost_profile")
        render.out.print(f"predicted from a cost profile ({about['cost_profile']}): {values}")
        return
    memory = f"peak memory {render.size(max(run.peak_memory_bytes for run in comparison.runs))}"
    last = f"{comparison.mode} {about[comparison.mode]}" if comparison.mode in about else memory  # of an engine, its version
    loaded = f"torch {about['torch']}, transformers {about['transformers']}"
    render.out.print(f"{about['processor']}, {about['threads']} threads, {loaded}, {last}")
    if (waited := about.get("waited_for_cores") or 0) > BUSY and not whole:
        render.notice(
            f"the machine was busy: threads waited for a core in {waited:.0%} of the time that they had work. Figures that are "
            "taken while other processes run are not reliable: stop those, or set OMP_NUM_THREADS lower, and repeat."
        )


def _print_time(runs: Sequence[Run]) -> None:
    """Print where the time of our own runs went."""
    rows = []
    for run in runs:
        if split := run.time_split:
            shares = (f"{getattr(split, part) / run.seconds:.1%}" for part in ("draft", "forward", "verify", "rest"))
            draft = f"{split.draft / max(1, run.steps) * 1e6:.0f}" if run.drafts else "-"
            rows.append((run.name, *shares, draft, f"{forward_ms:.2f}" if (forward_ms := run.forward_ms()) else "-"))
    if rows:
        columns = ["decoding", "draft", "forward", "verify", "rest", "draft us", "forward ms"]
        render.table("where the time went (draft us: per row and step; forward ms: median)", columns, rows)


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
    render.accepted_by_source(label(best.strategy, best.decoding_length, best.start), best.accepted_by_source)


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
    from lookahead.bench.plot import draft_us, drafted, grids

    sizes = {replay.name: f"{replay.rows:,} rows, {replay.tokens:,} tokens" for replay in replays}
    for grid in grids(replays):
        branches = [f"branch\nlength {branch}" for branch in grid.branches]
        for what, cell in (
            ("EDL", lambda result: f"{result.edl:.2f}"),
            ("draft tokens per step | draft us (median)", lambda result: f"{drafted(result):.1f} | {draft_us(result):.0f}"),
        ):
            render.table(
                f"{what}: {grid.workload}, {grid.strategy}, {grid.start}, replay of {sizes[grid.workload]} (no model)",
                ["decoding length", *branches],
                [
                    (str(n), *(cell(grid.at(n, b)) if grid.measured(n, b) else "" for b in grid.branches))
                    for n in grid.lengths
                ],
            )  # fmt: skip
        best = grid.best
        render.out.print(
            f"highest EDL {best.edl:.2f}: decoding length {best.decoding_length}, branch length {best.branch_length}"
        )
