"""lookahead replay: what drafts bring on logged answers, without a model. Also what `bench --replay` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead_cli.contenders import batch_sizes_of, contenders, swept
from lookahead_cli.options import (
    SESSION_TOKENS,
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
from lookahead_cli.replays import Logs

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.workloads import WorkloadReplay
    from lookahead.draft.options import DraftOptions
    from lookahead.outputs import Input


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Files to write; None: not asked for. json: one object on stdout in place of tables. reads: what is read meanwhile."""

    json: bool
    save: str | None = None
    plot: str | None = None
    report: str | None = None
    overwrite: bool = False
    reads: Sequence[Input] = ()
    log_file: str | None = None

    def check(self) -> None:
        """See `outputs.check_outputs`."""
        from lookahead.outputs import BENCH, PAGE, PICTURE, Output, check_outputs

        outputs = [Output("--save", self.save, BENCH), Output("--plot", self.plot, PICTURE)]
        outputs += [Output("--report", self.report, PAGE), Output("--log-file", self.log_file)]
        check_outputs(outputs, self.reads, self.overwrite)

    def keep(self, value: dict[str, Any], figure: Any | None = None, page: str = "") -> None:
        """Write the JSON, the page and the figure to their files; one that cannot be written costs none of the others."""
        import contextlib
        import json

        with contextlib.ExitStack() as stack:
            if self.plot:
                from lookahead.bench.plot import save_figure

                stack.callback(save_figure, figure, self.plot)
            if self.report:
                stack.callback(_write, self.report, page)
            if self.save:  # the last is called first
                stack.callback(_write, self.save, json.dumps(value, indent=2) + "\n")


def _write(path: str, text: str) -> None:
    from lookahead.atomic import replacing

    with replacing(path, "w") as file:
        file.write(text)


@dataclasses.dataclass(frozen=True)
class Asked:
    """Which runs are wanted, as it was typed."""

    strategy: str | None = None
    decoding_length: str | None = None
    branch_length: str | None = None
    session_tokens: int = SESSION_TOKENS
    price: float = 0.0
    sweep: bool = False
    baselines: bool = False
    explain: int | None = None
    cost_profile: str | None = None
    batch_size: str = "1"
    repeat: int = 1

    def options(self, timed: bool) -> list[DraftOptions]:
        """Of each run. timed: what forwards cost is known. Raises UsageError."""
        make = swept if self.sweep else contenders
        return make(self.strategy, self.decoding_length, self.branch_length, self.session_tokens, self.price, timed)


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
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help='Wrap each "prompt" in the tokenizer\'s chat template, as the job did. Default: as its manifest says.',
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message of the job's chat prompts.")
    ] = None,
    prompt_field: PromptField = None,
    template: Template = None,
    trie: Annotated[
        list[str] | None,
        typer.Option(
            "--trie",
            metavar="[NAME=]FILE",
            help="Prebuilt trie to draft from; repeat for several. NAME=FILE: for the workload of that name only.",
        ),
    ] = None,
    trie_weight: TrieWeights = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="NAME_OR_DIR",
            help="Tokenizer of logs that hold text. Default: the one that the trie was built with, else that of the "
            "job's model.",
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, metavar="N", help="Use the first N rows only.")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME[,NAME]",
            help="Of hierarchical, parallel, single, and with --cost-profile auto. Default: all; with --sweep hierarchical.",
        ),
    ] = None,
    decoding_length: Annotated[
        str | None,
        typer.Option(
            "--decoding-length",
            metavar="N[,N]",
            help="Tokens in one forward: the last token + the draft tokens. Default: 64, with --cost-profile 16, with --sweep "
            "2,4,8,16,32,64.",
        ),
    ] = None,
    branch_length: Annotated[
        str | None,
        typer.Option(
            "--branch-length",
            metavar="N[,N]",
            help="Draft tokens on one path at most; several with --sweep only. Default: 64, with --sweep 4,8,16,64.",
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Every decoding length with every branch length: EDL, draft tokens and draft time; --plot draws them.",
        ),
    ] = False,
    session_tokens: SessionTokens = SESSION_TOKENS,
    price: Price = 0.0,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines/--no-baselines",
            help="Also prompt lookup and the original lookahead trie, at the same decoding lengths.",
        ),
    ] = False,
    explain: Annotated[
        int | None,
        typer.Option(
            "--explain",
            min=1,
            metavar="ROWS",
            help="Show each step of the first ROWS rows, as the first strategy drafts them, warm if there is a trie. On "
            "stdout; with --json on stderr.",
        ),
    ] = None,
    cost_profile: Annotated[
        str | None,
        typer.Option(
            "--cost-profile",
            metavar="PROFILE",
            help="Predict the speed on other hardware: a file of lookahead calibrate, or a shipped profile such as "
            "llama-7b-h200.",
        ),
    ] = None,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N[,N]", help="With --cost-profile: answers decoded at once.")
    ] = "1",
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, metavar="N", help="With --cost-profile: predict N times, see bench.")
    ] = 1,
    save: Annotated[str | None, typer.Option("--save", metavar="FILE", help="Write the JSON to this file as well.")] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot", metavar="FILE", help="With --sweep or --cost-profile: draw EDL (and predicted speed): .png, .pdf or .svg."
        ),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option("--report", metavar="FILE", help="With --cost-profile: write all of it as one HTML page."),
    ] = None,
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
    from lookahead.errors import UsageError
    from lookahead.outputs import Input

    if not pairs:
        raise UsageError("name a file of logged answers: lookahead replay logged.jsonl. To try without one: lookahead demo")
    if system and chat is False:
        raise UsageError("--system is for chat prompts: leave --no-chat out.")
    logs = Logs(pairs, trie or (), trie_weight, prompts or (), tokenizer, chat, system, rows, prompt_field, template)
    asked = Asked(
        strategy, decoding_length, branch_length, session_tokens, price, sweep, baselines, explain, cost_profile, batch_size,
        repeat,
    )  # fmt: skip
    reads = [*logs.reads("LOG"), Input("--cost-profile", [cost_profile]), Input("--config", [config])]
    run(logs, asked, Outputs(json, save, plot, report, overwrite, reads, log_file), context.obj)


