"""How many drafts pay: the learned cost curve and the sizes of forwards that it leads to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.budget.backoff import APART, DEBT, Backoff
from lookahead.budget.books import BESIDE, GAINS, PLAIN, SPENT
from lookahead.budget.cost import EVEN, SIZES, CostCurve, MeasuredStep, bucket, shape_of
from lookahead.budget.goodput import (
    CHANGED,
    MARGIN,
    TRIALS,
    GoodputBudget,
)
from lookahead.budget.profile import CostProfile, Forward, Setting
from lookahead.draft.tree import DraftTree, chain

SETTING = Setting("model", "shape", "CPU", "float32", "sdpa", "packed", 2)


def profile_of(cost, **fields) -> CostProfile:
    """A profile of cost(tokens) seconds."""
    return CostProfile(SETTING, "measured", tuple(SIZES.tolist()), tuple(float(cost(t)) for t in SIZES.tolist()), **fields)


def chain_of(probability: float, nodes: int = 63) -> DraftTree:
    """A branch whose tokens are right with this probability each."""
    tree = chain(np.arange(nodes + 1, dtype=np.int32), source=0)
    tree.probabilities = (probability ** np.arange(nodes + 1)).astype(np.float32)
    return tree


def play(
    cost, probabilities, steps: int = 1010, noise: float = 0.0, budget: GoodputBudget | None = None, profile=None
) -> GoodputBudget:
    """A job of `steps` steps whose forwards cost cost(tokens) seconds; row k drafts a chain of probabilities[k]."""
    random = np.random.default_rng(0)
    budget = budget or GoodputBudget(CostCurve(profile))
    for _ in range(steps):
        trees = cut(budget, [chain_of(p) for p in probabilities])
        tokens = sum(map(len, trees))
        said = len(trees)
        for tree, p in zip(trees, probabilities, strict=True):
            wrong = np.flatnonzero(random.random(tree.draft_tokens) >= p)
            said += int(wrong[0]) if len(wrong) else tree.draft_tokens
        seconds = cost(tokens) * (5.0 if random.random() < noise else 1.0)
        budget.observe(step_of(tokens, seconds, said, len(probabilities)))
    return budget


def step_of(tokens: int, seconds: float, emitted: int = 1, rows: int = 1, beside: float = 1e-4) -> MeasuredStep:
    """One whose forward took `seconds`, and all else `beside`."""
    return MeasuredStep(Forward(tokens, rows), emitted, seconds + beside, seconds)


def laid_out(trees: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What budgets take of trees of these probabilities."""
    lengths = np.array([len(tree) for tree in trees])
    return np.concatenate(trees), np.stack([np.cumsum(lengths) - lengths, lengths], 1)


def cut(budget: GoodputBudget, trees: Sequence[DraftTree], **beside) -> list[DraftTree]:
    """What a budget leaves of these trees."""
    nodes, padding, filled = budget.choose(*laid_out([tree.probabilities for tree in trees]), **beside)
    cut = [tree.first(count) for tree, count in zip(trees, nodes, strict=True)]
    if padding:
        cut[filled] = cut[filled].filled_up(padding)
    return cut


def tokens_of_steps(cost, budget: GoodputBudget, probability: float, steps: int) -> np.ndarray:
    """Tokens of each forward of a job that drafts one chain."""
    tokens = []
    for _ in range(steps):
        tokens.append(len(cut(budget, [chain_of(probability)])[0]))
        seconds = cost(tokens[-1])
        budget.observe(step_of(tokens[-1], seconds, min(tokens[-1], 3)))
    return np.array(tokens)


def budget_of(curve: CostCurve, plain_over_spent: float, outside: float = 1e-4) -> GoodputBudget:
    """So many times faster than plain decoding so far, and not to try or look; a step takes `outside` s beside forwards."""
    budget = GoodputBudget(curve)
    budget._steps = budget._looked = len(TRIALS)
    budget.books.state[[PLAIN, SPENT, BESIDE]] = plain_over_spent, 1.0, outside
    return budget


def speedup_of(budget: GoodputBudget) -> float:
    """Over plain decoding, by what steps should have taken: what tokens are worth follows from it."""
    return budget.books.state[PLAIN] / budget.books.state[SPENT]


