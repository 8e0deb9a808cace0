"""Cost profiles: measured, estimated, kept, read, and what a bench is predicted to show with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from lookahead.bench import calibrate as calibrating
from lookahead.bench.calibrate import Cell, calibrate, fitted
from lookahead.bench.logged import predict
from lookahead.budget.estimate import GPUS
from lookahead.budget.profile import CostProfile, Forward, Setting, cached_profile, read_profile, save_to_cache, shipped_names
from lookahead.decode.engine import DecodingEngine, Generation
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError, UsageError
from lookahead.models.load import estimated_profile
from lookahead.models.options import ModelOptions
from lookahead.models.probe import probed
from lookahead.models.simulated import CHANGED, Clock, simulated_model
from lookahead_cli import logs
from tests.support.cli import Cli
from tests.support.depth import deep

SETTING = Setting("model", "0123", "Some CPU @ 2 GHz", "float32", "sdpa", "packed", 2)
SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096])
PROFILE = CostProfile(
    SETTING,
    "measured",
    (1, 8, 64),
    (0.010, 0.012, 0.040),
    per_row=1e-4,
    per_key=1e-6,
    per_query_key=1e-7,
    per_padding=1e-5,
    per_call=1e-4,
    per_score=1e-5,
)
DEMO = str(Path(__file__).parents[2] / "samples" / "demo-model")


def test_forward_costs_are_read_off_and_go_on_beyond_the_largest_size() -> None:
    assert PROFILE.at(1) == pytest.approx(0.010)
    assert PROFILE.at(36) == pytest.approx(0.026)
    assert PROFILE.at(120) == pytest.approx(0.068)
    assert PROFILE.forward_seconds(Forward(8, 2, 1000)) == pytest.approx(0.012 + 2e-4 + 1000 * (1e-6 + 4e-7))
    assert PROFILE.forward_seconds(Forward(8), unscored=7) == pytest.approx(0.012 + 1e-4 - 7e-5)


def test_cdl_is_the_longest_draft_whose_forward_costs_at_most_a_factor() -> None:
    flat_then_steep = CostProfile(SETTING, "measured", (1, 32, 33, 64), (0.01, 0.01, 0.1, 0.1))
    assert flat_then_steep.cdl() == 32
    assert flat_then_steep.cdl(rows=8) == 4
    assert flat_then_steep.cdl(factor=5.0) == 32


def test_profile_comes_back_from_its_file_and_from_the_cache(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert read_profile(str(tmp_path / "p.json")) == PROFILE
    assert cached_profile(SETTING) is None
    path = save_to_cache(PROFILE)
    assert cached_profile(SETTING) == PROFILE
    assert cached_profile(dataclasses.replace(SETTING, dtype="bfloat16")) is None
    path.write_text("{")
    assert cached_profile(SETTING) is None  # a job does not fail for it
    path.unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 7}, "format 7"),
        ({"seconds": [1, 2]}, "lists of one length"),
        ({"seconds": [0.1, -1, 2]}, "seconds: not all numbers"),
        ({"seconds": [0, 0, 0]}, "all \"seconds\" are 0"),
        ({"tokens": [1, 64, 8]}, "rising"),
        ({"per_key": "much"}, "per_row, per_key"),
        ({"per_key": float("nan")}, "per_row, per_key"),
        ({"setting": {"model": "m"}}, "missing"),
    ],
)  # fmt: skip
def test_file_that_is_no_profile_is_refused_with_the_reason(tmp_path: Path, change: dict, said: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**PROFILE.as_json(), **change}))
    with pytest.raises(LookaheadError, match=said):
        read_profile(str(path))


def test_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(LookaheadError, match=r"no such cost profile.*llama-7b-h200"):
        read_profile("nowhere.json")


def test_shipped_profiles_can_be_read_and_estimates_say_so() -> None:
    names = shipped_names()
    assert {"llama-7b-h200", "llama-7b-a100"} <= set(names)
    for name in names:
        profile = read_profile(name)
        assert (profile.kind == "measured") == ("cpu" in name)
        assert profile.kind == "measured" or "assumed" in profile.about
        assert profile.setting.model == name


@pytest.mark.parametrize("by_op", [False, True])
def test_terms_are_found_in_what_was_measured(tiny_model, by_op: bool) -> None:
    """Cells that cost what a profile says give that profile back. The op pads nothing, so no cell shows what padding costs."""
    target = dataclasses.replace(probed(tiny_model("llama")), attends_by_op=by_op)
    truth = dataclasses.replace(PROFILE, tokens=tuple(SIZES.tolist()))
    truth = dataclasses.replace(truth, seconds=tuple(0.01 + 5e-4 * t for t in truth.tokens))

    def costs(profile: CostProfile, c: Cell) -> float:
        work = c.in_attention(target.call)
        return profile.seconds_of(c.tokens, c.rows, work) - profile.per_score * c.tokens * (c.wanted == "none")

    cells = [(cell, costs(truth, cell)) for cell in calibrating.CELLS]
    found = fitted(target, cells, 3)
    for cell, seconds in cells:
        assert sum(cell.sizes) == cell.tokens
        assert costs(found, cell) == pytest.approx(seconds, rel=1e-6)
    assert found.about["largest_error"] < 1e-6
    terms = [found.per_row, found.per_key, found.per_query_key, found.per_padding, found.per_call]
    assert terms == pytest.approx([1e-4, 1e-6, 1e-7, 0.0 if by_op else 1e-5, 1e-4], rel=1e-4)


def test_prediction_pays_for_accepting() -> None:
    profile = dataclasses.replace(PROFILE, kind="estimate", seconds=(1.0, 1.0, 1.0), per_row=0, per_key=0, per_query_key=0)
    pairs = [([1, 2, 3], [4, 5, 6, 7, 8, 9] * 5)] * 2
    options = [DraftOptions("hierarchical", 8, adaptive=False)]
    free, dear = (predict(dataclasses.replace(profile, per_said=said), pairs, [], options).runs for said in (0.0, 1.0))
    assert dear[0].seconds == pytest.approx(free[0].seconds, rel=0.02)  # a plain step asks once
    assert dear[1].seconds == pytest.approx(free[1].seconds + free[1].tokens - 2 - free[1].steps, rel=0.02)


def test_estimates_read_weights_once_and_experts_as_they_are_chosen(tmp_path: Path) -> None:
    from transformers import LlamaConfig, MixtralConfig

    LlamaConfig(dtype="bfloat16").save_pretrained(tmp_path / "dense")
    MixtralConfig(dtype="bfloat16").save_pretrained(tmp_path / "experts")
    dense = estimated_profile(ModelOptions(str(tmp_path / "dense"), dtype="auto"), "h200")
    assert dense.kind == "estimate"
    assert dense.at(1) == dense.at(64) > 0.8 * 6.6e9 * 2 / 4.8e12
    assert dense.at(4096) > 4 * dense.at(64)
    experts = estimated_profile(ModelOptions(str(tmp_path / "experts"), dtype="auto"), "h200")
    assert 2.5 < experts.at(8) / experts.at(1) < 4
    with pytest.raises(UsageError, match=f"choose one of {', '.join(GPUS)}"):
        estimated_profile(ModelOptions(str(tmp_path / "dense"), dtype="auto"), "abacus")


def requests(count: int, prompt: int, answer: int) -> list[Generation]:
    random = np.random.default_rng(0)
    return [
        Generation(random.integers(0, 99, prompt).tolist(), answer, frozenset(), forced=random.integers(0, 99, answer).tolist())
        for _ in range(count)
    ]


def test_simulated_forwards_take_what_the_profile_says() -> None:
    """3 prompts of 10 tokens, 5 tokens said, 2 rows at once, no drafts: each forward's load is known. The first one of a size
    takes longer than those that follow.
    """
    profile = CostProfile(SETTING, "measured", (1, 100), (100.0, 1090.0), per_key=0.5, per_query_key=0.25, per_score=1.0)
    target = simulated_model(profile)
    engine = DecodingEngine(target, Drafter((), DraftOptions("off")), 2)
    assert all(g.token_ids == g.forced for g in engine.run(requests(3, 10, 5)))

    def cost(tokens: int, rows: int, keys: int, unscored: int = 0) -> float:
        return 90 + 10 * tokens + keys * (0.5 + 0.25 * tokens / rows) - unscored

    two = cost(20, 2, 0, 18) + CHANGED * cost(2, 2, 20) + sum(cost(2, 2, 2 * past) for past in range(11, 14))
    one = CHANGED * (cost(10, 1, 0, 9) + cost(1, 1, 10)) + sum(cost(1, 1, past) for past in range(11, 14))
    assert target.now.simulated == pytest.approx(two + one, rel=1e-3)  # sweeping the caches takes away its own seconds


def test_prediction_gives_the_speedup_that_its_costs_imply() -> None:
    """A text said twice: with flat costs the speedup is the EDL; with steep ones auto does not lose."""
    random = np.random.default_rng(1)
    pairs = [(random.integers(0, 500, 20).tolist(), random.integers(0, 500, 60).tolist())] * 3
    on_gpu = dataclasses.replace(SETTING, threads=0)  # whose forwards leave the caches as they are
    flat = CostProfile(on_gpu, "measured", (1, 4096), (10.0, 10.0))
    options = [DraftOptions(), DraftOptions(decoding_length=32, adaptive=False)]
    found = predict(flat, pairs, (), options)
    plain, auto, fixed = found.runs
    assert found.predicted
    assert plain.edl == 1.0
    assert auto.speedup > 2.0
    assert fixed.speedup == pytest.approx(plain.forwards / fixed.forwards, rel=0.01)
    steep = CostProfile(on_gpu, "measured", (1, 2, 4096), (10.0, 100.0, 1e5))
    plain, auto, fixed = predict(steep, pairs, (), options).runs
    assert fixed.speedup < 0.7
    assert auto.speedup > 0.98


def test_text_too_long_for_the_profiles_model_is_refused() -> None:
    short = dataclasses.replace(PROFILE, longest_text=10)
    with pytest.raises(LookaheadError, match="12 tokens, the model of the profile 10 positions"):
        predict(short, [([1] * 6, [2] * 6)], (), [DraftOptions(adaptive=False)])


@pytest.mark.parametrize("seed", [0, *deep([1, 2])])
def test_bad_moments_of_the_machine_leave_no_trace_in_a_profile(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """For half of the time, 0.1 s at least, all takes 1.5 to 2.5 times as long."""
    truth = dataclasses.replace(PROFILE, tokens=tuple(SIZES.tolist()), seconds=tuple((4e-3 + 8e-5 * SIZES).tolist()))
    random, pass_by = np.random.default_rng(seed), Clock.pass_by
    slow = np.where(random.random(10000) < 0.5, random.uniform(1.5, 2.5, 10000), 1.0)
    monkeypatch.setattr(
        Clock, "pass_by", lambda self, seconds, on_cpu: pass_by(self, seconds * slow[int(self.simulated / 0.1)], on_cpu=False)
    )
    found, _ = calibrate(simulated_model(truth), 45.0)
    off = np.array(
        [found.forward_seconds(Forward(t, 1, 128)) / truth.forward_seconds(Forward(t, 1, 128)) for t in found.tokens if t <= 64]
    )
    assert len(off) >= 10
    assert off / np.median(off) == pytest.approx(np.ones(len(off)), rel=0.05)


@pytest.mark.deep
def test_calibrate_keeps_a_profile_that_jobs_find(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead.models.load import load_model

    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(logs, "LINE_SECONDS", 0.0)
    log, outputs = tmp_path / "c.log", ("-o", tmp_path / "p.json", "--plot", tmp_path / "p.png")
    result = cli("calibrate", "--model", DEMO, "--seconds", 5, *outputs, "--log-file", log)
    assert result.code == 0, result.err
    assert " measuring: " in log.read_text()
    assert "ended with exit code 0" in log.read_text()
    assert "CDL at 1.2x" in result.out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    target = load_model(DEMO)
    cost, profile = target.step_cost(1), read_profile(str(tmp_path / "p.json"))
    assert cost
    assert target.as_tensor_parallel_rank().step_cost(1) is None  # of a model that processes share
    assert cost.table[1, 0] == pytest.approx(profile.forward_seconds(Forward(1, 1, 512)))


def test_calibrate_estimates_and_says_what_is_wrong(cli: Cli, tmp_path: Path) -> None:
    out = str(tmp_path / "p.json")
    result = cli("calibrate", "--model", DEMO, "--estimate", "l4", "-o", out, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["setting"]["device"] == "NVIDIA L4"
    assert json.loads(result.out)["cdl"]["1"] == read_profile(out).cdl()
    for arguments, said in (
        ([], "name a model"),
        (["--model", DEMO, "--estimate", "l4"], "name a file with -o"),
        (["--model", DEMO, "--estimate", "l4", "-o", out, "--attn", "eager"], "leave out"),
        (["--model", DEMO, "--estimate", "l5", "-o", out], "choose one of h200"),
    ):
        result = cli("calibrate", *arguments)
        assert (result.code, result.out) == (2, "")
        assert said in result.err


@pytest.fixture
def logged(tmp_path: Path) -> str:
    """Answers that repeat one another."""
    random = np.random.default_rng(0)
    said = random.integers(0, 50, 80).tolist()
    rows = [{"prompt_ids": random.integers(0, 50, 9).tolist(), "response_ids": [k, *said]} for k in range(6)]
    path = tmp_path / "logged.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.deep
def test_replay_with_a_profile_adds_the_predicted_speed(cli: Cli, logged: str, tmp_path: Path) -> None:
    asked = ["bench", "--replay", logged, "--cost-profile", "llama-7b-h200", "--strategy", "auto,hierarchical"]
    result = cli(*asked, "--decoding-length", "16", "--json")
    (fixed,), predicted = result.json["strategies"], result.json["predicted"]
    assert predicted["predicted"]
    assert predicted["device"] == "NVIDIA H200 SXM"
    plain, auto, hierarchical = predicted["runs"]
    assert hierarchical["speedup"] == fixed["predicted_speedup"] > 1.5
    assert auto["speedup"] > 0.95 * hierarchical["speedup"]
    assert plain["forward_ms"]["p50"] == pytest.approx(
        read_profile("llama-7b-h200").forward_seconds(Forward(1, 1, 50)) * 1e3, rel=0.1
    )
    assert hierarchical["edl"] == pytest.approx(fixed["edl"], rel=0.05)
    sizes = cli(*asked, "--batch-size", "1,4", "--report", str(tmp_path / "r.html"), "--json").json["predicted"]["batches"]
    assert [each["batch_size"] for each in sizes] == [1, 4]
    assert "(predicted)" in (tmp_path / "r.html").read_text()
    shown = cli(*asked)
    assert "predicted from a cost profile (estimate)" in shown.out


def test_profile_needs_a_replay_and_a_replay_alone_has_no_costs(cli: Cli, logged: str) -> None:
    for arguments, said in (
        (["--model", DEMO, "--input", logged, "--cost-profile", "llama-7b-h200"], "stands in for a model in --replay"),
        (["--replay", logged, "--batch-size", "4"], "need --cost-profile"),
        (["--replay", logged, "--strategy", "auto"], "choose from hierarchical"),
    ):
        result = cli("bench", *arguments)
        assert result.code == 2
        assert said in result.err
    result = cli("bench", "--replay", logged, "--cost-profile", "nowhere")
    assert (result.code, result.out) == (1, "")
    assert "no such cost profile" in result.err
