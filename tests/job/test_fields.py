"""Prompts made of fields, fields that answers keep, the first rows only, and checking rows without a model's weights."""

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lookahead.errors import UsageError
from lookahead.job.fields import OWN, RowFields, keep_of, template_of
from lookahead.job.params import Request
from lookahead.job.rows import parse_row, read_requests
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL, PROMPTS, rows_of, steady

ROWS = [{"id": f"r{n}", "question": f"Q{n}?", "context": "C", "topic": {"name": "t", "n": n}} for n in range(3)]


def generate(cli: Cli, source: Path, out: Path, *options: object) -> int:
    job = ("generate", "--model", MODEL, "--input", source, "-o", out, "--max-new-tokens", 4, "--quiet", "--batch-size", 2)
    return cli(*job, *options).code


def read(row: dict[str, Any], **options: Any) -> Request:
    return parse_row(json.loads(json.dumps(row)), 1, fields=RowFields(**options))


# ---- prompts
def test_prompt_is_the_text_of_the_named_field():
    request = read({"id": 7, "question": "Q?", "prompt": "not this", "params": {"n": 2}}, prompt_field="question")
    assert (request.id, request.prompt, request.n) == (7, "Q?", 2)
    for row, saying in (
        ({"q": 1}, 'has no "question" (found: q)'),
        ({"question": None}, "has no"),
        ({"question": 5}, "is a int"),
    ):
        assert saying in read(row, prompt_field="question").problem
    assert read({"question": ""}, prompt_field="question").problem == '"prompt" is empty'


def test_template_makes_the_prompt_of_the_fields_of_a_row():
    text = "{{ context }} {% for part in parts %}[{{ part.name|upper }}]{% endfor %} {{ row['odd name'] }}"
    request = read({"context": "C", "parts": [{"name": "a"}, {"name": "b"}], "odd name": "x", "id": 3}, template=text)
    assert (request.prompt, request.id) == ("C [A][B] x", 3)
    assert read({"body": {"prompt": "P"}}, template="{{ body.prompt }}!").prompt == "P!"


@pytest.mark.parametrize(
    ("text", "row", "saying"),
    [
        ("{{ question }}", {"q": 1}, "'question' is undefined (found: q)"),
        ("{{ a.b }}", {"a": {}}, "has no attribute 'b'"),
        ("{% if missing %}x{% endif %}{{ a }}", {"a": 1}, "'missing' is undefined"),
        ("{{ a }} {{ b }}", {"a": None, "b": 1}, "null (null are: a)"),
        ("{{ a / 0 }}", {"a": 1}, "ZeroDivisionError"),
        ("{{ ().__class__.__bases__ }}", {}, "SecurityError"),
        ("{{ a.append(1) }}", {"a": []}, "SecurityError"),
        ("{% for i in range(10000000) %}{% endfor %}{{ a }}", {"a": 1}, "OverflowError"),
        ("{{ a }}", {"a": ""}, '"prompt" is empty'),
    ],
)
def test_template_that_a_row_cannot_fill_makes_an_error_row_that_says_why(text, row, saying):
    assert saying in read(row, template=text).problem
    assert "\n" not in read(row, template=text).problem


def test_template_may_be_a_file_or_text_and_must_use_a_field(tmp_path):
    (tmp_path / "t.j2").write_bytes("\ufeffQ: {{ question }}\n".encode())
    assert template_of(str(tmp_path / "t.j2")) == "Q: {{ question }}\n"
    assert template_of("A {{ b }}" * 1000) == "A {{ b }}" * 1000  # longer than a path can be
    (tmp_path / "none.j2").write_text("no field")
    for wrong, saying in (("promt.j2", "no such file"), (str(tmp_path / "none.j2"), "uses no field")):
        with pytest.raises(UsageError, match=saying):
            template_of(wrong)
    with pytest.raises(UsageError, match="--template, line 2"):
        RowFields(template="a\n{{ b }")
    with pytest.raises(UsageError, match="give one of them"):
        RowFields(prompt_field="a", template="{{ a }}")


