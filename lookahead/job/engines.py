"""Who answers a job: an engine in this process, vLLM or SGLang, or workers on this machine or in a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lookahead.budget.speedup import Speedup
from lookahead.decode.engine import Clock
from lookahead.decode.sampling import GREEDY, Sampling
from lookahead.engines.abilities import ABILITIES
from lookahead.errors import UsageError
from lookahead.forward.memory import peak_memory
from lookahead.forward.parallel import Peers
from lookahead.job.events import Events, JobEvents
from lookahead.job.journal import Ended
from lookahead.job.ray_workers import RayWorkers
from lookahead.job.rows import Request
from lookahead.job.runner import JobOptions, run_rows
from lookahead.job.setup import EngineSettings, LoadedEngine
from lookahead.job.workers import LocalWorkers, WorkerPool
from lookahead.models.adapter import check_adapter
from lookahead.models.load import read_config
from lookahead.token_documents import TokenizerIdentity
from lookahead.tokenizer import identity

if TYPE_CHECKING:
    from lookahead.engines.foreign import ForeignEngine, ForeignSettings
    from lookahead.trie.file import Trie


class Answering(Protocol):
    """Answers requests. whose: of the model's token ids. speedup: of this run so far, None if it is that of
    plain decoding or of another engine, which is not known.
    """

    @property
    def whose(self) -> TokenizerIdentity: ...

    @property
    def speedup(self) -> Speedup | None: ...

    @property
    def clock(self) -> Clock | None:
        """Of the engine; None of those of other processes."""
        ...

    def run(
        self, requests: Iterable[Request], job: JobOptions, write: Callable[[Ended], None], stopped: Callable[[], bool]
    ) -> None:
        """See `runner.run_rows`."""
        ...

    def used(self) -> dict[str, Any]:
        """What it took, for a summary."""
        ...

    def expect(self, rows: int) -> None:
        """About that many rows are to come; 0: unknown."""


@dataclasses.dataclass(frozen=True)
class OneEngine:
    """The engine of this process."""

    loaded: LoadedEngine

    @property
    def whose(self) -> TokenizerIdentity:
        return self.loaded.whose

    @property
    def speedup(self) -> Speedup | None:
        return self.loaded.engine.speedup

    @property
    def clock(self) -> Clock | None:
        return self.loaded.engine.clock

    def run(
        self, requests: Iterable[Request], job: JobOptions, write: Callable[[Ended], None], stopped: Callable[[], bool]
    ) -> None:
        run_rows(self.loaded.engine, self.loaded.tokenizer, requests, job, write, stopped)

    def expect(self, rows: int) -> None:
        self.loaded.engine.expected_rows = rows

    def used(self) -> dict[str, Any]:
        engine = self.loaded.engine
        memory = peak_memory(engine.target.device)
        why = engine.accounting.why_no_drafts
        return {"batch_size": engine.batch_size, "peak_memory_bytes": memory, "path": engine.target.path, **why}


@dataclasses.dataclass(frozen=True)
class SharedModel(OneEngine):
    """The engine of this process and of others that hold the rest of the model; this one leads."""

    peers: Peers

    def run(
        self, requests: Iterable[Request], job: JobOptions, write: Callable[[Ended], None], stopped: Callable[[], bool]
    ) -> None:
        self.peers.told(job.began)
        super().run(self.peers.each(requests), job, write, lambda: self.peers.told(stopped()))


def follow(peers: Peers, settings: EngineSettings, job: JobOptions) -> None:
    """Take the steps that the leader takes."""
    if peers.begin():
        loaded = settings.load()
        job = dataclasses.replace(job, began=peers.told())
        run_rows(loaded.engine, loaded.tokenizer, peers.each(), job, lambda row: None, peers.told)


@dataclasses.dataclass(frozen=True)
class Workers:
    """Engines of other processes."""

    pool: WorkerPool

    @property
    def whose(self) -> TokenizerIdentity:
        whose = self.pool.reports[0].whose
        assert whose is not None
        return whose

    @property
    def speedup(self) -> Speedup | None:
        return self.pool.speedup

    @property
    def clock(self) -> Clock | None:
        return None

    def run(
        self, requests: Iterable[Request], job: JobOptions, write: Callable[[Ended], None], stopped: Callable[[], bool]
    ) -> None:
        self.pool.run(requests, job.in_order, write, stopped)

    def expect(self, rows: int) -> None:
        """Nothing depends on it."""

    def used(self) -> dict[str, Any]:
        """Of each worker the most."""
        reports = self.pool.reports
        batch_size = max((report.batch_size for report in reports), default=0)
        memory = max((report.peak_memory for report in reports), default=0)
        path = next((report.path for report in reports if report.path), "")
        return {"workers": len(reports), "batch_size": batch_size, "peak_memory_bytes": memory, "path": path}


def load_here(settings: EngineSettings, events: Events, sampling: Sampling = GREEDY) -> LoadedEngine:
    """An engine in this process. sampling: of its rows. Raises LookaheadError if model or tries cannot be used."""
    loaded = settings.load(events.patiently)
    for notice in loaded.notices(sampling):
        events.notice(notice)
    return loaded


def here(
    settings: EngineSettings, job: JobOptions, peers: Peers | None, explained: int | None, events: JobEvents
) -> tuple[OneEngine, JobOptions]:
    """An engine in this process, and the job. peers: who shares its model. explained: rows whose steps are shown."""
    if peers:
        peers.begin()
    loaded = load_here(settings, events, job.sampling)
    if explained:
        target = loaded.engine.target
        if target.mode == "plain":
            raise UsageError(f"--explain: nothing is drafted for {settings.model.name}: {target.reason}")
        job = dataclasses.replace(job, observer_of=events.observers(loaded.tokenizer, explained))
    return SharedModel(loaded, peers) if peers else OneEngine(loaded), job


@dataclasses.dataclass(frozen=True)
class InEngine:
    """vLLM or SGLang, with our drafts in it. name: as --engine has it. whose: of the model's token ids."""

    name: str
    engine: ForeignEngine
    tokenizer: Any | None
    whose: TokenizerIdentity

    @property
    def speedup(self) -> Speedup | None:
        return None  # what a plain step takes is not known

    @property
    def clock(self) -> Clock | None:
        return None

    def run(
        self, requests: Iterable[Request], job: JobOptions, write: Callable[[Ended], None], stopped: Callable[[], bool]
    ) -> None:
        run_rows(self.engine, self.tokenizer, requests, job, write, stopped)

    def expect(self, rows: int) -> None:
        """Nothing depends on it."""

    def used(self) -> dict[str, Any]:
        return {"engine": self.name, "batch_size": self.engine.batch_size}


