"""Options of benches, inspect-trie and quantize. In: from Python or a command line. Out: values, passed whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lookahead.job.spec import PANELS, SESSION_TOKENS, as_of_job
from lookahead.options import OptionGroup, begins, option

IO, DRAFTING, MODEL, REPORTING = (PANELS[group][0] for group in ("io", "drafting", "model", "reporting"))
RUNS, COSTS = "Runs", "Costs"


@dataclasses.dataclass(frozen=True)
class InspectOptions(OptionGroup):
    """Options of inspect-trie. plot: the curve of EDL by size is wanted, which is drawn to this file."""

    trie: str = option(dataclasses.MISSING, "Trie file to read.", "TRIE", is_argument=True)
    query: str | None = option(
        None, "Draw only the draft tree that would be verified after this text. For a trie of ids: ids, such as 5 6 7.", "TEXT"
    )
    decoding_length: int = option(16, "Size of the tree of --query: its last token + draft tokens.", "N", least=2, most=1024)
    coverage: str | None = option(None, "Corpus file: report the EDL to expect on its documents.", "FILE")
    plot: str | None = option(None, "Draw EDL on the --coverage file by size: .png, .pdf or .svg.", "FILE")
    verify: bool = option(False, "Read every byte: checksums, order, tables.")
    tokenizer: str | None = option(None, "Tokenizer to show text with. Default: the one it was built with.", "NAME_OR_DIR")
    top: int = option(10, "Most frequent branches, or documents, to show.", "N", least=0)
    documents: bool = option(False, "List the documents instead; with --query those that contain its text.")
    export: str | None = option(
        None, "With --documents: write them as JSON lines, which build-trie and prune-trie --drop-documents read.", "FILE"
    )


@dataclasses.dataclass(frozen=True)
class QuantizeOptions(OptionGroup):
    """Options of quantize. loss_budget: nats per token that tokens of 4 bits may cost on the calibration texts."""

    out: str = option("", "Folder to write; it must not exist.", "DIR", flags=("--out", "-o"))
    weights: str = option("int8", "int8, or int4 (groups of 64; the output layer int8).", "SCHEME")
    text: str | None = option(None, "Corpus file: report what quantizing costs on its texts.", "FILE")
    activations: str = option(
        "int8", "int8, mixed (4 bits, blocks of channels with outliers 8), or none (weights only).", "SCHEME"
    )
    calibration: str | None = option(None, "Corpus file or trie to round weights on; mixed needs it.", "FILE")
    loss_budget: float = option(0.03, "With mixed: loss per token that 4 bits may add.", "NATS", least=0)
    pack_embedding: bool = option(False, "Write the embedding in 8 or 4 bits, too: our commands alone load the folder.")
    rows: int = option(64, "Texts of --text and --calibration.", "N", least=1)


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
    """Options of what bench and replay compare, on which rows, and what they write; each command has some of these."""

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
