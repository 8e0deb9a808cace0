"""The tool reads what it has written: replays and tries of the outputs of jobs, ours and OpenAI's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lookahead.corpus.answers import answered, asked
from lookahead.corpus.read import CorpusReport, read_documents
from lookahead.job.fields import RowFields
from lookahead.job.pairs import JobSettings, pairs_of, read_log, settings_of
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL

TEXT = "the cat sat on the mat"


def no_tokenizer() -> None:
    return None


def log_of(folder: Path, *rows: Any, **options: Any) -> Any:
    """What is read of an output of these rows."""
    return read_log(str(write_jsonl(folder / "out.jsonl", rows)), **options)


def said(row_id: Any, ids: list[int], **more: Any) -> dict[str, Any]:
    """An output row of `generate --token-ids`."""
    return {"id": row_id, "text": "...", "token_ids": ids, "finish_reason": "stop", "prompt_tokens": 2, **more}


def failed(row_id: Any) -> dict[str, Any]:
    return {"id": row_id, "finish_reason": "error", "error": {"type": "invalid_row", "message": "...", "line": 2}}


def chat_line(custom_id: str, *texts: Any, finish_reason: str = "stop") -> dict[str, Any]:
    """A line of an OpenAI batch output file."""
    choices = [
        {"index": n, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
        for n, text in enumerate(texts)
    ]
    body = {"object": "chat.completion", "choices": choices, "usage": {"prompt_tokens": 3}}
    return {"id": "b1", "custom_id": custom_id, "response": {"status_code": 200, "body": body}, "error": None}


# ---- pairs of outputs and prompts
def test_answers_are_joined_with_their_prompts_by_id_and_failed_rows_are_left_out(tmp_path):
    prompts = write_jsonl(tmp_path / "in.jsonl", [{"id": "b", "prompt_ids": [3, 4]}, {"prompt_ids": [1, 2]}, {"bad": 1}])
    log = log_of(tmp_path, said(2, [5, 6]), failed(3), said("b", [7, 8]), said("gone", [9]))
    assert pairs_of(log, no_tokenizer, [str(prompts)]) == [([1, 2], [5, 6]), ([3, 4], [7, 8])]
    assert (log.failed, log.unmatched, log.first_unmatched, log.retokenized) == (1, 1, "gone", 0)
    assert [note.partition(": ")[2].split()[0] for note in log.notes()] == ["1", "1"]


def test_default_ids_are_lines_and_of_several_files_file_and_line(tmp_path):
    names = [str(write_jsonl(tmp_path / f"{n}.jsonl", [{"prompt_ids": [n, 1]}, {"prompt_ids": [n, 2]}])) for n in (1, 2)]
    assert pairs_of(log_of(tmp_path, said(2, [5])), no_tokenizer, names[:1]) == [([1, 2], [5])]
    both = log_of(tmp_path, said("2.jsonl:1", [5]), said("1.jsonl:2", [6]))
    assert pairs_of(both, no_tokenizer, names) == [([2, 1], [5]), ([1, 2], [6])]


def test_every_sample_is_a_pair_and_rows_are_counted_by_row(tmp_path):
    row = said(1, [5], prompt_ids=[1, 2], samples=[{"token_ids": ids, "finish_reason": "stop"} for ids in ([5], [6, 7])])
    log = log_of(tmp_path, failed(9), row, {**row, "id": 2}, rows=1)
    assert pairs_of(log, no_tokenizer) == [([1, 2], [5]), ([1, 2], [6, 7])]


def test_text_is_tokenized_and_an_answer_that_was_cut_gets_no_end(tmp_path, tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    rows = [{"id": n, "prompt": TEXT, "text": TEXT, "finish_reason": end} for n, end in enumerate(("stop", "length"))]
    log = log_of(tmp_path, *rows)
    assert pairs_of(log, lambda: tokenizer) == [(ids, [*ids, tokenizer.eos_token_id]), (ids, ids)]
    assert "tokenized again" in "".join(log.notes())


def test_chat_prompts_are_rendered_as_the_job_did(tmp_path, tokenizer):
    prompts = write_jsonl(tmp_path / "in.jsonl", [{"prompt": TEXT}])
    log = log_of(tmp_path, said(1, [5], prompt_tokens=len(tokenizer(TEXT)["input_ids"])))
    rendered = tokenizer(f"user: {TEXT}\nassistant:")["input_ids"]
    assert pairs_of(log, lambda: tokenizer, [str(prompts)], JobSettings(chat=True)) == [(rendered, [5])]
    assert log.other_prompts == 1  # the job was run without --chat: its prompt was shorter
    assert "--chat" in "".join(log.notes())


def test_openai_lines_are_joined_by_custom_id_whatever_their_content_is_made_of(tmp_path, tokenizer):
    parts = [{"type": "text", "text": TEXT[:7]}, {"type": "text", "text": TEXT[7:]}]
    body = {"model": "m", "messages": [{"role": "user", "content": TEXT}]}
    request = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    prompts = write_jsonl(tmp_path / "in.jsonl", [request])
    lines = [chat_line("r-1", TEXT, None), chat_line("r-1", parts, finish_reason="length")]
    error = {"custom_id": "r-2", "response": None, "error": {"code": "x", "message": "..."}}
    refused = {"custom_id": "r-3", "response": {"status_code": 400, "body": {"error": {}}}, "error": None}
    log = log_of(tmp_path, *lines, error, refused)
    rendered, ids = tokenizer(f"user: {TEXT}\nassistant:")["input_ids"], tokenizer(TEXT)["input_ids"]
    found = pairs_of(log, lambda: tokenizer, [str(prompts)])
    assert found == [(rendered, [*ids, tokenizer.eos_token_id]), (rendered, ids)]
    assert log.failed == 2


def test_several_prompts_of_a_line_and_echoed_ones_find_their_answers(tmp_path, tokenizer):
    bodies = [{"prompt": ["the cat", "the dog"], "n": 2}, {"prompt": TEXT, "echo": True}]
    requests = [{"custom_id": f"r-{n}", "url": "/v1/completions", "body": {"model": "m", **b}} for n, b in enumerate(bodies)]
    prompts = write_jsonl(tmp_path / "in.jsonl", requests)
    lines = []
    for custom_id, texts in (("r-0", (" sat", " on", " the", " mat")), ("r-1", (TEXT + " and",))):
        choices = [{"index": n, "text": text, "finish_reason": "length"} for n, text in enumerate(texts)]
        lines.append({"custom_id": custom_id, "response": {"status_code": 200, "body": {"choices": choices}}, "error": None})
    found = pairs_of(log_of(tmp_path, *lines), lambda: tokenizer, [str(prompts)])

    def ids(text):
        return tokenizer(text)["input_ids"]

    expected = [("the cat", " sat"), ("the cat", " on"), ("the dog", " the"), ("the dog", " mat"), (TEXT, " and")]
    assert found == [(ids(prompt), ids(answer)) for prompt, answer in expected]


def test_prompts_are_made_of_fields_as_the_job_did(tmp_path, tokenizer):
    prompts = write_jsonl(tmp_path / "in.jsonl", [{"q": "the cat", "a": "x"}])
    out = write_jsonl(tmp_path / "out.jsonl", [said(1, [5])])
    by_field, by_template = RowFields("q"), RowFields(template="on {{ q }}")
    for fields, text in ((by_field, "the cat"), (by_template, "on the cat")):
        found = pairs_of(read_log(str(out)), lambda: tokenizer, [str(prompts)], JobSettings(fields=fields))
        assert found == [(tokenizer(text)["input_ids"], [5])]
    options = {"prompt_field": "q", "model": "m", "tokenizer": "t", "chat": True, "system": "s"}
    manifest = {"runs": [{"options": options, "began": 1.0}], "inputs": [{"path": str(prompts)}]}
    (tmp_path / "out.jsonl.manifest.json").write_text(json.dumps(manifest))
    known = settings_of(str(out))
    assert (known.tokenizer, known.chat, known.system, known.inputs) == ("t", True, "s", [str(prompts)])
    assert known.fields is not None
    assert known.fields.prompt_field == "q"


def test_logs_may_be_arrays_and_tables(tmp_path, tokenizer):
    array, table = tmp_path / "log.json", tmp_path / "log.csv"
    array.write_text(json.dumps([{"prompt": "the cat", "response": TEXT}]))
    table.write_text(f"prompt,response\nthe cat,{TEXT}\n")
    expected = pairs_of(read_log(str(array)), lambda: tokenizer)
    assert len(expected) == 1
    assert pairs_of(read_log(str(table)), lambda: tokenizer) == expected


def test_kept_columns_do_not_pass_for_the_answer():
    row = said(1, [5], prompt="Q", answer="the reference", response=None)
    found = answered(row)
    assert (found.answers[0].token_ids, found.prompt) == ([5], "Q")
    assert answered({"prompt": "Q", "response": "A"}) is None
    assert asked({"prompt": "Q"}) is None


@pytest.mark.parametrize(
    ("rows", "saying"),
    [
        ([said(1, [5])], ["out.jsonl:1", "--prompts", "--echo"]),
        ([failed(1)], ["none of its 1 rows holds an answer"]),
        ([{"question": "a"}], ["out.jsonl:1", '"prompt" and "response"', "question"]),
        ([said(1, [5], prompt="Q")], ["out.jsonl:1", "--tokenizer"]),
    ],
)
def test_what_is_missing_is_said(cli, tmp_path, rows, saying):
    out = write_jsonl(tmp_path / "out.jsonl", rows)
    cli.fails(1, "replay", out, saying=saying)


def test_prompts_of_another_job_are_refused(cli, tmp_path):
    prompts = write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "prompt_ids": [1]}])
    out = write_jsonl(tmp_path / "out.jsonl", [said("b", [5, 6])])
    cli.fails(1, "replay", out, "--prompts", prompts, saying=["no prompt in", "in.jsonl", '"b"'])


# ---- replay as a command
def test_replay_is_bench_replay_with_the_same_json(cli, tmp_path):
    pairs = write_jsonl(tmp_path / "p.jsonl", [{"prompt_ids": [1, 2, 3], "response_ids": [1, 2, 3, 1, 2, 3]}] * 3)
    other = write_jsonl(tmp_path / "q.jsonl", [{"prompt_ids": [1, 2], "response_ids": [4, 1, 2, 4]}] * 2)
    options = ("--strategy", "hierarchical,single", "--decoding-length", "4,8", "--json")

    def untimed(value):
        return re.sub(r'"(build_seconds|draft_us|update_us)": ([0-9.]+|{[^}]*})', "", json.dumps(value))

    ours = cli("replay", pairs, other, *options).json
    assert untimed(ours) == untimed(cli("bench", "--replay", pairs, "--replay", other, *options).json)
    assert ours["workloads"][0]["rows"] == 3
    cli.fails(2, "replay", pairs, pairs, saying=["p.jsonl", "twice"])
    cli.fails(2, "replay", pairs, "--no-chat", "--system", "x", saying=["--system"])


def test_text_takes_the_tokenizer_of_the_trie(cli, tmp_path, tokenizer_folder):
    rows = [{"prompt": f"{n} the cat", "response": TEXT} for n in range(4)]
    pairs = write_jsonl(tmp_path / "p.jsonl", rows)
    assert cli("build-trie", pairs, "-o", tmp_path / "t.trie", "--tokenizer", tokenizer_folder).code == 0
    by_trie = cli("replay", pairs, "--trie", tmp_path / "t.trie", "--strategy", "single", "--json").json
    named = cli("replay", pairs, "--tokenizer", tokenizer_folder, "--strategy", "single", "--json").json
    assert (by_trie["rows"], by_trie["tokens"]) == (named["rows"], named["tokens"]) == (4, named["tokens"])
    warm, cold = by_trie["strategies"]
    assert cold["edl"] == named["strategies"][0]["edl"] < warm["edl"]
    cli.fails(1, "replay", pairs, "--trie", tmp_path / "t.trie", "--tokenizer", MODEL, saying=["t.trie", "tokenizer"])


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A folder with in.jsonl, of all kinds of rows, and what `generate` answers, with --echo (also .parquet) and without."""
    from lookahead_cli.app import run

    folder = tmp_path_factory.mktemp("job")
    body = {"messages": [{"role": "user", "content": "How many?"}], "max_tokens": 6}
    rows = [
        {"prompt": "Question: Tom has 3 apples."},
        {"id": "chat", "messages": [{"role": "user", "content": "How many apples?"}]},
        {"id": "ids", "prompt_ids": [5, 6, 7]},
        {"custom_id": "openai", "body": body},
        {"id": "bad"},
    ]
    write_jsonl(folder / "in.jsonl", rows)
    write_jsonl(folder / "own.jsonl", [row for row in rows if "body" not in row])
    ask = ["generate", "--model", str(MODEL), "--max-new-tokens", "6", "--token-ids", "-q", "--system", "Be brief.", "--chat"]
    for name, source, more in (
        ("plain.jsonl", "in.jsonl", []),
        ("echo.jsonl", "in.jsonl", ["--echo"]),
        ("echo.parquet", "own.jsonl", ["--echo", "-n", "2", "--temperature", "1"]),
    ):
        assert run([*ask, "--input", str(folder / source), "-o", str(folder / name), *more]) != 0  # a row is bad
    return folder


