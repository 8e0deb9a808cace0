"""Labels of a job's metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lookahead.errors import UsageError
from lookahead.job.progress import JobTotals, labels_of, metrics_text
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL, questions

SAMPLE = re.compile(r'lookahead_[a-z_]+\{[a-z_]+="(?:[^"\\\n]|\\["\\n])*"(?:,[a-z_]+="(?:[^"\\\n]|\\["\\n])*")*\} -?[0-9.e+-]+')


def samples(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_two_jobs_in_one_folder_have_no_sample_in_common(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, found = write_jsonl(tmp_path / "in.jsonl", questions(2)), []
    for name in ("a", "b"):
        job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / f"{name}.jsonl", "--max-new-tokens", 4)
        ran = Cli(capsys)(*job, "--metrics", tmp_path / f"{name}.prom", "--metrics-label", 'team=a "b"\\c', "--quiet")
        assert ran.code == 0, ran.err
        text = (tmp_path / f"{name}.prom").read_text()
        for line in samples(text):
            assert SAMPLE.fullmatch(line)
            assert f'job="{tmp_path}/{name}.jsonl",model="{MODEL}",team="a \\"b\\"\\\\c"' in line
        found.append({line.rsplit(" ", 1)[0] for line in samples(text)})
        found.append({line for line in text.splitlines() if line.startswith("# ") and "speedup" not in line})
    assert not found[0] & found[2]
    assert found[1] == found[3]  # help and types are the same in both


def test_labels_are_checked_and_those_given_win() -> None:
    assert labels_of(["job=nightly", "a=b=c"], "out", "m") == {"job": "nightly", "model": "m", "a": "b=c"}
    for pairs in (["a"], ["=b"], ["1a=b"], ["__a=b"], ["a-b=c"], ["ä=b"], ["a\n=b"], ["source=x"], ["a=1", "a=2"]):
        with pytest.raises(UsageError, match="--metrics-label"):
            labels_of(pairs, "out", "m")


def test_any_text_can_be_a_label() -> None:
    totals = JobTotals()
    totals.accepted_by_source["trie:\udcff\n"] = 1
    text = metrics_text(totals, {}, {"job": 'a"\n\\', "model": "\udcff"})
    assert text.encode()
    assert all(SAMPLE.fullmatch(line) for line in samples(text))
    assert sum('source="trie:?\\n"' in line for line in samples(text)) == 1


def test_labels_without_metrics_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = ("generate", "--model", MODEL, "--input", "in.jsonl", "-o", tmp_path / "out.jsonl")
    Cli(capsys).fails(2, *job, "--metrics-label", "a=b", saying=["--metrics-label", "--metrics FILE"])
