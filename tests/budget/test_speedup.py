"""The speedup that a job reports is the one that a clock would give beside plain decoding of the same rows."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from lookahead.budget.speedup import PlainTime, Speedup
from lookahead.decode.accounting import Accounting
from lookahead.draft.options import DraftOptions
from lookahead.step.batch import StepBatch
from tests.decode.test_step import demo, run_of
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL, questions

PLAIN = {1: 0.010, 2: 0.011, 3: 0.012, 4: 0.013, 8: 0.016}  # seconds of a plain step, by rows


def plain_steps(plain: PlainTime, rows: int, seconds: float, steps: int) -> None:
    for _ in range(steps):
        plain.plain_step(rows, seconds)


@pytest.mark.parametrize(("batch_size", "prefill_chunk"), [(1, 512), (3, 512), (3, 16), (8, 64)])
def test_plain_steps_are_those_that_plain_decoding_takes(
    batch_size: int, prefill_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that lie in one chunk share a step, and rows alongside decode in it; the engine's own steps are counted."""
    found: Counter[int] = Counter()
    record = Accounting.record

    def counted(self: Accounting, rows: Any, batch: StepBatch, *others: Any) -> None:
        if batch.decoding == len(rows):
            found[len(rows)] += 1
        record(self, rows, batch, *others)

    monkeypatch.setattr(Accounting, "record", counted)
    lengths = random.Random(1)
    prompts = [[lengths.randrange(3, 200) for _ in range(lengths.choice([5, 9, 40]))] for _ in range(20)]
    target = demo()
    run_of(target, DraftOptions("off"), batch_size, prompts=prompts, prefill_chunk=prefill_chunk)
    plain = found.copy()
    _, _, engine = run_of(target, DraftOptions(), batch_size, prompts=prompts, prefill_chunk=prefill_chunk)
    run = engine.accounting.plain._run.copy()
    run.finish()
    assert plain.total() > 100
    assert abs(run.steps.total() - plain.total()) <= 0.03 * plain.total()
    at_once = max(plain)
    assert run.steps[at_once] == pytest.approx(plain[at_once], rel=0.05)


def drafted(plain: PlainTime, lengths: list[int], speeds: list[float], batch_size: int, step: float = 0.02) -> None:
    """A run with drafts: row k emits speeds[k] tokens a step, every step takes `step` seconds."""
    waiting, running = list(enumerate(lengths)), {}
    plain.rows_at_once(batch_size)
    while waiting or running:
        while waiting and len(running) < batch_size:
            number, length = waiting.pop(0)
            running[number] = float(length - 1)
        plain.seconds += step
        plain.decode_seconds += step
        for number in list(running):
            running[number] -= speeds[number]
            if running[number] <= 0:
                del running[number]
                plain.row_ended(number, 0, lengths[number])


def test_rows_that_end_at_other_times_than_in_plain_decoding_do_not_raise_the_speedup() -> None:
    """Eight rows of equal length take 200 plain steps together. With drafts half of them end early, and the others decode in
    a batch of four, whose tokens cost more each: that is not a gain.
    """
    plain = PlainTime(PLAIN.__getitem__, 512)
    for _ in range(10):
        plain_steps(plain, 8, PLAIN[8], 20)
    drafted(plain, [201] * 8, [2.0] * 4 + [1.0] * 4, 8)
    speedup = plain.speedup()
    assert speedup
    assert speedup.value == pytest.approx(200 * PLAIN[8] / (200 * 0.02), rel=0.02)


def test_what_lies_outside_of_decode_steps_counts_but_for_what_drafts_take_there() -> None:
    plain = PlainTime(PLAIN.__getitem__, 512)
    for _ in range(10):
        plain_steps(plain, 1, PLAIN[1], 20)
    drafted(plain, [101] * 5, [2.0] * 5, 1, step=0.010)
    plain.seconds += 1.0  # prefill and all else
    plain.draft_seconds += 0.1
    speedup = plain.speedup()
    assert speedup
    assert speedup.value == pytest.approx((500 * PLAIN[1] + 0.9) / (250 * 0.010 + 1.0), rel=0.02)


def test_interval_is_as_wide_as_plain_steps_scatter() -> None:
    widths = []
    for noise in (0.0, 0.1, 0.3):
        plain, chance = PlainTime(PLAIN.__getitem__, 512), random.Random(1)
        for _ in range(20):
            plain.next_block()
            plain_steps(plain, 1, PLAIN[1] * (1 + noise * chance.uniform(-1, 1)), 8)
        drafted(plain, [101] * 5, [2.0] * 5, 1, step=0.010)
        speedup = plain.speedup()
        assert speedup
        low, high = speedup.bounds
        assert low < speedup.value < high
        widths.append(high - low)
    assert widths == sorted(widths)
    assert widths[0] < 0.1


def test_speedup_that_no_plain_step_supports_is_not_measured() -> None:
    plain = PlainTime(PLAIN.__getitem__, 512)
    assert plain.speedup() is None
    drafted(plain, [101] * 5, [2.0] * 5, 1)
    speedup = plain.speedup()
    assert str(speedup) == "speedup not measured: too short"
    assert speedup is not None
    assert speedup.as_json() == {"speedup_over_plain": None, "speedup_not_measured": "too short"}


def test_interval_is_printed_to_its_digits() -> None:
    assert str(Speedup(10.0, 14.5, 0.7)) == "1.38 to 1.52x plain"
    assert str(Speedup(10.0, 124.5, 7)) == "11.8 to 13.2x plain"
    assert str(Speedup(10.0, 10.0, 0.001)) == "1.00x plain"
    assert Speedup(10.0, 20.0, 1.0).with_loading(10.0) == 1.5


def test_summary_json_manifest_and_report_have_the_figure_of_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    source, out = write_jsonl(tmp_path / "in.jsonl", questions(6)), tmp_path / "out.jsonl"
    job = ("generate", "--model", MODEL, "--input", source, "-o", out, "--overwrite", "--batch-size", 1)
    cli = Cli(capsys)
    printed = cli(*job, "--max-new-tokens", 90).err
    assert "x plain" in printed or "speedup not measured: too short" in printed
    assert "of loading" in printed
    value = cli(*job, "--max-new-tokens", 90, "--json").json
    record = cli("report", out, "--json").json
    assert record["runs"][-1].keys() >= {"run_seconds", "loading_seconds", "speedup_over_plain"}
    shown, kept = value["speedup_over_plain"], record["runs"][-1]["speedup_over_plain"]
    assert kept == (shown and pytest.approx(shown, rel=0.05))
    fixed = cli(*job, "--max-new-tokens", 20, "--json", "--strategy", "hierarchical", "--decoding-length", 8).json
    assert fixed["speedup_not_measured"] == "drafts of a fixed length"
    assert "speedup_over_plain" not in cli(*job, "--max-new-tokens", 20, "--json", "--strategy", "off").json
