"""Workers in a Ray cluster: actors, each with a GPU or a share of the cores. In: an address. Out: a `workers.WorkerFactory`.

Ray schedules them, starts them where there is room, and reports when one is lost. Models and tries are named by their paths,
which every node must be able to open; a trie is mapped into memory, which the workers of a node share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from lookahead.cluster.connect import connected
from lookahead.errors import UsageError
from lookahead.job.rows import Request
from lookahead.job.runner import JobOptions
from lookahead.job.setup import EngineSettings
from lookahead.job.workers import Emitted, Report, Worker, WorkerHandle


class RayWorkers:
    """Actors of a cluster."""

    def __init__(self, address: str, settings: EngineSettings, options: JobOptions, size: int = 0):
        """address: see `cluster.connected`. size: workers; 0: one to a GPU, without GPUs one to a node.

        Raises UsageError if there are fewer GPUs than that, LookaheadError if there is no cluster.
        """
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
        self._arguments = settings, options, 0 if gpus else self._cores

    def start(self, number: int) -> WorkerHandle:
        actor = self._ray.remote(WorkerOnNode).options(num_cpus=self._cores, num_gpus=self._gpus, scheduling_strategy="SPREAD")
        return _RayWorker(self._ray, actor.remote(*self._arguments))

    def close(self) -> None:
        self._connection.close()


class WorkerOnNode(Worker):
    """A worker that tells where it cannot work."""

    def exchange(self, requests: Sequence[Request], heard: Sequence[Emitted]) -> Report:
        report = super().exchange(requests, heard)
        if report.error is None:
            return report
        return dataclasses.replace(report, error=type(report.error)(f"on node {platform.node()}: {report.error}"))


class _RayWorker:
    """An actor that is a `WorkerOnNode`."""

    def __init__(self, ray: Any, actor: Any):
        self._ray, self._actor = ray, actor

    def exchange(self, requests: Sequence[Request], heard: Sequence[Emitted]) -> Future[Report]:
        called: Future[Report] = self._actor.exchange.remote(requests, heard).future()
        return called

    def dismiss(self) -> None:
        with contextlib.suppress(Exception):  # it is gone already
            self._ray.kill(self._actor)


def cores_each(cores: Sequence[int], workers: int) -> int:
    """The most cores that each of that many workers can have, given those of each node; 1 if there are fewer than workers."""
    return next((share for share in range(max(cores), 1, -1) if sum(node // share for node in cores) >= workers), 1)
