"""lookahead merge-tries: several tries into one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from lookahead.options import OptionGroup, option
from lookahead_cli import render
from lookahead_cli.options import Common, Resources, Some, with_groups


@dataclasses.dataclass(frozen=True)
class MergeOptions(OptionGroup):
    tries: Sequence[str] = option(dataclasses.MISSING, "Trie files to read, all of one tokenizer.", "TRIE...", is_argument=True)
    out: str = option(dataclasses.MISSING, "Trie file to write.", "FILE", flags=("--out", "-o"))
    weight: Sequence[str] | None = option(
        None, "Weight of a trie or source in drafting (default 1); repeat for several.", "NAME=W"
    )
    verify: bool = option(
        True,
        "For a single trie of one segment: check the order of its suffixes. Several tries are always checked.",
        flags=("--verify/--no-verify",),
    )


@with_groups
def command(
    options: Annotated[MergeOptions, Some()],
    resources: Annotated[Resources, Some("workers max_memory")],
    common: Annotated[Common, Some()],
) -> None:
    """Merge tries: counts are added, sources are kept. The result gives the counts of one build over all corpora.

    The result has one segment. For a single trie with several segments, it joins them; the output may be an input.

    Example: lookahead merge-tries faq.trie reports.trie -o all.trie --weight faq=2.0
    """
    from pathlib import Path

    from lookahead.files.outputs import TRIE, Input, Output
    from lookahead.job.plan import weights_by_name  # loads numpy
    from lookahead.trie.merge import merge_tries

    out, tries = options.out, options.tries
    common.check([Output("-o", out, TRIE, ("TRIE",))], [Input("TRIE", tries)])
    weights = weights_by_name(options.weight, "--weight")
    with render.stages(shown=not common.json) as progress:
        header = merge_tries(tries, out, weights, resources.resources(progress), verify=options.verify)
    size = Path(out).stat().st_size
    if common.json:
        sources = [{"name": s.name, "documents": s.documents, "tokens": s.tokens, "weight": s.weight} for s in header.sources]
        counts = {"tokens": header.tokens, "documents": header.documents, "bytes": size}
        render.print_json({"trie": out, **counts, "sources": sources})
    else:
        render.sources(f"{out}: {header.tokens:,} tokens from {len(tries)} tries, {render.size(size)}", header)
