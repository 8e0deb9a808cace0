"""Input rows to prompts. In: lines of job files. Out: one Request per line; a bad line carries its problem instead.

Forms: {"prompt"}, {"messages"}, {"prompt_ids"}, or an OpenAI batch line. `id` is optional (default: the line's number, of
several files FILE:LINE); "params" may set max_new_tokens, n, seed and anything that sampling knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead.decode.limits import shown
from lookahead.errors import CorpusError, LookaheadError
from lookahead.job import openai, params, tools
from lookahead.job.fields import KEEP, NO_FIELDS, RowFields
from lookahead.job.inputs import Shard, fingerprint, input_rows
from lookahead.job.params import Request, RowError
from lookahead.printable import printable
from lookahead.tokenizer import chat_text

if TYPE_CHECKING:
    from lookahead.decode.sampling import Sampling

IDS_KIB = 1 << 15  # of memory that ids of rows take


def read_requests(*names: str, fields: RowFields | None = None) -> Iterator[Request]:
    """One Request per row of files. Raises CorpusError if a file cannot be read or has no rows."""
    number, columns = 0, (fields or RowFields()).columns
    for name in names:
        if name != "-" and not Path(name).exists():
            raise CorpusError(f"{name}: no such file.")
        if name != "-" and Path(name).is_dir():
            raise CorpusError(f"{name}: is a folder. Give a .jsonl file of prompts.")
        before, file = number, ""
        if len(names) > 1:  # without its folder, unless another file has the same name; what is not UTF-8 of it escaped
            alone = sum(Path(other).name == Path(name).name for other in names) == 1
            file = printable(Path(name).name if alone else name)
        for found in input_rows(name, columns):
            row_id = f"{file}:{found.line}" if file else found.line
            if isinstance(found.row, str):
                request = Request(row_id, found.line, problem=found.row)
            else:
                request = parse_row(found.row, found.line, row_id, fields)
            content = fingerprint(found.fingerprint + json.dumps(request.id).encode())
            yield dataclasses.replace(request, number=number, file=file, fingerprint=content)
            number += 1
        if number == before:
            raise CorpusError(f'{name}: empty file. Give one JSON object per line, such as {{"prompt": "..."}}.')


def without_duplicates(requests: Iterable[Request]) -> Iterator[Request]:
    """The second request with an id gets a problem that names both lines.

    64 bits of each id and its line are kept in a temporary database: on disk, but for IDS_KIB of them. Raises LookaheadError if
    that has no room.
    """
    with contextlib.closing(sqlite3.connect("", isolation_level=None, check_same_thread=False)) as seen:
        seen.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA cache_size = -{IDS_KIB};"
            "CREATE TABLE ids (key INTEGER PRIMARY KEY, line INTEGER, file TEXT); BEGIN"
        )
        for request in requests:
            if request.problem:
                yield request
                continue
            key = int.from_bytes(hashlib.blake2b(json.dumps(request.id).encode(), digest_size=8).digest(), "big", signed=True)
            row = key, request.line, request.file
            try:
                is_new = seen.execute("INSERT OR IGNORE INTO ids VALUES (?, ?, ?)", row).rowcount
            except sqlite3.Error as error:
                raise LookaheadError(f"the ids of rows cannot be kept ({error}): make room for temporary files.") from error
            if is_new:
                yield request
                continue
            line, file = seen.execute("SELECT line, file FROM ids WHERE key = ?", (key,)).fetchone()
            problem = f"the id {json.dumps(request.id)} stands on {Request(None, line, file=file).where}, too"
            names = ("id", "line", "openai", "kept", "number", "file", "fingerprint")
            yield Request(problem=problem, **{name: getattr(request, name) for name in names})


def left_to_do(requests: Iterable[Request], shard: Shard, done: Mapping[int, bytes]) -> Iterator[Request]:
    """Requests of a shard not in `done` (fingerprints by number). Raises LookaheadError if a row has changed or is gone."""
    found = 0
    for request in requests:
        if not shard.holds(request.number):
            continue
        before = done.get(request.number)
        if before is None:
            yield request
        found += before is not None
        if before not in (None, request.fingerprint):
            raise LookaheadError(
                f"{request.where} of the input was changed after it had been answered (or rows were moved). Put back the "
                "input as it was, or start again with --overwrite."
            )
    if found < len(done):
        raise LookaheadError(
            f"the input has {len(done) - found} rows less than were answered. Put it back as it was, or start again "
            "with --overwrite."
        )


def parse_row(row: dict[str, Any], line: int, default_id: str | int | None = None, fields: RowFields | None = None) -> Request:
    """A Request, with `problem` set where the row cannot be used. default_id: of a row that has none (default: its line)."""
    default_id, in_batch = line if default_id is None else default_id, openai.is_openai(row)
    in_batch, adapters = in_batch and not (fields and fields.makes_prompts), fields.adapters if fields else ()
    named = "custom_id" if in_batch else "id"
    request = Request(str(default_id) if in_batch else default_id, line, openai=in_batch)
    try:
        if fields and not in_batch:
            request = dataclasses.replace(request, kept=fields.kept(row))
        if row.get(named) is not None:
            params.checked_id(row[named], named)
            request = dataclasses.replace(request, id=row[named])
        if not in_batch:
            found = _fields_of(fields.prompted(row) if fields else row)
        else:
            found = openai.fields_of(row)
            if fields and fields.keep:
                raise RowError(f"is {NO_FIELDS}", KEEP)
            if "adapter" not in found and row["body"].get("model") in adapters:  # as vLLM's server has it
                found["adapter"] = row["body"]["model"]
        if found.get("adapter") not in (None, *adapters):
            known = ", ".join(adapters) or "none"
            raise RowError(f"no --adapter is named {shown(found['adapter'])} (known: {known})", "adapter")
        return dataclasses.replace(request, **found)
    except RowError as error:
        return dataclasses.replace(request, problem=str(error), param=error.param)


def _fields_of(row: dict[str, Any]) -> dict[str, Any]:
    """Prompt and params of a row, as fields of a Request. Raises RowError."""
    forms = [f for f in ("prompt", "messages", "prompt_ids") if row.get(f) is not None]
    if len(forms) != 1:
        raise RowError(f'needs one of "prompt", "messages" and "prompt_ids" (found: {params.names_in(row)})')
    form, value = forms[0], row[forms[0]]
    asked = row.get("params")
    asked = {} if asked is None else asked  # as in a column of Parquet
    if not isinstance(asked, dict):
        raise RowError('"params" is not an object')
    fields = params.read_params(asked)
    if form == "prompt":
        params.check_text("prompt", value)
    elif form == "prompt_ids":
        if not params.is_ids(value):
            raise RowError('"prompt_ids" is not a list of token ids')
    else:
        if row.get("tools"):
            raise RowError('"tools" are read in OpenAI lines only: put "messages" and "tools" into a "body"', "tools")
        value = params.chat_messages(value)
        for message in value:
            params.check_text("messages", message["content"])
    return {form: value, **fields}


PIECE = 1 << 16  # characters; a text of no more is tokenized at once


def local_time() -> datetime.datetime:
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
    model. now: what chat templates write. Raises LookaheadError for a text of clearly more tokens, and for want of a tokenizer
    or chat template.
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
    now, listed = now or local_time(), request.tools and request.tools.listed
    try:
        text = chat_text(tokenizer, messages, now, listed)
        shows_tools = listed is not None and text != chat_text(tokenizer, messages, now)
    except Exception as error:  # a template raises what it likes
        raise LookaheadError(f"the chat template refuses these messages ({error}).") from error
    if request.openai:
        tools.check_template(tokenizer, request.tools, messages, shows_tools)
    return [_ids_of(tokenizer, text, longest, add_special_tokens=False)]


def sampling_of(request: Request, tokenizer: Any | None, options: Sampling) -> Sampling:
    """How the answers to a request whose prompts are made are sampled. options: of the job. Raises LookaheadError."""
    sampling = dataclasses.replace(options, **({"include_stop": not request.openai} | request.sampling))
    return tools.constrained(sampling, request.tools, tokenizer) if request.tools else sampling


def _ids_of(tokenizer: Any | None, text: str, longest: int, **options: Any) -> list[int]:
    """Raises LookaheadError if the text clearly has more tokens than the model has positions."""
    if tokenizer is None:
        raise LookaheadError('the model has no tokenizer: give rows of "prompt_ids".')
    found, pieces = 0, range(0, len(text), PIECE) if len(text) > max(PIECE, longest) else ()
    for begin in pieces:  # where one ends, a token may be cut: a quarter more than `longest` leaves room for many such cuts
        found += len(tokenizer(text[begin : begin + PIECE], add_special_tokens=False, verbose=False)["input_ids"])
        if found > longest + longest // 4 + 256:
            more = f"which are more tokens than the {longest} positions that the model has"
            raise LookaheadError(f"the prompt has {len(text)} characters, {more}: no room for an answer.")
    return list(tokenizer(text, verbose=False, **options)["input_ids"])
