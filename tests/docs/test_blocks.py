"""Every block of README and docs/ is executed, or its page gives the reason why not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from lookahead.trie.file import Trie
from lookahead_cli.app import program
from tests.docs import reference
from tests.docs.blocks import BLOCKS, EXECUTED, PAGES, REASONS, ROOT, SHOWN, calls_of, execute

ORDINARY = {"tutorial.md", "transformers.md", "trie-format.md"}  # the others take longer, some of them minutes
EXECUTABLE = sorted({block.page for block in BLOCKS if block.language in EXECUTED and not block.reason})


def test_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 8192


def test_every_block_is_executed_or_has_a_reason():
    for block in BLOCKS:
        assert block.language in EXECUTED + SHOWN, f"{block}: give the language of the block, such as console"
        if block.reason:
            assert block.language in EXECUTED, f"{block}: a {block.language} block is not executed and needs no reason"
            assert REASONS[block.reason] in block.text, f"{block}: the reason is {block.reason}, but what needs it is not there"
    fences = sum(page.read_text("utf-8").count("\n```") for page in PAGES)
    assert fences == 2 * len(BLOCKS)


def test_every_command_has_only_options_that_exist():
    """Of pages, and of the examples that --help shows."""
    lines = [(str(block), line) for block in BLOCKS if block.language in EXECUTED[:2] for line, _ in block.commands]
    for name, command in program().commands.items():
        lines += [(f"{name} --help", line) for line in command.epilog.splitlines()]
    calls = [(where, call) for where, line in lines for call in calls_of(line)]
    assert len(calls) > 60
    for where, (name, *arguments) in calls:
        command = program().commands[name]
        try:
            _, others, _ = command.make_parser(typer.Context(command)).parse_args(list(arguments))
        except typer.BadParameter.__mro__[1] as error:  # UsageError
            pytest.fail(f"{where}: lookahead {name}: {error}")
        assert others == [], f"{where}: lookahead {name} does not take {' '.join(others)}"


def test_every_json_block_is_json():
    for block in BLOCKS:
        if block.language == "json":
            for line in [block.text] if block.text.startswith("{\n") else block.text.splitlines():
                json.loads(line)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in ORDINARY else pytest.mark.deep) for page in EXECUTABLE]
)
def test_page_can_be_executed(cli, folder, page):
    if page == "README.md":
        (folder / "answers.trie").unlink()
        (folder / "out.jsonl").unlink()
    defined = execute(page, cli)
    also = CHECKS.get(page)
    if also:
        also(defined)


def check_python(defined: dict[str, Any]) -> None:
    assert all(result.error is None for result in defined["results"])
    assert defined["report"].state == "complete"


def check_reader(defined: dict[str, Any]) -> None:
    """The reader of the page finds what the library finds, in a trie of two segments, and refuses one that is damaged."""
    from lookahead_cli.app import run

    assert run(["build-trie", "samples/logged.jsonl", "--append", "answers.trie"]) == 0
    theirs, ours = defined["Reader"]("answers.trie"), Trie("answers.trie")
    documents = [ids for segment in theirs.segments for ids in segment.documents()]
    assert len(theirs.segments) == 2
    assert len(documents) == ours.header.documents
    assert sum(map(len, documents)) == ours.header.tokens
    for ids in documents[:: len(documents) // 20]:
        for context in (ids[:1], ids[3:5], ids[-9:]):
            wanted = {token: match.count for token, match in ours.children(ours.match(context))}
            assert dict(theirs.following(context)) == wanted
            assert wanted or context == ids[-9:]
    content = bytearray(Path("answers.trie").read_bytes())
    content[100] ^= 1
    Path("damaged.trie").write_bytes(content)
    with pytest.raises(ValueError, match="tokens is damaged"):
        defined["Reader"]("damaged.trie")


CHECKS = {"python.md": check_python, "trie-format.md": check_reader}


def test_reference_of_commands_is_current():
    """Else: python -m tests.docs.reference"""
    assert reference.PAGE.read_text("utf-8") == reference.page()


def test_links_of_readme_lead_somewhere():
    """Those of pages are checked by `mkdocs build --strict`."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", (ROOT / "README.md").read_text("utf-8"))
    assert len(links) > 20
    for path, anchor in links:
        text = (ROOT / path).read_text("utf-8")
        headings = [
            re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
            for line in re.findall("^#.*$", text, re.MULTILINE)
        ]
        assert not anchor or anchor in headings, f"{path} has no heading #{anchor}"


def test_pages_can_be_found():
    """From README and from the site's navigation."""
    readme = (ROOT / "README.md").read_text("utf-8")
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in readme or page.name in ("index.md", "architectures.md"), (
            f"README has no link to {page.name}"
        )
        assert f": {page.name}\n" in (ROOT / "mkdocs.yml").read_text("utf-8")
