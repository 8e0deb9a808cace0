"""What a job reads and writes: formats, globs, stdin, shards, and every kind of row that is none."""

import csv
import gzip
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lookahead.corpus.read import json_rows
from lookahead.errors import UsageError
from lookahead.job.inputs import LONGEST_LINE, Shard, count_rows
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL, PROMPTS, UNSTEADY, questions, rows_of, steady


def generate(cli: Cli, out: Path, *options: object) -> int:
    job = ("generate", "--model", MODEL, "-o", out, "--max-new-tokens", 6, "--quiet")
    return cli(*job, *options).code


def test_jsonl_its_compressed_forms_parquet_and_stdin_give_the_same_rows(cli, tmp_path, monkeypatch):
    rows = [*questions(3), {"id": "m", "messages": [{"role": "user", "content": "hello"}], "params": {"max_new_tokens": 2}}]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    text = source.read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    with pyarrow.CompressedOutputStream(tmp_path / "a.jsonl.zst", "zstd") as packed:
        packed.write(text)
    columns = [{name: row.get(name) for name in ("id", "prompt", "messages", "params")} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    assert generate(cli, tmp_path / "out.jsonl", "--input", source) == 0
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        shutil.copy(tmp_path / name, tmp_path / name.upper())
    for name in ("a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "A.JSONL.GZ", "A.JSONL.ZST", "A.PARQUET"):
        assert generate(cli, tmp_path / f"{name}.out", "--input", tmp_path / name) == 0
        assert steady(tmp_path / f"{name}.out") == steady(tmp_path / "out.jsonl")
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            table = csv.DictWriter(file, ("id", "prompt"), delimiter=separator)
            table.writeheader()
            table.writerows(rows[:3])
        assert count_rows([str(tmp_path / name)]) == 3
        assert generate(cli, tmp_path / f"{name}.out", "--input", tmp_path / name) == 0
        assert steady(tmp_path / f"{name}.out") == steady(tmp_path / "out.jsonl")[:3]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert generate(cli, tmp_path / "stdin.jsonl", "--input", "-") == 0
    assert steady(tmp_path / "stdin.jsonl") == steady(tmp_path / "out.jsonl")


@pytest.mark.parametrize("of", ["stdin", "pipe"])
def test_job_on_stdin_or_a_pipe_goes_on_when_it_gets_the_same_rows_again(cli, tmp_path, monkeypatch, piped, of):
    rows, out = list(questions(4)), tmp_path / "out.jsonl"

    def run(rows, *options):
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        return generate(cli, out, "--input", "-" if of == "stdin" else piped(rows), *options)

    assert run(rows) == 0
    whole = steady(out)
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:2]))
    assert run([rows[1], rows[0], *rows[2:]], "--resume") == 1
    assert run(rows, "--resume") == 0
    assert steady(out) == whole