def test_manifest_names_prompts_chat_and_tokenizer(cli, job):
    options = ("--strategy", "hierarchical", "--json")
    joined = cli("replay", job / "plain.jsonl", *options)
    assert "in.jsonl, which its manifest names" in joined.err
    assert "number of tokens" not in joined.err
    kept = cli("replay", job / "echo.jsonl", *options)
    assert joined.json["tokens"] == kept.json["tokens"]
    assert joined.json["strategies"][0]["edl"] == kept.json["strategies"][0]["edl"]
    wrong = cli("replay", job / "plain.jsonl", "--no-chat", *options)
    assert "prompts have another number of tokens than in the job" in wrong.err


# ---- tries of outputs
def documents(path: Path, tokenizer: Any | None, **options: Any) -> tuple[list[list[int]], CorpusReport]:
    report = CorpusReport()
    return [list(each.token_ids) for each in read_documents([str(path)], tokenizer, report, **options)], report


def test_answers_of_jobs_become_documents_with_an_end_unless_they_were_cut(tmp_path, tokenizer):
    ids, end = tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id
    samples = [{"text": TEXT, "finish_reason": reason} for reason in ("stop", "length")]
    rows = [
        {"id": 1, "text": TEXT, "finish_reason": "stop"},
        {"id": 2, "text": TEXT, "finish_reason": "length"},
        {"id": 3, "text": TEXT, "finish_reason": "stop", "samples": samples},
        failed(4),
        chat_line("a", TEXT, TEXT),
        {"custom_id": "b", "response": None, "error": {"code": "x", "message": "..."}},
        {"id": "cmpl-1", "object": "text_completion", "choices": [{"text": TEXT, "finish_reason": "stop"}]},
    ]
    found, report = documents(write_jsonl(tmp_path / "out.jsonl", rows), tokenizer, strict=True)
    whole, cut = [*ids, end], ids
    assert found == [whole, cut, whole, cut, whole, whole, whole]
    assert (report.rows, report.failed, report.bad, report.requests) == (5, 2, 0, 0)


