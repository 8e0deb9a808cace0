"""Folders in which pages are executed."""

import json
import shutil

import pytest

from tests.docs.blocks import ROOT
from tests.support.cli import write_jsonl


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """What pages expect: answers.trie and out.jsonl."""
    from lookahead_cli.app import run

    folder = tmp_path_factory.mktemp("docs")
    trie = ["-o", str(folder / "answers.trie"), "--tokenizer", str(ROOT / "samples" / "demo-model")]
    assert run(["build-trie", str(ROOT / "samples" / "corpus.jsonl"), *trie]) == 0
    rows = [json.loads(line) for line in (ROOT / "samples" / "logged.jsonl").read_text("utf-8").splitlines()]
    without = ("prompt", "token_ids")  # what generate writes without --echo and --token-ids
    write_jsonl(folder / "out.jsonl", [{k: v for k, v in row.items() if k not in without} for row in rows])
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """The current folder of a page: with samples/, answers.trie and out.jsonl."""
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    for name in ("answers.trie", "out.jsonl"):
        shutil.copy(made / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
