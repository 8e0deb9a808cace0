"""Output rows to a Parquet or packed file. In: JSON lines. Out: the lines, packed; or one table of the columns that rows have.

Counts by source are a map; an OpenAI batch line is a struct as OpenAI writes it. An id is a number where all are, in 64 bits.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator, Set
from itertools import islice
from pathlib import Path
from typing import IO, Any

from lookahead.files.atomic import replacing
from lookahead.job.fields import OWN

BATCH = 1024  # rows
PIECE = 1 << 20  # bytes
IDS = ("id", "custom_id")


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
    fields = {**_fields(pyarrow, texts, "logprobs" in named), **kept.types}
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


def _fields(arrow: Any, texts: Set[str], scored_samples: bool) -> dict[str, Any]:
    """Type of each column, in the order of the JSON. texts: columns of ids that are text; scored_samples: have "logprobs"."""
    text, count, ids = arrow.string(), arrow.int64(), arrow.list_(arrow.int64())
    answer = {"text": text, "token_ids": ids, "finish_reason": text, "complete": arrow.bool_()}
    scored = {"id": count, "token": text, "logprob": arrow.float64()}
    own = arrow.list_(arrow.struct({**scored, "top": arrow.list_(arrow.struct(scored))}))
    logprobs = {"logprobs": own}
    asked = arrow.list_(arrow.struct({"role": text, "content": text}))
    return {
        **{name: text if name in texts else count for name in IDS},
        "prompt": text,
        "messages": asked,
        "prompt_ids": ids,
        **answer,
        **logprobs,
        "prompt_logprobs": own,
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "steps", "draft_tokens", "accepted_tokens"), count),
        "edl": arrow.float64(),
        "accepted_by_source": arrow.map_(text, count),
        "seconds": arrow.float64(),
        "samples": arrow.list_(arrow.struct({**answer, **(logprobs if scored_samples else {})})),
        "response": _openai_response(arrow, own),
        "error": arrow.struct({"type": text, "message": text, "line": count, "file": text}),
    }


def _openai_response(arrow: Any, own_logprobs: Any) -> Any:
    text, count = arrow.string(), arrow.int64()
    call = arrow.struct({"id": text, "type": text, "function": arrow.struct({"name": text, "arguments": text})})
    message = arrow.struct(
        {**dict.fromkeys(("role", "content", "refusal", "reasoning_content"), text), "tool_calls": arrow.list_(call)}
    )
    answer = {"message": message, "text": text, "token_ids": arrow.list_(count), "logprobs": _openai_logprobs(arrow)}
    answer |= {"complete": arrow.bool_(), "prompt_logprobs": own_logprobs}
    choice = arrow.struct({"index": count, **answer, "finish_reason": text})
    usage = arrow.struct({"prompt_tokens": count, "completion_tokens": count, "total_tokens": count})
    error = arrow.struct({"message": text, "type": text, "param": text, "code": text, "line": count, "file": text})
    named = {"id": text, "object": text, "created": count, "model": text}
    body = arrow.struct({**named, "choices": arrow.list_(choice), "usage": usage, "error": error})
    return arrow.struct({"status_code": count, "request_id": text, "body": body})


def _openai_logprobs(arrow: Any) -> Any:
    """Make the type of OpenAI log-probabilities: of a chat "content", of a completion the rest."""
    text, number = arrow.string(), arrow.float64()
    scored = {"token": text, "logprob": number, "bytes": arrow.list_(arrow.int64())}
    each = arrow.struct({**scored, "top_logprobs": arrow.list_(arrow.struct(scored))})
    fields = {"content": arrow.list_(each), "tokens": arrow.list_(text), "token_logprobs": arrow.list_(number)}
    return arrow.struct(
        {**fields, "top_logprobs": arrow.list_(arrow.map_(text, number)), "text_offset": arrow.list_(arrow.int64())}
    )


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
