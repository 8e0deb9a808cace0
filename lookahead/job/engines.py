"""Who answers a job: an engine in this process, vLLM or SGLang, or workers on this machine or in a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lookahead.budget.speedup import Speedup
from lookahead.decode.engine import Clock
from lookahead.decode.sampling import GREEDY, Sampling
from lookahead.draft.drafter import Drafter
from lookahead.engines.foreign import FEATURES, ForeignSettings
from lookahead.errors import EngineDiedError, UsageError
from lookahead.forward.memory import peak_memory
from lookahead.forward.parallel import Peers
from lookahead.job.deaths import Retries
from lookahead.job.events import Events, JobEvents
from lookahead.job.journal import FinishedRow
from lookahead.job.rows import Request
from lookahead.job.runner import JobOptions, OrderedWriter, Stopped, Write, answer, run_rows
from lookahead.job.setup import EngineSettings, LoadedEngine
from lookahead.job.workers import LocalWorkers, RayWorkers, WorkerPool
from lookahead.models.adapter import check_adapter
from lookahead.models.load import check_adapters, load_model, read_config
from lookahead.token_documents import TokenizerIdentity
from lookahead.tokenizer import identity as identity_of
from lookahead.trie.file import Trie

log = logging.getLogger(__name__)

WAITING = 1 << 16  # rows of other adapters, in memory


@dataclasses.dataclass(frozen=True)
class Answering:
    """Answers requests by an engine of this process. identity: of the model's tokens."""

    engine: Any
    tokenizer: Any | None
    identity: TokenizerIdentity

    @property
    def speedup(self) -> Speedup | None:
        """Speedup of this run so far over plain decoding; None if it is plain decoding, or not known."""
        return getattr(self.engine, "speedup", None)

    @property
    def clock(self) -> Clock | None:
        """Clock of an engine of ours in this process; None of others."""
        return getattr(self.engine, "clock", None)

    def run(self, requests: Iterable[Request], job: JobOptions, write: Write, stopped: Stopped) -> None:
        run_rows(self.engine, self.tokenizer, requests, job, write, stopped)

    def used(self) -> dict[str, Any]:
        return {"batch_size": self.engine.batch_size}

    def expect(self, rows: int) -> None:
        """About that many rows are to come; 0: unknown."""


class OneEngine(Answering):
    """Our engine."""

    def expect(self, rows: int) -> None:
        self.engine.expected_rows = rows

    def used(self) -> dict[str, Any]:
        target = self.engine.target
        why, clock = self.engine.accounting.why_no_drafts, self.engine.clock
        about = {"peak_memory_bytes": peak_memory(target.device), "path": target.path}
        return {**super().used(), **about, "prompt_tokens_taken_over": clock.taken_over, **why}


@dataclasses.dataclass(frozen=True)
class SharedModel(OneEngine):
    """The engine of this process and of others that hold the rest of the model; this one leads."""

    peers: Peers

    def run(self, requests: Iterable[Request], job: JobOptions, write: Write, stopped: Stopped) -> None:
        self.peers.broadcast(job.began)
        super().run(self.peers.each(requests), job, write, lambda: self.peers.broadcast(stopped()))


@dataclasses.dataclass(frozen=True)
class InTurns(OneEngine):
    """Our engine, with one adapter after the other. It answers the rows that wait for an adapter, and those read until WAITING
    rows wait for others; then the model is loaded again, with the adapter that most rows wait for.

    settings: of the job. drafters: by adapter, as answers of one do not become drafts of another; at first of the one loaded.
    """

    settings: EngineSettings
    drafters: dict[str | None, Drafter]

    def run(self, requests: Iterable[Request], job: JobOptions, write: Write, stopped: Stopped) -> None:
        writer = OrderedWriter(write, job.in_order, self.engine.batch_size)
        unread, waiting = writer.expect(requests), defaultdict[str | None, list[Request]](list)

        def turn(adapter: str | None) -> Iterator[Request]:
            for request in chain(waiting.pop(adapter, ()), unread):
                if request.adapter == adapter or request.problem:
                    yield request
                    continue
                waiting[request.adapter].append(request)
                if sum(map(len, waiting.values())) >= WAITING:
                    return

        adapter = next(iter(self.drafters))
        while True:
            answer(self.engine, self.tokenizer, turn(adapter), job, writer.put, stopped)
            if stopped() or not waiting:
                break
            adapter = max(waiting, key=lambda each: len(waiting[each]))
            self._load(adapter)
        writer.finish()

    def _load(self, adapter: str | None) -> None:
        log.info("loading the model %s", f"with adapter {adapter}" if adapter else "without a named adapter")
        settings, tries = self.settings, self.engine.drafter.tries
        if adapter not in self.drafters:
            self.drafters[adapter] = Drafter(tries, settings.drafts, settings.weights or None)
        self.engine.replace(lambda: load_model(settings.model.of_rows(adapter)), self.drafters[adapter])


def follow(peers: Peers, settings: EngineSettings, job: JobOptions) -> None:
    """Take the steps that the leader takes."""
    if peers.begin():
        loaded = settings.load()
        job = dataclasses.replace(job, began=peers.broadcast())
        run_rows(loaded.engine, loaded.tokenizer, peers.each(), job, lambda row: None, peers.broadcast)


class Workers(Answering):
    """Engines of other processes; `engine` is their pool."""

    def run(self, requests: Iterable[Request], job: JobOptions, write: Write, stopped: Stopped) -> None:
        self.engine.run(requests, job.in_order, write, stopped)

    def used(self) -> dict[str, Any]:
        """The most of each worker."""
        reports = self.engine.reports
        memory = max((report.peak_memory for report in reports), default=0)
        path = next((report.path for report in reports if report.path), "")
        deaths = {"engine_deaths": self.engine.retries.deaths}
        return {"workers": len(reports), **super().used(), **deaths, "peak_memory_bytes": memory, "path": path}


