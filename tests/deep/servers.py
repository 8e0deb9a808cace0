"""Processes that run command lines at once, see job_server.py, from the side of a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


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

    def close(self) -> None:
        """Once no process runs."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
