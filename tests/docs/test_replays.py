"""Each replay of README and docs/ runs on samples/: here with two rows, as written in the deep tests of test_blocks.py."""

import json
import shlex

import pytest

from tests.docs.blocks import BLOCKS, ROOT, check_files
from tests.support.depth import deep

LOGGED = ROOT / "samples" / "logged.jsonl"
LINES = [
    line
    for block in BLOCKS
    if block.language == "console" and block.page in ("README.md", "replay.md", "bench.md") and "llama-134m" not in block.text
    for line, _ in block.commands
    if line.startswith(("lookahead replay", "lookahead bench --replay"))
]


def test_pages_have_a_line_of_each_kind():
    for kind in ("--prompts", "--sweep", "--baselines", "--random-weights", "--cost-profile"):
        assert any(kind in line for line in LINES)


@pytest.mark.parametrize("line", deep(LINES))
def test_replay_line_runs(cli, folder, line):
    """It ends well, prints a table with an EDL, and writes what it names."""
    fewer = ("--batch-size", "1", "--no-peers", "--strategy", "single") if "--random-weights" in line else ()
    result = cli(*shlex.split(line)[1:], "--rows", 2, *fewer)
    assert result.code == 0, result.err
    assert "EDL" in result.out
    check_files(line)


def test_logged_sample_is_small_and_of_questions_that_the_corpus_does_not_hold():
    rows = [json.loads(line) for line in LOGGED.read_text(encoding="utf-8").splitlines()]
    corpus = (ROOT / "samples" / "corpus.jsonl").read_text(encoding="utf-8")
    assert len(rows) == 100
    assert LOGGED.stat().st_size < 200_000
    prompts = [json.loads(line)["prompt"] for line in (ROOT / "samples" / "prompts.jsonl").read_text("utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == prompts[:100]
    assert not any(json.dumps(row["prompt"].split("\n")[0])[1:-1] in corpus for row in rows)
