"""Drafting: what the drafter proposes and credits, what it remembers and learns, and the draft tree's invariants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import as_parallel
from lookahead.errors import UsageError
from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_tries
from tests.support.drafts import answered, paths_of, tree_of
from tests.support.tries import append_ids, build_ids

token = st.integers(0, 3)
document_lists = st.lists(st.lists(token, min_size=1, max_size=8), min_size=1, max_size=3)
requests = st.lists(
    st.tuples(st.lists(token, min_size=1, max_size=12), st.lists(st.lists(token, min_size=1, max_size=4), max_size=5)),
    min_size=1,
    max_size=3,
)  # prompt, tokens accepted in each step


def sources_of(drafter, tree):
    """Path -> name of its last token's source."""
    return dict(zip(paths_of(tree)[1:], (drafter.source_names[source] for source in tree.sources[1:]), strict=True))


# ---- what a draft is
@given(
    requests,
    st.sampled_from(["hierarchical", "parallel", "single", "off"]),
    st.integers(1, 20),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(0, 25)),
    st.one_of(st.none(), st.integers(0, 10)),
    st.sampled_from([0.0, 0.02, 0.3]),
)
def test_every_draft_is_a_tree_within_all_limits(requests, strategy, decoding_length, branch_length, budget, longest, price):
    drafter = Drafter([], DraftOptions(strategy, decoding_length, branch_length, price))
    for prompt, steps in requests:
        row = drafter.start(prompt)
        last = prompt[-1]
        for accepted in [[], *steps]:
            row.accept(accepted)
            last = accepted[-1] if accepted else last
            tree = row.draft(budget, longest)
            assert (tree.token_ids[0], tree.parents[0], tree.probabilities[0], tree.sources[0]) == (last, -1, 1, -1)
            below = range(1, len(tree))
            assert len(tree) <= min(decoding_length, 99 if budget is None else budget + 1)
            assert tree.depths().max() <= min(branch_length, 99 if longest is None else longest)
            assert all(0 <= tree.parents[node] < node for node in below)
            assert all(price * 0.999 <= tree.probabilities[node] <= tree.probabilities[tree.parents[node]] for node in below)
            assert all(0 <= tree.sources[node] < len(drafter.source_names) for node in below)
            assert all(tree.matches[node] >= 0 for node in below)
            if strategy in ("hierarchical", "single"):
                assert len(set(paths_of(tree))) == len(tree)
                assert sorted(tree.probabilities, reverse=True) == tree.probabilities.tolist()
            if strategy == "single":
                assert tree.is_chain()
            if strategy == "parallel":
                assert all(tree.parents[node] in (0, node - 1) for node in below)
            if strategy == "off":
                assert len(tree) == 1
        row.finish()


def test_longer_match_is_believed_before_a_commoner_shorter_one(make_trie):
    trie = make_trie([[5, 6, 7, 1], *[[8, 7, 2]] * 3])
    tree = Drafter([trie]).start([5, 6, 7]).draft(branch_length=1)
    assert tree.token_ids[1] == 1
    assert tree.matches[1] == 3
    assert tree.token_ids[2] == 2


@pytest.mark.parametrize(
    ("prompt", "answers", "ends", "source"),
    [
        ([1, 2, 3, 9, 1, 2], [], False, "prompt"),
        ([9], [[1, 2, 3, 9, 1, 2]], False, "output"),
        ([8], [[1, 2], [3, 9, 4]], True, "session"),
    ],
)
def test_copied_text_is_drafted_and_attributed_to_where_it_stands(prompt, answers, ends, source):
    drafter = Drafter()
    row = drafter.start(prompt)
    for each in answers:
        row.accept(each)
    if ends:
        row.finish()
        row = drafter.start([7, 1, 2])
    tree = row.draft(branch_length=2)
    assert paths_of(tree)[1] == (3,)
    assert sources_of(drafter, tree)[(3,)] == sources_of(drafter, tree)[(3, 9)] == source


@pytest.mark.parametrize(
    ("options", "answer"), [(DraftOptions(), []), (DraftOptions(session_tokens=0), [3, 4, 5]), (DraftOptions("off"), [3, 4, 5])]
)
def test_jobs_without_outputs_or_memory_remember_nothing(options, answer):
    drafter = Drafter([], options)
    answered(drafter, [1, 2], answer)
    assert len(drafter.session) == 0
    assert set(drafter.start([3, 4]).draft().token_ids.tolist()) <= {3, 4}