def load_here(settings: EngineSettings, events: Events, sampling: Sampling = GREEDY) -> LoadedEngine:
    """An engine in this process. sampling: of its rows. Raises LookaheadError if model or tries cannot be used."""
    loaded = settings.load(events.with_spinner)
    for notice in loaded.notices(sampling):
        events.notice(notice)
    return loaded


def here(
    settings: EngineSettings,
    job: JobOptions,
    peers: Peers | None,
    explained: int | None,
    events: JobEvents,
    adapter: str | None,
) -> tuple[OneEngine, JobOptions]:
    """An engine in this process, and the job. peers: share its model. explained: rows to show. adapter: of the first row."""
    if settings.model.adapter_names:
        events.with_spinner(lambda: check_adapters(settings.model), "Checking adapters ...")
    if peers:
        peers.begin()
    loaded = load_here(dataclasses.replace(settings, model=settings.model.of_rows(adapter)), events, job.sampling)
    if explained:
        target = loaded.engine.target
        if target.mode == "plain":
            raise UsageError(f"--explain: nothing is drafted for {settings.model.name}: {target.reason}")
        job = dataclasses.replace(job, observer_of=events.observers(loaded.tokenizer, explained))
    parts = loaded.engine, loaded.tokenizer, loaded.identity
    if settings.model.adapter_names:
        return InTurns(*parts, settings, {adapter: loaded.engine.drafter}), job
    return SharedModel(*parts, peers) if peers else OneEngine(*parts), job


@dataclasses.dataclass(frozen=True)
class InEngine(Answering):
    """vLLM or SGLang, with our drafts in it. name: as --engine has it."""

    name: str

    def run(self, requests: Iterable[Request], job: JobOptions, write: Write, stopped: Stopped) -> None:
        """As `run_rows`. An engine that dies is replaced, and its rows are asked again."""
        writer, retries = OrderedWriter(write, job.in_order, self.engine.batch_size), Retries(seed=job.seed)
        unread, held = writer.expect(requests), dict[int, Request]()  # by number

        def hold(group: Iterable[Request]) -> Iterator[Request]:
            for request in group:
                held[request.number] = request
                yield request

        def put(ended: FinishedRow) -> None:
            retries.row_has_ended()
            del held[ended.number]
            writer.put(ended)

        while not stopped():
            group = retries.next_group()
            try:
                answer(self.engine, self.tokenizer, hold(group or unread), job, put, stopped)
                if not group:
                    break
            except EngineDiedError as error:
                if stopped():  # Ctrl-C reaches the engine's processes, too
                    break
                for ended in retries.died(held.values(), str(error)):
                    del held[ended.number]
                    writer.put(ended)
                log.warning("%s: it starts again, and its %d rows are asked again.", error, len(held))
                held.clear()
                self.engine.restart()
        writer.finish()

    def close(self) -> None:
        """End the engine: else this process waits for its processes without end."""
        with contextlib.suppress(Exception):  # it may have ended itself
            self.engine.close()

    def used(self) -> dict[str, Any]:
        return {"engine": self.name, **super().used(), "engine_deaths": self.engine.deaths}


def in_engine(name: str, settings: ForeignSettings, tries: Sequence[Trie], events: Events) -> InEngine:
    """vLLM or SGLang, started, to draft from `tries`. Raises LookaheadError if it, the model or a trie cannot be used."""
    model = settings.model
    read_config(*model.source)
    tokenizer = model.load_tokenizer()
    known = None if tokenizer is None else identity_of(tokenizer, model.tokenizer or model.name)
    for trie in tries:
        if known is not None:  # before the engine is started, which takes long
            trie.check_tokenizer(known.fingerprint, max(known.vocab_size, trie.header.vocab_size), model.name)
    title = FEATURES[name].title
    if settings.takes_signals:
        settings.check_installed()
        events.notice(f"Starting {title} ...")
        engine = settings.start(tokenizer)
    else:
        engine = events.with_spinner(lambda: settings.start(tokenizer), f"Starting {title} ...")
    return InEngine(engine, tokenizer, known or TokenizerIdentity(engine.target.vocab_size, "", model.name), name)


@contextlib.contextmanager
def workers(
    settings: EngineSettings, job: JobOptions, ray: str | None, size: int | None, events: JobEvents
) -> Iterator[Workers]:
    """Workers, once one is ready. ray: address of a cluster. Raises LookaheadError if they cannot start or load."""
    model = settings.model
    read_config(*model.source)
    adapter = model.adapters.get(None)
    if adapter:
        check_adapter(adapter)

    def anywhere(name: str | None) -> str | None:
        """A folder by its absolute path; a hub name as it is."""
        return str(Path(name).absolute()) if name and Path(name).exists() else name

    paths: dict[str, Any] = {"adapter": anywhere(adapter)}
    paths |= {name: anywhere(getattr(model, name)) for name in ("model", "tokenizer")}
    tries = tuple(str(Path(trie).absolute()) for trie in settings.tries)
    settings = dataclasses.replace(settings, model=dataclasses.replace(model, **paths), tries=tries)
    factory = RayWorkers(ray, settings, job, size or 0) if ray else LocalWorkers(settings, job, size or 1)
    drafts = settings.drafts
    with WorkerPool(factory, learn=drafts.strategy != "off" and drafts.session_tokens > 0) as pool:
        events.with_spinner(pool.wait_until_ready, f"Starting {factory.size} workers ...")
        identity = pool.reports[0].identity
        assert identity is not None
        yield Workers(pool, None, identity)
