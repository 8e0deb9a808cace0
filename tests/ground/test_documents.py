"""Kinds of files: CSV, JSON arrays, marks at their beginning, Markdown, HTML, folders, paragraphs."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from lookahead.corpus import tables
from lookahead.corpus.read import CorpusReport, expand, folder_sources, json_rows, read_documents, shares_of
from lookahead.corpus.tables import html_text, pieces_of
from lookahead.errors import CorpusError
from lookahead.job.inputs import input_rows
from lookahead.trie.file import Trie
from tests.support.cli import write_jsonl


def rows_in(name: Path) -> list[tuple[int, Any]]:
    return [(found.line, found.row) for found in input_rows(str(name))]


# ---- marks
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "jsonl.gz"])
def test_byte_order_mark_costs_no_row(tmp_path, kind):
    content = {"csv": "prompt\na\nb\n", "json": '[{"prompt": "a"}, {"prompt": "b"}]'}.get(
        kind, '{"prompt": "a"}\n{"prompt": "b"}\n'
    )
    data = b"\xef\xbb\xbf" + content.encode()
    (tmp_path / f"in.{kind}").write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    assert [row for _, row in rows_in(tmp_path / f"in.{kind}")] == [{"prompt": "a"}, {"prompt": "b"}]
    assert [row for _, row in json_rows(str(tmp_path / f"in.{kind}"))] == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "md"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_refused_by_name(tmp_path, tokenizer, kind, encoding):
    if encoding in ("utf-16-le", "utf-16-be") and kind in ("csv", "txt", "md"):
        return  # without a mark only JSON gives it away
    content = {"csv": "prompt\na\n", "json": '[{"prompt": "a"}]'}.get(kind, '{"prompt": "a"}\n')
    path = tmp_path / f"in.{kind}"
    path.write_bytes(content.encode(encoding))
    with pytest.raises(CorpusError, match=r"in\..*UTF-16.*iconv"):
        list(input_rows(str(path)) if kind not in ("txt", "md") else read_documents([str(path)], tokenizer, CorpusReport()))


def test_mark_of_a_corpus_that_is_read_in_shares_costs_and_repeats_nothing(tmp_path):
    lines = [{"ids": [n, n]} for n in range(200)]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    parts = [part for share in shares_of([str(path)], 500) for part in share]
    assert len(parts) > 3
    assert [row for part in parts for _, row in json_rows(part)] == lines


# ---- CSV and arrays
def test_rows_of_csv_know_their_lines(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes(b'prompt,id\n"a\nb",1\n\nshort\nc,\n"x"y,2\n\xff,3\nd,4\n"open,5\nlost\n')
    expected = [
        (2, {"prompt": "a\nb", "id": "1"}),
        (5, "has 1 columns, the header has 2"),
        (6, {"prompt": "c", "id": None}),
        (7, "not CSV"),
        (8, "not UTF-8 text"),
        (9, {"prompt": "d", "id": "4"}),
        (10, "not CSV (unexpected end of data)"),
    ]
    for (line, row), (at, what) in zip(rows_in(path), expected, strict=True):
        assert line == at
        assert row == what if isinstance(what, dict) else what in row


@pytest.mark.parametrize(
    ("content", "saying"),
    [("", "empty file"), ("a,a\n1,2\n", 'names the column "a" twice'), ("a,\n1,2\n", "a column without a name")],
)
def test_header_that_is_none_is_refused(tmp_path, content, saying):
    (tmp_path / "in.csv").write_text(content)
    with pytest.raises(CorpusError, match=saying):
        rows_in(tmp_path / "in.csv")


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_array_is_read_element_by_element_wherever_it_is_cut(tmp_path, monkeypatch, piece, indent):
    rows = [{"prompt": "é漢😀" * 9, "n": [1, {"a": "]"}]}, {"prompt": 'a"b\\'}, {}, 12, {"x": 1.5e3}]
    path = tmp_path / "in.json"
    path.write_text(" \n" + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    monkeypatch.setattr(tables, "PIECE", piece)
    found = rows_in(path)
    assert [number for number, _ in found] == [1, 2, 3, 4, 5]
    assert [row for _, row in found] == [*rows[:3], "a JSON int, not an object", rows[4]]


@pytest.mark.parametrize(
    "content", ['[{"a": 1}', '[{"a": 1} {"b": 2}]', '[{"a": 1}, x]', '[{"a": 1}, {"b"', "[" * 5000, '[{"a": 1},\xff']
)
def test_array_that_is_broken_is_refused_with_the_row_before(tmp_path, content):
    (tmp_path / "in.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CorpusError, match=r"in\.json: not (JSON|UTF-8 text) behind row"):
        rows_in(tmp_path / "in.json")


def test_json_file_may_hold_lines_an_array_or_one_object(tmp_path):
    row = {"prompt": "a", "params": {"n": 2}}
    for content in (json.dumps(row), json.dumps(row) + "\n" + json.dumps(row), json.dumps([row]), json.dumps(row, indent=2)):
        (tmp_path / "in.json").write_text(content)
        assert {json.dumps(found) for _, found in rows_in(tmp_path / "in.json")} == {json.dumps(row)}
    long = {"prompt": "x" * 200_000}
    (tmp_path / "in.json").write_text("\n" * 100_000 + json.dumps(long) + "\n" + json.dumps(row))
    assert [found for _, found in rows_in(tmp_path / "in.json")] == [long, row]
    (tmp_path / "in.json").write_text("{\n broken")
    with pytest.raises(CorpusError, match="neither a JSON array"):
        rows_in(tmp_path / "in.json")


def test_file_of_another_kind_is_refused_before_a_model_is_loaded(tmp_path):
    others = {"in.xlsx": b"PK\x03\x04", "in.yaml": b"- prompt: a\n", "in.txt": b"hello\n", "in.md": b"# hello\n"}
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CorpusError, match="unknown kind of file"):
            rows_in(tmp_path / name)
    for name in ("in.txt", "in", "in.jsonl.bak"):
        write_jsonl(tmp_path / name, [{"prompt": "a"}])
        assert rows_in(tmp_path / name) == [(1, {"prompt": "a"})]


# ---- text
def test_text_of_a_page_is_what_its_reader_sees():
    page = (
        "<!doctype html><html><head><title>T &amp; U</title><style>p {}</style><script>if (a < b) {}</script></head>"
        "<body><h1>Head</h1><p>One\n  <b>bold</b>, two.<br>Next<p>Three <ul><li>x<li>y</ul>"
        "<table><tr><td>a<td>b</table><pre>  code\n    more</pre><!-- no --><script>no()</script>End &eacute;"
    )
    text = html_text(page)
    expected = "T & U\n\nHead\n\nOne bold, two.\nNext\n\nThree\n\nx\ny\n\na b\n\n  code\n    more\n\nEnd é"
    assert [line.strip() for line in text.split("\n")] == [line.strip() for line in expected.split("\n")]
    assert "    more" in text
    assert html_text("") == ""
    assert html_text("plain < text") == "plain < text"
    assert html_text("<script>never closed") == ""


def test_paragraphs_of_text_and_of_markdown_with_code_kept_together():
    text = "one\ntwo\n\n \n\nthree\n\n```py\na\n\nb\n```\n\nfour"
    assert [*pieces_of(io.StringIO(text), ".md", "paragraphs")] == ["one\ntwo", "three", "```py\na\n\nb\n```", "four"]
    assert [*pieces_of(io.StringIO(text), ".txt", "paragraphs")] == ["one\ntwo", "three", "```py\na", "b\n```", "four"]
    assert [*pieces_of(io.StringIO(text), ".md", "file")] == [text]
    assert [*pieces_of(io.StringIO("<p>a<p>b"), ".html", "paragraphs")] == ["a", "b"]


def test_folder_is_read_with_all_its_files_as_one_source(cli, tmp_path, tokenizer_folder):
    docs = tmp_path / "docs"
    (docs / "sub" / ".git").mkdir(parents=True)
    (docs / "b.md").write_text("the cat\n\nthe dog")
    (docs / "a.txt").write_text("the mat")
    (docs / "sub" / "c.html").write_text("<p>the log</p><script>x</script>")
    (docs / "sub" / "d.json").write_text(json.dumps([{"text": "cat"}, {"text": "dog"}]))
    (docs / "sub" / "e.csv").write_text("text\nsat on\n")
    (docs / "empty.md").touch()
    (docs / "picture.png").write_bytes(b"\x89PNG")
    (docs / "sub" / ".git" / "f.txt").write_text("hidden")
    names = [Path(name).relative_to(docs).as_posix() for name in expand([str(docs)])]
    assert names == ["a.txt", "b.md", "empty.md", "sub/c.html", "sub/d.json", "sub/e.csv"]
    assert {*folder_sources([str(docs), str(docs / "a.txt")]).values()} == {"docs"}
    job = ("build-trie", docs, "-o", tmp_path / "docs.trie", "--tokenizer", tokenizer_folder, "--json")
    value = cli(*job).json
    assert (value["documents"], value["bad_rows"]) == (6, 1)
    assert [source["name"] for source in value["sources"]] == ["docs"]
    value = cli(*job, "--split", "paragraphs", "--overwrite").json
    assert value["documents"] == 7
    Trie(tmp_path / "docs.trie").verify()
    cli.fails(2, *job, "--split", "words", saying=["--split words: choose file or paragraphs"])
    (tmp_path / "none").mkdir()
    cli.fails(
        1, "build-trie", tmp_path / "none", "-o", tmp_path / "x.trie", "--vocab-size", 5, saying=["no files in this folder"]
    )


def test_text_files_that_are_none_among_others_are_problems(tmp_path, tokenizer):
    report, names = CorpusReport(), [str(tmp_path / name) for name in ("a.md", "b.md", "c.txt")]
    for name, data in zip(names, (b"", b"the cat", b"a\0b"), strict=True):
        Path(name).write_bytes(data)
    assert len(list(read_documents(names, tokenizer, report))) == 1
    assert [problem.rpartition("/")[2] for problem in report.problems] == ["a.md: empty file.", "c.txt: binary file, not text."]
