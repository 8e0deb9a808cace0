"""generate, as typed: rows in, rows out, and everything that can be wrong with them. Runs on the shipped demo model."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lookahead.tokenizer import load_tokenizer
from lookahead.trie.file import Trie
from lookahead_cli.app import run
from lookahead_cli.demo import samples_folder
from tests.architectures import tiny_config
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL
from tests.support.jobs import PROMPTS as QUESTIONS
from tests.support.tries import build_ids

PROMPTS = QUESTIONS[:3]
FIXED = ("--strategy", "hierarchical", "--decoding-length", 16)  # the same drafts in every run, whatever forwards cost


@pytest.fixture(scope="session")
def trie(tmp_path_factory):
    out = tmp_path_factory.mktemp("trie") / "answers.trie"
    assert run(["build-trie", str(samples_folder() / "corpus.jsonl"), "-o", str(out), "--tokenizer", str(MODEL), "--json"]) == 0
    return out


def generate(cli: Cli, rows: list[Any], folder: Path, *options: object) -> tuple[int, list[dict[str, Any]]]:
    """(exit code, output rows)."""
    source = write_jsonl(folder / "in.jsonl", rows)
    result = cli("generate", "--model", MODEL, "--input", source, "-o", folder / "out.jsonl", "--overwrite", *options)
    return result.code, [json.loads(line) for line in (folder / "out.jsonl").read_text("utf-8").splitlines()]


def test_answers_are_the_same_with_and_without_drafts_in_fewer_steps(cli, trie, tmp_path):
    rows = [{"prompt": p} for p in PROMPTS]
    options = ("--token-ids", "--max-new-tokens", 60)
    _, plain = generate(cli, rows, tmp_path, *options, "--strategy", "off")
    for strategy in ("hierarchical", "parallel", "single"):
        length = ("--decoding-length", 16)  # not as many as pay on this machine just now
        code, drafted = generate(cli, rows, tmp_path, *options, "--strategy", strategy, *length, "--trie", trie)
        assert code == 0
        assert [r["token_ids"] for r in drafted] == [r["token_ids"] for r in plain]
        assert sum(r["steps"] for r in drafted) < 0.7 * sum(r["steps"] for r in plain)


def test_output_row_has_the_documented_fields(cli, trie, tmp_path):
    _, (row,) = generate(cli, [{"id": "a", "prompt": PROMPTS[0]}], tmp_path, "--trie", trie, "--max-new-tokens", 40)
    expected = "id text finish_reason prompt_tokens completion_tokens steps draft_tokens accepted_tokens edl seconds"
    assert set(row) == {*expected.split(), "accepted_by_source"}
    assert row["id"] == "a"
    assert row["finish_reason"] in ("stop", "length")
    assert row["completion_tokens"] <= 40
    assert row["accepted_tokens"] == sum(row["accepted_by_source"].values())
    assert row["edl"] == pytest.approx((row["completion_tokens"] - 1) / row["steps"], abs=1e-3)


def steps_in(text: str) -> list[str]:
    """What is shown of each step."""
    return text.split("\nstep ")[1:]


def test_explain_shows_every_step_of_the_first_rows_and_what_was_accepted(cli, trie, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": p} for p in PROMPTS])
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl", "--trie", trie, "--overwrite")
    result = cli(*job, "--max-new-tokens", 20, "--explain", 2, "--decoding-length", 8)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert result.out.count("\nrow ") == 2
    for number, shown in enumerate(result.out.split("\nrow ")[1:]):
        steps = steps_in(shown)
        assert len(steps) == rows[number]["steps"]
        counts = [re.search(r"accepted (\d+) of (\d+) drafted", step) for step in steps]
        assert sum(int(found[1]) for found in counts) == rows[number]["accepted_tokens"]
        assert sum(int(found[2]) for found in counts) == rows[number]["draft_tokens"]
        own = sum("\n→ " in step for step in steps)
        assert own == len(steps) - (rows[number]["finish_reason"] == "stop" and "\n→ " not in steps[-1])
    assert "trie:answers" in result.out
    assert "step" not in result.err


def test_explanation_leaves_stdout_to_answers_and_to_json(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": PROMPTS[0]}])
    job = ("generate", "--model", MODEL, "--input", source, "--max-new-tokens", 8, "--explain", 1)
    result = cli(*job)
    assert json.loads(result.out)["steps"] == len(steps_in(result.err))
    result = cli(*job, "-o", tmp_path / "out.jsonl", "--json", "--quiet")
    assert result.json["steps"] == len(steps_in(result.err))


def test_explain_refuses_what_drafts_nothing(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6]}])
    job = ("generate", "--input", source, "-o", tmp_path / "o.jsonl")
    cli.fails(2, *job, "--model", MODEL, "--explain", 1, "--strategy", "off", saying=["--explain", "--strategy off"])
    cli.fails(2, *job, "--model", MODEL, "--explain", 0, saying=["--explain"])
    AutoModelForCausalLM.from_config(tiny_config("mamba")).save_pretrained(tmp_path / "mamba")
    result = cli(*job, "--model", tmp_path / "mamba", "--explain", 1)
    assert (result.code, result.out) == (2, "")
    assert "error: --explain: nothing is drafted" in result.err
    assert not (tmp_path / "o.jsonl").exists()


def test_weights_of_tries_that_are_not_there_and_that_are_no_weights_are_refused(cli, trie, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "o.jsonl", "--trie-weight")
    cli.fails(2, *job, "faq=2", "--trie", trie, saying=['"faq"', "known: answers"])
    cli.fails(2, *job, "answers=2", saying=["--trie-weight", "known: none"])
    for bad in ("answers=0", "answers=-1", "answers=inf", "answers=much", "answers", "=2"):
        cli.fails(2, *job, bad, "--trie", trie, saying=[f"--trie-weight {bad}:", "NAME=W", "above 0"])
    cli.fails(2, *job, "answers=2", "--trie-weight", "answers=3", "--trie", trie, saying=["answers is given twice"])
    assert not (tmp_path / "o.jsonl").exists()


def test_every_row_form_gives_the_same_answer(cli, tmp_path):
    question = PROMPTS[0].removeprefix("Question: ").removesuffix("\nAnswer:")
    ids = load_tokenizer(str(MODEL))(PROMPTS[0])["input_ids"]
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 20, "temperature": 0}
    rows = [
        {"prompt": PROMPTS[0]},
        {"prompt_ids": ids},
        {"messages": messages},
        {"prompt": PROMPTS[0], "params": {"max_new_tokens": 5}},
        {"custom_id": "c1", "method": "POST", "url": "/v1/chat/completions", "body": body},
    ]
    code, out = generate(cli, rows, tmp_path, "--max-new-tokens", 20)
    assert code == 0
    assert out[0]["text"] == out[1]["text"] == out[2]["text"]
    assert out[0]["text"].startswith(out[3]["text"])
    assert out[3]["completion_tokens"] == 5
    assert out[4]["custom_id"] == "c1"
    assert out[4]["response"]["body"]["choices"][0]["message"]["content"] == out[0]["text"]
    assert [row.get("id") for row in out[:4]] == [1, 2, 3, 4]


def test_saved_trie_that_exists_is_added_to_and_another_tokenizers_is_refused(cli, tmp_path):
    rows = [{"prompt": p} for p in PROMPTS[:2]]
    learned = tmp_path / "learned.trie"
    for jobs in (1, 2):
        named = ("--source-name", "day 2") if jobs == 2 else ()
        generate(cli, rows, tmp_path, "--save-trie", learned, "--max-new-tokens", 10, *named)
        trie = Trie(learned)
        assert len(trie.segments) == jobs
        assert [(s.name, s.documents) for s in trie.header.sources] == [("outputs", 2), ("day 2", 2)][:jobs]
    ids = write_jsonl(tmp_path / "ids.jsonl", [{"ids": [1, 2]}])
    cli("build-trie", ids, "-o", tmp_path / "ids.trie", "--vocab-size", 10)
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    job = ("generate", "--model", MODEL, "--input", source, "--save-trie")
    cli.fails(2, *job[:-1], "--source-name", "day 2", saying=["--source-name", "--save-trie"])
    cli.fails(1, *job, tmp_path / "ids.trie", saying=["ids.trie", "differs"])
    cli.fails(1, *job, write_jsonl(tmp_path / "other", rows), saying=["not a trie file"])


def test_what_cannot_be_read_or_written_is_named_and_nothing_is_written(cli, tmp_path, trie):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    build_ids(tmp_path / "other.trie", [[1, 2]])
    out = ("-o", tmp_path / "out.jsonl")
    job = ("generate", "--model", MODEL, "--input")
    cli.fails(2, "generate", "--input", source, saying=["--model", "lookahead demo"])
    cli.fails(1, *job, tmp_path / "no.jsonl", *out, saying=["no.jsonl: no such file"])
    cli.fails(1, *job, tmp_path / "empty.jsonl", *out, saying=["empty.jsonl: empty file"])
    cli.fails(1, *job, tmp_path / "folder", *out, saying=["is a folder"])
    cli.fails(1, *job, source, "-o", tmp_path / "no" / "out.jsonl", saying=["folder does not exist"])
    cli.fails(1, *job, source, "-o", tmp_path / "folder", saying=["is a folder"])
    cli.fails(1, *job, source, *out, "--trie", tmp_path / "no.trie", saying=["no.trie", "cannot be read"])
    cli.fails(1, *job, source, *out, "--trie", tmp_path / "other.trie", saying=["built for tokenizer", "Rebuild"])
    cli.fails(2, *job, source, *out, "--dtype", "float7", saying=["float7", "float32"])
    cli.fails(2, *job, source, *out, "--device", "toaster", saying=["toaster"])
    cli.fails(2, *job, source, *out, "--strategy", "magic", saying=["magic", "hierarchical"])
    cli.fails(2, *job, source, *out, "--decoding-length", 0, saying=["decoding length", "between 1 and 1024"])
    cli.fails(2, *job, source, *out, "--decoding-length", "-3", saying=["--decoding-length -3", "auto"])
    cli.fails(2, *job, source, *out, "--system", "x", saying=["--system needs --chat"])
    cli.fails(2, *job, source, *out, "--batch-size", 0, saying=["--batch-size 0: give a number of rows, or auto"])
    cli.fails(2, *job, source, *out, "--order", "size", saying=["--order size: choose input or completion"])
    cli.fails(2, *job, source, *out, "--top-p", 0, saying=["top_p is 0.0: it must be above 0 and at most 1"])
    for option, value in (("--batch-size", "many"), ("--temperature", -1), ("--logprobs", -1), ("--logprobs", "many")):
        cli.fails(2, *job, source, *out, option, value, saying=[option])
    cli.fails(2, *job, source, "--json", saying=["--json", "-o"])
    assert not (tmp_path / "out.jsonl").exists()


def test_models_that_are_none_are_refused_in_one_line(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])

    def fails(model, *saying):
        cli.fails(1, "generate", "--model", model, "--input", source, "-o", tmp_path / "o.jsonl", saying=saying)

    fails(tmp_path / "nowhere", "no such folder")
    fails(source, "is a file")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "no config.json")
    (tmp_path / "other").mkdir()
    for kind, architecture in (("t5", "T5Model"), ("bert", "BertForMaskedLM"), ("llama", "LlamaForSequenceClassification")):
        (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
        fails(tmp_path / "other", "not a causal language model")
    (tmp_path / "other" / "config.json").write_text("{broken")
    fails(tmp_path / "other", "config.json: is damaged")
    shutil.copytree(MODEL, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    fails(tmp_path / "cut", "no weights")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\x00" * 100)
    fails(tmp_path / "cut", "model.safetensors: cannot be read as safetensors")


def test_model_without_a_tokenizer_answers_rows_of_ids(cli, tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.save_pretrained(tmp_path / "bare")
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6, 7]}, {"prompt": "a"}])
    result = cli("generate", "--model", tmp_path / "bare", "--input", source, "--max-new-tokens", 5)
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert len(rows[0]["token_ids"]) <= 5
    assert "text" not in rows[0]
    assert "no tokenizer" in rows[1]["error"]["message"]


# ---- batches and sampling


def test_rows_come_in_the_order_of_their_prompts_or_as_they_end(cli, tmp_path):
    limits = [40, 2, 2, 2]
    rows = [{"id": n, "prompt": PROMPTS[n % 3], "params": {"max_new_tokens": limit}} for n, limit in enumerate(limits)]
    rows.insert(2, {"id": 9})
    options = ("--batch-size", 2, "--strategy", "off")
    assert [row["id"] for row in generate(cli, rows, tmp_path, *options)[1]] == [0, 1, 9, 2, 3]
    assert [row["id"] for row in generate(cli, rows, tmp_path, *options, "--order", "completion")[1]][-1] == 0


def test_corpus_file_in_the_place_of_a_trie_is_built_once_and_drafted_from(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": p} for p in PROMPTS[:2]])
    job = ("generate", "--model", MODEL, "--input", source, "--max-new-tokens", 12, *FIXED)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert cli(*job, "-o", first).code == 0
    for weight in ((), ("--trie-weight", "first=2")):
        assert cli(*job, "-o", second, "--trie", first, "--overwrite", *weight).code == 0
        rows = [[json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in (first, second)]
        assert [row["text"] for row in rows[0]] == [row["text"] for row in rows[1]]
        assert all("trie:first" in row["accepted_by_source"] for row in rows[1])
        (kept,) = (tmp_path / "cache").rglob("*.trie")
    kept.write_bytes(b"cut")
    assert cli("replay", second, "--trie", first, "--tokenizer", MODEL, "--rows", 1, "--json").json["rows"] == 1
    Trie(kept).verify()
    cli.fails(2, *job, "-o", first, "--trie", first, "--overwrite", saying=["is read by --trie"])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"id": 1}])
    cli.fails(1, *job, "-o", second, "--trie", bad, "--overwrite", saying=["bad.jsonl:1", "text"])
    cli.fails(1, *job, "-o", second, "--trie", tmp_path / "no.jsonl", "--overwrite", saying=["no.jsonl", "cannot be read"])
