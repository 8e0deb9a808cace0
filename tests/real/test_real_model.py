"""A model that people use gives the same tokens with drafts and without, next to any other rows, in every dtype.

`pytest -m 'real and not deep'` runs a part of it in under a minute, `pytest -m 'real and deep'` all of it in about 20 minutes.
"""

import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from lookahead.api import GenerationParams, GenerationResult, LookaheadEngine
from lookahead.decode.constraint import Constraint
from lookahead.draft.options import DraftOptions
from lookahead.forward.target import TargetModel
from lookahead.models.exact import batch_invariance_violation
from tests.conftest import selects_deep
from tests.job.test_openai import line
from tests.job.test_tools import ASKED, NAMED, QWEN, SCHEMAS
from tests.models.test_probe import check_mutants
from tests.support.cli import write_jsonl
from tests.support.depth import deep

pytestmark = pytest.mark.real
STRATEGIES = {
    "off": DraftOptions("off"),
    "auto": DraftOptions(),
    "hierarchical 16": DraftOptions("hierarchical", 16, adaptive=False),
    "single 8": DraftOptions("single", 8, adaptive=False),
}
KINDS = [  # dtype, quantized weights, keys and values
    ("bfloat16", "none", "none"),
    *deep(
        [("float32", "none", "none"), ("float16", "none", "none"), ("float32", "int8", "none"), ("bfloat16", "int8", "none")]
    ),
    *deep([("bfloat16", "int4", "none"), ("float32", "none", "int8"), ("bfloat16", "int4", "int8")]),
]
SAMPLED = GenerationParams(max_new_tokens=48, temperature=0.8, top_p=0.95, seed=1)


def answers(
    target: TargetModel,
    prompts: list[list[int]],
    strategy: str = "off",
    batch_size: int = 8,
    params: GenerationParams | None = None,
    tokenizer: Any = None,
) -> list[GenerationResult]:
    engine = LookaheadEngine(target, tokenizer, batch_size=batch_size, drafts=STRATEGIES[strategy])
    results = engine.generate(prompts, params or GenerationParams(max_new_tokens=48))
    assert not any(result.error for result in results)
    return results


