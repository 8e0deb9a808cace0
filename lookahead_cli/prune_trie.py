"""lookahead prune-trie: a smaller trie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead_cli.options import Config, Json, LogFile, MaxMemory, Overwrite, Verbose, Workers, effort_of, size_in_bytes

if TYPE_CHECKING:
    from lookahead.trie.file import Trie


def command(
    trie: Annotated[str, typer.Argument(metavar="TRIE", help="Trie file to read; it stays as it is.")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="Trie file to write.")],
    min_count: Annotated[
        int, typer.Option("--min-count", min=1, metavar="N", help="Drop branches seen fewer than N times.")
    ] = 1,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=1, metavar="N", help="Keep documents worth most per byte, of at most N tokens together."
        ),
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="SIZE", help="The same by file size, such as 64MiB.")
    ] = None,
    drop_source: Annotated[
        list[str] | None,
        typer.Option("--drop-source", metavar="NAME", help="Drop documents of this source; repeat for several."),
    ] = None,
    coverage: Annotated[
        str | None, typer.Option("--coverage", metavar="FILE", help="Corpus file: say what the pruning costs in EDL.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="NAME_OR_DIR", help="Tokenizer for --coverage. Default: the trie's own."),
    ] = None,
    workers: Workers = 0,
    max_memory: MaxMemory = "1GiB",
    overwrite: Overwrite = False,
    json: Json = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
) -> None:
    """Write a smaller trie and say what it costs; the input stays as it is, unless -o names it and --overwrite is given.

    To --max-tokens or --max-bytes those documents are kept whose branches are worth most per byte: repeated ones that no
    document kept before them holds.

    Example: lookahead prune-trie answers.trie -o small.trie --max-bytes 64MiB --coverage held-out.jsonl
    """
    from lookahead.errors import UsageError
    from lookahead.outputs import TRIE, Input, Output, check_outputs
    from lookahead.trie.file import Trie
    from lookahead.trie.prune import prune_trie
    from lookahead_cli import render

    if min_count == 1 and max_tokens is None and max_bytes is None and not drop_source:
        raise UsageError("nothing to prune: give --min-count, --max-tokens, --max-bytes or --drop-source.")
    reads = [Input("--coverage", [coverage]), Input("--tokenizer", [tokenizer], hub=True), Input("--config", [config])]
    reads += [] if overwrite else [Input("TRIE", [trie])]  # what is pruned is gone
    check_outputs([Output("-o", out, TRIE), Output("--log-file", log_file)], reads, overwrite)
    limit = size_in_bytes(max_bytes) if max_bytes else None
    before = Trie(trie)
    loaded = None
    if coverage is not None and before.header.tokenizer_fingerprint:
        from lookahead_cli.inspect_trie import tokenizer_of

        loaded = tokenizer_of(before, tokenizer, needed=True)
    costs = [_edl(before, coverage, loaded)] if coverage else []
    with render.stages(shown=not json) as progress:
        effort = effort_of(max_memory, workers, progress)
        prune_trie(trie, out, min_count, max_tokens, limit, drop_source or (), effort=effort)
    after = Trie(out)
    if coverage:
        costs.append(_edl(after, coverage, loaded))
    rows: list[dict[str, Any]] = [
        {
            "trie": str(t.path),
            "tokens": t.header.tokens,
            "documents": t.header.documents,
            "branches": t.header.branches,
            "bytes": t.path.stat().st_size,
            **({"edl": round(costs[i], 4)} if costs else {}),
        }
        for i, t in enumerate((before, after))
    ]
    if json:
        render.print_json({"before": rows[0], "after": rows[1]})
        return
    render.table(
        f"{trie} -> {out}",
        ["", "tokens", "documents", "branches", "size", *(["EDL"] if costs else [])],
        [
            (
                when,
                r["tokens"],
                r["documents"],
                r["branches"],
                render.size(r["bytes"]),
                *([f"{r['edl']:.2f}"] if costs else []),
            )
            for when, r in zip(("before", "after"), rows, strict=True)
        ],
    )


def _edl(trie: Trie, path: str, tokenizer: Any | None) -> float:
    from lookahead.bench.coverage import coverage
    from lookahead_cli import render

    return render.patiently(lambda: coverage([trie], path, tokenizer).edl, render.COMPILING)
