"""Runs a job. In: requests. Out: one output row per request, as soon as its turn has come. A failed row never ends the job."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lookahead.corpus.answers import messages_of
from lookahead.decode.limits import check_samples
from lookahead.decode.request import Generation
from lookahead.decode.sampling import GREEDY, Sampling, seed_of
from lookahead.decode.text import text_of
from lookahead.draft.explain import Observer, ObserverOf, nobody
from lookahead.errors import ConstraintError, LookaheadError, UsageError
from lookahead.forward.memory import gc_frozen
from lookahead.job import openai
from lookahead.job.journal import INVALID, FinishedRow
from lookahead.job.openai import LogprobsOf
from lookahead.job.progress import JobTotals
from lookahead.job.rows import Request, local_time, messages_asked, prompts_of, sampling_of
from lookahead.token_documents import LEFT_CONTEXT

if TYPE_CHECKING:
    from lookahead.decode.engine import DecodingEngine
    from lookahead.engines.foreign import ForeignEngine

Engine: TypeAlias = "DecodingEngine | ForeignEngine"
FAULTS, FAULTY_BATCHES = 100, 4  # that many rows, and of that many batches, fail one after the other: then the job ends
SAMPLES_IN_TURN = 8  # of one row that begin before the next rows have their turn
MANY_AT_ONCE = 4  # rows that have begun with more samples than that
END: Literal["end"] = "end"  # no more requests
Write = Callable[[FinishedRow], None]
Stopped = Callable[[], bool]
NO_TEXT = 'the model has no tokenizer, and OpenAI lines are answered in text: give rows of "prompt_ids".'


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Defaults of rows, and how rows are written.

    n: samples. seed: makes, with a row's id and the sample's number, that of its random stream. in_order: of the prompts, else
    as rows end. echo: rows keep their prompts. began: when the job did, which answers and chat templates write.
    """

    max_new_tokens: int = 256
    sampling: Sampling = GREEDY
    n: int = 1
    seed: int = 0
    chat: bool = False
    system: str | None = None
    token_ids: bool = False  # write token_ids next to the text
    echo: bool = False
    in_order: bool = True
    observer_of: ObserverOf = nobody
    logprobs: int | None = None
    began: datetime.datetime = dataclasses.field(default_factory=local_time)


@dataclasses.dataclass
class _Answer:
    """A row that is being answered. generations: begun, by prompt * count + sample; `running` of them have not ended."""

    request: Request
    prompts: list[list[int]]
    count: int
    sampling: Sampling
    observer: Observer | None = None
    generations: list[Generation] = dataclasses.field(default_factory=list)
    running: int = 0
    failed: bool = False

    @property
    def left(self) -> int:
        return 0 if self.failed else len(self.prompts) * self.count - len(self.generations)

    def ended(self, generation: Generation) -> bool:
        """One of its generations has; True if it was the last."""
        self.running -= 1
        self.failed = self.failed or generation.error is not None
        return not self.running and not self.left


def run_rows(
    engine: Engine, tokenizer: Any | None, requests: Iterable[Request], options: JobOptions, write: Write, stopped: Stopped
) -> None:
    """Hands the output row of each request to `write`, until `stopped`. Raises LookaheadError when too many fail in a row."""
    writer = OrderedWriter(write, options.in_order, engine.batch_size)
    answer(engine, tokenizer, writer.expect(requests), options, writer.put, stopped)
    writer.finish()


