"""Jobs on several engines: the rows of one engine, whatever becomes of the workers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from lookahead.cluster.connect import connected
from lookahead.errors import LookaheadError
from lookahead.job.deaths import ENGINE_DIED, MOST_DEATHS
from lookahead.job.journal import FinishedRow
from lookahead.job.progress import JobTotals
from lookahead.job.rows import Request, parse_row
from lookahead.job.runner import JobOptions, run_rows
from lookahead.job.setup import EngineSettings
from lookahead.job.workers import Emitted, Report, Worker, WorkerPool, cores_each
from lookahead.models.options import ModelOptions
from lookahead.token_documents import TokenizerIdentity
from lookahead_cli.app import run
from lookahead_cli.options import with_address
from tests.support.cli import write_jsonl
from tests.support.depth import deep
from tests.support.jobs import MODEL, job_process, questions, rows_of, steady

LIMITS = ("--token-ids", "--max-new-tokens", 24)


# ---- a pool of workers that are played here
class Played:
    """A worker that answers two rows at a call. It is lost when it is handed a row of `deadly`, or at `lost_at`."""

    def __init__(self, factory: PlayedWorkers, number: int):
        self.factory, self.number, self.held, self.heard, self.calls = factory, number, [], [], 0
        self.dismissed = False

    def exchange(self, requests: Sequence[Request], heard: Sequence[Emitted]) -> Future[Report]:
        self.calls += 1
        self.held += requests
        self.heard += heard
        future: Future[Report] = Future()
        if self.factory.draw.random() < self.factory.losses or any(r.id in self.factory.deadly for r in self.held):
            future.set_exception(RuntimeError("preempted"))
            return future
        ended, self.held = self.held[:2], self.held[2:]
        said = [ended_row(request, self.number) for request in ended]
        future.set_result(Report(said, 3, identity=TokenizerIdentity(10)))
        return future

    def dismiss(self) -> None:
        self.dismissed = True


class PlayedWorkers:
    def __init__(self, size: int, losses: float = 0.0, deadly: Sequence[Any] = (), seed: int = 0):
        self.size, self.losses, self.deadly, self.draw = size, losses, deadly, random.Random(seed)
        self.started: list[Played] = []
        self.closed = False

    def start(self, number: int) -> Played:
        self.started.append(Played(self, number))
        return self.started[-1]

    def close(self) -> None:
        self.closed = True


def ended_row(request: Request, worker: int) -> FinishedRow:
    return FinishedRow(request.number, b"", {"id": request.id}, JobTotals(rows=1), emitted=[([1], [worker, request.number])])


def requests_of(count: int) -> Iterator[Request]:
    for number in range(count):
        yield Request(f"q{number}", number + 1, prompt="x", number=number)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("losses", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_row_comes_once_and_in_turn(size, losses, in_order):
    started = 0
    for seed in range(10):
        factory, rows = PlayedWorkers(size, losses, seed=seed), []
        with WorkerPool(factory) as pool:
            pool.run(requests_of(60), in_order, rows.append)
        numbers = [ended.number for ended in rows]
        assert (numbers if in_order else sorted(numbers)) == list(range(60))
        assert all(worker.dismissed for worker in factory.started)
        assert factory.closed
        started += len(factory.started)
    assert (started > 10 * size) == (losses > 0)


def test_requests_are_read_no_faster_than_they_are_answered():
    factory, read, written = PlayedWorkers(2), [], []

    def requests():
        for request in requests_of(200):
            read.append(request)
            assert len(read) - len(written) <= 2 * 2 * 3 + 4
            yield request

    with WorkerPool(factory) as pool:
        pool.run(requests(), True, written.append)
    assert len(written) == 200


def test_workers_are_told_what_others_said_once_and_not_what_they_said_themselves():
    factory = PlayedWorkers(3)
    with WorkerPool(factory) as pool:
        pool.run(requests_of(90), True, lambda ended: None)
    for worker in factory.started:
        asked = [ids[1] for _, ids in worker.heard]
        assert len(asked) == len(set(asked))
        assert all(ids[0] != worker.number for _, ids in worker.heard)
        assert len(asked) > 40
    with WorkerPool(factory := PlayedWorkers(3), learn=False) as pool:
        pool.run(requests_of(30), True, lambda ended: None)
    assert not any(worker.heard for worker in factory.started)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("deadly", [["q7"], ["q7", "q8"], ["q7", "q20", "q39"]])
def test_only_the_rows_that_workers_die_of_fail(size, deadly):
    factory, rows = PlayedWorkers(size, deadly=deadly), []
    with WorkerPool(factory) as pool:
        pool.run(requests_of(40), True, rows.append)
    assert [ended.number for ended in rows] == list(range(40))
    assert {ended.row["id"]: ended.error for ended in rows if ended.error} == dict.fromkeys(deadly, ENGINE_DIED)
    said = f"line 8: the engine died {MOST_DEATHS} times while it answered this row alone (preempted)"
    assert rows[7].row["error"] == {"type": ENGINE_DIED, "message": said, "line": 8}


def test_job_ends_when_workers_are_lost_one_after_the_other():
    with (
        WorkerPool(PlayedWorkers(2, losses=1.0)) as pool,
        pytest.raises(LookaheadError, match=r"engines died one after the other \(preempted\)"),
    ):
        pool.run(requests_of(5), True, lambda ended: None)


def test_stopped_team_gives_up_what_runs():
    rows = []
    with WorkerPool(PlayedWorkers(2)) as pool:
        pool.run(requests_of(100), True, rows.append, lambda: len(rows) >= 10)
    assert 10 <= len(rows) < 30


# ---- workers as they are
def test_worker_answers_as_one_engine_does_and_takes_in_what_others_say():
    settings, options = EngineSettings(ModelOptions(str(MODEL)), batch_size=4), JobOptions(max_new_tokens=12, token_ids=True)
    requests = [parse_row(row, number + 1) for number, row in enumerate(questions(10))]
    requests = [Request(r.id, r.line, prompt=r.prompt, number=n) for n, r in enumerate(requests)]
    alone = []
    loaded = settings.load()
    run_rows(loaded.engine, loaded.tokenizer, requests, options, alone.append, lambda: False)
    worker = Worker(settings, options)
    while (report := worker.exchange([], [])).identity is None:
        assert report.error is None
    found = []
    for part in (requests[:3], requests[3:]):
        found += worker.exchange(part, [([1], [5, 6, 7])]).ended
        time.sleep(0.05)
    while len(found) < 10:
        report = worker.exchange([], [])
        found += report.ended
    assert report.batch_size == 4
    by_number = {ended.number: ended.row["token_ids"] for ended in found}
    assert [by_number[n] for n in range(10)] == [ended.row["token_ids"] for ended in alone]


def test_worker_that_cannot_load_says_why():
    worker = Worker(EngineSettings(ModelOptions(str(MODEL)), tries=("no.trie",)), JobOptions())
    while not (report := worker.exchange([], [])).error:
        pass
    assert "no.trie" in str(report.error)


def test_cores_are_shared_by_what_fits_the_nodes():
    shares = [([64, 64], 4, 32), ([64, 64], 3, 32), ([2], 2, 1), ([4, 16], 5, 4), ([2], 8, 1)]
    assert [cores_each(nodes, workers) for nodes, workers, _ in shares] == [share for *_, share in shares]


# ---- the command
def source_in(folder: Path) -> Path:
    """A job's input."""
    return write_jsonl(folder / "in.jsonl", [*questions(40), {"id": "bad"}, *questions(80)[40:]])


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job's input, and its rows as one engine writes them."""
    folder = tmp_path_factory.mktemp("job")
    source = source_in(folder)
    run([str(word) for word in ("generate", "--model", MODEL, "--input", source, "-o", folder / "one.jsonl", *LIMITS, "-q")])
    return source, steady(folder / "one.jsonl")


