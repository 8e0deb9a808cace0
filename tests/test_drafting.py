"""Drafting: the compiled kernels against slow references, the draft tree's invariants, and what the drafter remembers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.draft import candidates, planner
from lookahead.draft.candidates import LONGEST_MATCH, CandidateTable
from lookahead.draft.drafter import Drafter, DraftOptions, as_parallel
from lookahead.draft.tree import DraftTree, chain, root_only
from lookahead.errors import UsageError
from lookahead.trie.search import match_orders
from lookahead.trie.session import BREAK, TokenLog
from lookahead.trie.suffixes import DEPTH
from tests.tries import append_ids, build_ids, segment_of

SEPARATOR = 5  # vocabulary of the small corpora below
token = st.integers(0, 3)
texts = st.lists(token, min_size=1, max_size=22)  # short enough that no cap of the kernels is reached
document_lists = st.lists(st.lists(token, min_size=1, max_size=8), min_size=1, max_size=3)


def agreeing(text, place, context):
    """How many tokens before and at `place` agree with the context's end, at most LONGEST_MATCH."""
    match = 0
    while match < min(place + 1, len(context), LONGEST_MATCH) and text[place - match] == context[-1 - match]:
        match += 1
    return match


def rows_of(table, filled):
    """(tokens, weight, source) of each row."""
    return [
        (table.tokens[row, : table.lengths[row]].tolist(), float(table.weights[row]), int(table.sources[row]))
        for row in range(filled)
    ]


# ---- places of a token log


def from_log(log, context, own, prompt_length=0, source=0, depth=6):
    table = CandidateTable(2 * candidates.PER_CHAIN, depth)
    chains = (log.previous1, log.previous2, log.head1, log.head2)
    filled = candidates.from_log(
        *table.arrays, 0, log.tokens, len(log), *chains, context, len(context), own, prompt_length, source
    )
    return rows_of(table, filled)


def belief(match, own=False):
    """Weight of a place by its match length: half as much again for each token up to twelve, eight times for own text."""
    return float(np.float32((8.0 if own else 1.0) * 1.5 ** min(match, 12)))


@given(texts, st.integers(0, 22), st.sampled_from([1, 12]))
@settings(max_examples=100, deadline=None)
def test_places_of_the_requests_own_text_are_those_a_search_finds(text, prompt_length, hash_bits):
    log = TokenLog(1000, hash_bits)
    log.append(text)
    expected = []
    matches = {place: agreeing(text, place, text) for place in range(len(text) - 1)}
    for wanted in ("two tokens or more", "one token"):
        for place in sorted(matches, reverse=True):
            if matches[place] and (matches[place] >= 2) == (wanted == "two tokens or more"):
                start = place + 1
                repeated = (text[start:] * 6)[:6]  # text that repeats itself goes on repeating
                expected.append((repeated, belief(matches[place], own=True), int(start >= prompt_length)))
    assert from_log(log, np.array(text, np.int32), own=True, prompt_length=prompt_length) == expected


@given(document_lists, texts)
@settings(max_examples=100, deadline=None)
def test_places_of_the_jobs_outputs_are_those_a_search_finds(documents, context):
    log = TokenLog(1000)
    for document in documents:
        log.append_document([], document)
    text = log.tokens[: len(log)].tolist()
    expected = []
    matches = {place: agreeing(text, place, context) for place in range(len(text) - 1)}
    for wanted in ("two tokens or more", "one token"):
        for place in sorted(matches, reverse=True):
            if matches[place] and (matches[place] >= 2) == (wanted == "two tokens or more") and text[place + 1] != BREAK:
                rest = [*text[place + 1 :], BREAK]
                expected.append((rest[: rest.index(BREAK)][:6], belief(matches[place]), 7))
    assert from_log(log, np.array(context, np.int32), own=False, source=7) == expected


def test_no_more_places_of_a_log_are_taken_than_the_table_is_made_for():
    log = TokenLog(10_000)
    log.append([1, 2] * 500)
    found = from_log(log, log.tokens[: len(log)], own=True)
    assert len(found) == candidates.PER_CHAIN  # all match by two tokens or more
    assert found[0] == ([1, 2, 1, 2, 1, 2], belief(500, own=True), 1)


# ---- places of a trie


