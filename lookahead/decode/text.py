"""Token ids to text, all at once or as they come. In: a tokenizer and an answer's ids. Out: its text, special tokens left out.

What has been handed out cannot be taken back, so `TextStream` hands out only what no later token can change. These may change:
    a last replacement character: the bytes of a character that is not yet complete look so, or those of no character
    bytes that stand as tokens of their own, <0xE2>: whether they are text is decided by all that follow each other (tokenizers
        with byte fallback)
    a blank and the signs behind it, where the tokenizer takes out blanks before punctuation
It decodes the end of the answer only, behind a few tokens that were decoded before: a first token may lose its blank, and bytes
find their characters again after three at the latest. So an answer of any length takes a time linear in its length.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from typing import Any, Literal

log = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
CLEANED = " .?!,'ntmsver"  # characters that transformers' clean_up_tokenization looks at: no rule reaches across another
LONGEST_TAIL = 48  # tokens that are decoded again with each that comes
CONTEXT = 8  # characters, that is bytes at least, that are left in front

Kind = Literal["nothing", "byte", "text"]


def text_of(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of an answer."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


class TokenTexts:
    """Texts of single tokens, as they add to a text, blanks and special tokens included. Parts of characters are replaced."""

    def __init__(self, tokenizer: Any):
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._front = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._known:
            front, whole = str(self._decode(self._front)), str(self._decode([*self._front, token]))
            self._known[token] = whole[len(front) :] if whole.startswith(front) else str(self._decode([token]))
        return self._known[token]


class TextStream:
    """The text of one answer, piece by piece: all pieces together are `text_of` the whole."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self._pieces: list[str] = []
        self._tail: list[int] = []  # what is still decoded: of the tokens that become text, the last
        self._closed = 0  # of them, those behind which no byte waits for another
        self._given = 0  # characters of the tail's text that were handed out
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._kinds: dict[int, Kind] = {}

    def push(self, token_ids: Sequence[int]) -> str:
        """The answer continues with these tokens. Returns the text that is certain with them, which may be none."""
        self.token_ids += token_ids
        before = self._closed
        for token in token_ids:
            kind = self.kind(token)
            if kind != "nothing":
                self._tail.append(token)
            if kind == "text":
                self._closed = len(self._tail)
        if self._closed == before:
            return ""
        text = text_of(self.tokenizer, self._tail[: self._closed])
        certain = self._certain(text)
        piece = text[self._given : certain]
        self._given = max(self._given, certain)
        if self._closed > LONGEST_TAIL:
            self._shorten()
        return self._hand_out(piece)

    @property
    def pending(self) -> str:
        """Text behind what was handed out, which may still change."""
        return text_of(self.tokenizer, self._tail)[self._given :]

    def finish(self) -> str:
        """The answer has ended. Returns the rest of its text."""
        given, whole = "".join(self._pieces), text_of(self.tokenizer, self.token_ids)
        if whole.startswith(given):
            return self._hand_out(whole[len(given) :])
        log.warning("the tokenizer decodes the answer as a whole to another text than its parts, which were handed out.")
        return self._hand_out(text_of(self.tokenizer, self._tail)[self._given :])

    def _hand_out(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece

    def _certain(self, text: str) -> int:
        """Count the characters of the tail's text that no later token can change."""
        text = text.removesuffix(REPLACEMENT)
        return len(text.rstrip(CLEANED) if self._cleans else text)

    def _shorten(self) -> None:
        """Keep the last closed tokens that have some text between them, so that what follows is decoded as behind all."""
        size = CONTEXT
        while size < self._closed:
            context = self._tail[self._closed - size : self._closed]
            certain = self._certain(text_of(self.tokenizer, context))
            if certain >= CONTEXT:
                self._tail = self._tail[self._closed - size :]
                self._closed, self._given = size, certain
                return
            size *= 2

    def kind(self, token: int) -> Kind:
        """Classify a token: no text at all, a byte, or text regardless of its neighbours."""
        if token not in self._kinds:
            name = self.tokenizer.convert_ids_to_tokens(token)
            skipped = token in self._special and not text_of(self.tokenizer, [token])
            self._kinds[token] = "nothing" if name is None or skipped else "byte" if BYTE.fullmatch(name) else "text"
        return self._kinds[token]


class StopTexts:
    """Tells when a stop text is complete in an answer's text, as `text_of` shows it: the prompt's text has no part in it.

    A special token, which no text shows, ends the answer if its name is a stop text.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]):
        self._stream, self._texts = TextStream(tokenizer), tuple(texts)
        self._before = ""  # the end of the text that was searched, in which a stop text may begin
        self._longest = max(map(len, texts))

    def accept_token(self, token: int) -> bool:
        """The answer continues with this token; whether it ends the answer."""
        stream = self._stream
        searched = self._before + stream.push([token])
        self._before = searched[max(0, len(searched) - self._longest) :]
        if stream.kind(token) == "nothing":
            return stream.tokenizer.convert_ids_to_tokens(token) in self._texts
        return found_in(searched + stream.pending, self._texts) and found_in(
            text_of(stream.tokenizer, stream.token_ids), self._texts
        )


def found_in(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


def length_before(text: str, stops: Sequence[str], continues: bool = False) -> int:
    """Count the characters before the first stop text, or if more text follows, before a possible beginning of one."""
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    for stop in stops if continues else ():
        found += [len(text) - size for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])]
    return min(found, default=len(text))


def without_stop(tokenizer: Any, token_ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """(the text of an answer before its stop text, how many of its tokens are not in or behind the stop text alone)."""
    text, tokens = text_of(tokenizer, token_ids), len(token_ids)
    length = length_before(text, stops)
    while length < len(text) and tokens and len(text_of(tokenizer, token_ids[: tokens - 1])) >= length:
        tokens -= 1
    return text[:length], tokens
