"""Names and texts from outside, in what people see: never taken for markup, and without effect on a terminal."""

import json
import re
import sys
import unicodedata

import pytest
from rich.text import Text

from lookahead.printable import in_one_line, printable
from lookahead_cli import render
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, PROMPTS

CROSSED = "[red]x[/blue]"  # markup that rich refuses
EFFECTS = "\x1b[31m\x07\r\u202e\x9b :boom:"
SHOWN = r"\x1b[31m\x07\r\u202e\x9b :boom:"
LINES = re.compile(r"[^\x20-\x7e\n ├└│─✓→…•─’]")  # anything but text and our own drawing


@pytest.fixture
def corpus(tmp_path):
    """A file of ids whose path, as a whole and in part, looks like markup."""
    (tmp_path / "[").mkdir()
    return write_jsonl(tmp_path / "[" / "a].jsonl", [{"ids": [1, 2, 3, n]} for n in range(4, 9)])


@pytest.fixture
def trie(cli, corpus, tmp_path):
    path = tmp_path / f"{CROSSED.replace('/', ' ')}{EFFECTS}.trie"
    source = f"{CROSSED}{EFFECTS}"
    assert cli("build-trie", corpus, "-o", path, "--vocab-size", 20, "--source", source).code == 0
    return path


def without_effects(text: str) -> str:
    assert not LINES.findall(text)
    return text


def shown_by(cli, *arguments: object) -> tuple[str, str]:
    """(stdout, stderr) of a command, neither of which has an effect on a terminal."""
    result = cli(*arguments)
    assert result.code == 0, result.err
    return without_effects(result.out), without_effects(result.err)


def test_trie_with_a_hostile_name_and_source_is_built_inspected_pruned_and_merged(cli, corpus, trie, tmp_path):
    held_out = write_jsonl(tmp_path / "[bold]held[:out].jsonl", [{"ids": [1, 2, 3, 5, 1, 2, 3]}])
    plot = tmp_path / "[red].png"
    asked = ("--query", "1 2 3", "--top", 5, "--coverage", held_out, "--verify", "--plot", plot)
    out, err = shown_by(cli, "inspect-trie", trie, *asked)
    assert f"{CROSSED}{SHOWN}" in out
    assert "[red].png" in err
    assert "[bold]held[:out].jsonl" in out
    pruned = ("prune-trie", trie, "-o", tmp_path / "[:p].trie", "--max-tokens", 9, "--coverage", held_out)
    assert SHOWN in "".join(shown_by(cli, *pruned))
    merged = cli("merge-tries", trie, trie, "-o", tmp_path / f"[bold]{EFFECTS}.trie")
    assert merged.code in (0, 2), merged.err
    assert SHOWN in without_effects(merged.out + merged.err)
    out, _ = shown_by(cli, "build-trie", corpus, "-o", tmp_path / "[:b].trie", "--vocab-size", 20)
    assert "[:b].trie" in out
    assert "a].jsonl" in out


def test_rows_and_problems_of_a_file_with_a_hostile_name_are_listed(cli, tmp_path):
    corpus = write_jsonl(tmp_path / f"{EFFECTS} [red].jsonl", [{"ids": [1, 2, 3]}, {f"no {EFFECTS}": 1}])
    _, err = shown_by(cli, "build-trie", corpus, "-o", tmp_path / "a.trie", "--vocab-size", 20)
    assert f"{SHOWN} [red].jsonl:2" in err
    error = cli.fails(1, "build-trie", tmp_path / f"{EFFECTS}\n.jsonl", "-o", "a.trie", "--vocab-size", 20, saying=[SHOWN])
    assert without_effects(error).endswith(".jsonl: no such file.")
    assert "\\n.jsonl" in error


def test_generate_bench_and_replay_with_hostile_names_and_prompts(cli, corpus, trie, tmp_path):
    prompts = write_jsonl(tmp_path / "[" / "p].jsonl", [{"prompt": f"{CROSSED} {EFFECTS} {PROMPTS[0]}", "id": CROSSED}])
    text = write_jsonl(tmp_path / f"[red]{EFFECTS}.jsonl", [{"text": f"{CROSSED} {PROMPTS[0]}"}])
    of_text = tmp_path / f"[t]{EFFECTS}.trie"
    assert cli("build-trie", text, "-o", of_text, "--tokenizer", MODEL, "--source", CROSSED).code == 0
    out, common = tmp_path / "[" / "out].jsonl", ("--model", MODEL, "--input", prompts, "--trie", of_text)
    shown_by(cli, "generate", *common, "-o", out, "--max-new-tokens", 6, "--explain", 1)
    assert json.loads(out.read_text())["id"] == CROSSED
    lengths = ("--strategy", "single", "--decoding-length", 4)
    shown_by(cli, "bench", *common, "--no-peers", "--max-new-tokens", 4, *lengths)
    rows = [{"prompt_ids": [1, 2], "response_ids": [3, 4, 1, 2, 3, 4]}]
    pairs, other = (write_jsonl(tmp_path / name, rows) for name in (f"[red]{EFFECTS}.pairs", "[/b].pairs"))
    replayed = ("bench", "--replay", pairs, "--replay", other, "--trie", trie, *lengths, "--explain", 1)
    assert SHOWN in shown_by(cli, *replayed)[0].replace("\n", "")
    assert f"trie:{CROSSED.replace('/', ' ')}{SHOWN}" in shown_by(cli, "replay", pairs, "--trie", trie, *lengths)[0]


def test_every_help_text_is_shown_as_it_stands(monkeypatch):
    import typer

    from lookahead_cli.app import app, program

    plain = typer.main.get_command(app)
    for name, command in program().commands.items():
        for shown, written in zip(command.params, plain.commands[name].params, strict=True):
            if shown.help:
                assert Text.from_markup(shown.help, emoji=False).plain == written.help


def test_console_prints_strings_cells_and_names_of_columns_as_they_are(capsys):
    text = f"{CROSSED} :warning: [link=x]"
    render.out.print(text)
    render.err.print(text)
    render.notice(text)
    render.table(text, [text, "n"], [[text, 1]])
    render.summary([(text, text)])
    render.facts([(text, text)])
    captured = capsys.readouterr()
    assert captured.out.count(text) == 6
    assert captured.err.count(text) == 4


def test_characters_with_effects_are_escaped_and_others_are_not():
    assert printable("tab\t, bell\a, ü, 漢\n") == "tab\\t, bell\\x07, ü, 漢\n"
    assert in_one_line("a\nb\u2028c\udcff") == "a\\nb\\u2028c\\udcff"
    assert printable("ü漢", "latin-1") == "ü\\u6f22"
    assert printable("ü", "no-such-encoding") == "ü"
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    left = [character for character in printable(every) if not character.isprintable() and character not in "\n"]
    assert not {"Cc", "Cs", "Zl", "Zp"} & {unicodedata.category(character) for character in left}
