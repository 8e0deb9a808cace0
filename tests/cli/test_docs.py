"""Every command has help with an example, and a page of docs/ shows it; its blocks are executed in tests/docs."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lookahead
from lookahead_cli.app import app, program
from tests.support.depth import deep

COMMANDS = [command.name for command in app.registered_commands]
ROOT = Path(__file__).parents[2]
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "cli.md"]  # which is made of the help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_runnable_example_and_explains_every_option(cli, command):
    result = cli(command, "--help")
    assert result.code == 0
    end = " ".join(result.out.split("╰")[-1].split())  # behind the panels
    assert f"Example: lookahead {command}" in end
    for parameter in program().commands[command].params:
        assert parameter.help, f"{command}: {parameter.name} has no help"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_documents_the_command(command):
    assert any(f"lookahead {command}" in page.read_text("utf-8") for page in PAGES)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("gen", ["generate"]),
        ("bench --rep", ["--repeat", "--replay", "--report"]),
        ("bench --strategy auto,", ["auto,hierarchical", "auto,parallel", "auto,single"]),
        ("replay --cost-profile llama-7b-a", ["llama-7b-a100"]),
        *deep(
            [("generate --strategy p", ["parallel"]), ("calibrate --estimate h", ["h200", "h100"]), ("prune", ["prune-trie"])]
        ),
    ],
)
def test_shells_complete_commands_options_and_names(line, wanted):
    words = f"lookahead {line}"
    shell = {"_LOOKAHEAD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [sys.executable, "-c", "from lookahead_cli.app import main; main()"]
    done = subprocess.run(command, env={**os.environ, **shell}, capture_output=True, text=True, timeout=300)
    assert (sorted(done.stdout.split()), done.stderr) == (sorted(wanted), "")


@pytest.mark.parametrize("command", ["bench", *deep(["", "generate", "replay"])])
def test_help_imports_nothing_heavy(command):
    code = (
        f"import sys; from lookahead_cli.app import run; run({[*command.split(), '--help']}); "
        "heavy = {'torch', 'transformers', 'numba', 'numpy', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_python_names_of_the_docstring_exist_and_import_alone_is_light():
    assert all(callable(getattr(lookahead, name)) for name in lookahead.__all__)
    code = "import sys, lookahead; assert not {'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_python_examples_of_the_docstring_run(tmp_path, monkeypatch, capsys):
    blocks = [block for block in (lookahead.__doc__ or "").split("\n\n") if block.startswith("    ")]
    examples = textwrap.dedent("\n".join(blocks))
    assert examples.count("engine.stream(") == 1
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    monkeypatch.chdir(tmp_path)
    held = {}
    exec(examples, held)
    assert "engine" in held
    assert all(result.error is None for result in held["results"])
    assert len(capsys.readouterr().out) > 100
