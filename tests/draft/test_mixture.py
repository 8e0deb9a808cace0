"""The drafting kernels against the mixture in plain Python: probabilities, learning, growth."""

from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.draft import drafter as drafter_module
from lookahead.draft.arrays import SLOTS
from lookahead.draft.calibration import EDGES, computed
from lookahead.draft.cells import AT, CELLS
from lookahead.draft.drafter import Drafter
from lookahead.draft.mixture import FACTORS, MEMORY
from lookahead.draft.options import DraftOptions
from lookahead.draft.priors import Priors
from lookahead.draft.recycled import ANY
from lookahead.trie import session
from lookahead.trie.suffixes import DEPTH
from tests.support.slow_mixture import NOTHING, OWN_TEXT, Aligned, SlowDrafter
from tests.support.tries import segment_of

VOCABULARY = 6
CLOSE = 1e-5  # sums of some dozen float32


# ---- situations: tries, and a job that starts requests, says something and finishes them
def copy_of(base, random):
    """A short text that copies stretches of `base` and changes a token here and there: matches that break and go on."""
    text, end = [], 0
    for _ in range(random.randint(1, 4)):
        begin = random.choice([end, end, random.randrange(len(base))]) % len(base)
        end = begin + random.choice([1, 3, 7, 20])
        text += base[begin:end]
        if random.random() < 0.5:
            text.append(random.randrange(VOCABULARY))
            end += 1
    return text


def situation_of(seed):
    random = Random(seed)
    base = random.choices(range(VOCABULARY), k=random.randint(3, 30))
    job = [
        SimpleNamespace(
            deed=random.choice(["start", "say", "say", "say", "finish"]),
            number=random.randrange(3),
            text=copy_of(base, random),
            limits=(random.choice([1, 2, 3, 6, 30]), random.choice([1, 2, 5, 30]), random.choice([0.0, 0.0, 0.01, 0.1])),
        )
        for _ in range(random.randint(4, 16))
    ]
    tries = []
    for _ in range(random.choice([0, 1, 2])):
        segments = []
        for _ in range(random.randint(1, 2)):
            documents = [copy_of(base, random) for _ in range(random.randint(1, 4))]
            segments.append(documents * random.choice([1, 1, 8]))
        weights = random.choices([0.5, 1.0, 1.0, 2.0], k=4) * 8
        tries.append(SimpleNamespace(segments=segments, weights=weights, weight=random.choice([1.0, 3.0])))
    return SimpleNamespace(tries=tries, job=job, seed=seed, merging=random.choice([(12, 2), (1 << 14, 8)]))


situations = st.integers(0, 1 << 40).map(situation_of)  # what is drawn piece by piece is too small and too regular


def trie_of(segments, weights, number, vocabulary=VOCABULARY):
    """What a drafter reads of a trie file; the documents of a segment have `weights`, in order."""
    return SimpleNamespace(
        path=Path(f"{number}.trie"),
        segments=[segment_of(documents, vocabulary) for documents in segments],
        header=SimpleNamespace(depth=DEPTH),
        recycled=(),
        weighted=any(weight != 1 for weight in weights),
        source_weights=np.array(weights, np.float32),
    )


def priors_of(seed):
    """Beliefs of any kind: each cell its own, so that to take one for another shows."""
    lambdas = np.random.default_rng(seed).uniform(0.05, 0.95, CELLS)
    return Priors(lambdas.astype(np.float32), None, strength=2.0)


def drafters_of(situation, **options):
    """(drafter, its slow mirror)"""
    tries = [trie_of(trie.segments, trie.weights, number) for number, trie in enumerate(situation.tries)]
    options = DraftOptions(**{"decoding_length": 64, "branch_length": 40, **options})
    drafter = Drafter(tries, options, [trie.weight for trie in situation.tries], priors_of(situation.seed))
    learned = np.random.default_rng(situation.seed).normal(0, 0.5, FACTORS)  # each factor its own, too
    drafter.shared.learned[:, 0], drafter.shared.factors[:] = learned, np.exp(learned)
    weighed = [(trie.segments, [trie.weights[: len(documents)] for documents in trie.segments]) for trie in situation.tries]
    return drafter, SlowDrafter(drafter, weighed)


