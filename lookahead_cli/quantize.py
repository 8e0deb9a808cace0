"""lookahead quantize: a model whose linear layers have 8 or 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.bench.options import QuantizeOptions
from lookahead.errors import UsageError
from lookahead.models.options import ModelOptions
from lookahead_cli import render
from lookahead_cli.options import Common, Some, given, with_groups
from lookahead_cli.progress import BenchOnScreen

if TYPE_CHECKING:
    from lookahead.bench.quantized import QuantizeReport

WORST = 5  # layers that are shown


@with_groups
def command(
    context: typer.Context,
    model: Annotated[ModelOptions, Some("model gguf_file revision trust_remote_code")],
    options: Annotated[QuantizeOptions, Some()],
    common: Annotated[Common, Some("json log_file verbose config")],
) -> None:
    """Quantize a model's linear layers, and write it as a folder that generate, bench and transformers load.

    The format is pack-quantized of compressed-tensors. Weights are read and written one by one, so a model larger than memory
    can be quantized; comparing it (--text) and calibrating (--calibration) load it. Answers of the quantized model are the same
    with drafts and without.

    Example: lookahead quantize --model org/model -o model-int4 --weights int4 --text held-out.jsonl

    Next: lookahead bench --model model-int4 --input prompts.jsonl
    """
    from lookahead.bench.quantized import quantize
    from lookahead.files.outputs import Input

    if model.model is None or not options.out:
        raise UsageError("name a model and a new folder: --model org/name or a folder, -o DIR.")
    if options.text is None and options.calibration is None and given(context, "rows"):
        raise UsageError("--rows is of texts to compare or calibrate on: --text FILE, --calibration FILE.")
    if options.activations != "mixed" and given(context, "loss_budget"):
        raise UsageError("--loss-budget is of --activations mixed.")
    files = Input("--text", [options.text]), Input("--calibration", [options.calibration])
    common.check([], [Input("--model", [model.name], hub=True), *files])
    report = quantize(model, options, BenchOnScreen(common.json))
    if common.json:
        render.print_json(report.as_json())
    else:
        show(report)


def show(report: QuantizeReport) -> None:
    """Sizes, the layers that lose most, and what that costs."""
    from lookahead.bench.quantized import divergence

    written, options = report.written, report.options
    errors = sorted(written.layers, key=lambda layer: -layer.error)
    render.facts(
        [
            ("written", f"{options.out}, {len(written.layers)} layers in {options.weights}"),
            ("weights", f"{render.size(written.bytes_after)}, {written.bytes_after / written.bytes_before:.2f} of before"),
        ]
    )
    if report.mixed is not None:
        mixed, cost = report.mixed, report.mixed.loss - report.mixed.loss_in_8_bits
        cost_of_4 = f"{cost:+.4f} nats a token of {options.calibration}"
        render.facts([("tokens", f"{mixed.share:.0%} of {mixed.blocks} blocks in 8 bits, others in 4: {cost_of_4}")])
    render.table(
        "Layers that rounding changes most", ["layer", "bits", "RMS error"],
        [(layer.name, layer.bits, f"{layer.error:.2%}") for layer in errors[:WORST]],
    )  # fmt: skip
    if (before := report.before) and (after := report.after):
        answers = divergence(before, after)
        change = f"{before.loss:.4f} to {after.loss:.4f} ({after.loss - before.loss:+.4f}) nats a token"
        apart = ""
        if answers.text is not None and answers.token is not None:
            apart = f"; that of text {answers.text + 1} differs first, at token {answers.token + 1}"
        render.facts(
            [
                ("loss", f"{change}, on {before.tokens:,} tokens of {options.text}"),
                ("perplexity", f"{before.perplexity:.3f} to {after.perplexity:.3f}"),
                ("answers", f"{answers.identical} of {answers.answers} greedy ones stay the same{apart}"),
            ]
        )
    render.out.print(f"Next: lookahead bench --model {options.out} --input prompts.jsonl")
