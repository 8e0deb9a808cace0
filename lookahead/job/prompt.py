"""Prompts to token ids. In: a request and the model's tokenizer. Out: ids; a text far too long for the model is refused early.

A text of millions of characters takes seconds and gigabytes to tokenize as a whole. So a long one is first tokenized piece by
piece, and only counted, until there are clearly more tokens than the model has positions. What fits is tokenized as a whole.
"""

from __future__ import annotations

import datetime
from typing import Any

from lookahead.errors import LookaheadError
from lookahead.job.params import Request
from lookahead.tokenizer import chat_text

PIECE = 1 << 16  # characters; a text of no more is tokenized at once


def local_time() -> datetime.datetime:
    """Now, by the clock of this machine, with its time zone."""
    return datetime.datetime.now().astimezone()


def messages_asked(request: Request, chat: bool = False, system: str | None = None) -> list[dict[str, Any]] | None:
    """The messages that a request's prompt is tokenized as; None if it is tokenized as text, or is ids."""
    messages = request.messages
    if messages is None and chat and request.prompt is not None and not request.openai:
        messages = [{"role": "user", "content": request.prompt}]
    if messages and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def prompts_of(
    request: Request,
    tokenizer: Any | None,
    chat: bool = False,
    system: str | None = None,
    longest: int = 1 << 62,
    now: datetime.datetime | None = None,
) -> list[list[int]]:
    """Token ids of each prompt of a request; only an OpenAI line may have several.

    chat: a plain "prompt" becomes a user message. system: before chat messages that bring none. longest: positions of the
    model. now: what a chat template writes, one time for all prompts of a job. Raises LookaheadError for a text that clearly
    has more tokens, and for a row that needs a tokenizer or chat template that the model does not have.
    """
    if request.prompts is not None:
        return [prompt if isinstance(prompt, list) else _ids_of(tokenizer, prompt, longest) for prompt in request.prompts]
    if request.prompt_ids is not None:
        return [request.prompt_ids]
    messages = messages_asked(request, chat, system)
    if messages is None:
        return [_ids_of(tokenizer, request.prompt or "", longest)]
    if tokenizer is None:
        raise LookaheadError('the model has no tokenizer: give rows of "prompt_ids".')
    if not getattr(tokenizer, "chat_template", None):
        raise LookaheadError('the tokenizer has no chat template: give rows of "prompt" and leave --chat out.')
    try:
        text = chat_text(tokenizer, messages, now or local_time())
    except Exception as error:  # a template raises what it likes
        raise LookaheadError(f"the chat template refuses these messages ({error}).") from error
    return [_ids_of(tokenizer, text, longest, add_special_tokens=False)]


def _ids_of(tokenizer: Any | None, text: str, longest: int, **options: Any) -> list[int]:
    """Raises LookaheadError if the text clearly has more tokens than the model has positions."""
    if tokenizer is None:
        raise LookaheadError('the model has no tokenizer: give rows of "prompt_ids".')
    if len(text) > max(PIECE, longest) and _has_more_tokens(tokenizer, text, longest):
        raise LookaheadError(
            f"the prompt has {len(text)} characters, which are more tokens than the {longest} positions that the model has: no "
            "room for an answer."
        )
    return list(tokenizer(text, verbose=False, **options)["input_ids"])


def _has_more_tokens(tokenizer: Any, text: str, most: int) -> bool:
    """Beyond doubt: where a piece ends, a token may be cut in two or more; a quarter more than `most` leaves room for many."""
    enough, found = most + most // 4 + 256, 0
    for begin in range(0, len(text), PIECE):
        found += len(tokenizer(text[begin : begin + PIECE], add_special_tokens=False, verbose=False)["input_ids"])
        if found > enough:
            return True
    return False
