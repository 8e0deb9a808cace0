"""lookahead bench: what drafts bring, measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.bench.options import BenchOptions
from lookahead.errors import UsageError
from lookahead.models.options import ModelOptions
from lookahead_cli.bench_options import BENCHED, MODEL_OF_A_BENCH, OF_A_MODEL, bench_on, check_files
from lookahead_cli.comparison import show, show_schemes
from lookahead_cli.options import Common, Some, given, refuse, with_groups
from lookahead_cli.progress import BenchOnScreen
from lookahead_cli.replay import run as run_replay

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.contenders import ModelBench
    from lookahead.files.outputs import Input

NOT_COMPARED = ("replay", "random_weights", "cost_profile", "sweep", "recycling", "baselines", "explain")


@with_groups
def command(
    context: typer.Context,
    model: Annotated[ModelOptions, MODEL_OF_A_BENCH],
    bench: Annotated[BenchOptions, BENCHED],
    common: Annotated[Common, Some()],
) -> None:
    """Measure plain decoding against every strategy and the Hugging Face peers: same prompts, same run, in turn.

    Example: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie

    Without a model (the same as bench --replay): lookahead replay logged.jsonl --trie answers.trie

    Real forwards, no weights: lookahead bench --replay logged.jsonl --model org/model --random-weights --batch-size 1,8

    Find the best lengths for this machine: lookahead bench --model org/model --input prompts.jsonl --sweep --plot sweep.png
    """
    from lookahead.bench.contenders import options_of
    from lookahead.bench.logged import files_read
    from lookahead.files.outputs import Input

    models = Input("--model", [model.model and model.name], hub=True), Input("--adapter", [*model.adapters.values()], hub=True)
    logs = dataclasses.replace(bench, pairs=bench.replay, tokenizer=model.tokenizer)
    reads = [*files_read(logs, "--replay"), *models, Input("--input", [bench.input])]
    if model.engine != "hf" or model.engine_arg:
        _bench_in_engine(context, model, bench, common, reads)
        return
    _check(context, model, bench)
    if bench.replay and not bench.random_weights:
        run_replay(context, logs, common, reads)
        return
    from lookahead.bench.compare import as_json
    from lookahead.bench.on_model import Look, bench_logged, bench_prompts, bench_schemes

    model = dataclasses.replace(model, tokenizer=None) if bench.replay else model
    compared, events = bench_on(model, bench, options=options_of(bench, timed=True)), BenchOnScreen(common.json)
    check_files(bench, common, reads)

    def measure(compared: ModelBench, *look: Look) -> tuple[list[Comparison], list[str]]:
        if bench.replay:
            return bench_logged(compared, logs, events, *look), []
        return bench_prompts(compared, str(bench.input), events, *look)

    if "," in model.quantize + model.kv_dtype:
        show_schemes(*bench_schemes(compared, measure), bench, common.json)
    else:
        comparisons, failed = measure(compared)
        show(context, as_json(comparisons), comparisons, bench, common.json, failed)


def _bench_in_engine(
    context: typer.Context, model: ModelOptions, bench: BenchOptions, common: Common, reads: Sequence[Input]
) -> None:
    """Bench in another engine than ours. Raises UsageError for an unknown one, and for options that it does not have."""
    from lookahead.bench.compare import as_json
    from lookahead.bench.contenders import contenders
    from lookahead.bench.in_engine import bench_in_engine
    from lookahead.job.plan import check_other_engine, engine_args

    engine = model.engine
    check_other_engine(model, ())
    if not (model.model and bench.input):
        raise UsageError(f"--engine {engine} needs --model NAME_OR_DIR and --input prompts.jsonl.")
    refuse(context, f"--engine {engine} answers prompts, and compares nothing else", *NOT_COMPARED)
    check_other_engine(model, [name for name in context.params if given(context, name)])
    engine_args(model.engine_arg or ())  # refuses what is wrong with them before any file is looked at
    measured = bench_on(model, bench, contenders=contenders(engine, bench))
    check_files(bench, common, reads)
    comparisons, failed = bench_in_engine(measured, str(bench.input), BenchOnScreen(common.json))
    show(context, as_json(comparisons), comparisons, bench, common.json, failed)


def _check(context: typer.Context, model: ModelOptions, bench: BenchOptions) -> None:
    """Raise UsageError for options that do not go together. An option that is given as its default is given."""
    has_model, several = model.model is not None, "," in model.quantize + model.kv_dtype
    if bench.random_weights and not (has_model and bench.replay):
        raise UsageError("--random-weights needs --model NAME_OR_DIR (a config.json is enough) and --replay PAIRS.")
    if not bench.random_weights and has_model == bool(bench.replay):
        raise UsageError(
            "give either --model with --input, or --replay PAIRS (with --model only for --random-weights). "
            "To try without either: lookahead demo"
        )
    if bench.recycling and (bench.sweep or not has_model):
        raise UsageError("--recycling compares runs on a model (--model), and not in a --sweep.")
    if bench.cost_profile and (bench.random_weights or not bench.replay):
        raise UsageError("--cost-profile stands in for a model in --replay: leave out --model and --random-weights.")
    if several and (bench.sweep or bench.plot or bench.report):
        raise UsageError("several of --quantize or --kv-dtype make one table: leave out --sweep, --plot and --report.")
    if bench.random_weights:
        if model.exact:
            raise UsageError("--random-weights compares no answers, so --exact has nothing to make sure: leave it out.")
        if model.adapter:
            raise UsageError("--random-weights has no weights to merge an --adapter into: leave it out; it costs nothing.")
        if bench.baselines or given(context, "input", "explain", "max_new_tokens") or len(bench.replay or ()) > 1:
            raise UsageError(
                "--random-weights takes one --replay, and neither --input, --max-new-tokens, --baselines nor --explain."
            )
        if bench.check_lossless:
            raise UsageError("--check-lossless: with --random-weights the answers are given, there is nothing to compare.")
    elif bench.replay:
        refuse(context, "--replay runs no model", *OF_A_MODEL)
    elif bench.input is None or bench.baselines:
        raise UsageError("--model needs --input prompts.jsonl and takes no --baselines.")
    elif bench.explain:
        raise UsageError("--explain is for --replay; to watch a model: lookahead generate --explain ROWS.")
