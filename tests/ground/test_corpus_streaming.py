"""Reading a corpus as it streams: several batches at once, how far it is, and what is not tokenized."""

import gzip

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.corpus import read as corpus
from lookahead.corpus.read import CorpusReport, expand, read_documents
from lookahead.errors import CorpusError
from tests.ground.test_corpus import EOS, ROWS, ids_of, json_lines, read, texts, zstd
from tests.support.depth import deep


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_batches_of_ids_and_of_text_come_in_order_however_many_are_tokenized_at_once(tmp_path, tokenizer, monkeypatch, workers):
    monkeypatch.setattr(corpus, "BATCH", 3)
    kinds = [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]  # 1: a row of ids
    rows = [{"ids": [n]} if kind else {"text": f"the {n} cat" * (n % 5 + 1)} for n, kind in enumerate(kinds)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(*rows))
    (tmp_path / "b.jsonl").write_bytes(json_lines({"bad": 1}, *rows[::-1]))
    report = CorpusReport()
    documents = list(read_documents(expand([f"{tmp_path}/*.jsonl"]), tokenizer, report, workers=workers))
    expected = [row["ids"] if "ids" in row else [*tokenizer(row["text"])["input_ids"], EOS] for row in rows]
    assert ids_of(documents) == expected + expected[::-1]
    assert [d.source for d in documents] == ["a.jsonl"] * len(rows) + ["b.jsonl"] * len(rows)
    assert (report.rows, report.bad) == (2 * len(rows), 1)


@pytest.mark.parametrize("workers", [1, 3])
def test_bad_row_in_a_strict_job_is_its_error_however_many_are_tokenized_at_once(tmp_path, tokenizer, monkeypatch, workers):
    monkeypatch.setattr(corpus, "BATCH", 1)
    (tmp_path / "c.jsonl").write_bytes(json_lines(*ROWS * 3) + b"cut\n")
    found = []
    with pytest.raises(CorpusError, match=r"c\.jsonl:7: not JSON"):
        found.extend(read_documents([str(tmp_path / "c.jsonl")], tokenizer, CorpusReport(), strict=True, workers=workers))
    assert texts(found, tokenizer) == (["the cat sat on the mat<eos>", "the dog<eos>"] * 3)[: len(found)]


def test_reader_that_stops_early_leaves_no_work_behind(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH", 1)
    (tmp_path / "c.jsonl").write_bytes(json_lines(*ROWS * 50))
    report = CorpusReport()
    documents = read_documents([str(tmp_path / "c.jsonl")], tokenizer, report, workers=3)
    assert texts([next(documents)], tokenizer) == ["the cat sat on the mat<eos>"]
    documents.close()
    assert report.rows < 10


def parquet(_: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"ids": [[n % 7] * (n % 5 + 1) for n in range(5000)]}), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("c.jsonl", bytes),
        ("c.jsonl.gz", gzip.compress),
        ("c.txt.zst", zstd),
        ("c.parquet", parquet),
        *deep([("c.jsonl.zst", zstd), ("c.txt", bytes), ("c.txt.gz", gzip.compress)]),
    ],
)
def test_bytes_read_grow_to_the_size_of_the_file(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(b"".join(json_lines({"text": f"the cat {n * n % 1013} sat"}) for n in range(30_000))))
    report, seen = CorpusReport(), []
    for _ in read_documents([str(path)], lambda texts, **_: {"input_ids": [[1]] * len(texts)}, report):
        seen.append(report.bytes)
    assert seen == sorted(seen)
    assert 0 < seen[0] <= seen[-1] <= report.bytes == path.stat().st_size == corpus.size_of([str(path)])
    assert seen[0] < seen[-1] or name not in ("c.jsonl", "c.parquet")
    assert corpus.size_of([str(path), "-"]) is None  # that of stdin is not known


def without_the_cut(path, tokenizer, monkeypatch):
    """The same documents with prompts tokenized whole."""
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "PROMPT_TAIL", 1 << 30)
        return ids_of(read(path, tokenizer)[0])


WORDS = st.lists(
    st.sampled_from(["the", "cat", "sat", "on", "mat,", "dog.", "Ä", "12 345", "x" * 30, "\n", "  "]), min_size=150
)


@given(st.lists(WORDS, min_size=1, max_size=3), st.integers(0, 20))
def test_long_prompt_keeps_the_tokens_it_would_keep_if_it_were_tokenized_whole(tmp_path_factory, tokenizer, prompts, offset):
    path = tmp_path_factory.getbasetemp() / "prompts.jsonl"
    rows = [{"prompt": ("y" * offset + " ".join(words)), "response": " the dog"} for words in prompts]
    assert all(len(row["prompt"]) > corpus.PROMPT_TAIL for row in rows)
    path.write_bytes(json_lines(*rows))
    found = ids_of(read(path, tokenizer)[0])
    assert found == without_the_cut(path, tokenizer, pytest.MonkeyPatch())
    assert all(ids[:4] == tokenizer(row["prompt"])["input_ids"][-4:] for ids, row in zip(found, rows, strict=True))


def test_long_conversation_keeps_the_tokens_before_the_answer_too(tmp_path, tokenizer, monkeypatch):
    turns = [{"role": role, "content": f"the cat {n} " * 40} for n in range(4) for role in ("user", "assistant")]
    path = tmp_path / "c.jsonl"
    path.write_bytes(json_lines({"messages": turns}))
    found = ids_of(read(path, tokenizer)[0])
    assert len(found) == 4
    assert found == without_the_cut(path, tokenizer, monkeypatch)