class OrderedWriter:
    """Writes rows in the order of requests, or at once. Failures of FAULTY_BATCHES in a row, at least FAULTS, end the job."""

    def __init__(self, write: Write, in_order: bool, batch_size: int):
        self._write, self._in_order, self._most_faults = write, in_order, max(FAULTS, FAULTY_BATCHES * batch_size)
        self._expected: deque[int] = deque()  # numbers of requests, in their order
        self._ready: dict[int, FinishedRow] = {}  # by number
        self._faults = 0
        self._began = time.perf_counter()

    def expect(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The same requests, in whose order their rows are written."""
        for request in requests:
            if self._in_order:
                self._expected.append(request.number)
            yield request

    def put(self, ended: FinishedRow) -> None:
        """A row has ended. Raises LookaheadError where too many have failed."""
        self._ready[ended.number] = ended
        while self._ready and (not self._in_order or self._expected[0] in self._ready):
            self._write_one(self._ready.pop(self._expected.popleft() if self._in_order else ended.number))

    def finish(self) -> None:
        """Write those that wait for others before them."""
        for number in filter(self._ready.get, self._expected):
            self._write_one(self._ready[number])

    def _write_one(self, ended: FinishedRow) -> None:
        """The time since the last row is this one's."""
        now = time.perf_counter()
        ended.counts.seconds, self._began = now - self._began, now
        self._write(ended)
        if ended.error != INVALID:
            self._faults = self._faults + 1 if ended.error else 0
        if self._faults >= self._most_faults:
            raise LookaheadError(
                f"the last {self._faults} rows failed ({ended.error}): model or machine is at fault. The rows before are safe: "
                "the same command with --resume --retry-errors continues."
            )


def answer(
    engine: Engine, tokenizer: Any | None, requests: Iterable[Request | None], options: JobOptions, put: Write, stopped: Stopped
) -> None:
    """Hands each request's output row to `put`, as they end. requests: None: none at the moment, ask again."""
    rows = _Rows(engine, tokenizer, options, put)
    with gc_frozen():
        for generation in engine.run(rows.generations(iter(requests)), stopped):
            row = rows.answers.pop(id(generation))
            if row.ended(generation):
                put(_ended(row, tokenizer, options, engine.target.name))


class _Rows:
    """Makes the generations of rows, in turn, and hands over the output row of each that has ended."""

    def __init__(self, engine: Engine, tokenizer: Any | None, options: JobOptions, put: Write):
        self._engine, self._tokenizer, self._options, self._put = engine, tokenizer, options, put
        self.answers: dict[int, _Answer] = {}  # by id of each generation
        self._many: deque[_Answer] = deque()  # rows with many samples, some of which are still to begin
        self._numbers = itertools.count(1)  # of requests, for observers

    def generations(self, requests: Iterator[Request | None]) -> Iterator[Generation | None]:
        """Rows in turn. One with many samples gives way to the next rows after each SAMPLES_IN_TURN of them."""
        more = True
        while more or self._many:
            taken = 0
            while more and taken < SAMPLES_IN_TURN and len(self._many) < MANY_AT_ONCE:
                request = next(requests, END)
                if request is None:
                    if self._many:
                        break
                    yield None
                    continue
                if isinstance(request, str):
                    more = False
                    break
                if not (answer := self._begun(request)):
                    continue
                if answer.left > SAMPLES_IN_TURN:
                    self._many.append(answer)
                    break
                taken += answer.left
                yield from self._samples(answer)
            if self._many:
                answer = self._many.popleft()
                yield from self._samples(answer)
                if answer.left:
                    self._many.append(answer)

    def _begun(self, request: Request) -> _Answer | None:
        """None for a row that cannot be answered: it has got its error row."""
        options, engine = self._options, self._engine
        observer = options.observer_of(next(self._numbers))
        try:
            if request.problem:
                raise LookaheadError(f"{request.problem}.")
            if request.openai and self._tokenizer is None:
                raise LookaheadError(NO_TEXT)
            longest = engine.target.longest_text
            prompts = prompts_of(request, self._tokenizer, options.chat, options.system, longest, options.began)
            sampling = sampling_of(request, self._tokenizer, options.sampling)
            answer = _Answer(request, prompts, request.n or options.n, sampling, observer)
            check_samples(answer.left, "the number of answers")
            for number in range(len(prompts)):  # raises what is wrong with one before any is answered
                _request(engine, answer, options, number * answer.count)
            return answer
        except Exception as error:  # if a row fails, the job continues and reports it
            kind = INVALID if isinstance(error, LookaheadError) else type(error).__name__
            self._put(failed(request, f"{request.where}: {error}", kind, options.seed))
            return None

    def _samples(self, answer: _Answer) -> Iterator[Generation]:
        """Up to SAMPLES_IN_TURN of those still to begin, each made when it is asked for; no more once one has failed."""
        for _ in range(min(SAMPLES_IN_TURN, answer.left)):
            if answer.failed:
                return
            generation = _request(self._engine, answer, self._options, len(answer.generations))
            generation.observer = answer.observer
            answer.generations.append(generation)
            answer.running += 1
            self.answers[id(generation)] = answer
            yield generation


def _request(engine: Engine, answer: _Answer, options: JobOptions, index: int) -> Generation:
    """The generation of one sample, which has not begun. Raises LookaheadError if the row cannot be answered."""
    request, prompt_ids = answer.request, answer.prompts[index // answer.count]
    seed = seed_of(options.seed if request.seed is None else request.seed, request.id, index)
    most = options.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    wanted = request.prompt_logprobs is not False and index % answer.count == 0  # of all samples the first's
    prompt_logprobs = request.prompt_logprobs if wanted else None
    generation = engine.request(prompt_ids, most, answer.sampling, seed, prompt_logprobs=prompt_logprobs)
    generation.prompt_ids = prompt_ids  # one list for all samples
    logprobs = options.logprobs if request.logprobs is None else request.logprobs
    generation.logprobs = None if logprobs is False else logprobs
    return generation


def _ended(answer: _Answer, tokenizer: Any | None, options: JobOptions, model: str) -> FinishedRow:
    for generation in answer.generations:
        if error := generation.error:
            of_row = isinstance(error, ConstraintError | UsageError)
            message = f"{answer.request.where}: {error}" if of_row else str(error) or type(error).__name__
            ended = failed(answer.request, message, INVALID if of_row else type(error).__name__, options.seed)
            if generation.token_ids and not answer.request.openai:
                text = None if tokenizer is None else text_of(tokenizer, generation.token_ids)
                ended.row.update({"token_ids": generation.token_ids} if text is None else {"text": text})
            return ended
    counts = JobTotals(rows=1, prompt_tokens=sum(map(len, answer.prompts)))
    for generation in answer.generations:
        counts.add(generation)
    seconds = round(max(generation.seconds for generation in answer.generations), 4)
    texts = [None if tokenizer is None else generation.text(tokenizer) for generation in answer.generations]
    logprobs = LogprobsOf(tokenizer)
    if answer.request.openai:
        name = answer.request.adapter or (Path(model).resolve().name if Path(model).exists() else model)
        about = name, int(options.began.timestamp()), options.seed, options.token_ids
        writer = openai.Writer(tokenizer, logprobs, *about)
        prompts: Any = [""] * len(answer.prompts)
        if (request := answer.request).echo:  # its text, or that of its ids
            prompts = request.prompts or [request.prompt or request.prompt_ids or ""]
            prompts = [prompt if isinstance(prompt, str) else text_of(tokenizer, prompt) for prompt in prompts]
        row = writer.answer(request, answer.generations, list(map(str, texts)), prompts)
    else:
        pairs = zip(answer.generations, texts, strict=True)
        samples = [_sample(generation, text, options, logprobs) for generation, text in pairs]
        row = {
            "id": answer.request.id,
            **samples[0],
            "prompt_tokens": counts.prompt_tokens,
            "completion_tokens": counts.tokens,  # of all samples together
            **{name: getattr(counts, name) for name in ("steps", "draft_tokens", "accepted_tokens")},
            "edl": counts.rounded_edl,
            "accepted_by_source": dict(counts.accepted_by_source),
            "seconds": seconds,
            **({"samples": samples} if len(samples) > 1 else {}),
        }
    row.update(answer.request.kept)
    if options.echo:
        messages = messages_asked(answer.request, options.chat, options.system)
        names = () if messages is not None else ("prompt", "prompt_ids")  # several prompts have no column
        row |= {} if messages is None else {"messages": messages_of(messages) or messages}
        row |= {name: value for name in names if (value := getattr(answer.request, name)) is not None}
    emitted = [(generation.prompt_ids[-LEFT_CONTEXT:], generation.token_ids) for generation in answer.generations]
    return FinishedRow(answer.request.number, answer.request.fingerprint, row, counts, emitted=emitted, seconds=seconds)


def _sample(generation: Generation, text: str | None, options: JobOptions, logprobs: LogprobsOf) -> dict[str, Any]:
    row: dict[str, Any] = {} if text is None else {"text": text}
    if options.token_ids or text is None:
        row["token_ids"] = generation.token_ids
    row["finish_reason"] = generation.finish_reason
    if generation.complete is not None:
        row["complete"] = generation.complete
    if generation.prompt_logprobs is not None:
        row["prompt_logprobs"] = logprobs.of_prompt(generation)
    return row if generation.logprobs is None else {**row, "logprobs": logprobs.in_row(generation)}


def failed(request: Request, message: str, kind: str, seed: int = 0) -> FinishedRow:
    """The error row of a request. seed: of the job."""
    row: dict[str, Any]
    if request.openai:
        row = openai.error_line(request, message, kind, kind == INVALID, seed)
    else:
        error = {"type": kind, "message": message, "line": request.line}
        row = {"id": request.id, "finish_reason": "error", "error": error, **request.kept}
        if request.file:
            error["file"] = request.file
    counts = JobTotals(rows=1, errors=1, faults=int(kind != INVALID))
    return FinishedRow(request.number, request.fingerprint, row, counts, kind)
