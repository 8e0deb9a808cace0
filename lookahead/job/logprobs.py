"""Log-probabilities as they stand in output rows: in a form of ours, and in OpenAI's two. In: generations. Out: JSON values."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from lookahead.decode.engine import Generation
from lookahead.decode.logprobs import TokenLogprobs
from lookahead.decode.text import REPLACEMENT, TokenTexts

LEAST = -9999.0  # JSON has no minus infinity; OpenAI writes this
DIGITS = 6


class LogprobsOf:
    """tokenizer: for the text of each token. None: there are ids only."""

    def __init__(self, tokenizer: Any | None):
        self._text = None if tokenizer is None else _texts(tokenizer)
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def in_row(self, generation: Generation) -> list[dict[str, Any]]:
        """[{"id", "token", "logprob", "top": [{"id", "token", "logprob"}]}], one for each token; best first."""
        return [*map(self._entry, generation.token_logprobs)]

    def of_prompt(self, generation: Generation) -> list[dict[str, Any] | None]:
        """The same of the prompt's tokens, None for the first."""
        return [None, *map(self._entry, generation.prompt_token_logprobs)]

    def _entry(self, found: TokenLogprobs) -> dict[str, Any]:
        return {**self._scored(found.token_id, found.logprob), "top": [self._scored(*pair) for pair in found.top]}

    def of_chat(self, generation: Generation) -> dict[str, Any]:
        """{"content": [{"token", "logprob", "bytes", "top_logprobs": [...]}], "refusal"}."""
        content = [
            {**self._spelled(found.token_id, found.logprob), "top_logprobs": [self._spelled(*pair) for pair in found.top]}
            for found in generation.token_logprobs
        ]
        return {"content": content, "refusal": None}

    def of_completion(self, generation: Generation, prompt: Generation | None = None) -> dict[str, Any]:
        """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}: a list in each, one entry for each token. prompt: whose
        prompt's tokens stand before them, the first without log-probabilities.
        """
        scored: list[TokenLogprobs | None] = [*generation.token_logprobs]
        token_ids = generation.token_ids[: len(scored)]
        if prompt:
            scored, token_ids = [None, *prompt.prompt_token_logprobs, *scored], [*prompt.prompt_ids, *token_ids]
        names = [*map(self._named, token_ids)]
        sizes = [0 if token in self._special else len(name) for token, name in zip(token_ids, names, strict=True)]
        return {
            "tokens": names,
            "token_logprobs": [found and _number(found.logprob) for found in scored],
            "top_logprobs": [found and self._by_name(found) for found in scored],
            "text_offset": [*itertools.accumulate(sizes[:-1], initial=0)] if names else [],
        }

    def _by_name(self, found: TokenLogprobs) -> dict[str, float]:
        """The best and the emitted one; of tokens that look alike the better."""
        best: dict[str, float] = {}
        for token, logprob in (*found.top, (found.token_id, found.logprob)):
            best.setdefault(self._named(token), _number(logprob))
        return best

    def _named(self, token: int) -> str:
        return f"token_id:{token}" if self._text is None else self._text(token)

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        named = {} if self._text is None else {"token": self._text(token)}
        return {"id": token, **named, "logprob": _number(logprob)}

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        """bytes: None where the token is a part of a character."""
        text = self._named(token)
        return {"token": text, "logprob": _number(logprob), "bytes": None if REPLACEMENT in text else [*text.encode()]}


def _number(logprob: float) -> float:
    return round(max(logprob, LEAST), DIGITS)


@functools.lru_cache(maxsize=1)
def _texts(tokenizer: Any) -> TokenTexts:
    """Of a job's one tokenizer."""
    return TokenTexts(tokenizer)
