"""bench and demo, as typed. Ratios and counts are asserted, never times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lookahead_cli.demo import samples_folder
from tests.cli import Cli, write_jsonl

MODEL = samples_folder() / "demo-model"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Ten logged answers that repeat each other and their prompts."""
    rows = [{"prompt_ids": [1, 2, 3, n], "response_ids": [n, 1, 2, 3, 4, 5, 6, n, 7, 8, 9]} for n in range(20, 30)]
    return write_jsonl(tmp_path / "pairs.jsonl", rows)


def test_replay_needs_no_model_and_says_warm_and_cold(cli: Cli, pairs: Path, tmp_path: Path) -> None:
    trie = tmp_path / "p.trie"
    assert cli("build-trie", pairs, "-o", trie, "--vocab-size", 40).code == 0
    value = cli("bench", "--replay", pairs, "--trie", trie, "--strategy", "hierarchical", "--json").json
    assert (value["rows"], value["tokens"]) == (10, 110)
    warm, cold = value["strategies"]
    assert (warm["start"], cold["start"]) == ("warm", "cold")
    for run in (warm, cold):
        assert run["edl"] == pytest.approx(100 / run["steps"], abs=1e-3)
        assert run["draft_tokens_per_step"] <= 63
        assert set(run["draft_us"]) == {"p50", "p99"}
    assert warm["edl"] > 4
    assert warm["edl"] > cold["edl"] > 2


def test_replay_never_loads_torch(pairs: Path) -> None:
    code = (
        "import sys; from lookahead_cli.app import run; "
        f"assert run(['bench', '--replay', {str(pairs)!r}, '--json']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_replay_of_text_rows_takes_a_tokenizer(cli: Cli, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "Question: a\nAnswer:", "response": " He has 2 + 2 = 4 apples."}] * 3)
    value = cli("bench", "--replay", rows, "--tokenizer", MODEL, "--json", "--strategy", "hierarchical,single").json
    assert [s["strategy"] for s in value["strategies"]] == ["hierarchical", "single"]
    assert value["strategies"][0]["accepted_by_source"]["session"] > 0
    cli.fails(1, "bench", "--replay", rows, saying=["t.jsonl:1", "--tokenizer"])


def test_bench_on_a_model_is_lossless_and_reports_every_contender(cli: Cli, tmp_path: Path) -> None:
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


def test_bench_prints_a_table_a_verdict_and_the_environment(cli: Cli) -> None:
    result = cli(
        "bench", "--model", MODEL, "--input", samples_folder() / "prompts.jsonl", "--rows", 1, "--max-new-tokens", 8,
        "--strategy", "hierarchical", "--decoding-length", "4,8", "--no-peers",
    )  # fmt: skip
    for text in ("plain", "hierarchical 4", "hierarchical 8", "2/2 outputs identical", "torch"):
        assert text in result.out


def test_bench_refuses_what_does_not_go_together(cli: Cli, pairs: Path, tmp_path: Path) -> None:
    cli.fails(2, "bench", saying=["--model", "--replay", "lookahead demo"])
    cli.fails(2, "bench", "--model", MODEL, saying=["--input"])
    cli.fails(2, "bench", "--model", MODEL, "--replay", pairs, saying=["either"])
    cli.fails(2, "bench", "--replay", pairs, "--plot", tmp_path / "x.png", saying=["--plot"])
    cli.fails(2, "bench", "--replay", pairs, "--dtype", "float16", saying=["--replay runs no model", "--dtype"])
    cli.fails(2, "bench", "--replay", pairs, "--strategy", "off", saying=["off", "hierarchical"])
    cli.fails(2, "bench", "--replay", pairs, "--decoding-length", "many", saying=["many"])
    cli.fails(1, "bench", "--replay", tmp_path / "no.jsonl", saying=["no.jsonl: no such file"])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt_ids": [1], "response_ids": [2, 3]}, {"answer": 1}])
    cli.fails(1, "bench", "--replay", bad, saying=["bad.jsonl:2", "response_ids", "answer"])


def test_demo_ends_with_the_verdict(cli: Cli) -> None:
    result = cli("demo", "--rows", 3)
    assert result.code == 0
    assert "3/3 outputs identical, " in result.out
    assert "times faster" in result.out
    cli.fails(1, "demo", "--keep", "no/such/folder", saying=["no such folder"])
