"""What bench says of a run: spread, repeats, where the time went, how deep drafts were accepted. Sweeps and the report."""

import dataclasses
import html
import json
import re
from collections import Counter

import numpy as np
import pytest

from lookahead.bench.page import bench_page
from lookahead.bench.run import Run, Sample, StepLog
from lookahead.draft.explain import Step
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import DraftTree
from lookahead.models.probe import probed
from tests.support.bench import compared_on
from tests.support.cli import write_jsonl
from tests.support.drafts import VOCAB_SIZE
from tests.support.jobs import MODEL
from tests.support.loading import without_the_op

PROMPTS = MODEL.parent / "prompts.jsonl"
ON_MODEL = ("bench", "--model", MODEL, "--input", PROMPTS)
FIXED = DraftOptions(decoding_length=8, adaptive=False)
OF_A_DIVERGENCE = {"row", "run", "place", "expected", "got", "expected_score", "got_score", "tolerance", "kind"}
TIMES = ("draft_seconds", "forward_seconds", "verify_seconds", "rest_seconds")


def prompts_of(count: int) -> list[list[int]]:
    """Of 15 tokens that repeat themselves."""
    return [ids * 3 for ids in np.random.default_rng(0).integers(3, VOCAB_SIZE, (count, 5)).tolist()]


@pytest.fixture(scope="module")
def compared(tiny_model):
    options = [dataclasses.replace(FIXED, adaptive=True), FIXED, dataclasses.replace(FIXED, strategy="single")]
    return compared_on(probed(tiny_model("llama")), prompts_of(6), options, max_new_tokens=20, repeats=2)


# turns
def turn(tokens: int, seconds: float) -> Sample:
    return Sample([[0] * tokens], seconds, steps=tokens, forwards=tokens)


def run_of(*turns: list[float]) -> Run:
    """Of the seconds of each repeat of each turn, of 10 tokens."""
    run = Run("", None, lambda rows: iter([turn(1, 1)]), lambda: None)
    for number, repeats in enumerate(turns):
        for seconds in repeats:
            run.add(number, turn(10, seconds))
    return run


FIVE = (1, 1, 0.5, 1, 0.2)  # 1, 2, 2, 4 and 5 times as fast


@pytest.mark.parametrize(
    ("plain", "ours", "speedup", "spread"),  # seconds of 10 tokens, of each repeat of each turn
    [
        ([[1], [2], [1], [4], [1]], [[each] for each in FIVE], 9 / 3.7, (2, 4)),  # the quartiles
        ([[1]], [[0.5]], 2, (2, 2)),
        ([[1, 4]], [[0.5, 1]], 2, (2.5, 3.5)),  # over repeats too: of 2 and 4
    ],
)
def test_spread_is_that_of_the_ratios_of_turns_and_repeats(plain, ours, speedup, spread):
    first, second = run_of(*plain), run_of(*ours)
    first.settle(first)
    second.settle(first)
    assert second.speedup == pytest.approx(speedup)
    assert second.speedup_spread == pytest.approx(spread)
    assert first.speedup == 1
    run = run_of([9.0, 1.0, 2.0])
    run.settle(run)
    assert (run.tokens, run.seconds) == (10, 2.0)  # the repeat of median time


def test_few_prompts_refill_slots_all_the_same(tiny_model):
    """Two slots and answers of 1, 19, 19 and 1 tokens: 38 decode steps of 2 rows at 18 forwards, were it not for the start."""
    prompts, lengths = prompts_of(4), [20, 2, 2, 20]
    answers = [[5] * length for length in lengths]
    target = probed(tiny_model("llama"))
    plain, generate = compared_on(target, prompts, [], batch_size=2, answers=answers, warm_up=0).runs
    assert generate.forwards == 40
    assert plain.forwards <= 26
    assert [len(output) for output in plain.outputs] == lengths == [len(output) for output in generate.outputs]


# steps
def test_depths_count_steps_that_drafted_so_deep_and_those_accepted_there():
    log = StepLog()
    for parents, accepted in (([-1, 0, 1, 0], (1,)), ([-1, 0, 1, 2], (1, 2, 3)), ([-1], ()), ([-1, 0, 0], ())):
        n = len(parents)
        numbers = np.zeros(n, np.int32)
        tree = DraftTree(numbers, np.array(parents, np.int32), numbers.astype(np.float32), numbers, numbers)
        log.see(Step(1, (), tree, accepted, (), ()))
    offered, right = log.by_depth()
    assert offered == Counter({1: 3, 2: 2, 3: 1})
    assert right == Counter({1: 2, 2: 1, 3: 1})


