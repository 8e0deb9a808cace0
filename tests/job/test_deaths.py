"""Jobs whose engine dies: each row is answered once, as in a job that nothing disturbs, but for those that it dies of.

The engine is that of benchmarks/long_job.py: a process that kills itself at random, and at each row whose prompt is deadly.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.long_job import DyingEngine, check, install, rows_of
from lookahead.engines.vllm_engine import VllmSettings, _watch
from lookahead.errors import EngineDiedError, LookaheadError
from lookahead.job.deaths import DEATHS_IN_A_ROW, ENGINE_DIED, MOST_DEATHS, PARTS, Retries
from lookahead.job.rows import Request
from lookahead.models.options import ModelOptions
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL
from tests.support.jobs import rows_of as answers_of
from tests.support.processes import Program

JOB = ("generate", "--engine", "vllm", "--model", MODEL, "--max-new-tokens", 4, "--token-ids", "--strategy", "off")
MAIN = "from benchmarks.long_job import install; install(); from lookahead_cli.app import main; main()"


@pytest.fixture(autouse=True)
def dying_engine(monkeypatch):
    monkeypatch.setattr(VllmSettings, "start", VllmSettings.start)
    install()


def options(folder: Path, deaths: float, batch_size: int = 8) -> tuple[object, ...]:
    files = ("--input", folder / "in.jsonl", "-o", folder / "out.jsonl")
    return (*JOB, *files, "--batch-size", batch_size, "--engine-arg", f"deaths={deaths}")


@pytest.mark.parametrize("ids", ["none", "random"])
def test_each_row_is_answered_once_by_an_engine_that_dies_at_random(ids, cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", rows_of(3000, ids))
    found = cli(*options(tmp_path, 0.03), "--json")
    assert found.code == 0
    assert check(source, tmp_path / "out.jsonl", 0) == 0
    assert found.json["engine_deaths"] > 10
    notices = [line for line in found.err.splitlines() if "has died" in line]
    assert len(notices) == found.json["engine_deaths"]
    assert "its process ended with -9): it starts again, and its 16 rows are asked again." in notices[0]


@pytest.mark.parametrize("order", ["input", "completion"])
@pytest.mark.parametrize("batch_size", [1, 8, 100])
def test_only_the_row_that_the_engine_dies_of_fails(batch_size, order, cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", rows_of(1000, "counted", poison=1000))
    found = cli(*options(tmp_path, 0, batch_size), "--order", order)
    assert found.code == 3
    rows = {row["id"]: row for row in answers_of(tmp_path / "out.jsonl")}
    failed = [row for row in rows.values() if "error" in row]
    said = f"line 1000: the engine died {MOST_DEATHS} times while it answered this row alone (vLLM has died "
    assert [row["id"] for row in failed] == ["q999"]
    assert failed[0]["error"]["type"] == ENGINE_DIED
    assert failed[0]["error"]["message"].startswith(said)
    if order == "input":
        check(source, tmp_path / "out.jsonl", 1000)
    assert len(rows) == 1000


def test_rows_that_engines_die_of_are_told_apart_from_random_deaths(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", rows_of(2000, "counted", poison=250))
    assert cli(*options(tmp_path, 0.01)).code == 3
    assert check(source, tmp_path / "out.jsonl", 250) == 8


def test_a_job_whose_engine_dies_at_once_ends_and_continues_later(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", rows_of(100, "counted"))
    error = cli(*options(tmp_path, 1))
    assert error.code == 1
    assert f"error: {DEATHS_IN_A_ROW} engines died one after the other (vLLM has died" in error.err
    assert "--resume continues" in error.err
    assert "Traceback" not in error.err
    job = [*options(tmp_path, 1)[:-1], "deaths=0", "--resume"]
    assert cli(*job).code == 0
    check(source, tmp_path / "out.jsonl", 0)


def test_a_killed_job_continues_and_its_engine_still_dies(tmp_path):
    source, out = write_jsonl(tmp_path / "in.jsonl", rows_of(6000, "counted", poison=1500)), tmp_path / "out.jsonl"
    for _ in range(2):
        size = out.stat().st_size if out.exists() else 0
        job = Program(MAIN, *options(tmp_path, 0.02), "--resume", "--quiet")
        while (out.stat().st_size if out.exists() else 0) < size + 100_000:
            assert job.poll() is None, job.communicate()
            time.sleep(0.01)
        job.send_signal(signal.SIGKILL)
        job.communicate()
    job = Program(MAIN, *options(tmp_path, 0.02), "--resume", "--quiet")
    _, err = job.communicate()
    assert job.returncode == 3, err
    assert check(source, out, 1500, kills=2) == 4


def test_a_request_that_a_dead_engine_gets_is_not_refused_but_asked_again():
    class EngineDeadError(Exception):
        """As vLLM names it."""

    engine = DyingEngine(VllmSettings(ModelOptions(str(MODEL))), None)

    def dead(name, generation):
        raise EngineDeadError("EngineCore encountered an issue.\nSee above.")

    add, engine._add = engine._add, dead
    asked = engine.request([1, 2], 3)
    with pytest.raises(EngineDiedError, match=r"vLLM has died \(EngineDeadError: EngineCore encountered an issue\)"):
        list(engine.run([asked]))
    engine._add = add
    engine.restart()
    assert [each.token_ids for each in engine.run([engine.request([1, 2], 3)])] == [[3, 4, 5]]
    engine.close()


def test_rows_of_a_dead_engine_are_divided_down_to_single_ones():
    tasks = [Request(f"q{index}", index + 1, number=index) for index in range(20)]
    retries = Retries()
    assert retries.died(tasks, "x") == []
    groups = [retries.next_group() for _ in range(7)]
    assert [task for group in groups for task in group] == tasks
    assert not retries
    assert max(map(len, groups)) == 3, f"of {PARTS} parts each has at most 3 rows"
    retries.died(groups[0], "x")
    assert [retries.next_group() for _ in range(3)] == [[task] for task in tasks[:3]]
    assert retries.died([tasks[0]], "x") == []
    (ended,) = retries.died(retries.next_group(), "x")
    assert (ended.row["id"], ended.error) == ("q0", ENGINE_DIED)
    with pytest.raises(LookaheadError, match="5 engines died one after the other"):
        retries.died([], "x")


def test_a_killed_process_of_vllm_fails_the_calls_that_wait_for_it():
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    resources = SimpleNamespace(engine_dead=False, engine_manager=SimpleNamespace(processes=[process]))
    core = SimpleNamespace(resources=resources, outputs_queue=queue.Queue(), utility_results={1: Future()})
    _watch(core)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert isinstance(core.outputs_queue.get(timeout=60), ChildProcessError)
    with pytest.raises(ChildProcessError):
        core.utility_results[1].result(timeout=60)
    assert resources.engine_dead
