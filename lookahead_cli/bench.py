"""lookahead bench: what drafts bring, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from lookahead.errors import UsageError
from lookahead.files.hub import with_gguf_file
from lookahead.job.spec import SESSION_TOKENS
from lookahead_cli.bench_engine import Engine, EngineArg, measured_in_engine
from lookahead_cli.bench_options import (
    CHECKED_ROWS,
    OF_A_MODEL,
    Baselines,
    BatchSize,
    BranchLengths,
    CheckLossless,
    CostProfile,
    DecodingLength,
    Explain,
    InputFile,
    KvDtypes,
    NamedTries,
    Outputs,
    Peers,
    Plot,
    Quantizations,
    RandomWeights,
    Recycling,
    Repeat,
    Replay,
    Report,
    Rows,
    Save,
    Strategy,
    Sweep,
    Tokenizer,
    on_screen,
)
from lookahead_cli.comparison import show, show_schemes
from lookahead_cli.options import (
    Adapter,
    Attention,
    Config,
    Context,
    Device,
    Dtype,
    EngineMode,
    Exact,
    GgufFile,
    Json,
    LogFile,
    MaxNewTokens,
    Model,
    Overwrite,
    Price,
    Revision,
    SessionTokens,
    TrieWeights,
    TrustRemoteCode,
    Verbose,
)
from lookahead_cli.parameters import given, refuse

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison


def command(
    model: Model = None,
    gguf_file: GgufFile = None,
    input: InputFile = None,
    replay: Replay = None,
    trie: NamedTries = None,
    trie_weight: TrieWeights = None,
    strategy: Strategy = None,
    decoding_length: DecodingLength = None,
    branch_length: BranchLengths = None,
    session_tokens: SessionTokens = SESSION_TOKENS,
    price: Price = 0.0,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    adapter: Adapter = None,
    trust_remote_code: TrustRemoteCode = False,
    random_weights: RandomWeights = False,
    cost_profile: CostProfile = None,
    rows: Rows = None,
    max_new_tokens: MaxNewTokens = 256,
    batch_size: BatchSize = "1",
    dtype: Dtype = "auto",
    device: Device = "auto",
    attn: Attention = None,
    engine: Engine = "hf",
    engine_arg: EngineArg = None,
    engine_mode: EngineMode = "auto",
    quantize: Quantizations = "none",
    kv_dtype: KvDtypes = "none",
    exact: Exact = False,
    peers: Peers = True,
    repeat: Repeat = 1,
    sweep: Sweep = False,
    recycling: Recycling = False,
    baselines: Baselines = False,
    check_lossless: CheckLossless = None,
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
    """Measure plain decoding against every strategy and the Hugging Face peers: same prompts, same run, in turn.

    Example: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie

    Without a model (the same as bench --replay): lookahead replay logged.jsonl --trie answers.trie

    Real forwards, no weights: lookahead bench --replay logged.jsonl --model org/model --random-weights --batch-size 1,8

    Find the best lengths for this machine: lookahead bench --model org/model --input prompts.jsonl --sweep --plot sweep.png
    """
    if measured := measured_in_engine(context):
        show(*measured, context)
        return
    from lookahead.bench.contenders import Contenders, batch_sizes_of
    from lookahead.bench.logged import Logs
    from lookahead.files.outputs import Input

    model = with_gguf_file(model, gguf_file)
    _check(context, bool(model), bool(replay), random_weights)
    contenders = Contenders(strategy, decoding_length, branch_length, session_tokens, price, sweep)
    logs = Logs(replay or (), trie or (), trie_weight, (), tokenizer, rows=rows)
    models = Input("--model", [model], hub=True), Input("--adapter", [adapter], hub=True)
    files = Input("--input", [input]), Input("--cost-profile", [cost_profile]), Input("--config", [config])
    outputs = Outputs(json, save, plot, report, overwrite, [*logs.reads("--replay"), *models, *files], log_file)
    sizes = batch_sizes_of(batch_size)
    if replay and not random_weights:
        from lookahead.bench.replay_run import ReplaySpec
        from lookahead_cli.replay import run as run_replay

        run_replay(ReplaySpec(logs, contenders, baselines, explain or 0, cost_profile, sizes, repeat), outputs, context)
        return
    from lookahead.bench.on_model import Look, ModelBench, bench_logged, bench_prompts
    from lookahead.bench.schemes import bench_schemes

    options = contenders.options(timed=True)
    outputs.check()
    bench = ModelBench(
        str(model), options, sizes, dtype, device, attn, peers, repeat, recycling,
        CHECKED_ROWS if check_lossless is None else None if check_lossless else 0, revision, adapter,
        None if replay else tokenizer, trust_remote_code, exact, engine_mode, quantize, kv_dtype,
    )  # fmt: skip
    events, about = on_screen(json), (trie or (), trie_weight, max_new_tokens, rows)

    def measure(bench: ModelBench, *look: Look) -> tuple[list[Comparison], list[str]]:
        if replay:
            return bench_logged(bench, logs, events, *look), []
        return bench_prompts(bench, str(input), *about, events, *look)

    if "," in quantize + kv_dtype:
        show_schemes(*bench_schemes(bench, quantize, kv_dtype, measure), outputs)
    else:
        show(*measure(bench), sweep, outputs, context)


def _check(context: typer.Context, model: bool, replay: bool, random_weights: bool) -> None:
    """Raise UsageError for options that do not go together. An option that is given as its default is given."""
    values = context.params
    if random_weights and not (model and replay):
        raise UsageError("--random-weights needs --model NAME_OR_DIR (a config.json is enough) and --replay PAIRS.")
    if not random_weights and model == replay:
        raise UsageError(
            "give either --model with --input, or --replay PAIRS (with --model only for --random-weights). "
            "To try without either: lookahead demo"
        )
    if values["recycling"] and (values["sweep"] or not model):
        raise UsageError("--recycling compares runs on a model (--model), and not in a --sweep.")
    if values["cost_profile"] and (random_weights or not replay):
        raise UsageError("--cost-profile stands in for a model in --replay: leave out --model and --random-weights.")
    if "," in values["quantize"] + values["kv_dtype"] and any(values[name] for name in ("sweep", "plot", "report")):
        raise UsageError("several of --quantize or --kv-dtype make one table: leave out --sweep, --plot and --report.")
    if random_weights:
        if values["exact"]:
            raise UsageError("--random-weights compares no answers, so --exact has nothing to make sure: leave it out.")
        if values["adapter"]:
            raise UsageError("--random-weights has no weights to merge an --adapter into: leave it out; it costs nothing.")
        if values["baselines"] or given(context, "input", "explain", "max_new_tokens") or len(values["replay"]) > 1:
            raise UsageError(
                "--random-weights takes one --replay, and neither --input, --max-new-tokens, --baselines nor --explain."
            )
        if values["check_lossless"]:
            raise UsageError("--check-lossless: with --random-weights the answers are given, there is nothing to compare.")
    elif replay:
        refuse(context, "--replay runs no model", *OF_A_MODEL)
    elif values["input"] is None or values["baselines"]:
        raise UsageError("--model needs --input prompts.jsonl and takes no --baselines.")
    elif values["explain"]:
        raise UsageError("--explain is for --replay; to watch a model: lookahead generate --explain ROWS.")