def test_answers_in_ids_need_no_tokenizer(tmp_path):
    rows = [said(1, [5, 6], prompt_ids=[1, 2]), said(2, [7, 99])]
    found, report = documents(write_jsonl(tmp_path / "out.jsonl", rows), None, vocab_size=10)
    assert found == [[1, 2, 5, 6]]
    assert "99" in report.problems[0]


def test_requests_are_documents_by_their_answers_or_else_by_what_was_asked(tmp_path, tokenizer):
    system, user = {"role": "system", "content": "You are kind."}, {"role": "user", "content": TEXT}
    done = {"role": "assistant", "content": TEXT}
    bodies = [{"messages": [system, user]}, {"messages": [user, done]}, {"prompt": TEXT}, {"input": 1}]
    rows = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body} for n, body in enumerate(bodies)
    ]
    found, report = documents(write_jsonl(tmp_path / "in.jsonl", rows), tokenizer)
    ids = tokenizer(TEXT)["input_ids"]
    assert found[0] == found[2] == ids
    assert found[1][-len(ids) - 1 :] == [*ids, tokenizer.eos_token_id]
    assert (report.rows, report.requests, report.bad) == (3, 2, 1)


def test_trie_of_a_parquet_output_is_that_of_its_answers(cli, job, tmp_path):
    value = cli("build-trie", job / "echo.parquet", "-o", tmp_path / "o.trie", "--tokenizer", MODEL, "--json").json
    assert (value["rows"], value["documents"], value["failed_rows"], value["bad_rows"]) == (3, 6, 1, 0)
    lines = cli("build-trie", job / "echo.jsonl", "-o", tmp_path / "p.trie", "--tokenizer", MODEL)
    assert "skipped 1 rows of failed answers" in lines.err
    assert json.loads(cli("inspect-trie", tmp_path / "p.trie", "--json").out)["documents"] == 4