def ids(results: list[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize(("dtype", "quantize", "kv_dtype"), KINDS)
def test_drafts_and_batches_change_no_token(real_target, prompts, dtype, quantize, kv_dtype, request):
    target = real_target(dtype, quantize, kv_dtype)
    assert target.program is not None
    assert target.exact or dtype == "float32"
    whole = selects_deep(request.config)
    some = prompts[:12] if whole else [prompts[place] for place in (0, 2, 5, 6)]
    runs = (*itertools.product(("auto", "hierarchical 16"), (1, 8)), ("single 8", 4), ("off", 1))
    for params in (GenerationParams(max_new_tokens=48 if whole else 24), SAMPLED)[: 2 if whole else 1]:
        some = some[3:] if params is SAMPLED else some
        plain = ids(answers(target, some, "off", 8, params))
        for strategy, batch_size in runs if whole else runs[:-1]:
            assert ids(answers(target, some, strategy, batch_size, params)) == plain, (strategy, batch_size)


@pytest.mark.deep
def test_folder_that_a_gguf_file_is_unpacked_to_is_the_same_model(folder, real_target, prompts, tokenizer):
    engine, params = LookaheadEngine(folder, dtype="bfloat16", batch_size=4), GenerationParams(max_new_tokens=16)
    assert engine.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert engine.tokenizer.chat_template == tokenizer.chat_template
    assert ids(engine.generate(prompts[:2], params)) == ids(answers(real_target("bfloat16"), prompts[:2], "auto", 1, params))


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_exact(real_target, dtype):
    assert batch_invariance_violation(real_target(dtype)) == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.deep
def test_mutants_are_refused(stock, dtype, monkeypatch):
    hidden = set() if dtype == "float32" else {"bias of the last output"}  # 0.001, less than rounding moves
    check_mutants(copy.deepcopy(stock).to(getattr(torch, dtype)), monkeypatch, hidden)


@pytest.mark.parametrize("dtype", ["bfloat16", *deep(["float32", "float16"])])
def test_logprobs_are_the_same_bits_in_any_batch_and_with_drafts(real_target, prompts, dtype):
    target, params = real_target(dtype), GenerationParams(max_new_tokens=12, logprobs=4)
    found = [
        [result.logprobs for result in answers(target, prompts[5:13], strategy, batch_size, params)]
        for strategy, batch_size in (("off", 1), ("off", 8), ("auto", 1), ("hierarchical 16", 4), ("single 8", 8))
    ]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("count", [3, *deep([48])])
def test_float32_gives_the_tokens_of_generate(real_target, stock, prompts, count):
    some, expected = prompts[-count:], []
    for prompt in some:
        text = torch.tensor([prompt])
        output = stock.generate(text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=24)
        expected.append(output[0, len(prompt) :].tolist())
    results = answers(real_target("float32"), some, "auto", 4, GenerationParams(max_new_tokens=24))
    assert ids(results) == expected


@pytest.mark.deep
def test_answers_to_a_schema_are_of_it(real_target, prompts, tokenizer):
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    params = GenerationParams(max_new_tokens=40, constraint=Constraint.of("json_schema", schema))
    plain = answers(real_target("bfloat16"), prompts[5:11], "off", 8, params, tokenizer)
    for strategy, batch_size in (("auto", 1), ("hierarchical 16", 4)):
        assert ids(answers(real_target("bfloat16"), prompts[5:11], strategy, batch_size, params, tokenizer)) == ids(plain)
    for result in plain:
        if result.finish_reason == "stop":
            assert set(json.loads(result.text or "")) == {"answer"}


@pytest.mark.deep
def test_stop_texts_end_the_same_answers(real_target, prompts, tokenizer):
    params = GenerationParams(max_new_tokens=60, stop=("\n", " the "))
    plain = answers(real_target("bfloat16"), prompts[5:12], "off", 8, params, tokenizer)
    assert any(result.finish_reason == "stop" for result in plain)
    for strategy, batch_size in (("auto", 1), ("hierarchical 16", 4), ("single 8", 8)):
        assert ids(answers(real_target("bfloat16"), prompts[5:12], strategy, batch_size, params, tokenizer)) == ids(plain)


@pytest.mark.deep
def test_job_of_chats_in_the_template_of_the_file(gguf, cli, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"What is {n} plus {n}?"}]} for n in range(4)]
    source, outputs = write_jsonl(tmp_path / "prompts.jsonl", rows), []
    for number, more in enumerate((("--strategy", "off"), ("--batch-size", 1))):
        out = tmp_path / f"{number}.jsonl"
        job = "generate", "--model", gguf, "--dtype", "bfloat16", "--input", source, "-o", out, "--max-new-tokens", 24
        result = cli(*job, *more)
        assert result.code == 0, result.err
        assert "one native call, bfloat16, exact" in result.err
        outputs.append([json.loads(line)["text"] for line in out.read_text(encoding="utf-8").splitlines()])
    assert outputs[0] == outputs[1]


@pytest.mark.deep
def test_demo_is_faster_than_plain_decoding(cli):
    result = cli("demo", "--rows", 3)
    assert result.code == 0, result.err
    verdict = re.search(r"3/3 outputs identical, ([0-9.]+) times the speed of plain decoding", " ".join(result.out.split()))
    assert float(verdict[1]) >= 1.1


@pytest.mark.deep
def test_functions_are_called_as_asked_in_a_quarter_of_the_steps(folder, cli, tmp_path):
    """With the chat template of a model that has tools: this one's has none."""
    model, outputs, steps = tmp_path / "model", [], []
    model.mkdir()
    for file in Path(folder).iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").write_text(QWEN + "assistant: ")
    cities = ("Paris", "Rome", "Oslo", "Tokyo")
    rows = [{**ASKED, "messages": [{"role": "user", "content": f"How warm is it in {city}?"}]} for city in cities]
    source = write_jsonl(tmp_path / "in.jsonl", [line({**row, "tool_choice": NAMED}, n) for n, row in enumerate(rows)])
    for number, more in enumerate((("--strategy", "off"), ("--decoding-length", 32))):
        out = tmp_path / f"{number}.jsonl"
        assert cli("generate", "--model", model, "--input", source, "-o", out, "--batch-size", 1, *more, "--quiet").code == 0
        outputs.append([json.loads(text)["response"]["body"]["choices"] for text in out.read_text("utf-8").splitlines()])
        steps.append(json.loads(cli("report", out, "--json").out)["steps"])
    assert outputs[0] == outputs[1]
    assert steps[1] < steps[0] / 4
    called = [choices[0]["message"]["tool_calls"][0]["function"] for choices in outputs[0]]
    assert [city for city, call in zip(cities, called, strict=True) if city in call["arguments"]] == [*cities]
    for call in called:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
