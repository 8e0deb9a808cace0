"""Documents to a trie file, streaming. In: token documents in order. Out: one file, or one with a further segment.

Memory stays within a limit, and the bytes are the same regardless of the limit and the number of workers (segment.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lookahead.errors import TrieFormatError
from lookahead.files.atomic import locked, replacing, scratch_sibling
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie import format
from lookahead.trie.check import check_trie, checked_documents
from lookahead.trie.file import Trie
from lookahead.trie.prune import prune_trie
from lookahead.trie.segment import BuildResources, Part, SourceTable, check_same_tokenizer, write_segment
from lookahead.trie.suffixes import DEPTH
from lookahead.trie.writer import TrieWriter
from lookahead.version import __version__

MAX_SEGMENTS = 8  # an append to as many joins the smaller ones


def build_trie(
    documents: TokenDocument | Iterable[TokenDocument],
    out: str | Path,
    tokenizer: TokenizerIdentity,
    min_count: int = 1,
    options: dict[str, Any] | None = None,
    resources: BuildResources | None = None,
    new: bool = False,
) -> format.TrieHeader:
    """Sort the suffixes of `documents` and write them to `out`, atomically. Returns the header written.

    min_count: branches seen fewer times are left out (see `prune.prune_trie`).
    new: raises FileExistsError where another process has made `out` meanwhile, and leaves that as it is.
    Raises CorpusError if there is no document with tokens, or an id outside the vocabulary; LookaheadError if the disk is full.
    """
    resources = resources or BuildResources()
    described = {"min_count": min_count, **(options or {})}
    with contextlib.ExitStack() as stack:
        if min_count > 1:  # pruning locks and replaces the file
            file = stack.enter_context(scratch_sibling(out))
        else:
            stack.enter_context(locked(out, resources.notice))
            file = stack.enter_context(replacing(out, new=new))
        writer, sources = TrieWriter(file), SourceTable()
        write_segment(writer, [], documents, sources, tokenizer.vocab_size, Path(out).parent, resources)
        of_tokenizer = tokenizer.vocab_size, tokenizer.fingerprint, tokenizer.name
        header = writer.finish(format.TrieHeader(*of_tokenizer, DEPTH, sources.sources(), described, __version__))
        if min_count > 1:
            header = prune_trie(file.name, out, min_count, options=described, resources=resources)
    return header


def append_trie(
    documents: TokenDocument | Iterable[TokenDocument],
    path: str | Path,
    tokenizer: TokenizerIdentity,
    resources: BuildResources | None = None,
    verify: bool = True,
) -> format.TrieHeader:
    """Add `documents` to the trie at `path` as a further segment, atomically. Returns the header written.

    What is there is copied, not sorted again; only when there are MAX_SEGMENTS already, the smaller ones are joined with the
    new one. Readers that have the old file open keep it.
    verify: read what is there to its last byte before anything is added to it; else only what is joined is checked.
    Waits for another process that is appending to the same file, or replacing it, and then adds to what that one has written.
    Raises TokenizerMismatchError for documents of another tokenizer, TrieFormatError for a damaged trie or one that another
    process replaced meanwhile without a lock, and what build_trie raises.
    """
    resources = resources or BuildResources()
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(path, resources.notice))
        before = os.stat(path) if os.path.exists(path) else None
        old = Trie(path)
        check_same_tokenizer(old, tokenizer)
        if verify:
            pages = resources.pages()
            pages.watch(old.mapped)
            check_trie(old, resources.workers, pages)

        def check() -> None:
            now = os.stat(path)
            if before is None or (now.st_ino, now.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
                raise TrieFormatError(f"{path}: was replaced by another process meanwhile; nothing is appended. Run it again.")

        kept = kept_segments([segment.tokens for segment in old.header.segments])
        file = stack.enter_context(replacing(path, check=check))
        writer, sources = TrieWriter(file), SourceTable(old.header.sources)
        if kept:
            writer.keep(old.mapped, old.header.segments[:kept])
        parts = [Part(old, segment, np.arange(len(old.header.sources))) for segment in old.segments[kept:]]
        for part in parts:  # their documents are counted again
            ends, numbers = checked_documents(old, part.segment)
            sources.count(numbers, np.diff(ends, prepend=-1) - 1, -1)
        write_segment(writer, parts, documents, sources, tokenizer.vocab_size, Path(path).parent, resources)
        return writer.finish(dataclasses.replace(old.header, sources=sources.sources(), tool_version=__version__))


def kept_segments(tokens: Sequence[int]) -> int:
    """Return how many of the segments, given by their tokens, an append leaves as they are.

    Past MAX_SEGMENTS those stay that are larger than all behind them together; so what is sorted again is at most as much as
    what was added since, and a file has few segments however often it is appended to.
    """
    if len(tokens) < MAX_SEGMENTS:
        return len(tokens)
    kept = 0
    while kept < len(tokens) - 1 and tokens[kept] > sum(tokens[kept + 1 :]):
        kept += 1
    return kept
