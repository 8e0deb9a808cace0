"""Requests that share a drafter: whose text each may draft and who is credited, broken matches, rows that come and go.

Beliefs are the untrained ones, so that no test hangs on a training.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.priors import load_priors
from lookahead.draft.tree import DraftTree
from tests.support.drafts import answered, paths_of

token = st.integers(0, 3)


def drafter_of(*tries, weights=None, **options):
    return Drafter(tries, DraftOptions(**options), weights)


def drafted(drafter, prompt, said=(), **limits):
    """(paths of the draft behind a prompt and what was said, most probable first; name of the source of each)."""
    row = drafter.start(prompt)
    row.accept(said)
    tree = row.draft(**limits)
    return paths_of(tree)[1:], [drafter.source_names[source] for source in tree.sources[1:]]


def same(one, other):
    return all(np.array_equal(getattr(one, field), getattr(other, field)) for field in DraftTree.__slots__)


def copied_text(seed, length, vocabulary=12):
    """Text that copies itself with changes, as answers do."""
    random = np.random.default_rng(seed)
    text = random.integers(0, vocabulary, 20).tolist()
    while len(text) < length:
        begin = random.integers(0, len(text) - 10)
        text += [*text[begin : begin + random.integers(3, 30)], int(random.integers(0, vocabulary))]
    return text[:length]


def matched(row):
    """Tokens that are drafted next because of what stands before them."""
    tree = row.draft(branch_length=1)
    return set(tree.token_ids[tree.matches > 0].tolist())


# ---- limits


def test_price_of_the_options_is_the_default():
    text = copied_text(1, 100)
    dear, cheap = drafter_of(price=0.1).start(text), drafter_of().start(text)
    assert same(dear.draft(), cheap.draft(price=0.1))
    assert same(dear.draft(price=0.0), cheap.draft())
    assert dear.draft(price=1.0).draft_tokens == 0


# ---- whose text is drafted


def test_match_of_a_node_is_how_much_of_its_context_its_place_agrees_with(make_trie):
    row = drafter_of(make_trie([[1, 2, 3, 4, 5, 6, 7]])).start([9, 9, 2, 3, 4])
    tree = row.draft()
    matches = dict(zip(paths_of(tree), tree.matches.tolist(), strict=True))
    assert [matches[path] for path in ((), (5,), (5, 6), (5, 6, 7))] == [0, 3, 4, 5]
    assert matches[9,] == 0  # common, whatever stands before


@pytest.mark.parametrize("vocabulary", [65_535, 150_001])
def test_largest_token_ids_are_drafted_from_tries_session_and_own_text(make_trie, vocabulary):
    last = vocabulary - 1
    drafter = drafter_of(make_trie([[last - 1, last, 7]], vocabulary))
    paths, names = drafted(drafter, [9, 8, 7, last - 1])
    assert (paths[0], names[0]) == ((last,), "trie:corpus")
    assert (last, 7) in paths
    answered(drafter, [5], [6, last, last - 3])
    paths, names = drafted(drafter, [6, last])
    assert (paths[0], names[0]) == ((last - 3,), "session")
    paths, names = drafted(drafter, [last - 5, last - 6, last - 5])
    assert (paths[0], names[0]) == ((last - 6,), "prompt")


def test_token_outside_the_vocabulary_of_a_trie_matches_nothing_there(make_trie):
    drafter = drafter_of(make_trie([[1, 2, 3]]))
    row = drafter.start([1, 2_000_000_000])
    assert matched(row) == set()
    row.accept([10, 1])  # 10 closes the documents of this trie
    assert matched(row) == {2_000_000_000, 2}


def test_weights_that_do_not_fit_the_tries_are_refused(make_trie):
    with pytest.raises(ValueError, match="shorter"):
        Drafter([make_trie([[1, 2]])], weights=[])


# ---- broken matches
def test_match_broken_by_one_token_goes_on_behind_it(make_trie):
    row = drafter_of(make_trie([[1, 2, 3, 4, 5, 6, 7]])).start([1, 2, 3])
    row.accept([9])  # instead of 4
    assert matched(row) == {5}
    row.accept([5])
    assert matched(row) == {6}


# ---- rows
def test_output_of_one_row_is_drafted_for_the_others_as_soon_as_it_is_finished():
    drafter = drafter_of()
    one, two = drafter.start([7]), drafter.start([8])
    one.accept([1, 2, 3, 4, 5])
    two.accept([1, 2])
    assert matched(two) == set()
    one.finish()
    paths = paths_of(two.draft())
    assert paths[1] == (3,)
    assert (3, 4, 5) in paths
    two.accept([3, 4])
    assert matched(two) == {5}
    two.finish()
    assert matched(drafter.start([3, 4])) == {5}  # once with, once without a 5 behind


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(token, max_size=6)), max_size=30), st.sampled_from([20, 1000]))
def test_drafts_stay_trees_of_their_own_row_while_others_start_and_finish(steps, session_tokens):
    drafter = drafter_of(decoding_length=16, session_tokens=session_tokens)
    running = {}
    for number, said in steps:
        if number not in running:
            running[number] = drafter.start([number, *said]), [number, *said]
        elif not said:
            running.pop(number)[0].finish()
        else:
            running[number][0].accept(said)
            running[number][1].extend(said)
        for row, text in running.values():
            tree = row.draft(9, 5)
            assert row.own.tokens.tolist() == text
            assert tree.token_ids[0] == text[-1]
            assert tree.draft_tokens <= 9
            assert len(set(paths_of(tree))) == len(tree)
            assert set(tree.token_ids.tolist()) <= {0, 1, 2, 3}


def test_row_is_used_again_and_knows_nothing_of_the_request_before():
    drafter = drafter_of(session_tokens=0)
    row = drafter.start([1, 2, 3, 4, 5, 1, 2, 3])
    row.accept([9])  # breaks a match
    row.draft()
    row.finish()
    again = drafter.start([1, 2])
    assert again is row
    assert {token for path in paths_of(again.draft()) for token in path} <= {1, 2}


# ---- long texts


def test_text_that_outgrows_its_arrays_is_kept_and_drafted_from():
    text = np.random.default_rng(0).integers(0, 50, 5000).tolist()
    row = drafter_of(strategy="single").start(text[:30])
    for begin in range(30, 5000, 70):
        row.accept(text[begin : begin + 70])
    assert row.own.tokens.tolist() == text
    row.accept(text[1000:1012])
    assert row.draft(5).token_ids[1:].tolist() == text[1012:1017]


# ---- what a job leaves behind
def test_forgetting_makes_a_drafter_as_new(make_trie):
    drafter = drafter_of(make_trie([copied_text(7, 200)], 20))

    def job():
        trees = []
        for seed in range(3):
            row = drafter.start(copied_text(seed, 40))
            for begin in range(0, 60, 6):
                row.accept(copied_text(seed + 10, 60)[begin : begin + 6])
                trees.append(row.draft())
            row.finish()
        return trees

    first = job()
    beliefs = drafter.shared.lambdas.copy(), drafter.calibration.curve.copy()
    second = job()
    assert not all(same(one, other) for one, other in zip(first, second, strict=True))
    drafter.forget()
    assert len(drafter.session) == 0
    assert np.array_equal(drafter.shared.lambdas, load_priors().lambdas)
    third = job()
    assert all(same(one, other) for one, other in zip(first, third, strict=True))
    assert np.array_equal(beliefs[0], drafter.shared.lambdas)
    assert np.array_equal(beliefs[1], drafter.calibration.curve)


def test_warming_up_teaches_a_drafter_nothing(make_trie):
    drafter = drafter_of(make_trie([[1, 2, 3]]))
    drafter.warm_up()
    assert len(drafter.session) == 0
    assert np.array_equal(drafter.shared.lambdas, load_priors().lambdas)
    assert not drafter.shared.counted.any()


def test_sample_of_a_prompt_drafts_from_what_the_others_have_emitted_so_far():
    drafter = drafter_of(decoding_length=8)
    ahead, behind, other = drafter.start([9]), drafter.start([9]), drafter.start([8])
    ahead.accept([1, 2, 3, 4, 5, 6])
    behind.accept([1, 2])
    found = behind.draft()
    assert (3, 4, 5, 6) in paths_of(found)
    assert "session" in {drafter.source_names[source] for source in found.sources[1:]}
    other.accept([1, 2])
    assert (3, 4) in paths_of(other.draft())
    ahead.finish()
    behind.finish()
    assert [token for run in drafter.session.runs for token in sorted(drafter.session.tokens[run.suffixes])] == [
        1, 1, 2, 2, 3, 4, 5, 6, 9, 9,
    ]  # fmt: skip


def test_rows_of_different_prompts_share_nothing_before_they_end(monkeypatch):
    drafter = drafter_of()
    monkeypatch.setattr(drafter.session, "set_running", lambda documents: pytest.fail("shared"))
    rows = [drafter.start([prompt]) for prompt in range(3)]
    for row in rows:
        row.accept([1, 2, 3] * 20)
        row.draft()
    assert len(drafter.session) == 0
    again = drafter.start([0])
    rows[0].finish()
    again.finish()


@pytest.mark.parametrize("session_tokens", [0, 1, 30])
def test_samples_share_no_more_than_the_memory_holds(session_tokens):
    drafter = drafter_of(session_tokens=session_tokens)
    rows = [drafter.start([9]) for _ in range(3)]
    for step in range(20):
        for row in rows:
            row.accept([step % 4])
            row.draft()
    for row in rows:
        row.finish()
    assert len(drafter.session.tokens[: len(drafter.session)]) <= session_tokens
