"""lookahead report: what drafts brought to a job, by its journal or its rows."""

import itertools
import json
import re
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from lookahead.budget.speedup import Speedup
from lookahead.job.progress import MOST_POINTS, JobProgress, JobTotals
from lookahead.job.record import read_record
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, PROMPTS


def entry(row: int, prompt: int = 20, tokens: int = 11, steps: int = 5, error: str = "") -> dict[str, Any]:
    """A line of a journal, two seconds after the one before."""
    said = {} if error else {"output": 3, "trie:a": tokens - 1 - steps - 3}
    return {
        "row": row, "input": "00", "output": "00", "error": error, "prompt_tokens": 0 if error else prompt,
        "tokens": 0 if error else tokens, "first_tokens": int(not error), "steps": 0 if error else steps, "draft_tokens": 9,
        "accepted_tokens": 0 if error else tokens - 1 - steps, "seconds": 2.0, "accepted_by_source": said,
        "row_seconds": None if error else prompt / 10,
    }  # fmt: skip


def manifest(path: Path, *runs: dict[str, Any], state: str = "complete", strategy: str = "auto") -> None:
    """Of the job that writes to `path`."""
    options = {"strategy": strategy, "dtype": "bfloat16", "max_new_tokens": 96}
    written = {
        "state": state,
        "answering": {"model": "org/<model>"},
        "updated": 1.7e9,
        "runs": [{"options": options, **r} for r in runs],
    }
    Path(f"{path}.manifest.json").write_text(json.dumps(written))


def measured(low: float, high: float, seconds: float = 10.0) -> dict[str, Any]:
    """A run of a manifest whose speedup was measured."""
    clocked = {"run_rows": 5, "run_tokens": 500, "run_seconds": seconds, "loading_seconds": 1.5}
    points = [[at, low - 0.1, high + 0.1] for at in (2.0, 4.0)] + [[seconds, low, high]]
    speedup = {"speedup_over_plain": (low + high) / 2, "speedup_low": low, "speedup_high": high, "speedup_over_time": points}
    return {**clocked, **speedup}


def text_of(page: Path) -> str:
    """What a page shows, figures aside, in one line."""
    shown = re.sub("<(svg|style).*?</\\1>", "", page.read_text("utf-8"), flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub("<[^>]*>", " ", shown)))


def test_journal_of_a_running_job_is_read_in_the_order_of_completion(tmp_path):
    entries = [entry(2), entry(0, 100, 21, 5), entry(1, error="invalid_row"), entry(2, 20, 31, 10)]
    journal = write_jsonl(tmp_path / "out.jsonl.journal", entries)
    with journal.open("a") as file:
        file.write('{"row": 5, "tok')  # cut short
    record = read_record(str(tmp_path / "out.jsonl"))
    assert [(row.number, row.edl, row.ended) for row in record.rows] == [(1, 4.0, 2.0), (2, None, 4.0), (3, 3.0, 6.0)]
    totals = record.totals
    assert (totals.rows, totals.errors, totals.edl) == (3, 1, 50 / 15)
    assert [(part.name, part.rows, part.counts.edl) for part in record.by_length("prompt")] == [
        ("16 to 31", 1, 3.0),
        ("64 to 127", 1, 4.0),
    ]
    assert [part.name for part in record.by_time(2)] == ["1 to 1", "2 to 3"]
    assert record.by_time(2)[1].ended == 6.0


def test_rows_without_a_journal_say_it_too(tmp_path):
    row = {"id": 1, "text": "x", "finish_reason": "stop", "prompt_tokens": 20, "completion_tokens": 11, "steps": 5}
    row |= {"draft_tokens": 9, "accepted_tokens": 5, "accepted_by_source": {"output": 5}, "seconds": 1.0}
    several = {**row, "completion_tokens": 22, "steps": 10, "samples": [{}, {}]}
    out = write_jsonl(tmp_path / "out.jsonl", [row, {"id": 2, "finish_reason": "error", "error": {}}, several])
    record = read_record(str(out))
    assert [(each.number, each.edl, each.ended) for each in record.rows] == [(1, 2.0, None), (2, None, None), (3, 2.0, None)]
    assert record.totals.errors == 1


