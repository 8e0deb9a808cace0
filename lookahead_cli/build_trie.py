"""lookahead build-trie: corpora to one trie file."""

from __future__ import annotations

from typing import Annotated

import typer

from lookahead_cli.options import Config, Json, check_folder


def command(
    corpus: Annotated[
        list[str],
        typer.Argument(metavar="CORPUS...", help=".jsonl, .txt (also .gz, .zst) or .parquet files, globs, - for stdin."),
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="Trie file to write.")],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="NAME_OR_DIR", help="Tokenizer of the model that will draft from it.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", min=1, metavar="N", help='Vocabulary of rows {"ids": [...]}, which need no tokenizer.'),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field",
            metavar="NAME",
            help="Field with the text. Default: text, response, output, completion, answer or messages.",
        ),
    ] = None,
    min_count: Annotated[
        int, typer.Option("--min-count", min=1, metavar="N", help="Leave out branches seen fewer than N times.")
    ] = 1,
    source: Annotated[
        str | None, typer.Option("--source", metavar="NAME", help="Name of this corpus in reports. Default: the file's name.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first row that cannot be used.")] = False,
    workers: Annotated[int, typer.Option("--workers", min=0, metavar="N", help="Threads that tokenize; 0: one per core.")] = 0,
    json: Json = False,
    config: Config = None,
) -> None:
    """Build a trie from corpora: reads text, writes one file that drafts are looked up in.

    Rows that cannot be used are counted and listed; the rest is built.

    Example: lookahead build-trie answers.jsonl -o answers.trie --tokenizer org/model

    Next: lookahead inspect-trie answers.trie
    """
    import os
    import time
    from pathlib import Path

    from lookahead.corpus import CorpusReport, expand, read_documents
    from lookahead.errors import CorpusError, UsageError
    from lookahead.trie.build import TokenizerIdentity, build_trie
    from lookahead_cli import render

    if (tokenizer is None) == (vocab_size is None):
        raise UsageError("give either --tokenizer NAME_OR_DIR (text) or --vocab-size N (rows of ids).")
    check_folder(out)
    names = expand(corpus)
    if workers:
        os.environ["RAYON_NUM_THREADS"] = str(workers)
    began = time.perf_counter()
    loaded, whose = None, TokenizerIdentity(vocab_size or 0)
    if tokenizer is not None:
        from lookahead.tokenizer import identity, load_tokenizer

        loaded = load_tokenizer(tokenizer)
        whose = identity(loaded, tokenizer)
    report = CorpusReport()
    with render.progress("reading", None, shown=not json) as update:
        documents = read_documents(
            names, loaded, report, text_field, source, strict, whose.vocab_size, lambda n: update(n, "rows")
        )
        try:
            header = build_trie(documents, out, whose, min_count, {"text_field": text_field or "auto"})
        except CorpusError as error:
            if report.problems:
                raise CorpusError(f"{report.problems[0]} ({report.bad} bad rows; {error})") from error
            raise
    seconds = time.perf_counter() - began
    for problem in report.problems:
        render.notice(f"skipped {problem}")
    if report.bad > len(report.problems):
        render.notice(f"skipped {report.bad - len(report.problems)} more rows")
    size = Path(out).stat().st_size
    if json:
        render.print_json(
            {
                "trie": out,
                "rows": report.rows,
                "bad_rows": report.bad,
                "documents": header.documents,
                "tokens": header.tokens,
                "vocab_size": header.vocab_size,
                "bytes": size,
                "seconds": round(seconds, 3),
                "content_hash": header.content_hash,
                "sources": [{"name": s.name, "documents": s.documents, "tokens": s.tokens} for s in header.sources],
            }
        )
        return
    render.table(
        f"{out}: {header.tokens:,} tokens, {render.size(size)}, built in {seconds:.1f} s",
        ["source", "documents", "tokens"],
        [(s.name, s.documents, s.tokens) for s in header.sources],
    )
    render.notice(f"Next: lookahead inspect-trie {out}")
