"""lookahead report: what drafts brought to a job, by its journal or its rows."""

from typing import Any

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
    }  # fmt: skip


def test_journal_of_a_running_job_is_read_in_the_order_of_completion(tmp_path):
    entries = [entry(2), entry(0, 100, 21, 5), entry(1, error="invalid_row"), entry(2, 20, 31, 10)]
    journal = write_jsonl(tmp_path / "out.jsonl.journal", entries)
    with journal.open("a") as file:
        file.write('{"row": 5, "tok')  # cut short
    record = read_record(str(tmp_path / "out.jsonl"))
    assert [(row.number, row.edl, row.ended) for row in record.rows] == [(1, 4.0, 2.0), (2, None, 4.0), (3, 3.0, 6.0)]
    totals = record.totals
    assert (totals.rows, totals.errors, totals.edl) == (3, 1, 50 / 15)
    assert [(part.name, part.rows, part.counts.edl) for part in record.by_prompt_length()] == [
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
    for title in ("by source", "prompt length", "over time", "EDL of rows", "lowest and the highest"):
        assert title in printed.out
    assert len(value["by_row"]) == value["rows"] == 40
    assert [sum(part["rows"] for part in value[by]) for by in ("by_time", "by_prompt_length")] == [40, 40]
    assert value["by_prompt_length"][0]["accepted_by_source"].keys() <= {"output", "trie:a"}
    text = page.read_text()
    assert "<svg" in text
    assert "&lt;out&gt;.jsonl" in text
    assert "<out>" not in text
    assert not any(loads in text for loads in ("<script", "<link", "src=", 'href="http', "url(http", "@import"))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_reported_is_refused(cli, tmp_path):
    openai = {"custom_id": "a", "response": {"status_code": 200, "body": {"choices": []}}, "error": None}
    path = write_jsonl(tmp_path / "o.jsonl", [openai])
    cli.fails(1, "report", tmp_path / "no.jsonl", saying=["no.jsonl: no such file"])
    cli.fails(1, "report", path, saying=["o.jsonl", "no steps", "o.jsonl.journal"])
    cli.fails(2, "report", path, "-o", path, saying=["o.jsonl"])


def test_report_of_a_job_agrees_with_its_summary_also_of_parquet(cli, tmp_path):
    prompts = write_jsonl(tmp_path / "in.jsonl", [{"prompt": text} for text in PROMPTS[:4]])
    for name in ("out.jsonl", "out.parquet"):
        asked = ("--input", prompts, "-o", tmp_path / name, "--max-new-tokens", 12, "--json", "-q")
        summary = cli("generate", "--model", MODEL, *asked).json
        value = cli("report", tmp_path / name, "--json").json
        for key in ("rows", "tokens", "steps", "draft_tokens", "accepted_tokens", "edl", "accepted_by_source"):
            assert value[key] == summary[key], key
        assert value["state"] == "complete"
        (tmp_path / f"{name}.journal").unlink()
        by_rows = cli("report", tmp_path / name, "--json").json
        assert by_rows["edl"] == value["edl"]
        assert [row["row"] for row in by_rows["by_row"]] == [1, 2, 3, 4]
        assert by_rows["accepted_by_source"] == value["accepted_by_source"]
