"""Files that are either the old one or the new one, whole; and what killed processes leave behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lookahead.atomic import replacing, scratch_sibling
from lookahead.errors import LookaheadError

pytest.importorskip("fcntl")  # without locks nothing is taken for left behind

KILLED = """
import os, signal, sys
from lookahead.atomic import replacing, scratch_sibling
path = sys.argv[1]
{body}
    file.write("half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
WRITING = KILLED.format(body='with replacing(path, "w") as file:')
WRITING_SCRATCH = KILLED.format(body='with scratch_sibling(path) as scratch, open(scratch.name, "w") as file:')
FROM_SCRATCH = KILLED.format(body='with scratch_sibling(path), replacing(path, "w") as file:')

ALIVE = """
import sys
from lookahead.atomic import replacing
with replacing(sys.argv[1], "w") as file:
    file.write("theirs")
    file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
"""


def write(path, text="new"):
    with replacing(path, "w") as file:
        file.write(text)


def killed_while(script, path):
    """Names that a process leaves in the folder of `path` which is killed while it writes."""
    assert subprocess.run([sys.executable, "-c", script, str(path)]).returncode == -signal.SIGKILL
    return sorted(p.name for p in path.parent.iterdir())


def test_finished_write_replaces_the_old_file_only_at_its_end(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("old")
    with replacing(path, "w") as file:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_write_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("old")

    def interrupted():
        with replacing(path, "w") as file:
            file.write("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_check_that_fails_at_the_end_keeps_the_old_file(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("old")

    def check():
        assert path.read_text() == "old"
        raise LookaheadError("no")

    with pytest.raises(LookaheadError, match="no"), replacing(path, "w", check=check) as file:
        file.write("new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_new_file_has_the_rights_of_any_new_file(tmp_path):
    (tmp_path / "plain.txt").write_text("")
    write(tmp_path / "new.txt")
    assert (tmp_path / "new.txt").stat().st_mode == (tmp_path / "plain.txt").stat().st_mode


@pytest.mark.parametrize("script", [WRITING, WRITING_SCRATCH, FROM_SCRATCH], ids=["writing", "scratch", "both"])
@pytest.mark.parametrize("name", ["kept.txt", "[k]*.txt"])
def test_what_a_killed_process_left_is_removed_by_the_next_write_to_that_name(tmp_path, script, name):
    path = tmp_path / name
    path.write_text("old")
    assert len(killed_while(script, path)) > 1
    assert path.read_text() == "old"
    write(tmp_path / "other.txt")
    write(tmp_path / "kept.txt.txt")
    left = {p.name for p in tmp_path.iterdir()} - {name, "other.txt", "kept.txt.txt"}
    assert left  # writes to other names touch nothing
    write(path)
    assert path.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "other.txt", "kept.txt.txt"])


def test_what_a_killed_process_left_is_removed_by_the_next_scratch_of_that_name_too(tmp_path):
    path = tmp_path / "kept.txt"
    killed_while(WRITING, path)
    with scratch_sibling(path) as scratch:
        assert list(tmp_path.iterdir()) == [Path(scratch.name)]
    assert list(tmp_path.iterdir()) == []


def test_temporary_of_a_process_that_still_writes_is_not_removed(tmp_path):
    path = tmp_path / "kept.txt"
    with subprocess.Popen(
        [sys.executable, "-c", ALIVE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "writing\n"
        before = {p.name for p in tmp_path.iterdir()}
        write(path, "ours")
        with scratch_sibling(path):
            pass
        assert {p.name for p in tmp_path.iterdir()} == before | {"kept.txt"}
        assert path.read_text() == "ours"
        other.communicate("go on\n")
        assert other.returncode == 0
    assert path.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writes_to_one_name_in_one_process_leave_the_later_one(tmp_path):
    path = tmp_path / "kept.txt"
    with replacing(path, "w") as file:
        file.write("outer")
        write(path, "inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer"
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_others_that_look_alike_are_left(tmp_path):
    names = [".kept.txt.notes.tmp", ".kept.txt.12345678.tmp.old", "kept.txt.12345678.tmp", ".kept_txt.12345678.tmp"]
    for name in names:
        (tmp_path / name).write_text("mine")
    write(tmp_path / "kept.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, "kept.txt"])


def test_scratch_leaves_nothing_whether_it_was_used_removed_or_failed(tmp_path):
    path = tmp_path / "kept.txt"
    with scratch_sibling(path) as scratch:
        scratch.write(b"some")
        scratch.flush()
        assert Path(scratch.name).parent == tmp_path
        assert Path(scratch.name).read_bytes() == b"some"
    with scratch_sibling(path) as scratch:
        Path(scratch.name).unlink()
    with pytest.raises(KeyboardInterrupt), scratch_sibling(path):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_scratch_that_was_written_stays_while_others_write_to_the_same_name(tmp_path):
    path = tmp_path / "kept.txt"
    with scratch_sibling(path) as scratch:
        scratch.write(b"needed")
        scratch.flush()
        write(path)
        assert Path(scratch.name).read_bytes() == b"needed"


def test_folder_pipe_and_missing_folder_are_refused(tmp_path):
    with pytest.raises(LookaheadError, match="is a folder"):
        write(tmp_path)
    with pytest.raises(LookaheadError, match="is a device or pipe, which cannot be replaced"):
        write("/dev/null")
    with pytest.raises(LookaheadError, match=r"cannot write here [(]No such file or directory"):
        write(tmp_path / "missing" / "x.txt")
    with pytest.raises(LookaheadError, match=r"cannot write here"), scratch_sibling(tmp_path / "missing" / "x.txt"):
        pass
