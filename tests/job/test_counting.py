"""How many rows a job has: of Parquet and packed files too, without holding the job up."""

import gzip
import threading
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lookahead.job import inputs
from lookahead.job.inputs import RowCount, count_rows, input_rows

ODD = b'{"prompt": "a"}\n\n  \t\n' + b'{"prompt": "' + b"x" * 70 + b'"}\r\n\r\n{"bad"\n   {"prompt": "last"}'


def files(folder: Path, rows: int) -> dict[str, str]:
    """The same rows in each kind of file."""
    text = b"".join(b'{"prompt": "%d"}\n' % n for n in range(rows))
    made = {kind: str(folder / f"in{kind}") for kind in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".json")}
    for kind in (".jsonl", ".json"):
        Path(made[kind]).write_bytes(text)
    Path(made[".jsonl.gz"]).write_bytes(gzip.compress(text))
    with pyarrow.CompressedOutputStream(made[".jsonl.zst"], "zstd") as file:
        file.write(text)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [str(n) for n in range(rows)]}), made[".parquet"])
    return made


def test_every_kind_of_file_is_counted(tmp_path):
    made = files(tmp_path, 1000)
    assert {kind: count_rows([name]) for kind, name in made.items()} == dict.fromkeys(made, 1000)
    assert count_rows(list(made.values())) == 5000
    assert count_rows(["-"]) is None
    assert count_rows([made[".jsonl"], "-"]) is None


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_rows_are_those_that_are_read_wherever_blocks_end(tmp_path, monkeypatch, block):
    monkeypatch.setattr(inputs, "BLOCK", block)
    path = tmp_path / "odd.jsonl"
    for text in (ODD, ODD + b"\n", b"", b"\n\n", ODD + b"\n   "):
        path.write_bytes(text)
        assert count_rows([str(path)]) == sum(1 for _ in input_rows(str(path)))


def test_counting_neither_holds_up_nor_outlives_the_job(tmp_path, monkeypatch):
    """A disk that is held up until the job has ended."""
    hold = threading.Event()
    monkeypatch.setattr(inputs, "AT_ONCE", 0.01)
    monkeypatch.setattr(inputs.time, "sleep", lambda seconds: hold.wait(60))
    with RowCount([files(tmp_path, 10)[".jsonl"]]) as counted:
        thread = next(each for each in threading.enumerate() if each.name == "row count")
        assert counted.rows is None
    hold.set()
    thread.join(60)
    assert not thread.is_alive()


def test_cut_or_missing_files_are_left_to_the_job_to_report(tmp_path):
    made = files(tmp_path, 1000)
    Path(made[".jsonl.gz"]).write_bytes(Path(made[".jsonl.gz"]).read_bytes()[:50])
    Path(made[".parquet"]).write_bytes(b"no parquet")
    for name in (made[".jsonl.gz"], made[".parquet"], str(tmp_path / "no.jsonl"), str(tmp_path)):
        with RowCount([name]) as counted:
            pass
        assert counted.rows is None
