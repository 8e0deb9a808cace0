"""Running one command line in this process, as the installed command does."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lookahead_cli.app import run


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """cli("inspect-trie", path) -> Result."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys

    def __call__(self, *arguments: object) -> Result:
        self.capsys.readouterr()
        code = run([str(a) for a in arguments])
        captured = self.capsys.readouterr()
        return Result(code, captured.out, captured.err)

    def fails(self, code: int, *arguments: object, saying: Iterable[str]) -> str:
        """The command must fail with `code`, print nothing on stdout and one error line that holds each text; returns it."""
        result = self(*arguments)
        lines = [line for line in result.err.splitlines() if line]
        assert result.code == code, result.err
        assert result.out == ""
        assert len(lines) == 1, result.err
        assert lines[0].startswith("error: ")
        for text in saying:
            assert text in lines[0]
        return lines[0]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
