"""Each replay line of README runs on what stands in samples/ (here on a few rows; as written in tests/deep)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.cli import Cli, write_jsonl

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOGGED = ROOT / "samples" / "logged.jsonl"
LINES = re.findall(r"^\$ (lookahead (?:replay|bench --replay) .*)$", README, re.MULTILINE)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as README has it by then: samples, answers.trie and out.jsonl."""
    from lookahead_cli.app import run

    made = tmp_path_factory.mktemp("readme")
    (made / "samples").symlink_to(ROOT / "samples")
    trie = ["-o", str(made / "answers.trie"), "--tokenizer", str(ROOT / "samples" / "demo-model")]
    assert run(["build-trie", str(ROOT / "samples" / "corpus.jsonl"), *trie]) == 0
    rows = [json.loads(line) for line in LOGGED.read_text(encoding="utf-8").splitlines()]
    without = ("prompt", "token_ids")  # what generate writes without --echo and --token-ids
    write_jsonl(made / "out.jsonl", [{k: v for k, v in row.items() if k not in without} for row in rows])
    return made


def runs(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, *more: object) -> None:
    """The line must end well, print a table with an EDL, and write what it says."""
    monkeypatch.chdir(folder)
    arguments = shlex.split(line)[1:]
    result = cli(*arguments, *more)
    assert result.code == 0, result.err
    assert "EDL" in result.out
    if "--plot" in arguments:
        assert (folder / arguments[arguments.index("--plot") + 1]).stat().st_size > 10_000


def test_readme_has_a_line_of_each_kind() -> None:
    for kind in ("--prompts", "--sweep", "--baselines", "--random-weights", "--cost-profile"):
        assert any(kind in line for line in LINES)


@pytest.mark.parametrize("line", LINES)
def test_replay_line_of_readme_runs(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    fewer = ("--batch-size", "1", "--no-peers", "--strategy", "single") if "--random-weights" in line else ()
    runs(cli, folder, monkeypatch, line, "--rows", 2, *fewer)


def test_logged_sample_is_small_and_of_questions_that_the_corpus_does_not_hold() -> None:
    rows = [json.loads(line) for line in LOGGED.read_text(encoding="utf-8").splitlines()]
    corpus = (ROOT / "samples" / "corpus.jsonl").read_text(encoding="utf-8")
    assert len(rows) == 100
    assert LOGGED.stat().st_size < 200_000
    prompts = [json.loads(line)["prompt"] for line in (ROOT / "samples" / "prompts.jsonl").read_text("utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == prompts[:100]
    assert not any(json.dumps(row["prompt"].split("\n")[0])[1:-1] in corpus for row in rows)
