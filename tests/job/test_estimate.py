"""What a dry run estimates of a job, what that is based on, and what the job compares it with."""

import json
from pathlib import Path

import pytest
import torch

from lookahead.budget.profile import CostProfile, save_to_cache
from lookahead.forward.processor import processor_name
from lookahead.forward.target import setting_of
from lookahead.job.estimate import start_and_pace
from lookahead.models.load import read_config
from lookahead.native.cores import usable_cores
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, questions

JOB = ("generate", "--model", MODEL, "--max-new-tokens", 5, "--json", "-q")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))


def keep_profile(seconds: float) -> None:
    """As lookahead calibrate does: each forward of the demo model takes as long."""
    threads = min(torch.get_num_threads(), usable_cores())
    about = processor_name(torch.device("cpu")), torch.float32, "some_attention", "packed", threads, "panels"
    save_to_cache(CostProfile(setting_of(read_config(str(MODEL)), "demo", *about), "measured", (1, 512), (seconds, seconds)))


def test_time_is_not_measured_where_neither_costs_nor_rows_are_known(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", questions(3))
    estimate = cli(*JOB, "--input", source, "--dry-run").json["estimate"]
    assert estimate["seconds"] is None
    assert estimate["basis"] == f"not measured: run lookahead calibrate --model {MODEL}"
    assert estimate["memory_bytes"] > (Path(MODEL) / "model.safetensors").stat().st_size
    shown = cli(*JOB[:-2], "--input", source, "--dry-run").out
    assert "time           not measured" in shown
    assert "run lookahead calibrate" in shown


def test_time_by_costs_is_that_of_plain_steps_of_the_longest_answers_and_an_upper_bound(cli, tmp_path):
    keep_profile(0.1)
    job = (*JOB, "--input", write_jsonl(tmp_path / "in.jsonl", questions(6)), "--dry-run")
    one_by_one = cli(*job, "--batch-size", 1).json["estimate"]
    assert one_by_one["seconds"] == pytest.approx(6 * (0.1 + 4 * 0.1))  # the prefill gives the first token
    assert one_by_one["at_most"]
    at_once = cli(*job, "--batch-size", 6).json["estimate"]
    assert at_once["seconds"] == pytest.approx(6 * 0.1 + 4 * 0.1)


def test_costs_of_another_quantization_tell_nothing(cli, tmp_path):
    keep_profile(0.1)
    source = write_jsonl(tmp_path / "in.jsonl", questions(3))
    assert cli(*JOB, "--input", source, "--dry-run", "--quantize", "int8").json["estimate"]["seconds"] is None


def test_rows_that_are_answered_tell_what_the_others_take(cli, tmp_path):
    out = tmp_path / "out.jsonl"
    job = (*JOB, "--input", write_jsonl(tmp_path / "in.jsonl", questions(15)), "-o", out)
    assert cli(*job, "--limit", 5).code == 0
    found = cli(*job, "--resume", "--dry-run").json
    seconds = json.loads(Path(f"{out}.manifest.json").read_text())["counts"]["seconds"]
    assert (found["answered_rows"], found["rows"]) == (5, 10)
    assert found["estimate"]["seconds"] == pytest.approx(2 * seconds, rel=0.01)
    assert not found["estimate"]["at_most"]
    assert found["estimate"]["basis"].startswith("as the 5 rows before: 5 tokens")


def test_several_answers_to_a_row_are_one_row_of_those_before(cli, tmp_path):
    job = (*JOB, "--input", write_jsonl(tmp_path / "in.jsonl", questions(7)), "-o", tmp_path / "out.jsonl", "-n", 3)
    assert cli(*job, "--limit", 5, "--temperature", 1).code == 0
    found = cli(*job, "--temperature", 1, "--resume", "--dry-run").json["estimate"]
    assert found["rows"] == 2
    assert found["basis"].startswith("as the 5 rows before: 15 tokens")


def test_rows_that_begin_at_once_tell_how_long_a_run_takes_to_start():
    slow_start = [3.0, 3.0, 4.0, 5.0, 6.0]  # two rows at once, then one a second
    assert start_and_pace(slow_start, 2) == (1.0, 1.0)
    assert start_and_pace([1.0, 1.5, 2.0, 2.5], 2) == (0.5, 0.5)
    assert start_and_pace([3.0, 3.0, 4.0], 2) == (0.0, 4 / 3)  # too few


def test_job_compares_the_estimate_of_its_dry_run_with_what_it_took_once(cli, tmp_path):
    out = tmp_path / "out.jsonl"
    job = (*JOB[:-2], "--input", write_jsonl(tmp_path / "in.jsonl", questions(6)), "-o", out)
    keep_profile(0.1)
    estimate = cli(*job, "--dry-run", "--json").json["estimate"]
    assert not out.exists()
    assert not Path(f"{out}.manifest.json").exists()
    done = cli(*job)
    assert "time at most 1.0 s, was" in done.err  # six prefills, four steps
    (run,) = json.loads(Path(f"{out}.manifest.json").read_text())["runs"]
    assert run["estimate"] == estimate
    again = cli(*job, "--overwrite", "--json").json
    assert "estimate" not in again
    cli(*job, "--overwrite", "--dry-run")
    other = cli(*job, "--overwrite", "--json", "--seed", 1).json  # another job
    assert "estimate" not in other
    taken = cli(*job, "--overwrite", "--json").json
    assert taken["estimate"]["seconds"] == estimate["seconds"]
    files = sum(Path(f"{out}{ending}").stat().st_size for ending in ("", ".journal", ".manifest.json"))
    assert taken["disk_bytes"] == files
