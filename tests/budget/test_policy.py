"""lookahead/budget/policy.py and ladder.py: what is verified, when drafting stops, and what jobs take in the simulator."""

from pathlib import Path

import numpy as np
import pytest

from lookahead.budget import ladder
from lookahead.budget.policy import LIMIT, Budget, StepCost

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FLAT = np.array([1.0, 1.01, 1.02, 1.03])
STEEP = np.array([1.0, 8.0, 32.0, 64.0])
SIZES = np.array([1, 8, 32, 64])


def chosen(budget, *trees, rows=None):
    """Nodes of each tree that are verified, root included. trees: probabilities of draft tokens."""
    spans, begin = [], 0
    for tree in trees:
        spans.append((begin, 1 + len(tree)))
        begin += 1 + len(tree)
    chances = np.concatenate([[1.0, *tree] for tree in trees]).astype(np.float32)
    return budget.choose(chances, np.array(spans), rows or len(trees)).tolist()


def test_most_probable_nodes_of_all_rows_are_taken():
    budget = Budget(StepCost(SIZES, 1 + SIZES / 20, batch=2))
    assert chosen(budget, [0.9, 0.8, 0.01], [0.2, 0.02]) == [3, 2]


def test_every_node_is_taken_where_tokens_cost_nothing():
    assert chosen(Budget(StepCost(SIZES, np.ones(4))), [0.5, 0.1, 1e-6]) == [4]


def test_no_node_is_taken_where_each_costs_a_step():
    assert chosen(Budget(StepCost(SIZES, STEEP)), [0.9, 0.8]) == [1]


def test_forwards_of_a_few_shapes_are_filled_up():
    assert chosen(Budget(StepCost(SIZES, np.array([1.0, 1.2, 4.0, 8.0]), buckets=True)), [0.9, *[0.1] * 20]) == [8]


def test_drafts_go_off_once_they_have_lost_the_limit_and_are_tried_ever_more_rarely():
    budget, drafted = Budget(StepCost(SIZES, FLAT)), []
    for _ in range(4000):
        drafts = budget.drafts(1)
        drafted.append(drafts)
        budget.observe(1, 1, 1, 0.0, 1.2 if drafts else 1.0, 1.0, drafts)
    assert 0.2 * sum(drafted[:100]) <= LIMIT + 1
    assert sum(drafted[2000:]) < 20


def test_drafts_come_back_when_they_pay_again():
    budget = Budget(StepCost(SIZES, FLAT))
    for step in range(3000):
        drafts, pays = budget.drafts(1), step > 500
        gained = 2.0 if drafts and pays else 0.0
        budget.observe(1, 8 if drafts else 1, 1 + gained, gained, 1.2 if drafts else 1.0, 1.0, drafts)
    assert budget.speed > 2


def test_probabilities_that_promise_too_much_are_corrected():
    budget = Budget(StepCost(SIZES, 1 + SIZES / 20))
    before = chosen(budget, [0.5, 0.2, 0.1])[0]
    for _ in range(100):
        budget.observe(1, 4, 1, 2.0, 1.2, 1.2, True)
    assert chosen(budget, [0.5, 0.2, 0.1])[0] < before


@pytest.mark.parametrize("pace", [1.0, 2.0])
def test_a_size_that_costs_more_than_measured_is_corrected_whatever_the_pace(pace):
    budget = Budget(StepCost(SIZES, FLAT))
    for step in range(400):
        tokens = 1 if step % 3 else 8
        seconds = pace * (1.5 if tokens == 8 else 1.0)
        budget.observe(1, tokens, 1, 0.0, seconds, seconds, tokens == 8)
    table = budget.cost.table
    assert np.exp(table[3, 1] - table[3, 0]) == pytest.approx(1.5 / 1.01, rel=0.1)


def test_a_size_that_costs_three_times_what_was_often_measured_is_corrected_within_sixty_steps():
    budget = Budget(StepCost(SIZES, FLAT, measured=16.0))
    for step in range(60):
        tokens = 1 if step % 3 else 8
        seconds = 3.0 if tokens == 8 else 1.0
        budget.observe(1, tokens, 1, 0.0, seconds, seconds, tokens == 8)
    table = budget.cost.table
    assert np.exp(table[3, 1] - table[3, 0]) > 2


def test_ladder_measures_each_size_and_the_cost_of_a_change():
    before = []

    def forward(rows, tokens):
        changed = not before or before[-1] != (rows, tokens)
        before.append((rows, tokens))
        return (1 + tokens / 50) * (1.03 if changed else 1.0)

    cost = ladder.measure(forward, 1, 1e9, 1.02, most=1e9)
    assert cost.table[1] == pytest.approx(1 + cost.table[0] / 50)
    assert cost.change == pytest.approx(0.03)


CELLS = (
    # curve, workload, batch size, at least this share of the best fixed length's or plain speed
    ("amd-smol-bf16", "smol-gsm8k", 1, 0.97),
    ("demo-bf16", "random", 1, 0.98),
    ("demo-f32", "alpaca-tempnet-cold", 8, 0.97),
    ("h200-7b", "smol-chat", 1, 0.97),
    ("intel-1b-f32", "mtrag-cold", 1, 0.97),
    ("smol-bf16", "zipf", 8, 0.98),
)


@pytest.mark.parametrize(("curve", "workload", "batch", "least"), CELLS)
def test_simulated_job_is_as_fast_as_the_best_fixed_length_and_plain_decoding(curve, workload, batch, least, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    simulator = pytest.importorskip("budget_simulator")
    job = simulator.Job(simulator.read_recording(simulator.DATA / f"{workload}.npz"), 24, batch)
    costs, machine = simulator.read_curves()[curve], simulator.Machine(0.03)
    others = [simulator.Plain(), *(simulator.Fixed(length) for length in (2, 4, 8, 16))]
    best = min(simulator.run(job, costs, machine, other)[0] for other in others)
    assert best / simulator.new_seconds(job, costs, machine, kept=True) >= least
