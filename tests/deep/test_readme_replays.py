"""Each replay line of README runs as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_readme_replays import LINES, cli, folder, runs  # noqa: F401 - fixtures
from tests.support.cli import Cli


@pytest.mark.parametrize("line", LINES)
def test_replay_line_of_readme_runs_as_written(
    cli: Cli,  # noqa: F811
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    line: str,
) -> None:
    runs(cli, folder, monkeypatch, line)
