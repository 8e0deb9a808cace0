"""Jobs that another engine answers: what it does not have is said at the start, and rows are those of our own engine."""

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
from lookahead.engines.foreign import FEATURES
from lookahead.engines.vllm_engine import VllmSettings
from lookahead.errors import UsageError
from lookahead.job.plan import engine_args
from lookahead.models.options import ModelOptions
from lookahead.trie.file import Trie
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, PROMPTS, questions, rows_of

ROOT = Path(__file__).parents[2]
HAS = {name: importlib.util.find_spec(name) is not None for name in ("vllm", "sglang")}


def asked(command, folder, *options):
    """The words of a job or a bench of a question."""
    source = write_jsonl(folder / "in.jsonl", questions(1))
    out = ("-o", folder / "out.jsonl", "--quiet") if command == "generate" else ()
    return (command, "--model", MODEL, "--input", source, *out, *options)


OF_BOTH = {  # commands
    "--engine tgi": "--engine tgi: choose hf, vllm or sglang",
    "--engine-arg a=1": "--engine-arg is of vLLM and SGLang",
    "--engine vllm --engine-arg a": "give NAME=VALUE",
    "--engine vllm --exact": "has no --exact",
    "--engine vllm --quantize int8": "has no --quantize: --engine-arg quantization=NAME",
    "--engine sglang --device cpu": "has no --device: --engine-arg device=NAME",
}
OF_JOBS = {
    "--engine vllm --engine-arg a=1 --engine-arg a=2": "a is given twice",
    "--engine vllm --workers 2": "has no --workers: --engine-arg data_parallel_size=N",
    "--engine vllm --tp-plan auto": "tensor_parallel_size=N",
    "--engine vllm --typical-p 0.9": "has no --typical-p",
    "--engine vllm --bad-words-ids 5": "has no --bad-words-ids",
    "--engine vllm --min-p 0.1": "vLLM refuses --min-p with drafts",
    "--engine vllm --logit-bias 5=-1": "vLLM refuses --logit-bias with drafts",
    "--engine vllm --sampling model": "has no --sampling model",
    "--engine vllm --strategy parallel": "vLLM verifies single branches",
    "--engine vllm --explain 1": "has no --explain",
    "--engine sglang --repetition-penalty 1.2": "SGLang does not keep to --repetition-penalty with drafts",
    "--engine sglang --min-p 0.1": "SGLang does not keep to --min-p with drafts",
    "--engine sglang --min-new-tokens 3": "SGLang does not keep to --min-new-tokens with drafts",
    "--engine sglang --strategy single": "SGLang is given one tree of all branches",
    "--engine sglang --bad-words a": "has no --bad-words",
}
ERRORS = [(command, *each) for command in ("generate", "bench") for each in OF_BOTH.items()]


@pytest.mark.parametrize(("command", "options", "saying"), [*ERRORS, *(("generate", *each) for each in OF_JOBS.items())])
def test_what_an_engine_does_not_have_is_one_error_at_the_start(command, options, saying, tmp_path, cli):
    cli.fails(2, *asked(command, tmp_path, *options.split()), saying=[saying])
    assert not (tmp_path / "out.jsonl").exists()


def test_rows_may_ask_for_what_has_no_effect_and_without_drafts_for_more():
    FEATURES["vllm"].check(Sampling(temperature=1.0, typical_p=1.0, min_p=0.0, constraint=Constraint("regex", "a+")))
    FEATURES["vllm"].check(Sampling(min_p=0.1, logit_bias={5: 1.0}), drafts=False)
    FEATURES["sglang"].check(Sampling(temperature=1.0, logit_bias={5: 1.0}, repetition_penalty=1.0))
    FEATURES["sglang"].check(Sampling(min_p=0.1, presence_penalty=1.0), drafts=False)


