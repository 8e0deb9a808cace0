"""Input rows to prompts. In: lines of job files. Out: one Request per line; a bad line carries its problem instead.

Forms: {"prompt"}, {"messages"}, {"prompt_ids"}, or an OpenAI batch line (custom_id, body). `id` is optional (default: the
line's number, of several files FILE:LINE); "params" may set max_new_tokens, n, seed and anything that sampling knows, for one
row.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lookahead.decode.constraint import KINDS, Constraint
from lookahead.errors import CorpusError, LookaheadError, UsageError
from lookahead.job.inputs import Shard, fingerprint, input_rows

LIMIT_NAMES = ("max_new_tokens", "max_completion_tokens", "max_tokens")
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
COUNTS = ("top_k", "no_repeat_ngram_size", "min_new_tokens", "seed", "n")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt of a job. Exactly one of prompt, messages, prompt_ids and problem is set.

    number: of the row, from 0 through all files. file: its name where there are several, else "". fingerprint: of id and
    content.
    """

    id: Any
    line: int
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    prompt_ids: list[int] | None = None
    problem: str = ""
    max_new_tokens: int | None = None
    n: int | None = None  # samples
    seed: int | None = None
    logprobs: int | Literal[False] | None = None  # False: none, whatever the job says
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the fields of sampling.Sampling
    openai: bool = False
    number: int = 0
    file: str = ""
    fingerprint: bytes = b""

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"


def read_requests(*names: str) -> Iterator[Request]:
    """One Request per row of files (see inputs.py). Raises CorpusError if one cannot be read or has no rows."""
    number = 0
    for name in names:
        if name != "-" and not Path(name).exists():
            raise CorpusError(f"{name}: no such file.")
        if name != "-" and Path(name).is_dir():
            raise CorpusError(f"{name}: is a folder. Give a .jsonl file of prompts.")
        before, file = number, _short_name(name, names) if len(names) > 1 else ""
        for found in input_rows(name):
            row_id = f"{file}:{found.line}" if file else found.line
            if isinstance(found.row, str):
                request = Request(row_id, found.line, problem=found.row)
            else:
                request = parse_row(found.row, found.line, row_id)
            content = fingerprint(found.fingerprint + _id_bytes(request.id))
            yield dataclasses.replace(request, number=number, file=file, fingerprint=content)
            number += 1
        if number == before:
            raise CorpusError(f'{name}: empty file. Give one JSON object per line, such as {{"prompt": "..."}}.')


def _short_name(name: str, names: Sequence[str]) -> str:
    """A file's name without its folder, unless another file has the same."""
    alone = sum(Path(other).name == Path(name).name for other in names) == 1
    return Path(name).name if alone else name


def _id_bytes(row_id: Any) -> bytes:
    return json.dumps(row_id).encode()


def without_duplicates(requests: Iterable[Request]) -> Iterator[Request]:
    """The second request with an id gets a problem that names both lines. Remembers 8 bytes of each id and its line."""
    seen: dict[bytes, tuple[int, str]] = {}
    for request in requests:
        if request.problem:
            yield request
            continue
        key = hashlib.blake2b(_id_bytes(request.id), digest_size=8).digest()
        line, file = seen.setdefault(key, (request.line, request.file))
        if (line, file) == (request.line, request.file):
            yield request
            continue
        first = Request(None, line, file=file)
        yield Request(
            request.id,
            request.line,
            problem=f"the id {json.dumps(request.id)} stands on {first.where}, too",
            openai=request.openai,
            number=request.number,
            file=request.file,
            fingerprint=request.fingerprint,
        )


