"""Rows that jobs and the OpenAI batch API write. In: a row as an object. Out: its answers, or that it failed; what it asked.

Known are output rows of `lookahead generate`, lines of an OpenAI batch output file, completion objects and batch requests.
`documents_of` makes documents of corpus rows: of --text-field, else the first present of TEXT_FIELDS; each answer of a job's
row is one, and of a batch request the assistant turns, or where it has none its user turns or its prompt.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

TEXT_PARTS = ("text", "input_text", "output_text")  # of message content in parts


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer: its text, its token ids, or both. ends: the model ended it itself. index, of: of the samples of its row."""

    text: str | None
    token_ids: list[int] | None
    ends: bool
    index: int = 0
    of: int = 1


@dataclasses.dataclass(frozen=True)
class AnsweredRow:
    """A row of a job's output; no answers if it failed. prompt, prompt_tokens: where the row keeps them."""

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
    of_api = row.get("custom_id") is not None and row.get("error") is not None
    if of_api or row.get("finish_reason") == "error":
        return AnsweredRow(row["custom_id"] if of_api else row.get("id"), [], failed=True)
    if not isinstance(row.get("finish_reason"), str):
        return None
    samples = row.get("samples")
    samples_or_row = samples if isinstance(samples, list) and samples else [row]
    return AnsweredRow(row.get("id"), _some(samples_or_row), False, prompt_of(row), _count(row.get("prompt_tokens")))


def asked(row: dict[str, Any]) -> Any | None:
    """Return what an OpenAI batch request asks: its chat messages, text or ids; None if the row is not one."""
    body = row.get("body")
    return prompt_of(body) if isinstance(body, dict) else None


def prompt_of(row: dict[str, Any]) -> Any | None:
    """The prompt that stands in a row: token ids, chat messages or text; None if there is none."""
    ids, text = row.get("prompt_ids"), row.get("prompt")
    if is_ids(ids) and ids:
        return ids
    if messages := messages_of(row.get("messages")):
        return messages
    return text if text and (isinstance(text, str) or is_ids(text)) else None


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
    if isinstance(content, str) or not isinstance(content, list) or not content:
        return content if isinstance(content, str) else None
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") in TEXT_PARTS else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _of_openai(row: dict[str, Any], body: Any) -> AnsweredRow:
    row_id = row.get("custom_id", row.get("id"))
    status = row["response"].get("status_code") if isinstance(row.get("response"), dict) else 200
    choices = body.get("choices") if isinstance(body, dict) else None
    if row.get("error") is not None or status not in (200, None) or not isinstance(choices, list):
        return AnsweredRow(row_id, [], failed=True)
    usage = body.get("usage")
    count = _count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
    return AnsweredRow(row_id, _some(choices), False, prompt_of(row), count)


def _some(found: list[Any]) -> list[Answer]:
    """Take those samples, or choices of the OpenAI API, that hold text or ids."""
    answers = []
    for index, sample in enumerate(found):
        if isinstance(sample, dict):
            message, ids = sample.get("message"), sample.get("token_ids")
            text = content_text(message.get("content")) if isinstance(message, dict) else sample.get("text")
            text, ids = text if isinstance(text, str) and text else None, ids if is_ids(ids) and ids else None
            if text or ids:
                answers.append(Answer(text, ids, sample.get("finish_reason") != "length", index, len(found)))
    return answers


def is_ids(value: Any) -> bool:
    """A list of token ids; it may be empty."""
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


TEXT_FIELDS = ("text", "response", "output", "completion", "answer", "messages")
ID_FIELDS = ("ids", "response_ids")
OF_ROWS = ("id", "custom_id", "prompt", "prompt_ids", "token_ids", "samples", "finish_reason", "prompt_tokens", "error")
OF_API = ("body", "choices", "usage")  # OpenAI batches


class Failed(Exception):
    """A row of a job that holds an error instead of an answer."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One document before tokenization: text or ids, and what stood before it."""

    source: str
    text: str = ""
    ids: np.ndarray | None = None
    prompt: str | list | np.ndarray | None = None  # text, chat messages or ids
    ends: bool = True  # the model would end here
    is_prompt: bool = False  # taken for want of an answer


def fields_read(text_field: str | None) -> tuple[str, ...]:
    return ("prompt", text_field) if text_field is not None else (*TEXT_FIELDS, *ID_FIELDS, *OF_ROWS, *OF_API)


