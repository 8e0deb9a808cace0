"""Jobs that another engine answers: what it does not have is said at the start, and rows are those of our own engine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lookahead.decode.constraint import Constraint
from lookahead.decode.sampling import Sampling
from lookahead.draft.options import DraftOptions
from lookahead.engines.abilities import VLLM as IN_VLLM
from lookahead.engines.vllm_engine import VllmSettings
from lookahead.errors import UsageError
from lookahead.job.plan import engine_args
from lookahead.models.options import ModelOptions
from lookahead.trie.file import Trie
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL, PROMPTS, questions, rows_of, steady

ROOT = Path(__file__).parents[2]
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        (["--engine", "tgi"], "--engine tgi: choose hf, vllm or sglang"),
        (["--engine-arg", "a=1"], "--engine-arg is of vLLM and SGLang"),
        (["--engine", "vllm", "--engine-arg", "a"], "give NAME=VALUE"),
        (["--engine", "vllm", "--engine-arg", "a=1", "--engine-arg", "a=2"], "a is given twice"),
        (["--engine", "vllm", "--exact"], "has no --exact"),
        (["--engine", "vllm", "--workers", 2], "has no --workers: --engine-arg data_parallel_size=N"),
        (["--engine", "vllm", "--quantize", "int8"], "has no --quantize: --engine-arg quantization=NAME"),
        (["--engine", "vllm", "--tp-plan", "auto"], "tensor_parallel_size=N"),
        (["--engine", "vllm", "--typical-p", 0.9], "has no --typical-p"),
        (["--engine", "vllm", "--min-p", 0.1], "vLLM refuses --min-p with drafts"),
        (["--engine", "vllm", "--logit-bias", "5=-1"], "vLLM refuses --logit-bias with drafts"),
        (["--engine", "vllm", "--sampling", "model"], "has no --sampling model"),
        (["--engine", "vllm", "--strategy", "parallel"], "vLLM verifies single branches"),
        (["--engine", "vllm", "--explain", 1], "has no --explain"),
        (["--engine", "sglang", "--device", "cpu"], "has no --device: --engine-arg device=NAME"),
        (["--engine", "sglang", "--repetition-penalty", 1.2], "SGLang does not keep to --repetition-penalty with drafts"),
        (["--engine", "sglang", "--strategy", "single"], "SGLang is given one tree of all branches"),
        (["--engine", "sglang", "--bad-words", "a"], "has no --bad-words"),
    ],
)
def test_what_an_engine_does_not_have_is_one_error_at_the_start(
    options: list[object], saying: str, tmp_path: Path, cli: Cli
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", questions(1))
    cli.fails(2, "generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl", *options, saying=[saying])
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_named_with_its_package(engine: str, tmp_path: Path, cli: Cli) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    source = write_jsonl(tmp_path / "in.jsonl", questions(1))
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl", "--engine", engine, "--quiet")
    cli.fails(2, *job, saying=[f"pip install 'lookahead[{engine}]'"])


def test_a_dry_run_names_rows_that_the_engine_cannot_answer(tmp_path: Path, cli: Cli) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "params": {"no_repeat_ngram_size": 2}}]
    job = ("generate", "--model", MODEL, "--input", write_jsonl(tmp_path / "in.jsonl", rows), "--dry-run", "--json")
    assert cli(*job).json["bad_rows"] == 0
    found = cli(*job, "--engine", "vllm").json
    assert [problem["line"] for problem in found["problems"]] == [2]
    assert "no_repeat_ngram_size is set, and vLLM has none" in found["problems"][0]["message"]


def test_a_job_is_not_resumed_on_another_engine(tmp_path: Path, cli: Cli) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", questions(2))
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl", "--max-new-tokens", 4)
    assert cli(*job, "--limit", 1).code == 0
    cli.fails(2, *job, "--resume", "--engine", "vllm", saying=["--engine hf then, --engine vllm now"])


def test_engine_arguments_are_json_or_text() -> None:
    items = ["max_model_len=512", "quantization=fp8", "enforce-eager=true", "x=False", 'speculative_config={"a": [1]}']
    found = {"max_model_len": 512, "quantization": "fp8", "enforce_eager": True, "x": False, "speculative_config": {"a": [1]}}
    assert engine_args(items) == found


def test_arguments_of_vllm_are_those_of_the_job() -> None:
    settings = VllmSettings(
        ModelOptions("org/model"), ("a.trie",), (2.0,), DraftOptions("single", price=0.1, adaptive=False), 6, batch_size=16,
        engine_args={"speculative_config": {"enable_adaptive_verification": True}, "swap_space": 2},
    )  # fmt: skip
    found = settings.arguments(on_cpu=True)
    assert (found["model"], found["max_num_seqs"], found["dtype"], found["swap_space"]) == ("org/model", 16, "float32", 2)
    assert settings.arguments(on_cpu=False)["dtype"] == "auto"
    assert found["speculative_config"] == {
        "method": "custom_class",
        "model": "lookahead.engines.vllm.Proposer",
        "num_speculative_tokens": 6,
        "enable_adaptive_verification": True,
    }
    drafting = found["additional_config"]["lookahead"]
    assert drafting == {
        "tries": [os.path.abspath("a.trie")],
        "trie_weights": [2.0],
        "price": 0.1,
        "session_tokens": 4_000_000,
        "adaptive": False,
    }
    plain = VllmSettings(ModelOptions("org/model"), drafts=DraftOptions("off")).arguments(on_cpu=True)
    assert not {"speculative_config", "additional_config"} & plain.keys()
    for argument in ({"model": "other"}, {"speculative_config": {"method": "ngram"}}, {"max_num_seqs": 4}):
        with pytest.raises(UsageError, match="--engine-arg"):
            VllmSettings(ModelOptions("org/model"), engine_args=argument).arguments(on_cpu=True)


def test_rows_that_ask_for_what_vllm_cannot_do_are_refused() -> None:
    IN_VLLM.check(Sampling(temperature=1.0, typical_p=1.0, min_p=0.0, constraint=Constraint("regex", "a+")))
    IN_VLLM.check(Sampling(min_p=0.1, logit_bias={5: 1.0}), drafts=False)
    for sampling, name in (
        (Sampling(typical_p=0.5), "typical_p"),
        (Sampling(no_repeat_ngram_size=2), "no_repeat_ngram_size"),
        (Sampling(bad_words_ids=[[5]]), "bad_words_ids"),
        (Sampling(min_p=0.1), "min_p"),
        (Sampling(logit_bias={5: 1.0}), "logit_bias"),
        (Sampling(sampling="model"), "model"),
    ):
        with pytest.raises(UsageError, match=name):
            IN_VLLM.check(sampling)


# ---- in an environment that holds vLLM, see tests/engines/test_vllm.py

VLLM = ("--engine", "vllm", "--batch-size", 4)
ARGUMENTS = [("enforce_eager", "true"), ("max_model_len", 512), ("kv_cache_memory_bytes", 1 << 28)]
VLLM += tuple(word for name, value in ARGUMENTS for word in ("--engine-arg", f"{name}={value}"))
ALWAYS = ("--strategy", "single", "--decoding-length", 9)  # drafts at each step, regardless of what a loaded machine makes pay


def started(*options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lookahead_cli", "generate", "--model", MODEL, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if HAS_SGLANG:  # on a CPU, with its kernels in PyTorch
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/support/sglang_on_cpu"), *sys.path])
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([str(word) for word in command], env=environment, **pipes)  # type: ignore[call-overload]


def answered(source: Path, out: Path, *options: object, code: int = 0) -> list[dict[str, Any]]:
    process = started("--input", source, "-o", out, *options)
    _, err = process.communicate()
    assert process.returncode == code, err[-2000:]
    return rows_of(out)


@pytest.mark.vllm
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
class TestVllm:
    def test_rows_are_those_of_our_own_engine(self, tmp_path: Path) -> None:
        """Greedy, in float32: ids, texts, reasons; constraints, stop texts, samples, log-probabilities, rows that fail."""
        rows: list[dict[str, Any]] = [{"id": n, "prompt": prompt} for n, prompt in enumerate(PROMPTS[:12])]
        asked: list[dict[str, Any]] = [
            {"stop": ["="]},
            {"choice": [" 3", " 17"]},
            {"logprobs": 3, "max_new_tokens": 9},
            {"n": 2, "max_new_tokens": 5},
            {"repetition_penalty": 1.2},
            {"min_new_tokens": 20, "stop_token_ids": [8]},
        ]
        for row, params in zip(rows, asked, strict=False):
            row["params"] = params
        rows += [{"id": "bad", "prompt": "x", "params": {"min_p": 0.5}}, {"id": "empty", "prompt": ""}]
        source = write_jsonl(tmp_path / "in.jsonl", rows)
        common = ("--token-ids", "--max-new-tokens", 40, "--quiet")
        own = answered(source, tmp_path / "own.jsonl", *common, code=3)
        trie = tmp_path / "new.trie"
        found = answered(source, tmp_path / "vllm.jsonl", *common, *VLLM, *ALWAYS, "--save-trie", trie, code=3)
        assert [row["id"] for row in found] == [row["id"] for row in rows]
        for one, other in zip(own, found, strict=True):
            if one["id"] == "bad":
                assert "min_p is set, and vLLM refuses it" in other["error"]["message"]
                continue
            assert one.get("token_ids") == other.get("token_ids"), one["id"]
            assert one.get("text") == other.get("text")
            assert one["finish_reason"] == other["finish_reason"]
            for mine, theirs in zip(one.get("logprobs", ()), other.get("logprobs", ()), strict=True):
                assert [each["id"] for each in mine["top"]] == [each["id"] for each in theirs["top"]]
                assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)
        answers = [row for row in found if "error" not in row]
        assert sum(row["accepted_tokens"] for row in answers) > 50
        assert all(sum(row["accepted_by_source"].values()) == row["accepted_tokens"] for row in answers)
        sources = {source for row in answers for source in row["accepted_by_source"]}
        assert {"prompt", "output"} <= sources <= {"prompt", "output", "session"}
        assert all(row["steps"] + row["accepted_tokens"] <= row["completion_tokens"] for row in answers if "samples" not in row)
        assert len(Trie(trie).documents()) == len(answers)  # two greedy samples of a row are the same, and kept once

    def test_a_job_that_is_killed_is_resumed(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "in.jsonl", questions(60))
        metrics = tmp_path / "job.prom"
        common = ("--max-new-tokens", 40, "--token-ids", *VLLM, *ALWAYS, "--metrics", metrics)
        whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
        answered(source, whole, *common)
        process = started("--input", source, "-o", out, *common)
        while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 5):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert 5 <= len(rows_of(out)) < 60
        answered(source, out, *common, "--resume")
        assert steady(out) == steady(whole)
        manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text("utf-8"))
        assert (manifest["state"], len(manifest["runs"])) == ("complete", 2)
        assert manifest["runs"][0]["versions"]["vllm"].startswith("0.3")
        by_source: Counter[str] = sum((Counter(row["accepted_by_source"]) for row in rows_of(out)), Counter())
        assert by_source["output"] > 0
        for source, count in by_source.items():  # of both runs
            (line,) = (each for each in metrics.read_text("utf-8").splitlines() if f'source="{source}"' in each)
            assert line.endswith(f" {count}")

    def test_samples_with_drafts_and_a_seed_are_drawn(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "in.jsonl", questions(6))
        rows = answered(source, tmp_path / "out.jsonl", "--temperature", 1, "-n", 3, "--max-new-tokens", 12, *VLLM)
        assert all(len({sample["text"] for sample in row["samples"]}) > 1 for row in rows)

    def test_arguments_that_vllm_does_not_know_are_one_line(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "in.jsonl", questions(1))
        for argument, saying in (("nonsense=1", "vLLM has no such argument"), ("max_model_len=-5", "vLLM does not start")):
            process = started(
                "--input", source, "-o", tmp_path / "out.jsonl", "--quiet", "--engine", "vllm", "--engine-arg", argument
            )
            _, err = process.communicate()
            assert process.returncode in (1, 2)
            assert saying in err
            assert "Traceback" not in err


# ---- in an environment that holds SGLang, see tests/engines/test_sglang.py

SGLANG = ("--engine", "sglang", "--batch-size", 4)
ON_CPU = [("device", "cpu"), ("attention_backend", "torch_native"), ("context_length", 512), ("max_total_tokens", 8192)]
SGLANG += tuple(word for name, value in ON_CPU for word in ("--engine-arg", f"{name}={value}"))


@pytest.mark.sglang
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")
class TestSglang:
    def test_rows_are_those_of_our_own_engine(self, tmp_path: Path, cli: Cli) -> None:
        """Greedy, in float32: ids, texts, reasons; constraints, stop texts, samples, log-probabilities, rows that fail."""
        rows: list[dict[str, Any]] = [{"id": n, "prompt": prompt} for n, prompt in enumerate(PROMPTS[:24])]
        asked: list[dict[str, Any]] = [
            {"stop": ["="]},
            {"choice": [" 3", " 17"]},
            {"logprobs": 3, "max_new_tokens": 9},
            {"n": 2, "max_new_tokens": 5},
            {"stop_token_ids": [8]},
            {"regex": " [0-9]+ [a-z]+"},
            {"grammar": 'root ::= " " [0-9]+'},
        ]
        for row, params in zip(rows, asked, strict=False):
            row["params"] = params
        rows += [{"id": "bad", "prompt": "x", "params": {"min_p": 0.5}}, {"id": "empty", "prompt": ""}]
        rows.append({"id": "sampled", "prompt": "x", "params": {"temperature": 1.0}})
        source, trie, new = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "old.trie", tmp_path / "new.trie"
        assert cli("build-trie", ROOT / "samples/corpus.jsonl", "--tokenizer", MODEL, "-o", trie).code == 0
        common = ("--token-ids", "--max-new-tokens", 40, "--quiet")
        own = answered(source, tmp_path / "own.jsonl", *common, code=3)
        found = answered(source, tmp_path / "sglang.jsonl", *common, *SGLANG, "--trie", trie, "--save-trie", new, code=3)
        assert [row["id"] for row in found] == [row["id"] for row in rows]
        failed = {row["id"]: row["error"]["message"] for row in found if "error" in row}
        assert "SGLang does not keep to it with drafts" in failed.pop("bad")
        assert "SGLang verifies drafts greedily on cpu" in failed.pop("sampled")
        assert failed.keys() == {"empty"}
        for one, other in zip(own[:24], found, strict=False):
            assert one["token_ids"] == other["token_ids"], one["id"]
            assert one["text"] == other["text"]
            assert one["finish_reason"] == other["finish_reason"]
            for mine, theirs in zip(one.get("logprobs", ()), other.get("logprobs", ()), strict=True):
                assert [each["id"] for each in mine["top"]] == [each["id"] for each in theirs["top"]]
                assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)
        answers = found[:24]
        assert sum(row["accepted_tokens"] for row in answers) > 400
        assert all(sum(row["accepted_by_source"].values()) == row["accepted_tokens"] for row in answers)
        sources = {source for row in answers for source in row["accepted_by_source"]}
        assert {"prompt", "output", "trie:old"} <= sources
        assert len(Trie(new).documents()) == 24  # two greedy samples of a row are the same, and kept once

    def test_a_job_that_is_killed_is_resumed(self, tmp_path: Path) -> None:
        source, out = write_jsonl(tmp_path / "in.jsonl", questions(40)), tmp_path / "out.jsonl"
        common = ("--max-new-tokens", 40, "--token-ids")
        own = answered(source, tmp_path / "own.jsonl", *common)
        process = started("--input", source, "-o", out, *common, *SGLANG)
        while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 5):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert 5 <= len(rows_of(out)) < 40
        answered(source, out, *common, *SGLANG, "--resume")
        assert [row["token_ids"] for row in rows_of(out)] == [row["token_ids"] for row in own]
        manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text("utf-8"))
        assert (manifest["state"], len(manifest["runs"])) == ("complete", 2)
        assert manifest["runs"][0]["versions"]["sglang"] == "0.5.23"

    def test_what_sglang_does_not_take_is_said_at_the_end(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "in.jsonl", questions(1))
        for argument, saying in (("nonsense=1", "SGLang has no such argument"), ("page_size=16", "SGLang does not start")):
            process = started("--input", source, "-o", tmp_path / "out.jsonl", "--quiet", *SGLANG, "--engine-arg", argument)
            _, err = process.communicate()
            assert process.returncode in (1, 2)
            assert saying in err.splitlines()[-1]
