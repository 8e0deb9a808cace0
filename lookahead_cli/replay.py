"""bench --replay: logged answers of one or more workloads, replayed without a model. Reading, running, printing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookahead.bench.replay import ReplayResult
    from lookahead.bench.workloads import Contender, Workload, WorkloadReplay
    from lookahead.draft.drafter import DraftOptions

NARROWEST = 6  # characters of a workload's column: an EDL of two digits before the point


def replay_files(
    paths: list[str],
    tries: list[str],
    options: list[DraftOptions],
    baselines: bool,
    tokenizer: str | None,
    rows: int | None,
) -> list[WorkloadReplay]:
    """Replay each file with each of `options`, and with `baselines` at the same decoding lengths."""
    from lookahead.bench.baselines import BASELINES
    from lookahead.bench.workloads import replay_workloads
    from lookahead.draft.drafter import Drafter
    from lookahead_cli import render

    workloads = _read(paths, tries, tokenizer, rows)
    contenders: list[Contender] = [(None, option) for option in options]
    if baselines:
        at_each_length = {option.decoding_length: option for option in options}.values()
        contenders += [(name, option) for name in BASELINES for option in at_each_length]

    def compile_kernels() -> None:
        for workload in workloads:
            Drafter(workload.tries, options[0]).warm_up()

    render.patiently(compile_kernels, render.COMPILING)
    runs = len(contenders) * sum(len(workload.starts) for workload in workloads)
    with render.progress("replaying", runs) as update:
        return replay_workloads(workloads, contenders, progress=lambda done: update(done, "runs"))


def _read(paths: list[str], tries: list[str], tokenizer: str | None, rows: int | None) -> list[Workload]:
    import time
    from itertools import islice

    from lookahead.bench.workloads import Workload, names_of
    from lookahead.errors import UsageError
    from lookahead.job.rows import replay_pairs
    from lookahead_cli.options import open_tries

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
    workloads = []
    for path, name in zip(paths, names, strict=True):
        began = time.perf_counter()
        opened = open_tries(tries_of[name])
        build_seconds = time.perf_counter() - began
        if tokenizer is not None:
            for trie in opened:
                trie.check_tokenizer(whose.fingerprint, whose.vocab_size, tokenizer)
        workloads.append(Workload(name, list(islice(replay_pairs(path, loaded), rows)), opened, build_seconds))
    return workloads


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
