"""Rows of several adapters in one job: each is answered as in a job of its own with that adapter."""

import copy
import json
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lookahead.api import LookaheadEngine
from lookahead.errors import UsageError
from lookahead.job import engines
from lookahead.models.load import load_model
from tests.architectures import tiny_model
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL, job_process, questions, rows_of, steady
from tests.support.loading import refuse_to_load

NAMES = (None, "a", "b")


def adapter_of(folder: Path, seed: int, weights: Any = False, model: Any = None) -> Path:
    """A LoRA adapter, by default of the demo model. weights: init_lora_weights; False: random, True: it changes nothing."""
    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=weights, task_type="CAUSAL_LM")
    get_peft_model(model or AutoModelForCausalLM.from_pretrained(MODEL), config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, Path]:
    return {name: adapter_of(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate("ab")}


def named(adapters: dict[str, Path]) -> list[object]:
    return [word for name, folder in adapters.items() for word in ("--adapter", f"{name}={folder}")]


def mixed(count: int) -> list[dict[str, Any]]:
    """Rows of no adapter, of a and of b, in turn, three of each prompt."""
    prompts = [row["prompt"] for row in questions(count)]
    rows = [{"id": f"q{number}", "prompt": prompts[number // 3]} for number in range(count)]
    return [{**row, **({"params": {"adapter": NAMES[number % 3]}} if number % 3 else {})} for number, row in enumerate(rows)]


def of_one(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows, which name no adapter."""
    return [{name: value for name, value in row.items() if name != "params"} for row in rows]


def job(folder: Path, rows: list[Any], *options: object) -> list[object]:
    source = write_jsonl(folder / "in.jsonl", rows)
    return ["--model", MODEL, "--input", source, "-o", folder / "out.jsonl", "--token-ids", "--max-new-tokens", 16, *options]


def answered(cli: Cli, folder: Path, rows: list[Any], *options: object, code: int = 0) -> list[dict[str, Any]]:
    result = cli("generate", *job(folder, rows, *options), "--quiet", "--overwrite")
    assert result.code == code, result.err
    return steady(folder / "out.jsonl")


@pytest.mark.parametrize("waiting", [4, 1000])
def test_rows_of_several_adapters_are_those_of_a_job_of_each(cli, tmp_path, adapters, monkeypatch, waiting):
    monkeypatch.setattr(engines, "WAITING", waiting)
    rows = mixed(12)
    found = answered(cli, tmp_path, rows, *named(adapters))
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    for first, name in enumerate(NAMES):
        alone = answered(cli, tmp_path, of_one(rows[first::3]), *(("--adapter", adapters[name]) if name else ()))
        assert found[first::3] == alone
    assert found[1::3] != answered(cli, tmp_path, of_one(rows[1::3]))


def test_adapter_without_a_name_is_that_of_rows_that_name_none(cli, tmp_path, adapters):
    rows = [row for row in mixed(6) if row.get("params") != {"adapter": "b"}]
    found = answered(cli, tmp_path, rows, "--adapter", adapters["b"], "--adapter", f"a={adapters['a']}")
    assert found[::2] == answered(cli, tmp_path, of_one(rows[::2]), "--adapter", adapters["b"])
    assert found[1::2] == answered(cli, tmp_path, of_one(rows[1::2]), "--adapter", adapters["a"])


def test_rows_on_stdout_stand_in_the_order_of_the_input(cli, tmp_path, adapters):
    source = write_jsonl(tmp_path / "in.jsonl", rows := mixed(6))
    result = cli("generate", "--model", MODEL, "--input", source, *named(adapters), "--max-new-tokens", 4, "--quiet")
    assert [json.loads(line)["id"] for line in result.out.splitlines()] == [row["id"] for row in rows]


def test_model_of_an_openai_line_may_name_an_adapter(cli, tmp_path, adapters):
    (one,) = questions(1)
    bodies = [{"prompt": one["prompt"], "model": name, "max_tokens": 8} for name in ("a", "gpt-4", "b")]
    lines = [{"custom_id": body["model"], "url": "/v1/completions", "body": body} for body in bodies]
    found = [line["response"]["body"] for line in answered(cli, tmp_path, lines, *named(adapters))]
    assert [body["model"] for body in found] == ["a", "demo-model", "b"]
    for body, adapter in zip(found, (["--adapter", adapters["a"]], [], ["--adapter", adapters["b"]]), strict=True):
        (alone,) = answered(cli, tmp_path, [one], "--max-new-tokens", 8, *adapter)
        assert body["choices"][0]["text"] == alone["text"]


def test_answers_of_one_adapter_do_not_become_drafts_of_another(cli, tmp_path):
    """The adapter changes nothing, so that its answers are those of the model."""
    same = adapter_of(tmp_path / "same", 0, weights=True)
    (one,) = questions(1)
    rows = [{**one, "id": number, **asked} for number, asked in enumerate(({}, {"params": {"adapter": "same"}}, {}))]
    options = "--batch-size", 1, "--strategy", "hierarchical", "--decoding-length", 16, "--adapter", f"same={same}"
    assert len({tuple(row["token_ids"]) for row in answered(cli, tmp_path, rows, *options)}) == 1
    accepted = [row["accepted_by_source"].get("session", 0) for row in rows_of(tmp_path / "out.jsonl")]
    assert accepted[:2] == [0, 0]
    assert accepted[2] > 0


def test_model_of_one_adapter_is_given_up_before_the_next_is_loaded(cli, tmp_path, adapters, monkeypatch):
    loaded: list[weakref.ref[Any]] = []

    def watched(options: Any) -> Any:
        assert not any(model() for model in loaded)
        target = load_model(options)
        target.model.hooks_of_it = [target.model]  # only the garbage collector frees it
        loaded.append(weakref.ref(target.model))
        return target

    monkeypatch.setattr(engines, "load_model", watched)
    monkeypatch.setattr(engines, "WAITING", 2)
    answered(cli, tmp_path, mixed(9), *named(adapters))
    assert len(loaded) > 2


def test_job_of_several_adapters_is_resumed_after_a_kill(cli, tmp_path, adapters):
    rows, out = mixed(90), tmp_path / "out.jsonl"
    expected = answered(cli, tmp_path, rows, *named(adapters))
    out.unlink()
    with job_process(*job(tmp_path, rows, *named(adapters), "--overwrite")[2:]) as child:
        while not out.exists() or b'"q1"' not in out.read_bytes():
            assert child.poll() is None, child.communicate()
            time.sleep(0.01)
        child.kill()
    done = out.read_bytes().count(b"\n")
    assert 30 < done < 90  # rows of no adapter did not wait for those of the others to be written
    resumed = cli("generate", *job(tmp_path, rows, *named(adapters)), "--resume", "--quiet")
    assert resumed.code == 0, resumed.err
    assert steady(out) == expected


def test_unknown_adapter_is_an_error_row_that_lists_those_there_are(cli, tmp_path, adapters):
    rows = mixed(3)
    rows[1]["params"] = {"adapter": "c"}
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    checked = cli("generate", "--model", MODEL, "--input", source, "--dry-run", *named(adapters))
    assert checked.code == 3
    assert checked.out.startswith(f"{source}:2: no --adapter is named 'c' (known: a, b).\n")
    found = answered(cli, tmp_path, rows, *named(adapters), code=3)
    assert [row["finish_reason"] == "error" for row in found] == [False, True, False]
    message = "line 2: no --adapter is named 'c' (known: a, b)."
    assert found[1]["error"] == {"type": "invalid_row", "message": message, "line": 2}
    found = answered(cli, tmp_path, [{**rows[0], "params": {"adapter": ["a"]}}, rows[0] | {"id": 1}], code=3)
    assert found[0]["error"]["message"] == "line 1: no --adapter is named ['a'] (known: none)."


@pytest.mark.parametrize(
    ("typed", "code", "saying"),
    [
        (["a=x", "a=y"], 2, "--adapter a=y: a is given twice."),
        (["x", "y"], 2, "--adapter y: is a second one without a name: give NAME=FOLDER."),
        (["=x"], 2, "--adapter =x: give NAME=FOLDER, such as legal=adapters/legal, or FOLDER alone."),
        (["a="], 2, "--adapter a=: give NAME=FOLDER"),
        (["a=./missing"], 1, "./missing: no such folder"),
        ([f"a={MODEL}"], 1, "no adapter_config.json in this folder"),
    ],
)
def test_wrong_adapter_is_refused_before_the_model_is_loaded(cli, tmp_path, monkeypatch, typed, code, saying):
    refuse_to_load(monkeypatch)
    options = [word for item in typed for word in ("--adapter", item)]
    cli.fails(code, "generate", *job(tmp_path, mixed(3), *options), saying=[saying])
    cli.fails(code, "generate", *job(tmp_path, mixed(3), *options), "--dry-run", saying=[saying])


def test_adapter_of_another_model_is_refused_before_the_first_row(cli, tmp_path, adapters):
    other = adapter_of(tmp_path / "other", 0, model=copy.deepcopy(tiny_model("llama")))
    options = *named({**adapters, "other": other}), "--quiet"
    cli.fails(1, "generate", *job(tmp_path, mixed(3), *options), saying=["was made for a model of other shapes"])
    assert not (tmp_path / "out.jsonl").exists()


def test_adapter_that_is_made_of_the_weights_is_used(cli, tmp_path):
    pissa = adapter_of(tmp_path / "pissa", 0, weights="pissa")
    (one,) = questions(1)
    found = answered(cli, tmp_path, [{**one, "params": {"adapter": "p"}}], "--adapter", f"p={pissa}")
    assert found == answered(cli, tmp_path, [one], "--adapter", pissa)


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        (["--workers", 2], "--adapter NAME=... is for one engine: leave --workers and --ray out"),
        (["--ray"], "--adapter NAME=... is for one engine: leave --workers and --ray out"),
        (["--explain", 1], "--explain shows the steps of one model: give --adapter without NAME=."),
        (["--tp-plan", "auto"], "leave --tp-plan out"),
        (["--engine", "vllm"], "--engine vllm has no --adapter"),
    ],
)
def test_named_adapters_are_of_one_engine_of_ours(cli, tmp_path, options, saying):
    cli.fails(2, "generate", *job(tmp_path, mixed(3), "--adapter", "a=x"), *options, saying=[saying])


def test_adapter_that_only_rows_can_name_is_refused_elsewhere(cli, tmp_path, adapters):
    with pytest.raises(UsageError, match="only rows of a job name adapters"):
        LookaheadEngine(MODEL, adapter=f"a={adapters['a']}")
    source = write_jsonl(tmp_path / "in.jsonl", of_one(mixed(3)))
    cli.fails(2, "bench", "--model", MODEL, "--input", source, *named(adapters), saying=["--adapter a=...: only rows of a job"])


def test_resumed_job_has_the_same_adapters_by_name(cli, tmp_path, adapters):
    answered(cli, tmp_path, rows := mixed(3), *named(adapters))
    files = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["model_files"]
    assert {"adapter/a/adapter_config.json", "adapter/b/adapter_model.safetensors"} <= files.keys()
    moved = {**adapters, "b": Path(shutil.copytree(adapters["b"], tmp_path / "moved"))}
    again = "generate", *job(tmp_path, [*rows, {"prompt": "One more."}], "--resume")
    assert cli(*again, *named(moved), "--quiet").code == 0
    swapped = named({"a": adapters["b"], "b": adapters["a"]})
    cli.fails(2, *again, *swapped, saying=["adapter/a/adapter_model.safetensors of the model has changed"])
    cli.fails(2, *again, saying=[f"--adapter a={adapters['a']} b={moved['b']} then, no --adapter now"])


def test_replay_finds_the_prompts_of_rows_that_name_adapters(cli, tmp_path, adapters):
    answered(cli, tmp_path, mixed(3), *named(adapters))
    replayed = cli("replay", tmp_path / "out.jsonl", "--json")
    assert replayed.code == 0, replayed.err
    assert replayed.json["rows"] == 3
