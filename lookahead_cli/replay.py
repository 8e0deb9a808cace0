"""bench --replay: logged answers, of one or more workloads without a model or on one. Reading, running, printing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from lookahead.bench.compare import Comparison
    from lookahead.bench.replay import ReplayResult
    from lookahead.bench.workloads import Contender, Workload, WorkloadReplay
    from lookahead.budget.profile import CostProfile
    from lookahead.draft.drafter import DraftOptions

NARROWEST = 6  # characters of a workload's column: an EDL of two digits before the point


def replay_all(workloads: list[Workload], options: list[DraftOptions], baselines: bool) -> list[WorkloadReplay]:
    """Replay each workload with each of `options`, and with `baselines` at the same decoding lengths."""
    from lookahead.bench.baselines import BASELINES
    from lookahead.bench.workloads import replay_workloads
    from lookahead_cli import render

    contenders: list[Contender] = [(None, option) for option in options]
    if baselines:
        at_each_length = {option.decoding_length: option for option in options}.values()
        contenders += [(name, option) for name in BASELINES for option in at_each_length]
    compile_for(workloads, options[0])
    runs = len(contenders) * sum(len(workload.starts) for workload in workloads)
    with render.progress("replaying", runs) as update:
        return replay_workloads(workloads, contenders, progress=lambda done: update(done, "runs"))


def fixed(options: list[DraftOptions]) -> list[DraftOptions]:
    """Those that need no costs; if there are none, the first at its longest."""
    return [option for option in options if not option.adaptive] or [dataclasses.replace(options[0], adaptive=False)]


def predict_all(
    profile: CostProfile,
    workloads: list[Workload],
    options: list[DraftOptions],
    batch_sizes: Sequence[int],
    repeats: int,
    value: dict[str, Any],
    shown: bool,
) -> list[Comparison]:
    """What a bench with forwards of these costs would show, for each workload and batch size.

    It goes into `value`, the JSON of the replays: "predicted" of each workload, and the speedup of each strategy.
    """
    from lookahead.bench.compare import as_json
    from lookahead.bench.planner import predict
    from lookahead_cli import render

    found: list[Comparison] = []
    for workload, told in zip(workloads, value.get("workloads", [value]), strict=True):
        of_this: list[Comparison] = []
        for size in batch_sizes:
            with render.progress(f"predicting, batch {size}", len(workload.pairs) * repeats, shown=shown) as update:
                of_this.append(
                    predict(
                        profile, workload.pairs, workload.tries, options, workload.weights, size, repeats,
                        lambda n, update=update: update(n, "answers"),  # type: ignore[misc]
                    )
                )  # fmt: skip
        if len(workloads) > 1:
            of_this = [dataclasses.replace(each, model=f"{workload.name} on {each.model}") for each in of_this]
        start = "warm" if workload.tries else "cold"
        for run in of_this[0].runs[1:]:
            for strategy in told["strategies"]:
                lengths = strategy["strategy"], strategy["decoding_length"], strategy["branch_length"], strategy["start"]
                if not run.adaptive and lengths == (run.strategy, run.decoding_length, run.branch_length, start):
                    strategy["predicted_speedup"] = round(run.speedup, 4)
        told["predicted"] = as_json(of_this)
        found += of_this
    return found


def explain_rows(workloads: list[Workload], option: DraftOptions, tokenizer: Any | None, rows: int, console: Console) -> None:
    """Show each step of the first rows of each workload, warm if it has tries: what they are in the replay of all rows."""
    from lookahead.bench.replay import replay
    from lookahead_cli.explain import Explainer

    compile_for(workloads, option)
    for workload in workloads:
        start = "warm" if workload.tries else "cold"
        explainer = Explainer(
            console, tokenizer, rows, f"{workload.name}, {_label(option.strategy, option.decoding_length, start)}, "
        )
        pairs = workload.pairs[:rows]
        replay(pairs, workload.tries, option, weights=workload.weights, observer_of=explainer.observer_of)


def compile_for(workloads: list[Workload], option: DraftOptions) -> None:
    """Have all kernels compiled, so that no draft waits for it."""
    from lookahead.draft.drafter import Drafter
    from lookahead_cli import render

    def compile_kernels() -> None:
        for workload in workloads:
            Drafter(workload.tries, option).warm_up()

    render.patiently(compile_kernels, render.COMPILING)


def read_workloads(
    paths: list[str],
    tries: list[str],
    weights: list[str] | None,
    tokenizer: str | None,
    rows: int | None,
    shape: Any | None = None,
) -> tuple[list[Workload], Any | None]:
    """(a workload for each file of pairs, the tokenizer if one is named)

    shape: text config of the model that the pairs are replayed on, which they and the tries must fit.
    """
    import time
    from itertools import islice

    from lookahead.bench.workloads import Workload
    from lookahead.errors import UsageError
    from lookahead.job.pairs import replay_pairs
    from lookahead.trie.file import names_of
    from lookahead_cli.options import open_tries, trie_weights

    twice = [path for number, path in enumerate(paths) if path in paths[:number]]
    if twice:
        raise UsageError(f"--replay {twice[0]}: is given twice.")
    names = names_of(paths)
    tries_of = tries_of_each(tries, names)
    loaded = None
    if tokenizer is not None:
        from lookahead.tokenizer import identity, load_tokenizer

        loaded = load_tokenizer(tokenizer)
        whose = identity(loaded, tokenizer)
    opened, build_seconds = [], []
    for name in names:
        began = time.perf_counter()
        opened.append(open_tries(tries_of[name]))
        build_seconds.append(time.perf_counter() - began)
    workloads = []
    of_each = zip(paths, names, opened, build_seconds, trie_weights(weights, opened), strict=True)
    for path, name, some, seconds, weights_of_some in of_each:
        if tokenizer is not None:
            for trie in some:
                trie.check_tokenizer(whose.fingerprint, whose.vocab_size, tokenizer)
        limits: dict[str, int] = {}
        if shape is not None:
            from lookahead.decode.model import longest_text

            limits = {"vocab_size": shape.vocab_size, "longest": longest_text(shape)}
            for trie in some:
                trie.check_tokenizer("", max(shape.vocab_size, whose.vocab_size if loaded else 0), "the model")
        pairs = list(islice(replay_pairs(path, loaded, **limits), rows))
        workloads.append(Workload(name, pairs, some, seconds, weights_of_some))
    return workloads, loaded


def replay_on(
    model: str,
    path: str,
    tries: list[str],
    weights: list[str] | None,
    options: list[DraftOptions],
    tokenizer: str | None,
    rows: int | None,
    dtype: str,
    device: str,
    attention: str | None,
    batch_sizes: Sequence[int],
    peers: bool,
    repeats: int,
    shown: bool,
    recycling: bool = False,
) -> list[Comparison]:
    """Replay logged answers on a model of random weights; one comparison for each batch size."""
    from lookahead.bench.compare import compare
    from lookahead.decode.model import random_model, read_config
    from lookahead_cli import render

    shape = read_config(model).get_text_config(decoder=True)
    workloads, _ = read_workloads([path], tries, weights, tokenizer, rows, shape)
    (workload,) = workloads
    compile_for(workloads, options[0])
    target = random_model(model, dtype, device, attention)
    if target.mode != "packed":
        render.notice(f"{model} verifies by {target.mode}: {target.reason}")
    prompts, answers = [prompt for prompt, _ in workload.pairs], [answer for _, answer in workload.pairs]
    comparisons = []
    for size in batch_sizes:
        with render.progress(f"replaying, batch {size}", len(prompts) * repeats, shown=shown) as update:
            comparisons.append(
                compare(
                    target,
                    prompts,
                    workload.tries,
                    options,
                    peers=peers,
                    progress=lambda n, update=update: update(n, "answers"),  # type: ignore[misc]
                    weights=workload.weights,
                    batch_size=size,
                    answers=answers,
                    repeats=repeats,
                    recycling=recycling,
                )
            )
    return comparisons


def tries_of_each(tries: list[str], names: list[str]) -> dict[str, list[str]]:
    """Paths of each workload's tries: FILE is for all workloads, NAME=FILE for that of this name.

    A file whose own name holds "=" is a FILE. Raises UsageError for a NAME that no workload has.
    """
    from lookahead.errors import UsageError

    paths: dict[str, list[str]] = {name: [] for name in names}
    for trie in tries:
        if "=" not in trie or Path(trie).exists():
            for each in paths.values():
                each.append(trie)
            continue
        named = [name for name in names if trie.startswith(f"{name}=")]
        if not named:
            name = trie.partition("=")[0]
            raise UsageError(f'--trie {trie}: no workload is named "{name}" (known: {", ".join(names)}).')
        longest = max(named, key=len)
        paths[longest].append(trie.removeprefix(f"{longest}="))
    return paths


def print_replays(replays: list[WorkloadReplay]) -> None:
    """Tables of one workload, or of several side by side."""
    from lookahead.bench.baselines import BASELINES
    from lookahead_cli import render

    if len(replays) == 1:
        _print_one(replays[0])
    else:
        _print_edl(replays)
        _print_cost(replays)
    if any(result.strategy in BASELINES for result in replays[0].results):
        render.out.print("The baselines are plain Python: compare their EDL, not their microseconds.", markup=False)


def _print_one(replay: WorkloadReplay) -> None:
    from lookahead_cli import render

    render.table(
        f"replay of {replay.rows:,} rows, {replay.tokens:,} tokens (no model)",
        ["strategy", "start", "length", "EDL", "drafted", "draft us", "p99", "update\nus"],
        [
            (
                r.strategy,
                r.start,
                r.decoding_length,
                f"{r.edl:.2f}",
                f"{r.draft_tokens / max(1, r.steps):.1f}",
                *map(_microseconds, r.as_json()["draft_us"].values()),
                _microseconds(r.as_json()["update_us"]["p50"]),
            )
            for r in replay.results
        ],
        left=2,
    )
    best = max(replay.results, key=lambda r: r.edl)
    render.accepted_by_source(_label(best.strategy, best.decoding_length, best.start), best.accepted_by_source)


def _print_edl(replays: list[WorkloadReplay]) -> None:
    """EDL: a line per contender and start, a column per workload; more tables than one where the screen is too narrow."""
    from lookahead.bench.workloads import geometric_means
    from lookahead_cli import render

    lines = _lines(replays)
    means = {_label(mean.strategy, mean.decoding_length, mean.start): mean.edl for mean in geometric_means(replays)}
    room = render.width() - (1 + max(map(len, lines)) + 3 + len("geom.") + 1)  # columns are 3 apart
    tables = math.ceil(len(replays) / max(1, room // (NARROWEST + 3)))
    across = math.ceil(len(replays) / tables)
    rows, tokens = sum(each.rows for each in replays), sum(each.tokens for each in replays)
    for begin in range(0, len(replays), across):
        shown = replays[begin : begin + across]
        columns = [_best_in_bold([_edl(lines[line], each) for line in lines]) for each in shown]
        names = [render.folded(each.name, max(NARROWEST, room // len(shown) - 3)) for each in shown]
        if begin + across >= len(replays):
            columns.append(_best_in_bold([means.get(line) for line in lines]))
            names.append("geom.\nmean")
        render.table(
            f"EDL: replay of {len(replays)} workloads, {rows:,} rows, {tokens:,} tokens (no model)",
            ["strategy", *names],
            [(line, *cells) for line, *cells in zip(lines, *columns, strict=True)],
        )


def _print_cost(replays: list[WorkloadReplay]) -> None:
    from lookahead_cli import render

    render.table(
        "drafts (mean of the workloads)",
        ["strategy", "drafted", "draft us", "p99"],
        [
            (
                line,
                f"{_mean(r.draft_tokens / max(1, r.steps) for r in results):.1f}",
                *(_microseconds(_mean(r.as_json()["draft_us"][which] for r in results)) for which in ("p50", "p99")),
            )
            for line, results in ((line, list(found.values())) for line, found in _lines(replays).items())
        ],
    )


def _lines(replays: list[WorkloadReplay]) -> dict[str, dict[str, ReplayResult]]:
    """Label of each contender and start -> its result by workload, warm ones first."""
    lines: dict[str, dict[str, ReplayResult]] = {}
    for start in ("warm", "cold"):
        for each in replays:
            for r in each.results:
                if r.start == start:
                    lines.setdefault(_label(r.strategy, r.decoding_length, start), {})[each.name] = r
    return lines


def _label(strategy: str, decoding_length: int, start: str) -> str:
    return f"{strategy} {decoding_length} {start}"


def _edl(found: dict[str, ReplayResult], replay: WorkloadReplay) -> float | None:
    return found[replay.name].edl if replay.name in found else None


def _best_in_bold(values: Sequence[float | None]) -> list[str]:
    """Cells of a column; the best, and what prints as the best does, in bold; "-" where there is nothing."""
    from lookahead_cli import render

    best = f"{max((value for value in values if value is not None), default=0):.2f}"
    cells = ["-" if value is None else f"{value:.2f}" for value in values]
    return [render.bold(cell) if cell == best else cell for cell in cells]


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
