"""lookahead bench: what drafts bring, measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead_cli.options import (
    SESSION_TOKENS,
    Attention,
    Config,
    Context,
    Device,
    Dtype,
    Json,
    MaxNewTokens,
    Model,
    Price,
    SessionTokens,
    TrieWeights,
    check_folder,
    draft_options,
    trie_weights,
)

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.lossless import Divergence
    from lookahead.bench.run import Run
    from lookahead.draft.drafter import DraftOptions

SHOWN = 5  # divergences below a table
MOST_AT_ONCE = 1024
STRATEGIES = ["auto", "hierarchical", "parallel", "single"]  # auto, the first, needs a model
CHECKED_ROWS = 64  # rows whose outputs are compared unless asked otherwise


def command(
    model: Model = None,
    input: Annotated[str | None, typer.Option("--input", metavar="FILE", help="Prompts, as for generate.")] = None,
    replay: Annotated[
        list[str] | None,
        typer.Option(
            "--replay",
            metavar="PAIRS",
            help="No model: logged prompts and responses (JSON lines) play it. Repeat for several workloads, each named as its "
            "file without the ending.",
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
            "--tokenizer", metavar="NAME_OR_DIR", help="Tokenizer of text rows in --replay, and to --explain in text."
        ),
    ] = None,
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
            help="On a model: every decoding length with every branch length, and auto; --plot draws forward time, speed and "
            "EDL against both.",
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
        str | None, typer.Option("--plot", metavar="FILE", help="Draw speed and EDL as a PNG; of a sweep by lengths.")
    ] = None,
    report: Annotated[
        str | None,
        typer.Option("--report", metavar="FILE", help="On a model: write all of it as one HTML page that needs no network."),
    ] = None,
    json: Json = False,
    config: Config = None,
    context: Context = None,  # type: ignore[assignment]
) -> None:
    """Measure plain decoding against every strategy and the Hugging Face peers: same prompts, same run, in turn.

    Example: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie

    Without a model: lookahead bench --replay logged.jsonl --trie answers.trie --tokenizer org/model

    Real forwards, no weights: lookahead bench --replay logged.jsonl --model org/model --random-weights --batch-size 1,8

    Several at once: lookahead bench --replay faq.jsonl --replay code.jsonl --trie faq=faq.trie --baselines

    Hardware that is not here: lookahead bench --replay logged.jsonl --tokenizer org/model --cost-profile llama-7b-h200

    What lengths suit this machine: lookahead bench --model org/model --input prompts.jsonl --sweep --plot sweep.png

    To watch it draft: lookahead bench --replay logged.jsonl --trie answers.trie --explain 1
    """
    from lookahead.budget.profile import read_profile
    from lookahead.errors import UsageError
    from lookahead_cli import render

    if random_weights and not (model and replay):
        raise UsageError("--random-weights needs --model NAME_OR_DIR (a config.json is enough) and --replay PAIRS.")
    if not random_weights and (model is None) == (not replay):
        raise UsageError(
            "give either --model with --input, or --replay PAIRS (with --model only for --random-weights). "
            "To try without either: lookahead demo"
        )
    if recycling and (sweep or not model):
        raise UsageError("--recycling compares runs on a model (--model), and not in a --sweep.")
    if cost_profile and (random_weights or not replay):
        raise UsageError("--cost-profile stands in for a model in --replay: leave out --model and --random-weights.")
    timed = model is not None or cost_profile is not None
    if sweep:
        options = _swept(strategy, decoding_length, branch_length, session_tokens, price)
    else:
        options = _contenders(strategy, decoding_length, branch_length, session_tokens, price, timed)
    batch_sizes = _batch_sizes(batch_size)
    comparisons: list[Comparison] = []
    failed: list[str] = []
    written = [path for path in (save, plot, report) if path]
    if len(set(written)) < len(written):
        raise UsageError("--save, --plot and --report need files of their own.")
    for path in written:
        check_folder(path)
    if replay and not random_weights:
        if any((input, attn, dtype != "auto", device != "auto", max_new_tokens != 256, not peers, check_lossless is not None)):
            raise UsageError(
                "--replay runs no model: leave out --input, --attn, --dtype, --device, --max-new-tokens, --no-peers, "
                "--check-lossless and --no-check-lossless."
            )
        if not timed and (plot or report or sweep or repeat > 1 or batch_sizes != [1]):
            raise UsageError(
                "--replay runs no model: --plot, --report, --sweep, --repeat and --batch-size need --cost-profile, or "
                "--model with --random-weights."
            )
        if len(replay) > 1 and (plot or report):
            raise UsageError("--plot and --report show one workload: give one --replay.")
        from lookahead.bench.workloads import as_json
        from lookahead_cli.replay import explain_rows, fixed, predict_all, print_replays, read_workloads, replay_all

        profile = read_profile(cost_profile) if cost_profile else None
        workloads, loaded = read_workloads(replay, trie or [], trie_weight, tokenizer, rows)
        if explain:
            explain_rows(workloads, options[0], loaded, explain, render.err if json else render.out)
        replays = replay_all(workloads, fixed(options), baselines)
        value = as_json(replays)
        if not json:
            print_replays(replays)
        if profile:
            comparisons = predict_all(profile, workloads, options, batch_sizes, repeat, value, shown=not json)
    else:
        if replay:
            if input or baselines or explain or max_new_tokens != 256 or len(replay) > 1:
                raise UsageError(
                    "--random-weights takes one --replay, and neither --input, --max-new-tokens, --baselines nor --explain."
                )
            if check_lossless:
                raise UsageError("--check-lossless: with --random-weights the answers are given, there is nothing to compare.")
            from lookahead_cli.replay import replay_on

            comparisons = replay_on(
                str(model), replay[0], trie or [], trie_weight, options, tokenizer, rows, dtype, device, attn, batch_sizes,
                peers, repeat, shown=not json, recycling=recycling,
            )  # fmt: skip
        else:
            if input is None or tokenizer or baselines:
                raise UsageError("--model needs --input prompts.jsonl and takes neither --tokenizer nor --baselines.")
            if explain:
                raise UsageError("--explain is for --replay; to watch a model: lookahead generate --explain ROWS.")
            comparisons, failed = compare_on(
                str(model), input, trie, options, rows, max_new_tokens, dtype, device, attn, peers, check_lossless is not False,
                shown=not json, weights=trie_weight, batch_sizes=batch_sizes, repeats=repeat,
                lossless_rows=None if check_lossless else CHECKED_ROWS, recycling=recycling,
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
    if plot:
        from lookahead.bench.plot import comparison_figure, save_png
        from lookahead.bench.sweep import sweep_figure

        save_png(sweep_figure(comparisons) if sweep else comparison_figure(comparisons), plot)
    if report:
        from lookahead.atomic import replacing
        from lookahead.bench.report import report_page

        with replacing(report, "w") as page:
            page.write(report_page(comparisons, context.obj, failed, sweep))
    if save:
        import json as json_module

        from lookahead.atomic import replacing

        with replacing(save, "w") as file:
            file.write(json_module.dumps(value, indent=2) + "\n")


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
) -> tuple[list[Comparison], list[str]]:
    """(a comparison for each batch size, what is wrong with rows that were left out)."""
    from itertools import islice

    from lookahead.errors import LookaheadError
    from lookahead.job.rows import prompt_ids_of, read_requests
    from lookahead.job.setup import EngineSettings
    from lookahead_cli import render
    from lookahead_cli.engines import load_here
    from lookahead_cli.options import open_tries

    requests = list(islice(read_requests(input), rows))
    given_weights = tuple(trie_weights(weights, [open_tries(tries)])[0])
    loaded = load_here(EngineSettings(model, tuple(tries or ()), given_weights, options[0], dtype, device, attention))
    engine, tokenizer = loaded.engine, loaded.tokenizer
    prompts, failed = [], []
    for request in requests:
        try:
            if request.problem:
                raise LookaheadError(request.problem + ".")
            ids = prompt_ids_of(request, tokenizer)
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


def print_comparison(comparison: Comparison, swept: bool = False) -> None:
    """Tables of speed and of where the time went, who and how deep was accepted, verdict on losslessness, environment.

    swept: also how auto compares with the best fixed setting.
    """
    from lookahead.bench.plot import title_of
    from lookahead_cli import render

    repeats = f", median of {comparison.repeats} repeats" if comparison.repeats > 1 else ""
    render.table(
        f"{title_of(comparison)}, batch {comparison.batch_size}{repeats}",
        ["decoding", "tokens/s", "speedup", "quartiles", "EDL", "drafted", "wasted"],
        [
            (
                run.name,
                f"{run.tokens_per_second:.1f}",
                f"{run.speedup:.2f}x",
                "{:.2f}-{:.2f}".format(*run.speedup_spread) if run is not comparison.runs[0] else "",
                f"{run.edl:.2f}",
                f"{run.draft_tokens / max(1, run.steps):.1f}",
                f"{run.draft_tokens_wasted / max(1, run.steps):.1f}",
            )
            for run in comparison.runs
        ],
    )
    _print_time(comparison)
    if swept:
        from lookahead.bench.sweep import in_words

        render.out.print(in_words(comparison), markup=False)
    best = comparison.best
    render.accepted_by_source(best.name, best.accepted_by_source)
    render.accepted_by_depth(best.name, best.accepted_by_depth)
    if comparison.lossless:
        found, first = comparison.lossless, comparison.lossless_rows
        of_first = f" (first {first} of {comparison.rows} prompts; all: --check-lossless)" if first < comparison.rows else ""
        render.out.print(
            f"lossless: {found.identical}/{found.checked} outputs identical to plain decoding, "
            f"{found.near_tie} near-ties, {found.different} different{of_first}",
            markup=False,
        )
        for each in found.shown[:SHOWN]:
            render.out.print(_where(each), markup=False)
        if len(found.divergences) > SHOWN:
            render.out.print(f"... and {len(found.divergences) - SHOWN} more (--json shows 20)", markup=False)
    about = comparison.environment
    if comparison.predicted:
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items() if name != "cost_profile")
        render.out.print(f"predicted from a cost profile ({about['cost_profile']}): {told}", markup=False)
        return
    memory = max(run.peak_memory_bytes for run in comparison.runs)
    render.out.print(
        f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, transformers {about['transformers']}, "
        f"peak memory {render.size(memory)}",
        markup=False,
    )


def _print_time(comparison: Comparison) -> None:
    """Where the time of our own runs went."""
    from lookahead_cli import render

    def cells(run: Run) -> list[str]:
        split, forward_ms = run.time_split, run.forward_ms()
        if split is None:
            return ["-"] * 6
        return [
            *(f"{getattr(split, part) / run.seconds:.1%}" for part in ("draft", "forward", "verify", "rest")),
            f"{split.draft / max(1, run.steps) * 1e6:.0f}" if run.drafts else "-",
            f"{forward_ms:.2f}" if forward_ms else "-",
        ]

    render.table(
        "where the time went (draft us: a step of a row; forward ms: median)",
        ["decoding", "draft", "forward", "verify", "rest", "draft us", "forward ms"],
        [(run.name, *cells(run)) for run in comparison.runs if run.time_split],
    )


def _where(found: Divergence) -> str:
    """One line: where an output left plain decoding's."""
    where = f"{found.kind}: prompt {found.row}, {found.run}, after {found.place} tokens"
    if found.expected is None or found.got is None:
        return f"{where}: one answer goes on, the other has ended"
    scores = [f"{score:.6g}" if score is not None else "not finite" for score in (found.got_score, found.expected_score)]
    near = f"{found.tolerance:.2g}" if found.tolerance is not None else "-"
    return f"{where}: token {found.got} ({scores[0]}) for {found.expected} ({scores[1]}), within rounding up to {near}"


