"""Rows that jobs and the OpenAI batch API write. In: a row as an object. Out: its answers, or that it failed; what it asked.

Known are the output rows of `lookahead generate` (`text`, `token_ids`, `samples`, error rows), lines of an OpenAI batch output
file (`response.body.choices`), completion objects of that API alone, and OpenAI batch requests (`body`). Rows from Parquet may
hold None in columns that they do not use. Knows nothing of files, tokenizers and models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

TEXT_PARTS = ("text", "input_text", "output_text")  # of message content in parts


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer: its text, its token ids, or both. ends: the model ended it itself, so that it is not cut short.

    index, of: which of how many samples of its row it is.
    """

    text: str | None
    token_ids: list[int] | None
    ends: bool
    index: int = 0
    of: int = 1


@dataclasses.dataclass(frozen=True)
class AnsweredRow:
    """A row of a job's output. answers: one for each sample; none if it failed or holds nothing.

    row_id: of its request. prompt: text, chat messages or token ids where the row keeps them (`generate --echo`).
    prompt_tokens: that the job counted; None if unknown.
    """

    row_id: Any
    answers: list[Answer]
    failed: bool = False
    prompt: Any = None
    prompt_tokens: int | None = None


def answered(row: dict[str, Any]) -> AnsweredRow | None:
    """The answers of a row; None if it is not a row of a job's output."""
    response = row.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    if isinstance(response, dict) or isinstance(row.get("choices"), list):
        return _of_openai(row, body if isinstance(response, dict) else row)
    if row.get("custom_id") is not None and row.get("error") is not None:
        return AnsweredRow(row["custom_id"], [], failed=True)
    if row.get("finish_reason") == "error":
        return AnsweredRow(row.get("id"), [], failed=True)
    if not isinstance(row.get("finish_reason"), str):
        return None
    samples = row.get("samples")
    said = samples if isinstance(samples, list) and samples else [row]
    return AnsweredRow(row.get("id"), _some(map(_of_sample, said)), False, prompt_of(row), _count(row.get("prompt_tokens")))


def asked(row: dict[str, Any]) -> Any | None:
    """What an OpenAI batch request asks: its chat messages, text or ids; None if the row is not one."""
    body = row.get("body")
    return prompt_of(body) if isinstance(body, dict) else None


def prompt_of(row: dict[str, Any]) -> Any | None:
    """The prompt that stands in a row: token ids, chat messages or text; None if there is none."""
    ids, text = row.get("prompt_ids"), row.get("prompt")
    if _is_ids(ids) and ids:
        return ids
    if messages := messages_of(row.get("messages")):
        return messages
    if isinstance(text, str) and text:
        return text
    return text if _is_ids(text) and text else None


def messages_of(value: Any) -> list[dict[str, str]] | None:
    """Chat messages with their contents as text; None for what is not a list of messages of text or parts of text."""
    if not isinstance(value, list) or not value:
        return None
    messages = []
    for message in value:
        text = content_text(message.get("content")) if isinstance(message, dict) else None
        if text is None or not isinstance(message.get("role"), str):
            return None
        messages.append({**message, "content": text})
    return messages


def content_text(content: Any) -> str | None:
    """The text of a message: of its parts of text, joined; None if it is not text, or not text only."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in TEXT_PARTS else None
        if not isinstance(text, str):
            return None
        parts.append(text)
    return "".join(parts)


def _of_openai(row: dict[str, Any], body: Any) -> AnsweredRow:
    """Of a line of a batch output file, or of a completion object."""
    row_id = row.get("custom_id", row.get("id"))
    status = row["response"].get("status_code") if isinstance(row.get("response"), dict) else 200
    choices = body.get("choices") if isinstance(body, dict) else None
    if row.get("error") is not None or status not in (200, None) or not isinstance(choices, list):
        return AnsweredRow(row_id, [], failed=True)
    usage = body.get("usage")
    count = _count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
    return AnsweredRow(row_id, _some(map(_of_choice, choices)), False, prompt_of(row), count)


def _of_choice(choice: Any) -> Answer | None:
    if not isinstance(choice, dict):
        return None
    message = choice.get("message")
    text = content_text(message.get("content")) if isinstance(message, dict) else choice.get("text")
    ids = choice.get("token_ids") if _is_ids(choice.get("token_ids")) else None
    return _answer(text, ids, choice.get("finish_reason"))


def _of_sample(sample: Any) -> Answer | None:
    if not isinstance(sample, dict):
        return None
    ids = sample.get("token_ids") if _is_ids(sample.get("token_ids")) else None
    return _answer(sample.get("text"), ids, sample.get("finish_reason"))


def _answer(text: Any, ids: list[int] | None, finish_reason: Any) -> Answer | None:
    """None where nothing was answered."""
    text = text if isinstance(text, str) and text else None
    return Answer(text, ids or None, finish_reason != "length") if text or ids else None


def _some(answers: Iterable[Answer | None]) -> list[Answer]:
    """Those that hold text."""
    found = list(answers)
    return [dataclasses.replace(each, index=n, of=len(found)) for n, each in enumerate(found) if each is not None]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)


def _count(value: Any) -> int | None:
    return value if type(value) is int else None
