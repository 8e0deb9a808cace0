"""A package that only some uses need is missed in one line, before any work is done."""

import subprocess
import sys

import pytest

from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL

SAMPLES = MODEL.parent


@pytest.mark.parametrize(
    ("package", "extra", "line"),
    [
        ("matplotlib", "plot", ["bench", "--model", MODEL, "--input", SAMPLES / "prompts.jsonl", "--plot", "a.png"]),
        ("matplotlib", "plot", ["bench", "--model", MODEL, "--input", SAMPLES / "prompts.jsonl", "--report", "a.html"]),
        ("matplotlib", "plot", ["report", "rows.jsonl", "-o", "a.html"]),
        ("pyarrow", "parquet", ["generate", "--model", MODEL, "--input", "rows.jsonl", "-o", "a.parquet"]),
        ("pyarrow", "parquet", ["generate", "--model", MODEL, "--input", "rows.parquet", "-o", "a.jsonl"]),
        ("pyarrow", "parquet", ["build-trie", "rows.jsonl.zst", "-o", "a.trie", "--tokenizer", MODEL]),
        ("llguidance", "constraints", ["generate", "--model", MODEL, "--input", "rows.jsonl", "-o", "a.jsonl", "--regex", "a"]),
    ],
    ids=lambda value: " ".join(map(str, value[:1] + value[-2:])) if isinstance(value, list) else value,
)
def test_missing_package_is_named_with_its_extra(cli, tmp_path, monkeypatch, package, extra, line):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    for name in ("rows.parquet", "rows.jsonl.zst"):
        (tmp_path / name).write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    cli.fails(2, *line, saying=[package, f"pip install 'lookahead[{extra}]'"])
    assert not any(tmp_path.glob("a.*"))


def test_row_that_needs_a_missing_package_is_an_error_row(cli, tmp_path, monkeypatch):
    rows = [{"prompt": "a", "params": {"regex": "b"}}, {"prompt": "a"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    out = tmp_path / "a.jsonl"
    assert cli("generate", "--model", MODEL, "--input", tmp_path / "rows.jsonl", "-o", out, "--max-new-tokens", 3).code == 3
    first, second = out.read_text("utf-8").splitlines()
    assert "pip install 'lookahead[constraints]'" in first
    assert '"error"' not in second


@pytest.mark.deep
def test_bench_and_jobs_import_none_of_them(tmp_path):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('matplotlib', 'pyarrow', 'llguidance'))); "
        "from lookahead_cli.app import run; "
        f"bench = ['bench', '--model', {str(MODEL)!r}, '--input', {str(SAMPLES / 'prompts.jsonl')!r}, '--rows', '1', "
        "'--max-new-tokens', '4', '--strategy', 'auto', '--no-peers']; "
        f"job = ['generate', '--model', {str(MODEL)!r}, '--input', {str(SAMPLES / 'prompts.jsonl')!r}, '--limit', '1', "
        f"'--max-new-tokens', '4', '-o', {str(tmp_path / 'out.jsonl')!r}]; "
        "sys.exit(run(bench) or run(job) or run(['report', job[-1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
