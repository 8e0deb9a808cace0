"""A job is a value: its options, what they declare, and the front door that runs it from Python as from the command."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lookahead import JobEvents, JobReport, JobSpec, run_job
from lookahead.errors import UsageError
from lookahead.job.progress import JobProgress
from lookahead.job.record import CLOCKED
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, questions, rows_of, steady


def spec_of(folder: Path, **options: Any) -> JobSpec:
    """Four rows of the demo model. options: of the job, in place of these."""
    source = write_jsonl(folder / "in.jsonl", questions(4))
    return JobSpec.of(**{"model": MODEL, "input": source, "out": folder / "out.jsonl", "max_new_tokens": 12, **options})


# ---- declarations ----


# ---- values ----
def test_options_by_name_make_a_job_and_a_job_gives_them_back():
    spec = JobSpec.of(model=Path("m"), input="a.jsonl", trie=["x.trie", Path("y.trie")], temperature=1, batch_size=4)
    assert (spec.model.model, spec.io.input, spec.sampling.temperature) == ("m", ("a.jsonl",), 1.0)
    assert spec.options()["trie"] == ["x.trie", "y.trie"]
    assert JobSpec.of(**spec.options()) == spec
    assert JobSpec.of(stop=[]) == JobSpec()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 3}, "a job has no option 'max_tokens' (known: adapter, attn, "),
        ({"max_new_tokens": "3"}, "--max-new-tokens '3': is a str, not int."),
        ({"max_new_tokens": True}, "--max-new-tokens True: is a bool, not int."),
        ({"max_new_tokens": 0}, "--max-new-tokens 0: give a number at least 1."),
        ({"logprobs": 129}, "--logprobs 129: give a number from 0 to 128."),
        ({"stop_token_ids": ["x"]}, "--stop-token-ids 'x': is a str, not int."),
        ({"chat": 1}, "--chat 1: is a int, not bool."),
    ],
)
def test_a_value_that_no_option_can_mean_is_refused(options, message):
    with pytest.raises(UsageError) as raised:
        JobSpec.of(**options)
    assert str(raised.value).startswith(message)


# ---- the front door ----
def test_job_from_python_writes_what_the_command_writes(cli, tmp_path):
    spec = spec_of(tmp_path, token_ids=True)
    report = run_job(spec)
    command = tmp_path / "command.jsonl"
    job = ("--input", tmp_path / "in.jsonl", "--max-new-tokens", 12, "--token-ids", "-o", command, "--json")
    said = cli("generate", "--model", MODEL, *job).json
    assert steady(tmp_path / "out.jsonl") == steady(command)
    assert isinstance(report, JobReport)
    assert (report.state, report.model, report.out, report.resumable) == ("complete", str(MODEL), spec.io.out, True)
    assert report.totals.rows == report.run.rows == report.expected == 4
    assert report.as_json().keys() ^ said.keys() <= {*CLOCKED}  # a short job may or may not have a speedup
    assert report.used["batch_size"] == 8
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["state"] == "complete"
    assert manifest["runs"][0]["options"] == spec.options()


class Watching(JobEvents):
    """Notes what it is told; stops after so many rows."""

    def __init__(self, most: int = 1_000_000):
        self.most, self.rows, self.events = most, 0, list[str]()

    def notice(self, text: str) -> None:
        self.events.append(f"notice: {text}")

    @contextmanager
    def running(self, progress: JobProgress) -> Iterator[None]:
        self.events.append(f"begins at {progress.totals.rows}")
        yield
        self.events.append("ends")

    def progress(self, progress: JobProgress) -> None:
        self.rows = progress.totals.rows

    def stopped(self) -> bool:
        return self.rows >= self.most


def test_job_that_its_caller_stops_is_resumed_to_the_same_rows(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    run_job(spec_of(whole, batch_size=1))
    spec = spec_of(tmp_path, batch_size=1)
    first = Watching(most=2)
    report = run_job(spec, first)
    assert (report.state, report.totals.rows, report.expected) == ("stopped", 2, 4)
    assert first.events == ["begins at 0", "ends"]
    resumed = Watching()
    report = run_job(JobSpec.of(**{**spec.options(), "resume": True, "batch_size": 3}), resumed)
    assert (report.state, report.totals.rows, report.run.rows) == ("complete", 4, 2)
    assert resumed.events == ["begins at 2", "ends"]
    assert steady(tmp_path / "out.jsonl") == steady(whole / "out.jsonl")
    again = Watching()
    assert run_job(JobSpec.of(**{**spec.options(), "resume": True}), again).state == "complete"
    assert again.events == ["begins at 4", "ends"]


def test_failed_rows_are_counted_in_the_report_and_raise_nothing(tmp_path):
    source = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "x"}, {"prompt": 3}])
    report = run_job(spec_of(tmp_path, input=source))
    assert (report.state, report.totals.rows, report.totals.errors) == ("complete", 2, 1)


def test_job_of_python_with_nobody_to_show_steps_to_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--explain: these events show no steps"):
        run_job(spec_of(tmp_path, explain=1))
    with pytest.raises(UsageError, match="--dry-run answers nothing"):
        run_job(spec_of(tmp_path, dry_run=True))
    with pytest.raises(UsageError, match="name a model"):
        run_job(JobSpec())


# ---- manifests of earlier versions ----
def earlier(folder: Path, **changes: Any) -> None:
    """The manifest as a version wrote it that had fewer options. changes: of what the job was begun with."""
    path = folder / "out.jsonl.manifest.json"
    manifest = json.loads(path.read_text())
    for name in ("echo", "logprobs", "typical_p", "frequency_penalty", "keep_fields"):
        del manifest["answering"][name]
    manifest["answering"].update(changes)
    path.write_text(json.dumps(manifest))


def test_job_of_an_earlier_version_is_resumed_or_refused_in_one_line(cli, tmp_path):
    spec = spec_of(tmp_path, batch_size=1)
    run_job(spec, Watching(most=1))
    earlier(tmp_path, stop=[])
    again = ("generate", "--model", MODEL, "--input", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--resume")
    cli.fails(2, *again, "--max-new-tokens", 12, "--echo", saying=["this is another job: no --echo then, --echo now."])
    cli.fails(2, *again, "--max-new-tokens", 13, saying=["--max-new-tokens 12 then, --max-new-tokens 13 now."])
    assert cli(*again, "--max-new-tokens", 12).code == 0
    assert len(rows_of(tmp_path / "out.jsonl")) == 4


# ---- an explicit default is a value like any other ----
@pytest.mark.parametrize(
    ("line", "saying"),
    [
        (["generate", "--model", MODEL, "--input", "x", "--no-learn", "--session-tokens", 4_000_000], "--session-tokens"),
        (["generate", "--model", MODEL, "--input", "x", "--device-map", "auto", "--device", "auto"], "leave --device out"),
        (["generate", "--model", MODEL, "--input", "x", "--explain", 1, "--batch-size", "auto"], "leave --batch-size out"),
        (["bench", "--replay", "x", "--max-new-tokens", 256], "leave out --max-new-tokens."),
        (["bench", "--replay", "x", "--dtype", "auto", "--peers"], "leave out --dtype, --peers."),
        (["bench", "--replay", "x", "--batch-size", 1], "--batch-size need --cost-profile"),
        (["replay", "x", "--repeat", 1], "--repeat and --batch-size need --cost-profile"),
        (["inspect-trie", "x", "--decoding-length", 16], "--query TEXT"),
        (["build-trie", "x", "-o", "y", "--tokenizer", "z", "--verify"], "go with --append"),
        (["build-trie", "x", "--append", "y", "--min-count", 1], "--min-count does not go with --append"),
        (["calibrate", "--model", MODEL, "--estimate", "l4", "-o", "y", "--device", "auto"], "leave out --device."),
        (["calibrate", "--model", MODEL, "--estimate", "l4", "-o", "y", "--seconds", 45], "leave out --seconds."),
    ],
)
def test_an_option_given_as_its_default_is_refused_where_another_value_is(cli, line, saying):
    cli.fails(2, *line, saying=[saying])


def test_an_option_of_a_job_file_is_given_too(cli, tmp_path):
    (tmp_path / "job.yaml").write_text("device-map: auto\ndevice: auto\n")
    job = ("generate", "--config", tmp_path / "job.yaml", "--model", MODEL, "--input", "x")
    cli.fails(2, *job, saying=["leave --device out"])
    (tmp_path / "bench.yaml").write_text("repeat: 1\n")
    cli.fails(2, "replay", "x", "--config", tmp_path / "bench.yaml", saying=["--repeat"])
    (tmp_path / "nothing.yaml").write_text("session-tokens: null\ndevice: null\n")
    result = cli("generate", "--config", tmp_path / "nothing.yaml", "--no-learn", "--device-map", "auto", "--print-config")
    assert (result.code, "session-tokens: null" in result.out) == (0, True)
