"""stdout and stderr that are not UTF-8, no arguments, `python -m`, completion in shells."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lookahead.printable import json_text
from lookahead_cli.app import run
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, PROMPTS, installed_command

ENCODINGS = ("ascii", "latin-1", "cp1252")


@pytest.fixture(params=ENCODINGS)
def called(request, monkeypatch):
    """called(arguments...) -> (exit code, stdout, stderr) where both are streams of another encoding than UTF-8."""

    def call(*arguments):
        streams = [io.TextIOWrapper(io.BytesIO(), request.param, errors) for errors in ("strict", "backslashreplace")]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        code = run([str(a) for a in arguments])
        for stream in streams:
            stream.flush()
        return code, *(stream.buffer.getvalue() for stream in streams)

    call.encoding = request.param
    return call


@pytest.fixture
def trie(tmp_path):
    corpus = write_jsonl(tmp_path / "漢ü.jsonl", [{"text": "Über 漢字 und ✓ Zeichen"}, {"text": "Über 漢字 oder 漢字"}, {}])
    out = tmp_path / "漢.trie"
    assert run(["build-trie", str(corpus), "-o", str(out), "--tokenizer", str(MODEL)]) == 0
    return out


def test_tables_trees_and_notices_come_out_in_any_encoding(called, trie, capsys):
    code, out, err = called("inspect-trie", trie, "--query", "Über 漢字")
    assert (code, err) == (0, b"")
    out.decode(called.encoding)
    assert rb"\u6f22.trie" in out
    assert b"|" in out  # the tree's lines, in ASCII
    code, out, err = called("build-trie", trie.with_name("漢ü.jsonl"), "-o", trie, "--tokenizer", MODEL)
    assert code == 0
    assert rb"\u6f22" in out
    assert rb"\u6f22" in err  # the row that has no text


def test_json_on_stdout_is_valid_utf8_whatever_the_stream_is(called, trie, tmp_path):
    code, out, _ = called("inspect-trie", trie, "--json")
    assert code == 0
    assert json.loads(out.decode("utf-8"))["trie"] == str(trie)
    prompts = write_jsonl(tmp_path / "ü.jsonl", [{"prompt": PROMPTS[0], "id": "漢ü"}])
    code, out, _ = called("generate", "--model", MODEL, "--input", prompts, "--max-new-tokens", 3, "--strategy", "off")
    assert code == 0
    (row,) = out.decode("utf-8").splitlines()
    assert json.loads(row)["id"] == "漢ü"
    code, out, _ = called("generate", "--model", "漢", "--input", "ü", "--print-config")
    assert code == 0
    assert b"input" in out


def test_help_and_errors_come_out_in_any_encoding(called, tmp_path):
    code, out, _ = called("generate", "--help")
    assert code == 0
    assert b"+-" in out or b"Options" in out
    code, _, err = called("inspect-trie", tmp_path / "漢.trie")
    assert code == 1
    assert err.startswith(b"error: ")
    assert rb"\u6f22.trie" in err


def test_json_text_is_readable_where_it_can_be_and_valid_everywhere():
    assert json_text({"a": "ü漢"}) == '{"a": "ü漢"}'
    assert json_text({"a": "ü漢"}, "latin-1") == json_text({"a": "ü漢"}, None) == '{"a": "\\u00fc\\u6f22"}'
    assert json_text("\udcff", "utf-8") == '"\\udcff"'


def test_no_arguments_show_the_help_and_no_error(capsys):
    for arguments in ([], ["build-trie"]):
        assert run(arguments) == 2
        captured = capsys.readouterr()
        assert "Usage: lookahead" in captured.out + captured.err
        assert "error" not in captured.err


def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", "lookahead_cli", *arguments], {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_package_runs_as_a_command_and_as_a_module():
    for ran in (installed_command("--version"), script("--version")):
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.startswith("lookahead ")


def test_completion_is_installed_where_the_shell_reads_it(tmp_path):
    installed = script("--install-completion", "bash", HOME=str(tmp_path))
    assert installed.returncode == 0, installed.stderr
    (sourced,) = [word.strip("'\"") for word in (tmp_path / ".bashrc").read_text().split() if "lookahead" in word]
    shown = script("--show-completion", "bash")
    assert "_LOOKAHEAD_COMPLETE=complete_bash" in shown.stdout
    assert "_LOOKAHEAD_COMPLETE=complete_bash" in Path(sourced).read_text()
    if bash := shutil.which("bash"):
        (tmp_path / "lookahead").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lookahead_cli "$@"\n')
        (tmp_path / "lookahead").chmod(0o755)
        asked = f'. "{sourced}"; COMP_WORDS=(lookahead insp); COMP_CWORD=1; _lookahead_completion lookahead; echo "$COMPREPLY"'
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run([bash, "-c", asked], capture_output=True, text=True, env={**os.environ, "PATH": path}, timeout=60)
        assert done.stdout.strip() == "inspect-trie", done.stderr


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_that_wait_sleep_early_unless_the_user_decides_otherwise(given, expected):
    code = "import os, sys; sys.argv = ['lookahead', '--version']\nfrom lookahead_cli.app import main\n"
    code += "try: main()\nexcept SystemExit: print(os.environ.get('GOMP_SPINCOUNT'))"
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    found = subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == str(expected)
