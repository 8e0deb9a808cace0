"""Options of bench and replay, the files that they write, and how far they are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead.job.spec import SESSION_TOKENS
from lookahead.options import OptionGroup, option
from lookahead_cli import completion
from lookahead_cli.options import COSTS, DRAFTING, IO, MODEL, REPORTING, RUNS
from lookahead_cli.parameters import Some, as_of_job

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.contenders import Contenders
    from lookahead.bench.logged import Logs, ReplaySpec
    from lookahead.files.outputs import Input
    from lookahead.job.events import BenchEvents

CHECKED_ROWS = 64  # rows whose outputs are compared unless asked otherwise
OF_A_MODEL = (  # options that need one
    *("input", "attn", "dtype", "device", "max_new_tokens", "peers", "check_lossless", "revision", "adapter"),
    *("trust_remote_code", "gguf_file", "exact", "engine_mode", "quantize", "kv_dtype"),
)

Pairs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LOG...",
        help="Logged answers: JSON lines (also .gz, .zst) or .parquet with prompt and response, or the output of "
        "lookahead generate or of the OpenAI batch API. Several are several workloads, named as their files without "
        "the ending.",
    ),
]


def setting(default: Any, help: str, panel: str, **about: Any) -> Any:
    """A field of a group, which changes no job's answers."""
    return option(default, help, changes_answers=False, panel=panel, **about)


@dataclasses.dataclass(frozen=True)
class BenchOptions(OptionGroup):
    """What bench and replay compare, on which rows, and what they write; each has some of these."""

    input: str | None = setting(None, "Prompts, as for generate.", panel=IO, metavar="FILE")
    replay: Sequence[str] | None = setting(
        None,
        "Replay logged prompt/response pairs instead of running a model, see lookahead replay. Repeat for several "
        "workloads, each named as its file without the ending.",
        panel=IO,
        metavar="PAIRS",
    )
    prompts: Sequence[str] | None = setting(
        None,
        "The job's --input, if its output does not hold the prompts (generate --echo). Rows are joined by id; repeat for "
        "several. Default: the files that the output's manifest names.",
        panel=IO,
        metavar="FILE",
    )
    chat: bool | None = setting(
        None,
        'Wrap each "prompt" in the tokenizer\'s chat template, as the job did. Default: as in its manifest.',
        panel=IO,
        flags=("--chat/--no-chat",),
    )
    system: str | None = setting(None, "System message of the job's chat prompts.", panel=IO, metavar="TEXT")
    prompt_field: str | None = as_of_job("prompt_field")
    template: str | None = as_of_job("template")
    tokenizer: str | None = setting(
        None,
        "Tokenizer of logs that hold text. Default: the one that the trie was built with, else that of the job's model.",
        panel=IO,
        metavar="NAME_OR_DIR",
    )
    trie: Sequence[str] | None = setting(
        None,
        "Prebuilt trie to draft from; repeat for several. NAME=FILE: for the workload of that name only.",
        panel=DRAFTING,
        metavar="[NAME=]FILE",
    )
    trie_weight: Sequence[str] | None = as_of_job("trie_weight")
    strategy: str | None = setting(
        None,
        "auto, hierarchical, parallel or single. Default: all; auto needs a model or --cost-profile. With --sweep: the "
        "strategy to sweep, default hierarchical.",
        panel=DRAFTING,
        metavar="NAME[,NAME]",
    )
    decoding_length: str | None = setting(
        None,
        "Tokens of one row in a forward: the last token + the draft tokens. auto chooses by itself. Default: 16, in a "
        "replay without costs 64, with --sweep 2,4,8,16,32,64.",
        panel=DRAFTING,
        metavar="N[,N]",
    )
    branch_length: str | None = setting(
        None,
        "Maximum draft tokens on one path; several with --sweep only. Default: 64, with --sweep 4,8,16,64.",
        panel=DRAFTING,
        metavar="N[,N]",
    )
    session_tokens: int = as_of_job("session_tokens", default=SESSION_TOKENS)
    price: float = as_of_job("price")
    random_weights: bool = setting(
        False,
        "With --replay and --model: real forwards of a model of that shape (its config.json is enough); the logged tokens "
        "are used as its choices.",
        panel=MODEL,
    )
    cost_profile: str | None = setting(
        None,
        "With --replay: predict the speed of a model on another machine. A file of lookahead calibrate, or a shipped "
        "profile such as llama-7b-h200.",
        panel=COSTS,
        metavar="PROFILE",
    )
    rows: int | None = setting(None, "Use the first N rows only.", panel=IO, metavar="N", least=1)
    max_new_tokens: int = as_of_job("max_new_tokens", panel=RUNS)
    batch_size: str = setting("1", "Prompts decoded at once; several sizes are measured in turn.", panel=RUNS, metavar="N[,N]")
    peers: bool = setting(
        True,
        "Also run model.generate and, at batch size 1, Hugging Face prompt lookup.",
        panel=RUNS,
        flags=("--peers/--no-peers",),
    )
    repeat: int = setting(
        1,
        "On a model: each group of prompts is timed N times, with all learned text cleared in between; the median counts.",
        panel=RUNS,
        metavar="N",
        least=1,
    )
    sweep: bool = setting(
        False,
        "Measure every decoding length with every branch length, on a model also auto. --plot draws forward time, speed "
        "and EDL against both; for a replay without costs EDL and draft time.",
        panel=RUNS,
    )
    recycling: bool = setting(
        False,
        "On a model: also run each strategy without runner-up tokens, and with --trie both also without the tries.",
        panel=RUNS,
    )
    baselines: bool = setting(
        False,
        "In a replay: also prompt lookup and the original lookahead trie, at the same decoding lengths.",
        panel=RUNS,
        flags=("--baselines/--no-baselines",),
    )
    check_lossless: bool | None = setting(
        None,
        "Compare the outputs of all rows with plain decoding, token by token; or of none. Default: of the first 64.",
        panel=RUNS,
        flags=("--check-lossless/--no-check-lossless",),
    )
    explain: int | None = setting(
        None,
        "In a replay: show each step of the first ROWS rows, as the first strategy drafts them, warm if there is a trie. "
        "On stdout; with --json on stderr.",
        panel=REPORTING,
        metavar="ROWS",
        least=1,
    )
    save: str | None = setting(None, "Write the JSON to this file as well.", panel=REPORTING, metavar="FILE")
    plot: str | None = setting(
        None,
        "Draw speed and EDL, for a sweep by lengths: .png, .pdf, .svg. In a replay: with --sweep or --cost-profile.",
        panel=REPORTING,
        metavar="FILE",
    )
    report: str | None = setting(
        None,
        "Write everything as one HTML page that needs no network. In a replay: with --cost-profile.",
        panel=REPORTING,
        metavar="FILE",
    )

    @property
    def checked_rows(self) -> int | None:
        """The first rows, whose outputs are compared; None: all."""
        return CHECKED_ROWS if self.check_lossless is None else None if self.check_lossless else 0

    def contenders(self) -> Contenders:
        """Strategies and lengths to compare."""
        from lookahead.bench.contenders import Contenders

        lengths = self.decoding_length, self.branch_length
        return Contenders(self.strategy, *lengths, self.session_tokens, self.price, self.sweep)

    def replayed(self, logs: Logs) -> ReplaySpec:
        """A replay of these logs."""
        from lookahead.bench.contenders import batch_sizes_of
        from lookahead.bench.logged import ReplaySpec

        costs = self.cost_profile, batch_sizes_of(self.batch_size), self.repeat
        return ReplaySpec(logs, self.contenders(), self.baselines, self.explain or 0, *costs)


