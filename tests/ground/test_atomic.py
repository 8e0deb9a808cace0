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
from tests.support.processes import Program

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


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("old")
    return path


def assert_alone(path, text):
    """Nothing else is in its folder."""
    assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_finished_write_replaces_the_old_file_only_at_its_end(kept):
    with replacing(kept, "w") as file:
        file.write("new")
        file.flush()
        assert kept.read_text() == "old"
    assert_alone(kept, "new")
    new, plain = kept.with_name("new.txt"), kept.with_name("plain.txt")
    write(new)
    plain.write_text("")
    assert new.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("where", ["while it is written", "in the check at the end"])
def test_interrupted_write_leaves_the_old_file_and_no_temporary_one(kept, where):
    def interrupt():
        assert kept.read_text() == "old"
        raise KeyboardInterrupt

    def interrupted():
        with replacing(kept, "w", check=interrupt if where == "in the check at the end" else lambda: None) as file:
            file.write("new")
            if where == "while it is written":
                interrupt()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert_alone(kept, "old")


@pytest.mark.parametrize("script", [WRITING, WRITING_SCRATCH, FROM_SCRATCH], ids=["writing", "scratch", "both"])
@pytest.mark.parametrize("name", ["kept.txt", "[k]*.txt"])
def test_what_a_killed_process_left_is_removed_by_the_next_write_to_that_name(tmp_path, script, name):
    path = tmp_path / name
    path.write_text("old")
    assert len(killed_while(script, path)) > 1
    assert path.read_text() == "old"
    others = ["other.txt", "kept.txt.txt"]
    for other in others:
        write(tmp_path / other)
    assert {p.name for p in tmp_path.iterdir()} - {name, *others}  # writes to other names touch nothing
    write(path)
    assert path.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, *others])


def test_temporary_of_a_process_that_still_writes_is_not_removed(tmp_path):
    path = tmp_path / "kept.txt"
    with Program(ALIVE, path) as other:
        assert other.stdout.readline() == "writing\n"
        before = {p.name for p in tmp_path.iterdir()}
        write(path, "ours")
        with scratch_sibling(path):
            pass
        assert {p.name for p in tmp_path.iterdir()} == before | {"kept.txt"}
        assert path.read_text() == "ours"
        other.communicate("go on\n")
        assert other.returncode == 0
    assert_alone(path, "theirs")


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


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "replace", "dup"])
def test_call_that_fails_keeps_the_old_file_and_says_so(kept, monkeypatch, call, error):
    fails(monkeypatch, call, error)
    with pytest.raises(LookaheadError, match=rf"^{kept}: write failed [(].*[)]\. The old file is unchanged\.$"):
        write(kept)
    assert_alone(kept, "old")


def test_rename_that_fails_though_it_was_done_does_not_claim_the_old_file(kept, monkeypatch):
    fails(monkeypatch, "replace", done=True)
    with pytest.raises(LookaheadError, match="The new file is there all the same, whole"):
        write(kept)
    assert_alone(kept, "new")


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
    assert_alone(kept, "new")


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
    assert_alone(kept, "new")
    fails(monkeypatch, "unlink", errno.EINTR)
    remove(kept)
    remove(kept)  # is removed already
    assert not kept.exists()


# ---- a file that two processes write
def test_new_file_of_another_process_is_not_replaced_where_it_must_be_new(tmp_path):
    path = tmp_path / "first.txt"

    def second():
        with replacing(path, "w", new=True) as file:
            file.write("second")
            path.write_text("first")

    with pytest.raises(FileExistsError):
        second()
    assert_alone(path, "first")


@pytest.mark.parametrize("links", [True, False])
def test_new_file_takes_its_name_where_no_other_has_it(tmp_path, monkeypatch, links):
    if not links:
        fails(monkeypatch, "link", errno.EPERM)
    with replacing(tmp_path / "first.txt", "w", new=True) as file:
        file.write("first")
    assert_alone(tmp_path / "first.txt", "first")


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
    with Program(HOLDING, kept) as other:
        assert other.stdout.readline() == "locked\n"

        def waiting(text):
            notices.append(text)
            other.stdin.write("go on\n")
            other.stdin.flush()

        with locked(kept, waiting):
            assert kept.read_text() == "theirs"
    (notice,) = notices
    assert str(kept) in notice


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
