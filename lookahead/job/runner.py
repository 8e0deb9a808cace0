"""Runs a job. In: requests. Out: one output row per request, as soon as its turn has come. A failed row never ends the job."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lookahead.answers import messages_of
from lookahead.decode.engine import DecodingEngine, Generation
from lookahead.decode.memory import untidied
from lookahead.decode.sampling import GREEDY, Sampling, seed_of
from lookahead.decode.text import text_of
from lookahead.draft.explain import Observer, ObserverOf, nobody
from lookahead.errors import LookaheadError
from lookahead.job.journal import INVALID, Ended
from lookahead.job.logprobs import LogprobsOf
from lookahead.job.rows import Request, messages_asked, prompt_ids_of
from lookahead.job.totals import JobTotals
from lookahead.trie.build import LEFT_CONTEXT

FAULTS, FAULTY_BATCHES = 100, 4  # so many rows, and of so many batches, fail one after the other: then the job ends


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What holds for rows that do not say otherwise, and how rows are written.

    n: samples of each answer. seed: with a row's id and the sample's number it makes the seed of its random stream.
    chat, system: see `rows.prompt_ids_of`. in_order: rows come as their prompts did, else as they end.
    echo: rows keep their prompts, as text, ids, or the messages that the chat template was given.
    observer_of: who is told the steps of a row. logprobs: see `Generation`.
    """

    max_new_tokens: int = 256
    sampling: Sampling = GREEDY
    n: int = 1
    seed: int = 0
    chat: bool = False
    system: str | None = None
    token_ids: bool = False  # write token_ids beside the text
    echo: bool = False
    in_order: bool = True
    observer_of: ObserverOf = nobody
    logprobs: int | None = None


@dataclasses.dataclass
class _Answer:
    """A row that is being answered, by one generation or by n."""

    request: Request
    samples: list[Generation]
    left: int


