"""Merging and pruning tries. In: trie files. Out: one new file; the inputs stay as they are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lookahead.errors import LookaheadError, TokenizerMismatchError, UsageError
from lookahead.trie import format
from lookahead.trie.build import SortedCorpus, TokenizerIdentity, assemble
from lookahead.trie.file import Trie
from lookahead.trie.suffixes import kernel, merge_sorted

# A branch is pruned by the count of its first tokens: the context token, and the continuation that it would draft.
BRANCH_DEPTH = 3


def merge_tries(paths: Sequence[str | Path], out: str | Path, weights: Mapping[str, float] | None = None) -> format.TrieHeader:
    """One file that answers every query as a build over all the corpora would. Returns the header written.

    weights: source name or trie file -> weight of its documents in drafting (default: as it was).
    Raises TokenizerMismatchError for tries of different tokenizers, UsageError for a weight that names nothing,
    TrieFormatError for a damaged trie.
    """
    tries = [Trie(path) for path in paths]
    for trie in tries:
        trie.verify()  # damage must not get fresh checksums
    head = tries[0].header
    for other in tries[1:]:
        ours, theirs = head.tokenizer_fingerprint, other.header.tokenizer_fingerprint
        if ours != theirs or head.vocab_size != other.header.vocab_size or head.depth != other.header.depth:
            raise TokenizerMismatchError(
                f"{other.path}: tokenizer {theirs[:8] or 'none (ids)'} (vocab {other.header.vocab_size}) differs from "
                f"{tries[0].path}: {ours[:8] or 'none (ids)'} (vocab {head.vocab_size}). Rebuild one of them."
            )
    weights = dict(weights or {})
    unused = set(weights)
    names: dict[tuple[str, float], int] = {}
    ends, of_source = [], []
    tokens = np.concatenate([t.tokens for t in tries])
    suffixes = np.empty(0, np.int64)
    offset = 0
    for trie in tries:
        remap = []
        for source in trie.header.sources:
            keys = [k for k in (source.name, str(trie.path), trie.path.name, trie.name) if k in weights]
            unused -= set(keys)
            weight = weights[keys[0]] if keys else source.weight
            remap.append(names.setdefault((source.name, weight), len(names)))
        ends.append(trie.document_ends.astype(np.int64) + offset)
        of_source.append(np.array(remap, np.int64)[trie.document_sources])
        right = trie.suffixes.astype(np.int64) + offset
        suffixes = merge_sorted(tokens, head.separator, suffixes, right, head.depth) if offset else right
        offset += len(trie.tokens)
    if unused:
        known = ", ".join(sorted({name for name, _ in names}))
        raise UsageError(f"--weight {min(unused)}: no such trie or source (sources: {known}).")
    merged = assemble(
        tokens,
        np.concatenate(ends),
        np.concatenate(of_source),
        [name for name, _ in names],
        _identity(head),
        suffixes,
        [weight for _, weight in names],
    )
    return merged.write(out, 1, {"merged": [t.path.name for t in tries]})


def prune_trie(
    path: str | Path,
    out: str | Path,
    min_count: int = 1,
    max_tokens: int | None = None,
    max_bytes: int | None = None,
    drop_sources: Sequence[str] = (),
) -> format.TrieHeader:
    """Write a smaller trie. Returns the header written.

    drop_sources: documents of these sources go. max_tokens, max_bytes: documents go, those first whose text is shared
    least with the rest, until the file is small enough. min_count: branches seen fewer times go.
    Raises UsageError for an unknown source, TrieFormatError for a damaged trie, LookaheadError if nothing would be left.
    """
    trie = Trie(path)
    trie.verify()  # damage must not get fresh checksums
    known = [s.name for s in trie.header.sources]
    for name in drop_sources:
        if name not in known:
            raise UsageError(f"--drop-source {name}: no such source in {trie.path} (sources: {', '.join(known)}).")
    corpus = SortedCorpus(
        trie.tokens,
        trie.suffixes.astype(np.int64),
        trie.document_ends.astype(np.int64),
        trie.document_sources.astype(np.int64),
        trie.header.sources,
        _identity(trie.header),
        trie.header.depth,
    )
    if drop_sources:
        dropped = [i for i, name in enumerate(known) if name in drop_sources]
        corpus = keep_documents(corpus, ~np.isin(corpus.document_sources, dropped), path)
    if min_count > 1:
        suffixes = frequent_suffixes(corpus, min_count)
        used = np.zeros(len(corpus.document_ends), bool)
        used[np.searchsorted(corpus.document_ends, suffixes)] = True
        corpus = keep_documents(dataclasses.replace(corpus, suffixes=suffixes), used, path)
    if max_tokens is not None or max_bytes is not None:
        of_documents = [trie.tokens, trie.suffixes, trie.document_ends, trie.document_sources]
        fixed = trie.path.stat().st_size - sum(a.nbytes for a in of_documents)
        fixed += format.ALIGNMENT * (len(trie.header.sections) + 1) + len(trie.path.name)  # padding; the header's new options
        room = math.inf if max_bytes is None else max_bytes - fixed
        sizes = _document_bytes(corpus, *(a.itemsize for a in of_documents))
        keep = _most_shared_documents(corpus, math.inf if max_tokens is None else max_tokens, sizes, room)
        corpus = keep_documents(corpus, keep, path)
    return corpus.write(out, 1, {"pruned_from": trie.path.name, "min_count": min_count})


def frequent_suffixes(corpus: SortedCorpus, min_count: int) -> np.ndarray:
    """The suffixes whose first BRANCH_DEPTH tokens stand at least `min_count` times in the corpus, sorted."""
    return corpus.suffixes[_branch_counts(corpus) >= min_count]


def keep_documents(corpus: SortedCorpus, keep: np.ndarray, path: str | Path) -> SortedCorpus:
    """The corpus with only those documents whose entry in `keep` is true. Raises LookaheadError if none is."""
    if not keep.any():
        raise LookaheadError(f"{path}: nothing would be left. Loosen the limits.")
    lengths = np.diff(corpus.document_ends, prepend=-1)
    kept_tokens = np.repeat(keep, lengths)
    moved = np.cumsum(kept_tokens) - 1  # new place of each kept token; order is kept, so suffixes stay sorted
    suffixes = corpus.suffixes[kept_tokens[corpus.suffixes]]
    left = np.unique(corpus.document_sources[keep])
    return assemble(
        corpus.tokens[kept_tokens],
        moved[corpus.document_ends[keep]],
        np.searchsorted(left, corpus.document_sources[keep]),
        [corpus.sources[i].name for i in left],
        corpus.tokenizer,
        moved[suffixes],
        [corpus.sources[i].weight for i in left],
    )


def _identity(header: format.TrieHeader) -> TokenizerIdentity:
    return TokenizerIdentity(header.vocab_size, header.tokenizer_fingerprint, header.tokenizer_name)


def _document_bytes(corpus: SortedCorpus, token: int, suffix: int, end: int, source: int) -> np.ndarray:
    """Bytes that each document takes in a file, given those of one entry of each section."""
    documents = len(corpus.document_ends)
    suffixes = np.bincount(np.searchsorted(corpus.document_ends, corpus.suffixes), minlength=documents)
    return np.diff(corpus.document_ends, prepend=-1) * token + suffixes * suffix + end + source


def _most_shared_documents(corpus: SortedCorpus, max_tokens: float, sizes: np.ndarray, max_bytes: float) -> np.ndarray:
    """Mask of documents, best share of repeated branches first, that together stay within both limits.

    sizes: bytes of each document.
    """
    lengths = np.diff(corpus.document_ends, prepend=-1) - 1
    repeated = np.bincount(
        np.searchsorted(corpus.document_ends, corpus.suffixes),
        weights=_branch_counts(corpus) > 1,
        minlength=len(corpus.document_ends),
    )
    order = np.argsort(-repeated / np.maximum(1, lengths), kind="stable")
    keep = np.zeros(len(order), bool)
    keep[order[(np.cumsum(lengths[order]) <= max_tokens) & (np.cumsum(sizes[order]) <= max_bytes)]] = True
    return keep


def _branch_counts(corpus: SortedCorpus) -> np.ndarray:
    """For each sorted suffix: how many share its first BRANCH_DEPTH tokens."""
    starts = _branch_starts(corpus.tokens, corpus.tokenizer.vocab_size, corpus.suffixes, BRANCH_DEPTH)
    counts = np.diff(starts, append=len(corpus.suffixes))
    return np.repeat(counts, counts)


@kernel
def _branch_starts(tokens, separator, suffixes, depth):
    """Places in `suffixes` where the first `depth` tokens differ from the suffix before."""
    starts = np.empty(len(suffixes), np.int64)
    found = 0
    for k in range(len(suffixes)):
        new = k == 0
        if not new:
            a, b = suffixes[k - 1], suffixes[k]
            for d in range(depth):
                if tokens[a + d] != tokens[b + d]:
                    new = True
                    break
                if tokens[a + d] == separator:
                    break
        if new:
            starts[found] = k
            found += 1
    return starts[:found]