def _batch_sizes(text: str) -> list[int]:
    """ "1,8" -> [1, 8]. Raises UsageError."""
    from lookahead.errors import UsageError

    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and 1 <= int(size) <= MOST_AT_ONCE for size in sizes):
        raise UsageError(f"--batch-size {text}: give a number of prompts from 1 to {MOST_AT_ONCE}, or several such as 1,4,8.")
    return list(dict.fromkeys(map(int, sizes)))


def _contenders(
    strategy: str | None,
    decoding_length: str | None,
    branch_length: str | None,
    session_tokens: int,
    price: float,
    with_model: bool,
) -> list[DraftOptions]:
    """Options of each run. Raises UsageError for unknown names and lengths."""
    from lookahead.errors import UsageError

    names = _strategies(strategy, STRATEGIES if with_model else STRATEGIES[1:])
    lengths = decoding_length.split(",") if decoding_length else ["16" if with_model else "64"]
    (branch, *more) = _lengths("--branch-length", branch_length) if branch_length else [64]
    if more:
        raise UsageError(f"--branch-length {branch_length}: several branch lengths need --sweep.")
    options = []
    for name in names:
        for length in lengths:
            if length == "auto" and not with_model:
                raise UsageError("--decoding-length auto needs a model: a replay has no forwards to price.")
            fixed = draft_options(name, length, branch, session_tokens, price)  # refuses what is no length, for auto as well
            options.append(draft_options(name, "auto", branch, session_tokens, price) if name == "auto" else fixed)
    return list(dict.fromkeys(options))


