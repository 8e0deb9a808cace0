"""lookahead bench --engine vllm or sglang: its options, read from the command's own, and the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from lookahead.errors import UsageError
from lookahead.models.options import ModelOptions
from lookahead_cli.bench_options import BenchOptions, Outputs, on_screen
from lookahead_cli.parameters import given, refuse

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison

ENGINES = ("hf", "vllm", "sglang")
NOT_COMPARED = ("replay", "random_weights", "cost_profile", "sweep", "recycling", "baselines", "explain")


def measured_in_engine(
    context: typer.Context, model: ModelOptions, bench: BenchOptions
) -> tuple[list[Comparison], list[str], bool, Outputs] | None:
    """Measure in another engine than ours, if one is named. Returns what `bench.show` takes.

    Raises UsageError for an unknown engine and for options that it does not have.
    """
    engine, arguments = model.engine, model.engine_arg
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: choose {', '.join(ENGINES[:-1])} or {ENGINES[-1]}.")
    if engine == "hf":
        if arguments:
            raise UsageError("--engine-arg is of vLLM and SGLang: name it with --engine vllm or sglang.")
        return None
    _check(context, engine)
    return _measured(context, model, bench)


def _check(context: typer.Context, engine: str) -> None:
    """Raise UsageError for options that an engine does not have, or that are of another kind of bench."""
    from lookahead.job.plan import INSTEAD

    if not (context.params["model"] and context.params["input"]):
        raise UsageError(f"--engine {engine} needs --model NAME_OR_DIR and --input prompts.jsonl.")
    refuse(context, f"--engine {engine} answers prompts, and compares nothing else", *NOT_COMPARED)
    for name, instead in INSTEAD[engine].items():
        if name in context.params and (flags := given(context, name)):
            raise UsageError(f"--engine {engine} has no {flags[0]}{f': {instead}' if instead else ''}.")


def _measured(
    context: typer.Context, model: ModelOptions, bench: BenchOptions
) -> tuple[list[Comparison], list[str], bool, Outputs]:
    from lookahead.bench.contenders import batch_sizes_of
    from lookahead.job.plan import engine_args

    arguments, sizes = engine_args(model.engine_arg or ()), batch_sizes_of(bench.batch_size)
    outputs = _outputs(context.params)
    from lookahead.bench.contenders import EngineBench, contenders

    lengths = bench.decoding_length, bench.branch_length
    compared = contenders(model.engine, bench.strategy, *lengths, bench.session_tokens, bench.price, bench.peers)
    outputs.check()
    from lookahead.bench.in_engine import bench_in_engine

    measured = EngineBench(model.engine, model, compared, sizes, bench.repeat, bench.checked_rows, arguments)
    drafting = bench.trie or (), bench.trie_weight
    events = on_screen(outputs.json)
    found = bench_in_engine(measured, str(bench.input), *drafting, bench.max_new_tokens, bench.rows, events)
    return *found, False, outputs


def _outputs(asked: dict[str, Any]) -> Outputs:
    from lookahead.files.outputs import Input

    reads = [Input("--model", [asked["model"]], hub=True), Input("--input", [asked["input"]])]
    reads += [Input("--trie", asked["trie"] or ()), Input("--config", [asked["config"]])]
    written = asked["save"], asked["plot"], asked["report"]
    return Outputs(asked["json"], *written, asked["overwrite"], reads, asked["log_file"])
