"""One model over several processes or devices: the tokens of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from lookahead.forward.parallel import joined
from tests.support.cli import write_jsonl
from tests.support.depth import deep
from tests.support.jobs import MODEL, questions, rows_of, steady
from tests.support.processes import Program

pytest.importorskip("accelerate")


SCRIPT = Path(__file__).parents[1] / "support" / "run_cli.py"


def started_by_torchrun(*options: object) -> tuple[int, str]:
    """Two processes; the exit code and stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [*command, str(SCRIPT), *map(str, options)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300)
    return done.returncode, done.stderr


def started_as_torchrun_does(*options: object) -> tuple[int, str]:
    """Two processes that start at once."""
    group = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    ranks = [Program(code, *options, environment={**group, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    said = []
    for rank in ranks:
        with rank:
            said.append(rank.communicate(timeout=300)[1])
    return max(abs(rank.returncode or 0) for rank in ranks), "".join(said)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("start", deep([started_as_torchrun_does, started_by_torchrun]))
def test_processes_that_share_a_model_write_the_rows_of_one(cli, tmp_path, start):
    source = write_jsonl(tmp_path / "in.jsonl", [*questions(6), {"id": "s", "prompt": "A", "params": {"temperature": 0.9}}])
    job = ("generate", "--model", MODEL, "--input", source, "--max-new-tokens", 16, "--token-ids")
    job += ("--strategy", "hierarchical", "--decoding-length", 8)
    assert cli(*job, "-o", tmp_path / "one.jsonl").code == 0
    out = tmp_path / "two.jsonl"
    code, err = start(*job, "-o", out, "--tp-plan", "auto", "--batch-size", 4)
    assert code == 0, err
    assert steady(out) == steady(tmp_path / "one.jsonl")
    assert sum(row["accepted_tokens"] for row in rows_of(out)) > 0
    if start is started_by_torchrun:  # nothing is left to do: the leader does not call the others, and they end too
        code, err = start(*job, "-o", out, "--tp-plan", "auto", "--resume")
        assert code == 0, err


def test_processes_that_share_a_model_choose_the_same_drafts(cli, tmp_path):
    """Each measures times of its own: were they not agreed on, a process would wait for a forward that no other takes."""
    source = write_jsonl(tmp_path / "in.jsonl", questions(12))
    job = ("generate", "--model", MODEL, "--input", source, "--max-new-tokens", 96, "--token-ids")
    assert cli(*job, "-o", tmp_path / "one.jsonl").code == 0
    code, err = started_as_torchrun_does(*job, "-o", tmp_path / "two.jsonl", "--tp-plan", "auto", "--batch-size", 4)
    assert code == 0, err
    one, two = ({row["id"]: row["token_ids"] for row in rows_of(tmp_path / name)} for name in ("one.jsonl", "two.jsonl"))
    assert one == two


def test_processes_leave_the_group_that_they_joined(monkeypatch):
    # Its thread is joined, so that it does not run into the end of the interpreter (an abort, in one run of many).
    address = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    with joined() as peers:
        assert peers.leads
        assert peers.begin()
    assert not dist.is_initialized()


def test_model_may_be_spread_by_a_device_map(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", questions(6))
    job = ("generate", "--model", MODEL, "--input", source, "--max-new-tokens", 16, "--token-ids")
    assert cli(*job, "-o", tmp_path / "one.jsonl").code == 0
    assert cli(*job, "-o", tmp_path / "two.jsonl", "--device-map", "auto").code == 0
    assert steady(tmp_path / "two.jsonl") == steady(tmp_path / "one.jsonl")


def test_shared_models_are_refused_where_they_make_no_sense(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", questions(2))
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl")
    cli.fails(2, *job, "--tp-plan", "auto", saying=["--tp-plan", "torchrun"])
    cli.fails(2, *job, "--tp-plan", "auto", "--workers", 2, saying=["--tp-plan", "--workers"])
    cli.fails(2, *job, "--device-map", "auto", "--device", "cpu", saying=["--device-map", "leave --device out"])
    assert not (tmp_path / "out.jsonl").exists()