def from_tries(segments, context, source_weights, source=3, depth=6, room=candidates.PER_TRIE, trie_depth=DEPTH):
    """Places of a trie of these segments."""
    table = CandidateTable(room, depth)
    weights, context = np.array(source_weights, np.float32), np.array(context, np.int32)
    matches = np.zeros((len(segments), 2, candidates.LONGEST_MATCH + 1), np.int64)
    filled = 0
    for s, (lows, highs) in zip(segments, matches, strict=True):
        match_orders(s.tokens, s.suffixes, s.first, s.samples, context, len(context), trie_depth, lows, highs)
    for number, s in enumerate(segments):
        filled = candidates.from_trie(
            *table.arrays, filled, s.tokens, s.suffixes, len(s.first) - 1, s.document_ends, s.document_sources,
            weights, bool((weights != 1).any()), matches, number, context, len(context), source,
        )  # fmt: skip
    return rows_of(table, filled)


def from_trie(index, context, source_weights, **options):
    return from_tries([index], context, source_weights, **options)


@given(document_lists, st.lists(token, min_size=1, max_size=10), st.booleans())
@settings(max_examples=150, deadline=None)
def test_places_of_a_trie_are_those_a_search_finds_longest_matches_first(documents, context, weighted):
    source_weights = [0.5 + number if weighted else 1.0 for number in range(len(documents))]
    expected = []
    for document, weight in zip(documents, source_weights, strict=True):
        for place in range(len(document) - 1):
            if match := agreeing(document, place, context):
                expected.append((match, (document[place + 1 :][:6], float(np.float32(belief(match)) * np.float32(weight)), 3)))
    found = from_trie(segment_of(documents, SEPARATOR), context, source_weights)
    assert sorted(found) == sorted(row for _, row in expected)
    if not weighted:
        assert [weight for _, weight, _ in found] == sorted((weight for _, (_, weight, _) in expected), reverse=True)


def test_branch_of_a_trie_does_not_run_into_the_next_document():
    index = segment_of([[1, 2, 3], [0, 0, 0]], SEPARATOR)
    assert from_trie(index, [1], [1, 1]) == [([2, 3], belief(1), 3)]
    assert from_trie(index, [3], [1, 1]) == []


def test_match_is_not_followed_beyond_the_depth_that_suffixes_are_sorted_to():
    assert from_trie(segment_of([[0, 1, 2, 3, 4]], SEPARATOR), [0, 1, 2, 3], [1.0]) == [([4], belief(4), 3)]
    assert from_trie(segment_of([[0, 1, 2, 3, 4]], SEPARATOR), [0, 1, 2, 3], [1.0], trie_depth=2) == [([4], belief(2), 3)]


