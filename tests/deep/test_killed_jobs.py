"""kill -9 at random moments of jobs: resumed, each says what an uninterrupted one says, and leaves nothing behind.

KILLS=100 is the number of kills, KILL_SEED where their moments begin. A run is killed at any time, or once it has written a
number of rows, or after its last row, where rows are put in order, a Parquet file and a trie are written.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lookahead.trie.file import Trie
from tests.support.cli import write_jsonl
from tests.support.jobs import UNSTEADY, job_process, questions, rows_of
from tests.support.processes import Program

KILLS, SEED = int(os.environ.get("KILLS", 100)), int(os.environ.get("KILL_SEED", 1))
ROWS = 80
AFTER_LAST_ROW, BETWEEN_ROWS = 0.4, 0.05  # seconds in which a job is killed after its last row, or one of the others, at most
MOST_KILLS = 6  # of one job; then it runs to its end

SAMPLED = ("--temperature", 0.8, "--samples", 2, "--seed", 3)
TWO = ("--workers", 2)
KINDS: dict[str, tuple[int, str, Sequence[object]]] = {  # share of the kills in percent, output, options
    "lines": (25, "out.jsonl", ("--batch-size", 4, *SAMPLED, "--save-trie", "learned.trie")),
    "parquet": (25, "out.parquet", ("--batch-size", 8, *SAMPLED, "--save-trie", "learned.trie", "--token-ids")),
    "completion": (20, "out.jsonl", ("--batch-size", 8, "--order", "completion", "--save-trie", "learned.trie")),
    "workers": (15, "out.jsonl", ("--batch-size", 4, *TWO, *SAMPLED, "--save-trie", "learned.trie")),
    "workers, parquet": (15, "out.parquet", ("--batch-size", 4, *TWO, "--save-trie", "learned.trie")),
}


def rows(path: Path) -> list[dict[str, Any]]:
    """What a job's rows say in every run of it, in the order of their ids."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        found = pyarrow.parquet.read_table(path).to_pylist()
    else:
        found = rows_of(path)
    steady = [{name: value for name, value in row.items() if name not in UNSTEADY} for row in found]
    return sorted(steady, key=lambda row: str(row.get("id")))


def lines_in(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


def started(folder: Path, source: Path, out: str, options: Sequence[object]) -> Program:
    placed = [folder / option if option == "learned.trie" else option for option in options]
    return job_process("--input", source, "-o", folder / out, "--max-new-tokens", 12, "--quiet", "--resume", *placed)


def learned_documents(folder: Path) -> int:
    trie = Trie(folder / "learned.trie")
    trie.verify()
    return sum(source.documents for source in trie.header.sources)


@pytest.mark.parametrize("kind", KINDS)
def test_job_killed_at_any_moment_says_what_an_uninterrupted_one_says(tmp_path, kind):
    percent, out, options = KINDS[kind]
    wanted = -(-KILLS * percent // 100)
    source = write_jsonl(tmp_path / "in.jsonl", [*questions(ROWS - 1), {"id": "wrong"}])
    whole, duration = tmp_path / "whole", 0.0
    for folder in (tmp_path / "first", whole):  # the first one may compile kernels
        folder.mkdir()
        began = time.monotonic()
        with started(folder, source, out, options) as job:
            _, err = job.communicate()
        assert job.returncode == 3, err
        duration = time.monotonic() - began
    expected, documents, left = rows(whole / out), learned_documents(whole), sorted(os.listdir(whole))
    assert len(expected) == ROWS
    draw = random.Random(f"{SEED} {kind}")
    kills = jobs = late = between = 0
    while kills < wanted:
        jobs += 1
        folder = tmp_path / str(jobs)
        folder.mkdir()
        written = folder / (out if out.endswith(".jsonl") else f"{out}.partial.jsonl")
        for run in range(MOST_KILLS + 1):
            held = lines_in(written)
            job = started(folder, source, out, options)
            if kills < wanted and run < MOST_KILLS:
                moment = draw.random()
                if moment < 0.15 or held >= ROWS:
                    _sleep(draw.uniform(0, duration), job)
                else:
                    until = ROWS if moment > 0.75 else draw.randint(min(held + 1, ROWS), ROWS)
                    while lines_in(written) < until and job.poll() is None:
                        time.sleep(0.002)
                    _sleep(draw.uniform(0, AFTER_LAST_ROW if until == ROWS else BETWEEN_ROWS), job)
                job.kill()
            with job:
                err = "" if job.wait() < 0 else job.communicate()[1]  # workers of a killed job may live a little longer
            if job.returncode == -signal.SIGKILL:
                kills += 1
                now = lines_in(written) if written.exists() or not (folder / out).exists() else ROWS
                late += now >= ROWS
                between += held < now < ROWS
                continue
            assert job.returncode == 3, err
            break
        assert rows(folder / out) == expected
        assert learned_documents(folder) == documents
        assert sorted(os.listdir(folder)) == left
        assert json.loads((folder / f"{out}.manifest.json").read_text())["state"] == "complete"
    print(f"{kind}: {kills} kills ({between} of them between rows, {late} after the last one), {jobs} jobs of {duration:.1f} s")


def _sleep(seconds: float, job: Program) -> None:
    """No longer than it runs."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(seconds)
