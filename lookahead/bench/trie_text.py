"""The text of a trie. In: a trie file. Out: the tokenizer that its tokens are shown with."""

from __future__ import annotations

from typing import Any

from lookahead.errors import LookaheadError
from lookahead.hub import tokenizer_of_trie
from lookahead.tokenizer import identity, load_tokenizer
from lookahead.trie.file import Trie


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
