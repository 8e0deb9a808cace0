"""bench --engine vllm and sglang: what they compare and refuse, and (with -m vllm, -m sglang, see test_vllm.py and
test_sglang.py) a bench in the engine itself.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lookahead.bench import contenders as engine_contenders
from lookahead.bench import in_engine
from lookahead.bench.compare import Comparison
from lookahead.bench.contenders import ModelBench, contenders
from lookahead.bench.in_engine import About, InProcess
from lookahead.bench.lossless import lossless
from lookahead.bench.options import BenchOptions
from lookahead.bench.page import bench_page
from lookahead.bench.run import Run, Sample
from lookahead.draft.options import DraftOptions
from lookahead.engines.sglang_engine import SglangSettings
from lookahead.errors import LookaheadError, UsageError
from lookahead.models.options import ModelOptions
from lookahead_cli.comparison import print_comparison
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, questions

ROOT = Path(__file__).parents[2]
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        (["--engine", "vllm", "--strategy", "hierarchical"], "vLLM verifies single branches"),
        (["--engine", "vllm", "--decoding-length", "x"], "--decoding-length x"),
        (["--engine", "vllm", "--branch-length", "4,8"], "--branch-length 4,8"),
        (["--engine", "vllm", "--batch-size", "0"], "--batch-size 0"),
        (["--engine", "vllm", "--sweep"], "leave out --sweep"),
        (["--engine", "vllm", "--recycling"], "leave out --recycling"),
        (["--engine", "vllm", "--explain", 1], "leave out --explain"),
        (["--engine", "vllm", "--replay", "a.jsonl"], "leave out --replay"),
        (["--engine", "sglang", "--strategy", "auto"], "always of one size. Choose hierarchical."),
        (["--engine", "sglang", "--branch-length", "4"], "may be as deep as they have nodes"),
    ],
)
def test_what_makes_no_sense_in_an_engine_is_one_line(options, saying, tmp_path, cli):
    source = write_jsonl(tmp_path / "in.jsonl", questions(1))
    cli.fails(2, "bench", "--model", MODEL, "--input", source, *options, saying=[saying])
    cli.fails(2, "bench", "--engine", "vllm", "--model", MODEL, saying=["needs --model NAME_OR_DIR and --input"])


def test_contenders_are_plain_vllms_own_and_ours_at_each_length(monkeypatch):
    monkeypatch.setattr(engine_contenders, "NEEDS", {"suffix": "no_such_package"})
    assert [each.name for each in contenders("vllm", BenchOptions())] == ["plain", "ngram", "auto", "single 9"]
    monkeypatch.setattr(engine_contenders, "NEEDS", {})
    found = contenders("vllm", BenchOptions(strategy="auto,single", decoding_length="5,17", price=0.1, session_tokens=7))
    assert [each.name for each in found] == ["plain", "ngram", "suffix", "auto 5", "auto 17", "single 5", "single 17"]
    assert [each.draft_tokens for each in found] == [0, 16, 16, 4, 16, 4, 16]
    assert [each.own and each.own["method"] for each in found[:4]] == [None, "ngram", "suffix", None]
    for each in found[3:]:
        assert each.options is not None
        assert (each.options.strategy, each.options.adaptive) == ("single", each.name.startswith("auto"))
        assert (each.options.decoding_length, each.options.branch_length) == (each.draft_tokens + 1, each.draft_tokens)
        assert (each.options.price, each.options.session_tokens) == (0.1, 7)
    assert [
        each.draft_tokens
        for each in contenders("vllm", BenchOptions(strategy="single", decoding_length="17", branch_length="6", peers=False))
    ] == [0, 6]
    assert [
        each.name for each in contenders("vllm", BenchOptions(strategy="auto,single", decoding_length="auto", peers=False))
    ] == ["plain", "auto"]
    with pytest.raises(UsageError, match="--strategy off"):
        contenders("vllm", BenchOptions(strategy="off"))


def test_each_contender_starts_sglang_with_a_share_of_what_others_have_left():
    compared = contenders("sglang", BenchOptions())
    assert [(each.name, each.draft_tokens) for each in compared] == [("plain", 0), ("ngram", 15), ("hierarchical 16", 15)]
    bench = ModelBench(ModelOptions("org/model", engine="sglang", engine_arg=["device=cpu"]), contenders=compared)
    arguments = {}
    for running, contender in enumerate(compared):
        settings = in_engine.settings_of(bench, contender, ["a.trie"], [1.0], 4, running)
        arguments[contender.name] = settings.arguments()
    assert "speculative_algorithm" not in arguments["plain"]
    assert [each.get("speculative_algorithm") for each in arguments.values()] == [None, "NGRAM", "LOOKAHEAD"]
    assert [each.get("speculative_num_draft_tokens") for each in arguments.values()] == [None, 16, 16]
    assert all((each["max_running_requests"], each["device"]) == (4, "cpu") for each in arguments.values())
    free = 1.0
    for each in arguments.values():
        free -= free * each["mem_fraction_static"]
    assert free == pytest.approx(0.15, abs=2e-3)
    limited = ModelBench(ModelOptions("org/model", engine="sglang", engine_arg=["max_total_tokens=512"]), contenders=compared)
    settings = in_engine.settings_of(limited, compared[0], (), (), 4)
    assert "mem_fraction_static" not in settings.arguments()


ANSWER = [1, 2, 3, 4, 5]


def comparison(ours: list[int] = ANSWER, engine: str = "vllm", **fields: Any) -> Comparison:
    """Of two runs in an engine, ours twice as fast. ours: its answer."""

    def run(name: str, options: DraftOptions | None, answer: list[int], seconds: float, steps: int) -> Run:
        found = Run(name, options, lambda rows: iter(()), lambda: None)
        found.add(0, Sample([answer], seconds, forwards=steps, steps=steps, accepted_tokens=4 - steps))
        return found

    drafting = DraftOptions("single", adaptive=True)
    runs = [run("plain", DraftOptions("off"), ANSWER, 2.0, 4), run("auto", drafting, ours, 1.0, 2)]
    for each in runs:
        each.settle(runs[0])
    about = {"processor": "P", "threads": 1, "torch": "2", "transformers": "5", engine: "0.32.0", "quantization": None}
    given: dict[str, Any] = {"lossless": None, "lossless_rows": 1, "environment": about, **fields}
    return Comparison("org/model", "cpu", "float32", engine, 1, 1, 1, False, runs, **given)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_comparison_in_an_engine_is_shown_without_what_nobody_could_measure(engine, capsys):
    found = comparison(engine=engine, lossless=lossless(None, [[1]], [[1, 2, 3, 4, 5]], {"auto": [[1, 2, 3, 4, 6]]}))
    print_comparison(found)
    out = capsys.readouterr().out
    assert "2.00x" in out
    assert "where the time went" not in out
    assert "different: prompt 1, auto, after 4 tokens: token 6 for 5, not judged" in out
    assert f"{engine} 0.32.0" in out
    assert "peak memory" not in out
    page = bench_page([found], "lookahead bench", (), False)
    assert "Where the time went" not in page
    assert "2.00x plain decoding" in page


def test_outputs_that_differ_are_judged_by_the_stock_model_unless_the_engine_has_quantized_it():
    bench, other = ModelBench(ModelOptions(str(MODEL), engine="vllm")), [*ANSWER[:4], 6]
    prompts = [[7, 8]]
    same = in_engine._judged(bench, comparison(), prompts)
    assert (same.identical, same.divergences) == (1, [])
    judged = in_engine._judged(bench, comparison(other), prompts)
    (found,) = judged.divergences
    assert (found.kind, found.place, found.expected, found.got) == ("different", 4, 5, 6)
    assert None not in (found.expected_score, found.got_score, found.tolerance)
    about = {**comparison().environment, "quantization": "fp8"}
    unjudged = in_engine._judged(bench, comparison(other, environment=about), prompts)
    assert [(each.kind, each.place, each.tolerance) for each in unjudged.divergences] == [("different", 4, None)]
    assert in_engine._judged(bench, comparison(other, lossless_rows=0), prompts) is None


def test_one_of_the_engines_own_ways_that_does_not_start_is_left_out():
    def start(contender, running):
        started.append((contender.name, running))
        if contender.name == broken:
            raise LookaheadError("vLLM does not start: no.")
        return SimpleNamespace(close=lambda: closed.append(contender.name))

    notices, started, closed, broken = list[str](), list[tuple[str, int]](), list[str](), "ngram"
    events = in_engine.BenchEvents()
    events.notice = notices.append
    compared = [each for each in contenders("vllm", BenchOptions(strategy="auto")) if each.name != "suffix"]
    bench = ModelBench(ModelOptions("org/model", engine="vllm"), contenders=compared)
    with in_engine._running(bench, start, events) as engines:
        assert list(engines) == ["plain", "auto"]
    assert started == [("plain", 0), ("ngram", 1), ("auto", 1)]
    assert closed == ["plain", "auto"]
    assert notices == ["left out ngram: vLLM does not start: no"]
    broken = "auto"
    with pytest.raises(LookaheadError, match="does not start"), in_engine._running(bench, start, events):
        pass
    assert closed == ["plain", "auto", "plain", "ngram"]


class Scripted:
    """Stands for `in_engine.LocalEngine` in the process of an engine."""

    about = About("cpu", "float32", None, "0.5")

    def __init__(self, engine: Any):
        self.engine = engine

    def answer(self, prompts: list[list[int]], max_new_tokens: int) -> Sample:
        if not prompts:
            raise ValueError("no prompts\nat all")
        if prompts == [[0]]:
            os._exit(1)
        return Sample(prompts, 1.0, forwards=max_new_tokens)

    def close(self) -> None:
        Path(self.engine).write_text("closed", "utf-8")


def started_scripted(name: str, settings: SglangSettings) -> Scripted:
    """As `in_engine._started`, in the process. settings: the model names the file that tells that `Scripted` was closed."""
    print("this is not a part of a report")
    return Scripted(settings.model.name)


@pytest.mark.deep  # it imports torch in three processes
def test_an_engine_in_a_process_of_its_own_answers_and_is_closed_or_says_why_not(tmp_path, monkeypatch):
    monkeypatch.setattr(in_engine, "_started", started_scripted)
    settings = SglangSettings(ModelOptions(str(tmp_path / "closed")))
    run = InProcess("sglang", settings)
    assert run.about == Scripted.about
    turn = run.answer([[1, 2], [3]], 7)
    assert (turn.outputs, turn.forwards) == ([[1, 2], [3]], 7)
    with pytest.raises(LookaheadError, match=r"^ValueError: no prompts\.$"):
        run.answer([], 7)
    run.close()
    assert (tmp_path / "closed").read_text("utf-8") == "closed"
    run = InProcess("sglang", settings)
    with pytest.raises(LookaheadError, match="SGLang has failed: its process has ended"):
        run.answer([[0]], 7)
    run.close()
    monkeypatch.undo()
    with pytest.raises(LookaheadError, match="no-such-model"):
        InProcess("sglang", SglangSettings(ModelOptions("/no-such-model")))


def benched(*options: object) -> Any:
    """The report of a bench in a process of its own, and its stderr."""
    line = [sys.executable, "-m", "lookahead_cli", "bench", "--model", MODEL, *options, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if HAS_SGLANG:  # on a CPU, with its kernels in PyTorch
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/support/sglang_on_cpu"), *sys.path])
    found = subprocess.run([str(word) for word in line], capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout), found.stderr


def checked(each: Any, ours: str) -> dict[str, Any]:
    """The runs of a batch by name; what holds in any engine is asserted."""
    runs = {run["name"]: run for run in each["runs"]}
    assert (each["rows"], each["dtype"]) == (6, "float32")
    assert each["lossless"] == {"checked": 6, "identical": 6, "near_tie": 0, "different": 0}
    plain, drafted = runs["plain"], runs[ours]
    assert drafted["tokens"] == plain["tokens"] == runs["ngram"]["tokens"]
    assert plain["edl"] == 1.0 < drafted["edl"]
    assert (plain["draft_tokens"], plain["accepted_by_source"]) == (0, {})
    assert 0 < sum(drafted["accepted_by_source"].values()) <= drafted["draft_tokens"]
    assert drafted["accepted_by_source"].keys() <= {"prompt", "output", "session"}
    return runs


@pytest.mark.vllm
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_a_bench_in_vllm_compares_all_of_them(tmp_path):
    """Two batch sizes, ids equal, memories cleared between repeats, a row that cannot be answered left out."""
    source = write_jsonl(tmp_path / "in.jsonl", [*questions(6), {"prompt": ""}])
    options = ("--engine", "vllm", "--input", source, "--batch-size", "1,2", "--repeat", 2)
    options += ("--max-new-tokens", 24, "--strategy", "single", "--report", tmp_path / "page.html")
    for argument in ("enforce_eager=true", "max_model_len=512", f"kv_cache_memory_bytes={1 << 28}"):
        options += ("--engine-arg", argument)
    report, err = benched(*options)
    assert "left out" in err
    for batch_size, each in zip((1, 2), report["batches"], strict=True):
        runs = checked(each, "single 9")
        names = ["plain", "ngram", "suffix", "single 9"] if importlib.util.find_spec("arctic_inference") else None
        assert list(runs) == (names or ["plain", "ngram", "single 9"])
        assert (each["batch_size"], each["mode"]) == (batch_size, "vllm")
        assert each["environment"]["vllm"].startswith("0.3")
        assert runs["single 9"]["forwards"] < runs["plain"]["forwards"]
    assert "plain decoding" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.sglang
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")
def test_a_bench_in_sglang_compares_all_of_them(tmp_path):
    """Ids equal, memories cleared between repeats, a row that cannot be answered left out."""
    source = write_jsonl(tmp_path / "in.jsonl", [*questions(6), {"prompt": ""}])
    options = ("--engine", "sglang", "--input", source, "--batch-size", 2, "--repeat", 2)
    options += ("--max-new-tokens", 24, "--decoding-length", 8)
    for argument in ("device=cpu", "attention_backend=torch_native", "context_length=512", "max_total_tokens=4096"):
        options += ("--engine-arg", argument)
    report, err = benched(*options)
    assert "left out" in err
    runs = checked(report, "hierarchical 8")
    assert list(runs) == ["plain", "ngram", "hierarchical 8"]
    assert (report["batch_size"], report["mode"], report["environment"]["sglang"]) == (2, "sglang", "0.5.23")
    assert runs["ngram"]["edl"] > 1.0
    assert runs["ngram"]["draft_tokens"] > 0
