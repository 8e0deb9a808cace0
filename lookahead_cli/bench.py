"""lookahead bench: what drafts bring, measured."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.errors import UsageError
from lookahead.models.options import ModelOptions
from lookahead_cli.bench_engine import measured_in_engine
from lookahead_cli.bench_options import BENCHED, MODEL_OF_A_BENCH, OF_A_MODEL, BenchOptions, Outputs, on_screen
from lookahead_cli.comparison import show, show_schemes
from lookahead_cli.options import Config, Context, Json, LogFile, Overwrite, Verbose
from lookahead_cli.parameters import given, refuse, with_groups

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison


@with_groups
def command(
    model: Annotated[ModelOptions, MODEL_OF_A_BENCH],
    bench: Annotated[BenchOptions, BENCHED],
    overwrite: Overwrite = False,
    json: Json = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
    context: Context = None,  # type: ignore[assignment]
) -> None:
    """Measure plain decoding against every strategy and the Hugging Face peers: same prompts, same run, in turn.

    Example: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie

    Without a model (the same as bench --replay): lookahead replay logged.jsonl --trie answers.trie

    Real forwards, no weights: lookahead bench --replay logged.jsonl --model org/model --random-weights --batch-size 1,8

    Find the best lengths for this machine: lookahead bench --model org/model --input prompts.jsonl --sweep --plot sweep.png
    """
    if measured := measured_in_engine(context, model, bench):
        show(*measured, context)
        return
    from lookahead.bench.contenders import batch_sizes_of
    from lookahead.bench.logged import Logs
    from lookahead.files.outputs import Input

    replay, random_weights = bench.replay or (), bench.random_weights
    _check(context, model.model is not None, bool(replay), random_weights)
    logs = Logs(replay, bench.trie or (), bench.trie_weight, (), model.tokenizer, rows=bench.rows)
    models = Input("--model", [model.model and model.name], hub=True), Input("--adapter", [model.adapter], hub=True)
    files = Input("--input", [bench.input]), Input("--cost-profile", [bench.cost_profile]), Input("--config", [config])
    outputs = Outputs(
        json, bench.save, bench.plot, bench.report, overwrite, [*logs.reads("--replay"), *models, *files], log_file
    )
    if replay and not random_weights:
        from lookahead_cli.replay import run as run_replay

        run_replay(bench.replayed(logs), outputs, context)
        return
    from lookahead.bench.on_model import Look, ModelBench, bench_logged, bench_prompts, bench_schemes

    options, sizes = bench.contenders().options(timed=True), batch_sizes_of(bench.batch_size)
    outputs.check()
    model = dataclasses.replace(model, tokenizer=None) if replay else model
    compared = ModelBench(model, options, sizes, bench.peers, bench.repeat, bench.recycling, bench.checked_rows)
    events, about = on_screen(json), (bench.trie or (), bench.trie_weight, bench.max_new_tokens, bench.rows)

    def measure(compared: ModelBench, *look: Look) -> tuple[list[Comparison], list[str]]:
        if replay:
            return bench_logged(compared, logs, events, *look), []
        return bench_prompts(compared, str(bench.input), *about, events, *look)

    if "," in model.quantize + model.kv_dtype:
        show_schemes(*bench_schemes(compared, model.quantize, model.kv_dtype, measure), outputs)
    else:
        show(*measure(compared), bench.sweep, outputs, context)


def _check(context: typer.Context, model: bool, replay: bool, random_weights: bool) -> None:
    """Raise UsageError for options that do not go together. An option that is given as its default is given."""
    values = context.params
    if random_weights and not (model and replay):
        raise UsageError("--random-weights needs --model NAME_OR_DIR (a config.json is enough) and --replay PAIRS.")
    if not random_weights and model == replay:
        raise UsageError(
            "give either --model with --input, or --replay PAIRS (with --model only for --random-weights). "
            "To try without either: lookahead demo"
        )
    if values["recycling"] and (values["sweep"] or not model):
        raise UsageError("--recycling compares runs on a model (--model), and not in a --sweep.")
    if values["cost_profile"] and (random_weights or not replay):
        raise UsageError("--cost-profile stands in for a model in --replay: leave out --model and --random-weights.")
    if "," in values["quantize"] + values["kv_dtype"] and any(values[name] for name in ("sweep", "plot", "report")):
        raise UsageError("several of --quantize or --kv-dtype make one table: leave out --sweep, --plot and --report.")
    if random_weights:
        if values["exact"]:
            raise UsageError("--random-weights compares no answers, so --exact has nothing to make sure: leave it out.")
        if values["adapter"]:
            raise UsageError("--random-weights has no weights to merge an --adapter into: leave it out; it costs nothing.")
        if values["baselines"] or given(context, "input", "explain", "max_new_tokens") or len(values["replay"]) > 1:
            raise UsageError(
                "--random-weights takes one --replay, and neither --input, --max-new-tokens, --baselines nor --explain."
            )
        if values["check_lossless"]:
            raise UsageError("--check-lossless: with --random-weights the answers are given, there is nothing to compare.")
    elif replay:
        refuse(context, "--replay runs no model", *OF_A_MODEL)
    elif values["input"] is None or values["baselines"]:
        raise UsageError("--model needs --input prompts.jsonl and takes no --baselines.")
    elif values["explain"]:
        raise UsageError("--explain is for --replay; to watch a model: lookahead generate --explain ROWS.")
