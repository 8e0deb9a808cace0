"""Options of bench and replay, and what they print and write."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lookahead.files.atomic import replacing
from lookahead.job.spec import SESSION_TOKENS
from lookahead.options import OptionGroup, option
from lookahead_cli.options import COSTS, DRAFTING, IO, MODEL, REPORTING, RUNS, Common, Some, as_of_job, begins

if TYPE_CHECKING:
    from lookahead.bench.contenders import Contenders, ModelBench
    from lookahead.bench.logged import Logs, ReplaySpec
    from lookahead.files.outputs import Input
    from lookahead.models.options import ModelOptions

CHECKED_ROWS = 64  # rows whose outputs are compared unless asked otherwise
OF_A_MODEL = (  # options that need one
    *("input", "attn", "dtype", "device", "max_new_tokens", "peers", "check_lossless", "revision", "adapter"),
    *("trust_remote_code", "gguf_file", "exact", "threads", "engine_mode", "quantize", "kv_dtype"),
)


def _compared(incomplete: str) -> list[str]:
    """Several names are separated by commas."""
    from lookahead.draft.options import STRATEGIES

    begun, comma, last = incomplete.rpartition(",")
    names = [name for name in ("auto", *STRATEGIES) if name != "off" and name not in begun.split(",")]
    return [begun + comma + name for name in begins(names, last)]


def _profiles(incomplete: str) -> list[str]:
    from lookahead.budget.profile import shipped_names

    return begins(shipped_names(), incomplete)


@dataclasses.dataclass(frozen=True)
class BenchOptions(OptionGroup):
    """Options of what bench and replay compare, on which rows, and what they write; each has some of these."""

    pairs: Sequence[str] | None = option(
        None,
        "Logged answers: JSON lines (also .gz, .zst) or .parquet with prompt and response, or the output of "
        "lookahead generate or of the OpenAI batch API. Several are several workloads, named as their files without "
        "the ending.",
        "LOG...",
        is_argument=True,
    )
    input: str | None = option(None, "Prompts, as for generate.", "FILE", panel=IO)
    replay: Sequence[str] | None = option(
        None,
        "Replay logged prompt/response pairs instead of running a model, see lookahead replay. Repeat for several "
        "workloads, each named as its file without the ending.",
        "PAIRS",
        panel=IO,
    )
    prompts: Sequence[str] | None = option(
        None,
        "The job's --input, if its output does not hold the prompts (generate --echo). Rows are joined by id; repeat for "
        "several. Default: the files that the output's manifest names.",
        "FILE",
        panel=IO,
    )
    chat: bool | None = option(
        None,
        'Wrap each "prompt" in the tokenizer\'s chat template, as the job did. Default: as in its manifest.',
        panel=IO,
        flags=("--chat/--no-chat",),
    )
    system: str | None = option(None, "System message of the job's chat prompts.", "TEXT", panel=IO)
    prompt_field: str | None = as_of_job("prompt_field")
    template: str | None = as_of_job("template")
    tokenizer: str | None = option(
        None,
        "Tokenizer of logs that hold text. Default: the one that the trie was built with, else that of the job's model.",
        "NAME_OR_DIR",
        panel=IO,
    )
    trie: Sequence[str] | None = option(
        None,
        "Prebuilt trie to draft from; repeat for several. NAME=FILE: for the workload of that name only.",
        "[NAME=]FILE",
        panel=DRAFTING,
    )
    trie_weight: Sequence[str] | None = as_of_job("trie_weight")
    strategy: str | None = option(
        None,
        "auto, hierarchical, parallel or single. Default: all; auto needs a model or --cost-profile. With --sweep: the "
        "strategy to sweep, default hierarchical.",
        "NAME[,NAME]",
        panel=DRAFTING,
        complete=_compared,
    )
    decoding_length: str | None = option(
        None,
        "Tokens of one row in a forward: the last token + the draft tokens. auto chooses by itself. Default: 16, in a "
        "replay without costs 64, with --sweep 2,4,8,16,32,64.",
        "N[,N]",
        panel=DRAFTING,
    )
    branch_length: str | None = option(
        None,
        "Maximum draft tokens on one path; several with --sweep only. Default: 64, with --sweep 4,8,16,64.",
        "N[,N]",
        panel=DRAFTING,
    )
    session_tokens: int = as_of_job("session_tokens", default=SESSION_TOKENS)
    price: float = as_of_job("price")
    random_weights: bool = option(
        False,
        "With --replay and --model: real forwards of a model of that shape (its config.json is enough); the logged tokens "
        "are used as its choices.",
        panel=MODEL,
    )
    cost_profile: str | None = option(
        None,
        "In a replay: predict the speed of a model on another machine. A file of lookahead calibrate, or a shipped "
        "profile such as llama-7b-h200.",
        "PROFILE",
        panel=COSTS,
        complete=_profiles,
    )
    rows: int | None = option(None, "Use the first N rows only.", "N", panel=IO, least=1)
    max_new_tokens: int = as_of_job("max_new_tokens", panel=RUNS)
    batch_size: str = option("1", "Prompts decoded at once; several sizes are measured in turn.", "N[,N]", panel=RUNS)
    peers: bool = option(
        True,
        "Also run model.generate and, at batch size 1, Hugging Face prompt lookup.",
        panel=RUNS,
        flags=("--peers/--no-peers",),
    )
    repeat: int = option(
        1,
        "On a model: each group of prompts is timed N times, with all learned text cleared in between; the median counts.",
        "N",
        panel=RUNS,
        least=1,
    )
    sweep: bool = option(
        False,
        "Measure every decoding length with every branch length, on a model also auto. --plot draws forward time, speed "
        "and EDL against both; for a replay without costs EDL and draft time.",
        panel=RUNS,
    )
    recycling: bool = option(
        False,
        "On a model: also run each strategy without runner-up tokens, and with --trie both also without the tries.",
        panel=RUNS,
    )
    baselines: bool = option(
        False,
        "In a replay: also prompt lookup and the original lookahead trie, at the same decoding lengths.",
        panel=RUNS,
        flags=("--baselines/--no-baselines",),
    )
    check_lossless: bool | None = option(
        None,
        "Compare the outputs of all rows with plain decoding, token by token; or of none. Default: of the first 64.",
        panel=RUNS,
        flags=("--check-lossless/--no-check-lossless",),
    )
    explain: int | None = option(
        None,
        "In a replay: show each step of the first ROWS rows, as the first strategy drafts them, warm if there is a trie. "
        "On stdout; with --json on stderr.",
        "ROWS",
        panel=REPORTING,
        least=1,
    )
    save: str | None = option(None, "Write the JSON to this file as well.", "FILE", panel=REPORTING)
    plot: str | None = option(
        None,
        "Draw speed and EDL, for a sweep by lengths: .png, .pdf, .svg. In a replay: with --sweep or --cost-profile.",
        "FILE",
        panel=REPORTING,
    )
    report: str | None = option(
        None,
        "Write everything as one HTML page that needs no network. In a replay: with --cost-profile.",
        "FILE",
        panel=REPORTING,
    )

    def contenders(self) -> Contenders:
        """Strategies and lengths to compare."""
        from lookahead.bench.contenders import Contenders

        lengths = self.decoding_length, self.branch_length
        return Contenders(self.strategy, *lengths, self.session_tokens, self.price, self.sweep)

    def on(self, model: ModelOptions, **compared: Any) -> ModelBench:
        """A bench on a model. compared: `options` or `contenders` of it."""
        from lookahead.bench.contenders import ModelBench, batch_sizes_of

        return ModelBench(
            model,
            tries=self.trie or (),
            weights=self.trie_weight,
            max_new_tokens=self.max_new_tokens,
            rows=self.rows,
            batch_sizes=batch_sizes_of(self.batch_size),
            peers=self.peers,
            repeats=self.repeat,
            recycling=self.recycling,
            lossless_rows=CHECKED_ROWS if self.check_lossless is None else None if self.check_lossless else 0,
            **compared,
        )

    def replayed(self, logs: Logs) -> ReplaySpec:
        """A replay of these logs."""
        from lookahead.bench.contenders import batch_sizes_of
        from lookahead.bench.logged import ReplaySpec

        costs = self.cost_profile, batch_sizes_of(self.batch_size), self.repeat
        return ReplaySpec(logs, self.contenders(), self.baselines, self.explain or 0, *costs)

    def check(self, common: Common, reads: Sequence[Input]) -> None:
        """See `check_outputs`."""
        from lookahead.files.outputs import BENCH, PAGE, PICTURE, Output

        drawn = Output("--plot", self.plot, PICTURE), Output("--report", self.report, PAGE)
        common.check([Output("--save", self.save, BENCH), *drawn], reads)

    def write(self, value: dict[str, Any], figure: Any = None, page: str = "") -> None:
        """Write the JSON, the page and the figure to their files. One that cannot be written costs none of the others."""
        from lookahead.bench.plot import save_figure

        with contextlib.ExitStack() as stack:
            if self.plot:
                stack.callback(save_figure, figure, self.plot)
            if self.report:
                stack.callback(_write, self.report, page)
            if self.save:  # the last is called first
                stack.callback(_write, self.save, json.dumps(value, indent=2) + "\n")


def _write(path: str, text: str) -> None:
    with replacing(path, "w") as file:
        file.write(text)


BENCHED = Some(
    "input replay trie trie_weight strategy decoding_length branch_length session_tokens price random_weights cost_profile "
    "rows max_new_tokens batch_size peers repeat sweep recycling baselines check_lossless explain save plot report"
)
MODEL_OF_A_BENCH = Some(
    "model gguf_file tokenizer revision adapter trust_remote_code dtype device threads attn engine engine_arg engine_mode "
    "quantize kv_dtype exact",
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
    "pairs prompts chat system prompt_field template tokenizer rows trie trie_weight strategy decoding_length branch_length "
    "session_tokens price sweep baselines cost_profile batch_size repeat explain save plot report",
    cost_profile={"panel": COSTS},
    batch_size={"help": "With --cost-profile: answers decoded at once.", "panel": COSTS},
    repeat={"help": "With --cost-profile: predict N times, see bench.", "panel": COSTS},
)
