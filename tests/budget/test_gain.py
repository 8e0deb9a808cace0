"""How many times faster than plain decoding a run is said to be."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from lookahead.budget.cost import CostCurve, MeasuredStep
from lookahead.budget.gain import ENOUGH, Gain
from lookahead.budget.profile import Forward
from lookahead.job.progress import JobProgress
from lookahead.job.totals import JobTotals
from lookahead.job.workers import Team
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL, questions

PLAIN, DRAFTED = 0.010, 0.015  # seconds of a forward of one token, of eight
BESIDE, DRAFTING = 0.001, 0.002  # of a step outside of its forward, and in drafting


@pytest.fixture
def curve() -> CostCurve:
    """As learned from steps of one and of eight tokens."""
    curve = CostCurve()
    for _ in range(20):
        curve.observe(Forward(1), PLAIN)
        curve.observe(Forward(8), DRAFTED)
    return curve


def draft_step(gain: Gain, accepted: int, slower: float = 1.0, recycling: float = 0.0) -> None:
    """Of one row; its forward and all else take `slower` times as long as usual."""
    seconds = DRAFTED + BESIDE + DRAFTING + recycling
    parts = (DRAFTED + recycling, DRAFTING, recycling)
    gain.step(MeasuredStep(Forward(8, width=8), accepted, slower * seconds, *(slower * part for part in parts)))


def ratio(gain: Gain) -> float:
    assert gain.seconds is not None
    plain, taken = gain.seconds
    return plain / taken


def test_gain_is_plain_steps_saved_over_what_drafts_cost(curve: CostCurve) -> None:
    gain = Gain(curve)
    for _ in range(100):
        draft_step(gain, accepted=3)
    assert ratio(gain) == pytest.approx(3 * (PLAIN + BESIDE) / (DRAFTED + BESIDE + DRAFTING), rel=0.02)


def test_gain_is_that_of_the_whole_run_whatever_came_last(curve: CostCurve) -> None:
    steps = [5] * 500 + [1] * 500
    found = []
    for order in (steps, steps[::-1], random.Random(1).sample(steps, len(steps))):
        gain = Gain(curve)
        for accepted in order:
            draft_step(gain, accepted)
        found.append(ratio(gain))
    assert found == pytest.approx([3 * (PLAIN + BESIDE) / (DRAFTED + BESIDE + DRAFTING)] * 3, rel=0.02)


def test_time_in_which_the_machine_was_slow_counts_for_both(curve: CostCurve) -> None:
    gain = Gain(curve)
    for number in range(200):
        draft_step(gain, accepted=3, slower=4.0 if number % 2 else 1.0)
    assert ratio(gain) == pytest.approx(3 * (PLAIN + BESIDE) / (DRAFTED + BESIDE + DRAFTING), rel=0.1)


def test_prefill_takes_as_long_either_way(curve: CostCurve) -> None:
    gain = Gain(curve)
    for _ in range(100):
        draft_step(gain, accepted=3)
        gain.step(MeasuredStep(Forward(60, rows=0), 0, 0.018, 0.018, prefilled=60))
    decoding = 3 * (PLAIN + BESIDE) / (DRAFTED + BESIDE + DRAFTING)
    assert ratio(gain) == pytest.approx((decoding + 1) / 2, rel=0.02)


def test_run_is_never_said_to_be_faster_than_its_tokens_per_step(curve: CostCurve) -> None:
    for _ in range(50):
        curve.observe(Forward(1), 40 * PLAIN)  # a machine on which one token takes longer than eight
    gain = Gain(curve)
    for _ in range(100):
        draft_step(gain, accepted=2)
    assert ratio(gain) <= 2


def test_there_is_no_gain_before_enough_is_measured(curve: CostCurve) -> None:
    gain = Gain(curve)
    for _ in range(ENOUGH - 1):
        draft_step(gain, accepted=3)
    assert gain.seconds is None
    draft_step(gain, accepted=3)
    assert gain.seconds is not None
    unknown = Gain(CostCurve())  # no plain step was ever seen: what one takes is a guess
    for _ in range(200):
        draft_step(unknown, accepted=3)
    assert unknown.seconds is None


def progress_of(gain: tuple[float, float] | None, rows: int, edl: float) -> JobProgress:
    progress = JobProgress(JobTotals(), lambda: None, lambda: gain)
    progress.totals.merge(JobTotals(rows=rows, tokens=rows + int(100 * edl), first_tokens=rows, steps=100))
    return progress


def test_figure_is_not_above_the_edl_and_absent_where_nothing_tells() -> None:
    assert progress_of((15.0, 10.0), rows=10, edl=2.0).speedup == 1.5
    assert progress_of((74.0, 10.0), rows=10, edl=1.99).speedup == pytest.approx(1.99)
    assert progress_of((15.0, 10.0), rows=1, edl=2.0).speedup is None
    assert progress_of(None, rows=10, edl=2.0).speedup is None


def test_gains_of_workers_add_up_lost_ones_included() -> None:
    def post(gain: tuple[float, float] | None) -> Any:
        return SimpleNamespace(is_ready=True, report=SimpleNamespace(gain=gain))

    team = Team.__new__(Team)
    team._posts, team._gains_of_lost = [post((30.0, 10.0)), post(None), post((10.0, 10.0))], [(20.0, 10.0), None]
    assert team.gain == (60.0, 30.0)
    team._posts, team._gains_of_lost = [post(None)], []
    assert team.gain is None


def test_json_of_a_job_has_the_figure_of_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", questions(6))
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl", "--overwrite", "--batch-size", 1)
    cli = Cli(capsys)
    value = cli(*job, "--max-new-tokens", 40, "--json").json
    assert 0 < value["speedup_over_plain"] <= value["edl"]
    assert "x plain" in cli(*job, "--max-new-tokens", 40).err
    assert "speedup_over_plain" not in cli(*job, "--max-new-tokens", 20, "--json", "--strategy", "off").json