def test_report_prints_tables_json_a_page_and_figures(cli, tmp_path):
    out, page, plot = tmp_path / "<out>.jsonl", tmp_path / "r.html", tmp_path / "r.png"
    write_jsonl(tmp_path / "<out>.jsonl.journal", [entry(n, 10 + 7 * n, 11 + n % 3, 4 + n % 2) for n in range(40)])
    printed = cli("report", out, "-o", page, "--plot", plot)
    assert printed.code == 0, printed.err
    value = cli("report", out, "--json").json
    assert f"EDL {value['edl']:.2f}" in printed.out
    for title in (
        "by source",
        "prompt length",
        "answer length",
        "over time",
        "EDL of rows",
        "lowest and the highest",
        "longest",
    ):
        assert title in printed.out
        assert title in text_of(page)
    assert len(value["by_row"]) == value["rows"] == 40
    assert [sum(part["rows"] for part in value[by]) for by in ("by_time", "by_prompt_length")] == [40, 40]
    assert value["by_prompt_length"][0]["accepted_by_source"].keys() <= {"output", "trie:a"}
    text = page.read_text()
    assert "<svg" in text
    assert "&lt;out&gt;.jsonl" in text
    assert "<out>" not in text
    assert not any(loads in text for loads in ("<script", "<link", "src=", 'href="http', "url(http", "@import"))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_rows_that_took_longest_are_named_and_mean_seconds_stand_beside_lengths(tmp_path):
    write_jsonl(tmp_path / "out.jsonl.journal", [entry(n, 100 + n) | {"id": f"q{n}"} for n in range(9)])
    record = read_record(str(tmp_path / "out.jsonl"))
    assert [(row.id, row.seconds) for row in record.slowest(2)] == [("q8", 10.8), ("q7", 10.7)]
    (part,) = record.by_length("prompt")
    assert part.as_json()["row_seconds"] == pytest.approx(10.4)
    assert [part.name for part in record.by_length("answer")] == ["1 to 15"]


def test_page_shows_the_speedup_of_all_runs_as_an_interval_and_over_time(cli, tmp_path):
    out, page = tmp_path / "out.jsonl", tmp_path / "r.html"
    write_jsonl(tmp_path / "out.jsonl.journal", [entry(n) for n in range(10)])
    manifest(out, measured(1.2, 1.4), {"run_seconds": 0.4, "speedup_not_measured": "too short"}, measured(1.6, 2.0, 30.0))
    assert cli("report", out, "-o", page).code == 0
    text = text_of(page)
    assert "1.50 to 1.85x speedup over plain" in text  # (12 + 48) and (14 + 60) of 40 seconds
    assert "Speedup over plain decoding, so far in each run" in text
    assert [[at for at, *_ in points] for points in read_record(str(out)).speedup_over_time] == [[2, 4, 10], [12.4, 14.4, 40.4]]
    assert "org/<model>, bfloat16" in text
    assert "--max-new-tokens 96" in text


@pytest.mark.parametrize(
    ("run", "strategy", "expected"),
    [
        ({"run_seconds": 1.0, "speedup_not_measured": "too short"}, "auto", "not measured speedup over plain too short"),
        ({"run_seconds": 1.0}, "off", "not measured speedup over plain this is plain decoding"),
        ({}, "auto", "not measured speedup over plain"),  # killed before anything was noted
    ],
)
def test_page_shows_no_speedup_that_was_not_measured(cli, tmp_path, run, strategy, expected):
    out, page = tmp_path / "out.jsonl", tmp_path / "r.html"
    write_jsonl(tmp_path / "out.jsonl.journal", [entry(n) for n in range(3)])
    manifest(out, run, state="running", strategy=strategy)
    assert cli("report", out, "-o", page).code == 0
    assert expected in text_of(page)
    assert "running, as of 2023-11-14" in text_of(page)
    assert "so far in each run" not in text_of(page)