def test_places_of_a_long_range_are_an_even_sample():
    documents = [[1, 2, n // 100] for n in range(400)]
    found = from_trie(segment_of(documents, SEPARATOR), [1, 2], [1.0] * 400)
    assert len(found) == candidates.PER_ORDER
    assert sorted(tokens for tokens, _, _ in found) == [[n] for n in range(4) for _ in range(candidates.PER_ORDER // 4)]


def test_segments_share_the_places_taken_of_each_match_length():
    """The larger segment gives more; no segment's short matches are taken where another has enough long ones."""
    one = segment_of([[1, 2, 3, 0]] * 300, SEPARATOR)
    two = segment_of([[1, 2, 3, 4]] * 100 + [[3, 1]] * 150, SEPARATOR)
    found = from_tries([one, two], [1, 2, 3], [1.0] * 400, room=1000)
    assert [(tokens, weight) for tokens, weight, _ in found[:24]] == [([0], belief(3))] * 24
    assert [(tokens, weight) for tokens, weight, _ in found[24:32]] == [([4], belief(3))] * 8
    assert {(tuple(tokens), weight) for tokens, weight, _ in found[32:]} == {((1,), belief(1))}


def test_places_of_a_trie_stop_at_the_end_of_the_table():
    documents = [[1, 2, n % 5] for n in range(100)]
    found = from_trie(segment_of(documents, SEPARATOR), [1, 2], [1.0] * 100, room=10)
    assert len(found) == 10


# ---- the planner

candidate_rows = st.lists(
    st.tuples(st.lists(token, min_size=1, max_size=5), st.integers(1, 8), st.integers(0, 4)), max_size=12
)  # tokens, exponent of the weight, source


def table_of(rows, depth=5):
    table = CandidateTable(max(1, len(rows)), depth)
    for number, (tokens, exponent, source) in enumerate(rows):
        table.tokens[number, : len(tokens)] = tokens
        table.lengths[number] = len(tokens)
        table.weights[number] = 2.0**exponent
        table.sources[number] = source
    return table


def grow(rows, budget, branch_length=5, least=0.0, single=False, root=9):
    table = table_of(rows)
    arrays = np.empty(budget + 1, np.int32), np.empty(budget + 1, np.int32), np.empty(budget + 1, np.float32)
    arrays = (*arrays, np.empty(budget + 1, np.int32))
    lists = np.empty(max(1, len(rows)) * (budget + 2), np.int32)
    made = planner.grow(*table.arrays, len(rows), root, budget, branch_length, least, single, lists, *arrays)
    return DraftTree(*(a[:made] for a in arrays))


def all_paths(rows, branch_length, least, single):
    """{path: (probability, sources of its heaviest rows)} of every node that may be drafted, by plain recursion."""
    found = {}

    def descend(path, reach, through):
        if len(path) == branch_length:
            return
        following = {}
        for row in through:
            if len(row[0]) > len(path):
                following.setdefault(row[0][len(path)], []).append(row)
        weight_of = {t: sum(2.0**exponent for _, exponent, _ in below) for t, below in following.items()}
        total = planner.ESCAPE + sum(weight_of.values())
        if single and weight_of:
            best = max(weight_of, key=weight_of.__getitem__)
            following = {best: following[best]}
        for next_token, below in following.items():
            probability = np.float32(np.float32(reach * np.float32(weight_of[next_token])) / np.float32(total))
            if float(probability) >= least:
                heaviest = max(exponent for _, exponent, _ in below)
                found[(*path, next_token)] = probability, {s for _, exponent, s in below if exponent == heaviest}
                descend((*path, next_token), probability, below)

    descend((), np.float32(1), rows)
    return found


def paths_of(tree):
    paths = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], int(tree.token_ids[node])))
    return paths


@given(candidate_rows, st.integers(1, 30), st.integers(1, 6), st.sampled_from([0.0, 1e-3, 0.05, 0.3]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_tree_is_the_most_probable_one_within_the_budget(rows, budget, branch_length, least, single):
    tree = grow(rows, budget, branch_length, least, single)
    possible = all_paths(rows, branch_length, least, single)
    drafted = paths_of(tree)[1:]
    assert len(set(drafted)) == len(drafted) == min(budget, len(possible))
    for path, probability, source in zip(drafted, tree.probabilities[1:], tree.sources[1:], strict=True):
        assert probability == pytest.approx(possible[path][0], rel=1e-5)
        assert source in possible[path][1]
    best = sorted((probability for probability, _ in possible.values()), reverse=True)[:budget]
    assert tree.probabilities[1:].tolist() == pytest.approx(best, rel=1e-5)  # taken best first


def test_node_known_from_one_short_match_promises_little():
    assert grow([([1], 1, 0)], 4).probabilities.tolist() == [1.0, pytest.approx(2 / 6)]
    assert grow([([1], 8, 0)], 4).probabilities.tolist() == [1.0, pytest.approx(256 / 260)]


def test_no_more_than_the_widest_number_of_children_grow_below_a_node():
    tree = grow([([n], 3, 0) for n in range(40)], 60)
    assert tree.draft_tokens == planner.WIDEST
    assert (tree.parents[1:] == 0).all()


def test_without_candidates_or_budget_there_is_only_the_root():
    assert grow([], 5).token_ids.tolist() == [9]
    assert grow([([1], 3, 0)], 0).token_ids.tolist() == [9]


# ---- the drafter

requests = st.lists(
    st.tuples(st.lists(token, min_size=1, max_size=12), st.lists(st.lists(token, min_size=1, max_size=4), max_size=5)),
    min_size=1,
    max_size=3,
)  # prompt, tokens accepted in each step


@given(
    requests,
    st.sampled_from(["hierarchical", "parallel", "single", "off"]),
    st.integers(1, 20),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(0, 25)),
    st.one_of(st.none(), st.integers(0, 10)),
)
@settings(max_examples=80, deadline=None)
def test_every_draft_is_a_tree_within_all_limits(requests, strategy, decoding_length, branch_length, budget, longest):
    drafter = Drafter([], DraftOptions(strategy, decoding_length, branch_length, least=1e-2))
    for prompt, steps in requests:
        drafter.start(prompt)
        last = prompt[-1]
        for accepted in [[], *steps]:
            drafter.accept(accepted)
            last = accepted[-1] if accepted else last
            tree = drafter.draft(budget, longest)
            assert (tree.token_ids[0], tree.parents[0], tree.probabilities[0], tree.sources[0]) == (last, -1, 1, -1)
            below = range(1, len(tree))
            assert len(tree) <= min(decoding_length, 99 if budget is None else budget + 1)
            assert tree.depths().max() <= min(branch_length, 99 if longest is None else longest)
            assert all(0 <= tree.parents[node] < node for node in below)
            assert all(1e-2 <= tree.probabilities[node] <= tree.probabilities[tree.parents[node]] for node in below)
            assert all(0 <= tree.sources[node] < len(drafter.source_names) for node in below)
            if strategy == "hierarchical":
                assert len(set(paths_of(tree))) == len(tree)
            if strategy == "single":
                assert tree.is_chain()
            if strategy == "parallel":
                assert all(tree.parents[node] in (0, node - 1) for node in below)
            if strategy == "off":
                assert len(tree) == 1
        drafter.finish()


def drafted(drafter, prompt, **limits):
    """(paths of the draft behind `prompt`, names of the sources of its nodes)."""
    drafter.start(prompt)
    tree = drafter.draft(**limits)
    return paths_of(tree)[1:], [drafter.source_names[source] for source in tree.sources[1:]]


def test_text_of_the_prompt_is_drafted_and_attributed_to_it():
    paths, names = drafted(Drafter(), [1, 2, 3, 9, 1, 2], branch_length=2)
    assert paths == [(3,), (3, 9)]
    assert names == ["prompt", "prompt"]


def test_output_of_the_same_request_is_attributed_to_the_output():
    drafter = Drafter()
    drafter.start([9])
    drafter.accept([1, 2, 3, 1, 2])
    tree = drafter.draft(branch_length=1)
    assert paths_of(tree) == [(), (3,)]
    assert drafter.source_names[tree.sources[1]] == "output"


def test_prompt_is_forgotten_when_its_request_ends():
    drafter = Drafter()
    drafter.start([1, 2, 3, 4, 5, 6, 7])
    drafter.accept([8])
    drafter.finish()
    assert drafted(drafter, [1, 2, 3]) == ([], [])
    assert drafted(drafter, [4, 5, 6]) == ([], [])  # the last prompt tokens are kept as left context only
    assert drafted(drafter, [6, 7]) == ([(8,)], ["session"])


def test_request_without_output_leaves_nothing_behind():
    drafter = Drafter()
    drafter.start([1, 2, 3, 4])
    drafter.finish()
    assert len(drafter.session) == 0
    assert drafted(drafter, [2, 3]) == ([], [])


def test_finished_output_is_drafted_for_the_next_request():
    drafter = Drafter()
    drafter.start([1, 2])
    drafter.accept([3, 4])
    drafter.accept([5, 6])
    drafter.finish()
    assert drafted(drafter, [9, 3, 4]) == ([(5,), (5, 6)], ["session", "session"])


def test_job_that_remembers_nothing_drafts_from_the_request_alone():
    drafter = Drafter([], DraftOptions(session_tokens=0))
    drafter.start([1, 2])
    drafter.accept([3, 4, 5])
    drafter.finish()
    assert drafted(drafter, [3, 4]) == ([], [])
    assert drafted(drafter, [3, 4, 3], branch_length=1) == ([(4,)], ["prompt"])


def test_branches_of_a_trie_are_attributed_to_its_file(make_trie):
    one = make_trie([[1, 2, 3]], name="one.trie")
    two = make_trie([[4, 5, 6]], name="two.trie")
    drafter = Drafter([one, two])
    assert drafter.source_names == ("prompt", "output", "session", "trie:one", "trie:two")
    assert drafted(drafter, [1]) == ([(2,), (2, 3)], ["trie:one"] * 2)
    assert drafted(drafter, [4]) == ([(5,), (5, 6)], ["trie:two"] * 2)


def test_branches_of_all_segments_of_a_trie_are_drafted_and_attributed_to_it(tmp_path):
    build_ids(tmp_path / "x.trie", [[1, 2, 3]])
    trie = append_ids(tmp_path / "x.trie", [[1, 2, 4], [5, 6]])
    drafter = Drafter([trie], DraftOptions(session_tokens=0))
    paths, names = drafted(drafter, [1])
    assert sorted(paths) == [(2,), (2, 3), (2, 4)]
    assert names == ["trie:x"] * 3
    assert drafted(drafter, [5])[0] == [(6,)]


@given(st.lists(document_lists, min_size=2, max_size=4), st.lists(token, min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_draft_of_a_trie_of_many_segments_is_that_of_the_merged_one(tmp_path_factory, parts, context):
    from lookahead.trie.edit import merge_tries
    from lookahead.trie.file import Trie

    path = tmp_path_factory.mktemp("parts") / "x.trie"
    trie = build_ids(path, parts[0])
    for part in parts[1:]:
        trie = append_ids(path, part)
    merge_tries([path], path.with_name("merged.trie"))
    options = DraftOptions(decoding_length=400, least=0)  # no limit is reached: what is drafted is all that is known
    one, other = (Drafter([t], options) for t in (trie, Trie(path.with_name("merged.trie"))))
    assert set(drafted(one, context)[0]) == set(drafted(other, context)[0])


def test_branch_of_a_heavier_source_is_drafted_first(make_trie):
    from lookahead.trie.edit import merge_tries
    from lookahead.trie.file import Trie

    parts = [make_trie([[1, 2]], name="one.trie", sources="a"), make_trie([[1, 3]], name="two.trie", sources="b")]
    out = parts[0].path.with_name("merged.trie")
    for heavy, first in (("a", 2), ("b", 3)):
        merge_tries([part.path for part in parts], out, {heavy: 5.0})
        paths, _ = drafted(Drafter([Trie(out)]), [1])
        assert (paths[0], len(paths)) == ((first,), 2)


def test_parallel_lays_the_same_branches_side_by_side():
    tree = grow([([1, 2, 3], 8, 0), ([1, 2, 0], 6, 1), ([1, 3], 4, 2)], 8)
    leaves = {path for path in paths_of(tree) if not any(p[:-1] == path for p in paths_of(tree) if p)}
    side_by_side = as_parallel(tree, 100)
    assert {path for path in paths_of(side_by_side) if len(path) and path in leaves} == leaves
    assert (side_by_side.parents == 0).sum() == len(leaves) == 3
    assert side_by_side.draft_tokens == sum(map(len, leaves))


def test_parallel_cuts_the_last_branch_at_the_budget():
    tree = grow([([1, 2, 3], 8, 0), ([1, 2, 0], 6, 1), ([1, 3], 4, 2)], 8)
    side_by_side = as_parallel(tree, 5)
    assert paths_of(side_by_side) == [(), (1,), (1, 2), (1, 2, 3), (1,), (1, 2)]


def test_chains_only_gives_one_branch_from_then_on_and_leaves_off_as_it_is():
    rows = [1, 2, 1, 3, 1]
    drafter = Drafter()
    drafter.start(rows)
    assert not drafter.draft().is_chain()
    drafter.restrict_to_chains()
    assert drafter.draft().is_chain()
    assert drafter.draft().draft_tokens
    off = Drafter([], DraftOptions("off"))
    off.restrict_to_chains()
    assert drafted(off, rows) == ([], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "best"}, "strategy 'best': choose one of hierarchical, parallel, single, off"),
        ({"decoding_length": 0}, "between 1 and 1024"),
        ({"decoding_length": 1025}, "between 1 and 1024"),
        ({"branch_length": 0}, "between 1 and 1024"),
        ({"session_tokens": -1}, "0 or more"),
    ],
)
def test_draft_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        DraftOptions(**options)


def test_tree_of_a_smaller_budget_is_the_beginning_of_a_larger_one():
    rows = [([1, 2, 3], 8, 0), ([1, 3], 4, 2)]
    whole = paths_of(grow(rows, 8))
    for budget in range(8):
        assert paths_of(grow(rows, budget)) == whole[: budget + 1]


def test_chain_and_root_are_trees_of_one_branch():
    assert paths_of(chain([7, 8, 9])) == [(), (8,), (8, 9)]
    assert chain([7, 8, 9]).is_chain()
    assert root_only(7).is_chain()
    assert root_only(7).draft_tokens == 0