def in_engine(name: str, settings: ForeignSettings, tries: Sequence[Trie], events: Events) -> InEngine:
    """vLLM or SGLang, started. tries: those that it drafts from.

    Raises LookaheadError if it, the model or a trie cannot be used.
    """
    model = settings.model
    read_config(*model.source)
    tokenizer = model.load_tokenizer()
    whose = None if tokenizer is None else identity(tokenizer, model.tokenizer or model.name)
    for trie in tries:
        if whose is not None:  # before the engine is started, which takes long
            trie.check_tokenizer(whose.fingerprint, max(whose.vocab_size, trie.header.vocab_size), model.name)
    engines: list[ForeignEngine] = []
    title = ABILITIES[name].title
    if settings.takes_signals:
        settings.check_installed()
        events.notice(f"Starting {title} ...")
        engines.append(settings.start(tokenizer))
    else:
        events.patiently(lambda: engines.append(settings.start(tokenizer)), f"Starting {title} ...")
    (engine,) = engines
    if whose is None:
        whose = TokenizerIdentity(engine.target.vocab_size, "", model.name)
    return InEngine(name, engine, tokenizer, whose)


@contextlib.contextmanager
def workers(
    settings: EngineSettings, job: JobOptions, ray: str | None, size: int | None, events: JobEvents
) -> Iterator[Workers]:
    """Workers of which one is ready, as long as the block runs. ray: address of a cluster; None: this machine.

    Raises UsageError if there cannot be that many, LookaheadError if they cannot load what they need.
    """
    model = settings.model
    read_config(*model.source)
    if model.adapter:
        check_adapter(model.adapter)

    def anywhere(name: str) -> str:
        """A folder by its absolute path; a hub name as it is."""
        return str(Path(name).absolute()) if Path(name).exists() else name

    names = model.model and anywhere(model.model), model.adapter and anywhere(model.adapter)
    named = model.tokenizer and anywhere(model.tokenizer)
    settings = dataclasses.replace(
        settings,
        model=dataclasses.replace(model, model=names[0], adapter=names[1], tokenizer=named),
        tries=tuple(str(Path(trie).absolute()) for trie in settings.tries),
    )
    factory = RayWorkers(ray, settings, job, size or 0) if ray else LocalWorkers(settings, job, size or 1)
    drafts = settings.drafts
    with WorkerPool(factory, learn=drafts.strategy != "off" and drafts.session_tokens > 0) as pool:
        events.patiently(pool.wait_until_ready, f"Starting {factory.size} workers ...")
        yield Workers(pool)