def test_page_lists_failed_rows_with_their_ids_and_what_failed(cli, tmp_path):
    page = tmp_path / "r.html"
    write_jsonl(tmp_path / "out.jsonl.journal", [entry(0), entry(1, error="invalid_row") | {"id": "<q>"}])
    assert cli("report", tmp_path / "out.jsonl", "-o", page).code == 0
    assert "1 failed rows row id error 2 <q> invalid_row" in text_of(page)


def test_speedup_over_time_has_few_points_however_long_the_run_is():
    progress = JobProgress(JobTotals(), speedup=lambda: Speedup(10.0, 15.0, 1.0))
    for second in range(20_000):
        progress.began = time.monotonic() - second
        progress.note_speedup()
        assert len(progress.speedup_over_time) < MOST_POINTS
    seconds = [at for at, *_ in progress.speedup_over_time]
    apart = [after - before for before, after in itertools.pairwise(seconds)]
    assert 256 <= min(apart) <= max(apart) < 300  # 20,000 / 256 = 78 points
    assert 20_000 - seconds[-1] < 300
    assert {(low, high) for _, low, high in progress.speedup_over_time} == {(1.4, 1.6)}


def test_speedup_that_is_not_measured_yet_is_no_point():
    progress = JobProgress(JobTotals(), speedup=lambda: Speedup(10.0, 15.0, 9.0))
    progress.note_speedup()
    assert progress.speedup_over_time == []


def test_what_cannot_be_reported_is_refused(cli, tmp_path):
    openai = {"custom_id": "a", "response": {"status_code": 200, "body": {"choices": []}}, "error": None}
    path = write_jsonl(tmp_path / "o.jsonl", [openai])
    cli.fails(1, "report", tmp_path / "no.jsonl", saying=["no.jsonl: no such file"])
    cli.fails(1, "report", path, saying=["o.jsonl", "no steps", "o.jsonl.journal"])
    cli.fails(2, "report", path, "-o", path, saying=["o.jsonl"])


def test_report_names_openai_lines_by_custom_id_in_full_in_80_columns(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [
        {"custom_id": f"a name of some length, number {n}", "body": {"prompt": PROMPTS[n], "max_tokens": 4}} for n in (0, 1)
    ]
    out = tmp_path / "out.jsonl"
    assert cli("generate", "--model", MODEL, "--input", write_jsonl(tmp_path / "in.jsonl", lines), "-o", out, "-q").code == 0
    assert [row.id for row in read_record(str(out)).rows] == [line["custom_id"] for line in lines]
    shown = cli("report", out).out
    assert "…" not in shown
    assert max(map(len, shown.splitlines()[1:])) <= 80
    assert "accepted" in shown.partition("took longest")[2]


def test_report_of_a_job_agrees_with_its_summary_also_of_parquet(cli, tmp_path):
    prompts = write_jsonl(tmp_path / "in.jsonl", [{"prompt": text} for text in PROMPTS[:4]])
    for name in ("out.jsonl", "out.parquet"):
        asked = ("--input", prompts, "-o", tmp_path / name, "--max-new-tokens", 12, "--json", "-q")
        summary = cli("generate", "--model", MODEL, *asked).json
        value = cli("report", tmp_path / name, "--json").json
        for key in ("rows", "tokens", "steps", "draft_tokens", "accepted_tokens", "edl", "accepted_by_source"):
            assert value[key] == summary[key], key
        assert value["state"] == "complete"
        assert all(row["row_seconds"] > 0 for row in value["by_row"])
        (tmp_path / f"{name}.journal").unlink()
        by_rows = cli("report", tmp_path / name, "--json").json
        assert by_rows["edl"] == value["edl"]
        assert [row["row"] for row in by_rows["by_row"]] == [1, 2, 3, 4]
        assert by_rows["accepted_by_source"] == value["accepted_by_source"]
        assert [row["row_seconds"] for row in by_rows["by_row"]] == [row["row_seconds"] for row in value["by_row"]]
