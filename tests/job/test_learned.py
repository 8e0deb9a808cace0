"""Answers that jobs keep as a trie: each once, whatever other jobs do to the trie, and wherever a process is killed."""

import json
from pathlib import Path

import pytest

from lookahead.errors import LookaheadError
from lookahead.job.journal import Done, FinishedRow, Journal
from lookahead.job.lock import JobFiles, OutputLock
from lookahead.job.manifest import Manifest
from lookahead.job.progress import JobTotals
from lookahead.job.run import save_learned
from lookahead.token_documents import TokenizerIdentity
from lookahead.trie import build as trie_build
from lookahead.trie.file import Trie
from tests.support.tries import build_ids

WHOSE = TokenizerIdentity(10, "0123456789abcdef", "tiny")
ANSWERS = [[1, 2, 3], [4], [5, 6]]


class Killed(BaseException):
    """The process ends here."""


class Job:
    """A job that keeps ANSWERS and saves them to a trie."""

    def __init__(self, folder: Path, name: str = "out.jsonl"):
        self.files, self.trie = JobFiles(folder / name), folder / "learned.trie"

    def __call__(self, answers: list[list[int]] | None = None) -> None:
        """Run it, or resume it; answers: more of them."""
        resumed = self.files.journal.exists()
        rows = answers if answers is not None else [] if resumed else ANSWERS
        with OutputLock(self.files, resume=True) as lock:
            done = Done(size=self.files.out.stat().st_size if self.files.out.exists() else 0)
            with Journal(lock, done, Manifest({}, {}, [{}], []), learn=True) as journal:
                for number, ids in enumerate(rows):
                    journal.write(FinishedRow(number, bytes(16), {"id": number}, JobTotals(rows=1), emitted=[([], ids)]))
                save_learned(journal, str(self.trie), WHOSE, "a model")


def held(trie: Path) -> list[list[int]]:
    """The documents of a trie, sorted."""
    opened = Trie(trie)
    opened.verify()
    return sorted(document.tolist() for document in opened.documents())


def killed(*_: object, **__: object) -> None:
    raise Killed


@pytest.fixture
def job(tmp_path):
    yield Job(tmp_path)
    assert not (tmp_path / "out.jsonl.learned.jsonl").exists()


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize("moment", ["before the trie is written", "after it is written"])
def test_answers_are_in_the_trie_once_wherever_the_process_is_killed(job, monkeypatch, exists, moment):
    """Twice in a row, and the same answers were there before from another job."""
    before = ANSWERS if exists else []
    if exists:
        build_ids(job.trie, ANSWERS)
    with monkeypatch.context() as patch:
        if moment == "after it is written":
            patch.setattr(Journal, "forget_learned", killed)
        else:
            for name in ("append_trie", "build_trie"):
                patch.setattr(trie_build, name, killed)
        for _ in range(2):
            with pytest.raises(Killed):
                job()
            if moment == "after it is written":
                break  # the second run finds them there and ends
    job()
    assert held(job.trie) == sorted([*before, *ANSWERS])


def test_answers_that_come_after_a_kill_are_added_to_those_that_were_saved(job, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "forget_learned", killed)
        with pytest.raises(Killed):
            job()
    job([[7, 8]])
    assert held(job.trie) == sorted([*ANSWERS, [7, 8]])


def test_trie_that_another_job_makes_meanwhile_is_added_to(job, monkeypatch):
    build, builds = trie_build.build_trie, 0

    def after_another_job(*arguments, **options):
        nonlocal builds
        builds += 1
        build_ids(job.trie, [[9, 9]])
        return build(*arguments, **options)

    monkeypatch.setattr(trie_build, "build_trie", after_another_job)
    job()
    assert builds == 1
    assert held(job.trie) == sorted([*ANSWERS, [9, 9]])


def test_trie_that_cannot_be_written_keeps_the_answers_for_the_next_run(job, monkeypatch):
    def full(*_, **__):
        raise LookaheadError("No space left")

    with monkeypatch.context() as patch:
        patch.setattr(trie_build, "build_trie", full)
        with pytest.raises(LookaheadError, match="No space"):
            job()
        assert json.loads(job.files.manifest.read_text())["state"] == "failed"
    job()
    assert held(job.trie) == sorted(ANSWERS)
