"""lookahead build-trie: corpora to one trie file."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lookahead_cli.options import Config, Json, LogFile, MaxMemory, Overwrite, Ray, Verbose, Workers


def command(
    corpus: Annotated[
        list[str],
        typer.Argument(
            metavar="CORPUS...",
            help=".jsonl .json .csv .tsv .txt .md .html (also .gz, .zst) and .parquet files, folders, globs, - for stdin.",
        ),
    ],
    out: Annotated[str | None, typer.Option("--out", "-o", metavar="FILE", help="Trie file to write.")] = None,
    append: Annotated[
        str | None,
        typer.Option(
            "--append", metavar="TRIE", help="Add to this trie instead, as a further segment; nothing is sorted anew."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="NAME_OR_DIR",
            help="Tokenizer of the model that will draft from it. Default with --append: the trie's own.",
        ),
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
    split: Annotated[
        str,
        typer.Option(
            "--split",
            metavar="WHAT",
            help="What of a .txt, .md or .html file is a document: the file, or each of its paragraphs.",
        ),
    ] = "file",
    min_count: Annotated[
        int, typer.Option("--min-count", min=1, metavar="N", help="Leave out branches seen fewer than N times.")
    ] = 1,
    source: Annotated[
        str | None, typer.Option("--source", metavar="NAME", help="Name of this corpus in reports. Default: the file's name.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first row that cannot be used.")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="With --append: first read the trie to its last byte, and refuse one that is damaged."
        ),
    ] = True,
    workers: Workers = 0,
    max_memory: MaxMemory = "2GiB",
    ray: Ray = None,
    overwrite: Overwrite = False,
    json: Json = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
) -> None:
    """Build a trie from corpora: reads text, writes one file that drafts are looked up in.

    Rows that cannot be used are counted and listed; the rest is built. Corpora of any size are sorted in runs that fit in
    --max-memory; the file is the same whatever the memory and the workers. With --ray each task has this memory.

    Example: lookahead build-trie answers.jsonl -o answers.trie --tokenizer org/model

    Next: lookahead inspect-trie answers.trie
    """
    import os
    import time
    from pathlib import Path

    from lookahead.corpus import CorpusReport, expand, folder_sources, read_documents, size_of
    from lookahead.errors import CorpusError, UsageError
    from lookahead.hub import tokenizer_of_trie
    from lookahead.outputs import TRIE, Input, Output, check_outputs
    from lookahead.token_documents import TokenizerIdentity
    from lookahead.trie.build import append_trie, build_trie
    from lookahead.trie.file import Trie
    from lookahead_cli import render
    from lookahead_cli.options import effort_of

    if (out is None) == (append is None):
        raise UsageError("give either -o OUT.trie (a new trie) or --append F.trie (an existing one).")
    if append is not None and ray:
        raise UsageError("--ray does not go with --append: build a trie of its own, then lookahead merge-tries.")
    if append is None and not verify:
        raise UsageError("--no-verify goes with --append: it leaves out reading the trie that is added to.")
    if append is not None and min_count > 1:
        raise UsageError("--min-count does not go with --append: append first, then lookahead prune-trie --min-count N.")
    before = Trie(append) if append is not None else None
    if before is not None and tokenizer is None:
        if vocab_size is None and not before.header.tokenizer_name:
            vocab_size = before.header.vocab_size
        elif vocab_size is None:
            tokenizer = tokenizer_of_trie(before.path, before.header.tokenizer_name)
    if (tokenizer is None) == (vocab_size is None):
        raise UsageError("give either --tokenizer NAME_OR_DIR (text) or --vocab-size N (rows of ids).")
    if split not in ("file", "paragraphs"):
        raise UsageError(f"--split {split}: choose file or paragraphs.")
    path = out or append or ""
    names = expand(corpus)
    reads = [Input("CORPUS", names), Input("--tokenizer", [tokenizer], hub=True), Input("--config", [config])]
    check_outputs([Output("-o", out, TRIE), Output("--append", append), Output("--log-file", log_file)], reads, overwrite)
    if ray and "-" in names:
        raise UsageError("--ray reads files, which every node opens itself, and no stdin.")
    if workers:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # of the tokenizers library
    began = time.perf_counter()
    loaded, whose = None, TokenizerIdentity(vocab_size or 0)
    if tokenizer is not None:
        from lookahead.tokenizer import identity, load_tokenizer

        loaded = load_tokenizer(tokenizer)
        whose = identity(loaded, tokenizer)
    report = CorpusReport()
    with render.stages(shown=not json, report=report, total=size_of(names)) as progress:
        effort = effort_of(max_memory, workers, progress)
        of_text: tuple[Any, dict[str, str]] = split, folder_sources(corpus)
        read = text_field, source, strict
        documents = read_documents(names, loaded, report, *read, whose.vocab_size, effort.workers, *of_text)
        options = {"text_field": text_field or "auto", **({"split": split} if split != "file" else {})}
        try:
            if ray:
                from lookahead.cluster.build import CorpusOptions, build_with_ray

                shared = CorpusOptions(tokenizer, whose, *read, *of_text)
                header = build_with_ray(ray, names, path, shared, report, min_count, options, effort, cores=workers or 1)
            elif append is not None:
                header = append_trie(documents, append, whose, effort, verify=verify)
            else:
                header = build_trie(documents, path, whose, min_count, options, effort)
        except CorpusError as error:
            if report.problems:
                raise CorpusError(f"{report.problems[0]} ({report.bad} bad rows; {error})") from error
            raise
    seconds = time.perf_counter() - began
    for problem in report.problems:
        render.notice(f"skipped {problem}")
    if report.bad > len(report.problems):
        render.notice(f"skipped {report.bad - len(report.problems)} more rows")
    if report.failed:
        render.notice(f"skipped {report.failed:,} rows of failed answers")
    if report.requests:
        render.notice(f"{report.requests:,} rows are requests without an answer: their prompts were taken as text")
    size = Path(path).stat().st_size
    added = header.tokens - (before.header.tokens if before is not None else 0)
    if json:
        render.print_json(
            {
                "trie": path,
                "rows": report.rows,
                "bad_rows": report.bad,
                "failed_rows": report.failed,
                "request_rows": report.requests,
                "documents": header.documents,
                "tokens": header.tokens,
                "added_tokens": added,
                "segments": len(header.segments),
                "vocab_size": header.vocab_size,
                "bytes": size,
                "seconds": round(seconds, 3),
                "content_hash": header.content_hash,
                "sources": [{"name": s.name, "documents": s.documents, "tokens": s.tokens} for s in header.sources],
            }
        )
        return
    what = f"{added:,} tokens added, {header.tokens:,} in all" if before is not None else f"{header.tokens:,} tokens"
    render.table(
        f"{path}: {what}, {render.size(size)}, built in {seconds:.1f} s",
        ["source", "documents", "tokens"],
        [(s.name, s.documents, s.tokens) for s in header.sources],
    )
    if len(header.segments) > 1:
        render.notice(f"{len(header.segments)} segments. To join them: lookahead merge-tries {path} -o {path}")
    render.notice(f"Next: lookahead inspect-trie {path}")
