"""Runs a job. In: requests. Out: one output row per request, as soon as its turn has come. A failed row never ends the job."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lookahead.decode.engine import Generation, LookaheadEngine
from lookahead.decode.sampling import GREEDY, Sampling, seed_of
from lookahead.draft.explain import Observer, ObserverOf, nobody
from lookahead.errors import LookaheadError, UsageError
from lookahead.job.rows import Request, prompt_ids_of
from lookahead.trie.build import LEFT_CONTEXT, TokenDocument


@dataclasses.dataclass
class JobTotals:
    """Sums over the rows of a job. seconds: spent in answering, loading excluded."""

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
        self.tokens += len(generation.token_ids)
        self.first_tokens += bool(generation.token_ids)
        self.steps += generation.steps
        self.draft_tokens += generation.draft_tokens
        self.accepted_tokens += generation.accepted_tokens
        self.accepted_by_source.update(generation.accepted_by_source)

    def as_json(self) -> dict[str, Any]:
        """The object that `generate --json` prints."""
        fields = dataclasses.asdict(self)
        fields["accepted_by_source"] = dict(self.accepted_by_source)
        del fields["first_tokens"]
        rate = round(self.tokens / self.seconds, 2) if self.seconds else 0.0
        return {**fields, "seconds": round(self.seconds, 4), "edl": round(self.edl, 4), "tokens_per_second": rate}


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What holds for rows that do not say otherwise, and how rows are written.

    n: samples of each answer. seed: with a row's id and the sample's number it makes the seed of its random stream.
    chat, system: see `rows.prompt_ids_of`. in_order: rows come as their prompts did, else as they end.
    observer_of: who is told the steps of a row.
    """

    max_new_tokens: int = 256
    sampling: Sampling = GREEDY
    n: int = 1
    seed: int = 0
    chat: bool = False
    system: str | None = None
    token_ids: bool = False  # write token_ids beside the text
    in_order: bool = True
    learn: list[TokenDocument] | None = None  # outputs are kept here
    observer_of: ObserverOf = nobody


@dataclasses.dataclass
class _Answer:
    """A row that is being answered, by one generation or by n."""

    request: Request
    samples: list[Generation]
    left: int


def run_job(
    engine: LookaheadEngine, tokenizer: Any | None, requests: Iterable[Request], options: JobOptions, totals: JobTotals
) -> Iterator[dict[str, Any]]:
    """Yields the output row of each request and adds up `totals`."""
    ready: dict[int, dict[str, Any]] = {}  # by number
    answers: dict[int, tuple[int, _Answer]] = {}  # by id of each generation
    written = 0

    def generations() -> Iterator[Generation]:
        for number, request in enumerate(requests):
            totals.rows += 1
            try:
                answer = _start(engine, tokenizer, request, options, options.observer_of(totals.rows))
            except Exception as error:  # whatever one row does, the job goes on and says so
                ready[number] = _error_row(request, error)
                continue
            answers.update((id(generation), (number, answer)) for generation in answer.samples)
            yield from answer.samples

    def finished() -> Iterator[dict[str, Any]]:
        """What can be written by now."""
        nonlocal written
        while ready and (written in ready or not options.in_order):
            row = ready.pop(written if options.in_order else min(ready))
            totals.errors += bool(row.get("error"))
            written += 1
            yield row

    ended = engine.run(generations())
    while True:
        began = time.perf_counter()
        generation = next(ended, None)
        totals.seconds += time.perf_counter() - began
        if generation is None:
            break
        if not generation.error:
            totals.add(generation)
        number, answer = answers.pop(id(generation))
        answer.left -= 1
        if not answer.left:
            totals.prompt_tokens += generation.prompt_tokens
            ready[number] = _row_of(answer, tokenizer, options)
        yield from finished()
    yield from finished()


