"""lookahead build-trie: corpora to one trie file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.corpus.options import BuildSpec
from lookahead.errors import UsageError
from lookahead_cli import render
from lookahead_cli.options import Common, Resources, Some, given, with_groups

if TYPE_CHECKING:
    from lookahead.corpus_build import BuiltTrie, CorpusBuild


@with_groups
def command(
    context: typer.Context,
    spec: Annotated[BuildSpec, Some()],
    resources: Annotated[Resources, Some(max_memory={"default": "2GiB"})],
    common: Annotated[Common, Some()],
) -> None:
    """Build a trie from corpora: reads text, writes one file that drafts are looked up in.

    Rows that cannot be used are counted, listed and skipped. Corpora of any size are sorted in runs that fit in --max-memory;
    the bytes of the file do not depend on memory and workers. With --ray each task has this memory.

    Example: lookahead build-trie answers.jsonl -o answers.trie --tokenizer org/model

    Next: lookahead inspect-trie answers.trie
    """
    from lookahead.corpus_build import CorpusBuild
    from lookahead.files.outputs import ANY_TRIE, TRIE, Input, Output

    if spec.append is None and spec.out is not None and given(context, "verify"):
        raise UsageError("--verify and --no-verify go with --append: they are about reading the trie that is added to.")
    if spec.append is not None and given(context, "min_count"):
        raise UsageError("--min-count does not go with --append: append first, then lookahead prune-trie --min-count N.")
    build = CorpusBuild(spec, resources.workers, resources.ray)
    common.check(
        [Output("-o", spec.out, TRIE), Output("--append", spec.append, ANY_TRIE)],
        [Input("CORPUS", build.names), Input("--tokenizer", [build.spec.tokenizer], hub=True)],
    )
    built = run(build, resources, shown=not common.json)
    if common.json:
        render.print_json(built.as_json())
    else:
        print_built(built, appended=spec.append is not None)


def run(build: CorpusBuild, resources: Resources, shown: bool = True) -> BuiltTrie:
    """Build, and report which rows were left out. shown: with a bar."""
    with render.stages(shown=shown, report=build.report, total=build.size) as progress:
        built = build.run(resources.resources(progress))
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
    """Return what a trie holds now."""
    header, path = built.header, built.path
    what = f"{built.added:,} tokens added, {header.tokens:,} in all" if appended else f"{header.tokens:,} tokens"
    render.sources(f"{path}: {what}, {render.size(built.size)}, built in {built.seconds:.1f} s", header, weights=False)
    if len(header.segments) > 1:
        render.notice(f"{len(header.segments)} segments. To join them: lookahead merge-tries {path} -o {path}")
    render.notice(f"Next: lookahead inspect-trie {path}")