def test_forwards_that_only_take_in_prompts_are_no_decode_forwards(compared):
    for run in compared.runs[:4]:
        decode = sum(len(each.decode_forwards) for each in run.turns)
        assert decode == run.steps
        assert run.forwards == decode + 6  # a prefill each


def test_depths_wasted_tokens_and_sources_tell_of_the_same_drafts(compared):
    for run in (run.as_json() for run in compared.runs[1:4]):
        accepted = run["draft_tokens"] - run["draft_tokens_wasted"]
        depths = run["accepted_by_depth"]
        assert sum(each["accepted"] for each in depths) == accepted == sum(run["accepted_by_source"].values())
        assert accepted > 0 or run["adaptive"]  # which drafts what pays on this machine
        assert [each["depth"] for each in depths] == list(range(1, len(depths) + 1))
        offered = [each["offered"] for each in depths]
        assert sorted(offered, reverse=True) == offered
        assert all(each["accepted"] <= each["offered"] <= run["steps"] for each in depths)
        assert run["draft_tokens_wasted_per_step"] == pytest.approx(run["draft_tokens_wasted"] / run["steps"], abs=1e-4)
    single = compared.runs[3].as_json()
    assert sum(each["offered"] for each in single["accepted_by_depth"]) == single["draft_tokens"]  # one branch
    assert compared.runs[0].as_json()["accepted_by_depth"] == []


def test_parts_of_the_time_sum_to_all_of_it_and_peers_have_none(compared):
    for run in (run.as_json() for run in compared.runs):
        if run["strategy"] == "peer":
            assert [run[name] for name in (*TIMES, "forward_ms", "accepted_by_depth")] == [None] * 6
        else:
            assert all(run[name] >= 0 for name in TIMES)
            assert sum(run[name] for name in TIMES) == pytest.approx(run["seconds"], abs=1e-3)
            assert 0 < run["forward_ms"]["p50"] <= run["forward_ms"]["p99"]


# what is checked


@pytest.mark.parametrize(("asked", "rows"), [((), 64), (("--check-lossless",), 65), (("--no-check-lossless",), 0)])
def test_first_64_rows_are_checked_unless_all_or_none_are_asked_for(cli, tmp_path, asked, rows):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"{number} apples"} for number in range(65)])
    few = ("--max-new-tokens", 2, "--strategy", "single", "--no-peers", "--batch-size", 16)
    value = cli("bench", "--model", MODEL, "--input", prompts, *few, *asked, "--json").json
    assert value["lossless_rows"] == rows
    assert (value["lossless"] or {}).get("checked", 0) == rows


# a sweep
@pytest.mark.deep
def test_sweep_measures_a_grid_beside_auto_and_draws_it(cli, tmp_path):
    saved, plot, report = tmp_path / "s.json", tmp_path / "s.png", tmp_path / "s.html"
    result = cli(
        *ON_MODEL, "--rows", 2, "--max-new-tokens", 12, "--sweep", "--decoding-length", "2,8", "--branch-length", "2,8",
        "--strategy", "hierarchical,single", "--no-peers", "--batch-size", 2,
        "--save", saved, "--plot", plot, "--report", report,
    )  # fmt: skip
    assert result.code == 0, result.err
    cells, value = [(2, 2), (8, 2), (8, 8)], json.loads(saved.read_text())
    assert [run["name"] for run in value["runs"]] == [
        "plain", "auto", *(f"{name} {n}/{b}" for name in ("hierarchical", "single") for n, b in cells),
    ]  # fmt: skip
    assert [(run["decoding_length"], run["branch_length"]) for run in value["runs"][2:]] == cells * 2
    for run in value["runs"][2:]:
        assert run["draft_tokens"] <= run["steps"] * (run["decoding_length"] - 1)
        assert len(run["accepted_by_depth"]) <= run["branch_length"]
    assert value["lossless"]["identical"] == 2 * 7
    assert re.search(r"best fixed setting: (?:hierarchical|single) \d/\d, .*; auto reaches", result.out)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "Decoding and branch length" in report.read_text()


