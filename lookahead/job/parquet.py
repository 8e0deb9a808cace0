"""Output rows to a Parquet file. In: JSON lines. Out: one table, whose columns are those that the rows have.

Counts by source are a map; what an OpenAI batch line answers is a struct as OpenAI writes it. An id is a number where all are,
and fit into 64 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lookahead.atomic import replacing

BATCH = 1024  # rows


def write_parquet(rows: Path, out: Path) -> None:
    """Make `out`, atomically, of the JSON lines in `rows`. Raises LookaheadError if the disk is full."""
    import pyarrow
    import pyarrow.parquet

    named: set[str] = set()
    numbers = True
    for row in _rows_of(rows):
        named |= row.keys()
        row_id = row.get("id", row.get("custom_id"))
        numbers = numbers and isinstance(row_id, int) and abs(row_id) < 1 << 63
    fields = _fields(pyarrow, pyarrow.int64() if numbers else pyarrow.string(), "logprobs" in named)
    schema = pyarrow.schema([(name, kind) for name, kind in fields.items() if name in named])
    with replacing(out) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for batch in _batches(_rows_of(rows)):
            for row in batch:
                for name in ("id", "custom_id"):
                    if name in row and not numbers:
                        row[name] = str(row[name])
                _maps_as_pairs(row)
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))


def _fields(arrow: Any, id_kind: Any, scored_samples: bool) -> dict[str, Any]:
    """Type of each column that rows may have, in the order of the JSON. scored_samples: samples have "logprobs"."""
    text, count, ids = arrow.string(), arrow.int64(), arrow.list_(arrow.int64())
    scored = {"id": count, "token": text, "logprob": arrow.float64()}
    each = arrow.struct({**scored, "top": arrow.list_(arrow.struct(scored))})
    said = {"text": text, "token_ids": ids, "finish_reason": text}
    logprobs = {"logprobs": arrow.list_(each)}
    message = arrow.struct({"role": text, "content": text})
    choice = arrow.struct(
        {"index": count, "message": message, "text": text, "finish_reason": text, "logprobs": _openai_logprobs(arrow)}
    )
    usage = arrow.struct({"prompt_tokens": count, "completion_tokens": count, "total_tokens": count})
    body = arrow.struct({"object": text, "choices": arrow.list_(choice), "usage": usage})
    asked = arrow.list_(arrow.struct({"role": text, "content": text}))
    return {
        "id": id_kind,
        "custom_id": id_kind,
        "prompt": text,
        "messages": asked,
        "prompt_ids": ids,
        **said,
        **logprobs,
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "steps", "draft_tokens", "accepted_tokens"), count),
        "edl": arrow.float64(),
        "accepted_by_source": arrow.map_(text, count),
        "seconds": arrow.float64(),
        "samples": arrow.list_(arrow.struct({**said, **(logprobs if scored_samples else {})})),
        "response": arrow.struct({"status_code": count, "body": body}),
        "error": arrow.struct({"type": text, "code": text, "message": text, "line": count, "file": text}),
    }


def _openai_logprobs(arrow: Any) -> Any:
    """Of a chat "content", of a completion the rest."""
    text, number = arrow.string(), arrow.float64()
    scored = {"token": text, "logprob": number, "bytes": arrow.list_(arrow.int64())}
    each = arrow.struct({**scored, "top_logprobs": arrow.list_(arrow.struct(scored))})
    fields = {"content": arrow.list_(each), "tokens": arrow.list_(text), "token_logprobs": arrow.list_(number)}
    return arrow.struct(
        {**fields, "top_logprobs": arrow.list_(arrow.map_(text, number)), "text_offset": arrow.list_(arrow.int64())}
    )


def _maps_as_pairs(row: dict[str, Any]) -> None:
    """As arrow takes them."""
    if row.get("accepted_by_source") is not None:
        row["accepted_by_source"] = list(row["accepted_by_source"].items())
    for choice in row["response"]["body"]["choices"] if row.get("response") else ():
        logprobs = choice.get("logprobs") or {}
        if logprobs.get("top_logprobs") is not None:
            logprobs["top_logprobs"] = [list(top.items()) for top in logprobs["top_logprobs"]]


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