def _start(
    engine: LookaheadEngine, tokenizer: Any | None, request: Request, options: JobOptions, observer: Observer | None
) -> _Answer:
    """A row's generations. Raises LookaheadError where the row cannot be answered."""
    if request.problem:
        raise LookaheadError(f"line {request.line}: {request.problem}.")
    prompt_ids = prompt_ids_of(request, tokenizer, options.chat, options.system)
    try:
        sampling = dataclasses.replace(options.sampling, **request.sampling)
    except UsageError as error:
        raise UsageError(f"line {request.line}: {error}") from error
    count = request.n or options.n
    samples = []
    for sample in range(count):
        seed = seed_of(options.seed if request.seed is None else request.seed, request.id, sample)
        samples.append(engine.request(prompt_ids, request.max_new_tokens or options.max_new_tokens, sampling, seed))
        samples[-1].observer = observer
    return _Answer(request, samples, count)


def _row_of(answer: _Answer, tokenizer: Any | None, options: JobOptions) -> dict[str, Any]:
    """The output row of an answer that has ended."""
    for generation in answer.samples:
        if generation.error:
            return _error_row(answer.request, generation.error)
    if options.learn is not None:
        for generation in answer.samples:
            ids = np.array([*generation.prompt_ids[-LEFT_CONTEXT:], *generation.token_ids], np.int32)
            options.learn.append(TokenDocument(ids, "outputs"))
    texts: list[str | None] = [None] * len(answer.samples)
    if tokenizer is not None:
        texts = [tokenizer.decode(generation.token_ids, skip_special_tokens=True) for generation in answer.samples]
    make = _openai_row if answer.request.openai else _output_row
    return make(answer, texts, options)


def _output_row(answer: _Answer, texts: Sequence[str | None], options: JobOptions) -> dict[str, Any]:
    """Counts are those of all samples together; "samples" stands where there are several."""
    said = [_said(generation, text, options) for generation, text in zip(answer.samples, texts, strict=True)]
    total = JobTotals()
    for generation in answer.samples:
        total.add(generation)
    return {
        "id": answer.request.id,
        **said[0],
        "prompt_tokens": answer.samples[0].prompt_tokens,
        "completion_tokens": total.tokens,
        "steps": total.steps,
        "draft_tokens": total.draft_tokens,
        "accepted_tokens": total.accepted_tokens,
        "edl": round(total.edl, 4),
        "accepted_by_source": dict(total.accepted_by_source),
        "seconds": round(max(generation.seconds for generation in answer.samples), 4),
        **({"samples": said} if len(said) > 1 else {}),
    }


def _said(generation: Generation, text: str | None, options: JobOptions) -> dict[str, Any]:
    """What one sample says."""
    row: dict[str, Any] = {} if text is None else {"text": text}
    if options.token_ids or text is None:
        row["token_ids"] = generation.token_ids
    return {**row, "finish_reason": generation.finish_reason}


def _openai_row(answer: _Answer, texts: Sequence[str | None], options: JobOptions) -> dict[str, Any]:
    """One line of an OpenAI batch output file."""
    chat = answer.request.messages is not None
    choices = []
    for index, (generation, text) in enumerate(zip(answer.samples, texts, strict=True)):
        said = {"message": {"role": "assistant", "content": text or ""}} if chat else {"text": text or ""}
        choices.append({"index": index, **said, "finish_reason": generation.finish_reason})
    prompt_tokens = answer.samples[0].prompt_tokens
    completion_tokens = sum(len(generation.token_ids) for generation in answer.samples)
    body = {
        "object": "chat.completion" if chat else "text_completion",
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    return {"custom_id": answer.request.id, "response": {"status_code": 200, "body": body}, "error": None}


def _error_row(request: Request, error: Exception) -> dict[str, Any]:
    kind = "invalid_row" if request.problem or isinstance(error, UsageError) else type(error).__name__
    described = {"type": kind, "message": str(error) or type(error).__name__}
    if request.openai:
        return {"custom_id": request.id, "response": None, "error": {"code": kind, "message": described["message"]}}
    return {"id": request.id, "finish_reason": "error", "error": described}
