"""Jobs on the demo model for tests: prompts, a command line in a process of its own, what of its output must be the same."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookahead_cli.demo import samples_folder
from tests.support.processes import Program

MODEL = samples_folder() / "demo-model"
PROMPTS = [json.loads(line)["prompt"] for line in (samples_folder() / "prompts.jsonl").read_text("utf-8").splitlines()]
UNSTEADY = {"seconds", "steps", "draft_tokens", "accepted_tokens", "edl", "accepted_by_source"}  # hang on what is remembered


COMMAND = "from lookahead_cli.app import main; main()"


def job_process(*options: object) -> Program:
    """`lookahead generate` with the demo model, in a process that starts at once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Program(COMMAND, "generate", "--model", MODEL, *options, environment=environment)


def installed_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`lookahead`, as users start it."""
    command = [Path(sys.executable).with_name("lookahead"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, timeout=300)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def steady(path: Path) -> list[dict[str, Any]]:
    """What a job's rows say in every run of it."""
    return [{name: value for name, value in row.items() if name not in UNSTEADY} for row in rows_of(path)]


def questions(count: int) -> Sequence[dict[str, Any]]:
    """Rows with ids, no two alike."""
    return [{"id": f"q{number}", "prompt": f"({number}) {PROMPTS[number % len(PROMPTS)]}"} for number in range(count)]
