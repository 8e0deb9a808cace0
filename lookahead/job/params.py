"""What a row asks of its answer. In: JSON values of a row. Out: a Request, or RowError: what is wrong.

Nothing here raises anything but RowError, regardless of the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from lookahead.arguments import is_text
from lookahead.decode import limits
from lookahead.decode.constraint import KINDS, Constraint
from lookahead.decode.limits import is_count, shown
from lookahead.errors import UsageError
from lookahead.printable import in_one_line

LONGEST_PROBLEM = 1000  # characters: a row may hold keys of any length


class RowError(ValueError):
    """Raised for a row that is wrong. param: the key that it is about, where it is one."""

    def __init__(self, problem: str, param: str | None = None):
        line = in_one_line(problem)
        super().__init__(line if len(line) <= LONGEST_PROBLEM else f"{line[:LONGEST_PROBLEM]}...")
        self.param = param


@dataclasses.dataclass(frozen=True)
class Tools:
    """What an answer to a chat may call. listed: for the chat template. schemas: of the arguments of each function.

    required: the answer is a call. several: it may hold more than one. strict: arguments are as their schemas.
    """

    listed: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    required: bool
    several: bool
    strict: bool


@dataclasses.dataclass(frozen=True)
class Request:
    """One row of a job. Exactly one of prompt, messages, prompt_ids, prompts and problem is set.

    prompts: several, each text or token ids; each gets n answers. param: the key that a problem is about. tools: of a chat.
    echo: the prompt's text stands before the answer's. number: of the row, from 0 through all files. file: its name where there
    are several, else "". fingerprint: of id and content. kept: fields that the output row keeps. adapter: a name of one of the
    job's; None: it names none.
    """

    id: Any
    line: int
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    prompts: list[str | list[int]] | None = None
    problem: str = ""
    param: str | None = None
    max_new_tokens: int | None = None
    n: int | None = None  # samples
    seed: int | None = None
    logprobs: int | Literal[False] | None = None  # False: none, regardless of the job
    prompt_logprobs: int | Literal[False] | None = None
    adapter: str | None = None
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the fields of sampling.Sampling
    tools: Tools | None = None
    openai: bool = False
    echo: bool = False
    number: int = 0
    file: str = ""
    fingerprint: bytes = b""
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"


LIMIT_NAMES = ("max_new_tokens", "max_completion_tokens", "max_tokens")
OF_REQUEST = ("max_new_tokens", "n", "seed", "logprobs", "prompt_logprobs", "adapter")  # fields of Request itself
NAMES = (*LIMIT_NAMES, *OF_REQUEST, *limits.NUMBERS, *limits.COUNTS, *limits.LISTS, *limits.OTHERS, *KINDS)


def read_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a Request from a row's options; what is null counts as not given. Raises RowError."""
    known: dict[str, Any] = {}
    for name, value in params.items():
        if value is None:
            continue
        if name not in NAMES:
            raise RowError(f'"params" has unknown option "{name}"', name)
        field = "constraint" if name in KINDS else "max_new_tokens" if name in LIMIT_NAMES else name
        read = _read(name, value)
        if field in known and (field == "constraint" or known[field] != read):
            what = "another constraint: an answer can have one" if field == "constraint" else "another limit of tokens"
            raise RowError(f'"{name}" and {what}', name)
        known[field] = read
    for name in tuple(known):
        _within(lambda value, name=name: known.update(limits.checked({name: value})), known[name], name)
    if known.get("max_new_tokens") == 0 and known.get("prompt_logprobs") in (None, False):
        name = next(name for name in LIMIT_NAMES if params.get(name) == 0)
        raise RowError(f"{name} is 0, not a positive number of tokens: 0 goes with prompt_logprobs", name)
    fields: dict[str, Any] = {name: known.pop(name) for name in OF_REQUEST if name in known}
    return {**fields, "sampling": known}


