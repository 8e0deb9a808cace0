"""kill -9 at any moment leaves the old file or the new one, and the next run leaves no temporary."""

import random
import shutil
import signal
import time

import pytest

from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie.build import append_trie, build_trie
from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_tries
from lookahead.trie.prune import prune_trie
from lookahead.trie.segment import BuildResources
from tests.support.depth import deep
from tests.support.processes import Program

IDENTITY = TokenizerIdentity(1000)

# Says when it begins, so that the kill falls into the work and not into the imports.
CHILD = """
import sys
from pathlib import Path
from tests.trie.test_killed import COMMANDS
folder = Path(sys.argv[2])
print("ready", flush=True)
COMMANDS[sys.argv[1]](folder)
"""


def documents(seed: int) -> list[TokenDocument]:
    draw = random.Random(seed)
    return [TokenDocument([draw.randrange(1000) for _ in range(200)], "a") for _ in range(1000)]


COMMANDS = {
    "build": lambda folder: build_trie(documents(1), folder / "target.trie", IDENTITY, resources=BuildResources(workers=2)),
    "build, rare branches left out": lambda folder: build_trie(documents(1), folder / "target.trie", IDENTITY, min_count=2),
    "append": lambda folder: append_trie(documents(2), folder / "target.trie", IDENTITY),
    "merge": lambda folder: merge_tries([folder / "target.trie", folder / "other.trie"], folder / "target.trie"),
    "prune": lambda folder: prune_trie(folder / "target.trie", folder / "target.trie", max_tokens=50_000),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    build_trie(documents(0), folder / "target.trie", IDENTITY)
    build_trie(documents(3), folder / "other.trie", IDENTITY)
    return folder


@pytest.mark.parametrize("kills", [2, *deep([50])])
@pytest.mark.parametrize("command", COMMANDS)
def test_killed_command_leaves_the_old_file_or_the_new_one_whole(command, kills, before, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    shutil.copytree(before, tmp_path / "whole")
    began = time.perf_counter()
    COMMANDS[command](tmp_path / "whole")
    duration = time.perf_counter() - began
    old, new = (folder.joinpath("target.trie").read_bytes() for folder in (before, tmp_path / "whole"))
    draw = random.Random(f"{command} {kills}")
    for number in range(kills):
        folder = tmp_path / str(number)
        shutil.copytree(before, folder)
        with Program(CHILD, command, folder) as child:
            child.stdout.readline()
            time.sleep(draw.uniform(0, 1.2 * duration))
            child.send_signal(signal.SIGKILL)
        assert (folder / "target.trie").read_bytes() in (old, new)
        Trie(folder / "target.trie").verify()
        shutil.copy(before / "target.trie", folder)
        COMMANDS[command](folder)
        assert (folder / "target.trie").read_bytes() == new
        assert sorted(path.name for path in folder.iterdir()) == ["other.trie", "target.trie"]
