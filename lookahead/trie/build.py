"""Documents to a trie file. In: token documents in order. Out: one file, the same bytes for the same documents."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lookahead
from lookahead.errors import CorpusError
from lookahead.trie import format
from lookahead.trie.suffixes import DEPTH, first_table, sort_suffixes

LEFT_CONTEXT = 4  # prompt tokens kept before an answer, so that its first tokens can be drafted


@dataclasses.dataclass(frozen=True)
class TokenDocument:
    """One document to index. Nothing is drafted across its end."""

    token_ids: Sequence[int] | np.ndarray
    source: str  # corpus file, or the name given with --source


@dataclasses.dataclass(frozen=True)
class TokenizerIdentity:
    """Whose token ids these are. fingerprint is "" where the corpus came as bare ids."""

    vocab_size: int
    fingerprint: str = ""
    name: str = ""


def build_trie(
    documents: Iterable[TokenDocument],
    out: str | Path,
    tokenizer: TokenizerIdentity,
    min_count: int = 1,
    options: dict[str, Any] | None = None,
) -> format.TrieHeader:
    """Sort the suffixes of `documents` and write them to `out`, atomically. Returns the header written.

    min_count: branches seen fewer times are left out (see `edit.frequent_suffixes`).
    Raises CorpusError if there is no document with tokens, or an id outside the vocabulary.
    """
    separator = tokenizer.vocab_size
    flat = array.array("q")
    ends: list[int] = []
    of_source: list[int] = []
    names: dict[str, int] = {}
    for document in documents:
        if not len(document.token_ids):
            continue
        flat.extend(document.token_ids)
        ends.append(len(flat))
        flat.append(separator)
        of_source.append(names.setdefault(document.source, len(names)))
    if not ends:
        raise CorpusError("no document with text in the corpus: nothing to build.")
    tokens = np.frombuffer(flat, np.int64)
    bad = (tokens < 0) | (tokens > separator)
    if bad.any() or int((tokens == separator).sum()) != len(ends):
        worst = int(tokens[bad][0]) if bad.any() else separator
        raise CorpusError(f"token id {worst} is outside the vocabulary of {separator}. Give the right --vocab-size.")
    corpus = assemble(tokens, np.array(ends), np.array(of_source), list(names), tokenizer)
    return corpus.write(out, min_count, options or {})


@dataclasses.dataclass(frozen=True)
class SortedCorpus:
    """Everything that a trie file holds, in memory: arrays as in format.py, in wide dtypes.

    `suffixes` may lack some: branches that were pruned.
    """

    tokens: np.ndarray
    suffixes: np.ndarray
    document_ends: np.ndarray
    document_sources: np.ndarray
    sources: tuple[format.Source, ...]
    tokenizer: TokenizerIdentity
    depth: int = DEPTH

    def write(self, out: str | Path, min_count: int, options: dict[str, Any]) -> format.TrieHeader:
        """Write as a trie file, leaving out branches seen fewer than `min_count` times."""
        from lookahead.trie.edit import frequent_suffixes

        suffixes = frequent_suffixes(self, min_count) if min_count > 1 else self.suffixes
        first = first_table(self.tokens[suffixes], self.tokenizer.vocab_size)
        header = format.TrieHeader(
            vocab_size=self.tokenizer.vocab_size,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            tokenizer_name=self.tokenizer.name,
            tokens=len(self.tokens) - len(self.document_ends),
            documents=len(self.document_ends),
            depth=self.depth,
            sources=self.sources,
            options={"min_count": min_count, **options},
            tool_version=lookahead.__version__,
        )
        wide = {
            "tokens": self.tokens,
            "suffixes": suffixes,
            "first": first,
            "document_ends": self.document_ends,
            "document_sources": self.document_sources,
        }
        largest = {
            "tokens": header.separator,
            "suffixes": len(self.tokens),
            "first": len(self.tokens),
            "document_ends": len(self.tokens),
            "document_sources": len(self.sources),
        }
        arrays = {name: a.astype(format.smallest_dtype(name, largest[name])) for name, a in wide.items()}
        return format.write(out, header, arrays)


def assemble(
    tokens: np.ndarray,
    document_ends: np.ndarray,
    document_sources: np.ndarray,
    source_names: Sequence[str],
    tokenizer: TokenizerIdentity,
    suffixes: np.ndarray | None = None,
    weights: Sequence[float] | None = None,
) -> SortedCorpus:
    """Sort (unless `suffixes` are given) and count what each source holds. tokens: documents closed by separators."""
    separator = tokenizer.vocab_size
    tokens = tokens.astype(format.smallest_dtype("tokens", separator))
    lengths = np.diff(document_ends, prepend=-1) - 1
    sources = tuple(
        format.Source(
            name,
            documents=int((document_sources == i).sum()),
            tokens=int(lengths[document_sources == i].sum()),
            weight=float(weights[i]) if weights is not None else 1.0,
        )
        for i, name in enumerate(source_names)
    )
    if suffixes is None:
        suffixes = sort_suffixes(tokens, separator)
    return SortedCorpus(tokens, suffixes, document_ends, document_sources, sources, tokenizer)