def sizes(budget: GoodputBudget, probabilities) -> list[int]:
    """Draft tokens of each row that pay now."""
    trees = [chain_of(p).probabilities for p in probabilities]
    fresh = budget_of(budget.curve, speedup_of(budget))
    return [nodes - 1 for nodes in fresh.choose(*laid_out(trees), chains=True)[0]]


def linear(slope: float):
    """A draft token costs `slope` of a plain step."""
    return lambda tokens: 0.01 * (1 + slope * (tokens - 1))


def test_cost_of_any_size_is_read_off_the_observed_steps() -> None:
    curve = CostCurve()
    for tokens, seconds in (*((1, 1.0), (8, 2.0), (16, 4.0)) * 3, (8, 99.0)):
        curve.observe(Forward(tokens), seconds)
    assert [curve.seconds(Forward(tokens)) for tokens in (1, 8, 16)] == pytest.approx([1.0, 2.0, 4.0], rel=0.02)
    assert 1.0 < curve.seconds(Forward(4)) < 2.0 < curve.seconds(Forward(12)) < 4.0 < curve.seconds(Forward(64))


def test_one_slow_step_of_a_size_is_not_believed() -> None:
    curve = CostCurve(profile_of(linear(0.1)))
    for _ in range(3):
        curve.observe(Forward(1), 0.01)
    curve.observe(Forward(8), 5.0)
    assert curve.seconds(Forward(8)) == pytest.approx(linear(0.1)(8))


def test_cost_may_fall_with_size_where_the_machine_is_so() -> None:
    curve = CostCurve()
    for tokens, seconds in ((1, 6.0), (3, 12.0), (4, 8.0)) * 3:
        curve.observe(Forward(tokens), seconds)
    assert [curve.seconds(Forward(tokens)) for tokens in (1, 3, 4)] == pytest.approx([6.0, 12.0, 8.0])


def test_machine_that_is_slower_than_its_profile_says_is_so_at_sizes_nobody_has_seen() -> None:
    curve = CostCurve(profile_of(linear(0.1)))
    for tokens in (1, 1, 4, 4):
        curve.observe(Forward(tokens), 1.5 * linear(0.1)(tokens))
    assert curve.seconds(Forward(64)) == pytest.approx(1.5 * linear(0.1)(64))


def test_slow_hour_of_the_machine_does_not_stick_to_the_sizes_seen_in_it() -> None:
    """Size 16 is last seen while all is half as fast; then only 8 is."""
    curve, cost = CostCurve(profile_of(linear(0.1))), linear(0.1)
    for slower, seen in ((1.0, (1, 8, 16)), (2.0, (1, 8, 16)), (1.0, (1, 8))):
        for _ in range(200):
            for tokens in seen:
                curve.observe(Forward(tokens), slower * cost(tokens))
    assert curve.seconds(Forward(8)) == pytest.approx(cost(8), rel=0.03)
    assert curve.seconds(Forward(16)) == pytest.approx(cost(16), rel=0.06)


@pytest.mark.parametrize(
    ("known", "steps", "least", "most"), [(True, 6, 1.0, 1.003), (True, 200, 1.01, 1.02), (False, 6, 1.02, 1.02)]
)
def test_small_differences_from_the_profile_are_noise_until_seen_often(
    known: bool, steps: int, least: float, most: float
) -> None:
    """What a token costs is a difference of forwards. Without a profile there is nothing to doubt steps by."""
    cost = linear(0.02)
    curve = CostCurve(profile_of(cost) if known else None)
    slower = {24: 1.0, 32: 1.02, 48: 1.5}
    for _ in range(steps):
        for tokens, times in slower.items():
            curve.observe(Forward(tokens), times * cost(tokens))
    small, large = (curve.seconds(Forward(size)) / cost(size) / curve.seconds(Forward(24)) * cost(24) for size in (32, 48))
    assert least - 0.004 < small < most + 0.004
    assert large == pytest.approx(1.5, rel=0.03)


def test_a_line_leads_only_so_far() -> None:
    """However steep between two sizes: no forward comes to cost nothing."""
    for apart in (0.75, 1.25):
        curve = CostCurve(profile_of(linear(0.1)))
        for _ in range(60):
            curve.observe(Forward(3), linear(0.1)(3))
            curve.observe(Forward(4), apart * linear(0.1)(4))
        ratios = [curve.seconds(Forward(tokens)) / linear(0.1)(tokens) for tokens in SIZES.tolist()]
        assert min(ratios) > 0.5
        assert max(ratios) < 1.6


