"""A job that is killed, stopped, cut or refused: nothing is lost, nothing is done twice, and nothing else is touched."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lookahead.backends.cpu.program import Program as CpuProgram
from lookahead.job import engines
from lookahead.job.inputs import fingerprint
from lookahead.job.manifest import began
from lookahead.job.pairs import settings_of
from lookahead.trie.file import Trie
from tests.support.cli import Cli, write_jsonl
from tests.support.depth import deep
from tests.support.jobs import MODEL, PROMPTS, job_process, questions, rows_of, steady
from tests.support.processes import Program


class Job:
    """job("--resume") runs the same job in this process; returns the exit code, and keeps what was said on stderr."""

    def __init__(self, cli: Cli, folder: Path, rows: list[Any]):
        self.cli, self.folder = cli, folder
        self.source = write_jsonl(folder / "in.jsonl", rows)
        self.out = folder / "out.jsonl"
        self.journal, self.manifest_file = folder / "out.jsonl.journal", folder / "out.jsonl.manifest.json"
        self.err = ""

    @property
    def command(self) -> tuple[object, ...]:
        return ("generate", "--model", MODEL, "--input", self.source, "-o", self.out, "--max-new-tokens", 8)

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads(self.manifest_file.read_text("utf-8"))

    def __call__(self, *options: object) -> int:
        result = self.cli(*self.command, *options)
        self.err = result.err
        return result.code

    def fails(self, code: int, *options: object, saying: list[str]) -> None:
        before = [path.read_bytes() for path in sorted(self.folder.iterdir()) if path.is_file()]
        self.cli.fails(code, *self.command, *options, saying=saying)
        assert [path.read_bytes() for path in sorted(self.folder.iterdir()) if path.is_file()] == before

    def keep(self, rows: int, *, torn: bytes = b"") -> None:
        """Leave so many rows, as a kill would."""
        lines = self.out.read_bytes().splitlines(keepends=True)
        self.out.write_bytes(b"".join(lines[:rows]) + torn)


@pytest.fixture
def job(cli, tmp_path):
    return Job(cli, tmp_path, list(questions(6)))


# ---- killed and stopped
def wait_for_rows(child: Program, path: Path, count: int) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, *deep([signal.SIGTERM])])
def test_stopped_job_ends_the_step_and_says_how_to_go_on(tmp_path, number):
    source = write_jsonl(tmp_path / "in.jsonl", questions(600))
    out = tmp_path / "out.jsonl"
    with job_process("--input", source, "-o", out, "--save-trie", tmp_path / "learned.trie") as child:
        wait_for_rows(child, out, 2)
        child.send_signal(number)
        _, err = child.communicate(timeout=300)
    assert child.returncode == 128 + number
    assert "To continue: the same command with --resume" in err
    assert "Traceback" not in err
    assert 2 <= len(rows_of(out)) < 600
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert (manifest["state"], manifest["counts"]["rows"]) == ("interrupted", len(rows_of(out)))
    assert not (tmp_path / "learned.trie").exists()


@pytest.mark.deep
def test_second_signal_ends_the_process_at_once(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", questions(600))
    out = tmp_path / "out.jsonl"
    with job_process("--input", source, "-o", out, "--quiet") as child:
        wait_for_rows(child, out, 2)
        child.send_signal(signal.SIGSTOP)  # both signals are there before the step ends
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGCONT)
        child.communicate(timeout=300)
    assert child.returncode in (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT, 128 + signal.SIGTERM)


# ---- going on
def test_resume_starts_where_nothing_is_and_does_nothing_where_all_is_done(job):
    assert job("--resume") == 0
    first = job.out.read_bytes()
    assert len(rows_of(job.out)) == 6
    assert job.manifest["state"] == "complete"
    assert job("--resume") == 0
    assert job.out.read_bytes() == first
    assert len(job.manifest["runs"]) == 2


ODD_ENTRIES = [{"input": 1e308}, {"input": "zz"}, {"row": "0"}, {"row": 1 << 63}, {"output": None}, {"tokens": "x"}]
ODD_ENTRIES += [{"seconds": 1e400}, {"accepted_by_source": [1]}, {"error": None}]


def write_odd_entries(job: Job) -> None:
    entries = list(map(json.loads, job.journal.read_text().splitlines()))
    odd = [entry | change for entry, change in zip(entries[1:], ODD_ENTRIES, strict=True)]
    job.journal.write_text("".join(json.dumps(each) + "\n" for each in (entries[0], *odd)))


DAMAGES: dict[str, Callable[[Job], object]] = {
    "last line torn": lambda job: job.keep(3, torn=b'{"id": "q3", "te'),
    "rows missing": lambda job: job.keep(3),
    "zeros at the end": lambda job: job.keep(3, torn=bytes(3)),
    "rows out of order": lambda job: job.out.write_bytes(b"".join(job.out.read_bytes().splitlines(keepends=True)[:5:4])),
    "journal cut short": lambda job: os.truncate(job.journal, job.journal.stat().st_size // 2),
    "lines of the journal that no job writes": write_odd_entries,
}


@pytest.mark.parametrize(
    ("damage", "order"),
    [*((damage, "input") for damage in DAMAGES), ("last line torn", "completion"), ("journal cut short", "completion")],
)
def test_damage_that_a_kill_leaves_costs_its_rows_only(cli, tmp_path, damage, order):
    job = Job(cli, tmp_path, list(questions(10)))
    job("--token-ids", "--order", order)
    whole = steady(job.out)
    DAMAGES[damage](job)
    assert job("--token-ids", "--order", order, "--resume") == 0
    if order == "input":
        assert steady(job.out) == whole
    assert sorted(steady(job.out), key=lambda row: row["id"]) == sorted(whole, key=lambda row: row["id"])
    assert cli("report", job.out, "--json").json["rows"] == 10


def test_job_ends_when_the_machine_fails_row_after_row_and_goes_on_when_it_works(job, monkeypatch):
    load, works = engines.load_here, CpuProgram.run
    write_jsonl(job.source, list(questions(150)))

    def load_then_break(*arguments):
        loaded = load(*arguments)
        monkeypatch.setattr(CpuProgram, "run", lambda *_, **__: 1 / 0)
        return loaded

    monkeypatch.setattr(engines, "load_here", load_then_break)
    assert job("--quiet") == 1
    assert "the last 100 rows failed (ZeroDivisionError): " in job.err
    assert job.manifest["state"] == "failed"
    assert 100 <= len(rows_of(job.out)) < 150
    monkeypatch.setattr(engines, "load_here", load)
    monkeypatch.setattr(CpuProgram, "run", works)
    assert job("--quiet", "--resume", "--retry-errors") == 0
    assert [row["id"] for row in rows_of(job.out)] == [f"q{number}" for number in range(150)]
    assert all(row["text"] for row in rows_of(job.out))


def test_input_that_has_grown_is_answered_to_its_end(job):
    job()
    before = job.out.read_bytes()
    write_jsonl(job.source, [*questions(6), {"id": "new", "prompt": PROMPTS[0]}])
    assert job("--resume") == 0
    assert job.out.read_bytes().startswith(before)
    assert [row["id"] for row in rows_of(job.out)] == [*(f"q{number}" for number in range(6)), "new"]


def test_options_that_change_no_answer_may_change(job):
    job("--token-ids")
    whole = steady(job.out)
    job.keep(2)
    assert job("--token-ids", "--resume", "--batch-size", 1, "--strategy", "off", "--metrics", job.folder / "m.prom") == 0
    assert steady(job.out) == whole
    assert [run["options"]["strategy"] for run in job.manifest["runs"]] == ["auto", "off"]


def test_learned_trie_of_a_job_in_pieces_holds_each_answer_once(job):
    trie = job.folder / "learned.trie"
    job("--save-trie", trie)
    documents = [s.documents for s in Trie(trie).header.sources]
    trie.unlink()
    # As a kill leaves it: the last row is not in the output, but its answer is kept already.
    job("--save-trie", trie, "--overwrite")
    trie.unlink()
    job.keep(5)
    kept = json.dumps({"row": 5, "prompt_ids": [1], "response_ids": [2, 3]}) + "\n"
    (job.folder / "out.jsonl.learned.jsonl").write_text(kept * 2 + '{"row": 5, "pro')
    assert job("--save-trie", trie, "--resume") == 0
    assert documents == [6]
    assert [s.documents for s in Trie(trie).header.sources] == [2]
    assert not (job.folder / "out.jsonl.learned.jsonl").exists()


# ---- refused, with nothing touched
def test_existing_output_needs_resume_or_overwrite(job):
    job.out.write_text("precious")
    job.fails(2, saying=["out.jsonl: exists", "--resume", "--overwrite"])
    job.fails(2, "--resume", "--overwrite", saying=["--resume", "--overwrite", "one of them"])
    job.fails(1, "--resume", saying=["out.jsonl.manifest.json", "cannot be read", "--overwrite"])
    job.fails(2, "--retry-errors", saying=["--retry-errors goes with --resume"])
    result = job.cli("generate", "--model", MODEL, "--input", job.source, "--resume")
    assert (result.code, "--resume needs a file" in result.err) == (2, True)


def test_job_with_other_options_or_another_model_is_refused_naming_them(job):
    job()
    job.keep(2)
    said = ["--temperature 0.0 then", "--temperature 0.7 now", "--seed"]
    job.fails(2, "--resume", "--temperature", 0.7, "--seed", 1, saying=said)
    job.fails(2, "--resume", "--token-ids", saying=["no --token-ids then, --token-ids now"])
    copy = job.folder.parent / "copy"
    shutil.copytree(MODEL, copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[2 << 20 : 3 << 20] = bytes(1 << 20)
    (copy / "model.safetensors").write_bytes(weights)
    job.fails(2, "--resume", "--model", copy, saying=["model.safetensors of the model has changed"])


def test_changed_rows_of_the_input_are_refused_naming_the_first(job):
    job()
    rows = list(questions(6))
    job.keep(4)
    write_jsonl(job.source, [*rows[:2], {**rows[2], "prompt": "else"}, *rows[3:]])
    job.fails(1, "--resume", saying=["line 3 of the input was changed"])
    write_jsonl(job.source, rows[1:])
    job.fails(1, "--resume", saying=["line 1 of the input was changed"])
    write_jsonl(job.source, rows[:3])
    job.fails(1, "--resume", saying=["1 rows less"])
    write_jsonl(job.source, [*rows[:5], {"id": "other", "prompt": PROMPTS[0]}])  # not answered yet
    assert job("--resume") == 0


def test_output_that_was_edited_is_refused_naming_the_line(job):
    job()
    lines = job.out.read_bytes().splitlines(keepends=True)
    job.out.write_bytes(b"".join([lines[0], b'{"id": "q1", "text": "better"}\n', *lines[2:]]))
    job.fails(1, "--resume", saying=["out.jsonl:2: was not written by this job"])
    job.out.write_bytes(b"another file\nof lines\n")
    job.fails(1, "--resume", saying=["no row of it is in out.jsonl.journal"])


def test_lines_at_the_end_that_the_journal_does_not_know_are_removed_with_a_notice(job):
    job()
    whole = job.out.read_bytes()
    job.out.write_bytes(whole + b'{"id": "mine"}\n')
    assert job("--resume") == 0
    assert job.out.read_bytes() == whole
    assert f"15 bytes at the end of {job.out} are not in its journal" in " ".join(job.err.split())


# ---- rows that failed
def test_bad_rows_stay_and_faults_of_the_run_are_tried_again(cli, tmp_path):
    job = Job(cli, tmp_path, [*questions(2), {"id": "bad"}])
    assert job() == 3
    assert "--retry-errors" not in job.err  # it is a fault of its row
    # A row is made one that failed by a fault of the run, as if memory had run out.
    lines, entries = job.out.read_text().splitlines(), [json.loads(line) for line in job.journal.read_text().splitlines()]
    error = {"type": "OutOfMemoryError", "message": "x", "line": 2}
    lines[1] = json.dumps({"id": "q1", "finish_reason": "error", "error": error})
    entries[1].update(output=fingerprint((lines[1] + "\n").encode()).hex(), error="OutOfMemoryError")
    job.out.write_text("".join(line + "\n" for line in lines))
    job.journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert job("--resume") == 3
    assert "2 of 3 rows failed" in job.err
    assert "1 of them may succeed with --resume --retry-errors" in job.err
    assert job("--resume", "--retry-errors") == 3
    assert "1 of 3 rows failed" in job.err
    assert "--retry-errors" not in job.err
    assert [row["id"] for row in rows_of(job.out)] == ["q0", "q1", "bad"]
    assert "text" in rows_of(job.out)[1]


# ---- chat templates that write the time
def test_chat_template_writes_one_time_in_all_rows_of_a_job_resumed_or_replayed(cli, tmp_path):
    model, rows = tmp_path / "model", [{"messages": [{"role": "user", "content": "How many?"}]}] * 6
    shutil.copytree(MODEL, model)
    numbers = "{{ strftime_now('%f') }} people each have {{ strftime_now('%f') }} apples."
    (model / "chat_template.jinja").write_text(f"Question: {numbers} {{{{ messages[0].content }}}}\nAnswer:")
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = ("generate", "--model", model, "--input", source, "-o", out, "--max-new-tokens", 12, "--quiet")
    assert cli(*command).code == 0
    texts = [row["text"] for row in rows_of(out)]
    assert len(set(texts)) == 1
    out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
    assert cli(*command, "--resume").code == 0
    assert [row["text"] for row in rows_of(out)] == texts
    began = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["runs"][0]["began"]
    assert settings_of(str(out)).began.timestamp() == began


def test_job_resumed_in_another_time_zone_writes_the_time_of_the_first():
    first = {"began": 1_700_000_000.5, "utc_offset": 9 * 3600}
    assert began(first).isoformat() == "2023-11-15T07:13:20.500000+09:00"
    assert began({"began": 1_700_000_000.5}).timestamp() == 1_700_000_000.5  # of an earlier version


# ---- files that were edited
ODD_MANIFESTS = [{"runs": []}, {"runs": [{}]}, {"runs": [{"began": "x"}]}, {"answering": 1}, {"model_files": [1]}]


@pytest.mark.parametrize("odd", ODD_MANIFESTS, ids=str)
def test_manifest_that_the_job_has_not_written_is_refused(job, odd):
    assert job("--quiet") == 0
    job.manifest_file.write_text(json.dumps(job.manifest | odd))
    job.fails(1, "--resume", saying=["out.jsonl.manifest.json: cannot be read", "--overwrite"])


@pytest.mark.parametrize("ending", ["parquet", "jsonl.gz"])
def test_complete_file_that_was_cut_is_not_taken_for_the_jobs(job, ending):
    job.out = job.folder / f"out.{ending}"
    assert job("--quiet") == 0
    assert job("--quiet", "--resume") == 0
    job.out.write_bytes(job.out.read_bytes()[:-10])
    job.fails(1, "--resume", saying=[f"out.{ending}: was changed since the job wrote it", "--overwrite"])
    assert job("--quiet", "--overwrite") == 0


def test_job_without_rows_is_reported_and_drawn(cli, tmp_path):
    (tmp_path / "out.jsonl.journal").touch()
    assert cli("report", tmp_path / "out.jsonl", "-o", tmp_path / "page.html", "--plot", tmp_path / "page.svg").code == 0
