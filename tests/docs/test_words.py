"""README, docs/, --help, messages, docstrings and comments are plain technical English: the words that papers, PyTorch,
transformers and vLLM use.
"""

import io
import re
import tokenize
from pathlib import Path

import pytest

import lookahead
import lookahead_cli
from lookahead_cli.app import program
from tests.docs.blocks import PAGES

# What is avoided: what to write instead.
WORDS = {
    r"tak(?:es?|en|ing) in\b|\bfed\b|unscored|pieces? of prompts?": "prefill, prefill chunk",
    r"says?|said|told|untold": "emit, print, report, notify",
    r"almost said": "runner-up tokens",
    r"(?<!in[ -])places?|in place of": "index, row, position, occurrence; instead of",
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
    r"guess(?:es|ed|ing)?": "draft, drafted; draft tokens",
    r"in (?:any|what) company": "next to any other tokens",
}
# The same of names, by their words. Fields of files are as they were when these were written.
IN_NAMES = {
    *("told", "said", "say", "says", "place", "places", "fed", "guess", "guesses", "beside", "company", "anew"),
    *("reckon", "dear", "wary", "whatever", "likeliest", "commonest"),
}
FIELDS = {"place", "per_said"}
BANNED = re.compile("|".join(rf"\b(?:{words})\b" for words in WORDS), re.IGNORECASE)


def without_code(text: str) -> str:
    """Text without fenced blocks and without names in backticks."""
    return re.sub(r"`[^`]*`", "`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


# Names in a docstring that are no words of its text: parameters that it describes, `told, said: ...`.
LABELS = re.compile(
    r"^[ \t]*(?:\"\"\")?(?:\w+(?:\[\d\])?, )*\w+(?:\(.*?\))?:(?= )|(?<=[.;,] )(?:\w+, )*\w+:(?= )", re.MULTILINE
)
COLUMNS = re.compile(r"^[ \t]+\w+(?=  +)|^[ \t]*\"\"\".*\n[ \t]*\w+(?=\()|\b\w+\.py\b", re.MULTILINE)  # ... told  what; a file
FILES = sorted(path for package in (lookahead, lookahead_cli) for path in Path(package.__file__).parent.rglob("*.py"))


def written_in(source: str) -> list[str]:
    """Comments, docstrings and messages of some Python source, without code in braces and names of parameters."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    texts = [token.string for token in tokens if token.type in kinds and " " in token.string]
    return [LABELS.sub("", COLUMNS.sub("", re.sub(r"\{[^{}]*\}", "", text))) for text in texts]


def names_in(source: str) -> set[str]:
    """Names of some Python source that hold a word that is avoided."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME} - FIELDS
    return {name for name in names if IN_NAMES & {word.lower() for word in re.split(r"_|(?<=[a-z])(?=[A-Z])", name)}}


def found_in(text: str) -> list[str]:
    """Each avoided expression with some of the text around it."""
    text = " ".join(without_code(text).split())
    return [text[max(0, each.start() - 40) : each.end() + 30] for each in BANNED.finditer(text)]


def test_pages_help_messages_docstrings_and_comments_use_the_words_of_the_field():
    texts = [(page.name, page.read_text(encoding="utf-8")) for page in PAGES]
    for name, command in (("lookahead", program()), *program().commands.items()):
        texts += [(f"{name} --help", text or "") for text in (command.help, command.epilog)]
        texts += [(f"{name} --help", getattr(each, "help", None) or "") for each in command.params]
    texts += [(str(file), text) for file in FILES for text in written_in(file.read_text(encoding="utf-8"))]
    assert [f"{name}: {found}" for name, text in texts for found in found_in(text)] == []


@pytest.mark.parametrize(
    "text", ["which goes on", "what the model almost said", "at that place", "a row is no list", "It is said to be dear."]
)
def test_avoided_words_are_found(text):
    assert found_in(text)


@pytest.mark.parametrize(
    "source",
    [
        '"""What the row may say."""',
        "x = 1  # as wary as before",
        "raise E(f'{path}: is no file, {told}')",
        '"""Rows.\n\n    told: what it said.\n    """',
    ],
)
def test_avoided_words_in_source_are_found(source):
    assert [found for text in written_in(source) for found in found_in(text)]


def test_names_use_the_words_of_the_field():
    assert {file.name: names for file in FILES if (names := names_in(file.read_text(encoding="utf-8")) - {"_in_place"})} == {}
    assert names_in("def first_said(toldYou): place") == {"first_said", "toldYou"}


def test_parameters_of_a_docstring_are_not_looked_at():
    source = '"""Rows.\n\n    said, told: tokens. places: int64 [rows]. See sorted_text.py.\n    """\nplace = said  # `told`\n'
    assert not [found for text in written_in(source) for found in found_in(text)]


def test_names_and_code_are_not_looked_at():
    assert found_in("A `place` in\n```text\nwhat it said\n```\nis known.") == []
