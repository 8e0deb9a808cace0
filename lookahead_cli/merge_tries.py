"""lookahead merge-tries: several tries into one."""

from __future__ import annotations

from typing import Annotated

import typer

from lookahead_cli.options import Config, Json, LogFile, MaxMemory, Overwrite, Verbose, Workers, effort_of


def command(
    tries: Annotated[list[str], typer.Argument(metavar="TRIE...", help="Trie files to read, all of one tokenizer.")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="Trie file to write.")],
    weight: Annotated[
        list[str] | None,
        typer.Option(
            "--weight", metavar="NAME=W", help="Weight of a trie or source in drafting (default 1); repeat for several."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="For a single trie of one segment: check the order of its suffixes. Several tries are always checked.",
        ),
    ] = True,
    workers: Workers = 0,
    max_memory: MaxMemory = "1GiB",
    overwrite: Overwrite = False,
    json: Json = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
) -> None:
    """Merge tries: counts are added, sources are kept. The result gives the counts of one build over all corpora.

    The result has one segment. For a single trie with several segments, it joins them; the output may be an input.

    Example: lookahead merge-tries faq.trie reports.trie -o all.trie --weight faq=2.0
    """
    from pathlib import Path

    from lookahead.files.outputs import TRIE, Input, Output, check_outputs
    from lookahead.job.plan import weights_by_name
    from lookahead.trie.merge import merge_tries
    from lookahead_cli import render

    outputs = [Output("-o", out, TRIE, ("TRIE",)), Output("--log-file", log_file)]
    check_outputs(outputs, [Input("TRIE", tries), Input("--config", [config])], overwrite)
    weights = weights_by_name(weight, "--weight")
    with render.stages(shown=not json) as progress:
        header = merge_tries(tries, out, weights, effort_of(max_memory, workers, progress), verify=verify)
    size = Path(out).stat().st_size
    if json:
        sources = [{"name": s.name, "documents": s.documents, "tokens": s.tokens, "weight": s.weight} for s in header.sources]
        render.print_json(
            {"trie": out, "tokens": header.tokens, "documents": header.documents, "bytes": size, "sources": sources}
        )
        return
    render.table(
        f"{out}: {header.tokens:,} tokens from {len(tries)} tries, {render.size(size)}",
        ["source", "documents", "tokens", "weight"],
        [(s.name, s.documents, s.tokens, f"{s.weight:g}") for s in header.sources],
    )
