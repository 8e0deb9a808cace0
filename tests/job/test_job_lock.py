"""Two jobs with one output: one of them writes, the other ends with one line, and no row is lost; by whatever names."""

import errno
import json
import os
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lookahead.errors import LookaheadError, UsageError
from lookahead.job.journal import Done, FinishedRow, Journal, read_done
from lookahead.job.lock import JobFiles, OutputLock
from lookahead.job.manifest import Manifest
from lookahead.job.progress import JobTotals
from lookahead.job.run import files_of
from tests.support.cli import write_jsonl
from tests.support.depth import deep
from tests.support.jobs import MODEL, questions, rows_of
from tests.support.loading import refuse_to_load

pytest.importorskip("fcntl")


@pytest.fixture
def files(tmp_path):
    return JobFiles(tmp_path / "out.jsonl")


def manifest() -> Manifest:
    return Manifest({}, {}, [{}], [])


def row(number: int) -> FinishedRow:
    return FinishedRow(number, bytes([number]) * 16, {"id": number}, JobTotals(rows=1))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def running(files):
    """A job that has written two rows, and goes on."""
    with OutputLock(files) as lock, Journal(lock, Done(), manifest()) as journal:
        for number in range(2):
            journal.write(row(number))
        yield journal


BUSY = "another process is writing it"


def test_lock_that_was_not_used_leaves_nothing(files, tmp_path):
    with OutputLock(files):
        assert names(tmp_path) == ["out.jsonl.journal"]
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(LookaheadError, match=BUSY):
                OutputLock(files, **options)
    assert names(tmp_path) == []
    files.out.write_text("of somebody")
    with OutputLock(files, overwrite=True):
        pass
    with pytest.raises(UsageError, match="exists"):
        OutputLock(files)
    assert names(tmp_path) == ["out.jsonl"]