def _swept(
    strategy: str | None, decoding_length: str | None, branch_length: str | None, session_tokens: int, price: float
) -> list[DraftOptions]:
    """Options of each run of a sweep, auto first. Raises UsageError for unknown names and lengths."""
    from lookahead.bench.sweep import BRANCH_LENGTHS, DECODING_LENGTHS, grid
    from lookahead.errors import UsageError

    names = [name for name in _strategies(strategy or "hierarchical", STRATEGIES) if name != "auto"]
    if not names:
        raise UsageError(f"--sweep --strategy {strategy}: auto has no lengths to sweep; it runs beside what is swept.")
    lengths = _lengths("--decoding-length", decoding_length) if decoding_length else DECODING_LENGTHS
    branches = _lengths("--branch-length", branch_length) if branch_length else BRANCH_LENGTHS
    options = [draft_options("auto", "auto", max(branches), session_tokens, price)]
    for name in names:
        options += [draft_options(name, str(n), b, session_tokens, price) for n, b in grid(lengths, branches)]
    return options


def _strategies(asked: str | None, possible: list[str]) -> list[str]:
    from lookahead.errors import UsageError

    names = list(dict.fromkeys(asked.split(","))) if asked else possible
    unknown = [name for name in names if name not in possible]
    if unknown:
        raise UsageError(f"--strategy {unknown[0]}: choose from {', '.join(possible)}.")
    return names


def _lengths(option: str, text: str) -> list[int]:
    """ "4,8" -> [4, 8]. Raises UsageError."""
    from lookahead.errors import UsageError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise UsageError(f"{option} {text}: give a number of tokens from 1 to 1024, or with --sweep several such as 4,8,16.")
    return [int(part) for part in parts]