def test_several_files_and_globs_are_read_in_order_and_ids_name_the_file(cli, tmp_path):
    for name, count in (("b", 2), ("a", 1)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": p} for p in PROMPTS[:count]])
    write_jsonl(tmp_path / "c.jsonl", [{"id": "x", "prompt": PROMPTS[0]}, {}])
    out = tmp_path / "out.txt"
    assert generate(cli, out, "--input", tmp_path / "[ab].jsonl", "--input", tmp_path / "c.jsonl") == 3
    rows = rows_of(out)
    assert [row["id"] for row in rows] == ["a.jsonl:1", "b.jsonl:1", "b.jsonl:2", "x", "c.jsonl:2"]
    assert rows[4]["error"]["message"].startswith("c.jsonl:2: needs one of")
    assert (rows[4]["error"]["file"], rows[4]["error"]["line"]) == ("c.jsonl", 2)
    cli.fails(1, "generate", "--model", MODEL, "--input", tmp_path / "[xy].jsonl", saying=["[xy].jsonl: no such file"])


@pytest.mark.parametrize("order", ["input", "completion"])
def test_shards_together_are_the_whole(cli, tmp_path, order):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": row["prompt"]} for row in questions(7)])
    sampled = ("--input", source, "--temperature", 1.0, "--order", order)
    generate(cli, tmp_path / "whole.jsonl", *sampled)
    rows, sizes = [], []
    for number in (1, 2, 3):
        assert generate(cli, tmp_path / f"{number}.jsonl", *sampled, "--shard", f"{number}/3") == 0
        sizes.append(len(rows_of(tmp_path / f"{number}.jsonl")))
        rows += steady(tmp_path / f"{number}.jsonl")
    assert sizes == [Shard(n, 3).size(7) for n in (1, 2, 3)] == [3, 2, 2]
    whole = sorted(steady(tmp_path / "whole.jsonl"), key=lambda row: row["id"])
    assert sorted(rows, key=lambda row: row["id"]) == whole
    assert generate(cli, tmp_path / "none.jsonl", *sampled, "--shard", "9/9") == 0
    assert rows_of(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0", "-1/2"])
def test_shard_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="give I/N"):
        Shard.parse(text)


# ---- rows that are none
GOOD = json.dumps({"prompt": PROMPTS[0]}).encode()
KINDS: list[tuple[Any, str]] = [  # a line, or what it holds
    (b'{"prompt": "a"', "not JSON"),
    (b'{"prompt": "\xff"}', "not UTF-8"),
    (b'{"prompt": "a\x00b"}', "not JSON"),
    (b'{"prompt": "a\\u0000b"}', "NUL characters"),
    (b'{"messages": [{"role": "user", "content": "a\\u0000"}]}', "NUL characters"),
    ([1, 2], "not an object"),
    ({"prompt": 5}, '"prompt" is a int, not text'),
    ({"id": [1], "prompt": "a"}, '"id" is a list'),
    ({"id": 2, "prompt": "a"}, "the id 2 stands on line 2, too"),
    ({"text": "a"}, 'needs one of "prompt", "messages" and "prompt_ids" (found: text)'),
    ({"prompt": "a", "prompt_ids": [1]}, 'needs one of "prompt"'),
    ({"prompt": ""}, '"prompt" is empty'),
    ({"prompt_ids": [5] * 5000}, "no room for an answer"),
    ({"prompt_ids": [1, -1]}, "not a list of token ids"),
    ({"prompt_ids": [99999]}, "outside the model's vocabulary"),
    ({"messages": [{"role": "user"}]}, '"messages" is not a list'),
]
PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature is 'hot': it must be 0 (greedy) or more"),
    ({"top_p": 1.5}, "top_p is 1.5: it must be above 0 and at most 1"),
    ({"n": 0}, '"n" is 0, not a whole number above 0'),
    ({"stop": ["a", 3]}, "stop: got 3. Give text or a list of texts"),
    ({"logit_bias": {"x": 1}}, "logit_bias: 'x' is not a token id"),
    ({"max_new_tokens": 0}, "not a positive number"),
    ({"colour": 1}, 'unknown option "colour"'),
    ({"logprobs": -1}, '"logprobs" is -1, not a whole number'),
    ({"logprobs": True}, '"logprobs" is True, not a whole number'),
    ({"top_logprobs": 2}, 'unknown option "top_logprobs"'),
    ({"temperature": 1e-320}, "no token can be drawn: temperature, penalties or biases"),
    ({"temperature": 1, "repetition_penalty": 1e-300}, "no token can be drawn"),
    ({"temperature": 1, "frequency_penalty": -1e300}, "no token can be drawn"),
    ({"temperature": 1, "presence_penalty": 1e308}, "no token can be drawn"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias"),
    ({"stop_token_ids": [10**6]}, "outside the model's vocabulary"),
]
TOO_MUCH: dict[str, Any] = {
    "n": 100_000, "stop": ["x"] * 100_000, "stop_token_ids": [1] * 100_000, "bad_words_ids": [[1]] * 100_000,
    "logit_bias": dict.fromkeys(map(str, range(100_000)), 1), "logprobs": 1000, "regex": "a" * 300_000,
    "temperature": float("nan"), "top_p": float("inf"), "top_k": 10**30, "min_p": True, "seed": 1 << 64,
}  # fmt: skip
PARAMS += [({name: value}, name) for name, value in TOO_MUCH.items()]
KINDS += [({"prompt": "a", "params": params}, problem) for params, problem in PARAMS]
KINDS.append(({"id": "x" * 2000, "prompt": "a"}, '"id"'))


def test_every_kind_of_bad_row_gets_an_error_row_with_its_line_and_the_others_are_answered(cli, tmp_path):
    source = tmp_path / "in.jsonl"
    bad_lines = [kind if isinstance(kind, bytes) else json.dumps(kind).encode() for kind, _ in KINDS]
    source.write_bytes(b"\n" + GOOD + b"\n" + b"".join(bad + b"\n" + GOOD + b"\n" for bad in bad_lines))
    result = cli("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl", "--max-new-tokens", 3)
    assert result.code == 3
    assert f"{len(KINDS)} of {2 * len(KINDS) + 1} rows failed" in result.err
    assert "may succeed" not in result.err
    good, bad = rows_of(tmp_path / "out.jsonl")[::2], rows_of(tmp_path / "out.jsonl")[1::2]
    assert len({row["text"] for row in good}) == 1
    assert [row["id"] for row in good] == list(range(2, 2 * len(KINDS) + 3, 2))
    for line, row, (_, problem) in zip(range(3, 2 * len(KINDS) + 3, 2), bad, KINDS, strict=True):
        assert (row["finish_reason"], row["error"]["type"], row["error"]["line"]) == ("error", "invalid_row", line)
        assert row["error"]["message"].startswith(f"line {line}: ")
        assert problem in row["error"]["message"]
        assert len(row["error"]["message"]) < 300


BAD_ELEMENTS = {  # of a JSON array
    '"\\ud800"': "not text (half of a surrogate pair)",
    '"\udcff"': "not UTF-8 text",
    "[" * 10_000 + '"]"' + "]" * 10_000: "nested more than 128 levels deep",
    "[" * 200 + "]" * 200: "nested more than 128 levels deep",
    "1" * 5000: "a number of too many digits",
}


@pytest.mark.parametrize("field", ["prompt", "id", "note", "params"])
def test_bad_element_of_an_array_is_an_error_row_and_the_job_can_be_resumed(cli, tmp_path, field):
    bad = [f'{{"prompt": "a", "{field}": {value}}}' for value in BAD_ELEMENTS]
    bad.append('{"prompt": "a", "params": {"\\udfff": 1}}')
    source, out = tmp_path / "in.json", tmp_path / "out.jsonl"
    source.write_bytes(f'[{{"prompt": "b"}}, {", ".join(bad)}, {{"prompt": "c"}}]'.encode("utf-8", "surrogateescape"))
    assert generate(cli, out, "--input", source, "--keep-fields", "all", "--limit", 2) == 3
    assert generate(cli, out, "--input", source, "--keep-fields", "all", "--resume") == 3
    first, *rows, last = rows_of(out)
    assert "error" not in first
    assert "error" not in last
    expected = [*BAD_ELEMENTS.values(), BAD_ELEMENTS['"\\ud800"']]
    assert [row["error"]["message"] for row in rows] == [f"line {line}: {why}." for line, why in enumerate(expected, 2)]


def unreadable(kind: str) -> Any:
    """A column of two values that Python cannot hold."""
    if kind == "bytes that are not UTF-8":
        buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
        return pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    return pyarrow.array([1 << 40] * 2, pyarrow.timestamp("s", *(["Mars/Base"] if "zone" in kind else [])))


@pytest.mark.parametrize("kind", ["bytes that are not UTF-8", "years beyond 9999", "unknown time zone"])
def test_unreadable_values_of_parquet_matter_only_where_the_column_is_needed(cli, tmp_path, kind):
    source, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "note": unreadable(kind)}), source)
    assert generate(cli, out, "--input", source) == 0
    assert generate(cli, out, "--input", source, "--template", "{{ prompt }}", "--overwrite") == 0
    needs_it = ("--keep-fields", "note"), ("--keep-fields", "all"), ("--prompt-field", "note"), ("--template", "{{ note }}")
    for options in needs_it:
        assert generate(cli, out, "--input", source, "--overwrite", *options) == 3
        assert all('"note" ' in row["error"]["message"] for row in rows_of(out))
        assert {row["error"]["type"] for row in rows_of(out)} == {"invalid_row"}


