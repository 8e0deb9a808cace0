"""A trie file opened for reading. In: a path. Out: counts and continuations of any context. Knows nothing of drafts.

A node of the trie is a range of the sorted suffixes: all places of the corpus where the node's tokens stand. Its count is
the range's width; its children are the ranges one token deeper.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from lookahead.errors import TokenizerMismatchError, TrieFormatError
from lookahead.trie import format
from lookahead.trie.suffixes import kernel, matching_range


@dataclasses.dataclass(frozen=True)
class Match:
    """Places of the corpus that carry on from a context: sorted suffixes low to high, which begin `length` tokens back."""

    length: int
    low: int
    high: int

    @property
    def count(self) -> int:
        return self.high - self.low


class Trie:
    """Read-only, memory-mapped; any number of processes and threads may share one file.

    tokens, suffixes, first, document_ends and document_sources are the arrays of format.py.
    """

    def __init__(self, path: str | Path):
        """Open and check the header. Raises TrieFormatError for a file that is cut, altered or of another version."""
        self.path = Path(path)
        self.header = format.read_header(self.path)
        arrays = format.map_sections(self.path, self.header)
        self.tokens = arrays["tokens"]
        self.suffixes = arrays["suffixes"]
        self.first = arrays["first"]
        self.document_ends = arrays["document_ends"]
        self.document_sources = arrays["document_sources"]
        self.source_weights = np.array([s.weight for s in self.header.sources], np.float32)
        self.weighted = bool((self.source_weights != 1).any())

    @property
    def name(self) -> str:
        """Short name that reports use."""
        return self.path.stem

    def check_tokenizer(self, fingerprint: str, vocab_size: int, name: str) -> None:
        """Raise TokenizerMismatchError unless token ids mean the same here and for the tokenizer or model `name`."""
        ours = self.header.tokenizer_fingerprint
        if ours and fingerprint and ours != fingerprint:
            raise TokenizerMismatchError(
                f"{self.path}: built for tokenizer {ours[:8]} (vocab {self.header.vocab_size}); {name} uses "
                f"{fingerprint[:8]} (vocab {vocab_size}). Rebuild: lookahead build-trie CORPUS --tokenizer {name}"
            )
        if self.header.vocab_size > vocab_size:
            raise TokenizerMismatchError(
                f"{self.path}: built for a vocabulary of {self.header.vocab_size} tokens; {name} has {vocab_size}. "
                f"Rebuild: lookahead build-trie CORPUS --tokenizer {name}"
            )

    def longest_match(self, context: np.ndarray, longest: int) -> Match:
        """The longest end of `context` (int32), up to `longest` tokens, that stands anywhere in the corpus.

        A match of length 0 is the root: every suffix.
        """
        match = Match(0, 0, len(self.suffixes))
        for length in range(1, min(longest, len(context), self.header.depth) + 1):
            found = self.match(context[len(context) - length :])
            if not found.count:
                break
            match = found
        return match

    def match(self, pattern: np.ndarray) -> Match:
        """All places where `pattern` (int32, 1 to depth tokens) stands; count 0 if there is none."""
        low, high = matching_range(self.tokens, self.suffixes, self.first, pattern, 0, len(pattern))
        return Match(len(pattern), low, high)

    def children(self, match: Match, most: int | None = None) -> list[tuple[int, Match]]:
        """(token id, deeper match) of each continuation, commonest first, at most `most`. Ends of documents are none."""
        tokens, lows, highs = child_ranges(self.tokens, self.suffixes, match.length, match.low, match.high)
        real = tokens < self.header.vocab_size
        tokens, lows, highs = tokens[real], lows[real], highs[real]
        order = np.argsort(lows - highs, kind="stable")[:most]
        return [(int(tokens[i]), Match(match.length + 1, int(lows[i]), int(highs[i]))) for i in order]

    def documents(self) -> list[np.ndarray]:
        """Token ids of each document, in file order (views into the file)."""
        starts = np.concatenate([[0], self.document_ends[:-1].astype(np.int64) + 1])
        return [self.tokens[a:b] for a, b in zip(starts, self.document_ends.astype(np.int64), strict=True)]

    def verify(self) -> None:
        """Read the whole file: checksums, document ends, sources, suffix order, first-token table.

        Raises TrieFormatError with the first thing that is wrong.
        """
        header, tokens, n = self.header, self.tokens, len(self.tokens)
        format.check_sections(self.path, header, vars(self))
        problem = ""
        ends = self.document_ends.astype(np.int64)
        if n and int(tokens.max()) > header.separator:
            problem = "a token id is outside the vocabulary"
        elif not np.array_equal(np.flatnonzero(tokens == header.separator), ends) or (n and tokens[-1] != header.separator):
            problem = "document ends do not stand where the table says"
        elif len(ends) and (not header.sources or int(self.document_sources.max()) >= len(header.sources)):
            problem = "a document names a source that is not listed"
        elif any(
            (int((self.document_sources == i).sum()), int(lengths.sum())) != (source.documents, source.tokens)
            for i, source in enumerate(header.sources)
            for lengths in [np.diff(ends, prepend=-1)[self.document_sources == i] - 1]
        ):
            problem = "documents or tokens of a source do not add up"
        elif len(self.suffixes) and int(self.suffixes.max()) >= n:
            problem = "a suffix points outside the tokens"
        elif not suffixes_in_order(tokens, header.separator, self.suffixes, header.depth):
            problem = "suffixes are not sorted"
        else:
            counts = np.bincount(tokens[self.suffixes], minlength=header.vocab_size + 1)
            if counts[header.vocab_size] or not np.array_equal(
                self.first.astype(np.int64), np.concatenate([[0], np.cumsum(counts[: header.vocab_size])])
            ):
                problem = "the first-token table does not fit the suffixes"
        if problem:
            raise TrieFormatError(f"{self.path}: {problem}. Rebuild.")


@kernel
def child_ranges(tokens, suffixes, length, low, high):
    """(token, low, high) arrays of the ranges inside low..high that share the token `length` places on, in token order.

    Binary search for each end: time grows with the number of children, not with the range.
    """
    found_tokens = np.empty(16, np.int64)
    found_lows = np.empty(16, np.int64)
    found_highs = np.empty(16, np.int64)
    found = 0
    n = np.int64(len(tokens))
    high = min(high, np.int64(len(suffixes)))
    while low < high:
        position = np.int64(suffixes[low]) + length
        if position < 0 or position >= n:
            low += 1
            continue
        token = tokens[position]
        inside, outside = low, high
        while outside - inside > 1:
            middle = (inside + outside) >> 1
            position = np.int64(suffixes[middle]) + length
            if 0 <= position < n and tokens[position] == token:
                inside = middle
            else:
                outside = middle
        if found == len(found_tokens):
            found_tokens = np.concatenate((found_tokens, np.empty(found, np.int64)))
            found_lows = np.concatenate((found_lows, np.empty(found, np.int64)))
            found_highs = np.concatenate((found_highs, np.empty(found, np.int64)))
        found_tokens[found] = token
        found_lows[found] = low
        found_highs[found] = outside
        found += 1
        low = outside
    return found_tokens[:found], found_lows[:found], found_highs[:found]


@kernel
def suffixes_in_order(tokens, separator, suffixes, depth):
    """True if each suffix sorts before the next, by `depth` tokens up to the separator, then by position."""
    n = np.int64(len(tokens))
    for k in range(len(suffixes) - 1):
        a, b = np.int64(suffixes[k]), np.int64(suffixes[k + 1])
        if not (0 <= a < n and 0 <= b < n):
            return False
        smaller = a < b
        for d in range(depth):
            if a + d >= n or b + d >= n:
                return False
            x, y = tokens[a + d], tokens[b + d]
            if x != y:
                smaller = x < y
                break
            if x == separator:
                break
        if not smaller:
            return False
    return True