def documents_of(
    row: dict[str, Any], source: str, text_field: str | None, vocab_size: int, tokenized: bool = True
) -> tuple[list[Row], str]:
    """(documents of a row, "") or ([], problem). tokenized: of text and ids text is taken. Raises Failed for error rows."""
    if text_field is not None:
        return _of_fields(row, source, text_field, vocab_size)
    job_row = answered(row)
    if job_row is not None and job_row.failed:
        raise Failed
    if job_row is not None and job_row.answers:
        return _of_answers(job_row, source, vocab_size, tokenized)
    found, problem = _of_fields(row, source, None, vocab_size)
    if problem and (prompt := asked(row)) is not None:
        return _of_request(prompt, source)
    return found, problem


def _of_answers(row: AnsweredRow, source: str, vocab_size: int, tokenized: bool) -> tuple[list[Row], str]:
    prompt = np.array(row.prompt, np.int64) if is_ids(row.prompt) else row.prompt
    documents = []
    for answer in row.answers:
        if answer.token_ids is None or (answer.text and tokenized):
            before = None if isinstance(prompt, np.ndarray) else prompt
            documents.append(Row(source, text=answer.text or "", prompt=before, ends=answer.ends))
        elif max(answer.token_ids) >= vocab_size:
            return [], f'"token_ids" holds token id {max(answer.token_ids)}, outside the vocabulary of {vocab_size}.'
        else:
            documents.append(Row(source, ids=np.array(answer.token_ids, np.int64), prompt=prompt))
    return documents, ""


def _of_request(prompt: Any, source: str) -> tuple[list[Row], str]:
    """Return what an OpenAI batch request asks: its assistant turns, where it has none its user turns, or its text."""
    if isinstance(prompt, str):
        return [Row(source, text=prompt, ends=False, is_prompt=True)], ""
    if is_ids(prompt):
        return [Row(source, ids=np.array(prompt, np.int64), is_prompt=True)], ""
    found, problem = _messages(prompt, source)
    asked_for = [message["content"] for message in prompt if message["role"] == "user" and message["content"]]
    if problem and asked_for:
        return [Row(source, text=text, ends=False, is_prompt=True) for text in asked_for], ""
    return found, problem


def _of_fields(row: dict[str, Any], source: str, text_field: str | None, vocab_size: int) -> tuple[list[Row], str]:
    if text_field is None:
        for field in ID_FIELDS:
            if field in row:
                ids, problem = _ids(row, field, vocab_size)
                prompt, prompt_problem = _ids(row, "prompt_ids", vocab_size) if field == "response_ids" else (None, "")
                if problem or prompt_problem:
                    return [], problem or prompt_problem
                return [Row(source, ids=ids, prompt=prompt)], "" if len(ids) else f'"{field}" is empty.'
    field = text_field or next((f for f in TEXT_FIELDS if row.get(f) is not None), "")
    if not field or row.get(field) is None:
        found = ", ".join(sorted(map(str, row))) or "nothing"
        wanted = text_field or "text"
        hint = "Use --text-field NAME." if row else "Remove the row."
        return [], f'no "{wanted}" field (found: {found}). {hint}'
    value = row[field]
    if field == "messages" or isinstance(value, list):
        return _messages(value, source)
    if not isinstance(value, str):
        return [], f'"{field}" is a {type(value).__name__}, not text.'
    if not value:
        return [], f'"{field}" is empty.'
    prompt = row.get("prompt") if isinstance(row.get("prompt"), str) and field != "text" else None
    return [Row(source, text=value, prompt=prompt)], ""


def _ids(row: dict[str, Any], field: str, vocab_size: int) -> tuple[np.ndarray, str]:
    """(the token ids in a field of a row, "") or (nothing, what is wrong). A missing field holds none."""
    ids = row.get(field) or []
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int} or (ids and min(ids) < 0):
        return np.empty(0, np.int64), f'"{field}" is not a list of token ids.'
    if ids and max(ids) >= vocab_size:
        return np.empty(0, np.int64), f'"{field}" holds token id {max(ids)}, outside the vocabulary of {vocab_size}.'
    return np.array(ids, np.int64), ""


def _messages(messages: Any, source: str) -> tuple[list[Row], str]:
    """One document per assistant turn, with the turns before it as its prompt."""
    messages = messages_of(messages) or messages
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        return [], '"messages" is not a list of {"role", "content"} with text.'
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m["content"]]
    if not answers:
        return [], '"messages" has no assistant turn with text.'
    return [Row(source, text=messages[i]["content"], prompt=messages[:i]) for i in answers], ""
