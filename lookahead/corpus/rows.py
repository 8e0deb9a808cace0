"""Rows of corpora to documents. In: a row as an object. Out: the text or ids of each document that it holds, or what is wrong.

A row's text is --text-field, else the first present of TEXT_FIELDS. Rows of a job's output and of the OpenAI batch API are
known by their form (answers.py): each answer is a document. Of a batch request the assistant turns are documents, or where it
has none its user turns or its prompt.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lookahead.corpus.answers import AnsweredRow, answered, asked, messages_of

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
    """The fields that `documents_of` looks at."""
    return ("prompt", text_field) if text_field is not None else (*TEXT_FIELDS, *ID_FIELDS, *OF_ROWS, *OF_API)


def documents_of(
    row: dict[str, Any], source: str, text_field: str | None, vocab_size: int, tokenized: bool = True
) -> tuple[list[Row], str]:
    """(documents of a row, "") or ([], what is wrong). Raises Failed for a row of a job that holds an error.

    tokenized: there is a tokenizer, so that answers which hold text and ids are taken as text.
    """
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
    """A document for each answer of a row of a job's output."""
    prompt = np.array(row.prompt, np.int64) if _is_ids(row.prompt) else row.prompt
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
    """What an OpenAI batch request asks: its assistant turns, where it has none its user turns, or its text."""
    if isinstance(prompt, str):
        return [Row(source, text=prompt, ends=False, is_prompt=True)], ""
    if _is_ids(prompt):
        return [Row(source, ids=np.array(prompt, np.int64), is_prompt=True)], ""
    found, problem = _messages(prompt, source)
    asked_for = [message["content"] for message in prompt if message["role"] == "user" and message["content"]]
    if problem and asked_for:
        return [Row(source, text=text, ends=False, is_prompt=True) for text in asked_for], ""
    return found, problem


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def _of_fields(row: dict[str, Any], source: str, text_field: str | None, vocab_size: int) -> tuple[list[Row], str]:
    """`documents_of` by the names of a row's fields."""
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
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        return np.empty(0, np.int64), f'"{field}" is not a list of token ids.'
    if ids and min(ids) < 0:
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