def test_line_longer_than_memory_should_hold_is_an_error_row_and_the_next_is_read(cli, tmp_path):
    source = tmp_path / "in.jsonl"
    with source.open("wb") as file:
        file.write(b'{"prompt": "')
        for _ in range((LONGEST_LINE >> 20) + 1):
            file.write(b"a" * (1 << 20))
        file.write(b'"}\n' + GOOD + b"\n")
    assert generate(cli, tmp_path / "out.jsonl", "--input", source) == 3
    huge, good = rows_of(tmp_path / "out.jsonl")
    assert huge["error"]["message"] == "line 1: a line of more than 64 MiB."
    assert good["id"] == 2


@pytest.mark.deep
def test_packed_file_that_was_cut_short_ends_the_job_and_it_goes_on_with_the_whole_one(cli, tmp_path):
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    rows = [{"id": str(n), "prompt": PROMPTS[n % 200] + str(n) * 50} for n in range(60)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    packed = gzip.compress(text, 0)
    source.write_bytes(packed[: len(packed) // 2])
    job = ("generate", "--model", MODEL, "--input", source, "-o", out, "--max-new-tokens", 2, "--quiet")
    cli.fails(1, *job, saying=["in.jsonl.gz: cannot be read"])
    state = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert state["state"] == "failed"
    assert "cannot be read" in state["error"]
    source.write_bytes(packed)
    assert cli(*job, "--resume").code == 0
    assert [row["id"] for row in rows_of(out)] == [str(n) for n in range(60)]


# ---- Parquet out
def table_of(path: Path) -> list[dict[str, Any]]:
    """Rows of a Parquet file as JSON lines have them."""
    rows = pyarrow.parquet.read_table(io.BytesIO(path.read_bytes())).to_pylist(maps_as_pydicts="strict")
    return [_without_nulls(row) for row in rows]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_without_nulls, value)]
    return {name: _without_nulls(of) for name, of in value.items() if of is not None} if isinstance(value, dict) else value


def test_parquet_output_has_the_rows_of_jsonl(cli, tmp_path):
    rows = [*questions(3), {"id": "two", "prompt": PROMPTS[1], "params": {"n": 2, "temperature": 1.0}}]
    options = ("--input", write_jsonl(tmp_path / "in.jsonl", rows), "--token-ids", "--batch-size", 1, "--strategy", "off")
    assert generate(cli, tmp_path / "out.jsonl", *options) == 0
    assert generate(cli, tmp_path / "out.parquet", *options) == 0
    for lines, table in zip(rows_of(tmp_path / "out.jsonl"), table_of(tmp_path / "out.parquet"), strict=True):
        assert {**lines, "seconds": 0} == {**table, "seconds": 0}
    assert not (tmp_path / "out.parquet.partial.jsonl").exists()
    assert pyarrow.parquet.read_schema(tmp_path / "out.parquet").field("id").type == pyarrow.string()
    table, manifest = (tmp_path / "out.parquet").read_bytes(), tmp_path / "out.parquet.manifest.json"
    complete = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(complete | {"state": "running", "counts": {}}))  # killed before it could say so
    assert generate(cli, tmp_path / "out.parquet", *options, "--resume") == 0
    resumed = json.loads(manifest.read_text())
    assert (resumed["state"], resumed["counts"]["rows"]) == ("complete", complete["counts"]["rows"])
    assert generate(cli, tmp_path / "out.parquet", *options) == 2
    assert (tmp_path / "out.parquet").read_bytes() == table


