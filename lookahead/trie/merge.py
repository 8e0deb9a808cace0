"""Merging tries. In: trie files. Out: one new file; the inputs stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from lookahead.arguments import paths_of
from lookahead.errors import UsageError
from lookahead.files.atomic import locked, replacing
from lookahead.token_documents import TokenizerIdentity
from lookahead.trie import format
from lookahead.trie.file import Trie
from lookahead.trie.segment import BuildResources, Part, SourceTable, check_same_tokenizer, header_like, write_segment
from lookahead.trie.writer import TrieWriter


def merge_tries(
    paths: str | Path | Sequence[str | Path],
    out: str | Path,
    weights: Mapping[str, float] | None = None,
    resources: BuildResources | None = None,
    options: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> format.TrieHeader:
    """One file of one segment that answers every query as a build over all the corpora would. Returns the header written.

    weights: source name or trie file -> weight of its documents in drafting (default: as it was).
    options: what the header states about how the file was made (default: the names of the tries).
    verify: check that a single segment, which is merged with none, is sorted; all else is always checked on the way.
    Waits for another process that is writing `out`.
    Raises TokenizerMismatchError for tries of different tokenizers, UsageError for a weight that names nothing,
    TrieFormatError for a damaged trie.
    """
    named = paths_of(paths, "paths")
    if not named:
        raise UsageError("no trie to merge: name one at least.")
    resources = resources or BuildResources()
    with locked(out, resources.notice), replacing(out) as file:
        tries = [Trie(path) for path in named]
        options = options or {"merged": [trie.path.name for trie in tries]}
        return merge_into(file, tries, Path(out).parent, resources, options, weights or {}, verify)


def merge_into(
    file: IO[bytes],
    tries: Sequence[Trie],
    folder: Path,
    resources: BuildResources,
    options: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    verify: bool = True,
) -> format.TrieHeader:
    """`merge_tries` into a file that is open. folder: where what does not fit into memory is kept meanwhile."""
    weights = dict(weights or {})
    head = tries[0].header
    identity = TokenizerIdentity(head.vocab_size, head.tokenizer_fingerprint, head.tokenizer_name)
    unused = set(weights)
    sources = SourceTable()
    parts = []
    for trie in tries:
        check_same_tokenizer(trie, identity, str(tries[0].path))
        numbers = []
        for source in trie.header.sources:
            keys = [k for k in (source.name, str(trie.path), trie.path.name, trie.name) if k in weights]
            unused -= set(keys)
            numbers.append(sources.number(source.name, weights[keys[0]] if keys else source.weight))
        parts += [Part(trie, segment, np.array(numbers), not verify) for segment in trie.segments]
    for name, weight in weights.items():
        if not 0 < weight <= format.MAX_WEIGHT:
            raise UsageError(f"--weight {name}={weight:g}: give a number above 0, at most {format.MAX_WEIGHT:g}.")
    if unused:
        known = ", ".join(sorted({source.name for source in sources.sources()}))
        raise UsageError(f"--weight {min(unused)}: no such trie or source (sources: {known}).")
    writer = TrieWriter(file)
    write_segment(writer, parts, (), sources, head.vocab_size, folder, resources)
    return writer.finish(header_like(head, sources.sources(), options))
