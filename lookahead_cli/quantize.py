"""lookahead quantize: a model whose linear layers have 8 or 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.models.options import ModelOptions
from lookahead_cli.options import Config, Context, Json, LogFile, Verbose
from lookahead_cli.parameters import Some, given, with_groups

if TYPE_CHECKING:
    from lookahead.bench.quantized import QuantizeReport

WORST = 5  # layers that are shown


@with_groups
def command(
    model: Annotated[ModelOptions, Some("model gguf_file revision trust_remote_code")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Folder to write; it must not exist.")] = "",
    weights: Annotated[
        str, typer.Option("--weights", metavar="SCHEME", help="int8, or int4 (groups of 64; the output layer int8).")
    ] = "int8",
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="FILE", help="Corpus file: report what quantizing costs on its texts."),
    ] = None,
    activations: Annotated[
        str,
        typer.Option(
            "--activations",
            metavar="SCHEME",
            help="int8, mixed (4 bits, blocks of channels with outliers 8), or none (weights only).",
        ),
    ] = "int8",
    calibration: Annotated[
        str | None,
        typer.Option("--calibration", metavar="FILE", help="Corpus file or trie to round weights on; mixed needs it."),
    ] = None,
    loss_budget: Annotated[
        float, typer.Option("--loss-budget", min=0, metavar="NATS", help="With mixed: loss per token that 4 bits may add.")
    ] = 0.03,
    pack_embedding: Annotated[
        bool,
        typer.Option("--pack-embedding", help="Write the embedding in 8 or 4 bits, too: our commands alone load the folder."),
    ] = False,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Texts of --text and --calibration.")] = 64,
    json: Json = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
    context: Context = None,  # type: ignore[assignment]
) -> None:
    """Quantize a model's linear layers, and write it as a folder that generate, bench and transformers load.

    The format is pack-quantized of compressed-tensors. Weights are read and written one by one, so a model larger than memory
    can be quantized; comparing it (--text) and calibrating (--calibration) load it. Answers of the quantized model are the same
    with drafts and without.

    Example: lookahead quantize --model org/model -o model-int4 --weights int4 --text held-out.jsonl

    Next: lookahead bench --model model-int4 --input prompts.jsonl
    """
    from lookahead.bench.quantized import QuantizeSpec, quantize
    from lookahead.errors import UsageError
    from lookahead.files.outputs import Input, Output, check_outputs
    from lookahead_cli import render
    from lookahead_cli.bench_options import on_screen

    if model.model is None or not out:
        raise UsageError("name a model and a new folder: --model org/name or a folder, -o DIR.")
    if text is None and calibration is None and given(context, "rows"):
        raise UsageError("--rows is of texts to compare or calibrate on: --text FILE, --calibration FILE.")
    if activations != "mixed" and given(context, "loss_budget"):
        raise UsageError("--loss-budget is of --activations mixed.")
    files = [Input("--text", [text]), Input("--calibration", [calibration]), Input("--config", [config])]
    check_outputs([Output("--log-file", log_file)], [Input("--model", [model.name], hub=True), *files], False)
    more = activations, calibration, loss_budget, pack_embedding
    report = quantize(QuantizeSpec(model, out, weights, text, rows, *more), on_screen(json))
    if json:
        render.print_json(report.as_json())
    else:
        show(report)


def show(report: QuantizeReport) -> None:
    """Sizes, the layers that lose most, and what that costs."""
    from lookahead_cli import render

    written, compared, out = report.written, report.compared, report.spec.out
    errors = sorted(written.layers, key=lambda layer: -layer.error)
    render.facts(
        [
            ("written", f"{out}, {len(written.layers)} layers in {report.spec.scheme}"),
            ("weights", f"{render.size(written.bytes_after)}, {written.bytes_after / written.bytes_before:.2f} of before"),
        ]
    )
    if report.mixed is not None:
        mixed, cost = report.mixed, report.mixed.loss - report.mixed.loss_in_8_bits
        cost_of_4 = f"{cost:+.4f} nats a token of {report.spec.calibration}"
        render.facts([("tokens", f"{mixed.share:.0%} of {mixed.blocks} blocks in 8 bits, others in 4: {cost_of_4}")])
    render.table(
        "Layers that rounding changes most", ["layer", "bits", "RMS error"],
        [(layer.name, layer.bits, f"{layer.error:.2%}") for layer in errors[:WORST]],
    )  # fmt: skip
    if compared is not None:
        before, after, answers = compared.before, compared.after, compared.divergence
        change = f"{before.loss:.4f} to {after.loss:.4f} ({after.loss - before.loss:+.4f}) nats a token"
        apart = ""
        if answers.text is not None and answers.token is not None:
            apart = f"; that of text {answers.text + 1} differs first, at token {answers.token + 1}"
        render.facts(
            [
                ("loss", f"{change}, on {before.tokens:,} tokens of {report.spec.text}"),
                ("perplexity", f"{before.perplexity:.3f} to {after.perplexity:.3f}"),
                ("answers", f"{answers.identical} of {answers.answers} greedy ones stay the same{apart}"),
            ]
        )
    render.out.print(f"Next: lookahead bench --model {out} --input prompts.jsonl")
