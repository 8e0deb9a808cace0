"""Requests that share a drafter: whose text each may draft and who is credited, broken matches, rows that come and go.

Beliefs are the untrained ones, so that no test hangs on a training.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.draft.drafter import Drafter, as_parallel
from lookahead.draft.options import DraftOptions
from lookahead.draft.priors import formula
from lookahead.draft.tree import DraftTree
from tests.support.drafts import answered, paths_of
from tests.support.tries import append_ids, build_ids

token = st.integers(0, 3)


def drafter_of(*tries, weights=None, **options):
    return Drafter(tries, DraftOptions(**options), weights, formula())


def drafted(drafter, prompt, said=(), **limits):
    """(paths of the draft behind a prompt and what was said, most probable first; name of the source of each)."""
    row = drafter.start(prompt)
    row.accept(said)
    tree = row.draft(**limits)
    return paths_of(tree)[1:], [drafter.source_names[source] for source in tree.sources[1:]]


def same(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in DraftTree.__dataclass_fields__)


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
def test_budget_and_branch_length_are_used_up_where_text_allows_it():
    row = drafter_of().start([1, 2, 3, 4, 5] * 20)
    assert row.draft().draft_tokens == 63
    assert row.draft(7).draft_tokens == 7
    assert row.draft(7, 2).depths().max() == 2
    assert row.draft(budget=99).draft_tokens == 63
    assert row.draft(0).draft_tokens == row.draft(5, 0).draft_tokens == 0


def test_single_follows_the_most_probable_child_of_each_node():
    text = copied_text(0, 200)
    tree = drafter_of().start(text).draft(branch_length=1)
    chained = drafter_of(strategy="single").start(text).draft()
    assert chained.is_chain()
    assert chained.draft_tokens > 3
    assert chained.token_ids[1] == tree.token_ids[1]


def test_price_of_the_options_is_the_default():
    text = copied_text(1, 100)
    dear, cheap = drafter_of(price=0.1).start(text), drafter_of().start(text)
    assert same(dear.draft(), cheap.draft(price=0.1))
    assert same(dear.draft(price=0.0), cheap.draft())
    assert dear.draft(price=1.0).draft_tokens == 0


def test_parallel_drafts_the_branches_of_the_hierarchical_tree():
    text = [1, 2, 1, 3, 1, 4, 1]
    tree = drafter_of().start(text).draft(40)
    assert same(drafter_of(strategy="parallel").start(text).draft(40), as_parallel(tree, 40))
    assert not same(tree, as_parallel(tree, 40))


def test_drafts_are_the_same_in_every_run(make_trie):
    tries = [make_trie([copied_text(seed, 200, 9)], name=f"{seed}.trie") for seed in range(2)]
    trees = []
    for run in range(3):
        np.full(5_000_000, run, np.int32)  # what memory that nobody wrote would hold
        drafter = drafter_of(*tries, session_tokens=300)
        trees.append([])
        for number in range(4):
            text = copied_text(number, 300, 9)
            row = drafter.start(text[:40])
            for begin in range(40, 300, 13):
                trees[-1].append(row.draft())
                row.accept(text[begin : begin + 13])
            row.finish()
    assert all(same(one, other) for others in trees[1:] for one, other in zip(trees[0], others, strict=True))


# ---- whose text is drafted
def test_what_is_not_learned_from_is_drafted_from_all_the_same():
    drafter = drafter_of()
    row = drafter.start([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    before = drafter.shared.earned.copy()
    row.accept([4, 5, 6], learn=False)
    assert np.array_equal(drafter.shared.earned, before)
    assert row.draft(branch_length=1).token_ids.tolist()[:2] == [6, 7]
    row.accept([7])
    assert not np.array_equal(drafter.shared.earned, before)


def test_first_token_of_the_output_is_none_of_the_prompt():
    paths, names = drafted(drafter_of(), [1, 2], [3, 1, 2], branch_length=1)
    assert (paths[0], names[0]) == ((3,), "output")


def test_match_of_a_node_is_how_much_of_its_context_its_place_agrees_with(make_trie):
    row = drafter_of(make_trie([[1, 2, 3, 4, 5, 6, 7]])).start([9, 9, 2, 3, 4])
    tree = row.draft()
    matches = dict(zip(paths_of(tree), tree.matches.tolist(), strict=True))
    assert [matches[path] for path in ((), (5,), (5, 6), (5, 6, 7))] == [0, 3, 4, 5]
    assert matches[9,] == 0  # common, whatever stands before


def test_match_in_the_own_text_is_told_in_tokens():
    text = list(range(10, 40))
    row = drafter_of(strategy="single").start([*text, 1, *text[:5]])
    assert row.draft(3).matches.tolist() == [0, 5, 6, 7]
    row.accept(text[5:20])
    assert row.draft(3).matches.tolist() == [0, 20, 21, 22]


def test_text_that_weighs_nothing_spoils_no_draft(make_trie):
    tries = [make_trie([[1, 2, 3], [1, 2, 4]], name=f"{number}.trie") for number in range(2)]
    row = drafter_of(*tries, weights=[0.0, 0.0]).start([1, 2, 9, 1])
    tree = row.draft()
    assert paths_of(tree)[1] == (2,)
    assert 0 < tree.probabilities[-1] <= tree.probabilities[1] < 1
    row.accept([2, 3, 1, 2, 3])
    assert np.isfinite(row.drafter.shared.lambdas).all()
    assert np.isfinite(row.drafter.rows.reach).all()
    assert np.isfinite(row.drafter.shared.trust[:, :2]).all()


def test_branches_of_all_segments_of_a_trie_are_drafted_and_attributed_to_it(tmp_path):
    build_ids(tmp_path / "x.trie", [[1, 2, 3]])
    trie = append_ids(tmp_path / "x.trie", [[1, 2, 4], [5, 6]])
    drafter = drafter_of(trie, session_tokens=0)
    paths, names = drafted(drafter, [1])
    assert {(2,), (2, 3), (2, 4)} <= set(paths)
    assert {names[paths.index(path)] for path in ((2,), (2, 3), (2, 4))} == {"trie:x"}
    assert drafted(drafter, [9, 8, 7, 5])[0][0] == (6,)


def test_branch_does_not_run_into_the_next_document(make_trie):
    drafter = drafter_of(make_trie([[1, 2, 3], [4, 5, 6]]))
    row = drafter.start([9, 1, 2])
    assert matched(row) == {3}
    row.accept([3])
    assert matched(row) == set()
    row.accept([7])  # nothing was broken: there was nothing left to say
    assert matched(row) == set()
    answered(drafter, [9], [1, 2, 3, 8])
    answered(drafter, [9], [4])
    row = drafter.start([0, 2, 3])
    assert matched(row) == {8}
    row.accept([8])
    assert matched(row) == set()


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


def test_place_of_a_broken_match_is_given_up_when_it_has_missed_four_times(make_trie):
    text = list(range(1, 31))
    row = drafter_of(make_trie([text], 60)).start([1, 2, 3])
    row.accept([40])
    for said in (41, 42):
        row.accept([said])
        assert matched(row) == {text[2 + said - 38]}
    row.accept([43])
    assert matched(row) == set()
    # Breaking again and again counts, too.
    row = drafter_of(make_trie([text], 60)).start([1, 2, 3])
    row.accept([40, 5, 6, 7, 41, 9, 10, 11, 42, 13, 14, 15, 43])
    assert matched(row) == {17}
    row.accept([44])
    assert matched(row) == set()


# ---- rows
def start_rows(drafter, count):
    rows = []
    for number in range(count):
        text = copied_text(number, 80 + 7 * number)
        rows.append(drafter.start(text[:50]))
        rows[-1].accept(text[50:])
    return rows


def test_rows_that_come_later_change_nothing_for_those_that_run():
    drafter = drafter_of()
    trees = []
    for count in range(1, 7):  # the arrays of all rows are made anew for the 2nd, 3rd and 5th
        trees.append(start_rows(drafter, count)[-1].draft())
    rows = start_rows(drafter_of(), 6)
    lone = [drafter_of() for _ in range(6)]
    for number, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        assert len({r.number for r in rows}) == 6
        text = copied_text(number, 80 + 7 * number)
        other = lone[number].start(text[:50])
        assert len(other.text) == 50
        assert row.text.tolist() == text
        assert row.draft().token_ids[0] == tree.token_ids[0] == text[-1]


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
def test_long_prompt_is_copied_from_its_newest_place_of_the_longest_match():
    text = np.random.default_rng(0).integers(0, 50, 3000).tolist()
    row = drafter_of(strategy="single").start([*text, *text[1000:1012]])
    assert row.draft(20).token_ids[1:].tolist() == text[1012:1032]
    row.accept(text[1012:1030])
    assert row.draft(20).token_ids[1:].tolist() == text[1030:1050]


def test_text_that_outgrows_its_arrays_is_drafted_as_one_that_had_room_from_the_beginning():
    text = copied_text(3, 5000, 40)
    small, large = drafter_of(), drafter_of()
    rows = small.start(text[:30]), large.start(text[:30])
    rows[1].own.reserve(10_000)
    rows[1].own.describe(large.rows.own[0], 30)
    for begin in range(30, 5000, 70):
        for row in rows:
            row.accept(text[begin : begin + 70])
        assert same(rows[0].draft(), rows[1].draft())
    assert rows[0].own.log.shape[1] < 10_000
    assert rows[0].own.tokens.tolist() == text


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
    assert np.array_equal(drafter.shared.lambdas, formula().lambdas)
    third = job()
    assert all(same(one, other) for one, other in zip(first, third, strict=True))
    assert np.array_equal(beliefs[0], drafter.shared.lambdas)
    assert np.array_equal(beliefs[1], drafter.calibration.curve)


def test_warming_up_teaches_a_drafter_nothing(make_trie):
    drafter = drafter_of(make_trie([[1, 2, 3]]))
    drafter.warm_up()
    assert len(drafter.session) == 0
    assert np.array_equal(drafter.shared.lambdas, formula().lambdas)
    assert not drafter.shared.counted.any()


def test_what_proves_right_is_believed_more():
    """Own text says 2 behind 1; the job's outputs say 3. What comes true wins, again and again."""
    for right in (2, 3):
        drafter = drafter_of()
        answered(drafter, [0], [1, 3])
        row = drafter.start([1, 2])
        for _ in range(40):
            row.accept([1])
            tree = row.draft(branch_length=1)
            row.accept([right])
        assert tree.token_ids[1] == right
        assert tree.probabilities[1] > 0.8


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
