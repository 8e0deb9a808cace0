"""What a dry run estimates of a job, what that is based on, and what a resumed job compares with it."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from lookahead.budget.profile import CostProfile, save_to_cache
from lookahead.forward.processor import processor_name
from lookahead.forward.target import setting_of
from lookahead.job.estimate import start_and_pace
from lookahead.job.progress import JobTotals
from lookahead.job.record import RowRecord
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
    assert seconds < found["estimate"]["seconds"] <= 2.01 * seconds
    assert not found["estimate"]["at_most"]
    assert found["estimate"]["basis"].startswith("as the 5 rows before: 5 tokens")


def test_several_answers_to_a_row_are_one_row_of_those_before(cli, tmp_path):
    job = (*JOB, "--input", write_jsonl(tmp_path / "in.jsonl", questions(7)), "-o", tmp_path / "out.jsonl", "-n", 3)
    assert cli(*job, "--limit", 5, "--temperature", 1).code == 0
    found = cli(*job, "--temperature", 1, "--resume", "--dry-run").json["estimate"]
    assert found["rows"] == 2
    assert found["basis"].startswith("as the 5 rows before: 15 tokens")


def answered(lengths: list[int], slots: int, began: float = 0.0) -> list[RowRecord]:
    """Rows of a job that decodes `slots` of them at once, a step a second, and writes them in the order of the input."""
    free, rows, written = [began] * slots, list[RowRecord](), 0.0
    for number, length in enumerate(lengths):
        slot = free.index(min(free))
        free[slot] += length
        written = max(written, free[slot])
        rows.append(RowRecord(number, JobTotals(rows=1, first_tokens=1), written, seconds=float(length)))
    return rows


LENGTHS = [*itertools.islice(itertools.cycle([5, 90, 20, 3, 40, 12, 96]), 280)]


@pytest.mark.parametrize(("rows", "slots"), [(8, 1), (14, 8), (21, 8), (70, 32)])
def test_few_rows_tell_the_pace_of_full_slots_though_slots_are_empty_at_the_end(rows, slots):
    start, of_row = start_and_pace(answered(LENGTHS[:rows], slots, began=2.0), slots)
    took = answered(LENGTHS, slots, began=2.0)[-1].ended
    assert start + of_row * len(LENGTHS) == pytest.approx(took, rel=0.2)
    assert start > 1.9


def test_job_compares_what_its_rows_before_let_expect_with_what_it_took(cli, tmp_path):
    out = tmp_path / "out.jsonl"
    job = (*JOB[:-2], "--input", write_jsonl(tmp_path / "in.jsonl", questions(12)), "-o", out)
    assert "estimated" not in cli(*job, "--limit", 5).err
    files = [Path(f"{out}{ending}") for ending in ("", ".journal", ".manifest.json")]
    before = [file.read_bytes() for file in files]
    estimate = cli(*job, "--resume", "--dry-run", "--json").json["estimate"]
    assert [file.read_bytes() for file in files] == before
    assert not (tmp_path / "cache" / "estimates").exists()
    done = cli(*job, "--resume", "--json").json
    assert done["estimate"] == {**estimate, "memory_bytes": None}
    assert done["disk_bytes"] == sum(file.stat().st_size for file in files)
    assert done["estimate"]["disk_bytes"] == pytest.approx(done["disk_bytes"], rel=0.25)


def test_summary_of_a_resumed_job_has_estimate_and_fact_side_by_side(cli, tmp_path):
    job = (*JOB[:-2], "--input", write_jsonl(tmp_path / "in.jsonl", questions(12)), "-o", tmp_path / "out.jsonl")
    cli(*job, "--limit", 5)
    assert re.search(r"estimated +time \d.* s, was \d.* s, disk .* KiB, was .* KiB", cli(*job, "--resume").err)