def test_job_that_starts_beside_a_running_one_changes_nothing(running, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(LookaheadError, match=BUSY):
            OutputLock(running.files, **options)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    running.write(row(2))
    running.finish(in_order=True)
    assert [each["id"] for each in rows_of(running.files.out)] == [0, 1, 2]


def test_job_that_read_the_output_before_another_wrote_it_is_refused(files):
    with OutputLock(files) as lock, Journal(lock, Done(), manifest()) as journal:
        journal.write(row(0))
    with OutputLock(files, resume=True) as lock, pytest.raises(LookaheadError, match="has written it meanwhile"):
        Journal(lock, Done(), manifest())


def test_one_output_by_several_names_is_one_output(running, tmp_path):
    out = running.files.out
    (tmp_path / "soft").symlink_to("out.jsonl")
    (tmp_path / "way").symlink_to(".")
    os.link(out, tmp_path / "hard")
    for name in ("soft", "way/out.jsonl", "hard"):
        files = files_of(str(tmp_path / name), False, False, True)
        with pytest.raises(LookaheadError, match=BUSY):
            OutputLock(files, overwrite=True)
    assert not (tmp_path / "hard.journal").exists()
    assert len(rows_of(out)) == 2


def test_overwriting_one_of_two_hard_links_keeps_the_other(files, tmp_path):
    files.out.write_text("old")
    os.link(files.out, tmp_path / "kept")
    with OutputLock(files, overwrite=True) as lock:
        lock.remove_files()
        with Journal(lock, Done(), manifest()) as journal:
            journal.write(row(0))
    assert (tmp_path / "kept").read_text() == "old"
    assert rows_of(files.out) == [{"id": 0}]


def test_exactly_one_of_many_that_start_at_once_holds_the_lock(files):
    """Those that give the lock back unused remove the file that others are about to lock."""
    inside, most, held = 0, 0, 0
    refusals = set()
    counting = threading.Lock()

    def contend():
        nonlocal inside, most, held
        for _ in range(200):
            try:
                with OutputLock(files):
                    with counting:
                        inside, held = inside + 1, held + 1
                        most = max(most, inside)
                    time.sleep(0)
                    with counting:
                        inside -= 1
            except LookaheadError as error:
                refusals.add(str(error))

    with ThreadPoolExecutor(8) as threads:
        for each in [threads.submit(contend) for _ in range(8)]:
            each.result()
    assert most == 1
    assert held > 8
    assert all(BUSY in refusal for refusal in refusals)
    assert not files.journal.exists()


def test_output_that_appears_while_the_lock_is_taken_is_seen_under_it(files, monkeypatch):
    open_journal = OutputLock._open_journal

    def while_another_job_ends(lock):
        files.out.write_text('{"id": 1}\n')
        return open_journal(lock)

    monkeypatch.setattr(OutputLock, "_open_journal", while_another_job_ends)
    with pytest.raises(UsageError, match="exists"):
        OutputLock(files)
    assert files.out.read_text() == '{"id": 1}\n'


@pytest.mark.parametrize("which", ["rows", "journal"])
@pytest.mark.parametrize("how", ["moved", "replaced"])
@pytest.mark.parametrize("when", ["save", "finish"])
def test_file_that_was_moved_or_replaced_ends_the_job_with_one_line(files, tmp_path, which, how, when):
    path = getattr(files, which)

    def job():
        with OutputLock(files) as lock, Journal(lock, Done(), manifest()) as journal:
            journal.write(row(0))
            path.rename(tmp_path / "elsewhere")
            if how == "replaced":
                path.write_text("of another program\n")
            if when == "save":
                journal.save()
            else:
                journal.finish(in_order=True)

    with pytest.raises(LookaheadError, match=rf"{path.name}: was moved, removed or replaced"):
        job()
    assert (tmp_path / "elsewhere").stat().st_size
    if how == "replaced":
        assert path.read_text() == "of another program\n"
    assert json.loads(files.manifest.read_text())["state"] == ("running" if which == "journal" else "failed")


def test_job_whose_files_another_one_has_taken_does_not_write_its_manifest(files):
    with OutputLock(files) as lock, Journal(lock, Done(), manifest()):
        for path in (files.out, files.journal, files.manifest):
            path.unlink()
        with OutputLock(files) as other, Journal(other, Done(), manifest()) as journal:
            journal.write(row(7))
            journal.finish(in_order=True)
        theirs = files.manifest.read_bytes()
    assert files.manifest.read_bytes() == theirs
    assert rows_of(files.out) == [{"id": 7}]


def test_file_system_without_locks_is_written_as_before(files, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with OutputLock(files) as lock, Journal(lock, Done(), manifest()) as journal:
        journal.write(row(0))
        journal.finish(in_order=True)
    with OutputLock(files, resume=True) as lock:
        assert read_done(files).requests.keys() == {0}


# ---- as typed
def test_job_through_a_link_writes_beside_its_target_and_the_link_stays(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", questions(3))
    (tmp_path / "store").mkdir()
    for name in ("out.jsonl", "out.parquet"):
        (tmp_path / name).symlink_to(f"store/{name}")
        job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / name, "--max-new-tokens", 4, "--quiet")
        cli_code = cli(*job).code
        assert cli_code == 0
        assert os.readlink(tmp_path / name) == f"store/{name}"
        assert names(tmp_path / "store") == [name, f"{name}.journal", f"{name}.manifest.json"]
        assert cli(*job, "--resume").code == 0
        cli.fails(2, *job, saying=[f"{name}: exists"])
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").mkdir()


def test_second_job_is_refused_before_a_model_is_loaded(cli, files, monkeypatch):
    refuse_to_load(monkeypatch)
    source = write_jsonl(files.out.with_name("in.jsonl"), questions(1))
    for out in (files.out, files.out.with_name("out.parquet")):
        job = ("generate", "--model", MODEL, "--input", source, "-o", out)
        with OutputLock(JobFiles(out)):
            for option in ((), ("--resume",), ("--overwrite",)):
                cli.fails(1, *job, *option, saying=[f"{out}: {BUSY}"])


# ---- full disks


def may_mount(disk: Path, size: str) -> bool:
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", ["out.jsonl", *deep(["out.parquet"])])
def test_job_on_a_disk_that_fills_up_says_failed_and_goes_on_when_there_is_room(cli, tmp_path, name):
    disk = tmp_path / "disk"
    if not may_mount(disk, "384k"):
        pytest.skip("may not mount a small disk")
    try:
        source = write_jsonl(tmp_path / "in.jsonl", questions(60))
        filler = disk / "filler"
        filler.write_bytes(bytes(288 << 10))
        job = ("generate", "--model", MODEL, "--input", source, "-o", disk / name, "--max-new-tokens", 4, "--quiet", "--resume")
        failed = cli(*job)
        assert failed.code == 1
        assert "No space left on device" in failed.err
        assert "with --resume" in failed.err
        about = json.loads((disk / f"{name}.manifest.json").read_text())
        assert about["state"] == "failed"
        assert "No space left" in about["error"]
        assert 0 < about["counts"]["rows"] < 60
        filler.unlink()
        assert cli(*job).code == 0
        assert json.loads((disk / f"{name}.manifest.json").read_text())["state"] == "complete"
        assert not [each for each in names(disk) if each.startswith(".")]
    finally:
        subprocess.run(["umount", disk], check=True)