BENCHED = Some(
    "input replay trie trie_weight strategy decoding_length branch_length session_tokens price random_weights cost_profile "
    "rows max_new_tokens batch_size peers repeat sweep recycling baselines check_lossless explain save plot report",
    {"strategy": completion.compared, "cost_profile": completion.profiles},
)
MODEL_OF_A_BENCH = Some(
    "model gguf_file tokenizer revision adapter trust_remote_code dtype device attn engine engine_arg engine_mode quantize "
    "kv_dtype exact",
    tokenizer={"help": "Tokenizer of text rows in --replay and of --explain; with --model, instead of its own."},
    engine={
        "help": "hf: our engine for transformers models. vllm: plain vLLM, its ngram and suffix drafts, and ours in it, of "
        "the strategies auto and single. sglang: plain SGLang, its ngram drafts, and ours in it, of the strategy "
        "hierarchical."
    },
    quantize={
        "help": "Quantize the model, on a CPU: none, int8 or int4 (groups of 64, the output layer int8). Several, such as "
        "none,int8,int4, are measured one after the other: speed, memory, loss on the prompts."
    },
    kv_dtype={"help": "Keep keys and values in 8 or 4 bits, on a CPU: none, int8 or int4, or several."},
)
REPLAYED = Some(
    "prompts chat system prompt_field template tokenizer rows trie trie_weight strategy decoding_length branch_length "
    "session_tokens price sweep baselines cost_profile batch_size repeat explain save plot report",
    {"strategy": completion.compared, "cost_profile": completion.profiles},
    strategy={
        "help": "hierarchical, parallel or single, and with --cost-profile auto. Default: all; with --sweep hierarchical.",
        "panel": DRAFTING,
    },
    decoding_length={
        "help": "Tokens of one row in a forward: the last token + the draft tokens. Default: 64, with --cost-profile 16, "
        "with --sweep 2,4,8,16,32,64.",
        "panel": DRAFTING,
    },
    sweep={
        "help": "Measure every decoding length with every branch length: EDL, draft tokens and draft time; --plot draws them.",
        "panel": RUNS,
    },
    cost_profile={
        "help": "Predict the speed on other hardware: a file of lookahead calibrate, or a shipped profile such as "
        "llama-7b-h200.",
        "panel": COSTS,
    },
    batch_size={"help": "With --cost-profile: answers decoded at once.", "panel": COSTS},
    repeat={"help": "With --cost-profile: predict N times, see bench.", "panel": COSTS},
)


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
    from lookahead.bench.plot import comparison_figure, sweep_figure

    return sweep_figure(comparisons) if sweep else comparison_figure(comparisons)


def on_screen(json: bool) -> BenchEvents:
    """Events that show how far a bench or a replay is. json: stdout is for one object."""
    from lookahead.job.events import BenchEvents
    from lookahead_cli import render

    class OnScreen(BenchEvents):
        def notice(self, text: str) -> None:
            render.notice(text)

        def with_spinner(self, act: Callable[[], Any], why: str) -> Any:
            return render.with_spinner(act, why)

        @contextlib.contextmanager
        def working(self, what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
            with render.progress(what, total, shown=not json) as update:
                yield lambda done: update(done, unit)

        def observers(self, tokenizer: Any | None, rows: int, name: str) -> Any:
            from lookahead_cli.explain import Explainer

            return Explainer(render.err if json else render.out, tokenizer, rows, name).observer_of

    return OnScreen()
