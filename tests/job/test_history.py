"""--history: a job that is run again and again drafts from the answers of its earlier runs."""

import itertools

import pytest

from lookahead import JobSpec, run_job
from lookahead.errors import LookaheadError, UsageError
from lookahead.trie.file import Trie
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, questions, rows_of, steady

# Drafts of one length, from nothing but tries.
FIXED = {"strategy": "hierarchical", "decoding_length": 8, "recycle": False, "session_tokens": 0}


@pytest.fixture
def epoch(tmp_path):
    """epoch(history=..., seed=1): answers two rows with two samples each, as one run of the job; returns its output file."""
    source, numbers = write_jsonl(tmp_path / "in.jsonl", questions(2)), itertools.count()

    def run(**options):
        out = tmp_path / f"out{next(numbers)}.jsonl"
        fixed = {"model": MODEL, "input": source, "max_new_tokens": 16, "samples": 2, "temperature": 0.8, "token_ids": True}
        assert run_job(JobSpec.of(**fixed, out=out, **options)).state == "complete"
        return out

    return run


def sources_of(trie):
    opened = Trie(trie)
    opened.verify()
    return [(source.name, source.documents) for source in opened.header.sources]


def test_second_run_drafts_from_the_answers_of_the_first_and_gives_the_samples_that_it_gives_without(epoch, tmp_path):
    history = tmp_path / "rollouts.trie"
    first = epoch(history=history, source_name="epoch 1")
    assert sources_of(history) == [("epoch 1", 4)]
    again = epoch(history=history, source_name="epoch 2", **FIXED)
    assert steady(again) == steady(first)  # the same seed: all of it stands in the history
    assert all(row["accepted_by_source"].get("trie:rollouts", 0) > row["completion_tokens"] / 2 for row in rows_of(again))
    assert steady(epoch(history=history, seed=1)) == steady(epoch(seed=1))
    assert [count for _, count in sources_of(history)] == [4, 4, 4]


def test_oldest_runs_leave_a_history_that_is_full(epoch, tmp_path):
    history = tmp_path / "rollouts.trie"
    epoch(history=history, source_name="epoch 1")
    of_one = Trie(history).header.tokens
    for number in (2, 3):
        epoch(history=history, source_name=f"epoch {number}", history_tokens=2 * of_one, seed=number)
    assert [name for name, _ in sources_of(history)] == ["epoch 2", "epoch 3"]
    epoch(history=history, source_name="epoch 4", history_tokens=of_one // 2, seed=4)
    assert [name for name, _ in sources_of(history)] == ["epoch 4"]
    assert Trie(history).header.tokens <= of_one // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history": "a.trie", "save_trie": "b.trie"}, "--history saves the outputs: leave --save-trie out."),
        ({"history_tokens": 5}, "--history-tokens limits --history FILE: name that file."),
    ],
)
def test_options_that_contradict_a_history_are_refused(epoch, options, message):
    with pytest.raises(UsageError) as raised:
        epoch(**options)
    assert str(raised.value) == message


def test_history_that_is_not_a_trie_or_has_no_folder_is_refused_by_its_option_and_name(epoch, tmp_path):
    with pytest.raises(LookaheadError, match=r"in\.jsonl: .*not a trie"):
        epoch(history=tmp_path / "in.jsonl")
    with pytest.raises(LookaheadError, match=r"--history .*its folder does not exist"):
        epoch(history=tmp_path / "missing" / "rollouts.trie")
