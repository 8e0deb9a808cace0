"""A bench inside vLLM or SGLang. In: prompts, and ways to draft. Out: the plain engine against its own ways to draft and ours.

All engines are in memory at once and answer in turn, see compare.py; a turn is not interrupted, as our drafts are sized by the
time between two steps. vLLM runs in this process; SGLang keeps its settings in globals, so each contender has a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

import torch

from lookahead.bench.compare import Comparison, Texts, answer_all, environment
from lookahead.bench.contenders import PLAIN, Contender, ModelBench
from lookahead.bench.lossless import Lossless, lossless
from lookahead.bench.on_model import answerable
from lookahead.bench.run import Run, Sample
from lookahead.draft.counts import summed
from lookahead.draft.options import DraftOptions
from lookahead.engines.foreign import FEATURES, ForeignSettings
from lookahead.engines.sglang_engine import SglangSettings
from lookahead.engines.vllm_engine import VllmSettings
from lookahead.errors import LookaheadError, first_line
from lookahead.forward.memory import gc_frozen
from lookahead.job.engines import InEngine, in_engine
from lookahead.job.events import BenchEvents, Events
from lookahead.job.params import Request
from lookahead.job.plan import engine_args, open_tries, trie_weights
from lookahead.job.rows import read_requests
from lookahead.job.workers import OwnProcess

CLOSING_SECONDS = 30.0  # that a process may take to end its engine
Prompts = list[list[int]]


@dataclasses.dataclass(frozen=True)
class About:
    device: str
    dtype: str
    quantization: str | None
    version: str


class LocalEngine:
    """An engine of a contender that this process holds. All methods raise LookaheadError where it fails."""

    def __init__(self, running: InEngine):
        self._running, self._engine = running, running.engine
        engine = self._engine
        self.about = About(engine.device, engine.dtype, engine.quantization, engine.version)

    def answerable(self, requests: Sequence[Request], path: str, max_new_tokens: int) -> tuple[Prompts, list[str]]:
        return answerable(requests, self._running, path, max_new_tokens)

    def answer(self, prompts: Prompts, max_new_tokens: int) -> Sample:
        engine = self._engine
        began, steps = time.perf_counter(), engine.steps
        generations = [engine.request(ids, max_new_tokens) for ids in prompts]
        for ended in engine.run(iter(generations)):
            if ended.error:
                raise ended.error
        seconds = time.perf_counter() - began
        outputs = [generation.token_ids for generation in generations]
        return Sample(outputs, seconds, forwards=engine.steps - steps, **vars(summed(generations)))

    def forget(self) -> None:
        self._engine.forget()

    def close(self) -> None:
        self._engine.close()


class InProcess:
    """An engine in a process of its own. Raises LookaheadError if it does not start."""

    def __init__(self, name: str, settings: ForeignSettings):
        self._title, self._process = FEATURES[name].title, OwnProcess()
        try:
            self.about: About = self._call(_started, name, settings)
        except BaseException:
            self._process.dismiss()
            raise

    def answerable(self, requests: Sequence[Request], path: str, max_new_tokens: int) -> tuple[Prompts, list[str]]:
        return self._call("answerable", requests, path, max_new_tokens)

    def answer(self, prompts: Prompts, max_new_tokens: int) -> Sample:
        return self._call("answer", prompts, max_new_tokens)

    def forget(self) -> None:
        self._call("forget")

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it may have ended itself
            self._process.call("close").result(CLOSING_SECONDS)
        self._process.dismiss()

    def _call(self, act: str | Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._process.call(act, *arguments).result()
        except BrokenProcessPool:
            raise LookaheadError(f"{self._title} has failed: its process has ended, see above.") from None


EngineRun = LocalEngine | InProcess


def _started(name: str, settings: ForeignSettings) -> LocalEngine:
    """Start an engine in the process that is to hold it."""
    return LocalEngine(in_engine(name, settings, open_tries(settings.tries), _Silent()))


class _Silent(Events):
    def notice(self, text: str) -> None:
        """The other end reports what it starts."""


def settings_of(
    bench: ModelBench, contender: Contender, tries: Sequence[str], weights: Sequence[float], batch_size: int, running: int = 0
) -> ForeignSettings:
    """Return what the engine is started with for a contender. running: contenders that have been started before it."""
    of: type[ForeignSettings] = SglangSettings if bench.model.engine == "sglang" else VllmSettings
    drafts = contender.options or DraftOptions("off"), contender.draft_tokens
    engine: Any = batch_size, engine_args(bench.model.engine_arg or ()), contender.own, len(bench.contenders), running
    return of(bench.model, tuple(tries), tuple(weights), *drafts, *engine)


def bench_in_engine(bench: ModelBench, path: str, events: BenchEvents | None = None) -> tuple[list[Comparison], list[str]]:
    """As `on_model.bench_prompts`. Raises LookaheadError if engine, model or a trie cannot be used, or no row be answered."""
    events, engine = events or BenchEvents(), bench.model.engine
    requests = list(islice(read_requests(path), bench.rows))
    opened = open_tries(bench.tries, bench.model)
    tries = [str(trie.path) for trie in opened]
    weights = trie_weights(bench.weights, [opened])[0]
    found, failed = [], list[str]()
    for size in bench.batch_sizes:

        def start(contender: Contender, running: int, size: int = size) -> EngineRun:
            settings = settings_of(bench, contender, tries, weights, size, running)
            if not settings.takes_signals:
                return LocalEngine(in_engine(engine, settings, opened, events))
            settings.check_installed()
            waiting = f"Starting {FEATURES[engine].title}: {contender.name} ..."
            started: InProcess = events.with_spinner(lambda: InProcess(engine, settings), waiting)
            return started

        with _running(bench, start, events) as engines:
            prompts, failed = engines[PLAIN].answerable(requests, path, bench.max_new_tokens)
            found.append(_measured(bench, engines, prompts, size, events))
    return [dataclasses.replace(each, lossless=_judged(bench, each, prompts)) for each in found], failed


@contextlib.contextmanager
def _running(
    bench: ModelBench, start: Callable[[Contender, int], EngineRun], events: BenchEvents
) -> Iterator[dict[str, EngineRun]]:
    """The engine of each contender, by name; one of its own ways that does not start is left out. start: takes how many run."""
    engines: dict[str, EngineRun] = {}
    try:
        for contender in bench.contenders:
            try:
                engines[contender.name] = start(contender, len(engines))
            except LookaheadError as error:
                if contender.own is None:
                    raise
                events.notice(f"left out {contender.name}: {first_line(error)}")
        yield engines
    finally:
        for each in engines.values():
            each.close()


def _measured(
    bench: ModelBench, engines: dict[str, EngineRun], prompts: Texts, batch_size: int, events: BenchEvents
) -> Comparison:
    options = {each.name: each.options for each in bench.contenders}
    runs = []
    for name, each in engines.items():

        def answer(rows: Sequence[int], engine: EngineRun = each) -> Iterator[int | Sample]:
            yield engine.answer([list(prompts[row]) for row in rows], bench.max_new_tokens)  # a turn comes whole

        runs.append(Run(name, options[name], answer, each.forget))
    rows = range(len(prompts))
    with gc_frozen(), events.working(f"answering, batch {batch_size}", len(rows) * bench.repeats, "prompts") as progress:
        for run in runs:  # kernels are compiled, caches filled
            list(run.answer(rows[: max(2, batch_size)]))
        answer_all(runs, rows, batch_size, bench.repeats, None, progress)
    engine = engines[PLAIN].about
    about = {bench.model.engine: engine.version, "quantization": engine.quantization}
    return Comparison(
        *(bench.model.name, engine.device, engine.dtype, bench.model.engine, batch_size, len(prompts), bench.repeats),
        forced=False,
        runs=runs,
        lossless=None,
        lossless_rows=bench.checked_of(len(rows)),
        environment={
            **environment(torch.device(engine.device)),
            **about,
            "engine_args": engine_args(bench.model.engine_arg or ()),
        },
    )


def _judged(bench: ModelBench, found: Comparison, prompts: Texts) -> Lossless | None:
    """Our outputs against the plain engine's. The stock model judges those that differ, unless the engine has quantized it."""
    first = found.lossless_rows
    if not first:
        return None
    expected, outputs = found.runs[0].outputs[:first], {run.name: run.outputs[:first] for run in found.runs if run.drafts}
    unjudged = lossless(None, prompts[:first], expected, outputs)
    if not unjudged.divergences or found.environment["quantization"]:
        return unjudged
    from lookahead.models.load import load_model

    return lossless(load_model(bench.model, dtype=found.dtype), prompts[:first], expected, outputs)