def run_job(
    engine: DecodingEngine,
    tokenizer: Any | None,
    requests: Iterable[Request],
    options: JobOptions,
    write: Callable[[Ended], None],
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Hands the output row of each request to `write`.

    stopped: asked after each step; True ends the job there. Rows that have ended by then are written, in whatever order.
    Raises LookaheadError when one row after the other fails by no fault of its own.
    """
    turns = Turns(write, options.in_order, FAULTY_BATCHES * engine.batch_size)
    with untidied():
        answer(engine, tokenizer, requests, options, turns.put, stopped)
    turns.finish()


class Turns:
    """Writes rows when their turn has come.

    in_order: in the order of their requests; else at once. faulty: so many rows that fail one after the other, by no fault of
    their own and at least FAULTS, end the job.
    """

    def __init__(self, write: Callable[[Ended], None], in_order: bool, faulty: int):
        self._write, self._in_order, self._most_faults = write, in_order, max(FAULTS, faulty)
        self._ready: dict[int, Ended] = {}  # by place
        self._written = self._faults = 0
        self._began = time.perf_counter()

    def put(self, place: int, ended: Ended) -> None:
        """A row has ended, that of the request at `place`, from 0. Raises LookaheadError where too many have failed."""
        self._ready[place] = ended
        while self._ready and (self._written in self._ready or not self._in_order):
            self._write_one(self._written if self._in_order else place)

    def finish(self) -> None:
        """Write what has ended, whatever it waits for."""
        for place in sorted(self._ready):
            self._write_one(place)

    def _write_one(self, place: int) -> None:
        """The time since the last row is this one's."""
        ended = self._ready.pop(place)
        self._written += 1
        now = time.perf_counter()
        ended.counts.seconds, self._began = now - self._began, now
        self._write(ended)
        if ended.error != INVALID:
            self._faults = self._faults + 1 if ended.error else 0
        if self._faults >= self._most_faults:
            raise LookaheadError(
                f"the last {self._faults} rows failed ({ended.error}): model or machine is at fault. The rows before are safe: "
                "the same command with --resume --retry-errors goes on."
            )


def answer(
    engine: DecodingEngine,
    tokenizer: Any | None,
    requests: Iterable[Request | None],
    options: JobOptions,
    put: Callable[[int, Ended], None],
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Hands each request's place, from 0, and output row to `put`, as they end.

    requests: None where there is none at the moment; it is asked again after each step, and no more once no row is running.
    stopped: as of `run_job`.
    """
    answers: dict[int, tuple[int, _Answer]] = {}  # by id of each generation

    def generations() -> Iterator[Generation | None]:
        place = -1
        for request in requests:
            if request is None:
                yield None
                continue
            place += 1
            try:
                answer = _start(engine, tokenizer, request, options, options.observer_of(place + 1))
            except Exception as error:  # whatever one row does, the job goes on and says so
                kind = INVALID if isinstance(error, LookaheadError) else type(error).__name__
                put(place, failed(request, f"{request.where}: {error}", kind))
                continue
            answers.update((id(generation), (place, answer)) for generation in answer.samples)
            yield from answer.samples

    for generation in engine.run(generations(), stopped):
        place, answer = answers.pop(id(generation))
        answer.left -= 1
        if not answer.left:
            put(place, _ended(answer, tokenizer, options))


def _start(
    engine: DecodingEngine, tokenizer: Any | None, request: Request, options: JobOptions, observer: Observer | None
) -> _Answer:
    """A row's generations. Raises LookaheadError where the row cannot be answered."""
    if request.problem:
        raise LookaheadError(f"{request.problem}.")
    prompt_ids = prompt_ids_of(request, tokenizer, options.chat, options.system)
    sampling = dataclasses.replace(options.sampling, **request.sampling)
    count = request.n or options.n
    logprobs = options.logprobs if request.logprobs is None else None if request.logprobs is False else request.logprobs
    samples = []
    for sample in range(count):
        seed = seed_of(options.seed if request.seed is None else request.seed, request.id, sample)
        samples.append(engine.request(prompt_ids, request.max_new_tokens or options.max_new_tokens, sampling, seed))
        samples[-1].observer, samples[-1].logprobs = observer, logprobs
    return _Answer(request, samples, count)


def _ended(answer: _Answer, tokenizer: Any | None, options: JobOptions) -> Ended:
    """The output row of an answer that has ended."""
    for generation in answer.samples:
        if error := generation.error:
            return failed(answer.request, str(error) or type(error).__name__, type(error).__name__)
    counts = JobTotals(rows=1, prompt_tokens=answer.samples[0].prompt_tokens)
    for generation in answer.samples:
        counts.add(generation)
    texts: list[str | None] = [None] * len(answer.samples)
    if tokenizer is not None:
        texts = [text_of(tokenizer, generation.token_ids) for generation in answer.samples]
    logprobs = LogprobsOf(tokenizer)
    if answer.request.openai:
        row = _openai_row(answer, texts, logprobs)
    else:
        row = _output_row(answer, texts, counts, options, logprobs)
    if options.echo:
        row.update(_echoed(answer.request, options))
    said = [(generation.prompt_ids[-LEFT_CONTEXT:], generation.token_ids) for generation in answer.samples]
    return Ended(answer.request.number, answer.request.fingerprint, row, counts, said=said)


def _output_row(
    answer: _Answer, texts: Sequence[str | None], counts: JobTotals, options: JobOptions, logprobs: LogprobsOf
) -> dict[str, Any]:
    """Counts are those of all samples together; "samples" stands where there are several."""
    said = [_said(generation, text, options, logprobs) for generation, text in zip(answer.samples, texts, strict=True)]
    return {
        "id": answer.request.id,
        **said[0],
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.tokens,
        "steps": counts.steps,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "edl": round(counts.edl, 4),
        "accepted_by_source": dict(counts.accepted_by_source),
        "seconds": round(max(generation.seconds for generation in answer.samples), 4),
        **({"samples": said} if len(said) > 1 else {}),
    }


def _echoed(request: Request, options: JobOptions) -> dict[str, Any]:
    """A row's prompt as it was tokenized, whatever form it came in: what it takes to replay the answer."""
    messages = messages_asked(request, options.chat, options.system)
    if messages is not None:
        return {"messages": messages_of(messages) or messages}
    return {"prompt": request.prompt} if request.prompt is not None else {"prompt_ids": request.prompt_ids}


def _said(generation: Generation, text: str | None, options: JobOptions, logprobs: LogprobsOf) -> dict[str, Any]:
    """What one sample says."""
    row: dict[str, Any] = {} if text is None else {"text": text}
    if options.token_ids or text is None:
        row["token_ids"] = generation.token_ids
    row["finish_reason"] = generation.finish_reason
    return row if generation.logprobs is None else {**row, "logprobs": logprobs.in_row(generation)}


def _openai_row(answer: _Answer, texts: Sequence[str | None], logprobs: LogprobsOf) -> dict[str, Any]:
    """One line of an OpenAI batch output file."""
    chat = answer.request.messages is not None
    choices = []
    for index, (generation, text) in enumerate(zip(answer.samples, texts, strict=True)):
        said = {"message": {"role": "assistant", "content": text or ""}} if chat else {"text": text or ""}
        choices.append({"index": index, **said, "finish_reason": generation.finish_reason})
        if generation.logprobs is not None:
            choices[-1]["logprobs"] = logprobs.of_chat(generation) if chat else logprobs.of_completion(generation)
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


def failed(request: Request, message: str, kind: str) -> Ended:
    """The error row of a request."""
    row: dict[str, Any]
    if request.openai:
        row = {"custom_id": request.id, "response": None, "error": {"code": kind, "message": message, "line": request.line}}
    else:
        error = {"type": kind, "message": message, "line": request.line}
        row = {"id": request.id, "finish_reason": "error", "error": error}
    if request.file:
        row["error"]["file"] = request.file
    counts = JobTotals(rows=1, errors=1, faults=int(kind != INVALID))
    return Ended(request.number, request.fingerprint, row, counts, kind)