@pytest.mark.parametrize(
    ("where", "killed"),
    [
        pytest.param(None, True, marks=pytest.mark.deep),
        pytest.param("--ray", False, marks=[pytest.mark.ray, pytest.mark.deep]),
        pytest.param("--ray", True, marks=[pytest.mark.ray, pytest.mark.deep]),
    ],
)
def test_job_that_was_killed_and_then_loses_a_worker_writes_the_rows_of_one(where, killed, job, cli, tmp_path):
    source, rows = job
    out, learned = tmp_path / "out.jsonl", tmp_path / "learned.trie"
    options = ("--input", source, "-o", out, "--save-trie", learned, *two_workers(where))
    if killed:
        with job_process(*options) as child:
            workers = once_at_work(child, out)
            assert len(workers) == 2
            child.kill()
            child.communicate()
        deadline = time.monotonic() + 300
        while any(is_alive(pid) for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(rows_of(out)) < len(rows)
    with job_process(*options, "--resume") as child:
        workers = once_at_work(child, out)
        os.kill(workers[0], signal.SIGKILL)
        _, err = child.communicate(timeout=300)
    assert child.returncode == 3  # of the bad row
    assert "was lost" in err
    assert "1 of 81 rows failed" in err
    assert "Traceback" not in err
    assert steady(out) == rows
    assert cli("inspect-trie", learned, "--json").json["documents"] == 80


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGINT, *deep([signal.SIGTERM])])
def test_stopped_job_of_workers_says_how_to_go_on(tmp_path, number):
    source, out = source_in(tmp_path), tmp_path / "out.jsonl"
    with job_process("--input", source, "-o", out, *two_workers(None)) as child:
        workers = once_at_work(child, out)
        for pid in (child.pid, *workers):  # as a terminal does, or a scheduler
            os.kill(pid, number)
        _, err = child.communicate(timeout=300)
    assert child.returncode == 128 + number
    assert "To continue: the same command with --resume" in err
    assert "was lost" not in err
    assert 2 <= len(rows_of(out)) < 81
    assert not any(is_alive(pid) for pid in workers)


