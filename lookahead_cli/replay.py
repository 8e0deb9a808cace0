"""lookahead replay: what drafts bring on logged answers, without a model. Also what `bench --replay` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead.errors import UsageError
from lookahead.job.spec import SESSION_TOKENS
from lookahead_cli.bench_options import (
    Baselines,
    BranchLengths,
    Explain,
    NamedTries,
    Outputs,
    Plot,
    Report,
    Rows,
    Save,
    figure_of,
    on_screen,
    page_of,
)
from lookahead_cli.options import (
    COSTS,
    DRAFTING,
    IO,
    RUNS,
    Config,
    Context,
    Json,
    LogFile,
    Overwrite,
    Price,
    PromptField,
    SessionTokens,
    Template,
    TrieWeights,
    Verbose,
)
from lookahead_cli.parameters import given

if TYPE_CHECKING:
    from lookahead.bench.replay_run import ReplayReport, ReplaySpec


def command(
    pairs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOG...",
            help="Logged answers: JSON lines (also .gz, .zst) or .parquet with prompt and response, or the output of "
            "lookahead generate or of the OpenAI batch API. Several are several workloads, named as their files without "
            "the ending.",
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="The job's --input, if its output does not hold the prompts (generate --echo): joined by id; repeat for "
            "several. Default: the files that the output's manifest names.",
            rich_help_panel=IO,
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help='Wrap each "prompt" in the tokenizer\'s chat template, as the job did. Default: as its manifest says.',
            rich_help_panel=IO,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="System message of the job's chat prompts.", rich_help_panel=IO),
    ] = None,
    prompt_field: PromptField = None,
    template: Template = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="NAME_OR_DIR",
            help="Tokenizer of logs that hold text. Default: the one that the trie was built with, else that of the "
            "job's model.",
            rich_help_panel=IO,
        ),
    ] = None,
    rows: Rows = None,
    trie: NamedTries = None,
    trie_weight: TrieWeights = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME[,NAME]",
            help="Of hierarchical, parallel, single, and with --cost-profile auto. Default: all; with --sweep hierarchical.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    decoding_length: Annotated[
        str | None,
        typer.Option(
            "--decoding-length",
            metavar="N[,N]",
            help="Tokens in one forward: the last token + the draft tokens. Default: 64, with --cost-profile 16, with --sweep "
            "2,4,8,16,32,64.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    branch_length: BranchLengths = None,
    session_tokens: SessionTokens = SESSION_TOKENS,
    price: Price = 0.0,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Every decoding length with every branch length: EDL, draft tokens and draft time; --plot draws them.",
            rich_help_panel=RUNS,
        ),
    ] = False,
    baselines: Baselines = False,
    cost_profile: Annotated[
        str | None,
        typer.Option(
            "--cost-profile",
            metavar="PROFILE",
            help="Predict the speed on other hardware: a file of lookahead calibrate, or a shipped profile such as "
            "llama-7b-h200.",
            rich_help_panel=COSTS,
        ),
    ] = None,
    batch_size: Annotated[
        str,
        typer.Option(
            "--batch-size", metavar="N[,N]", help="With --cost-profile: answers decoded at once.", rich_help_panel=COSTS
        ),
    ] = "1",
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat",
            min=1,
            metavar="N",
            help="With --cost-profile: predict N times, see bench.",
            rich_help_panel=COSTS,
        ),
    ] = 1,
    explain: Explain = None,
    save: Save = None,
    plot: Plot = None,
    report: Report = None,
    overwrite: Overwrite = False,
    json: Json = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
    context: Context = None,  # type: ignore[assignment]
) -> None:
    """Replay logged answers: how many tokens a step would have gained (EDL), without a model.

    Reads logs of prompts and answers, of any system, or what lookahead generate has written. Writes nothing unless asked to.

    Example: lookahead replay logged.jsonl --trie answers.trie

    What an earlier job has answered: lookahead replay out.jsonl --prompts prompts.jsonl --trie answers.trie

    EDL against decoding and branch length: lookahead replay logged.jsonl --trie answers.trie --sweep --plot sweep.png

    Several workloads: lookahead replay faq.jsonl code.jsonl --trie faq=faq.trie --trie code=code.trie --baselines

    Other hardware: lookahead replay logged.jsonl --trie answers.trie --cost-profile llama-7b-h200

    Next: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie
    """
    from lookahead.bench.contenders import Contenders, batch_sizes_of
    from lookahead.bench.logged import Logs
    from lookahead.bench.replay_run import ReplaySpec
    from lookahead.outputs import Input

    if not pairs:
        raise UsageError("name a file of logged answers: lookahead replay logged.jsonl. To try without one: lookahead demo")
    if system and chat is False:
        raise UsageError("--system is for chat prompts: leave --no-chat out.")
    logs = Logs(pairs, trie or (), trie_weight, prompts or (), tokenizer, chat, system, rows, prompt_field, template)
    contenders = Contenders(strategy, decoding_length, branch_length, session_tokens, price, sweep)
    sizes = batch_sizes_of(batch_size)
    spec = ReplaySpec(logs, contenders, baselines, explain or 0, cost_profile, sizes, repeat)
    reads = [*logs.reads("LOG"), Input("--cost-profile", [cost_profile]), Input("--config", [config])]
    run(spec, Outputs(json, save, plot, report, overwrite, reads, log_file), context)


def run(spec: ReplaySpec, outputs: Outputs, context: typer.Context) -> None:
    """Replay, print and write what was asked for; with a cost profile also the predicted speed."""
    from lookahead.bench.replay_run import replay_logs
    from lookahead_cli import render
    from lookahead_cli.comparison import print_comparison
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
    from lookahead.bench.replay_sweep import replay_sweep_figure

    return figure_of(found.comparisons, sweep) if found.comparisons else replay_sweep_figure(found.replays)
