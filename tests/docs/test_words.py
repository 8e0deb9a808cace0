"""README, docs/ and --help are plain technical English: the words that papers, PyTorch, transformers and vLLM use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lookahead_cli
from lookahead_cli.app import program
from tests.docs.blocks import PAGES

# What is avoided: what to write instead.
WORDS = {
    r"tak(?:es?|en|ing) in\b|\bfed\b|unscored|pieces? of prompts?": "prefill, prefill chunk",
    r"says?|said|told|untold": "emit, print, report, notify",
    r"almost said": "runner-up tokens",
    r"places?": "index, row, position, occurrence; instead of",
    r"go(?:es)? on|begins? anew|anew": "resume, continue, restart",
    r"of late": "recently",
    r"so many|so often": "that many, that often",
    r"beside": "next to, alongside, in addition to",
    r"as well as it may|for ever": "(delete), always",
    r"dear|shun(?:ned)?|wary": "expensive, avoided, cautious",
    r"hangs? on": "depends on",
    r"(?<!there )(?:is|are|was|were) no": "is not a",
    r"rests|awake": "backoff, active",
    r"(?:must|have to) be something|that (?:is|are) not here": "constrained output, other hardware",
    r"whatever": "any, regardless of",
    r"likeliest|commonest": "most likely, most frequent",
    r"reckon(?:s|ed)?": "handle, count",
    r"counts? for (?:two|as)": "counts as",
    r"lets? go": "release",
}
BANNED = re.compile("|".join(rf"\b(?:{words})\b" for words in WORDS), re.IGNORECASE)
DESCRIBED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def without_code(text: str) -> str:
    """Text without fenced blocks and without names in backticks."""
    return re.sub(r"`[^`]*`", "`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def found_in(text: str) -> list[str]:
    """Each avoided expression with some of the text around it."""
    text = " ".join(without_code(text).split())
    return [text[max(0, each.start() - 40) : each.end() + 30] for each in BANNED.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_uses_the_words_of_the_field(page) -> None:
    assert found_in(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("command", [None, *program().commands])
def test_help_uses_the_words_of_the_field(command: str | None) -> None:
    described = program() if command is None else program().commands[command]
    texts = [described.help, described.epilog, *(getattr(each, "help", None) for each in described.params)]
    assert [each for text in texts if text for each in found_in(text)] == []


@pytest.mark.parametrize("file", sorted(Path(lookahead_cli.__file__).parent.glob("*.py")), ids=lambda file: file.name)
def test_messages_of_commands_use_the_words_of_the_field(file: Path) -> None:
    """Of texts in a command's code those with a space, docstrings aside."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    texts = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    described = {ast.get_docstring(each, clean=False) for each in ast.walk(tree) if isinstance(each, DESCRIBED)}
    assert [found for text in texts if " " in text and text not in described for found in found_in(text)] == []


@pytest.mark.parametrize(
    "text", ["which goes on", "what the model almost said", "at that place", "a row is no list", "It is said to be dear."]
)
def test_avoided_words_are_found(text: str) -> None:
    assert found_in(text)


def test_names_and_code_are_not_looked_at() -> None:
    assert found_in("A `place` in\n```text\nwhat it said\n```\nis known.") == []