@pytest.mark.parametrize("command", ["generate", "bench"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_named_with_its_package(engine, command, tmp_path, cli):
    if HAS[engine]:
        pytest.skip(f"{engine} is installed")
    cli.fails(2, *asked(command, tmp_path, "--engine", engine), saying=[f"pip install 'lookahead[{engine}]'"])


def test_a_dry_run_names_rows_that_the_engine_cannot_answer(tmp_path, cli):
    rows = [{"prompt": "a"}, {"prompt": "b", "params": {"no_repeat_ngram_size": 2}}]
    job = ("generate", "--model", MODEL, "--input", write_jsonl(tmp_path / "in.jsonl", rows), "--dry-run", "--json")
    assert cli(*job).json["bad_rows"] == 0
    found = cli(*job, "--engine", "vllm").json
    assert [problem["line"] for problem in found["problems"]] == [2]
    assert "no_repeat_ngram_size is set, and vLLM has none" in found["problems"][0]["message"]


def test_engine_arguments_are_json_or_text():
    items = ["max_model_len=512", "quantization=fp8", "enforce-eager=true", "x=False", 'speculative_config={"a": [1]}']
    found = {"max_model_len": 512, "quantization": "fp8", "enforce_eager": True, "x": False, "speculative_config": {"a": [1]}}
    assert engine_args(items) == found


def test_arguments_of_vllm_are_those_of_the_job():
    settings = VllmSettings(
        ModelOptions("org/model"), ("a.trie",), (2.0,), DraftOptions("single", price=0.1, adaptive=False), 6, batch_size=16,
        engine_args={"speculative_config": {"enable_adaptive_verification": True}, "swap_space": 2},
    )  # fmt: skip
    found = settings.arguments(on_cpu=True)
    assert (found["model"], found["max_num_seqs"], found["dtype"], found["swap_space"]) == ("org/model", 16, "float32", 2)
    assert settings.arguments(on_cpu=False)["dtype"] == "auto"
    speculative, drafting = found["speculative_config"], found["additional_config"]["lookahead"]
    assert speculative.pop("model") == "lookahead.engines.vllm.Proposer"
    assert speculative == {"method": "custom_class", "num_speculative_tokens": 6, "enable_adaptive_verification": True}
    assert drafting.pop("tries") == [os.path.abspath("a.trie")]
    assert drafting == {"trie_weights": [2.0], "price": 0.1, "session_tokens": 4_000_000, "adaptive": False}
    plain = VllmSettings(ModelOptions("org/model"), drafts=DraftOptions("off")).arguments(on_cpu=True)
    assert not {"speculative_config", "additional_config"} & plain.keys()
    for argument in ({"model": "other"}, {"speculative_config": {"method": "ngram"}}, {"max_num_seqs": 4}):
        with pytest.raises(UsageError, match="--engine-arg"):
            VllmSettings(ModelOptions("org/model"), engine_args=argument).arguments(on_cpu=True)


# ---- in an environment that holds vLLM or SGLang, see tests/engines/test_vllm.py and test_sglang.py
ARGUMENTS = {
    "vllm": [("enforce_eager", "true"), ("max_model_len", 512), ("kv_cache_memory_bytes", 1 << 28)],
    "sglang": [("device", "cpu"), ("attention_backend", "torch_native"), ("context_length", 512), ("max_total_tokens", 8192)],
}
OPTIONS: dict[str, tuple[object, ...]] = {
    name: ("--engine", name, "--batch-size", 4, *(word for k, v in pairs for word in ("--engine-arg", f"{k}={v}")))
    for name, pairs in ARGUMENTS.items()
}
OPTIONS["vllm"] += ("--strategy", "single", "--decoding-length", 9)  # drafts at each step, whatever a loaded machine makes pay
ASKED: dict[str, list[dict[str, Any]]] = {  # of the first rows
    "vllm": [{"repetition_penalty": 1.2}, {"min_new_tokens": 20, "stop_token_ids": [8]}],
    "sglang": [{"stop_token_ids": [8]}, {"regex": " [0-9]+ [a-z]+"}, {"grammar": 'root ::= " " [0-9]+'}],
}
FAILED = {
    "vllm": {"bad": "min_p is set, and vLLM refuses it"},
    "sglang": {"bad": "SGLang does not keep to it with drafts", "sampled": "SGLang verifies drafts greedily on cpu"},
}
installed = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=[mark, pytest.mark.timeout(3600), pytest.mark.skipif(not HAS[name], reason="not installed")])
        for name, mark in (("vllm", pytest.mark.vllm), ("sglang", pytest.mark.sglang))
    ],
)


