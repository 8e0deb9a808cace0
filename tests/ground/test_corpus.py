"""Corpus files to token documents: formats, row forms, and what is said of rows that cannot be used."""

import gzip
import io
import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from lookahead.corpus.read import TEXT_PIECE, CorpusReport, expand, read_documents
from lookahead.errors import CorpusError

ROWS = [{"text": "the cat sat on the mat"}, {"text": "the dog"}]
EOS = 0  # of the tiny tokenizer


def json_lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def read(path, tokenizer=None, **options):
    """(documents, report) of one file."""
    report = CorpusReport()
    documents = list(read_documents(expand([str(path)]), tokenizer, report, **options))
    return documents, report


def written(tmp_path, data, name="c.jsonl"):
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


def ids_of(documents):
    return [list(document.token_ids) for document in documents]


def texts(documents, tokenizer):
    return [tokenizer.decode(document.token_ids) for document in documents]


def rows_read(tmp_path, tokenizer, *rows, **options):
    """(texts of the documents, report) of a JSON-lines file of these rows."""
    path = written(tmp_path, json_lines(*rows), "rows.jsonl")
    documents, report = read(path, tokenizer, **options)
    return texts(documents, tokenizer), report


PACKED = [("gz", gzip.compress), ("zst", zstd)]
JSON_LINES = json_lines(*ROWS)
TEXT = "the cat\nsat ä\n".encode()
OF_ROWS, OF_TEXT = ["the cat sat on the mat<eos>", "the dog<eos>"], ["the cat\nsat ä\n"]  # text does not end as an answer does


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        *((f"c.{ending}", JSON_LINES, OF_ROWS) for ending in ("jsonl", "json", "ndjson")),
        *((f"c.jsonl.{ending}", pack(JSON_LINES), OF_ROWS) for ending, pack in PACKED),
        *((f"two.jsonl.{ending}", b"".join(pack(json_lines(row)) for row in ROWS), OF_ROWS) for ending, pack in PACKED),
        ("-", JSON_LINES, OF_ROWS),
        ("c.txt", TEXT, OF_TEXT),
        *((f"c.txt.{ending}", pack(TEXT), OF_TEXT) for ending, pack in PACKED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_and_text_are_read_whatever_they_are_packed_in(tmp_path, tokenizer, monkeypatch, name, data, expected):
    if name == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    documents, report = read(name if name == "-" else written(tmp_path, data, name), tokenizer)
    assert texts(documents, tokenizer) == expected
    assert {d.source for d in documents} == {"stdin" if name == "-" else name}
    assert (report.rows, report.bad, report.problems) == (len(expected), 0, [])


def test_very_large_text_file_is_cut_at_line_ends(tmp_path):
    path = tmp_path / "large.txt"
    line = "x" * 1000 + "\n"
    path.write_text(line * (2 * TEXT_PIECE // len(line)))

    def by_bytes(texts, **options):
        return {"input_ids": [list(text.encode()) for text in texts]}

    documents, report = read(path, by_bytes)
    assert report.rows == len(documents) == 2
    assert all(d.token_ids[-1] == ord("\n") for d in documents)
    assert b"".join(bytes(ids) for ids in ids_of(documents)) == path.read_bytes()


def test_parquet_rows_are_read_with_their_numbers_and_only_columns_that_are_needed(tmp_path, tokenizer):
    path, years = tmp_path / "c.parquet", pyarrow.array([1 << 40] * 3, pyarrow.timestamp("s"))  # that Python cannot hold
    table = pyarrow.table({"text": ["the cat", None, "the dog"], "n": [1, 2, 3], "at": years, "body": ["on", "on", "on"]})
    pyarrow.parquet.write_table(table.drop_columns("at"), path)
    documents, report = read(path, tokenizer)
    assert texts(documents, tokenizer) == ["the cat<eos>", "the dog<eos>"]
    assert report.problems == [f'{path}:2: no "text" field (found: body, n, text). Use --text-field NAME.']
    pyarrow.parquet.write_table(table, path)
    assert texts(read(path, tokenizer, text_field="body")[0], tokenizer) == ["on<eos>"] * 3
    pyarrow.parquet.write_table(pyarrow.table({"ids": [[1, 2], [3]]}), path)
    documents, _ = read(path, source="faq")
    assert [(list(document.token_ids), document.source) for document in documents] == [([1, 2], "faq"), ([3], "faq")]


def test_blank_lines_are_skipped_but_counted_as_lines(tmp_path):
    path = written(tmp_path, b'\n{"ids": [1]}\n \n{"id": 2}\n')
    documents, report = read(path)
    assert ids_of(documents) == [[1]]
    assert report.problems == [f'{path}:4: no "text" field (found: id). Use --text-field NAME.']


def test_answer_keeps_the_last_four_tokens_of_its_prompt(tmp_path, tokenizer):
    path = written(tmp_path, json_lines({"prompt": "the cat sat on the mat", "response": " and the dog"}))
    documents, _ = read(path, tokenizer)
    prompt, answer = (tokenizer(t)["input_ids"] for t in ("the cat sat on the mat", " and the dog"))
    assert list(documents[0].token_ids) == [*prompt[-4:], *answer, EOS]


REFUSED_TURN = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    "row",
    [
        *({"id": 7, field: "the cat"} for field in ("text", "response", "output", "completion", "answer")),
        {"answer": "the dog", "text": None, "response": "the cat"},  # the first usual name that is not null counts
        {"prompt": "the dog", "text": "the cat"},  # plain text keeps nothing of a prompt next to it
        {"text": "the cat<eos>"},  # the end is not doubled
        {"messages": [REFUSED_TURN, {"role": "assistant", "content": "the cat"}]},  # the chat template refuses the first turn
    ],
)
def test_text_of_a_row_is_found(tmp_path, tokenizer, row):
    found, report = rows_read(tmp_path, tokenizer, row)
    assert (found, report.bad) == (["the cat<eos>"], 0)


def test_text_field_names_the_column_and_no_other_is_taken(tmp_path, tokenizer):
    rows = {"text": "the cat", "body": "the dog"}, {"text": "the cat"}, {"ids": [1], "body": "on"}
    found, report = rows_read(tmp_path, tokenizer, *rows, text_field="body")
    assert found == ["the dog<eos>", "on<eos>"]
    assert report.problems == [f'{tmp_path}/rows.jsonl:2: no "body" field (found: text). Use --text-field NAME.']


def test_each_assistant_turn_is_a_document_after_the_turns_before_it(tmp_path, tokenizer):
    turns = [("user", "the cat"), ("assistant", "sat"), ("user", "on"), ("assistant", "the mat")]
    path = written(tmp_path, json_lines({"messages": [{"role": role, "content": text} for role, text in turns]}))
    documents, report = read(path, tokenizer)
    prompts = "user: the cat\nassistant:", "user: the cat\nassistant: sat\nuser: on\nassistant:"
    pairs = [[tokenizer(text)["input_ids"] for text in pair] for pair in zip(prompts, ("sat", "the mat"), strict=True)]
    assert ids_of(documents) == [[*prompt[-4:], *answer, EOS] for prompt, answer in pairs]
    assert report.rows == 1


def test_chat_template_that_writes_the_time_gives_the_same_documents_at_any_time(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }} {{ strftime_now('%Y %f') }}")
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    found = [rows_read(tmp_path, tokenizer, {"messages": messages})[0] for _ in range(2)]
    assert found[0] == found[1]


def test_ids_are_taken_as_they_are(tmp_path, tokenizer):
    rows = {"ids": [5, 6]}, {"response_ids": [7, 8], "prompt_ids": [1, 2, 3, 4, 5]}, {"response_ids": [9]}
    documents, _ = read(written(tmp_path, json_lines(*rows)), tokenizer)
    assert ids_of(documents) == [[5, 6], [2, 3, 4, 5, 7, 8], [9]]


def test_text_without_a_tokenizer_is_refused(tmp_path):
    path = written(tmp_path, json_lines(*ROWS))
    with pytest.raises(CorpusError, match="name its tokenizer with --tokenizer"):
        read(path)


BAD_LINES = [
    (b'{"id": 1, "body": "x"}', 'no "text" field (found: body, id). Use --text-field NAME.'),
    (b"{}", 'no "text" field (found: nothing). Remove the row.'),
    (b'{"text": 5}', '"text" is a int, not text.'),
    (b'{"text": ""}', '"text" is empty.'),
    (b"[1, 2]", "a JSON list, not an object."),
    (b"null", "a JSON NoneType, not an object."),
    (b'{"text": "cut', "not JSON (Unterminated string starting at: line 1 column 10 (char 9))."),
    (b'{"text": "\xff"}', "not UTF-8 text."),
    (b'{"text": "\\ud83d"}', "not text (half of a surrogate pair)."),
    (b'{"ids": "x"}', '"ids" is not a list of token ids.'),
    (b'{"ids": [1, true]}', '"ids" is not a list of token ids.'),
    (b'{"ids": [1, -1]}', '"ids" is not a list of token ids.'),
    (b'{"ids": [2147483648]}', '"ids" holds token id 2147483648, outside the vocabulary of 2147483648.'),
    (b'{"ids": []}', '"ids" is empty.'),
    (b'{"response_ids": [1], "prompt_ids": [1.5]}', '"prompt_ids" is not a list of token ids.'),
    (b"[" * 100_000, "nested more than 128 levels deep."),
    (b'{"messages": "x"}', '"messages" is not a list of {"role", "content"} with text.'),
    (b'{"messages": [{"role": "user"}]}', '"messages" is not a list of {"role", "content"} with text.'),
    (b'{"messages": [{"role": "user", "content": "x"}]}', '"messages" has no assistant turn with text.'),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES, ids=lambda value: str(value)[:30])
def test_bad_row_is_counted_with_its_file_and_line_and_the_rest_is_read_unless_strict(tmp_path, tokenizer, line, problem):
    path = written(tmp_path, b'{"text": "the cat"}\n' + line + b'\n{"text": "the dog"}\n')
    documents, report = read(path, tokenizer)
    assert texts(documents, tokenizer) == ["the cat<eos>", "the dog<eos>"]
    assert (report.rows, report.bad, report.problems) == (2, 1, [f"{path}:2: {problem}"])
    with pytest.raises(CorpusError) as refused:
        read(path, tokenizer, strict=True)
    assert str(refused.value) == f"{path}:2: {problem}"


@pytest.mark.parametrize("row", [{"ids": [1, 10]}, {"response_ids": [1], "prompt_ids": [10]}])
def test_row_with_an_id_outside_the_vocabulary_is_left_out_with_its_line(tmp_path, row):
    path = written(tmp_path, json_lines({"ids": [9]}, row))
    documents, report = read(path, vocab_size=10)
    assert [list(d.token_ids) for d in documents] == [[9]]
    assert report.problems[0].startswith(f"{path}:2: ")
    assert report.problems[0].endswith("holds token id 10, outside the vocabulary of 10.")


def test_all_bad_rows_are_counted_and_the_first_ten_listed(tmp_path):
    path = written(tmp_path, b"x\n" * 25 + b'{"ids": [1]}\n')
    documents, report = read(path)
    assert len(documents) == 1
    assert report.bad == 25
    assert [problem.split(": ")[0] for problem in report.problems] == [f"{path}:{n}" for n in range(1, 11)]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("c.txt", b"ab\0cd", "binary file, not text"),
        ("c.txt", b"ab\xffcd", r"not UTF-8 text \(byte 2\)"),
        ("c.txt", b"", "empty file"),
        ("c.parquet", b"no parquet", "not a readable Parquet file"),
        ("c.parquet", b"", "not a readable Parquet file"),
        ("c.jsonl.gz", b"no gzip", "cannot be read"),
        ("c.jsonl.gz", gzip.compress(json_lines(*ROWS * 99), mtime=0)[:-20], "cannot be read"),
        ("c.jsonl.gz", gzip.compress(json_lines(*ROWS * 99), mtime=0)[:30] + b"\xff" * 30, "cannot be read"),
        ("c.jsonl.zst", b"no zstd", "cannot be read"),
        ("c.jsonl.zst", zstd(json_lines(*ROWS * 99))[:-5], "cannot be read .Truncated"),
        ("c.txt.zst", zstd(b"the cat" * 99)[:-5], "cannot be read .Truncated"),
    ],
)
def test_file_that_cannot_be_read_to_its_end_is_refused_by_name(tmp_path, tokenizer, name, data, message):
    path = written(tmp_path, data, name)
    with pytest.raises(CorpusError, match=message) as refused:
        read(path, tokenizer)
    assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize("data", [b"", b"\n\n"])
def test_file_without_rows_is_a_problem_of_its_own(tmp_path, data):
    path = written(tmp_path, data)
    documents, report = read(path)
    assert (documents, report.problems) == ([], [f"{path}: no rows in this file."])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "missing.jsonl: no such file"),
        ("*.nothing", "nothing: no such file"),
        ("empty", "empty: no files in this folder that can be read"),
        ("c.xlsx", "c.xlsx: unknown kind of file"),
        ("c.pdf.gz", "c.pdf.gz: unknown kind of file"),
    ],
)
def test_paths_that_name_no_corpus_are_refused(tmp_path, name, message):
    for made in ("c.xlsx", "c.pdf.gz"):
        (tmp_path / made).write_text("a,b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=message):
        expand([str(tmp_path / name)])


def test_globs_are_expanded_in_order_and_each_file_is_read_once(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "[c].jsonl"):
        (tmp_path / name).write_bytes(json_lines({"ids": [1]}))
    names = [f"{tmp_path}/{name}" for name in ("[c].jsonl", "a.jsonl", "b.jsonl")]
    assert expand([names[0], f"{tmp_path}/*.jsonl", names[2]]) == names
