"""lookahead calibrate: what a model's forwards cost on this machine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.errors import LookaheadError
from lookahead.models.options import ModelOptions
from lookahead_cli import completion
from lookahead_cli.options import (
    Config,
    Context,
    Json,
    LogFile,
    Overwrite,
    Verbose,
)
from lookahead_cli.parameters import Some, refuse, with_groups

if TYPE_CHECKING:
    from lookahead.budget.profile import CostProfile

LEAST_SECONDS, MOST_SECONDS = 5, 600


@with_groups
def command(
    model: Annotated[
        ModelOptions,
        Some("model gguf_file revision trust_remote_code dtype device attn quantize kv_dtype"),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the profile to this file as well, for bench --cost-profile."),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="A model of this shape (its config.json is enough); its forwards cost the same as those of the real one.",
        ),
    ] = False,
    estimate: Annotated[
        str | None,
        typer.Option(
            "--estimate",
            autocompletion=completion.gpus,
            metavar="GPU",
            help="Measure nothing: estimate the profile of a GPU from its data sheet (h200, h100, a100, l40s, "
            "l4, a10, rtx4090, rtx3090, v100, t4). Needs -o.",
        ),
    ] = None,
    seconds: Annotated[
        int,
        typer.Option(
            "--seconds",
            min=LEAST_SECONDS,
            max=MOST_SECONDS,
            metavar="N",
            help="Time for measuring; slow models are measured at fewer sizes.",
        ),
    ] = 45,
    context: Annotated[
        int, typer.Option("--context", min=1, metavar="N", help="Tokens in the cache of each row, in the table and the plot.")
    ] = 512,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw the curve: .png, .pdf or .svg.")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
    ctx: Context = None,  # type: ignore[assignment]
) -> None:
    """Measure the cost of a model's forwards on this machine, by tokens, rows and context, and keep it as a cost profile.

    The profile is kept in the user's cache folder. generate and bench use it if model, device, dtype, attention, --quantize
    and --kv-dtype are the same, and correct it by their own steps. The critical decoding length (CDL) is the tokens per
    row up to which a forward costs at most 1.2 times that of one.

    Example: lookahead calibrate --model org/model

    For other hardware: lookahead calibrate --model org/model --estimate h200 -o h200.json

    Next: lookahead bench --replay logged.jsonl --tokenizer org/model --cost-profile h200.json
    """
    from lookahead.errors import UsageError
    from lookahead.files.outputs import PICTURE, PROFILE, Input, Output, check_outputs

    if estimate and out is None:
        raise UsageError("--estimate: name a file with -o; this machine's own jobs have no use for it.")
    if estimate:
        refuse(ctx, "--estimate measures nothing", "random_weights", "device", "attn", "seconds", "quantize", "kv_dtype")
    reads = [Input("--model", [model.name], hub=True), Input("--config", [config])]
    outputs = [Output("-o", out, PROFILE), Output("--plot", plot, PICTURE), Output("--log-file", log_file)]
    check_outputs(outputs, reads, overwrite)
    if estimate:
        from lookahead.models.load import estimated_profile

        kept = Kept(estimated_profile(model, estimate))
    else:
        kept = measured(model, random_weights, seconds, out, json)
    kept.save(out)
    show(kept, context, json, plot)
    if kept.problems:
        raise kept.problems[0]


@dataclasses.dataclass
class Kept:
    """A profile, where it was written to, and what went wrong there: the profile is shown first."""

    profile: CostProfile
    paths: list[str] = dataclasses.field(default_factory=list)
    problems: list[LookaheadError] = dataclasses.field(default_factory=list)

    def save(self, out: str | None) -> None:
        if out:
            try:
                self.profile.save(out)
                self.paths.append(out)
            except LookaheadError as error:
                self.problems.append(LookaheadError(f"-o {error}"))


def measured(model: ModelOptions, random_weights: bool, seconds: int, out: str | None, json: bool) -> Kept:
    """Measure a model, and keep its profile in the cache."""
    from lookahead.bench.calibrate import calibrate
    from lookahead.budget.profile import save_to_cache, why_not_cached
    from lookahead.models.load import load_model, random_model
    from lookahead_cli import render

    no_cache = why_not_cached()
    if no_cache and out is None:
        raise LookaheadError(f"{no_cache} Or name a file with -o.")
    if no_cache:
        render.notice(f"{no_cache} The profile goes to {out} only.")
    load = random_model if random_weights else load_model
    target = load(model)
    if target.mode not in ("packed", "plain"):
        render.notice(f"{model.name} verifies by {target.mode}: {target.reason}")
    with render.progress("measuring", 100, shown=not json) as update:
        kept = Kept(calibrate(target, seconds, lambda share: update(round(100 * share), "%"))[0])
    if not no_cache:
        try:
            kept.paths.append(str(save_to_cache(kept.profile)))
        except LookaheadError as error:
            kept.problems.append(error)
    return kept


def show(kept: Kept, context: int, json: bool, plot: str | None) -> None:
    """Print the profile, as JSON or as a table, and draw it."""
    from lookahead_cli import render
    from lookahead_cli.profile_table import ROWS, print_profile

    profile, paths = kept.profile, kept.paths
    if json:
        cdl = {str(rows): profile.cdl(rows, context) for rows in ROWS}
        render.print_json({**profile.as_json(), "cdl": cdl, "path": paths[0] if paths else None})
    else:
        print_profile(profile, context)
        for path in paths:
            render.out.print(f"kept in {path}")
    if plot:
        from lookahead.bench.plot import draw_profile

        draw_profile(profile, plot, ROWS, context)