def _read(name: str, value: Any) -> Any:
    """One option as a Request holds it, as far as JSON has it in another form or limits.py does not check it."""
    if name in LIMIT_NAMES and (not is_count(value) or value < 0):
        raise RowError(f"{name} is {shown(value)}, not a positive number of tokens", name)
    if name in ("seed", "n") and (not is_count(value) or (name == "n" and value < 1)):
        raise RowError(f'"{name}" is {shown(value)}, not a whole number{" above 0" if name == "n" else ""}', name)
    if name == "n":
        _within(limits.check_samples, value, name)
    if name in ("logprobs", "prompt_logprobs"):
        return asked_logprobs(name, value)
    if name == "logit_bias" and isinstance(value, dict):
        ids = (int(key) if key.isascii() and key.isdecimal() and len(key) < 12 else key for key in map(str, value))
        return dict(zip(ids, value.values(), strict=True))
    return constraint_of(name, value) if name in KINDS else value


def asked_logprobs(name: str, value: Any) -> Any:
    """Return how many of the most probable; False: no log-probabilities at all. Raises RowError for what is neither."""
    if value is not False and (type(value) is not int or value < 0):
        raise RowError(f'"{name}" is {shown(value)}, not a whole number', name)
    if value is not False:
        _within(lambda most: limits.check_logprobs(most, name), value, name)
    return value


def constraint_of(kind: str, value: Any, param: str | None = None) -> Constraint:
    """Raises RowError if the value is not what such a constraint is written as."""
    try:
        return Constraint.of(kind, value)
    except (UsageError, ValueError, RecursionError) as error:
        problem = str(error).rstrip(".") if isinstance(error, UsageError) else f'"{kind}" is nested too deeply'
        raise RowError(problem, param or kind) from None


def checked_id(row_id: Any, name: str) -> None:
    """Raises RowError if it is neither text nor a number, or longer than an id should be."""
    if type(row_id) not in (str, int):
        raise RowError(f'"{name}" is a {type(row_id).__name__}, not text or a number', name)
    if len(row_id) > limits.ID_LENGTH if isinstance(row_id, str) else abs(row_id) >= 10**limits.ID_LENGTH:
        raise RowError(f'"{name}" is longer than {limits.ID_LENGTH} characters', name)


def chat_messages(value: Any) -> list[dict[str, Any]]:
    """Chat messages whose content is text: parts of type text are put together, with nothing between them.

    Raises RowError for content of another kind.
    """
    of_roles = isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    if not of_roles or not value:
        raise RowError('"messages" is not a list of {"role", "content"} with text', "messages")
    return [{**message, "content": _text_of(message.get("content"))} for message in value]


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RowError('"messages" is not a list of {"role", "content"} with text', "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError(f'"messages" holds a part of type {shown(kind)}: only text can be answered', "messages")
        texts.append(part["text"])
    return "".join(texts)


def check_text(name: str, text: Any) -> None:
    """Raises RowError unless it is text that a tokenizer takes."""
    if not isinstance(text, str):
        raise RowError(f'"{name}" is a {type(text).__name__}, not text', name)
    if not text and name == "prompt":
        raise RowError('"prompt" is empty', name)
    if "\0" in text:
        raise RowError(f'"{name}" holds NUL characters', name)
    if not is_text(text):
        raise RowError(f'"{name}" is not text (half of a surrogate pair)', name)


def names_in(row: Mapping[str, Any]) -> str:
    """The keys of a row, for a message; of many the first twenty."""
    names = [f"{name!s:.40}" for name in sorted(map(str, row))]
    return ", ".join([*names[:20], *(["..."] if len(names) > 20 else [])]) or "nothing"


def is_ids(value: Any) -> bool:
    """A list of token ids, one at least."""
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def _within(check: Any, value: Any, name: str) -> None:
    try:
        check(value)
    except UsageError as error:
        raise RowError(str(error).rstrip("."), name) from None