def test_rows_and_keys_cost_what_the_profile_says_of_them() -> None:
    profile = profile_of(linear(0.1), per_row=0.001, per_key=1e-6, per_query_key=2e-7)
    expected = linear(0.1)(32) + 8 * 0.001 + 4000 * (1e-6 + 2e-7 * 32 / 8)
    assert CostCurve(profile).seconds(Forward(32, rows=8, keys=4000)) == pytest.approx(expected)
    assert profile.forward_seconds(Forward(32, 8, 4000)) == pytest.approx(expected)


def test_rows_that_go_one_at_a_time_cost_a_forward_each() -> None:
    profile = profile_of(linear(0.1), per_key=1e-6, separate=True)
    assert CostCurve(profile).seconds(Forward(32, rows=8, keys=800)) == pytest.approx(8 * (linear(0.1)(4) + 100e-6))
    assert profile.forward_seconds(Forward(32, 8, 800)) == pytest.approx(8 * (linear(0.1)(4) + 100e-6))


def test_flat_cost_drafts_as_much_as_is_allowed() -> None:
    assert sizes(play(lambda tokens: 0.01, [0.9], steps=3010), [0.9]) == [63]


def test_drafts_that_do_not_pay_are_not_verified_and_in_time_not_made() -> None:
    budget = play(linear(0.1), [0.05])
    assert sizes(budget, [0.05]) == [0]
    assert 0.01 < budget.price < 0.1


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("slope", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("known", [False, True])
def test_chosen_size_is_within_three_percent_of_the_best(slope: float, noise: float, known: bool) -> None:
    cost = linear(slope)

    def goodput(drafted: int) -> float:
        return sum(0.8**depth for depth in range(drafted + 1)) / (cost(1 + drafted) + 1e-4)

    (chosen,) = sizes(play(cost, [0.8], noise=noise, profile=profile_of(cost) if known else None), [0.8])
    assert goodput(chosen) >= 0.97 * max(goodput(drafted) for drafted in range(64))


@pytest.mark.deep
def test_budgets_of_a_long_noisy_job_stay_near_the_quiet_ones() -> None:
    """100,000 steps, of which one in five takes five times as long, rows coming from easy to hard."""
    random = np.random.default_rng(1)
    cost, chances = linear(0.08), random.uniform(0.2, 0.95, 100_000)
    chosen = []
    for noise in (0.0, 0.2):
        budget, slow = GoodputBudget(CostCurve()), np.random.default_rng(2).random(100_000) < noise
        drafted = np.empty(100_000)
        for step, chance in enumerate(chances):
            (tree,) = cut(budget, [chain_of(chance, 31)])
            seconds = cost(len(tree)) * (5.0 if slow[step] else 1.0)
            said = 1 + chance * (1 - chance**tree.draft_tokens) / (1 - chance)
            budget.observe(step_of(len(tree), seconds, said))
            drafted[step] = tree.draft_tokens
        chosen.append(drafted[1000:].reshape(-1, 1000).mean(axis=1))
    quiet, noisy = chosen
    assert (np.abs(noisy - quiet) <= 0.15 * quiet).all()


def test_rows_share_one_queue_and_the_predictable_one_gets_more() -> None:
    budget = play(linear(0.05), [0.9, 0.5, 0.01], profile=profile_of(linear(0.05)))
    first, second, third = sizes(budget, [0.9, 0.5, 0.01])
    assert first > second > third == 0
    worst_taken, best_left = min(0.9**first, 0.5**second), max(0.9 ** (first + 1), 0.5 ** (second + 1), 0.01)
    assert worst_taken >= best_left


def test_prompts_that_a_forward_takes_in_are_priced_with_it() -> None:
    """Where the 17th token makes a forward dear, a step with 16 tokens of a prompt has no room for drafts."""
    budget = GoodputBudget(CostCurve(profile_of(lambda tokens: 0.01 if tokens <= 16 else 1.0)))
    assert cut(budget, [chain_of(0.9, 15)])[0].draft_tokens == 15
    assert cut(budget, [chain_of(0.9, 15)], fed=15)[0].draft_tokens == 0


def test_buckets_cost_what_their_shape_costs() -> None:
    """Drafts up to the end of a bucket are free, and the next bucket is not begun for one token."""
    budget = GoodputBudget(CostCurve(profile_of(linear(0.5), bucketed=True)))
    (tree,) = cut(budget, [chain_of(0.7)])
    assert len(tree) == bucket(len(tree)) > 1
    assert [shape_of(tokens, 0, True) for tokens in range(1, 600)] == [bucket(tokens) for tokens in range(1, 600)]


def test_what_is_kept_of_a_tree_is_a_tree_of_its_first_nodes() -> None:
    budget = play(linear(0.1), [0.8, 0.8])
    trees = [chain_of(0.8), chain_of(0.6)]
    for whole, part in zip(trees, cut(budget, trees), strict=True):
        assert part.token_ids.tolist() == whole.token_ids[: len(part)].tolist()
        assert part.parents.tolist() == whole.parents[: len(part)].tolist()


@given(
    st.lists(st.lists(st.floats(0, 1, width=32), max_size=12), min_size=1, max_size=5),
    st.floats(1, 4),
    st.one_of(st.just(0), st.integers(1, 40)),
    st.integers(-1, len(SIZES) - 1),
)
def test_chosen_nodes_save_the_most_time_of_all_sizes(rows: list[list[float]], speed: float, before: int, usual: int) -> None:
    """Against every number of nodes, each priced in plain Python, a forward of another size than the one before higher, and one
    of an unusual size.
    """
    cost, trees = linear(0.07), [np.minimum.accumulate([1.0, *below]).astype(np.float32) for below in rows]
    budget = budget_of(CostCurve(profile_of(cost)), speed, 1e-3)
    books = budget.books
    budget.before = before
    books.of_sizes[GAINS + np.searchsorted(SIZES, len(rows), "right") - 1, usual] = usual >= 0
    expected = SIZES[usual] if usual >= 0 and SIZES[usual] > len(rows) else len(rows)
    kept = np.array(budget.choose(*laid_out(trees), chains=True)[0])
    chosen = int(kept.sum()) - len(rows)

    def seconds(count: int) -> float:
        tokens = len(rows) + count
        changes = int(tokens != before) + int(tokens != expected) if before else 0
        return cost(tokens) * (1 + (CHANGED - 1) * changes)

    queue = np.sort(np.concatenate([tree[1:] for tree in trees]))[::-1]
    worth = (cost(len(rows)) + 1e-3) / (len(rows) * speed)
    saved = [worth * queue[:count].sum() - seconds(count) for count in range(len(queue) + 1)]
    allowed = [n for n in range(len(queue) + 1) if len(rows) + n in SIZES or n in (0, len(queue))]
    taken = [tree[1:count] for tree, count in zip(trees, kept, strict=True)]
    assert worth * np.concatenate(taken).sum() - seconds(chosen) >= max(saved[n] for n in allowed) - 1e-8
    assert budget.before == kept.sum()


def test_nodes_much_less_probable_than_all_that_were_taken_are_not_drafted() -> None:
    """Where all nodes are taken, those that the next ones cost less than they are worth are drafted, too."""
    budget = GoodputBudget(CostCurve(profile_of(lambda tokens: 1.0 if tokens <= 8 else 10.0)))
    (few,) = cut(budget, [chain_of(0.9)])
    assert len(few) == 8
    least = MARGIN * few.probabilities[-1]
    assert budget.price >= 0.999 * least
    cut(budget, [few])
    assert budget.price < least


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_forwards_that_take_all_nodes_are_filled_up_to_a_common_size(rows: int) -> None:
    """Others are slow on some CPUs. What fills is no guess, and there is none in plain forwards, chains and beside prompts."""
    random, filled = np.random.default_rng(rows), 0
    budget = GoodputBudget(CostCurve(profile_of(linear(0.01))))
    for _ in range(40):
        trees = [chain_of(random.uniform(0.5, 0.99)).first(int(random.integers(1, 12))) for _ in range(rows)]
        total, chosen = sum(map(len, trees)), cut(budget, trees)
        taken, widest = sum(map(len, chosen)), max(map(len, chosen))
        every = all(len(after) == min(len(before), widest) for before, after in zip(trees, chosen, strict=True))
        assert taken in SIZES or taken == rows or (rows > 1 and every)
        if taken > total:
            filled += 1
            [more] = [after for before, after in zip(trees, chosen, strict=True) if len(after) > len(before)]
            assert not more.probabilities[len(more) - (taken - total) :].any()
            assert (more.parents[len(more) - (taken - total) :] == 0).all()
            assert len(more) > 1 + taken - total
        for kept in (cut(budget, trees, chains=True), cut(budget, trees, fed=5)):
            assert all(len(after) <= len(before) for before, after in zip(trees, kept, strict=True))
    assert filled


def test_tokens_are_worth_what_they_are_with_as_many_rows() -> None:
    """Eight rows say four times as much as plainly, two only what they say without drafts: they take more for a token."""
    budget = GoodputBudget(CostCurve(profile_of(linear(0.05))))
    pair = [chain_of(0.5)] * 2
    for rows, said in ((2, 2), (8, 32)) * 300:
        cut(budget, [chain_of(0.5)] * rows)
        budget.observe(step_of(rows, linear(0.05)(rows), said, rows, beside=0.0))
    only_pairs = GoodputBudget(CostCurve(profile_of(linear(0.05))))
    for _ in range(300):
        cut(only_pairs, pair)
        only_pairs.observe(step_of(2, linear(0.05)(2), 2, rows=2, beside=0.0))
    assert speedup_of(budget) == pytest.approx(2.5, rel=0.05)
    budget._again = only_pairs._again = 0
    budget._looked = only_pairs._looked = 1000  # neither is to look
    assert sum(map(len, cut(budget, pair))) == sum(map(len, cut(only_pairs, pair))) > 2


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_beside_prompts_what_a_forward_is_filled_up_with_anyway_is_drafted(rows: int) -> None:
    """Its tokens are a multiple of EVEN. Drafts that would be worth their price in no other forward take that room."""
    random = np.random.default_rng(rows)
    budget, taken = GoodputBudget(CostCurve(profile_of(linear(1.0)))), []
    for fed in range(70, 110):
        trees = [chain_of(random.uniform(0.1, 0.3)).first(12) for _ in range(rows)]
        assert sum(map(len, cut(budget, trees))) == rows
        taken.append(sum(map(len, cut(budget, trees, fed=fed))) - rows)
        left = -(fed + rows) % EVEN
        assert taken[-1] == min(left, 11) if rows == 1 else taken[-1] <= left
    assert any(taken)


def test_what_drafts_save_is_compared_with_what_drafting_takes() -> None:
    curve = CostCurve(profile_of(linear(0.01)))
    budget, plain = budget_of(curve, 1.0), curve.seconds(Forward(1))
    cut(budget, [chain_of(0.5)])
    assert budget.returns == np.inf  # nothing is known yet
    for seconds, pays in ((2 * plain, False), (plain / 100, True), (2 * plain, True)):  # the last, a slow moment
        budget.drafted_in(seconds)
        cut(budget, [chain_of(0.5)])
        assert (budget.returns > 1) == pays
    cut(budget, [chain_of(0.001)])
    assert budget.returns < 0.1
    cut(budget, [chain_of(0.5)], fed=5)
    assert budget.returns == np.inf


def test_row_that_turns_predictable_gets_drafts_at_once() -> None:
    budget = play(linear(0.1), [0.05])
    assert sizes(budget, [0.05]) == [0]
    assert sizes(budget, [0.95])[0] >= 8


def test_size_stays_where_trees_differ_a_little_and_follows_where_they_change_for_good() -> None:
    budget, random, drafted = GoodputBudget(CostCurve(profile_of(linear(0.05)))), np.random.default_rng(0), []
    for low, high in ((0.55, 0.8), (0.1, 0.2), (0.55, 0.8)):
        for _ in range(400):
            (tree,) = cut(budget, [chain_of(random.uniform(low, high))])
            budget.observe(step_of(len(tree), linear(0.05)(len(tree)), len(tree)))
            drafted.append(tree.draft_tokens)
    many, few, again = (np.array(drafted[start + 100 : start + 400]) for start in (0, 400, 800))
    assert np.mean(np.diff(many) != 0) < 0.3  # without a usual size: 0.42
    assert 3 * few.mean() < many.mean()
    assert np.median(again) == np.median(many)


@pytest.mark.parametrize("known", [False, True])
def test_machine_that_becomes_slow_for_large_forwards_is_noticed(known: bool) -> None:
    budget = play(linear(0.01), [0.8], profile=profile_of(linear(0.01)) if known else None)
    before = sizes(budget, [0.8])[0]
    play(linear(0.5), [0.8], steps=3010, budget=budget)
    assert sizes(budget, [0.8])[0] < before / 2


def test_looking_takes_a_small_share_of_the_time() -> None:
    """Where nothing pays, steps that draft all the same cost next to nothing; the first ones, which measure, aside."""
    budget, spent, plain = GoodputBudget(CostCurve()), 0.0, 0.0
    for step in range(5000):
        (tree,) = cut(budget, [chain_of(0.02)])
        seconds = linear(0.2)(len(tree))
        budget.observe(step_of(len(tree), seconds))
        if step >= len(TRIALS):
            spent, plain = spent + seconds, plain + linear(0.2)(1)
    assert plain < spent <= 1.01 * plain


@pytest.mark.parametrize("said", [1, 20])
def test_first_forward_that_takes_very_long_does_not_decide_what_tokens_are_worth(said: int) -> None:
    """It compiles kernels and wakes threads; whether its draft was right says no more than another's."""
    budget = GoodputBudget(CostCurve(profile_of(linear(0.02))))
    slow = 300 * linear(0.02)(24)
    budget.observe(step_of(24, slow, said, beside=0.0))
    play(linear(0.02), [0.8], steps=50, budget=budget)
    quiet = play(linear(0.02), [0.8], steps=50, profile=profile_of(linear(0.02)))
    assert speedup_of(budget) == pytest.approx(speedup_of(quiet), rel=0.25)


def test_looks_go_on_after_one_that_drafts_nothing() -> None:
    budget, tokens = GoodputBudget(CostCurve(profile_of(linear(0.3)))), []
    for _ in range(4000):
        tokens.append(sum(map(len, cut(budget, [chain_of(0.3, 7)] * 8))))
        budget.observe(step_of(tokens[-1], linear(0.3)(tokens[-1]), 8, rows=8))
    assert min(tokens[:1000]) == 8
    assert len(set(tokens[2000:])) > 1


def test_profile_that_does_not_hold_is_learned_anew() -> None:
    budget = play(linear(0.4), [0.8], steps=3000, profile=profile_of(linear(0.01)))
    (chosen,) = sizes(budget, [0.8])
    assert chosen <= 4


@pytest.mark.parametrize("size", [4, 6, 12])
def test_size_that_the_profile_wrongly_says_is_dear_is_tried_and_soon_taken(size: int) -> None:
    """What was measured in a bad moment is not shunned for ever. Tokens are free up to `size`, and dear from there on."""

    def seconds(tokens: int) -> float:
        return 0.01 if tokens <= size else 0.01 * (1.2 + 0.05 * (tokens - size))

    wrong = profile_of(lambda tokens: 1.25 * seconds(tokens) if tokens == size else seconds(tokens))
    tokens = tokens_of_steps(seconds, GoodputBudget(CostCurve(wrong)), 0.7, 400)
    assert (tokens[:100] == size).any()
    assert (tokens[200:] == size).mean() > 0.9
    right = tokens_of_steps(seconds, GoodputBudget(CostCurve(profile_of(seconds))), 0.7, 400)
    assert (right[50:] == size).mean() > 0.9  # looks beside it are few


def test_rows_that_bring_more_than_others_make_attention_dearer() -> None:
    """Attention pads rows to the widest, up to a point beyond which they are split."""
    profile = profile_of(linear(0.01), per_query_key=1e-6, per_call=1e-3)
    even, uneven, split = (CostCurve(profile).seconds(Forward(32, 8, 1000, width)) for width in (4, 6, 30))
    assert uneven - even == pytest.approx(2 * 1000 * 1e-6)
    assert split - even == pytest.approx(7 * 1e-3)
    for width, seconds in ((6, uneven), (30, split)):
        assert profile.forward_seconds(Forward(32, 8, 1000, width)) == pytest.approx(seconds)
    padded = dataclasses.replace(profile, per_padding=1e-4)
    for seconds in (CostCurve(padded).seconds, padded.forward_seconds):
        assert seconds(Forward(32, 8, 1000, 4)) == pytest.approx(even)
        assert seconds(Forward(32, 8, 1000, 6)) == pytest.approx(uneven + (8 * 6 - 32) * 1e-4)


@pytest.mark.parametrize("per_padding", [0.0, 1e-4, 1e-3, 1e-2])
def test_wide_trees_are_cut_where_that_saves_more(per_padding: float) -> None:
    """What the budget takes saves most of what the best of all prefixes of all queues of limited widths does."""
    ratios = [0.95, 0.9, 0.6, 0.3]
    profile = profile_of(linear(0.02), per_padding=per_padding, per_call=1.0)
    budget = GoodputBudget(CostCurve(profile))
    chosen = [tree.draft_tokens for tree in cut(budget, [chain_of(ratio) for ratio in ratios])]
    taken = sizes_of_best_prefix(profile, ratios)
    assert saved_by(profile, ratios, chosen) >= 0.85 * saved_by(profile, ratios, taken) > 0
    assert per_padding < 1e-3 or max(chosen) < max(sizes_of_best_prefix(profile_of(linear(0.02)), ratios))


def saved_by(profile: CostProfile, ratios: Sequence[float], drafted: Sequence[int]) -> float:
    """Seconds that a first step saves over a plain one. drafted: draft tokens of each row, a chain each."""
    rows, tokens = len(ratios), len(ratios) + sum(drafted)
    said = rows + sum(ratio**depth for ratio, count in zip(ratios, drafted, strict=True) for depth in range(1, count + 1))
    worth = profile.forward_seconds(Forward(rows, rows)) / rows
    return said * worth - profile.forward_seconds(Forward(tokens, rows, width=1 + max(drafted)))


def sizes_of_best_prefix(profile: CostProfile, ratios: Sequence[float]) -> list[int]:
    """By trying them all, where the forward has one of SIZES."""
    best = [0] * len(ratios)
    for limit in range(1, 64):
        queue = sorted(((-(ratio**depth), row) for row, ratio in enumerate(ratios) for depth in range(1, limit + 1)))
        drafted = [0] * len(ratios)
        for _, row in queue:
            drafted[row] += 1
            if len(ratios) + sum(drafted) in SIZES and saved_by(profile, ratios, drafted) > saved_by(profile, ratios, best):
                best = list(drafted)
    return best


def test_trials_take_sizes_that_forwards_have_and_know_plain_steps_too() -> None:
    for rows in (1, 3, 8, 32):
        budget, seen = GoodputBudget(CostCurve()), []
        while budget.tries:
            seen.append(sum(map(len, cut(budget, [chain_of(0.9)] * rows))))
            budget.observe(step_of(seen[-1], 0.01, rows=rows, beside=0.001))
        assert set(seen) <= set(SIZES.tolist()) | {rows}
        assert rows in seen
        assert len(set(seen)) == 4


def test_rows_whose_drafts_never_pay_back_off_and_are_drafted_for_together() -> None:
    rests, woke = [Backoff(), Backoff()], ([], [])  # type: tuple[list[Backoff], tuple[list[int], list[int]]]
    for step in range(200):
        for rest, steps, began in zip(rests, woke, (0, 13), strict=True):
            if step >= began and rest.is_over(step):
                rest.drafted(0.0, step)
                steps.append(step)
    assert woke[0][:DEBT] == list(range(DEBT))
    apart = np.diff(woke[0])
    assert set(apart[DEBT:]) == {APART}
    assert max(apart) == APART
    assert woke[0][-10:] == woke[1][-10:]
    rests[0].drafted(100.0, 200)
    assert rests[0].is_over(201)


@pytest.mark.parametrize(("saved", "rests"), [((1.2, 0.0), True), ((0.9,), True), ((2.2, 0.0), False), ((1.0,), False)])
def test_row_rests_if_drafts_save_less_on_the_whole_than_drafting_takes(saved: tuple[float, ...], rests: bool) -> None:
    rest = Backoff()
    for step in range(200):
        rest.drafted(saved[step % len(saved)], step)
    assert rest.is_over(200) != rests


def test_row_begins_as_the_one_before_ended() -> None:
    before, drafts = Backoff(), []
    for step in range(50):
        before.drafted(0.0, step)
    for after in (None, Backoff(), before):
        rest, step = Backoff(after), 0
        while rest.is_over(step):
            rest.drafted(0.0, step)
            step += 1
        drafts.append(step)
    assert drafts == [DEBT, DEBT, 1]
