"""lookahead replay: what drafts bring on logged answers, without a model. Also what `bench --replay` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead.errors import UsageError
from lookahead_cli.bench_options import REPLAYED, BenchOptions, Outputs, Pairs, figure_of, on_screen
from lookahead_cli.options import Config, Context, Json, LogFile, Overwrite, Verbose
from lookahead_cli.parameters import given, with_groups

if TYPE_CHECKING:
    from lookahead.bench.logged import ReplayReport, ReplaySpec


@with_groups
def command(
    bench: Annotated[BenchOptions, REPLAYED],
    pairs: Pairs = None,
    overwrite: Overwrite = False,
    json: Json = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
    context: Context = None,  # type: ignore[assignment]
) -> None:
    """Replay logged answers: tokens per decode step (EDL) and draft time, without a model.

    Reads logs of prompts and answers of any system, or the output of lookahead generate. Writes nothing unless asked to.

    Example: lookahead replay logged.jsonl --trie answers.trie

    The output of a job: lookahead replay out.jsonl --prompts prompts.jsonl --trie answers.trie

    EDL against decoding and branch length: lookahead replay logged.jsonl --trie answers.trie --sweep --plot sweep.png

    Several workloads: lookahead replay faq.jsonl code.jsonl --trie faq=faq.trie --trie code=code.trie --baselines

    Other hardware: lookahead replay logged.jsonl --trie answers.trie --cost-profile llama-7b-h200

    Next: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie
    """
    from lookahead.bench.logged import Logs
    from lookahead.files.outputs import Input

    if not pairs:
        raise UsageError("name a file of logged answers: lookahead replay logged.jsonl. To try without one: lookahead demo")
    if bench.system and bench.chat is False:
        raise UsageError("--system is for chat prompts: leave --no-chat out.")
    asked = bench.prompts or (), bench.tokenizer, bench.chat, bench.system, bench.rows, bench.prompt_field, bench.template
    logs = Logs(pairs, bench.trie or (), bench.trie_weight, *asked)
    reads = [*logs.reads("LOG"), Input("--cost-profile", [bench.cost_profile]), Input("--config", [config])]
    run(bench.replayed(logs), Outputs(json, bench.save, bench.plot, bench.report, overwrite, reads, log_file), context)


def run(spec: ReplaySpec, outputs: Outputs, context: typer.Context) -> None:
    """Replay, print and write what was asked for; with a cost profile also the predicted speed."""
    from lookahead.bench.logged import replay_logs
    from lookahead_cli import render
    from lookahead_cli.comparison import page_of, print_comparison
    from lookahead_cli.replay_tables import print_replays, print_sweeps

    sweep = spec.contenders.sweep
    spec.options()  # refuses what is wrong with them before any file is looked at
    outputs.check()
    if spec.cost_profile is None and (
        given(context, "report", "repeat", "batch_size") or (outputs.plot is not None and not sweep)
    ):
        raise UsageError(
            "--replay runs no model: --report, --repeat and --batch-size need --cost-profile, or bench with --model and "
            "--random-weights; --plot needs one of these or --sweep."
        )
    if spec.cost_profile is not None and len(spec.logs.paths) > 1 and (outputs.plot or outputs.report):
        raise UsageError("--plot and --report with --cost-profile show one workload: give one log.")
    found = replay_logs(spec, on_screen(outputs.json))
    if outputs.json:
        render.print_json(found.value)
    else:
        (print_sweeps if sweep else print_replays)(found.replays)
        for comparison in found.comparisons:
            print_comparison(comparison, sweep)
    outputs.keep(found.value, lambda: _figure(found, sweep), lambda: page_of(found.comparisons, context.obj, (), sweep))


def _figure(found: ReplayReport, sweep: bool) -> Any:
    """Of predicted speeds where there are any, else of the replays of a sweep."""
    from lookahead.bench.plot import replay_sweep_figure

    return figure_of(found.comparisons, sweep) if found.comparisons else replay_sweep_figure(found.replays)
