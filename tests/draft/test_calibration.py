"""What a computed probability is worth: counting, the curve and its inverse."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lookahead.draft.arrays import BINS
from lookahead.draft.calibration import EDGES, LEAST, OCTAVE, Calibration, bin_of, calibrated, computed
from lookahead.draft.cells import CELLS
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.priors import Priors

ONE = bin_of(np.float32(1.0))
UNTRAINED = Priors(np.full(CELLS, 0.7, np.float32), None, strength=2.0)


counts = st.lists(st.tuples(st.integers(0, ONE), st.floats(0, 500), st.floats(0, 1)), max_size=30)


def calibration_of(counts, ratio=1.0):
    calibration = Calibration(np.full(BINS, ratio, np.float32))
    for number, nodes, share in counts:
        calibration.counted[0, number] += nodes * EDGES[number]
        calibration.counted[1, number] += nodes * share
    calibration.refit()
    return calibration


@given(counts, st.sampled_from([0.5, 1.0, 1.5]))
def test_curve_never_falls_and_stays_a_probability(counts, ratio):
    curve = calibration_of(counts, ratio).curve
    assert (np.diff(curve) >= 0).all()
    assert curve[0] >= 0
    assert curve[-1] <= 1
    assert curve.dtype == np.float32


@given(counts, st.floats(1e-6, 1.0))
@example([(186, 1.0, 0.0)], 1 - 2**-53)  # as float32 the price is 1
@example([(170, 117.0, 1.0)], 1 - 2**-53)
@example([(191, 5.0, 0.0)], 0.5)  # what every probability from a half on is worth
def test_computed_probability_of_a_price_is_worth_the_price(counts, price):
    calibration = calibration_of(counts)
    curve = calibration.curve
    found = np.float32(computed(price, EDGES, curve))
    worth = calibrated(found, EDGES, curve)
    if price > float(curve[ONE]):
        assert found == 1
    elif price >= curve[0]:
        assert worth == pytest.approx(price, rel=1e-4)
    else:
        assert found == LEAST


@pytest.mark.parametrize(("ratio", "side"), [(1.8, 1), (0.2, -1)])
def test_curve_moves_towards_what_was_seen_the_more_the_more_was_seen(ratio, side):
    half, seen = bin_of(np.float32(0.5)), range(100, ONE)
    worth = [0.5]
    for nodes in (0.1, 1, 10, 10_000):
        curve = calibration_of([(number, nodes, ratio * EDGES[number]) for number in seen]).curve
        worth.append(float(curve[half]))
        assert curve[100 - OCTAVE - 1] == EDGES[100 - OCTAVE - 1]  # far from what was seen
    assert abs(curve[100 - OCTAVE // 2] / EDGES[100 - OCTAVE // 2] - 1) > 0.1  # near
    assert all(side * (b - a) > 0 for a, b in itertools.pairwise(worth))
    assert worth[-1] == pytest.approx(0.5 * ratio, rel=0.01)


# ---- in a drafter
def start(drafter):
    return drafter.start([1, 2, 3, 4, 1, 2])


def test_drafter_counts_each_tree_once_when_its_answer_is_known():
    drafter = Drafter([], DraftOptions(decoding_length=8), priors=UNTRAINED)
    row = start(drafter)
    row.draft(3)  # replaced by the next
    tree = row.draft()
    assert not drafter.shared.counted.any()
    reach = drafter.rows.reach[0, 0, 1 : len(tree)].sum()
    row.accept([3, 9])
    predicted, accepted = drafter.shared.counted.sum(1)
    assert (predicted, accepted) == (pytest.approx(reach, rel=1e-5), 1)
    row.accept([4])
    assert drafter.shared.counted.sum(1).tolist() == [predicted, accepted]


def test_probabilities_of_a_tree_are_worth_what_came_of_those_before():
    drafter = Drafter([], DraftOptions(decoding_length=8), priors=UNTRAINED)
    row = start(drafter)
    assert np.array_equal(row.draft().probabilities, drafter.rows.reach[0, 0, :8])  # at first as they are computed
    for _ in range(100):
        row.draft()
        row.accept([9, 1, 2])  # never what is drafted first
    row.finish()
    row = start(drafter)
    tree = row.draft()
    computed = drafter.rows.reach[0, 0, : len(tree)]
    np.testing.assert_allclose(tree.probabilities[1:], np.interp(computed[1:], EDGES, drafter.calibration.curve), rtol=1e-4)
    assert not np.allclose(tree.probabilities[1:], computed[1:], rtol=0.05)


@pytest.mark.parametrize(("price", "least"), [(0.3, 8), (0.6, 6), (0.75, 3), (0.9, 2)])
def test_text_that_is_copied_is_drafted_at_a_high_price_too(price, least):
    row = Drafter([], DraftOptions(decoding_length=16)).start([*range(1, 40)] * 4 + [1, 2, 3])
    tree = row.draft(price=price)
    assert len(tree) >= least
    assert tree.token_ids.tolist() == [*range(3, 3 + len(tree))]
    assert tree.probabilities.min() >= 0.999 * price