# ---- who is credited
def test_branches_of_a_trie_are_attributed_to_its_file(make_trie):
    one = make_trie([[1, 2, 3]], name="one.trie")
    two = make_trie([[4, 5, 6]], name="two.trie")
    drafter = Drafter([one, two])
    assert drafter.source_names == ("prompt", "output", "session", "recycled", "trie:one", "trie:two")
    for start, expected in ((1, "trie:one"), (4, "trie:two")):
        row = drafter.start([start])
        names = sources_of(drafter, row.draft())
        assert names[(start + 1,)] == names[(start + 1, start + 2)] == expected
        row.finish()


def test_heavier_trie_is_believed_first(make_trie):
    tries = [make_trie([[1, 2]], name="one.trie"), make_trie([[1, 3]], name="two.trie")]
    for weights, first in (([5.0, 1.0], 2), ([1.0, 5.0], 3)):
        assert Drafter(tries, weights=weights).start([1]).draft().token_ids[1] == first


def test_branch_of_a_heavier_source_is_drafted_first(make_trie):
    parts = [make_trie([[1, 2]], name="one.trie", sources="a"), make_trie([[1, 3]], name="two.trie", sources="b")]
    out = parts[0].path.with_name("merged.trie")
    for heavy, first in (("a", 2), ("b", 3)):
        merge_tries([part.path for part in parts], out, {heavy: 5.0})
        assert Drafter([Trie(out)]).start([1]).draft().token_ids[1] == first


@given(st.lists(document_lists, min_size=2, max_size=4), st.lists(token, min_size=1, max_size=2))
def test_next_tokens_of_a_trie_of_many_segments_are_those_of_the_merged_one(tmp_path_factory, parts, context):
    path = tmp_path_factory.mktemp("parts") / "x.trie"
    trie = build_ids(path, parts[0])
    for part in parts[1:]:
        trie = append_ids(path, part)
    merge_tries([path], path.with_name("merged.trie"))
    trees = [Drafter([t]).start(context).draft(branch_length=1) for t in (trie, Trie(path.with_name("merged.trie")))]
    one, other = (dict(zip(paths_of(tree), tree.probabilities.tolist(), strict=True)) for tree in trees)
    assert one == pytest.approx(other, abs=0.02)  # longest matches and samples are those of each segment by itself


# ---- what is remembered and learned
def test_prompt_is_forgotten_when_its_request_ends():
    drafter = Drafter()
    answered(drafter, [1, 2, 3, 4, 5, 6, 7], [8])
    for prompt in ([1, 2, 3], [4, 5, 6]):
        row = drafter.start(prompt)
        assert not {1, 2, 3, 4, 5, 6} & (set(row.draft().token_ids[1:].tolist()) - set(prompt))
        row.finish()
    row = drafter.start([6, 7])
    assert sources_of(drafter, row.draft())[(8,)] == "session"


def test_text_that_fares_badly_counts_less(make_trie):
    good, bad = make_trie([[1, 2, 3, 4, 5]] * 3, name="good.trie"), make_trie([[1, 7], [2, 7], [3, 7], [4, 7]], name="bad.trie")
    drafter = Drafter([bad, good])
    for _ in range(20):
        answered(drafter, [1], [2, 3, 4, 5])
    assert drafter.shared.weights[0] < 0.3 * drafter.shared.weights[1]


# ---- trees and options
def test_parallel_lays_the_same_branches_side_by_side_and_cuts_the_last_at_the_budget():
    paths = [(), (1,), (1, 2), (1, 2, 3), (1,), (1, 3), (1,), (1, 2), (1, 2, 0)]
    tree = tree_of([9, 1, 2, 3, 3, 0], [-1, 0, 1, 2, 1, 2])
    assert paths_of(as_parallel(tree, 100)) == paths
    assert paths_of(as_parallel(tree, 4)) == paths[:5]


def test_chains_only_gives_one_branch_from_then_on_and_leaves_off_as_it_is():
    drafter = Drafter()
    row = drafter.start([1, 2, 1, 3, 1])
    assert not row.draft().is_chain()
    drafter.restrict_to_chains()
    assert row.draft().is_chain()
    assert row.draft().draft_tokens
    off = Drafter([], DraftOptions("off"))
    off.restrict_to_chains()
    assert off.start([1, 2, 1, 3, 1]).draft().draft_tokens == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "best"}, "strategy 'best': choose one of hierarchical, parallel, single, off"),
        ({"decoding_length": 0}, "between 1 and 1024"),
        ({"decoding_length": 1025}, "between 1 and 1024"),
        ({"branch_length": 0}, "between 1 and 1024"),
        ({"price": 1.5}, "between 0 and 1"),
        ({"session_tokens": -1}, "0 or more"),
    ],
)
def test_draft_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        DraftOptions(**options)
