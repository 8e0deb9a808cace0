"""Options of bench and replay, the files that they write, and how far they are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead_cli import completion
from lookahead_cli.options import COSTS, DRAFTING, IO, MODEL, REPORTING, RUNS
from lookahead_cli.parameters import of_job

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.files.outputs import Input
    from lookahead.job.events import BenchEvents

CHECKED_ROWS = 64  # rows whose outputs are compared unless asked otherwise
OF_A_MODEL = (  # options that need one
    *("input", "attn", "dtype", "device", "max_new_tokens", "peers", "check_lossless", "revision", "adapter"),
    *("trust_remote_code", "gguf_file", "exact", "engine_mode", "quantize", "kv_dtype"),
)

InputFile = Annotated[str | None, typer.Option("--input", metavar="FILE", help="Prompts, as for generate.", rich_help_panel=IO)]
Replay = Annotated[
    list[str] | None,
    typer.Option(
        "--replay",
        metavar="PAIRS",
        help="Replay logged prompt/response pairs instead of running a model, see lookahead replay. Repeat for several "
        "workloads, each named as its file without the ending.",
        rich_help_panel=IO,
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        autocompletion=completion.compared,
        metavar="NAME[,NAME]",
        help="auto, hierarchical, parallel or single. Default: all; auto needs a model or --cost-profile. With --sweep: "
        "the strategy to sweep, default hierarchical.",
        rich_help_panel=DRAFTING,
    ),
]
DecodingLength = Annotated[
    str | None,
    typer.Option(
        "--decoding-length",
        metavar="N[,N]",
        help="Tokens of one row in a forward: the last token + the draft tokens. auto chooses by itself. Default: 16, in a "
        "replay without costs 64, with --sweep 2,4,8,16,32,64.",
        rich_help_panel=DRAFTING,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="NAME_OR_DIR",
        help="Tokenizer of text rows in --replay and of --explain; with --model, instead of its own.",
        rich_help_panel=MODEL,
    ),
]
RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="With --replay and --model: real forwards of a model of that shape (its config.json is enough); the logged "
        "tokens are used as its choices.",
        rich_help_panel=MODEL,
    ),
]
CostProfile = Annotated[
    str | None,
    typer.Option(
        "--cost-profile",
        autocompletion=completion.profiles,
        metavar="PROFILE",
        help="With --replay: predict the speed of a model on another machine. A file of lookahead calibrate, or a shipped "
        "profile such as llama-7b-h200.",
        rich_help_panel=COSTS,
    ),
]
Quantizations = Annotated[
    str,
    of_job(
        "quantize",
        help="Quantize the model, on a CPU: none, int8 or int4 (groups of 64, the output layer int8). Several, such as "
        "none,int8,int4, are measured one after the other: speed, memory, loss on the prompts.",
    ),
]
KvDtypes = Annotated[
    str,
    of_job("kv_dtype", help="Keep keys and values in 8 or 4 bits, on a CPU: none, int8 or int4, or several."),
]
BatchSize = Annotated[
    str,
    typer.Option(
        "--batch-size",
        metavar="N[,N]",
        help="Prompts decoded at once; several sizes are measured in turn.",
        rich_help_panel=RUNS,
    ),
]
Peers = Annotated[
    bool,
    typer.Option(
        "--peers/--no-peers",
        help="Also run model.generate and, at batch size 1, Hugging Face prompt lookup.",
        rich_help_panel=RUNS,
    ),
]
Repeat = Annotated[
    int,
    typer.Option(
        "--repeat",
        min=1,
        metavar="N",
        help="On a model: each group of prompts is timed N times, with all learned text cleared in between; the median counts.",
        rich_help_panel=RUNS,
    ),
]
Sweep = Annotated[
    bool,
    typer.Option(
        "--sweep",
        help="Measure every decoding length with every branch length, on a model also auto. --plot draws forward time, speed "
        "and EDL against both; for a replay without costs EDL and draft time.",
        rich_help_panel=RUNS,
    ),
]
Recycling = Annotated[
    bool,
    typer.Option(
        "--recycling",
        help="On a model: also run each strategy without runner-up tokens, and with --trie both also without the tries.",
        rich_help_panel=RUNS,
    ),
]
CheckLossless = Annotated[
    bool | None,
    typer.Option(
        "--check-lossless/--no-check-lossless",
        help="Compare the outputs of all rows with plain decoding, token by token; or of none. Default: of the first 64.",
        rich_help_panel=RUNS,
    ),
]
Pairs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LOG...",
        help="Logged answers: JSON lines (also .gz, .zst) or .parquet with prompt and response, or the output of "
        "lookahead generate or of the OpenAI batch API. Several are several workloads, named as their files without "
        "the ending.",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="The job's --input, if its output does not hold the prompts (generate --echo). Rows are joined by id; repeat "
        "for several. Default: the files that the output's manifest names.",
        rich_help_panel=IO,
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help='Wrap each "prompt" in the tokenizer\'s chat template, as the job did. Default: as in its manifest.',
        rich_help_panel=IO,
    ),
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="System message of the job's chat prompts.", rich_help_panel=IO),
]
ReplayTokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="NAME_OR_DIR",
        help="Tokenizer of logs that hold text. Default: the one that the trie was built with, else that of the job's model.",
        rich_help_panel=IO,
    ),
]
ReplayStrategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        autocompletion=completion.compared,
        metavar="NAME[,NAME]",
        help="hierarchical, parallel or single, and with --cost-profile auto. Default: all; with --sweep hierarchical.",
        rich_help_panel=DRAFTING,
    ),
]
ReplayDecodingLength = Annotated[
    str | None,
    typer.Option(
        "--decoding-length",
        metavar="N[,N]",
        help="Tokens of one row in a forward: the last token + the draft tokens. Default: 64, with --cost-profile 16, with "
        "--sweep 2,4,8,16,32,64.",
        rich_help_panel=DRAFTING,
    ),
]
ReplaySweep = Annotated[
    bool,
    typer.Option(
        "--sweep",
        help="Measure every decoding length with every branch length: EDL, draft tokens and draft time; --plot draws them.",
        rich_help_panel=RUNS,
    ),
]
ReplayCostProfile = Annotated[
    str | None,
    typer.Option(
        "--cost-profile",
        autocompletion=completion.profiles,
        metavar="PROFILE",
        help="Predict the speed on other hardware: a file of lookahead calibrate, or a shipped profile such as llama-7b-h200.",
        rich_help_panel=COSTS,
    ),
]
ReplayBatchSize = Annotated[
    str,
    typer.Option("--batch-size", metavar="N[,N]", help="With --cost-profile: answers decoded at once.", rich_help_panel=COSTS),
]
ReplayRepeat = Annotated[
    int,
    typer.Option(
        "--repeat",
        min=1,
        metavar="N",
        help="With --cost-profile: predict N times, see bench.",
        rich_help_panel=COSTS,
    ),
]
Rows = Annotated[int | None, typer.Option("--rows", min=1, metavar="N", help="Use the first N rows only.", rich_help_panel=IO)]
NamedTries = Annotated[
    list[str] | None,
    typer.Option(
        "--trie",
        metavar="[NAME=]FILE",
        help="Prebuilt trie to draft from; repeat for several. NAME=FILE: for the workload of that name only.",
        rich_help_panel=DRAFTING,
    ),
]
BranchLengths = Annotated[
    str | None,
    typer.Option(
        "--branch-length",
        metavar="N[,N]",
        help="Maximum draft tokens on one path; several with --sweep only. Default: 64, with --sweep 4,8,16,64.",
        rich_help_panel=DRAFTING,
    ),
]
Baselines = Annotated[
    bool,
    typer.Option(
        "--baselines/--no-baselines",
        help="In a replay: also prompt lookup and the original lookahead trie, at the same decoding lengths.",
        rich_help_panel=RUNS,
    ),
]
Explain = Annotated[
    int | None,
    typer.Option(
        "--explain",
        min=1,
        metavar="ROWS",
        help="In a replay: show each step of the first ROWS rows, as the first strategy drafts them, warm if there is a trie. "
        "On stdout; with --json on stderr.",
        rich_help_panel=REPORTING,
    ),
]
Save = Annotated[
    str | None,
    typer.Option("--save", metavar="FILE", help="Write the JSON to this file as well.", rich_help_panel=REPORTING),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw speed and EDL, for a sweep by lengths: .png, .pdf, .svg. In a replay: with --sweep or --cost-profile.",
        rich_help_panel=REPORTING,
    ),
]
Report = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write everything as one HTML page that needs no network. In a replay: with --cost-profile.",
        rich_help_panel=REPORTING,
    ),
]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Files to write; None: not asked for. json: one object on stdout instead of tables. reads: what is read meanwhile."""

    json: bool
    save: str | None = None
    plot: str | None = None
    report: str | None = None
    overwrite: bool = False
    reads: Sequence[Input] = ()
    log_file: str | None = None

    def check(self) -> None:
        """See `outputs.check_outputs`."""
        from lookahead.files.outputs import BENCH, PAGE, PICTURE, Output, check_outputs

        outputs = [Output("--save", self.save, BENCH), Output("--plot", self.plot, PICTURE)]
        outputs += [Output("--report", self.report, PAGE), Output("--log-file", self.log_file)]
        check_outputs(outputs, self.reads, self.overwrite)

    def keep(self, value: dict[str, Any], figure: Callable[[], Any], page: Callable[[], str]) -> None:
        """Write the JSON, the page and the figure to their files; one that cannot be written costs none of the others."""
        import json

        from lookahead.bench.plot import save_figure

        drawn, written = figure() if self.plot else None, page() if self.report else ""
        with contextlib.ExitStack() as stack:
            if self.plot:
                stack.callback(save_figure, drawn, self.plot)
            if self.report:
                stack.callback(_write, self.report, written)
            if self.save:  # the last is called first
                stack.callback(_write, self.save, json.dumps(value, indent=2) + "\n")


def _write(path: str, text: str) -> None:
    from lookahead.files.atomic import replacing

    with replacing(path, "w") as file:
        file.write(text)


def figure_of(comparisons: Sequence[Comparison], sweep: bool) -> Any:
    from lookahead.bench.plot import comparison_figure
    from lookahead.bench.sweep import sweep_figure

    return sweep_figure(comparisons) if sweep else comparison_figure(comparisons)


def on_screen(json: bool) -> BenchEvents:
    """Events that show how far a bench or a replay is. json: stdout is for one object."""
    from lookahead.job.events import BenchEvents
    from lookahead_cli import render

    class OnScreen(BenchEvents):
        def notice(self, text: str) -> None:
            render.notice(text)

        def patiently(self, act: Callable[[], None], why: str) -> None:
            render.patiently(act, why)

        @contextlib.contextmanager
        def working(self, what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
            with render.progress(what, total, shown=not json) as update:
                yield lambda done: update(done, unit)

        def observers(self, tokenizer: Any | None, rows: int, name: str) -> Any:
            from lookahead_cli.explain import Explainer

            return Explainer(render.err if json else render.out, tokenizer, rows, name).observer_of

    return OnScreen()