def verified(drafter, row, random):
    """The arguments of `Recycled.add`: the model was asked behind the nodes of the row's latest tree, with any result."""
    nodes = int(drafter.rows.nodes[row.number])
    token_ids, parents, _, _ = drafter.rows.trees[row.number, :, :nodes].copy()
    if not nodes:
        nodes, token_ids, parents = 1, np.array([row.root], np.int32), np.array([-1], np.int32)
    before = np.array([[ANY, ANY, *row.text[-3:-1].tolist()][:-3:-1]], np.int32)
    ids = np.array([random.sample(range(VOCABULARY), 4) for _ in range(nodes)], np.int32)
    scores = np.array([sorted((random.gauss(0, 2) for _ in range(4)), reverse=True) for _ in range(nodes)], np.float32)
    return token_ids, parents, np.array([nodes]), before, ids, scores


def moments(situation, after_saying=lambda drafter, slow, row, slow_row: None, **options):
    """(drafter, row, slow drafter, slow row, limits) before each piece is said, while the job runs. No two rows that run
    have one prompt: the mirror knows nothing of what samples of a prompt draft from each other.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "RECENT", situation.merging[0])
        patch.setattr(session, "SHARE", situation.merging[1])
        patch.setattr(drafter_module, "ENTRIES", 1 << 10)  # as many as are searched from end to end
        drafter, slow = drafters_of(situation, **options)
        running, random = [], Random(situation.seed)
        for piece in situation.job:
            prompts = [slow_row.tokens[: slow_row.prompt_length] for _, slow_row in running]
            if not running or (piece.deed == "start" and len(running) < 3 and piece.text not in prompts):
                running.append((drafter.start(piece.text), slow.start(piece.text)))
                continue
            row, slow_row = running[piece.number % len(running)]
            if piece.deed == "finish":
                running.remove((row, slow_row))
                row.finish()
                drafter.remember(())  # at once, as `slow` does
                slow.finish(slow_row)
                continue
            yield drafter, row, slow, slow_row, piece.limits
            recycled = verified(drafter, row, random) if random.random() < 0.7 else None
            row.accept(piece.text)
            slow.accept(slow_row, piece.text, drafter.options.learn)
            if recycled:
                drafter.recycled.add(*recycled)
                drafter.get_ready()
            after_saying(drafter, slow, row, slow_row)
            slow.believe_the_drafter()  # so that differences of rounding do not grow


def tree_of(drafter, row):
    """(token, parent, computed probability of the path, source, match) of each node of the row's latest tree."""
    nodes = drafter.rows.nodes[row.number]
    token_ids, parents, sources, matches = drafter.rows.trees[row.number, :, :nodes].tolist()
    return list(zip(token_ids, parents, drafter.rows.reach[row.number, 0, :nodes].tolist(), sources, matches, strict=True))


# ---- limits of the arrays
def with_room_behind(drafter, name):
    """What stands behind this scratch array, all -7; nothing is to be written there."""
    array = getattr(drafter.growth.first, name)
    room = np.full(2 * array.size + 1000, -7, array.dtype)
    room[: array.size] = 0
    setattr(drafter.growth.first, name, room[: array.size].reshape(array.shape))
    drafter.growth.first.refresh()
    return room[array.size :]


def test_no_more_experts_are_asked_than_there_is_room_for():
    drafter = Drafter([trie_of([[[1, 2, 3, 4, 5, 0]]], [1.0], number) for number in range(60)])
    behind = with_room_behind(drafter, "experts")
    row = drafter.start([1, 2, 3])
    row.accept([0, 5])  # a match breaks in each trie; then all go on
    assert (drafter.rows.aligned[0, :60, AT] == 4).all()
    row.draft()
    row.accept([0])
    assert drafter.growth.first.experts.all()
    assert (behind == -7).all()


@pytest.mark.parametrize("decoding_length", [2, 3, 1024])
@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_no_more_tokens_are_proposed_than_there_is_room_for(decoding_length, weight):
    tries = [
        trie_of([[[1, 50 * number + k] for k in range(2, 34)]], [weight] * 32, number, vocabulary=1000) for number in range(12)
    ]
    drafter = Drafter(tries, DraftOptions(decoding_length=decoding_length))
    behind = [with_room_behind(drafter, name) for name in ("touched", "own_slots", "slots", "values", "used_factors")]
    row = drafter.start([1])
    if weight:
        assert row.draft(branch_length=1).draft_tokens == min(SLOTS, decoding_length - 1)
        assert row.draft().draft_tokens == decoding_length - 1
    row.accept([2, 1, 52, 1])
    assert np.isfinite(drafter.shared.factors).all()
    assert all((room == -7).all() for room in behind)


