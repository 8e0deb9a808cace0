"""lookahead prune-trie: a smaller trie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead_cli.options import (
    Config,
    Context,
    Json,
    LogFile,
    MaxMemory,
    Overwrite,
    Verbose,
    Workers,
    effort_of,
    part_of,
    size_in_bytes,
)
from lookahead_cli.parameters import given

if TYPE_CHECKING:
    from lookahead.corpus.tables import Split
    from lookahead.token_documents import TokenDocument
    from lookahead.trie.file import Trie


def command(
    trie: Annotated[str, typer.Argument(metavar="TRIE", help="Trie file to read.")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="Trie file to write.")],
    min_count: Annotated[
        int, typer.Option("--min-count", min=1, metavar="N", help="Drop branches seen fewer than N times.")
    ] = 1,
    max_tokens: Annotated[
        str | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            help="Keep the documents with the most benefit per byte, N tokens in total; or a share of the tokens, such as 50%.",
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="SIZE", help="The same by file size, such as 64MiB; or 50% of the file."),
    ] = None,
    drop_source: Annotated[
        list[str] | None,
        typer.Option("--drop-source", metavar="NAME", help="Drop documents of this source; repeat for several."),
    ] = None,
    drop_documents: Annotated[
        list[str] | None,
        typer.Option(
            "--drop-documents",
            metavar="CORPUS",
            help="Drop the documents that are in this corpus file, by their exact tokens; repeat for several.",
        ),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field", metavar="NAME", help="Field with the text of --drop-documents. Default: as of build-trie."
        ),
    ] = None,
    coverage: Annotated[
        str | None, typer.Option("--coverage", metavar="FILE", help="Corpus file: report the cost of pruning in EDL.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="NAME_OR_DIR", help="Tokenizer for corpus files. Default: the trie's own."),
    ] = None,
    workers: Workers = 0,
    max_memory: MaxMemory = "1GiB",
    overwrite: Overwrite = False,
    json: Json = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
    context: Context = None,  # type: ignore[assignment]
) -> None:
    """Write a smaller trie and report the cost. The input is not changed, unless -o names it and --overwrite is given.

    With --max-tokens or --max-bytes the documents with the most benefit per byte are kept: those with repeated branches that
    are not in a document kept already.

    Example: lookahead prune-trie answers.trie -o small.trie --max-bytes 64MiB --coverage held-out.jsonl
    """
    from lookahead.bench.trie_report import load_tokenizer_of
    from lookahead.errors import UsageError
    from lookahead.files.outputs import TRIE, Input, Output, check_outputs
    from lookahead.trie.file import Trie
    from lookahead.trie.prune import prune_trie
    from lookahead_cli import render

    if not given(context, "min_count", "max_tokens", "max_bytes", "drop_source", "drop_documents"):
        raise UsageError("nothing to prune: give --min-count, --max-tokens, --max-bytes, --drop-source or --drop-documents.")
    reads = [Input("--coverage", [coverage]), Input("--tokenizer", [tokenizer], hub=True), Input("--config", [config])]
    reads.append(Input("--drop-documents", drop_documents or []))
    reads += [] if overwrite else [Input("TRIE", [trie])]  # what is pruned is gone
    check_outputs([Output("-o", out, TRIE), Output("--log-file", log_file)], reads, overwrite)
    tokens = _tokens(max_tokens) if max_tokens is not None else None
    opened = Trie(trie)
    if max_tokens is not None and tokens is None:
        tokens = part_of(opened.header.tokens, max_tokens, "tokens")
    limit = None
    if max_bytes is not None:
        limit = part_of(opened.path.stat().st_size, max_bytes, "file") or size_in_bytes(max_bytes)
    loaded = None
    if (coverage is not None or drop_documents) and opened.header.tokenizer_fingerprint:
        loaded = load_tokenizer_of(opened, tokenizer, needed=True)
    unwanted = _documents(drop_documents or [], opened, loaded, text_field)
    before = _described(opened, coverage, loaded)
    with render.stages(shown=not json) as progress:
        effort = effort_of(max_memory, workers, progress)
        prune_trie(trie, out, min_count, tokens, limit, drop_source or (), unwanted, effort=effort)
    after = _described(Trie(out), coverage, loaded)
    if json:
        render.print_json({"before": before, "after": after})
        return
    costs = ["EDL"] if coverage else []
    rows = {"before": before, "after": after}
    render.table(
        f"{trie} -> {out}",
        ["", "tokens", "documents", "branches", "size", *costs],
        [
            (
                *(when, row["tokens"], row["documents"], row["branches"], render.size(row["bytes"])),
                *([f"{row['edl']:.2f}"] if costs else []),
            )
            for when, row in rows.items()
        ],
    )


def _documents(names: list[str], trie: Trie, tokenizer: Any | None, text_field: str | None) -> list[TokenDocument]:
    """Of --drop-documents, read as the trie's corpus was. A row that cannot be used is an error: its text would stay."""
    from lookahead.corpus.read import CorpusReport, expand, read_documents

    split: Split = "paragraphs" if trie.header.options.get("split") == "paragraphs" else "file"
    read = CorpusReport(), text_field, None, True, trie.header.vocab_size, 1
    return list(read_documents(expand(names), tokenizer, *read, split)) if names else []


def _tokens(text: str) -> int | None:
    """Of --max-tokens; None for a percentage. Raises UsageError for what is neither that nor a number above 0."""
    from lookahead.errors import UsageError

    if part_of(1, text, "tokens"):
        return None
    if not text.isdecimal() or not 1 <= int(text[:20]) < 1 << 63:
        raise UsageError(f"--max-tokens {text}: give a number of tokens, or a percentage such as 50%.")
    return int(text)


def _described(trie: Trie, coverage: str | None, tokenizer: Any | None) -> dict[str, Any]:
    """Sizes of a trie, and what EDL to expect on the documents of a corpus file."""
    from lookahead.bench.trie_report import coverage as measure
    from lookahead_cli import render

    header = trie.header
    found = {
        "trie": str(trie.path),
        "tokens": header.tokens,
        "documents": header.documents,
        "branches": header.branches,
        "bytes": trie.path.stat().st_size,
    }
    if coverage:
        edl = render.with_spinner(lambda: measure([trie], coverage, tokenizer).edl, render.COMPILING)
        found["edl"] = round(edl, 4)
    return found