def test_job_by_template_answers_as_rows_with_those_prompts(cli, tmp_path):
    source, out = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    (tmp_path / "t.j2").write_text("{{ context }}: {{ question }}")
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"id": row["id"], "prompt": f"C: {row['question']}"} for row in ROWS])
    assert generate(cli, plain, tmp_path / "plain.out") == 0
    assert generate(cli, source, out, "--template", tmp_path / "t.j2") == 0
    assert steady(out) == steady(tmp_path / "plain.out")
    # What the template says belongs to the job.
    assert generate(cli, source, out, "--template", "{{ context }}: {{ question }}", "--resume") == 2
    assert generate(cli, source, out, "--template", tmp_path / "t.j2", "--resume") == 0
    (tmp_path / "t.j2").write_text("{{ question }}")
    assert generate(cli, source, out, "--template", tmp_path / "t.j2", "--resume") == 2
    assert generate(cli, source, out, "--prompt-field", "question", "--resume") == 2
    # With --chat it makes the user's message.
    assert generate(cli, source, tmp_path / "chat.out", "--prompt-field", "question", "--chat") == 0
    messages = [{"id": row["id"], "messages": [{"role": "user", "content": row["question"]}]} for row in ROWS]
    assert generate(cli, write_jsonl(tmp_path / "chat.jsonl", messages), tmp_path / "chat2.out") == 0
    assert steady(tmp_path / "chat.out") == steady(tmp_path / "chat2.out")


# ---- kept fields
def test_output_rows_keep_the_fields_that_are_asked_for(cli, tmp_path):
    source, out = write_jsonl(tmp_path / "in.jsonl", [*ROWS, {"id": "bad", "topic": 5}]), tmp_path / "out.jsonl"
    by = ("--prompt-field", "question")
    assert generate(cli, source, out, *by, "--keep-fields", "id,topic,missing") == 3
    rows = rows_of(out)
    assert [row["topic"] for row in rows] == [*(row["topic"] for row in ROWS), 5]
    assert [row["missing"] for row in rows] == [None] * 4
    assert rows[3]["finish_reason"] == "error"
    assert {*rows[0]} <= OWN | {"topic", "missing"}
    assert generate(cli, source, tmp_path / "all.jsonl", *by, "--keep-fields", "all") == 3
    assert [{name: row.get(name) for name in ROWS[0]} for row in rows_of(tmp_path / "all.jsonl")[:3]] == ROWS


def test_kept_fields_stand_in_columns_of_parquet(cli, tmp_path):
    columns = {  # values of two rows, and what the table holds
        "topic": (["a", None], ["a", None]),
        "n": ([1, 2.5], [1.0, 2.5]),
        "mixed": ([1, "text"], ["1", "text"]),
        "o": ([{"p": {}}, {}], ['{"p": {}}', "{}"]),
        "no": ([None, None], [None, None]),
        "tags": ([["x"], []], [["x"], []]),
        "nested": ([{"a": 1}, {"b": "c"}], [{"a": 1, "b": None}, {"a": None, "b": "c"}]),
    }
    rows = [{"prompt": PROMPTS[n], **{name: values[n] for name, (values, _) in columns.items()}} for n in range(2)]
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    assert generate(cli, source, out, "--keep-fields", ",".join(columns)) == 0
    table = pyarrow.parquet.read_table(out).to_pylist()
    assert {name: [row[name] for row in table] for name in columns} == {name: kept for name, (_, kept) in columns.items()}


def test_fields_of_parquet_rows_are_kept_as_json_has_them(tmp_path):
    times = pyarrow.array([1700000000123456789], pyarrow.timestamp("ns"))
    days = [datetime.date(2024, 5, 1)]
    table = pyarrow.table({"prompt": ["a"], "day": days, "score": [float("nan")], "at": times})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    (request,) = read_requests(str(tmp_path / "in.parquet"), fields=RowFields(keep=("day", "score", "at")))
    assert request.kept == {"day": "2024-05-01", "score": None, "at": "2023-11-14 22:13:20.123456789"}