# ---- probabilities
@given(situations)
def test_probability_of_each_next_token_is_that_of_the_mixture(situation):
    for drafter, row, slow, slow_row, _ in moments(situation):
        row.draft(63, 1)
        guesses, _ = slow.mix(slow_row, slow_row.root, NOTHING, NOTHING)
        expected = {t: guess for t, guess in guesses.items() if guess.p >= NOTHING}
        (_, _, whole, *_), *below = tree_of(drafter, row)
        assert whole == 1.0
        assert {t: p for t, _, p, _, _ in below} == pytest.approx({t: float(g.p) for t, g in expected.items()}, rel=CLOSE)
        assert {t: tuple(offer) for t, _, _, *offer in below} == {t: guess.offer for t, guess in expected.items()}


def compare_beliefs(drafter, slow, *_):
    for name in ("lambdas", "earned", "weights"):
        np.testing.assert_allclose(getattr(drafter.shared, name), getattr(slow, name), rtol=1e-4, atol=1e-6, err_msg=name)
    for name in ("factors", "learned"):  # a gradient as small as those that teach nothing may do so or not
        np.testing.assert_allclose(getattr(drafter.shared, name), getattr(slow, name), rtol=5e-4, atol=5e-4, err_msg=name)
    np.testing.assert_allclose(drafter.shared.trust[:, :2], slow.trust, rtol=1e-4, atol=1e-6)


def compare_aligned(drafter, slow, row, slow_row):
    for text, place in enumerate(drafter.rows.aligned[row.number]):
        number = text if text < len(drafter.shared.texts) else OWN_TEXT
        expected = slow_row.root.aligned.get(number, Aligned(-1, 0, 0, 0))
        if place[AT] >= 0 or expected.at >= 0:
            assert Aligned(*place.tolist()) == expected


@given(situations)
def test_tokens_teach_cells_trust_and_factors_and_move_broken_matches_as_in_the_mixture(situation):
    for _ in moments(situation, lambda *moment: [compare_beliefs(*moment), compare_aligned(*moment)]):
        pass


@given(situations, st.integers(2, 400))
def test_cells_remember_a_bounded_number_of_observations(situation, observations):
    drafter, slow = drafters_of(situation)
    drafter.shared.earned[:, 1] = observations
    drafter.shared.earned[:, 0] = drafter.shared.lambdas * observations
    slow.believe_the_drafter()
    row, slow_row = drafter.start([1, 2, 3]), slow.start([1, 2, 3])
    row.accept([1, 2, 3] * 3)
    slow.accept(slow_row, [1, 2, 3] * 3)
    np.testing.assert_allclose(drafter.shared.earned, slow.earned, rtol=1e-4)
    changed = drafter.shared.earned[:, 1] != observations
    assert changed.any()
    assert drafter.shared.earned[changed, 1].max() <= MEMORY


@given(situations, st.sampled_from(["hierarchical", "single"]))
def test_tree_grows_by_the_most_probable_path_that_is_left(situation, strategy):
    for drafter, row, slow, slow_row, (budget, branch_length, price) in moments(situation, strategy=strategy):
        row.draft(budget, branch_length, price)
        least = float(computed(price, EDGES, drafter.calibration.curve)) if price else 0.0
        slow.check_growth(slow_row, tree_of(drafter, row), budget, branch_length, least, strategy == "single")


@given(situations)
def test_without_learning_beliefs_stay_and_drafts_are_those_of_the_mixture(situation):
    priors = priors_of(situation.seed)
    for drafter, row, slow, slow_row, (budget, branch_length, _) in moments(situation, learn=False):
        row.draft(budget, branch_length)
        slow.check_growth(slow_row, tree_of(drafter, row), budget, branch_length)
        lambdas, earned = priors.fresh()
        assert np.array_equal(drafter.shared.lambdas, lambdas)
        assert np.array_equal(drafter.shared.earned, earned)
        assert np.array_equal(drafter.shared.factors, slow.factors)


def test_worked_example_of_the_module():
    """Own text "a b a b": one own expert of order 2; that of order 1 has the same place and is skipped."""
    priors = Priors(np.full(CELLS, 0.6, np.float32))
    drafter = Drafter([], DraftOptions(), priors=priors)
    row = drafter.start([0, 1, 0, 1])
    row.draft(branch_length=1)
    # P(a) = .6, then order 0: "a" and "b" were seen behind two and one others.
    a, b = 0.6 + 0.4 * 0.6 * 2 / 3, 0.4 * 0.6 / 3
    assert {t: p for t, _, p, _, _ in tree_of(drafter, row)[1:]} == pytest.approx({0: a, 1: b}, rel=CLOSE)
