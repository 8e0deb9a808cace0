"""Answers recorded with the model's scores: what drafts hold of them."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie.build import build_trie
from lookahead.trie.file import Trie
from tests.support.jobs import MODEL

recorded = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "recorded_answers.py"))


def test_longer_drafts_and_a_trie_raise_edl_of_the_sample(tmp_path):
    answers = recorded["read"](recorded["SAMPLE"])
    assert sum(len(each.answer) for each in answers) > 700
    few, many = (recorded["edl"](answers, (), n) for n in (3, 15))
    assert 1.5 < few < 0.9 * many
    documents = [TokenDocument(each.answer, "answers") for each in answers[:4]]
    build_trie(documents, tmp_path / "answers.trie", TokenizerIdentity(49152))
    assert recorded["edl"](answers, [Trie(tmp_path / "answers.trie")], 15) > 1.2 * many


def test_runner_up_tokens_of_a_recording_are_drafted():
    """Behind each 1 stands a token for the first time, which was the second best behind the 1 before it."""
    text = np.array([token for k in range(30, 60) for token in (1, k)], np.int32)
    ids = np.tile(np.arange(200, 208, dtype=np.int32), (len(text), 1))
    ids[:, 0], ids[1::2, 1] = text, text[1::2] + 1
    answer = recorded["Answer"](
        np.array([7, 1], np.int32), text, ids, np.tile(np.linspace(0, -7, 8, dtype=np.float32), (len(text), 1))
    )
    without = answer._replace(scores=np.full_like(answer.scores, np.nan))
    assert recorded["edl"]([answer], (), 3) > 1.2 * recorded["edl"]([without], (), 3)


def test_recording_holds_what_each_token_was_chosen_by(tmp_path, capsys):
    path, prompts = tmp_path / "answers.npz", MODEL.parent / "prompts.jsonl"
    recorded["record"](str(MODEL), prompts, path, 2, 12, 0.0)
    answers = recorded["read"](path)
    assert [len(each.prompt) > 0 for each in answers] == [True, True]
    for each in answers:
        assert np.array_equal(each.ids[:, 0], each.answer)  # greedy
        assert (np.diff(each.scores) <= 0).all()
    recorded["replay"]([path], [], [3, 7])
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("draft_tokens", [1, 7])
def test_replay_counts_each_token_behind_the_first_once(draft_tokens):
    text = np.array([5, 6, 7, 8] * 6, np.int32)
    answer = recorded["Answer"](text[:12], text, np.tile(text[:, None], 8), np.zeros((len(text), 8), np.float32))
    assert 1 < recorded["edl"]([answer], (), draft_tokens) <= draft_tokens + 1