def test_parquet_output_holds_errors_numbers_as_ids_and_openai_lines(cli, tmp_path):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    openai = write_jsonl(tmp_path / "openai.jsonl", [{"custom_id": "a", "body": body}, {"custom_id": "b", "body": {}}])
    assert generate(cli, tmp_path / "openai.parquet", "--input", openai) == 3
    answered, failed = table_of(tmp_path / "openai.parquet")
    assert answered["custom_id"] == "a"
    assert answered["response"]["body"]["usage"]["completion_tokens"] == 2
    assert failed["response"]["body"]["error"]["code"] == "invalid_row"
    large = write_jsonl(tmp_path / "large.jsonl", [{"id": 1 << 63, "prompt": PROMPTS[0]}, {"id": 1, "prompt": PROMPTS[0]}])
    assert generate(cli, tmp_path / "large.parquet", "--input", large) == 0
    assert [row["id"] for row in table_of(tmp_path / "large.parquet")] == [str(1 << 63), "1"]
    own = write_jsonl(tmp_path / "own.jsonl", [{"prompt": PROMPTS[0]}, {}])
    assert generate(cli, tmp_path / "own.parquet", "--input", own) == 3
    assert [row["id"] for row in table_of(tmp_path / "own.parquet")] == [1, 2]
    assert table_of(tmp_path / "own.parquet")[1]["error"]["line"] == 2


