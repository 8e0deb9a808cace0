"""A job on several engines. In: requests. Out: their rows, and learned outputs passed from one engine to the others.

A worker is a process with an engine: on this machine (`LocalWorkers`) or in a Ray cluster (`RayWorkers`). Each call of
`exchange` brings it requests and what others have emitted, and fetches rows that have ended. It holds few requests more than it
answers at once, so rows are read no faster than they are answered, and what a worker held that is lost goes to others.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import multiprocessing
import os
import platform
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any

from lookahead.budget.speedup import Speedup, total
from lookahead.cluster.connect import connected
from lookahead.decode.engine import DecodingEngine
from lookahead.errors import LookaheadError, UsageError
from lookahead.forward.memory import gc_frozen, peak_memory
from lookahead.job.deaths import Retries
from lookahead.job.journal import FinishedRow
from lookahead.job.rows import Request
from lookahead.job.runner import JobOptions, OrderedWriter, Stopped, Write, answer
from lookahead.job.setup import EngineSettings
from lookahead.native import cache as kernel_cache
from lookahead.native.cores import usable_cores
from lookahead.token_documents import TokenizerIdentity
from lookahead.tokenizer import first_line

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.2  # a worker with nothing to tell answers after so long
TICK_SECONDS = 0.1  # after which `stopped` is asked at the latest
BATCHES_AHEAD = 2  # requests that a worker holds, in batches
REMEMBERED = 4096  # answers of all that a worker receives which comes later

Emitted = tuple[list[int], list[int]]  # the last ids of a prompt, the answer's


@dataclasses.dataclass(frozen=True)
class Report:
    """Status message of a worker. ended: rows, since the last one. identity: of the tokens, None until the model is loaded."""

    ended: Sequence[FinishedRow] = ()
    batch_size: int = 1
    speedup: Speedup | None = None
    peak_memory: int = 0
    identity: TokenizerIdentity | None = None
    notices: Sequence[str] = ()
    path: str = ""
    error: LookaheadError | None = None


class Worker:
    """An engine in a process of its own; lives there. Its thread decodes while the others talk."""

    def __init__(self, settings: EngineSettings, options: JobOptions, threads: int = 0, of_cluster: bool = False):
        """options: rows come as they end, regardless of content. threads: of the CPU; 0: as many as there are cores."""
        self._settings, self._options, self._threads, self._of_cluster = settings, options, threads, of_cluster
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[Sequence[Emitted]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[FinishedRow | Exception | None] = queue.SimpleQueue()  # None: the engine is ready
        self._report = Report()
        threading.Thread(target=self._work, daemon=True).start()

    def exchange(self, requests: Sequence[Request], heard: Sequence[Emitted]) -> Report:
        """Take requests and what others have emitted; returns what has come of earlier ones. Raises what the engine raised."""
        for request in requests:
            self._inbox.put(request)
        if heard:
            self._heard.put(heard)
        ended: list[FinishedRow] = []
        with contextlib.suppress(queue.Empty):
            found = self._ended.get(timeout=REPORT_SECONDS)
            while True:
                if isinstance(found, Exception):
                    raise found
                if found is not None:
                    ended.append(found)
                found = self._ended.get_nowait()
        return dataclasses.replace(self._report, ended=ended)

    def _work(self) -> None:
        import torch

        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            loaded = self._settings.load()
        except Exception as error:
            ours = error if isinstance(error, LookaheadError) else None
            if ours and self._of_cluster:
                ours = type(ours)(f"on node {platform.node()}: {ours}")
            self._report = Report(error=ours)
            self._ended.put(None if ours else error)
            return
        engine, summed_up = loaded.engine, time.monotonic()

        def between_steps() -> bool:
            nonlocal summed_up
            self._hear(engine)
            memory, speedup, now = peak_memory(engine.target.device), self._report.speedup, time.monotonic()
            if now > summed_up + REPORT_SECONDS:
                speedup, summed_up = engine.speedup, now
            self._report = dataclasses.replace(self._report, batch_size=engine.batch_size, speedup=speedup, peak_memory=memory)
            return False

        notices = tuple(filter(None, (*loaded.notices(self._options.sampling), kernel_cache.notice())))
        self._report = Report(batch_size=engine.batch_size, identity=loaded.identity, notices=notices, path=engine.target.path)
        self._ended.put(None)
        try:
            with gc_frozen():
                while True:
                    requests = self._requests(self._inbox.get())
                    self._hear(engine)
                    answer(engine, loaded.tokenizer, requests, self._options, self._ended.put, between_steps)
        except Exception as error:
            self._ended.put(error)

    def _requests(self, first: Request) -> Iterator[Request | None]:
        yield first
        while True:
            try:
                yield self._inbox.get_nowait()
            except queue.Empty:
                yield None

    def _hear(self, engine: DecodingEngine) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                engine.drafter.remember(self._heard.get_nowait())


@dataclasses.dataclass
class _WorkerState:
    """A worker at work. heard: how much of what all have emitted it has received, or emitted itself. retries: it answers rows
    with which another was lost, and gets no others before they have ended.
    """

    number: int
    handle: _LocalWorker | _RayWorker
    held: dict[int, Request] = dataclasses.field(default_factory=dict)  # by number
    retries: bool = False
    report: Report = dataclasses.field(default_factory=Report)
    call: Future[Report] | None = None
    heard: int = 0


class WorkerPool:
    """The workers of a job; they end with the context. learn: what one emits the others draft from.

    factory: starts workers, numbered from 0: `size` of them, and others instead of those that are lost.
    """

    def __init__(self, factory: LocalWorkers | RayWorkers, learn: bool = True):
        self._factory, self._learn = factory, learn
        self._workers = [_WorkerState(number, factory.start(number)) for number in range(factory.size)]
        self._emitted: collections.deque[tuple[_WorkerState, Emitted]] = collections.deque(maxlen=REMEMBERED)
        self._emitted_in_all = 0
        self.retries = Retries(factory.size)  # what lost workers held
        self._notices: set[str] = set()
        self._speedups_of_lost: list[Speedup | None] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.handle.dismiss()
        self._factory.close()

    @property
    def reports(self) -> list[Report]:
        """Of the workers that are ready."""
        return [worker.report for worker in self._workers if worker.report.identity]

    @property
    def batch_size(self) -> int:
        return max((report.batch_size for report in self.reports), default=1)

    @property
    def speedup(self) -> Speedup | None:
        """Speedup of all workers together, lost ones included; None if none has one."""
        return total((*self._speedups_of_lost, *(report.speedup for report in self.reports)))

    def wait_until_ready(self) -> None:
        """Until one worker is. Raises LookaheadError if it cannot load what it needs."""
        while not self.reports:
            self._exchange(iter(()), lambda ended: None)

    def run(self, requests: Iterable[Request], in_order: bool, write: Write, stopped: Stopped = lambda: False) -> None:
        """Run rows as `runner.run_rows` does. Raises LookaheadError also where workers are lost one after the other."""
        writer = OrderedWriter(write, in_order, self.batch_size * len(self._workers))
        unread = writer.expect(requests)
        while not stopped() and self._exchange(unread, writer.put):
            pass
        writer.finish()

    def _exchange(self, unread: Iterator[Request], put: Write) -> bool:
        """Call workers that are not being called, collect what others have answered. False when nothing is left to do."""
        for worker in self._workers:
            if worker.call is None:
                new = self._next_of(worker, unread) if worker.report.identity else []
                worker.held.update((request.number, request) for request in new)
                behind = min(self._emitted_in_all - worker.heard, len(self._emitted))
                latest = itertools.islice(self._emitted, len(self._emitted) - behind, None)
                news = [emitted for who, emitted in latest if who is not worker]
                worker.heard = self._emitted_in_all
                worker.call = worker.handle.exchange(new, news)
        if self.reports and not self.retries and not any(worker.held for worker in self._workers):
            return False
        done, _ = wait([worker.call for worker in self._workers if worker.call], TICK_SECONDS, FIRST_COMPLETED)
        for worker in self._workers:
            if worker.call in done:
                self._take_in(worker, put)
        return True

    def _next_of(self, worker: _WorkerState, unread: Iterator[Request]) -> list[Request]:
        """What a worker gets. Where rows are asked again, it first ends what it has."""
        if self.retries or worker.retries:
            if worker.held:
                return []
            group = self.retries.next_group()
            worker.retries = bool(group)
            if group:
                return group
        return list(itertools.islice(unread, max(0, BATCHES_AHEAD * worker.report.batch_size - len(worker.held))))

    def _take_in(self, worker: _WorkerState, put: Write) -> None:
        call, worker.call = worker.call, None
        assert call is not None
        try:
            report = call.result()
        except Exception as error:  # what it raises depends on how the worker was lost
            self._replace(worker, first_line(error) or type(error).__name__, put)
            return
        if report.error:
            raise report.error
        for notice in report.notices:
            if notice not in self._notices:
                self._notices.add(notice)
                log.warning("%s", notice)
        worker.report = report
        for ended in report.ended:
            self.retries.row_has_ended()
            if self._learn:
                self._emitted.extend((worker, token_ids) for token_ids in ended.emitted)
                self._emitted_in_all += len(ended.emitted)
            del worker.held[ended.number]
            put(ended)

    def _replace(self, worker: _WorkerState, reason: str, put: Write) -> None:
        """A worker is lost: another replaces it, and what it held goes to whoever is free."""
        given_up = self.retries.died(worker.held.values(), reason)
        again = len(worker.held) - len(given_up)
        log.warning("worker %d was lost (%s): another takes its %d rows.", worker.number + 1, reason, again)
        worker.handle.dismiss()
        self._speedups_of_lost.append(worker.report.speedup)
        for ended in given_up:
            put(ended)
        index = self._workers.index(worker)
        self._workers[index] = _WorkerState(worker.number, self._factory.start(worker.number))


class LocalWorkers:
    """Workers on this machine: one to a GPU where there are several, or with a share of the cores."""

    def __init__(self, settings: EngineSettings, options: JobOptions, size: int):
        import torch

        self.size, self._settings, self._options = size, settings, options
        self._gpus = torch.cuda.device_count() if settings.model.device in (None, "auto", "cuda") else 0
        self._threads = max(1, min(torch.get_num_threads(), usable_cores()) // size)

    def start(self, number: int) -> _LocalWorker:
        placed: dict[str, Any] = {"device": f"cuda:{number % self._gpus}"} if self._gpus else {}
        model = dataclasses.replace(self._settings.model, **placed)
        worker = _LocalWorker()
        worker.call(Worker, dataclasses.replace(self._settings, model=model), self._options, self._threads)
        return worker

    def close(self) -> None: ...


class OwnProcess:
    """An object in a process of its own, which ends when it is dismissed, and with this process, however that ends.

    Futures raise LookaheadError; BrokenProcessPool, as `call` does, where the process is lost.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        lifeline, self._alive = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(1, context, _begin, (lifeline,))

    def call(self, act: str | Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a method of the object; first what makes it, whose attribute `about` is returned."""
        return self._pool.submit(_call, act, *arguments)

    def dismiss(self) -> None:
        self._alive.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


_held: Any = None  # the object of this process


def _begin(lifeline: Connection) -> None:
    """Signals of the terminal are for the process that has started this one, and so is its stdout."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    os.dup2(2, 1)

    def end_with_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv()
        with contextlib.suppress(Exception):  # some have nothing to close
            _held.close()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _call(act: str | Callable[..., Any], *arguments: Any) -> Any:
    """`OwnProcess.call`, in the process. Errors of others may hold anything, and then could not be sent."""
    global _held
    try:
        if isinstance(act, str):
            return getattr(_held, act)(*arguments)
        _held = act(*arguments)
        return getattr(_held, "about", None)
    except LookaheadError:
        raise
    except Exception as error:
        raise LookaheadError(f"{type(error).__name__}: {first_line(error)}.") from None


class _LocalWorker(OwnProcess):
    """A worker, seen from here. The future raises what it raises if the worker is lost; dismiss ends it in any state."""

    def exchange(self, requests: Sequence[Request], heard: Sequence[Emitted]) -> Future[Report]:
        return self.call("exchange", requests, heard)


class RayWorkers:
    def __init__(self, address: str, settings: EngineSettings, options: JobOptions, size: int = 0):
        """size: 0: one worker to a GPU, without GPUs one to a node. Raises LookaheadError for too few GPUs, or no cluster."""
        with contextlib.ExitStack() as connection:
            self._ray = connection.enter_context(connected(address))
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            gpus = int(sum(node.get("GPU", 0) for node in nodes)) if settings.model.device != "cpu" else 0
            if gpus and size > gpus:
                raise UsageError(f"--workers {size}: the cluster has {gpus} GPUs.")
            self._connection = connection.pop_all()
        self.size = size or gpus or len(nodes)
        self._gpus = 1 if gpus else 0
        self._cores = 1 if gpus else cores_each([int(node.get("CPU", 0)) for node in nodes], self.size)
        self._arguments = settings, options, 0 if gpus else self._cores, True

    def start(self, number: int) -> _RayWorker:
        actor = self._ray.remote(Worker).options(num_cpus=self._cores, num_gpus=self._gpus, scheduling_strategy="SPREAD")
        return _RayWorker(self._ray, actor.remote(*self._arguments))

    def close(self) -> None:
        self._connection.close()


class _RayWorker:
    def __init__(self, ray: Any, actor: Any):
        self._ray, self._actor = ray, actor

    def exchange(self, requests: Sequence[Request], heard: Sequence[Emitted]) -> Future[Report]:
        return self._actor.exchange.remote(requests, heard).future()

    def dismiss(self) -> None:
        with contextlib.suppress(Exception):  # it is gone already
            self._ray.kill(self._actor)


def cores_each(cores: Sequence[int], workers: int) -> int:
    """The most cores that each of that many workers can have, given those of each node; 1 if there are fewer than workers."""
    return next((share for share in range(max(cores), 1, -1) if sum(node // share for node in cores) >= workers), 1)
