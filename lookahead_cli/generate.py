"""lookahead generate: answer a file of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from lookahead_cli.options import (
    PREFILL_CHUNK,
    SESSION_TOKENS,
    Attention,
    BatchSize,
    BranchLength,
    Config,
    DecodingLength,
    Device,
    Dtype,
    MaxNewTokens,
    MinP,
    Model,
    PrefillChunk,
    Price,
    RepetitionPenalty,
    Samples,
    Seed,
    SessionTokens,
    Stop,
    Temperature,
    TopK,
    TopP,
    Tries,
    TrieWeights,
    batch_size_of,
    check_folder,
    draft_options,
    open_tries,
    trie_weights,
)

if TYPE_CHECKING:
    from lookahead.decode.engine import LookaheadEngine
    from lookahead.draft.drafter import DraftOptions


def command(
    model: Model = None,
    input: Annotated[
        str | None, typer.Option("--input", metavar="FILE", help="Prompts: JSON lines (also .gz, .zst), - for stdin.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Answers: one JSON line per prompt. Default: stdout.")
    ] = None,
    trie: Tries = None,
    trie_weight: TrieWeights = None,
    max_new_tokens: MaxNewTokens = 256,
    batch_size: BatchSize = "auto",
    prefill_chunk: PrefillChunk = PREFILL_CHUNK,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    samples: Samples = 1,
    seed: Seed = 0,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            metavar="NAME",
            help="auto or hierarchical (a tree), parallel (branches side by side), single (one branch), off (plain decoding).",
        ),
    ] = "auto",
    decoding_length: DecodingLength = "auto",
    branch_length: BranchLength = 64,
    session_tokens: SessionTokens = SESSION_TOKENS,
    price: Price = 0.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attn: Attention = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help='Wrap each "prompt" as a user message in the model\'s chat template.')
    ] = False,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of chat prompts.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Write token_ids beside the text.")] = False,
    order: Annotated[
        str,
        typer.Option(
            "--order", metavar="NAME", help="Write answers in the order of their prompts (input) or as they end (completion)."
        ),
    ] = "input",
    save_trie: Annotated[
        str | None,
        typer.Option(
            "--save-trie",
            metavar="FILE",
            help="Keep this job's outputs as a trie, so that the next job starts warm; one that exists is added to.",
        ),
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(
            "--explain",
            min=1,
            metavar="ROWS",
            help="Show each step of the first ROWS rows: what was drafted, how likely, from where, and what was accepted. "
            "On stdout; on stderr where answers or --json go there.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary on stderr.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON object on stdout (needs -o).")] = False,
    config: Config = None,
) -> None:
    """Answer a file of prompts: the tokens that plain decoding gives, in fewer forwards of the model.

    Greedy, or sampled with --temperature; a row's "params" win over the line. Reads {"prompt"}, {"messages"}, {"prompt_ids"} or
    OpenAI batch lines. A row that fails becomes an error row.

    Example: lookahead generate --model org/model --input prompts.jsonl --trie answers.trie -o out.jsonl

    To watch it draft: lookahead generate --model org/model --input prompts.jsonl --trie answers.trie -o out.jsonl --explain 1

    Next: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie
    """
    import json as json_module
    from pathlib import Path

    from lookahead.errors import LookaheadError, UsageError
    from lookahead.job.rows import count_rows, read_requests
    from lookahead.trie.build import append_trie, build_trie, check_same_tokenizer
    from lookahead_cli import render

    if model is None:
        raise UsageError("name a model: --model org/name or a folder. To try without one: lookahead demo")
    if input is None:
        raise UsageError("name a file of prompts: --input prompts.jsonl (or - for stdin).")
    if json and out is None:
        raise UsageError("--json prints a summary on stdout, where the answers go: name a file with -o.")
    if system and not chat:
        raise UsageError("--system needs --chat.")
    if explain and strategy == "off":
        raise UsageError("--explain: --strategy off drafts nothing.")
    options = draft_options(strategy, decoding_length, branch_length, session_tokens, price)
    if order not in ("input", "completion"):
        raise UsageError(f"--order {order}: choose input or completion.")
    batch_size_of(batch_size, "cpu")
    check_folder(out)
    check_folder(save_trie)
    if out and Path(out).exists() and not overwrite:
        raise UsageError(f"{out}: exists. Give --overwrite to replace it, or choose another -o.")
    known = open_tries([save_trie]) if save_trie and Path(save_trie).exists() else []
    requests = read_requests(input)
    first = next(requests)  # a missing or empty input is known before the model is loaded
    engine, tokenizer, identity = load_engine(model, trie, trie_weight, options, dtype, device, attn)
    # What is explained comes row by row.
    engine.batch_size = 1 if explain else batch_size_of(batch_size, engine.target.device.type)
    engine.prefill_chunk = prefill_chunk
    if explain and engine.target.mode == "plain":
        raise UsageError(f"--explain: nothing is drafted for {model}: {engine.target.reason}")
    for learned_before in known:
        check_same_tokenizer(learned_before, identity, model)

    from itertools import chain

    from lookahead.decode.memory import peak_memory
    from lookahead.decode.sampling import Sampling
    from lookahead.job.runner import JobOptions, JobTotals, run_job
    from lookahead_cli.explain import Explainer

    learned: list[Any] | None = [] if save_trie else None

    def save_learned() -> None:
        if save_trie and learned and Path(save_trie).exists():
            append_trie(learned, save_trie, identity)
        elif save_trie and learned:
            build_trie(learned, save_trie, identity, options={"learned_from": model})

    explainer = Explainer(render.out if out and not json else render.err, tokenizer, rows=explain or 0)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty=repetition_penalty, stop=tuple(stop or ()))
    job = JobOptions(
        max_new_tokens, sampling, samples, seed, chat, system, token_ids, order == "input", learned, explainer.observer_of
    )
    totals = JobTotals()
    shown = not (quiet or explain)
    try:
        with _opened(out) as file, render.progress("answering", count_rows(input), shown=shown) as update:
            for row in run_job(engine, tokenizer, chain([first], requests), job, totals):
                file.write(json_module.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                rate = totals.tokens / totals.seconds if totals.seconds else 0.0
                update(totals.rows, f"{rate:.0f} tokens/s, EDL {totals.edl:.2f}")
    except KeyboardInterrupt:
        render.notice(f"interrupted after {totals.rows} rows; every line of {out or 'the output'} is a whole row.")
        save_learned()
        raise
    except OSError as error:
        raise LookaheadError(f"{out or 'stdout'}: write failed ({error.strerror}) after {totals.rows} rows.") from error
    save_learned()
    if json:
        peak = peak_memory(engine.target.device)
        shown_totals = {**totals.as_json(), "batch_size": engine.batch_size, "peak_memory_bytes": peak}
        render.print_json({"model": model, "output": out, **shown_totals})
    elif not quiet:
        rate = totals.tokens / totals.seconds if totals.seconds else 0.0
        render.notice(
            f"{totals.rows} rows ({totals.errors} failed), {totals.tokens:,} tokens in {totals.seconds:.1f} s: "
            f"{rate:.1f} tokens/s, EDL {totals.edl:.2f}"
        )
    if totals.errors:
        raise LookaheadError(f'{totals.errors} of {totals.rows} rows failed; see their "error" in {out or "the output"}.')


def load_engine(
    model: str,
    tries: list[str] | None,
    weights: list[str] | None,
    options: DraftOptions,
    dtype: str,
    device: str,
    attention: str | None,
) -> tuple[LookaheadEngine, Any | None, Any]:
    """(engine, tokenizer or None, tokenizer identity): opens tries first, as that is quick and often what is wrong."""
    from pathlib import Path

    from lookahead.trie.build import TokenizerIdentity
    from lookahead_cli import render

    opened = open_tries(tries)
    weights_of_tries = trie_weights(weights, [opened])[0]
    from lookahead.decode.engine import LookaheadEngine
    from lookahead.decode.model import load_model
    from lookahead.draft.drafter import Drafter
    from lookahead.tokenizer import TOKENIZER_FILES, identity, load_tokenizer

    target = load_model(model, dtype, device, attention)
    tokenizer, whose = None, TokenizerIdentity(target.vocab_size, "", model)
    if not Path(model).is_dir() or any((Path(model) / name).exists() for name in TOKENIZER_FILES):
        tokenizer = load_tokenizer(model)
        whose = identity(tokenizer, model)
    for trie in opened:
        trie.check_tokenizer(whose.fingerprint, max(target.vocab_size, whose.vocab_size), model)
    drafter = Drafter(opened, options, weights_of_tries)
    render.patiently(drafter.warm_up, render.COMPILING)
    if target.mode != "packed":
        render.notice(f"{model} verifies by {target.mode}: {target.reason}")
    return LookaheadEngine(target, drafter, tokenizer=tokenizer), tokenizer, whose


@contextmanager
def _opened(path: str | None) -> Iterator[IO[str]]:
    import sys
    from pathlib import Path

    if path is None:
        yield sys.stdout
        return
    with Path(path).open("w", encoding="utf-8") as file:
        yield file