@pytest.mark.parametrize("ending", [".parquet", ".PARQUET", ".jsonl.gz", ".Zst"])
def test_job_in_pieces_gives_the_whole_file_that_its_ending_names(cli, tmp_path, ending):
    def rows_in(path):
        rows = table_of(path) if ending.lower() == ".parquet" else [row for _, row in json_rows(str(path))]
        return [{k: v for k, v in row.items() if k not in UNSTEADY} for row in rows]

    rows = list(questions(5))
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / f"out{ending}"
    generate(cli, out, "--input", source)
    magics = {".parquet": b"PAR1", ".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
    assert out.read_bytes().startswith(magics[out.suffix.lower()])
    whole = rows_in(out)
    # A kill leaves JSON lines beside it.
    generate(cli, tmp_path / "lines.jsonl", "--input", source)
    lines = (tmp_path / "lines.jsonl").read_bytes().splitlines(keepends=True)
    out.unlink()
    (tmp_path / f"out{ending}.journal").write_bytes((tmp_path / "lines.jsonl.journal").read_bytes())
    (tmp_path / f"out{ending}.partial.jsonl").write_bytes(b"".join(lines[:3]) + b'{"id')
    assert generate(cli, out, "--input", source) == 2
    assert generate(cli, out, "--input", source, "--resume") == 0
    assert rows_in(out) == whole
    write_jsonl(source, [*rows, {"prompt": "more"}])
    assert generate(cli, out, "--input", source, "--resume") == 2


# ---- odd names
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_job_whose_files_have_names_that_are_not_utf8_is_answered_and_resumed(cli, tmp_path, ending):
    folder = tmp_path / "folder\udcff"
    folder.mkdir()
    inputs = [write_jsonl(folder / f"{n}\udcfe.jsonl", [*questions(2), {}]) for n in range(2)]
    out = folder / f"out\udcfd.{ending}"
    trie, log, metrics = (folder / f"x\udcfc.{each}" for each in ("trie", "log", "prom"))
    job = ("--input", inputs[0], "--input", inputs[1], "--save-trie", trie, "--log-file", log, "--metrics", metrics, "--json")
    assert generate(cli, out, *job) == 3
    rows = rows_of(out) if ending == "jsonl" else table_of(out)
    assert [row["id"] for row in rows][2::3] == ["0\\udcfe.jsonl:3", "1\\udcfe.jsonl:3"]
    manifest = json.loads(Path(f"{out}.manifest.json").read_text("utf-8"))
    assert [each["path"] for each in manifest["inputs"]] == [*map(str, inputs)]
    assert generate(cli, out, *job, "--resume") == 3
    assert cli("report", out, "--json").json["rows"] == 6
    assert cli("report", out, "-o", folder / "page\udcfb.html").code == 0


@pytest.fixture
def piped():
    """piped(rows): the name of a pipe that holds them as JSON lines."""
    readers = []

    def pipe(rows):
        reader, writer = os.pipe()
        readers.append(reader)
        os.write(writer, "".join(json.dumps(row) + "\n" for row in rows).encode())
        os.close(writer)
        return f"/dev/fd/{reader}"

    yield pipe
    for reader in readers:
        os.close(reader)


def test_pipe_of_a_corpus_or_of_logged_answers_is_json_lines(cli, tmp_path, piped):
    rows = [{"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}] * 3
    assert cli("build-trie", piped(rows), "-o", tmp_path / "a.trie", "--vocab-size", 10).code == 0
    assert cli("replay", piped(rows), "--json").json["rows"] == 3
