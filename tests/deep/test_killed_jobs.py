"""kill -9 at random moments of jobs: resumed, each says what an uninterrupted one says, and leaves nothing behind.

KILLS=100 is the number of kills, KILL_SEED where their moments begin. Half of them fall anywhere in a run, half after its last
row, where rows are put in order, a Parquet file and a trie are written.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lookahead.trie.file import Trie
from tests.cli import write_jsonl
from tests.jobs import MODEL, UNSTEADY, questions, rows_of

KILLS, SEED = int(os.environ.get("KILLS", 100)), int(os.environ.get("KILL_SEED", 1))
ROWS = 48
AFTER_LAST_ROW = 0.4  # seconds in which a job is killed after its last row, at most
MOST_RUNS = 60  # of a job until it must be complete

SAMPLED = ("--temperature", 0.8, "--samples", 2, "--seed", 3)
TWO = ("--workers", 2)
KINDS: dict[str, tuple[int, str, Sequence[object]]] = {  # share of the kills in percent, output, options
    "lines": (25, "out.jsonl", ("--batch-size", 4, *SAMPLED, "--save-trie", "learned.trie")),
    "parquet": (25, "out.parquet", ("--batch-size", 8, *SAMPLED, "--save-trie", "learned.trie", "--token-ids")),
    "completion": (20, "out.jsonl", ("--batch-size", 8, "--order", "completion", "--save-trie", "learned.trie")),
    "workers": (15, "out.jsonl", ("--batch-size", 4, *TWO, *SAMPLED, "--save-trie", "learned.trie")),
    "workers, parquet": (15, "out.parquet", ("--batch-size", 4, *TWO, "--save-trie", "learned.trie")),
}


class Server:
    """See job_server.py."""

    def __init__(self, folder: Path):
        command = [sys.executable, "-m", "tests.deep.job_server"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.errors = folder / "stderr.txt"
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[2]
        )

    def start(self, arguments: Sequence[object]) -> int:
        """The pid of a process that runs this command line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(self.errors), *map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        return int(self._answer("started"))

    def wait(self) -> int:
        """The exit code of the process that was started last, or -9."""
        return os.waitstatus_to_exitcode(int(self._answer("ended")))

    def _answer(self, what: str) -> str:
        assert self.process.stdout is not None
        name, value = self.process.stdout.readline().split()
        assert name == what
        return value


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    assert server.process.stdin is not None
    server.process.stdin.close()
    server.process.wait(timeout=60)


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


def command(folder: Path, source: Path, out: str, options: Sequence[object]) -> list[object]:
    placed = [folder / option if option == "learned.trie" else option for option in options]
    job = ["generate", "--model", MODEL, "--input", source, "-o", folder / out, "--max-new-tokens", 16]
    return [*job, "--quiet", "--resume", *placed]


def learned_documents(folder: Path) -> int:
    trie = Trie(folder / "learned.trie")
    trie.verify()
    return sum(source.documents for source in trie.header.sources)


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_job_killed_at_any_moment_says_what_an_uninterrupted_one_says(server: Server, tmp_path: Path, kind: str) -> None:
    percent, out, options = KINDS[kind]
    wanted = -(-KILLS * percent // 100)
    source = write_jsonl(tmp_path / "in.jsonl", [*questions(ROWS - 1), {"id": "wrong"}])
    whole = tmp_path / "whole"
    whole.mkdir()
    began = time.monotonic()
    server.start(command(whole, source, out, options))
    assert server.wait() == 3, server.errors.read_text()
    duration = time.monotonic() - began
    expected, documents, left = rows(whole / out), learned_documents(whole), sorted(os.listdir(whole))
    assert len(expected) == ROWS
    draw = random.Random(f"{SEED} {kind}")
    kills = jobs = early = late = 0
    while kills < wanted:
        jobs += 1
        folder = tmp_path / str(jobs)
        folder.mkdir()
        written = folder / (out if out.endswith(".jsonl") else f"{out}.partial.jsonl")
        for run in range(MOST_RUNS):
            held = lines_in(written)
            pid = server.start(command(folder, source, out, options))
            if kills < wanted and run < MOST_RUNS - 1:
                if draw.random() < 0.5:
                    time.sleep(draw.uniform(0, duration))
                else:
                    deadline = time.monotonic() + 4 * duration + 60
                    while held < ROWS and lines_in(written) < ROWS and time.monotonic() < deadline and _runs(pid):
                        time.sleep(0.002)
                    time.sleep(draw.uniform(0, AFTER_LAST_ROW))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            code = server.wait()
            if code == -signal.SIGKILL:
                kills += 1
                late += lines_in(written) >= ROWS or not written.exists()
                continue
            assert code == 3, server.errors.read_text()
            break
        assert rows(folder / out) == expected
        assert learned_documents(folder) == documents
        assert sorted(os.listdir(folder)) == left
        assert json.loads((folder / f"{out}.manifest.json").read_text())["state"] == "complete"
    early = kills - late
    print(f"{kind}: {kills} kills ({early} before the last row, {late} after it), {jobs} jobs, {duration:.1f} s uninterrupted")


def _runs(pid: int) -> bool:
    """Not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