def started(*options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lookahead_cli", "generate", "--model", MODEL, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if HAS["sglang"]:  # on a CPU, with its kernels in PyTorch
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/support/sglang_on_cpu"), *sys.path])
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([str(word) for word in command], env=environment, **pipes)


def answered(source: Path, out: Path, *options: object, code: int = 0) -> list[dict[str, Any]]:
    process = started("--input", source, "-o", out, *options)
    _, err = process.communicate()
    assert process.returncode == code, err[-2000:]
    return rows_of(out)


@installed
def test_rows_are_those_of_our_own_engine(engine, tmp_path, cli):
    """Greedy, in float32: ids, texts, reasons; constraints, stop texts, samples, log-probabilities, rows that fail."""
    rows = [{"id": n, "prompt": prompt} for n, prompt in enumerate(PROMPTS[:24])]
    common = [{"stop": ["="]}, {"choice": [" 3", " 17"]}, {"logprobs": 3, "max_new_tokens": 9}, {"n": 2, "max_new_tokens": 5}]
    for row, params in zip(rows, common + ASKED[engine], strict=False):
        row["params"] = params
    rows += [{"id": "bad", "prompt": "x", "params": {"min_p": 0.5}}, {"id": "empty", "prompt": ""}]
    if engine == "sglang":
        rows.append({"id": "sampled", "prompt": "x", "params": {"temperature": 1.0}})
    source, trie, new = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "old.trie", tmp_path / "new.trie"
    assert cli("build-trie", ROOT / "samples/corpus.jsonl", "--tokenizer", MODEL, "-o", trie).code == 0
    options = ("--token-ids", "--max-new-tokens", 40, "--quiet")
    own = answered(source, tmp_path / "own.jsonl", *options, code=3)
    tries = ("--trie", trie, "--save-trie", new)
    found = answered(source, tmp_path / "found.jsonl", *options, *OPTIONS[engine], *tries, code=3)
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    failed = {row["id"]: row["error"]["message"] for row in found if "error" in row}
    assert failed.keys() == {"empty", *FAILED[engine]}
    assert all(why in failed[name] for name, why in FAILED[engine].items())
    answers = found[:24]
    for one, other in zip(own, answers, strict=False):
        for name in ("id", "token_ids", "text", "finish_reason"):
            assert one[name] == other[name]
        for mine, theirs in zip(one.get("logprobs", ()), other.get("logprobs", ()), strict=True):
            assert [each["id"] for each in mine["top"]] == [each["id"] for each in theirs["top"]]
            assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)
    assert sum(row["accepted_tokens"] for row in answers) > 100
    assert all(sum(row["accepted_by_source"].values()) == row["accepted_tokens"] for row in answers)
    assert {"prompt", "output", "trie:old"} <= {source for row in answers for source in row["accepted_by_source"]}
    assert len(Trie(new).documents()) == 24  # two greedy samples of a row are the same, and kept once


@installed
def test_a_job_that_is_killed_is_resumed(engine, tmp_path):
    source, out, metrics = write_jsonl(tmp_path / "in.jsonl", questions(60)), tmp_path / "out.jsonl", tmp_path / "job.prom"
    common = ("--max-new-tokens", 40, "--token-ids")
    own = answered(source, tmp_path / "own.jsonl", *common)
    options = (*common, *OPTIONS[engine], "--metrics", metrics)
    process = started("--input", source, "-o", out, *options)
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 5):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 5 <= len(rows_of(out)) < 60
    rows = answered(source, out, *options, "--resume")
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in own]
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text("utf-8"))
    assert (manifest["state"], len(manifest["runs"])) == ("complete", 2)
    assert manifest["runs"][0]["versions"][engine].startswith("0.")
    by_source = sum((Counter(row["accepted_by_source"]) for row in rows), Counter())
    assert by_source["output"] > 0
    for name, count in by_source.items():  # of both runs
        (line,) = (each for each in metrics.read_text("utf-8").splitlines() if f'source="{name}"' in each)
        assert line.endswith(f" {count}")


@installed
def test_a_process_of_an_engine_that_is_killed_is_replaced(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # as on a GPU
    source, out = write_jsonl(tmp_path / "in.jsonl", questions(60)), tmp_path / "out.jsonl"
    common = ("--max-new-tokens", 40, "--token-ids")
    own = answered(source, tmp_path / "own.jsonl", *common)
    process = started("--input", source, "-o", out, *common, *OPTIONS[engine])
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 5):
        time.sleep(0.02)
    name = {"vllm": b"VLLM::EngineCore", "sglang": b"sglang::scheduler"}[engine]
    os.kill(next(pid for pid in descendants(process.pid) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name)), 9)
    _, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    assert len([line for line in err.splitlines() if "has died" in line and "rows are asked again" in line]) == 1
    assert [row["token_ids"] for row in rows_of(out)] == [row["token_ids"] for row in own]


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    children = [int(each) for task in Path(f"/proc/{pid}/task").glob("*/children") for each in task.read_text().split()]
    return children + [each for child in children for each in descendants(child)]


@pytest.mark.vllm
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not HAS["vllm"], reason="vLLM is not installed")
def test_samples_with_drafts_and_a_seed_are_drawn(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", questions(6))
    options = ("--temperature", 1, "-n", 3, "--max-new-tokens", 12, *OPTIONS["vllm"])
    rows = answered(source, tmp_path / "out.jsonl", *options)
    assert all(len({sample["text"] for sample in row["samples"]}) > 1 for row in rows)


@installed
def test_arguments_that_an_engine_does_not_know_are_one_line(engine, tmp_path):
    source, wrong = write_jsonl(tmp_path / "in.jsonl", questions(1)), {"vllm": "max_model_len=-5", "sglang": "page_size=16"}
    for argument, saying in (("nonsense=1", "has no such argument"), (wrong[engine], "does not start")):
        options = OPTIONS[engine] if engine == "sglang" else ("--engine", engine)
        process = started("--input", source, "-o", tmp_path / "out.jsonl", "--quiet", *options, "--engine-arg", argument)
        _, err = process.communicate()
        assert process.returncode in (1, 2)
        assert saying in err.splitlines()[-1]
        assert "Traceback" not in err or engine == "sglang"