def test_workers_are_refused_where_they_make_no_sense(cli, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "in.jsonl", questions(2))
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl")
    cli.fails(2, *job, "--workers", 2, "--explain", 1, saying=["--explain", "--workers"])
    cli.fails(2, *job, "--workers", 0, saying=["workers"])
    monkeypatch.setitem(sys.modules, "ray", None)
    cli.fails(2, *job, "--ray", saying=["pip install 'lookahead[ray]'"])
    cli.fails(2, "build-trie", source, "-o", tmp_path / "t.trie", "--vocab-size", 9, "--ray", saying=["'lookahead[ray]'"])
    cli.fails(2, "build-trie", source, "--append", tmp_path / "t.trie", "--ray", saying=["--ray does not go with --append"])
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.ray
def test_address_where_no_cluster_is_fails_at_once(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", questions(2))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl")
    cli.fails(1, *job, "--ray", address, saying=[address, "no cluster answers there", "ray start --head"])
    assert not (tmp_path / "out.jsonl").exists()


def test_address_of_a_cluster_may_be_left_out():
    assert with_address([]) == []
    assert with_address(["--ray"]) == ["--ray", "auto"]
    assert with_address(["--ray", "--quiet"]) == ["--ray", "auto", "--quiet"]
    assert with_address(["--ray", "head:6379", "x"]) == ["--ray", "head:6379", "x"]
    assert with_address(["build-trie", "--ray", "corpus.jsonl"]) == ["build-trie", "--ray", "auto", "corpus.jsonl"]
    assert with_address(["a", "--ray", "local"]) == ["a", "--ray", "local"]


# ---- tries
@pytest.mark.deep
@pytest.mark.ray
def test_trie_of_a_cluster_is_that_of_one_machine(cli, tmp_path, monkeypatch):
    from lookahead.cluster import build as ray_build

    draw = random.Random(1)
    rows = [{"ids": [draw.randrange(50) for _ in range(draw.randrange(1, 60))]} for _ in range(3000)]
    rows[1700] = {"ids": ["x"]}
    first = write_jsonl(tmp_path / "a.jsonl", rows[:2500])
    second = write_jsonl(tmp_path / "b.jsonl", rows[2500:])
    monkeypatch.setattr(ray_build, "SMALLEST_SHARE", 1 << 14)
    strict = ("build-trie", first, "-o", tmp_path / "s.trie", "--vocab-size", 50, "--strict", "--ray", "local")
    with connected("local"):  # one cluster for all commands
        for more in ((), ("--min-count", 2)):
            results = []
            for name, where in (("one", ()), ("many", ("--ray", "local"))):
                out = tmp_path / f"{name}{len(more)}.trie"
                results.append(cli("build-trie", first, second, "-o", out, "--vocab-size", 50, "--json", *more, *where))
            one, many = [result.json for result in results]
            assert one["content_hash"] == many["content_hash"]
            assert (many["rows"], many["bad_rows"], many["sources"]) == (2999, 1, one["sources"])
            assert "a.jsonl:1701" in results[1].err
        cli.fails(1, *strict, saying=["1701"])


def two_workers(where: str | None) -> tuple[object, ...]:
    """Options of a job that runs on two workers, of Ray or not."""
    return (*LIMITS, "--workers", 2, *((where, "local") if where else ()))


def once_at_work(child: Any, out: Path) -> list[int]:
    """The worker processes of a job, once it has written some rows more."""
    held = len(out.read_bytes()) if out.exists() else 0
    while not out.exists() or len(out.read_bytes()) < held + 2000:
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    return workers_of(child.pid)


def workers_of(pid: int) -> list[int]:
    """The descendants of a process that hold an engine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words, descendant = path.read_bytes(), int(path.parent.name)
            if (b"spawn_main" in words or b"ray::Worker" in words) and pid in ancestors(descendant):
                found.append(descendant)
    return sorted(found)


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        yield pid


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
