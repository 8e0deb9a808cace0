"""lookahead build-trie: corpora to one trie file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.errors import UsageError
from lookahead_cli.options import (
    IO,
    Config,
    Context,
    Json,
    LogFile,
    MaxMemory,
    Overwrite,
    Ray,
    Verbose,
    Workers,
    effort_of,
)
from lookahead_cli.parameters import given

if TYPE_CHECKING:
    from lookahead.corpus_build import BuiltTrie, CorpusBuild

TEXT = "Text of the corpus"  # a further panel of --help


def command(
    corpus: Annotated[
        list[str],
        typer.Argument(
            metavar="CORPUS...",
            help=".jsonl .json .csv .tsv .txt .md .html (also .gz, .zst) and .parquet files, folders, globs, - for stdin.",
        ),
    ],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Trie file to write.", rich_help_panel=IO)
    ] = None,
    append: Annotated[
        str | None,
        typer.Option(
            "--append",
            metavar="TRIE",
            help="Add to this trie instead, as a further segment; its existing text is not sorted again.",
            rich_help_panel=IO,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="NAME_OR_DIR",
            help="Tokenizer of the model that the drafts are for. Default with --append: the trie's own.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            min=1,
            metavar="N",
            help='Vocabulary of rows {"ids": [...]}, which need no tokenizer.',
            rich_help_panel=TEXT,
        ),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field",
            metavar="NAME",
            help="Field with the text. Default: text, response, output, completion, answer or messages.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            "--split",
            metavar="WHAT",
            help="What is one document of a .txt, .md or .html file: the file, or each paragraph.",
            rich_help_panel=TEXT,
        ),
    ] = "file",
    min_count: Annotated[
        int,
        typer.Option("--min-count", min=1, metavar="N", help="Leave out branches seen fewer than N times.", rich_help_panel=IO),
    ] = 1,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            "--source-name",
            metavar="NAME",
            help="Name of this corpus in reports. Default: the file's name.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first row that cannot be used.", rich_help_panel=TEXT)
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="With --append: first read the whole trie, and refuse a damaged one.",
            rich_help_panel=IO,
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
    context: Context = None,  # type: ignore[assignment]
) -> None:
    """Build a trie from corpora: reads text, writes one file that drafts are looked up in.

    Rows that cannot be used are counted, listed and skipped. Corpora of any size are sorted in runs that fit in --max-memory;
    the bytes of the file do not depend on memory and workers. With --ray each task has this memory.

    Example: lookahead build-trie answers.jsonl -o answers.trie --tokenizer org/model

    Next: lookahead inspect-trie answers.trie
    """
    from lookahead.corpus_build import BuildSpec, CorpusBuild
    from lookahead.files.outputs import ANY_TRIE, TRIE, Input, Output, check_outputs
    from lookahead_cli import render

    if append is None and out is not None and given(context, "verify"):
        raise UsageError("--verify and --no-verify go with --append: they are about reading the trie that is added to.")
    if append is not None and given(context, "min_count"):
        raise UsageError("--min-count does not go with --append: append first, then lookahead prune-trie --min-count N.")
    reading = vocab_size, text_field, split, min_count, source, strict
    build = CorpusBuild(BuildSpec(corpus, out, append, tokenizer, *reading, verify, workers, ray))
    reads = [Input("CORPUS", build.names), Input("--tokenizer", [build.spec.tokenizer], hub=True), Input("--config", [config])]
    check_outputs(
        [Output("-o", out, TRIE), Output("--append", append, ANY_TRIE), Output("--log-file", log_file)], reads, overwrite
    )
    built = run(build, max_memory, shown=not json)
    if json:
        render.print_json(built.as_json())
    else:
        print_built(built, appended=append is not None)


def run(build: CorpusBuild, max_memory: str = "2GiB", shown: bool = True) -> BuiltTrie:
    """Build, and report which rows were left out. shown: with a bar."""
    from lookahead_cli import render

    with render.stages(shown=shown, report=build.report, total=build.size) as progress:
        built = build.run(effort_of(max_memory, build.spec.threads, progress))
    report = built.report
    for problem in report.problems:
        render.notice(f"skipped {problem}")
    if report.bad > len(report.problems):
        render.notice(f"skipped {report.bad - len(report.problems)} more rows")
    if report.failed:
        render.notice(f"skipped {report.failed:,} rows of failed answers")
    if report.requests:
        render.notice(f"{report.requests:,} rows are requests without an answer: their prompts were taken as text")
    return built


def print_built(built: BuiltTrie, appended: bool = False) -> None:
    """What a trie holds now."""
    from lookahead_cli import render

    header, path = built.header, built.path
    what = f"{built.added:,} tokens added, {header.tokens:,} in all" if appended else f"{header.tokens:,} tokens"
    render.table(
        f"{path}: {what}, {render.size(built.size)}, built in {built.seconds:.1f} s",
        ["source", "documents", "tokens"],
        [(s.name, s.documents, s.tokens) for s in header.sources],
    )
    if len(header.segments) > 1:
        render.notice(f"{len(header.segments)} segments. To join them: lookahead merge-tries {path} -o {path}")
    render.notice(f"Next: lookahead inspect-trie {path}")
