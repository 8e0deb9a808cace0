"""Fenced blocks of README and docs/: found, and executed. In: Markdown. Out: blocks, and what their commands print.

A block that no test can execute has a comment before it, `<!-- test: REASON -->`; REASONS lists the reasons, each with a text
that such a block contains.
"""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

from lookahead_cli.options import with_address
from tests.support.cli import Cli

ROOT = Path(__file__).parents[2]
# A short job may have one, may differ in its digits, and may not need that of the job with its loading.
SPEEDUP = re.compile(r", (?:[\d.]+ to )?(?:[\d.]+x plain|speedup not measured: too short)(?: \([\d.]+x with loading\))?")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXECUTED = ("console", "bash", "python")
SHOWN = ("json", "text", "yaml")  # data and drawings
REASONS = {
    "install": "pip install",
    "hub model": "org/model",
    "Ray cluster": "--ray",
    "torchrun": "torchrun",
    "vLLM": "vllm",
    "SGLang": "sglang",
    "TRL": "trl",
    "lm-eval": "lookahead.harness",
    "GPU": "cuda",
    "minutes": "bench",
    "rewrites a sample": "-o samples/",
}
FENCE = re.compile(
    r"(?:^<!-- test: (?P<reason>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block. reason: why it cannot be executed, or None; line: of its first line in the page, from 1."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """(command line, lines of output shown for it). A bash block has one command line in each line and shows no output."""
        joined = self.text.replace("\\\n", " ")
        if self.language == "bash":
            return [(" ".join(line.split("  #")[0].split()), []) for line in joined.splitlines() if line]
        found: list[tuple[str, list[str]]] = []
        for line in joined.splitlines():
            if line.startswith("$ "):
                found.append((" ".join(line[2:].split()), []))
            elif found:
                found[-1][1].append(line)
        return found


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page.name, text.count("\n", 0, found.start("text")) + 1, found["language"], found["text"], found["reason"])
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def calls_of(command_line: str) -> list[list[str]]:
    """Arguments of each call of lookahead in a command line."""
    parts = [shlex.split(part) for part in re.split(r"&&|\|", command_line) if "lookahead" in part]
    starts = [words for words in parts if "lookahead" in words and words[0] not in ("pip", "python")]
    return [with_address(words[words.index("lookahead") + 1 :]) for words in starts]


def execute(page: str, cli: Cli, python: bool = True, console: bool = True) -> dict[str, Any]:
    """Execute the blocks of a page, in order, in the current folder; returns what its Python has defined."""
    defined: dict[str, Any] = {}
    for block in BLOCKS:
        if block.page != page or block.reason:
            continue
        if block.language == "python" and python:
            exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), defined)
        elif block.language in ("console", "bash") and console:
            for command_line, shown in block.commands:
                check_command(block, cli, command_line, shown)
    return defined


def check_command(block: Block, cli: Cli, command_line: str, shown: list[str]) -> None:
    """It must end well and print each line that is shown, numbers aside."""
    words = shlex.split(command_line)
    assert words[0] == "lookahead", f"{block}: {command_line}: cannot be executed; give the reason before the block"
    result = cli(*words[1:])
    assert result.code == 0, f"{block}: {command_line}\n{result.err}"
    check_files(command_line)
    printed = {without_numbers(line) for line in (result.out + result.err).splitlines()}
    for line in shown:
        wanted = without_numbers(line)
        assert wanted in printed | {"", "..."}, f"{block}: {command_line} does not print {line!r}\n{result.out}{result.err}"


def check_files(command_line: str) -> None:
    """The figure that a command names must be there, and not an empty one."""
    words = shlex.split(command_line)
    if "--plot" in words:
        assert Path(words[words.index("--plot") + 1]).stat().st_size > 10_000


def without_numbers(line: str) -> str:
    """A line whose numbers, rules, spaces and order of words do not count. Which sources gave some depends on the clock."""
    line = "accepted by" if line.startswith(" accepted by") else SPEEDUP.sub(", x plain", line)
    return " ".join(sorted(re.sub(r"[\d.,]*\d[\d.,]*", "#", line).replace(",", "").replace("─", "").split()))
