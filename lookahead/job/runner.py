"""Runs a job. In: requests. Out: one output row per request, each handed over as it ends. A failed row never ends the job."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from lookahead.decode.engine import Generation, LookaheadEngine
from lookahead.draft.explain import ObserverOf, nobody
from lookahead.errors import LookaheadError
from lookahead.job.rows import Request, prompt_ids_of
from lookahead.trie.build import LEFT_CONTEXT, TokenDocument


@dataclasses.dataclass
class JobTotals:
    """Sums over the rows of a job. seconds: spent in rows, loading excluded."""

    rows: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    first_tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0
    accepted_by_source: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def edl(self) -> float:
        return (self.tokens - self.first_tokens) / self.steps if self.steps else 0.0

    def add(self, generation: Generation) -> None:
        self.prompt_tokens += generation.prompt_tokens
        self.tokens += len(generation.token_ids)
        self.first_tokens += bool(generation.token_ids)
        self.steps += generation.steps
        self.draft_tokens += generation.draft_tokens
        self.accepted_tokens += generation.accepted_tokens
        self.accepted_by_source.update(generation.accepted_by_source)
        self.seconds += generation.seconds

    def as_json(self) -> dict[str, Any]:
        """The object that `generate --json` prints."""
        fields = dataclasses.asdict(self)
        fields["accepted_by_source"] = dict(self.accepted_by_source)
        del fields["first_tokens"]
        rate = round(self.tokens / self.seconds, 2) if self.seconds else 0.0
        return {**fields, "seconds": round(self.seconds, 4), "edl": round(self.edl, 4), "tokens_per_second": rate}


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """max_new_tokens: tokens per answer, where a row does not say. chat, system: see `rows.prompt_ids_of`.

    observer_of: who is told the steps of a row.
    """

    max_new_tokens: int = 256
    chat: bool = False
    system: str | None = None
    token_ids: bool = False  # write token_ids beside the text
    learn: list[TokenDocument] | None = None  # outputs are kept here
    observer_of: ObserverOf = nobody


def run_job(
    engine: LookaheadEngine, tokenizer: Any | None, requests: Iterable[Request], options: JobOptions, totals: JobTotals
) -> Iterator[dict[str, Any]]:
    """Yields the output row of each request, in input order, and adds up `totals`."""
    for request in requests:
        totals.rows += 1
        try:
            if request.problem:
                raise LookaheadError(f"line {request.line}: {request.problem}.")
            prompt_ids = prompt_ids_of(request, tokenizer, options.chat, options.system)
            limit = request.max_new_tokens or options.max_new_tokens
            generation = engine.generate(prompt_ids, limit, options.observer_of(totals.rows))
        except Exception as error:  # whatever one row does, the job goes on and says so
            totals.errors += 1
            yield _error_row(request, error)
            continue
        totals.add(generation)
        if options.learn is not None:
            ids = np.array([*prompt_ids[-LEFT_CONTEXT:], *generation.token_ids], np.int32)
            options.learn.append(TokenDocument(ids, "outputs"))
        yield _output_row(request, generation, tokenizer, options)


def _output_row(request: Request, generation: Generation, tokenizer: Any | None, options: JobOptions) -> dict[str, Any]:
    text = tokenizer.decode(generation.token_ids, skip_special_tokens=True) if tokenizer is not None else None
    if request.openai:
        return _openai_row(request, generation, text or "")
    row: dict[str, Any] = {"id": request.id}
    if text is not None:
        row["text"] = text
    if options.token_ids or text is None:
        row["token_ids"] = generation.token_ids
    return {
        **row,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": len(generation.token_ids),
        "steps": generation.steps,
        "draft_tokens": generation.draft_tokens,
        "accepted_tokens": generation.accepted_tokens,
        "edl": round(generation.edl, 4),
        "accepted_by_source": dict(generation.accepted_by_source),
        "seconds": round(generation.seconds, 4),
    }


def _openai_row(request: Request, generation: Generation, text: str) -> dict[str, Any]:
    """One line of an OpenAI batch output file."""
    chat = request.messages is not None
    answer = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    body = {
        "object": "chat.completion" if chat else "text_completion",
        "choices": [{"index": 0, **answer, "finish_reason": generation.finish_reason}],
        "usage": {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": len(generation.token_ids),
            "total_tokens": generation.prompt_tokens + len(generation.token_ids),
        },
    }
    return {"custom_id": request.id, "response": {"status_code": 200, "body": body}, "error": None}


def _error_row(request: Request, error: Exception) -> dict[str, Any]:
    kind = "invalid_row" if request.problem else type(error).__name__
    described = {"type": kind, "message": str(error) or type(error).__name__}
    if request.openai:
        return {"custom_id": request.id, "response": None, "error": {"code": kind, "message": described["message"]}}
    return {"id": request.id, "finish_reason": "error", "error": described}