def left_to_do(requests: Iterable[Request], shard: Shard, done: Mapping[int, bytes]) -> Iterator[Request]:
    """Requests of a shard that are not done.

    done: fingerprints of those that are, by number. Raises LookaheadError if a row has changed since, or is gone.
    """
    found = 0
    for request in requests:
        if not shard.holds(request.number):
            continue
        before = done.get(request.number)
        if before is None:
            yield request
            continue
        found += 1
        if before != request.fingerprint:
            raise LookaheadError(
                f"{request.where} of the input was changed after it had been answered (or rows were moved). Put back the "
                "input as it was, or start anew with --overwrite."
            )
    if found < len(done):
        raise LookaheadError(
            f"the input has {len(done) - found} rows less than were answered. Put it back as it was, or start anew "
            "with --overwrite."
        )


def parse_row(row: dict[str, Any], line: int, default_id: str | int | None = None) -> Request:
    """A Request, with `problem` set where the row cannot be used. default_id: of a row that has none (default: its line)."""
    openai = isinstance(row.get("body"), dict)
    body = row["body"] if openai else row
    default_id = line if default_id is None else default_id
    row_id = row.get("custom_id" if openai else "id")
    row_id = default_id if row_id is None else row_id
    known = type(row_id) in (str, int)
    request = Request(row_id if known else default_id, line, openai=openai)

    def bad(problem: str) -> Request:
        return dataclasses.replace(request, problem=problem)

    if not known:
        return bad(f'"id" is a {type(row_id).__name__}, not text or a number')
    forms = [f for f in ("prompt", "messages", "prompt_ids") if body.get(f) is not None]
    if len(forms) != 1:
        found = ", ".join(sorted(map(str, body))) or "nothing"
        return bad(f'needs one of "prompt", "messages" and "prompt_ids" (found: {found})')
    form, value = forms[0], body[forms[0]]
    params = body if openai else row.get("params")
    params = {} if params is None else params  # as in a column of Parquet
    if not isinstance(params, dict):
        return bad('"params" is not an object')
    try:
        fields = _read_params(params, strict=not openai)
    except ValueError as error:
        return bad(str(error))
    if form == "prompt":
        if not isinstance(value, str) or not value:
            return bad('"prompt" is empty' if value == "" else f'"prompt" is a {type(value).__name__}, not text')
        if "\0" in value:
            return bad('"prompt" holds NUL characters')
    elif form == "prompt_ids":
        if not isinstance(value, list) or not value or not all(type(t) is int and t >= 0 for t in value):
            return bad('"prompt_ids" is not a list of token ids')
    elif not is_chat(value):
        return bad('"messages" is not a list of {"role", "content"} with text')
    elif any("\0" in message["content"] for message in value):
        return bad('"messages" holds NUL characters')
    return dataclasses.replace(request, **{form: value}, **fields)