def run(logs: Logs, asked: Asked, outputs: Outputs, command_line: str) -> None:
    """Replay, print and write what was asked for; with a cost profile also the predicted speed."""
    from lookahead.bench.workloads import as_json
    from lookahead.budget.profile import read_profile
    from lookahead.errors import UsageError
    from lookahead_cli import render
    from lookahead_cli.comparison import print_comparison
    from lookahead_cli.replay_tables import print_replays, print_sweeps
    from lookahead_cli.replays import explain_rows, fixed, predict_all, read_workloads, replay_all, tokenizer_to_show

    timed = asked.cost_profile is not None
    options, batch_sizes = asked.options(timed), batch_sizes_of(asked.batch_size)
    outputs.check()
    if not timed and (outputs.report or asked.repeat > 1 or batch_sizes != [1] or (outputs.plot and not asked.sweep)):
        raise UsageError(
            "--replay runs no model: --report, --repeat and --batch-size need --cost-profile, or bench with --model and "
            "--random-weights; --plot needs one of these or --sweep."
        )
    if timed and len(logs.paths) > 1 and (outputs.plot or outputs.report):
        raise UsageError("--plot and --report with --cost-profile show one workload: give one log.")
    if asked.sweep and asked.baselines:
        raise UsageError("--baselines draft by lengths of their own: leave --sweep out.")
    profile = read_profile(asked.cost_profile) if asked.cost_profile else None
    workloads, loaded = read_workloads(logs)
    if asked.explain:
        console = render.err if outputs.json else render.out
        explain_rows(workloads, options[0], tokenizer_to_show(loaded, workloads), asked.explain, console)
    replays = replay_all(workloads, fixed(options), asked.baselines)
    value = as_json(replays)
    if not outputs.json:
        (print_sweeps if asked.sweep else print_replays)(replays)
    comparisons: list[Comparison] = []
    if profile:
        comparisons = predict_all(profile, workloads, options, batch_sizes, asked.repeat, value, shown=not outputs.json)
    if outputs.json:
        render.print_json(value)
    else:
        for comparison in comparisons:
            print_comparison(comparison, asked.sweep)
    page = ""
    if outputs.report:
        from lookahead.bench.report import report_page

        page = report_page(comparisons, command_line, (), asked.sweep)
    outputs.keep(value, _figure(replays, comparisons, asked.sweep) if outputs.plot else None, page)


def _figure(replays: Sequence[WorkloadReplay], comparisons: Sequence[Comparison], sweep: bool) -> Any:
    """Of predicted speeds where there are any, else of the replays of a sweep."""
    from lookahead.bench.plot import comparison_figure
    from lookahead.bench.replay_sweep import replay_sweep_figure
    from lookahead.bench.sweep import sweep_figure

    if not comparisons:
        return replay_sweep_figure(replays)
    return sweep_figure(comparisons) if sweep else comparison_figure(comparisons)
