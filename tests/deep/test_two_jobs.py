"""Two jobs that start at the same time: with one output, one of them writes it; with one trie, both add to it."""

import os
import random
import time
from pathlib import Path

import pytest

from lookahead.trie.file import Trie
from tests.support.cli import write_jsonl
from tests.support.jobs import job_process, questions, rows_of
from tests.support.processes import Program

ROUNDS, ROWS = int(os.environ.get("ROUNDS", 12)), 8
BUSY = "another process is writing it"


def job(source: Path, out: Path, *options: object) -> Program:
    return job_process("--input", source, "-o", out, "--max-new-tokens", 6, "--quiet", *options)


@pytest.mark.parametrize("option", ["", "--resume", "--overwrite"])
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_of_two_jobs_with_one_output_one_writes_all_its_rows(tmp_path, option, name):
    """The other one ends with one line, or finds what the first has written."""
    sources = [write_jsonl(tmp_path / f"{number}.jsonl", questions(ROWS + number)) for number in range(2)]
    draw = random.Random(f"{option} {name}")
    busy = 0
    for round_ in range(ROUNDS):
        out = tmp_path / str(round_) / name
        out.parent.mkdir()
        jobs = []
        for source in sources:
            jobs.append(job(source, out, *([option] if option else [])))
            time.sleep(draw.choice([0, 0, draw.uniform(0, 0.2), draw.uniform(0, 2)]))
        errors = [ended(each) for each in jobs]
        codes = [each.returncode for each in jobs]
        refused = [error for error in errors if BUSY in error]
        busy += len(refused)
        if refused:
            assert sorted(codes) == [0, 1]
            assert len(refused) == 1
            assert all(error.count("\n") == 0 for error in refused)
        elif option:  # one after the other: the second one has its own say
            assert codes[0] == 0 or codes[1] == 0
        else:
            assert sorted(codes) == [0, 2]
        found = _ids(out)
        assert found in [[f"q{number}" for number in range(ROWS + more)] for more in range(2)]
        if refused:
            assert len(found) == ROWS + codes.index(0)
    print(f"{name} {option}: {busy} of {ROUNDS} times one was refused beside the other")
    assert busy > ROUNDS // 4


def test_two_jobs_that_save_one_trie_lose_no_answer(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", questions(ROWS))
    trie = tmp_path / "learned.trie"
    saved = 0
    for round_ in range(ROUNDS):
        if round_ % 3 == 0:
            trie.unlink(missing_ok=True)  # made by one of them
            saved = 0
        jobs = [job(source, tmp_path / f"{round_}-{number}.jsonl", "--save-trie", trie) for number in range(2)]
        errors = [ended(each) for each in jobs]
        assert [each.returncode for each in jobs] == [0, 0], errors
        saved += 2 * ROWS
        opened = Trie(trie)
        opened.verify()
        assert sum(each.documents for each in opened.header.sources) == saved


def ended(job: Program) -> str:
    """What it has written on stderr."""
    with job:
        return job.communicate()[1].strip()


def _ids(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).column("id").to_pylist()
    return [row["id"] for row in rows_of(path)]