def test_names_of_output_rows_cannot_be_kept(cli, tmp_path):
    for names in ("text", "topic,error", "seconds"):
        with pytest.raises(UsageError, match="with another meaning"):
            RowFields(keep=keep_of(names))
    with pytest.raises(UsageError, match="prompt stands in output rows"):
        RowFields(keep=("prompt",), echo=True)
    for wrong in ("", "a,,b", "all,a"):
        with pytest.raises(UsageError, match="give names"):
            keep_of(wrong)
    assert '"text"' in read({"prompt": "a", "text": "b"}, keep=("all",)).problem
    assert read({"prompt": "a", "x": 1, "id": 2}, keep=("all",)).kept == {"prompt": "a", "x": 1}
    assert read({"prompt": "a", "x": 1}, keep=("all",), echo=True).kept == {"x": 1}
    openai = {"custom_id": "a", "body": {"prompt": "x"}}
    assert "OpenAI line" in read(openai, keep=("x",)).problem
    source = write_jsonl(tmp_path / "in.jsonl", [openai])
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "o.jsonl", "--keep-fields", "x")
    cli.fails(2, *job, saying=["--keep-fields x: line 1 is an OpenAI line"])
    assert not (tmp_path / "o.jsonl").exists()


# ---- forms of files


def test_first_rows_only_and_later_more_of_them(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS[:5]])
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert generate(cli, source, whole) == 0
    for limit, rows in ((2, 2), (4, 4), (3, 4), (99, 5)):
        assert generate(cli, source, out, "--limit", limit, "--resume") == 0
        assert steady(out) == steady(whole)[:rows]
    assert generate(cli, source, tmp_path / "shard.jsonl", "--limit", 3, "--shard", "1/2") == 0
    assert [row["id"] for row in rows_of(tmp_path / "shard.jsonl")] == [1, 3]


# ---- dry runs
def bare_model(folder: Path) -> Path:
    """The demo model without its weights."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_dry_run_lists_what_cannot_be_answered_and_needs_no_weights(cli, tmp_path):
    model = bare_model(tmp_path / "model")
    bad = [
        ({"prompt": ""}, '"prompt" is empty'),
        ({"prompt_ids": [5] * 5000}, "no room for an answer"),
        ({"prompt_ids": [10**6]}, "outside the model's vocabulary"),
        ({"prompt": "a", "params": {"stop_token_ids": [10**6]}}, "outside the model's vocabulary"),
        ({"prompt": "a", "params": {"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}}}, "json_schema"),
        ({"custom_id": "x", "body": {"prompt": "a", "suffix": "b"}}, '"suffix"'),
        ({"id": 1, "prompt": "a"}, "the id 1 stands on line 1"),
    ]
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a cat"}, *(row for row, _ in bad)])
    job = ("generate", "--model", model, "--input", source, "--dry-run")
    result = cli(*job, "-o", tmp_path / "out.jsonl")
    assert result.code == 3
    listed = result.out.splitlines()
    for number, (line, (_, saying)) in enumerate(zip(listed, bad, strict=False), 2):
        assert line.startswith(f"{source}:{number}: ")
        assert saying in line
    assert "8 (7 cannot be answered)" in result.out
    assert result.err.startswith("error: 7 of 8 rows cannot be answered")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model"]
    value = cli(*job, "--json").json
    assert (value["rows"], value["bad_rows"], len(value["problems"])) == (8, 7, 7)
    assert value["problems"][0] == {"file": str(source), "line": 2, "id": 2, "message": '"prompt" is empty.'}
    value = cli(*job, "--json", "--limit", 1).json
    assert (value["rows"], value["bad_rows"], value["prompt_tokens"]) == (1, 0, value["longest_prompt_tokens"])
    assert cli(*job, "--limit", 1).code == 0
    assert cli(*job[:-2], tmp_path / "no.jsonl", "--dry-run").code in (1, 2)
