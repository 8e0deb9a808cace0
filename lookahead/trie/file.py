"""A trie file opened for reading. In: a path. Out: counts and continuations of any context. Knows nothing of drafts.

A node of the trie is a range of the sorted suffixes: all occurrences in the corpus where the node's tokens stand. Its count is
the range's width; its children are the ranges one token deeper. A file that was appended to holds several segments, each
sorted for itself; a node is then one range in each, and its count their sum.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lookahead.errors import TokenizerMismatchError, UsageError
from lookahead.trie.check import check_trie
from lookahead.trie.mapped import MappedTrie
from lookahead.trie.search import child_ranges, matching_range


@dataclasses.dataclass(frozen=True)
class Match:
    """Occurrences in the corpus that continue a context: `length` tokens stand at the sorted suffixes low to high.

    ranges: (low, high) in each segment.
    """

    length: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(high - low for low, high in self.ranges)


class Trie(MappedTrie):
    """A trie file that can be asked; see `MappedTrie`."""

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

    def root(self) -> Match:
        """The match of length 0: every suffix."""
        return Match(0, tuple((0, len(segment.suffixes)) for segment in self.segments))

    def longest_match(self, context: Sequence[int] | np.ndarray, longest: int = 1 << 30) -> Match:
        """The longest end of `context` (token ids), up to `longest` tokens and the file's depth, that stands in the corpus.

        It is the root if even the last token does not.
        """
        found = self.root()
        for length in range(1, min(longest, len(context), self.header.depth) + 1):
            match = self.match(context[len(context) - length :])
            if not match.count:
                break
            found = match
        return found

    def match(self, pattern: Sequence[int] | np.ndarray) -> Match:
        """All occurrences of `pattern` (1 to depth token ids); count 0 if there is none."""
        pattern = np.asarray(pattern, np.int32)
        ranges = [matching_range(s.tokens, s.suffixes, s.first, pattern, 0, len(pattern)) for s in self.segments]
        return Match(len(pattern), tuple((int(low), int(high)) for low, high in ranges))

    def children(self, match: Match, most: int | None = None) -> list[tuple[int, Match]]:
        """(token id, deeper match) of each continuation, most frequent first, at most `most`. Ends of documents are none.

        Raises UsageError for a match as long as the file's depth: suffixes are not sorted by what follows.
        """
        if match.length >= self.header.depth:
            raise UsageError(
                f"{self.path}: is sorted by {self.header.depth} tokens; no continuations of {match.length} are kept."
            )
        found: dict[int, list[tuple[int, int]]] = collections.defaultdict(lambda: [(0, 0)] * len(self.segments))
        for number, (segment, (low, high)) in enumerate(zip(self.segments, match.ranges, strict=True)):
            tokens, lows, highs = child_ranges(segment.tokens, segment.suffixes, match.length, low, high)
            for token, begin, end in zip(tokens.tolist(), lows.tolist(), highs.tolist(), strict=True):
                if token < self.header.vocab_size:
                    found[token][number] = (begin, end)
        children = [(token, Match(match.length + 1, tuple(found[token]))) for token in sorted(found)]
        return sorted(children, key=lambda child: -child[1].count)[:most]

    def documents(self) -> list[np.ndarray]:
        """Token ids of each document, in file order (views into the file)."""
        found = []
        for segment in self.segments:
            ends = segment.document_ends.astype(np.int64)
            found += [segment.tokens[a:b] for a, b in zip([0, *(ends[:-1] + 1).tolist()], ends.tolist(), strict=True)]
        return found

    def verify(self, workers: int = 1) -> None:
        """Read the whole file: checksums, content hash, document ends, sources, suffix order, first-token table, samples.

        Raises TrieFormatError with the first thing that is wrong.
        """
        check_trie(self, workers)


def names_of(paths: Sequence[str | Path]) -> list[str]:
    """A name for each file: its own without folder and ending; the path where two files would share it."""
    stems = [Path(path).stem for path in paths]
    return [str(path) if stems.count(stem) > 1 else stem for path, stem in zip(paths, stems, strict=True)]
