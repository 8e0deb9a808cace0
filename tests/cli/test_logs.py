"""--log-file and --verbose: what is appended, what stands on stderr, what is refused."""

import datetime
import logging
import re
from pathlib import Path

import pytest

from lookahead_cli import logs, render
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, questions
from tests.support.loading import load_each_time

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d) (DEBUG|INFO|WARNING|ERROR) (.+)")


def lines_of(path: Path) -> list[tuple[str, str]]:
    """(level, text) of each line, whose time stamps must rise."""
    found = [LINE.fullmatch(line) for line in path.read_text("utf-8").splitlines()]
    assert all(found)
    times = [datetime.datetime.fromisoformat(match[1]) for match in found if match]
    assert times == sorted(times)
    return [(match[2], match[3]) for match in found if match]


def job(folder: Path, *options: object) -> tuple[object, ...]:
    rows = [*questions(4), {"no": "prompt"}]
    source = write_jsonl(folder / "in.jsonl", rows)
    return ("generate", "--model", MODEL, "--input", source, "-o", folder / "out.jsonl", "--max-new-tokens", 8, *options)


def test_log_of_a_job_has_what_stderr_shows_with_time_stamps(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LINE_SECONDS", 0.0)
    log = tmp_path / "job.log"
    shown = cli(*job(tmp_path, "--log-file", log, "--json"))
    assert shown.code == 3
    found = lines_of(log)
    assert found[0][1].startswith("lookahead generate --model ")
    assert any(re.match(r"\d of 5 rows, .* tokens/s", text) for _, text in found)
    assert ("INFO", "rows: 5 (1 failed)") in found
    assert [level for level, _ in found[-2:]] == ["ERROR", "WARNING"]
    assert found[-2][1] in shown.err
    assert found[-1][1].startswith("ended with exit code 3 after ")
    assert cli(*job(tmp_path, "--log-file", log, "--overwrite", "--quiet")).err.startswith("error: 1 of 5 rows failed")
    again = lines_of(log)
    assert again[: len(found)] == found  # appended
    assert ("INFO", "rows: 5 (1 failed)") in again[len(found) :]


def test_verbose_says_how_drafts_are_verified_at_what_costs_and_what_steps_take(cli, tmp_path, monkeypatch):
    load_each_time(monkeypatch)
    shown = cli(*job(tmp_path, "--verbose", "--log-file", tmp_path / "job.log"))
    for text in ("verified in mode packed", "costs of forwards: measured", "batch size 8", " steps: draft "):
        assert text in shown.err
        assert any(text in line for _, line in lines_of(tmp_path / "job.log"))
    quiet = cli(*job(tmp_path, "--overwrite"))
    assert "verified in mode" not in quiet.err
    cli.fails(2, *job(tmp_path, "--verbose", "--quiet"), saying=["--quiet", "--verbose"])


def test_other_commands_log_too(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LINE_SECONDS", 0.0)
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"ids": [1, 2, 3, 4]}] * 4 + [{"none": 1}])
    pairs = write_jsonl(tmp_path / "p.jsonl", [{"prompt_ids": [1], "response_ids": [2, 3, 4]}])
    trie, log = tmp_path / "a.trie", tmp_path / "a.log"
    made = (
        ("build-trie", corpus, "-o", trie, "--vocab-size", 9),
        ("prune-trie", trie, "-o", tmp_path / "b.trie", "--max-tokens", 4),
        ("merge-tries", trie, tmp_path / "b.trie", "-o", tmp_path / "m.trie"),
        ("replay", pairs, "--strategy", "single"),
        ("bench", "--replay", pairs, "--strategy", "single"),
    )
    for number, command in enumerate(made, 1):
        assert cli(*command, "--log-file", log, "--verbose").code == 0
        assert sum(text.startswith("ended with exit code 0") for _, text in lines_of(log)) == number
    texts = [text for _, text in lines_of(log)]
    assert any(text.startswith(f"skipped {corpus}:5") for text in texts)
    assert any(text.startswith("sorting") for text in texts)


def test_log_file_never_damages_another_file(cli, tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"ids": [1, 2, 3, 4]}])
    before, command = corpus.read_bytes(), ("build-trie", corpus, "-o", tmp_path / "a.trie", "--vocab-size", 9)
    cli.fails(2, *command, "--log-file", corpus, saying=["--log-file", "is not a log file"])
    cli.fails(2, *command, "--log-file", tmp_path / "a.trie", saying=["--log-file", "-o"])
    cli.fails(1, *command, "--log-file", tmp_path, saying=["--log-file"])
    cli.fails(1, *command, "--log-file", tmp_path / "none" / "a.log", saying=["--log-file", "cannot be written"])
    assert corpus.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl"]


def test_refused_command_line_leaves_no_log_and_a_failed_one_its_error(cli, tmp_path):
    log = tmp_path / "a.log"
    cli.fails(2, "build-trie", "none.jsonl", "--vocab-size", 9, "--log-file", log, saying=["-o"])
    assert not log.exists()
    error = cli.fails(1, "build-trie", "none.jsonl", "-o", tmp_path / "a.trie", "--vocab-size", 9, "--log-file", log, saying=[])
    (_, (level, text), _) = lines_of(log)
    assert (level, f"error: {text}") == ("ERROR", error)


def test_warnings_of_the_package_stand_on_stderr_and_in_the_log_and_with_effects_in_neither(tmp_path, capsys):
    log = tmp_path / "a.log"
    with logs.lines("lookahead test"):
        logs.open_file(str(log))
        logging.getLogger("lookahead.job.workers").warning("worker %d was lost \x1b[31m\n2", 1)
        logging.getLogger("lookahead.job.workers").info("not on stderr")
        render.notice("noticed")
    assert capsys.readouterr().err == "worker 1 was lost \\x1b[31m\\n2\nnoticed\n"
    assert lines_of(log) == [
        ("INFO", "lookahead test"),
        ("WARNING", "worker 1 was lost \\x1b[31m\\n2"),
        ("INFO", "not on stderr"),
        ("INFO", "noticed"),
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_log_that_can_no_longer_be_written_is_said_once_and_costs_nothing_else(cli, tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"ids": [1, 2, 3, 4]}])
    built = cli("build-trie", corpus, "-o", tmp_path / "a.trie", "--vocab-size", 9, "--log-file", "/dev/full", "--verbose")
    assert built.code == 0
    assert built.err.count("--log-file /dev/full: cannot be written any more (No space left on device)") == 1
    assert "Traceback" not in built.err