def _read_params(params: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Fields of a Request from a row's own options. strict: no others may stand among them. Raises ValueError."""
    known: dict[str, Any] = {}
    chat = not strict and "messages" in params
    for name, value in params.items():
        if value is None:
            continue
        if name in LIMIT_NAMES:
            if type(value) is not int or value < 1:
                raise ValueError(f"max_new_tokens is {value!r}, not a positive number of tokens")
            known["max_new_tokens"] = value
        elif name in NUMBERS:
            if type(value) not in (int, float):
                raise ValueError(f'"{name}" is {value!r}, not a number')
            known[name] = float(value)
        elif name in COUNTS:
            if type(value) is not int or value < (name == "n"):
                raise ValueError(f'"{name}" is {value!r}, not a whole number{" above 0" if name == "n" else ""}')
            known[name] = value
        elif name == "logprobs" or (name == "top_logprobs" and chat):
            known["logprobs"] = _chat_logprobs(params) if chat else _asked_logprobs(value)
        elif name == "stop":
            known["stop"] = (value,) if isinstance(value, str) else _list_of(name, value, str)
        elif name == "stop_token_ids":
            known["stop_token_ids"] = _list_of(name, value, int)
        elif name == "bad_words_ids":
            known["bad_words_ids"] = tuple(_list_of(name, words, int) for words in _list_of(name, value, list))
        elif name == "logit_bias":
            if not isinstance(value, dict) or not all(str(t).isdecimal() and type(b) in (int, float) for t, b in value.items()):
                raise ValueError('"logit_bias" does not give each token id a number')
            known["logit_bias"] = {int(t): float(b) for t, b in value.items()}
        elif name in KINDS or (name == "response_format" and not strict):
            found = _format(value) if name == "response_format" else (name, value)
            if found and "constraint" in known:
                raise ValueError(f'"{name}" and another constraint: an answer can have one')
            if found:
                known["constraint"] = _constraint(*found)
        elif strict:
            raise ValueError(f'"params" has unknown option "{name}"')
    fields: dict[str, Any] = {name: known.pop(name) for name in ("max_new_tokens", "n", "seed", "logprobs") if name in known}
    return {**fields, "sampling": known}


def _constraint(kind: str, value: Any) -> Constraint:
    try:
        return Constraint.of(kind, value)
    except UsageError as error:
        raise ValueError(str(error).rstrip(".")) from None


def _format(wish: Any) -> tuple[str, Any] | None:
    """Kind and value of the constraint in OpenAI's response_format; None: there is none."""
    kind = wish.get("type") if isinstance(wish, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_schema", {"type": "object"}
    schema = wish.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or "schema" not in schema:
        raise ValueError('"response_format" is not {"type": "text" or "json_object"} or {"type": "json_schema", "json_schema"}')
    return "json_schema", schema["schema"]


def _asked_logprobs(value: Any) -> int | Literal[False]:
    """How many of the most probable; False: no log-probabilities at all. Raises ValueError for what is neither."""
    if value is False or (type(value) is int and value >= 0):
        return value
    raise ValueError(f'"logprobs" is {value!r}, not a whole number')


def _chat_logprobs(body: dict[str, Any]) -> int | Literal[False]:
    """The same of an OpenAI chat: {"logprobs": true, "top_logprobs": K}."""
    asked, most = body.get("logprobs"), body.get("top_logprobs")
    if asked is not None and type(asked) is not bool:
        raise ValueError(f'"logprobs" is {asked!r}, not true or false')
    if most is not None and (type(most) is not int or most < 0):
        raise ValueError(f'"top_logprobs" is {most!r}, not a whole number')
    if most is not None and not asked:
        raise ValueError('"top_logprobs" goes with "logprobs": true')
    return (most or 0) if asked else False


def _list_of(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    """A tuple of the members of a list. Raises ValueError if one is of another kind."""
    if not isinstance(value, list) or not all(type(v) is kind for v in value):
        raise ValueError(f'"{name}" is not a list of {({str: "texts", int: "token ids", list: "lists"})[kind]}')
    return tuple(value)


def is_chat(messages: Any) -> bool:
    """True for a non-empty list of {"role": str, "content": str}."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages)
    )


def messages_asked(request: Request, chat: bool = False, system: str | None = None) -> list[dict[str, str]] | None:
    """The messages that a request's prompt is tokenized as; None if it is tokenized as text, or is ids."""
    messages = request.messages
    if messages is None and chat and request.prompt is not None:
        messages = [{"role": "user", "content": request.prompt}]
    if messages and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def prompt_ids_of(request: Request, tokenizer: Any | None, chat: bool = False, system: str | None = None) -> list[int]:
    """Token ids of a request's prompt.

    chat: a plain "prompt" becomes a user message. system: a system message before chat messages that bring none.
    Raises LookaheadError if the row needs a tokenizer or chat template that the model does not have.
    """
    if request.prompt_ids is not None:
        return request.prompt_ids
    if tokenizer is None:
        raise LookaheadError('the model has no tokenizer: give rows of "prompt_ids".')
    messages = messages_asked(request, chat, system)
    if messages is None:
        return list(tokenizer(request.prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise LookaheadError('the tokenizer has no chat template: give rows of "prompt" and leave --chat out.')
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what it likes
        raise LookaheadError(f"the chat template refuses these messages ({error}).") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
