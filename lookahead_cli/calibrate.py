"""lookahead calibrate: what a model's forwards cost on this machine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.errors import LookaheadError, UsageError
from lookahead.models.options import ModelOptions
from lookahead.options import OptionGroup, begins, option
from lookahead_cli import render
from lookahead_cli.options import Common, Some, refuse, with_groups

if TYPE_CHECKING:
    from lookahead.budget.profile import CostProfile

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
ROWS = (1, 8, 32)
BAR = 20  # characters of the longest bar


def _gpus(incomplete: str) -> list[str]:
    from lookahead.budget.estimate import GPUS

    return begins(GPUS, incomplete)


@dataclasses.dataclass(frozen=True)
class CalibrateOptions(OptionGroup):
    out: str | None = option(
        None, "Write the profile to this file as well, for bench --cost-profile.", "FILE", flags=("--out", "-o")
    )
    random_weights: bool = option(
        False, "A model of this shape (its config.json is enough); its forwards cost the same as those of the real one."
    )
    estimate: str | None = option(
        None,
        "Measure nothing: estimate the profile of a GPU from its data sheet (h200, h100, a100, l40s, l4, a10, rtx4090, "
        "rtx3090, v100, t4). Needs -o.",
        "GPU",
        complete=_gpus,
    )
    seconds: int = option(45, "Time for measuring; slow models are measured at fewer sizes.", "N", least=5, most=600)
    context: int = option(512, "Tokens in the cache of each row, in the table and the plot.", "N", least=1)
    plot: str | None = option(None, "Draw the curve: .png, .pdf or .svg.", "FILE")


@with_groups
def command(
    ctx: typer.Context,
    model: Annotated[ModelOptions, Some("model gguf_file revision trust_remote_code dtype device attn quantize kv_dtype")],
    options: Annotated[CalibrateOptions, Some()],
    common: Annotated[Common, Some()],
) -> None:
    """Measure the cost of a model's forwards on this machine, by tokens, rows and context, and keep it as a cost profile.

    The profile is kept in the user's cache folder. generate and bench use it if model, device, dtype, attention, --quantize
    and --kv-dtype are the same, and correct it by their own steps. The critical decoding length (CDL) is the tokens per
    row up to which a forward costs at most 1.2 times that of one.

    Example: lookahead calibrate --model org/model

    For other hardware: lookahead calibrate --model org/model --estimate h200 -o h200.json

    Next: lookahead bench --replay logged.jsonl --tokenizer org/model --cost-profile h200.json
    """
    from lookahead.files.outputs import PICTURE, PROFILE, Input, Output

    if options.estimate and options.out is None:
        raise UsageError("--estimate: name a file with -o; this machine's own jobs have no use for it.")
    if options.estimate:
        refuse(ctx, "--estimate measures nothing", "random_weights", "device", "attn", "seconds", "quantize", "kv_dtype")
    outputs = [Output("-o", options.out, PROFILE), Output("--plot", options.plot, PICTURE)]
    common.check(outputs, [Input("--model", [model.name], hub=True)])
    paths, problems = list[str](), list[LookaheadError]()  # where it was written to, and what went wrong there
    if options.estimate:
        from lookahead.models.load import estimated_profile

        profile = estimated_profile(model, options.estimate)
    else:
        profile = measured(model, options, common.json, paths, problems)
    if options.out:
        try:
            profile.save(options.out)
            paths.append(options.out)
        except LookaheadError as error:
            problems.append(LookaheadError(f"-o {error}"))
    if common.json:
        cdl = {str(rows): profile.cdl(rows, options.context) for rows in ROWS}
        render.print_json({**profile.as_json(), "cdl": cdl, "path": paths[0] if paths else None})
    else:
        print_profile(profile, options.context)
        for path in paths:
            render.out.print(f"kept in {path}")
    if options.plot:
        from lookahead.bench.plot import draw_profile

        draw_profile(profile, options.plot, ROWS, options.context)
    if problems:
        raise problems[0]


def measured(
    model: ModelOptions, options: CalibrateOptions, json: bool, paths: list[str], problems: list[LookaheadError]
) -> CostProfile:
    """Measure a model, and keep its profile in the cache; its path, or what went wrong there, is appended."""
    from lookahead.bench.calibrate import calibrate
    from lookahead.budget.profile import save_to_cache, why_not_cached
    from lookahead.models.load import load_model, random_model

    no_cache = why_not_cached()
    if no_cache and options.out is None:
        raise LookaheadError(f"{no_cache} Or name a file with -o.")
    if no_cache:
        render.notice(f"{no_cache} The profile goes to {options.out} only.")
    target = (random_model if options.random_weights else load_model)(model)
    if target.mode not in ("packed", "plain"):
        render.notice(f"{model.name} verifies by {target.mode}: {target.reason}")
    with render.progress("measuring", 100, shown=not json) as update:
        profile = calibrate(target, options.seconds, lambda share: update(round(100 * share), "%"))[0]
    if not no_cache:
        try:
            paths.append(str(save_to_cache(profile)))
        except LookaheadError as error:
            problems.append(error)
    return profile


def print_profile(profile: CostProfile, context: int) -> None:
    """The curve as a table with bars, and the CDL of several numbers of rows."""
    from lookahead.budget.profile import CDL_FACTOR, Forward

    setting = profile.setting
    threads = f", {setting.threads} threads" if setting.threads else ""
    names = [f"{rows} row{'s' * (rows > 1)}" for rows in ROWS]
    costs = [[profile.forward_seconds(Forward(rows * n, rows, rows * context)) * 1e3 for n in LENGTHS] for rows in ROWS]
    bars = ["#" * round(BAR * each / max(costs[0])) for each in costs[0]]
    render.table(
        f"{setting.model}: {setting.device}{threads}, {setting.dtype}, {setting.attention}, {context} tokens in the cache "
        f"({profile.kind})",
        ["tokens per row", *names, names[0]],
        [
            (str(length), *(f"{each:.2f}" for each in of_length), bar.ljust(BAR))
            for length, bar, *of_length in zip(LENGTHS, bars, *costs, strict=True)
        ],
        above="milliseconds of a forward:",
    )
    cdls = ", ".join(f"{profile.cdl(rows, context)} with {name}" for rows, name in zip(ROWS, names, strict=True))
    render.facts(
        [(f"CDL at {CDL_FACTOR:g}x", cdls), *((name.replace("_", " "), str(value)) for name, value in profile.about.items())]
    )
