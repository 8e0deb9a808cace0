"""lookahead prune-trie: a smaller trie."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead.errors import UsageError
from lookahead.options import OptionGroup, option
from lookahead_cli import render
from lookahead_cli.options import Common, Resources, Some, given, size_in_bytes, with_groups

if TYPE_CHECKING:
    from lookahead.token_documents import TokenDocument
    from lookahead.trie.file import Trie


@dataclasses.dataclass(frozen=True)
class PruneOptions(OptionGroup):
    trie: str = option(dataclasses.MISSING, "Trie file to read.", "TRIE", is_argument=True)
    out: str = option(dataclasses.MISSING, "Trie file to write.", "FILE", flags=("--out", "-o"))
    min_count: int = option(1, "Drop branches seen fewer than N times.", "N", least=1)
    max_tokens: str | None = option(
        None,
        "Keep the documents with the most benefit per byte, N tokens in total; or a share of the tokens, such as 50%.",
        "N",
    )
    max_bytes: str | None = option(None, "The same by file size, such as 64MiB; or 50% of the file.", "SIZE")
    drop_source: Sequence[str] | None = option(None, "Drop documents of this source; repeat for several.", "NAME")
    drop_documents: Sequence[str] | None = option(
        None, "Drop the documents that are in this corpus file, by their exact tokens; repeat for several.", "CORPUS"
    )
    text_field: str | None = option(None, "Field with the text of --drop-documents. Default: as of build-trie.", "NAME")
    coverage: str | None = option(None, "Corpus file: report the cost of pruning in EDL.", "FILE")
    tokenizer: str | None = option(None, "Tokenizer for corpus files. Default: the trie's own.", "NAME_OR_DIR")


@with_groups
def command(
    context: typer.Context,
    options: Annotated[PruneOptions, Some()],
    resources: Annotated[Resources, Some("workers max_memory")],
    common: Annotated[Common, Some()],
) -> None:
    """Write a smaller trie and report the cost. The input is not changed, unless -o names it and --overwrite is given.

    With --max-tokens or --max-bytes the documents with the most benefit per byte are kept: those with repeated branches that
    are not in a document kept already.

    Example: lookahead prune-trie answers.trie -o small.trie --max-bytes 64MiB --coverage held-out.jsonl
    """
    from lookahead.bench.trie_report import load_tokenizer_of
    from lookahead.files.outputs import TRIE, Input, Output
    from lookahead.trie.file import Trie
    from lookahead.trie.prune import prune_trie

    trie, out, coverage = options.trie, options.out, options.coverage
    if not given(context, "min_count", "max_tokens", "max_bytes", "drop_source", "drop_documents"):
        raise UsageError("nothing to prune: give --min-count, --max-tokens, --max-bytes, --drop-source or --drop-documents.")
    reads = [Input("--coverage", [coverage]), Input("--tokenizer", [options.tokenizer], hub=True)]
    reads.append(Input("--drop-documents", options.drop_documents or []))
    reads += [] if common.overwrite else [Input("TRIE", [trie])]  # what is pruned is gone
    common.check([Output("-o", out, TRIE)], reads)
    tokens, limit, opened = _tokens(options.max_tokens), None, Trie(trie)
    if options.max_tokens is not None and tokens is None:
        tokens = _part_of(opened.header.tokens, options.max_tokens, "tokens")
    if options.max_bytes is not None:
        limit = _part_of(opened.path.stat().st_size, options.max_bytes, "file") or size_in_bytes(options.max_bytes)
    loaded = None
    if (coverage is not None or options.drop_documents) and opened.header.tokenizer_fingerprint:
        loaded = load_tokenizer_of(opened, options.tokenizer, needed=True)
    unwanted = _documents(options.drop_documents or (), opened, loaded, options.text_field)
    before = _described(opened, coverage, loaded)
    with render.stages(shown=not common.json) as progress:
        what = options.min_count, tokens, limit, options.drop_source or (), unwanted
        prune_trie(trie, out, *what, resources=resources.resources(progress))
    after = _described(Trie(out), coverage, loaded)
    if common.json:
        render.print_json({"before": before, "after": after})
        return
    render.table(
        f"{trie} -> {out}",
        ["", "tokens", "documents", "branches", "size", *(["EDL"] if coverage else [])],
        [
            (
                *(when, row["tokens"], row["documents"], row["branches"], render.size(row["bytes"])),
                *([f"{row['edl']:.2f}"] if coverage else []),
            )
            for when, row in (("before", before), ("after", after))
        ],
    )


def _documents(names: Sequence[str], trie: Trie, tokenizer: Any | None, text_field: str | None) -> list[TokenDocument]:
    """Documents of --drop-documents, read as the trie's corpus was. A row that cannot be used is an error: it would stay."""
    from lookahead.corpus.read import CorpusReport, expand, read_documents

    split = "paragraphs" if trie.header.options.get("split") == "paragraphs" else "file"
    read = CorpusReport(), text_field, None, True, trie.header.vocab_size, 1
    return list(read_documents(expand(names), tokenizer, *read, split)) if names else []


def _part_of(whole: int, text: str, what: str) -> int | None:
    """ "50%" -> that share of `whole`, which is `what`; None for no percentage. Raises UsageError outside of 0 to 100."""
    if not text.strip().endswith("%"):
        return None
    try:
        share = float(text.strip()[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise UsageError(f"{text!r}: give a percentage of the {what}, above 0 and at most 100, such as 50%.")
    return max(1, int(share * whole))


def _tokens(text: str | None) -> int | None:
    """Read --max-tokens; None for a percentage. Raises UsageError for what is neither that nor a number above 0."""
    if text is None or _part_of(1, text, "tokens"):
        return None
    if not text.isdecimal() or not 1 <= int(text[:20]) < 1 << 63:
        raise UsageError(f"--max-tokens {text}: give a number of tokens, or a percentage such as 50%.")
    return int(text)


def _described(trie: Trie, coverage: str | None, tokenizer: Any | None) -> dict[str, Any]:
    """Sizes of a trie, and what EDL to expect on the documents of a corpus file."""
    from lookahead.bench.trie_report import coverage as measure

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
