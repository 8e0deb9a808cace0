"""Output rows to a Parquet or packed file. In: JSON lines. Out: the lines, packed; or one table of the columns that rows have.

Counts by source are a map; an OpenAI batch line is a struct as OpenAI writes it. An id is a number where all are, in 64 bits.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from lookahead.files.atomic import replacing
from lookahead.job.fields import OWN

BATCH = 1024  # rows
PIECE = 1 << 20  # bytes
IDS = ("id", "custom_id")

# Columns and what they hold: {...}: a struct, [...]: a list, (str, ...): a map
ANSWER: dict[str, Any] = {"text": str, "token_ids": [int], "finish_reason": str, "complete": bool}
SCORED: dict[str, Any] = {"id": int, "token": str, "logprob": float}
LOGPROBS = [{**SCORED, "top": [SCORED]}]
MESSAGE = {
    **dict.fromkeys(("role", "content", "refusal", "reasoning_content"), str),
    "tool_calls": [{"id": str, "type": str, "function": {"name": str, "arguments": str}}],
}
SPELLED: dict[str, Any] = {"token": str, "logprob": float, "bytes": [int]}
OPENAI_LOGPROBS = {  # of a chat "content", of a completion the rest
    "content": [{**SPELLED, "top_logprobs": [SPELLED]}],
    "tokens": [str], "token_logprobs": [float], "top_logprobs": [(str, float)], "text_offset": [int],
}  # fmt: skip
CHOICE = {
    "index": int, "message": MESSAGE, "text": str, "token_ids": [int], "logprobs": OPENAI_LOGPROBS, "complete": bool,
    "prompt_logprobs": LOGPROBS, "finish_reason": str,
}  # fmt: skip
BODY = {
    "id": str, "object": str, "created": int, "model": str, "choices": [CHOICE],
    "usage": dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), int),
    "error": {"message": str, "type": str, "param": str, "code": str, "line": int, "file": str},
}  # fmt: skip
COLUMNS = {  # in the order of the JSON
    **dict.fromkeys(IDS, int), "prompt": str, "messages": [{"role": str, "content": str}], "prompt_ids": [int],
    **ANSWER, "logprobs": LOGPROBS, "prompt_logprobs": LOGPROBS,
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "steps", "draft_tokens", "accepted_tokens"), int),
    "edl": float, "accepted_by_source": (str, int), "seconds": float, "samples": [ANSWER],
    "response": {"status_code": int, "request_id": str, "body": BODY},
    "error": {"type": str, "message": str, "line": int, "file": str},
}  # fmt: skip


def write_as_named(rows: Path, out: Path) -> None:
    """Make `out`, atomically, of the JSON lines in `rows`: what its ending names. Raises LookaheadError if the disk is full."""
    if out.suffix.lower() == ".parquet":
        _write_parquet(rows, out)
        return
    with rows.open("rb") as lines, replacing(out) as file, _packed(file, out.suffix.lower()) as packed:
        shutil.copyfileobj(lines, packed, PIECE)


def _packed(file: IO[bytes], ending: str) -> Any:
    """A stream that writes to `file`, which stays open."""
    if ending == ".gz":
        return gzip.GzipFile("", "wb", 6, file, 0)
    import pyarrow

    return pyarrow.CompressedOutputStream(pyarrow.PythonFile(os.fdopen(os.dup(file.fileno()), "wb")), "zstd")


def _write_parquet(rows: Path, out: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    named: set[str] = set()
    texts: set[str] = set()  # columns of ids that are not all numbers
    kept = KeptColumns(pyarrow)
    for batch in _batches(rows):
        for row in batch:
            named |= row.keys()
            texts |= {name for name in IDS if name in row and not (isinstance(row[name], int) and abs(row[name]) < 1 << 63)}
        kept.see(batch)
    columns = COLUMNS | dict.fromkeys(texts, str)
    if "logprobs" in named:
        columns["samples"] = [ANSWER | {"logprobs": LOGPROBS}]
    fields = {**{name: _type_of(pyarrow, form) for name, form in columns.items()}, **kept.types}
    schema = pyarrow.schema([(name, kind) for name, kind in fields.items() if name in named])
    with replacing(out) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for batch in _batches(rows):
            for row in batch:
                row.update({name: str(row[name]) for name in texts if name in row})
                _maps_as_pairs(row)
                kept.as_text(row)
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))


class KeptColumns:
    """Columns of kept fields: typed by their values, or JSON text where these have no common type. types: in their order."""

    def __init__(self, arrow: Any):
        self._arrow = arrow
        self.types: dict[str, Any] = {}
        self._mixed: set[str] = set()

    def see(self, batch: list[dict[str, Any]]) -> None:
        for name in dict.fromkeys(name for row in batch for name in row if name not in OWN):
            if name in self._mixed:
                continue
            try:
                found = self._arrow.array([row.get(name) for row in batch]).type
                seen = [self._arrow.schema([(name, kind)]) for kind in (self.types.get(name, found), found)]
                self.types[name] = self._arrow.unify_schemas(seen, promote_options="permissive").field(name).type
                if _has_empty_struct(self.types[name]):  # which Parquet cannot hold
                    raise self._arrow.ArrowTypeError("an empty object")
            except (self._arrow.ArrowException, OverflowError):
                self._mixed.add(name)
                self.types[name] = self._arrow.string()

    def as_text(self, row: dict[str, Any]) -> None:
        """Make JSON text of what stands in columns without a common type; text stays as it is."""
        for name in self._mixed:
            value = row.get(name)
            if value is not None and not isinstance(value, str):
                row[name] = json.dumps(value, ensure_ascii=False)


def _has_empty_struct(kind: Any) -> bool:
    return str(kind) == "struct<>" or any(_has_empty_struct(kind.field(n).type) for n in range(kind.num_fields))


def _type_of(arrow: Any, form: Any) -> Any:
    """The type of a column that holds what COLUMNS describes so."""
    if isinstance(form, dict):
        return arrow.struct([(name, _type_of(arrow, part)) for name, part in form.items()])
    if isinstance(form, list):
        return arrow.list_(_type_of(arrow, form[0]))
    if isinstance(form, tuple):
        return arrow.map_(*(_type_of(arrow, part) for part in form))
    return {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}[form]


def _maps_as_pairs(row: dict[str, Any]) -> None:
    if row.get("accepted_by_source") is not None:
        row["accepted_by_source"] = list(row["accepted_by_source"].items())
    for choice in row["response"]["body"].get("choices", ()) if row.get("response") else ():
        logprobs = choice.get("logprobs") or {}
        if logprobs.get("top_logprobs") is not None:
            logprobs["top_logprobs"] = [top and list(top.items()) for top in logprobs["top_logprobs"]]


def _batches(path: Path) -> Iterator[list[dict[str, Any]]]:
    with path.open("rb") as file:
        while batch := [json.loads(line) for line in islice(file, BATCH)]:
            yield batch
