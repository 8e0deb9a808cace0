"""The text of a trie. In: a trie file. Out: the tokenizer that its tokens are shown with, and the documents that it holds."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from lookahead.errors import LookaheadError
from lookahead.files.hub import tokenizer_of_trie
from lookahead.tokenizer import identity, load_tokenizer
from lookahead.trie.check import checked_documents, checked_tokens
from lookahead.trie.file import Trie


@dataclasses.dataclass(frozen=True)
class HeldDocument:
    """number: from 1, in the order of the file. text: None where no tokenizer is known."""

    number: int
    source: str
    ids: list[int]
    text: str | None

    @property
    def shown(self) -> str:
        """The text, or the ids where it is not known."""
        return " ".join(map(str, self.ids)) if self.text is None else self.text


def held_documents(trie: Trie, tokenizer: Any | None, query: str = "") -> Iterator[HeldDocument]:
    """The documents whose text, or ids without a tokenizer, contain `query`. Raises TrieFormatError for a damaged trie."""
    numbers = itertools.count(1)
    sought = query if tokenizer is not None or not query else f" {' '.join(query.split())} "
    for segment in trie.segments:
        ends, sources = checked_documents(trie, segment)
        collections.deque(checked_tokens(trie, segment, ends), 0)
        begin = 0
        for end, source in zip(ends.tolist(), sources.tolist(), strict=True):
            ids = segment.tokens[begin:end].tolist()
            text = str(tokenizer.decode(ids)) if tokenizer is not None else None
            held = HeldDocument(next(numbers), trie.header.sources[source].name, ids, text)
            if sought in (held.shown if text is not None else f" {held.shown} "):
                yield held
            begin = end + 1


def load_tokenizer_of(trie: Trie, name: str | None, needed: bool) -> Any | None:
    """The tokenizer to show a trie's text with; None if the trie came as ids, or its tokenizer is gone and not needed.

    name: instead of the one that the trie names. Raises LookaheadError if it cannot be loaded or does not fit the trie.
    """
    if not (name or trie.header.tokenizer_name):
        return None
    try:
        chosen = name or tokenizer_of_trie(trie.path, trie.header.tokenizer_name)
        loaded = load_tokenizer(chosen)
    except LookaheadError:
        if name or needed:
            raise
        return None
    whose = identity(loaded, chosen)
    trie.check_tokenizer(whose.fingerprint, whose.vocab_size, chosen)
    return loaded
