"""Files that are either the old one or the new one, whole; and what killed processes leave behind."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lookahead.errors import LookaheadError
from lookahead.files.atomic import locked, remove, replacing, scratch_sibling

pytest.importorskip("fcntl")  # without locks nothing is taken for left behind

KILLED = """
import os, signal, sys
from lookahead.files.atomic import replacing, scratch_sibling
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
from lookahead.files.atomic import replacing
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


@pytest.mark.parametrize("where", ["while it is written", "in the check at the end"])
def test_interrupted_write_leaves_the_old_file_and_no_temporary_one(tmp_path, where):
    path = tmp_path / "kept.txt"
    path.write_text("old")

    def interrupt():
        assert path.read_text() == "old"
        raise KeyboardInterrupt

    def interrupted():
        with replacing(path, "w", check=interrupt if where == "in the check at the end" else lambda: None) as file:
            file.write("new")
            if where == "while it is written":
                interrupt()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
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


def test_folder_pipe_and_missing_folder_are_refused(tmp_path):
    with pytest.raises(LookaheadError, match="is a folder"):
        write(tmp_path)
    with pytest.raises(LookaheadError, match="is a device or pipe, which cannot be replaced"):
        write("/dev/null")
    with pytest.raises(LookaheadError, match=r"cannot write here [(]No such file or directory"):
        write(tmp_path / "missing" / "x.txt")
    with pytest.raises(LookaheadError, match=r"cannot write here"), scratch_sibling(tmp_path / "missing" / "x.txt"):
        pass


# ---- a disk that fails
def fails(monkeypatch, name, error=errno.EIO, times=1, done=False):
    """os.`name` fails, the first `times` that it is called; done: and does it all the same."""
    real, calls = getattr(os, name), []

    def failing(*arguments, **options):
        calls.append(arguments)
        if len(calls) > times:
            return real(*arguments, **options)
        if done:
            real(*arguments, **options)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, name, failing)
    return calls


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("old")
    return path


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "replace", "dup"])
def test_call_that_fails_keeps_the_old_file_and_says_so(kept, monkeypatch, call, error):
    fails(monkeypatch, call, error)
    with pytest.raises(LookaheadError, match=rf"^{kept}: write failed [(].*[)]\. The old file is unchanged\.$"):
        write(kept)
    assert kept.read_text() == "old"
    assert list(kept.parent.iterdir()) == [kept]


def test_rename_that_fails_though_it_was_done_does_not_claim_the_old_file(kept, monkeypatch):
    fails(monkeypatch, "replace", done=True)
    with pytest.raises(LookaheadError, match="The new file is there all the same, whole"):
        write(kept)
    assert kept.read_text() == "new"
    assert list(kept.parent.iterdir()) == [kept]


@pytest.mark.parametrize("error", [errno.EIO, errno.EINVAL])
def test_folder_that_cannot_be_synced_does_not_claim_the_old_file_and_by_its_kind_is_no_error(kept, monkeypatch, error):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(error, os.strerror(error))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    refused = pytest.raises(LookaheadError, match="is written, but its folder could not be put on disk")
    with refused if error == errno.EIO else contextlib.nullcontext():
        write(kept)
    assert kept.read_text() == "new"


def test_cleaning_up_that_fails_does_not_hide_what_went_wrong(kept, monkeypatch):
    fails(monkeypatch, "fsync", errno.ENOSPC)
    fails(monkeypatch, "unlink", errno.EROFS)
    with pytest.raises(LookaheadError, match="No space left on device"):
        write(kept)
    monkeypatch.undo()
    assert kept.read_text() == "old"
    assert len(list(kept.parent.iterdir())) == 2
    write(kept)  # removes what was left
    assert list(kept.parent.iterdir()) == [kept]


def test_error_about_another_file_names_it(kept):
    with (
        pytest.raises(LookaheadError, match=r"gone.txt: cannot be used; .*kept.txt: write failed [(]No such file"),
        replacing(kept),
    ):
        (kept.parent / "gone.txt").open()
    assert kept.read_text() == "old"


@pytest.mark.parametrize("call", ["replace", "unlink"])  # others are made again by Python itself
def test_interrupted_call_is_made_again(kept, monkeypatch, call):
    kept.with_name(".kept.txt.abcdefgh.tmp").write_text("")  # to be unlinked
    calls = fails(monkeypatch, call, errno.EINTR)
    write(kept)
    assert len(calls) > 1
    assert kept.read_text() == "new"
    assert list(kept.parent.iterdir()) == [kept]


# ---- a file that two processes write
def test_new_file_of_another_process_is_not_replaced_where_it_must_be_new(tmp_path):
    path = tmp_path / "first.txt"

    def second():
        with replacing(path, "w", new=True) as file:
            file.write("second")
            path.write_text("first")

    with pytest.raises(FileExistsError):
        second()
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("links", [True, False])
def test_new_file_takes_its_name_where_no_other_has_it(tmp_path, monkeypatch, links):
    if not links:
        fails(monkeypatch, "link", errno.EPERM)
    with replacing(tmp_path / "first.txt", "w", new=True) as file:
        file.write("first")
    assert (tmp_path / "first.txt").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["first.txt"]


HOLDING = """
import sys
from lookahead.files.atomic import locked, replacing
path = sys.argv[1]
with locked(path):
    print("locked", flush=True)
    sys.stdin.readline()
    with replacing(path, "w") as file:
        file.write("theirs")
"""


def test_lock_waits_for_another_process_and_then_holds_the_file_that_it_has_put_there(kept):
    notices = []
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, kept], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"

        def waiting(text):
            notices.append(text)
            other.stdin.write("go on\n")
            other.stdin.flush()

        with locked(kept, waiting):
            assert kept.read_text() == "theirs"
    assert len(notices) == 1
    assert str(kept) in notices[0]


def test_lock_of_a_missing_file_or_on_a_system_without_locks_does_nothing(tmp_path, kept, monkeypatch):
    with locked(tmp_path / "missing.txt"):
        pass
    assert not (tmp_path / "missing.txt").exists()

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with locked(kept):
        write(kept)
    assert kept.read_text() == "new"


def test_removal_that_is_interrupted_is_made_again_and_a_missing_file_is_removed_already(kept, monkeypatch):
    calls = fails(monkeypatch, "unlink", errno.EINTR)
    remove(kept)
    remove(kept)
    assert len(calls) == 3
    assert not kept.exists()
