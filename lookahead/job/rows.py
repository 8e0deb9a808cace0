"""Input rows to prompts. In: lines of job files. Out: one Request per line; a bad line carries its problem instead.

Forms: {"prompt"}, {"messages"}, {"prompt_ids"}, or an OpenAI batch line. `id` is optional (default: the line's number, of
several files FILE:LINE); "params" may set max_new_tokens, n, seed and anything that sampling knows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lookahead.errors import CorpusError, LookaheadError
from lookahead.job import openai, params
from lookahead.job.fields import KEEP, NO_FIELDS, RowFields
from lookahead.job.inputs import Shard, fingerprint, input_rows
from lookahead.job.params import Request, RowError
from lookahead.printable import printable


def read_requests(*names: str, fields: RowFields | None = None) -> Iterator[Request]:
    """One Request per row of files. fields: what of a row makes its prompt, and what it keeps. Raises CorpusError if a file
    cannot be read or has no rows.
    """
    number, columns = 0, (fields or RowFields()).columns
    for name in names:
        if name != "-" and not Path(name).exists():
            raise CorpusError(f"{name}: no such file.")
        if name != "-" and Path(name).is_dir():
            raise CorpusError(f"{name}: is a folder. Give a .jsonl file of prompts.")
        before, file = number, _short_name(name, names) if len(names) > 1 else ""
        for found in input_rows(name, columns):
            row_id = f"{file}:{found.line}" if file else found.line
            if isinstance(found.row, str):
                request = Request(row_id, found.line, problem=found.row)
            else:
                request = parse_row(found.row, found.line, row_id, fields)
            content = fingerprint(found.fingerprint + _id_bytes(request.id))
            yield dataclasses.replace(request, number=number, file=file, fingerprint=content)
            number += 1
        if number == before:
            raise CorpusError(f'{name}: empty file. Give one JSON object per line, such as {{"prompt": "..."}}.')


def _short_name(name: str, names: Sequence[str]) -> str:
    """A file's name without its folder, unless another file has the same; what is not UTF-8 of it escaped."""
    alone = sum(Path(other).name == Path(name).name for other in names) == 1
    return printable(Path(name).name if alone else name)


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
        problem = f"the id {json.dumps(request.id)} stands on {Request(None, line, file=file).where}, too"
        empty = Request(request.id, request.line, problem=problem, openai=request.openai)
        empty = dataclasses.replace(empty, kept=request.kept, number=request.number)
        yield dataclasses.replace(empty, file=request.file, fingerprint=request.fingerprint)


def left_to_do(requests: Iterable[Request], shard: Shard, done: Mapping[int, bytes]) -> Iterator[Request]:
    """Requests of a shard that are not done. done: fingerprints of those that are, by number. Raises LookaheadError if a row
    has changed since, or is gone.
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
                "input as it was, or start again with --overwrite."
            )
    if found < len(done):
        raise LookaheadError(
            f"the input has {len(done) - found} rows less than were answered. Put it back as it was, or start again "
            "with --overwrite."
        )


def parse_row(row: dict[str, Any], line: int, default_id: str | int | None = None, fields: RowFields | None = None) -> Request:
    """A Request, with `problem` set where the row cannot be used. default_id: of a row that has none (default: its line)."""
    default_id = line if default_id is None else default_id
    if openai.is_openai(row) and not (fields and fields.makes_prompts):
        request = openai.parse_line(row, line, default_id)
        if fields and fields.keep and not request.problem:
            return Request(request.id, line, problem=f"is {NO_FIELDS}", param=KEEP, openai=True)
        return request
    request = Request(default_id, line)
    try:
        kept = fields.kept(row) if fields else {}
        request = dataclasses.replace(request, kept=kept)
        if row.get("id") is not None:
            params.checked_id(row["id"], "id")
            request = dataclasses.replace(request, id=row["id"])
        return dataclasses.replace(request, **_fields_of(fields.prompted(row) if fields else row))
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
        value = params.chat_messages(value)
        for message in value:
            params.check_text("messages", message["content"])
    return {form: value, **fields}