def test_bench_refuses_what_a_sweep_or_a_replay_cannot_do(cli, tmp_path):
    pairs = write_jsonl(tmp_path / "p.jsonl", [{"prompt_ids": [5], "response_ids": [7, 5]}])
    for option in (("--repeat", 2), ("--report", tmp_path / "r.html"), ("--check-lossless",)):
        cli.fails(2, "bench", "--replay", pairs, *option, saying=["--replay runs no model", option[0]])
    cli.fails(2, *ON_MODEL, "--branch-length", "4,8", saying=["--branch-length 4,8", "--sweep"])
    cli.fails(2, *ON_MODEL, "--branch-length", "many", saying=["--branch-length many", "1 to 1024"])
    cli.fails(2, *ON_MODEL, "--sweep", "--strategy", "auto", saying=["--strategy auto", "no lengths"])
    cli.fails(2, *ON_MODEL, "--sweep", "--strategy", "off", saying=["--strategy off"])
    cli.fails(2, *ON_MODEL, "--sweep", "--decoding-length", "4,auto", saying=["--decoding-length 4,auto"])
    cli.fails(2, *ON_MODEL, "--repeat", 0, saying=["--repeat"])
    cli.fails(2, *ON_MODEL, "--save", tmp_path / "r", "--report", tmp_path / "r", saying=["--save", "file of its own"])
    cli.fails(1, *ON_MODEL, "--report", tmp_path / "no" / "r.html", saying=["r.html", "folder does not exist"])


# the report
def words_of(page: str) -> str:
    """The text that a page shows."""
    return html.unescape(re.sub("<[^>]*>", "", page))


def test_report_is_one_page_that_needs_nothing_else(cli, tmp_path):
    report = tmp_path / "r.html"
    asked = ("--rows", 2, "--max-new-tokens", 8, "--repeat", 2, "--report", report, "--json")
    value = cli(*ON_MODEL, *asked).json
    page = report.read_text(encoding="utf-8")
    assert page.count("<svg") == page.count("</svg>") == 3
    assert not re.search(r"<(script|img|link)\b", page)
    references, ids = re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)', page), re.findall(r'\bid="([^"]*)"', page)
    named = {one or other for one, other in references}
    assert named
    assert named <= {f"#{each}" for each in ids}
    assert len(set(ids)) == len(ids) > 0
    words = words_of(page)
    for run in value["runs"]:
        assert run["name"] in words
        assert f"{run['peak_memory_bytes'] / 2**20:,.0f}" in words
    assert "8/8 outputs identical to plain decoding, bit for bit, 0 different" in words
    assert f"lookahead bench --model {MODEL}" in words
    assert value["environment"]["processor"] in words
    assert "color-scheme: light dark" in page


@pytest.mark.deep
def test_report_escapes_what_comes_from_outside(compared):
    for each in (
        compared,
        dataclasses.replace(compared, forced=True, lossless=None),
        dataclasses.replace(compared, lossless=None),
    ):
        odd = dataclasses.replace(each, model="<script>$x$ & --> </style>", environment={**each.environment, "<b>": "<i>&"})
        page = bench_page([odd], "lookahead bench --model '<script>'", ["<u>:1: bad"], False)
        assert not re.search(r"<(script|b|i|u)\b", page)
        words = words_of(page)
        for text in ("<script>$x$ & --> </style>", "<b>", "<i>&", "'<script>'", "<u>:1: bad"):
            assert text in words


@pytest.mark.deep
def test_near_ties_are_listed_below_the_table_in_the_json_and_in_the_report(cli, tmp_path, monkeypatch):
    without_the_op(monkeypatch)
    asked = ("--rows", 4, "--max-new-tokens", 40, "--strategy", "hierarchical,single", "--dtype", "bfloat16", "--no-peers")
    saved, report = tmp_path / "b.json", tmp_path / "r.html"
    shown = cli(*ON_MODEL, *asked, "--batch-size", 2, "--save", saved, "--report", report)
    value = json.loads(saved.read_text())
    assert value["dtype"] == "bfloat16"
    assert value["lossless"]["different"] == 0
    assert len(value["divergences"]) == value["lossless"]["near_tie"] > 0
    for each in value["divergences"]:
        assert set(each) == OF_A_DIVERGENCE
        assert each["kind"] == "near-tie"
    first = value["divergences"][0]
    line = f"near-tie: prompt {first['row']}, {first['run']}, after {first['place']} tokens: token {first['got']} ("
    assert line in shown.out
    words = words_of(report.read_text(encoding="utf-8"))
    assert f"{value['lossless']['near_tie']} near-ties" in words
    assert words.count("near-tie") >= len(value["divergences"]) + 1
