"""bench --engine vllm: what it compares, what it refuses, and (with -m vllm, see test_vllm.py) a bench in a real vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lookahead.bench import in_vllm
from lookahead.bench.compare import Comparison
from lookahead.bench.in_vllm import VllmBench, contenders
from lookahead.bench.lossless import lossless
from lookahead.bench.report import report_page
from lookahead.bench.run import Run, Turn
from lookahead.draft.options import DraftOptions
from lookahead.engines.vllm_worker import EXTENSION
from lookahead.errors import LookaheadError, UsageError
from lookahead_cli.comparison import print_comparison
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL, questions

HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        (["--engine", "tgi"], "--engine tgi: choose hf or vllm"),
        (["--engine-arg", "a=1"], "--engine-arg is of vLLM"),
        (["--engine", "vllm", "--engine-arg", "a"], "give NAME=VALUE"),
        (["--engine", "vllm", "--strategy", "hierarchical"], "vLLM verifies single branches"),
        (["--engine", "vllm", "--decoding-length", "x"], "--decoding-length x"),
        (["--engine", "vllm", "--branch-length", "4,8"], "--branch-length 4,8"),
        (["--engine", "vllm", "--batch-size", "0"], "--batch-size 0"),
        (["--engine", "vllm", "--sweep"], "leave out --sweep"),
        (["--engine", "vllm", "--recycling"], "leave out --recycling"),
        (["--engine", "vllm", "--explain", 1], "leave out --explain"),
        (["--engine", "vllm", "--replay", "a.jsonl"], "leave out --replay"),
        (["--engine", "vllm", "--exact"], "has no --exact"),
        (["--engine", "vllm", "--device", "cpu"], "has no --device: vLLM takes the devices of its platform"),
        (["--engine", "vllm", "--attn", "eager"], "has no --attn: --engine-arg attention_backend=NAME"),
        (["--engine", "vllm", "--quantize", "int8"], "has no --quantize: --engine-arg quantization=NAME"),
        (["--engine", "vllm", "--kv-dtype", "int8"], "has no --kv-dtype: --engine-arg kv_cache_dtype=NAME"),
        (["--engine", "vllm", "--adapter", "a"], "has no --adapter: merge it into the model"),
    ],
)
def test_what_makes_no_sense_in_vllm_is_one_line(options: list[object], saying: str, tmp_path: Path, cli: Cli) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", questions(1))
    cli.fails(2, "bench", "--model", MODEL, "--input", source, *options, saying=[saying])


def test_it_needs_a_model_and_prompts(cli: Cli) -> None:
    cli.fails(2, "bench", "--engine", "vllm", "--model", MODEL, saying=["needs --model NAME_OR_DIR and --input"])


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_vllm_that_is_not_installed_is_named_with_its_package(tmp_path: Path, cli: Cli) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", questions(1))
    cli.fails(2, "bench", "--engine", "vllm", "--model", MODEL, "--input", source, saying=["pip install 'lookahead[vllm]'"])


def test_contenders_are_plain_vllms_own_and_ours_at_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_vllm, "NEEDS", {"suffix": "no_such_package"})
    assert [each.name for each in contenders()] == ["plain", "ngram", "auto", "single 9"]
    monkeypatch.setattr(in_vllm, "NEEDS", {})
    found = contenders("auto,single", "5,17", price=0.1, session_tokens=7)
    assert [each.name for each in found] == ["plain", "ngram", "suffix", "auto 5", "auto 17", "single 5", "single 17"]
    assert [each.draft_tokens for each in found] == [0, 16, 16, 4, 16, 4, 16]
    assert [each.own and each.own["method"] for each in found[:4]] == [None, "ngram", "suffix", None]
    for each in found[3:]:
        assert each.options is not None
        assert (each.options.strategy, each.options.adaptive) == ("single", each.name.startswith("auto"))
        assert (each.options.decoding_length, each.options.branch_length) == (each.draft_tokens + 1, each.draft_tokens)
        assert (each.options.price, each.options.session_tokens) == (0.1, 7)
    assert [each.draft_tokens for each in contenders("single", "17", "6", peers=False)] == [0, 6]
    assert [each.name for each in contenders("auto,single", "auto", peers=False)] == ["plain", "auto"]
    with pytest.raises(UsageError, match="--strategy off"):
        contenders("off")


def test_each_contender_starts_vllm_with_its_drafts_and_its_share_of_the_memory() -> None:
    compared = contenders("auto", "9")
    bench = VllmBench("org/model", compared, engine_args={"max_model_len": 512})
    arguments = {each.name: bench.settings(each, ["a.trie"], [1.0], 4).arguments(on_cpu=True) for each in compared}
    assert "speculative_config" not in arguments["plain"]
    assert arguments["ngram"]["speculative_config"]["num_speculative_tokens"] == 8
    assert arguments["ngram"]["speculative_config"]["method"] == "ngram"
    assert "additional_config" not in arguments["ngram"]
    assert arguments["auto"]["speculative_config"]["method"] == "custom_class"
    assert arguments["auto"]["additional_config"]["lookahead"]["tries"] == [os.path.abspath("a.trie")]
    assert all(each["max_model_len"] == 512 and each["max_num_seqs"] == 4 for each in arguments.values())
    assert all(each["worker_extension_cls"] == EXTENSION for name, each in arguments.items() if name != "plain")
    assert bench.settings(compared[0], (), (), 4).share == len(compared)


ANSWER = [1, 2, 3, 4, 5]


def comparison(ours: list[int] = ANSWER, **fields: Any) -> Comparison:
    """Of two runs in vLLM, ours twice as fast. ours: its answer."""

    def run(name: str, options: DraftOptions | None, answer: list[int], seconds: float, steps: int) -> Run:
        found = Run(name, options, lambda rows: iter(()), lambda: None)
        found.add(0, Turn([answer], seconds, forwards=steps, steps=steps, accepted_tokens=4 - steps))
        return found

    drafting = DraftOptions("single", adaptive=True)
    runs = [run("plain", DraftOptions("off"), ANSWER, 2.0, 4), run("auto", drafting, ours, 1.0, 2)]
    for each in runs:
        each.settle(runs[0])
    about = {"processor": "P", "threads": 1, "torch": "2", "transformers": "5", "vllm": "0.32.0", "quantization": None}
    given: dict[str, Any] = {"lossless": None, "lossless_rows": 1, "environment": about, **fields}
    return Comparison("org/model", "cpu", "float32", "vllm", 1, 1, 1, False, runs, **given)


def test_a_comparison_in_vllm_is_shown_without_what_nobody_could_measure(capsys: pytest.CaptureFixture[str]) -> None:
    found = comparison(lossless=lossless(None, [[1]], [[1, 2, 3, 4, 5]], {"auto": [[1, 2, 3, 4, 6]]}))
    print_comparison(found)
    out = capsys.readouterr().out
    assert "2.00x" in out
    assert "where the time went" not in out
    assert "different: prompt 1, auto, after 4 tokens: token 6 for 5, not judged" in out
    assert "vllm 0.32.0" in out
    assert "peak memory" not in out
    page = report_page([found], "lookahead bench")
    assert "Where the time went" not in page
    assert "2.00x plain decoding" in page


def test_outputs_that_nobody_judges_are_identical_or_different() -> None:
    found = lossless(None, [[1], [1]], [[1, 2], [3, 4]], {"auto": [[1, 2], [3, 5]]})
    assert (found.identical, found.near_tie, found.different, found.exact) == (1, 0, 1, False)
    assert (found.divergences[0].row, found.divergences[0].place, found.divergences[0].tolerance) == (2, 1, None)


def test_outputs_that_differ_are_judged_by_the_stock_model_unless_vllm_has_quantized_it() -> None:
    bench, other, prompts = VllmBench(str(MODEL), contenders("auto")), [*ANSWER[:4], 6], [[7, 8]]
    same = in_vllm._judged(bench, comparison(), prompts)
    assert same is not None
    assert (same.identical, same.divergences) == (1, [])
    judged = in_vllm._judged(bench, comparison(other), prompts)
    assert judged is not None
    (found,) = judged.divergences
    assert (found.kind, found.place, found.expected, found.got) == ("different", 4, 5, 6)
    assert None not in (found.expected_score, found.got_score, found.tolerance)
    about = {**comparison().environment, "quantization": "fp8"}
    unjudged = in_vllm._judged(bench, comparison(other, environment=about), prompts)
    assert unjudged is not None
    assert [(each.kind, each.place, each.tolerance) for each in unjudged.divergences] == [("different", 4, None)]
    assert in_vllm._judged(bench, comparison(other, lossless_rows=0), prompts) is None


def test_one_of_vllms_own_that_does_not_start_is_left_out() -> None:
    closed: list[str] = []

    class Stub:
        def __init__(self, name: str):
            self.engine, self.name = self, name

        def close(self) -> None:
            closed.append(self.name)

    def start(contender: in_vllm.Contender) -> Any:
        if contender.name == "ngram":
            raise LookaheadError("vLLM does not start: no.")
        return Stub(contender.name)

    notices: list[str] = []
    events = in_vllm.BenchEvents()
    events.notice = notices.append  # type: ignore[method-assign]
    bench = VllmBench("org/model", [each for each in contenders("auto") if each.name != "suffix"])
    with in_vllm._running(bench, start, events) as engines:
        assert list(engines) == ["plain", "auto"]
    assert closed == ["plain", "auto"]
    assert notices == ["left out ngram: vLLM does not start: no"]

    def broken(contender: in_vllm.Contender) -> Any:
        if contender.name == "auto":
            raise LookaheadError("vLLM does not start: no.")
        return Stub(contender.name)

    with pytest.raises(LookaheadError, match="does not start"), in_vllm._running(bench, broken, events):
        pass
    assert closed == ["plain", "auto", "plain", "ngram"]


@pytest.mark.vllm
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_a_bench_in_vllm_compares_all_of_them(tmp_path: Path) -> None:
    """Two batch sizes, ids equal, memories cleared between repeats, a row that cannot be answered left out."""
    source = write_jsonl(tmp_path / "in.jsonl", [*questions(6), {"prompt": ""}])
    command = ("bench", "--engine", "vllm", "--model", MODEL, "--input", source, "--batch-size", "1,2", "--repeat", 2)
    command += ("--max-new-tokens", 24, "--strategy", "single", "--report", tmp_path / "page.html", "--json")
    for argument in ("enforce_eager=true", "max_model_len=512", f"kv_cache_memory_bytes={1 << 28}"):
        command += ("--engine-arg", argument)
    line = [sys.executable, "-m", "lookahead_cli", *map(str, command)]
    found = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "left out" in found.stderr
    for batch_size, each in zip((1, 2), json.loads(found.stdout)["batches"], strict=True):
        runs = {run["name"]: run for run in each["runs"]}
        names = ["plain", "ngram", "suffix", "single 9"] if importlib.util.find_spec("arctic_inference") else None
        assert list(runs) == (names or ["plain", "ngram", "single 9"])
        assert (each["batch_size"], each["rows"], each["mode"], each["dtype"]) == (batch_size, 6, "vllm", "float32")
        assert each["environment"]["vllm"].startswith("0.3")
        assert each["lossless"] == {"checked": 6, "identical": 6, "near_tie": 0, "different": 0}
        ours, plain = runs["single 9"], runs["plain"]
        assert ours["tokens"] == plain["tokens"] == runs["ngram"]["tokens"]
        assert plain["edl"] == 1.0 < ours["edl"]
        assert (plain["draft_tokens"], plain["accepted_by_source"]) == (0, {})
        assert 0 < sum(ours["accepted_by_source"].values()) <= ours["draft_tokens"]
        assert ours["accepted_by_source"].keys() <= {"prompt", "output", "session"}
        assert ours["forwards"] < plain["forwards"]
    assert "plain decoding" in (tmp_path / "page.html").read_text("utf-8")
