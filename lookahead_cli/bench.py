"""lookahead bench: what drafts bring, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead_cli.comparison import print_comparison
from lookahead_cli.model_options import Adapter, Revision, TrustRemoteCode
from lookahead_cli.options import (
    SESSION_TOKENS,
    Attention,
    Config,
    Context,
    Device,
    Dtype,
    Json,
    LogFile,
    MaxNewTokens,
    Model,
    Overwrite,
    Price,
    SessionTokens,
    TrieWeights,
    Verbose,
    trie_weights,
)

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison

CHECKED_ROWS = 64  # rows whose outputs are compared unless asked otherwise


def command(
    model: Model = None,
    input: Annotated[str | None, typer.Option("--input", metavar="FILE", help="Prompts, as for generate.")] = None,
    replay: Annotated[
        list[str] | None,
        typer.Option(
            "--replay",
            metavar="PAIRS",
            help="No model: logged prompts and responses play it, see lookahead replay. Repeat for several workloads, each "
            "named as its file without the ending.",
        ),
    ] = None,
    trie: Annotated[
        list[str] | None,
        typer.Option(
            "--trie",
            metavar="[NAME=]FILE",
            help="Prebuilt trie to draft from; repeat for several. NAME=FILE: for the --replay workload of that name only.",
        ),
    ] = None,
    trie_weight: TrieWeights = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME[,NAME]",
            help="Of auto, hierarchical, parallel, single. Default: all; auto needs a model or --cost-profile. With --sweep: "
            "what is swept, default hierarchical.",
        ),
    ] = None,
    decoding_length: Annotated[
        str | None,
        typer.Option(
            "--decoding-length",
            metavar="N[,N]",
            help="Tokens in one forward: the last token + the draft tokens; auto finds its own. Default: 16, in a replay "
            "without costs 64, with --sweep 2,4,8,16,32,64.",
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
    session_tokens: SessionTokens = SESSION_TOKENS,
    price: Price = 0.0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="NAME_OR_DIR",
            help="Tokenizer of text rows in --replay, and to --explain in text; of --model, another one than its own.",
        ),
    ] = None,
    revision: Revision = None,
    adapter: Adapter = None,
    trust_remote_code: TrustRemoteCode = False,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="With --replay and --model: real forwards of a model of that shape (its config.json is enough), the logged "
            "tokens taken as its choices.",
        ),
    ] = False,
    cost_profile: Annotated[
        str | None,
        typer.Option(
            "--cost-profile",
            metavar="PROFILE",
            help="With --replay: predict the speed of a model and machine that are not here. A file of lookahead calibrate, or "
            "a shipped profile such as llama-7b-h200.",
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, metavar="N", help="Use the first N rows only.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N[,N]", help="Prompts decoded at once; several sizes are measured in turn.")
    ] = "1",
    dtype: Dtype = "auto",
    device: Device = "auto",
    attn: Attention = None,
    peers: Annotated[
        bool,
        typer.Option("--peers/--no-peers", help="Also run model.generate and, at batch size 1, Hugging Face prompt lookup."),
    ] = True,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat",
            min=1,
            metavar="N",
            help="On a model: answer everything N times, memories forgotten in between; a turn counts as its repeat of median "
            "time did.",
        ),
    ] = 1,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Every decoding length with every branch length, on a model also auto; --plot draws forward time, speed and "
            "EDL against both, of a replay without costs EDL and draft time.",
        ),
    ] = False,
    recycling: Annotated[
        bool,
        typer.Option(
            "--recycling",
            help="On a model: each strategy also without what the model almost said, and with --trie both also cold.",
        ),
    ] = False,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines/--no-baselines",
            help="In --replay: also prompt lookup and the original lookahead trie, at the same decoding lengths.",
        ),
    ] = False,
    check_lossless: Annotated[
        bool | None,
        typer.Option(
            "--check-lossless/--no-check-lossless",
            help="Compare the outputs of all rows with plain decoding, token by token; or of none. Default: of the first 64.",
        ),
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(
            "--explain",
            min=1,
            metavar="ROWS",
            help="In --replay: show each step of the first ROWS rows, as the first strategy drafts them, warm if there is a "
            "trie. On stdout; with --json on stderr.",
        ),
    ] = None,
    save: Annotated[str | None, typer.Option("--save", metavar="FILE", help="Write the JSON to this file as well.")] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw speed and EDL, of a sweep by lengths: .png, .pdf, .svg."),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option("--report", metavar="FILE", help="On a model: write all of it as one HTML page that needs no network."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
    context: Context = None,  # type: ignore[assignment]
) -> None:
    """Measure plain decoding against every strategy and the Hugging Face peers: same prompts, same run, in turn.

    Example: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie

    Without a model: lookahead replay logged.jsonl --trie answers.trie (the same as bench --replay)

    Real forwards, no weights: lookahead bench --replay logged.jsonl --model org/model --random-weights --batch-size 1,8

    What lengths suit this machine: lookahead bench --model org/model --input prompts.jsonl --sweep --plot sweep.png
    """
    from lookahead.errors import UsageError
    from lookahead.outputs import Input
    from lookahead_cli import render
    from lookahead_cli.contenders import batch_sizes_of
    from lookahead_cli.replay import Asked, Outputs
    from lookahead_cli.replay import run as run_replay
    from lookahead_cli.replays import Logs, replay_on

    if random_weights and not (model and replay):
        raise UsageError("--random-weights needs --model NAME_OR_DIR (a config.json is enough) and --replay PAIRS.")
    if not random_weights and (model is None) == (not replay):
        raise UsageError(
            "give either --model with --input, or --replay PAIRS (with --model only for --random-weights). "
            "To try without either: lookahead demo"
        )
    if not model and (revision or adapter or trust_remote_code):
        raise UsageError("--replay runs no model: leave out --revision, --adapter and --trust-remote-code.")
    if random_weights and adapter:
        raise UsageError("--random-weights has no weights to merge an --adapter into: leave it out; it costs nothing.")
    if recycling and (sweep or not model):
        raise UsageError("--recycling compares runs on a model (--model), and not in a --sweep.")
    if cost_profile and (random_weights or not replay):
        raise UsageError("--cost-profile stands in for a model in --replay: leave out --model and --random-weights.")
    asked = Asked(
        strategy, decoding_length, branch_length, session_tokens, price, sweep, baselines, explain, cost_profile, batch_size,
        repeat,
    )  # fmt: skip
    logs = Logs(replay or (), trie or (), trie_weight, (), tokenizer, rows=rows)
    reads = [
        *logs.reads("--replay"), Input("--input", [input]), Input("--model", [model], hub=True),
        Input("--adapter", [adapter], hub=True),
        Input("--cost-profile", [cost_profile]), Input("--config", [config]),
    ]  # fmt: skip
    outputs = Outputs(json, save, plot, report, overwrite, reads, log_file)
    if replay and not random_weights:
        if any((input, attn, dtype != "auto", device != "auto", max_new_tokens != 256, not peers, check_lossless is not None)):
            raise UsageError(
                "--replay runs no model: leave out --input, --attn, --dtype, --device, --max-new-tokens, --no-peers, "
                "--check-lossless and --no-check-lossless."
            )
        run_replay(logs, asked, outputs, context.obj)
        return
    options, batch_sizes = asked.options(timed=True), batch_sizes_of(batch_size)
    outputs.check()
    failed: list[str] = []
    loading = {"trust_remote_code": trust_remote_code, "revision": revision}
    if replay:
        if input or baselines or explain or max_new_tokens != 256 or len(replay) > 1:
            raise UsageError(
                "--random-weights takes one --replay, and neither --input, --max-new-tokens, --baselines nor --explain."
            )
        if check_lossless:
            raise UsageError("--check-lossless: with --random-weights the answers are given, there is nothing to compare.")
        comparisons = replay_on(
            str(model), logs, options, dtype, device, attn, batch_sizes, peers, repeat, shown=not json, recycling=recycling,
            loading=loading,
        )  # fmt: skip
    else:
        if input is None or baselines:
            raise UsageError("--model needs --input prompts.jsonl and takes no --baselines.")
        if explain:
            raise UsageError("--explain is for --replay; to watch a model: lookahead generate --explain ROWS.")
        comparisons, failed = compare_on(
            str(model), input, trie, options, rows, max_new_tokens, dtype, device, attn, peers, check_lossless is not False,
            shown=not json, weights=trie_weight, batch_sizes=batch_sizes, repeats=repeat,
            lossless_rows=None if check_lossless else CHECKED_ROWS, recycling=recycling,
            loading={**loading, "adapter": adapter, "tokenizer": tokenizer},
        )  # fmt: skip
    from lookahead.bench import compare

    value = compare.as_json(comparisons)
    if json:
        render.print_json(value)
    else:
        for comparison in comparisons:
            print_comparison(comparison, sweep)
    for problem in failed:
        render.notice(f"left out {problem}")
    figure, page = None, ""
    if plot:
        from lookahead.bench.plot import comparison_figure
        from lookahead.bench.sweep import sweep_figure

        figure = sweep_figure(comparisons) if sweep else comparison_figure(comparisons)
    if report:
        from lookahead.bench.report import report_page

        page = report_page(comparisons, context.obj, failed, sweep)
    outputs.keep(value, figure, page)


def compare_on(
    model: str,
    input: str,
    tries: list[str] | None,
    options: list[Any],
    rows: int | None,
    max_new_tokens: int,
    dtype: str,
    device: str,
    attention: str | None,
    peers: bool,
    check_lossless: bool,
    shown: bool,
    weights: list[str] | None = None,
    batch_sizes: Sequence[int] = (1,),
    repeats: int = 1,
    lossless_rows: int | None = None,
    recycling: bool = False,
    loading: Mapping[str, Any] | None = None,
) -> tuple[list[Comparison], list[str]]:
    """(a comparison for each batch size, what is wrong with rows that were left out).

    loading: revision, adapter and the like, of `EngineSettings`.
    """
    from itertools import islice

    from lookahead.errors import LookaheadError
    from lookahead.job.prompt import prompts_of
    from lookahead.job.rows import read_requests
    from lookahead.job.setup import EngineSettings
    from lookahead_cli import render
    from lookahead_cli.engines import load_here
    from lookahead_cli.options import open_tries

    requests = list(islice(read_requests(input), rows))
    given_weights = tuple(trie_weights(weights, [open_tries(tries)])[0])
    placed = dtype, device, attention
    loaded = load_here(EngineSettings(model, tuple(tries or ()), given_weights, options[0], *placed, **(loading or {})))
    engine, tokenizer = loaded.engine, loaded.tokenizer
    prompts, failed = [], []
    for request in requests:
        try:
            if request.problem:
                raise LookaheadError(request.problem + ".")
            for ids in prompts_of(request, tokenizer, longest=engine.target.longest_text):
                engine.request(ids, max_new_tokens)
                prompts.append(ids)
        except LookaheadError as error:
            failed.append(f"{input}:{request.line}: {error}")
    if not prompts:
        raise LookaheadError(failed[0])
    from lookahead.bench.compare import compare

    comparisons = []
    for size in batch_sizes:
        with render.progress(f"answering, batch {size}", len(prompts) * repeats, shown=shown) as update:
            comparisons.append(
                compare(
                    engine.target,
                    prompts,
                    engine.drafter.tries,
                    options,
                    max_new_tokens,
                    peers,
                    check_lossless,
                    progress=lambda n, update=update: update(n, "prompts"),  # type: ignore[misc]
                    weights=trie_weights(weights, [engine.drafter.tries])[0],
                    batch_size=size,
                    repeats=repeats,
                    lossless_rows=lossless_rows,
                    recycling=recycling,
                )
            )
    return comparisons, failed
