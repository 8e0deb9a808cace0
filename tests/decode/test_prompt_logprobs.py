"""Log-probabilities of prompts are those of a plain forward over the prompt, however it is prefilled and whatever it shares."""

from __future__ import annotations

import json

import pytest
import torch

from lookahead import Constraint, GenerationParams, LookaheadEngine
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError, UsageError
from lookahead.models.load import load_model
from lookahead.models.probe import probed
from tests.decode.test_sampling import PROMPTS
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL
from tests.support.jobs import PROMPTS as QUESTIONS

NEAR = 1e-4
LONG = [*PROMPTS[0], *range(3, 83)]  # several chunks
DRAFTED = DraftOptions(decoding_length=8, adaptive=False)


def assert_exact(target, request, asked):
    text = torch.tensor([request.prompt_ids], device=target.device)
    with torch.inference_mode():
        exact = target.model(text).logits[0, :-1].double().log_softmax(-1)
    assert [found.token_id for found in request.prompt_token_logprobs] == request.prompt_ids[1:]
    for found, row in zip(request.prompt_token_logprobs, exact, strict=True):
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=NEAR)
        assert [logprob for _, logprob in found.top] == pytest.approx(row.topk(asked).values.tolist(), abs=NEAR)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gptj", "gpt_neo", "mamba"])  # and windows, trees, chains, none
@pytest.mark.parametrize("batch_size", [1, 8])
def test_they_are_those_of_a_plain_forward_and_change_no_answer(tiny_model, device, architecture, batch_size):
    target = probed(tiny_model(architecture, device), architecture)
    prompts = [LONG, *PROMPTS[:2], LONG[:1], [*LONG[:-1], 5], LONG]
    plain = DecodingEngine(target, Drafter([], DraftOptions("off")), 1)
    expected = [plain.generate(prompt, 6).token_ids for prompt in prompts]
    engine = DecodingEngine(target, Drafter([], DRAFTED), batch_size, prefill_chunk=50)
    for new_tokens in (6, 0):  # the second time with all beginnings held
        requests = [engine.request(prompt, new_tokens, prompt_logprobs=2) for prompt in prompts]
        assert len(list(engine.run(requests))) == len(prompts)
        for request, answer in zip(requests, expected, strict=True):
            assert (request.error, request.token_ids) == (None, answer[:new_tokens])
            assert request.finish_reason == "length" or new_tokens
            assert_exact(target, request, 2)


@pytest.mark.parametrize(
    ("quantize", "mode"), [("none", "modules"), ("none", "program"), ("int8", "program"), ("int4", "modules")]
)
def test_every_way_to_compute_forwards_gives_them(quantize, mode):
    target = load_model(str(MODEL), dtype="float32", device="cpu", quantize=quantize, engine_mode=mode)
    engine = DecodingEngine(target, Drafter([], DRAFTED), 3)
    requests = [engine.request(LONG, room, prompt_logprobs=asked) for room, asked in ((4, 1), (0, 1), (4, None))]
    list(engine.run(requests))
    alone = DecodingEngine(target, Drafter([], DraftOptions("off")), 1, prefill_chunk=17)
    list(alone.run([lone := alone.request(LONG, 0, prompt_logprobs=1)]))
    for request in requests[:2]:
        if quantize == "none":
            assert_exact(target, request, 1)
        for found, other in zip(request.prompt_token_logprobs, lone.prompt_token_logprobs, strict=True):
            assert found.logprob == pytest.approx(other.logprob, abs=NEAR)
    assert requests[0].token_ids == requests[2].token_ids
    assert not requests[2].prompt_token_logprobs


def test_scores_of_no_more_than_a_few_prompt_tokens_are_held_at_once(tiny_model, monkeypatch):
    sizes = []

    def counted(logits, rows, token_ids, most):
        sizes.append(len(logits))
        return logprobs_of(logits, rows, token_ids, most)

    from lookahead.decode.logprobs import AT_ONCE, logprobs_of

    monkeypatch.setattr("lookahead.decode.row.logprobs_of", counted)
    engine = DecodingEngine(probed(tiny_model("llama"), "llama"), Drafter([], DraftOptions("off")), 1)
    list(engine.run([engine.request(LONG * 2, 0, prompt_logprobs=0)]))
    assert max(sizes) <= AT_ONCE < len(LONG)


def test_row_that_scores_its_prompt_again_after_memory_ran_out_has_each_token_once(tiny_model, monkeypatch):
    target = probed(tiny_model("llama"), "llama")
    engine = DecodingEngine(target, Drafter([], DraftOptions("off")), 2, prefill_chunk=32)
    step, steps = engine._step, iter(range(1000))

    def failing(*arguments):
        if next(steps) == 2:
            raise MemoryError("no room")
        step(*arguments)

    monkeypatch.setattr(engine, "_step", failing)
    requests = [engine.request(LONG, 3, prompt_logprobs=1) for _ in range(2)]
    assert len(list(engine.run(requests))) == 2
    for request in requests:
        assert_exact(target, request, 1)


def test_continuation_is_scored_by_its_part_of_the_prompt():
    engine = LookaheadEngine(MODEL, batch_size=2)
    context, params = QUESTIONS[0], GenerationParams(max_new_tokens=8)
    ids = engine.tokenizer(context)["input_ids"]
    (answer,) = engine.generate([ids], GenerationParams(max_new_tokens=8, logprobs=1))
    scoring = GenerationParams(max_new_tokens=0, prompt_logprobs=1)
    own, other = engine.generate([[*ids, *answer.token_ids], [*ids, *answer.token_ids[::-1]]], scoring)
    assert own.prompt_logprobs[0] is None
    assert (own.token_ids, own.text, own.finish_reason) == ([], "", "length")
    of_answer = own.prompt_logprobs[len(ids) :]
    assert sum(e.logprob for e in of_answer) == pytest.approx(sum(e.logprob for e in answer.logprobs), abs=NEAR)
    assert all(e.top[0][0] == e.token_id for e in of_answer)
    assert not all(e.top[0][0] == e.token_id for e in other.prompt_logprobs[len(ids) :])
    assert engine.generate([ids], params)[0].token_ids == answer.token_ids


def test_what_cannot_be_is_refused(tiny_model):
    for wrong in ({"max_new_tokens": 0}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1000}, {"prompt_logprobs": True}):
        with pytest.raises(UsageError):
            GenerationParams(**wrong)
    engine = DecodingEngine(probed(tiny_model("llama"), "llama"), Drafter([], DraftOptions("off")), 1)
    with pytest.raises(LookaheadError, match="no room"):
        engine.request([5] * (engine.target.longest_text + 1), 0, prompt_logprobs=1)


@pytest.fixture
def job(capsys, tmp_path):
    def run(rows, *options, code=0, out="out.jsonl"):
        source = write_jsonl(tmp_path / "in.jsonl", rows)
        cli = Cli(capsys)
        done = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / out, "--overwrite", *options)
        assert cli(*done).code == code
        if out.endswith("parquet"):
            import pyarrow.parquet

            return pyarrow.parquet.read_table(tmp_path / out).to_pylist()
        return [json.loads(line) for line in (tmp_path / out).read_text("utf-8").splitlines()]

    return run


def test_rows_hold_them_with_null_for_the_first_token(job):
    rows = [{"prompt": QUESTIONS[0], "params": {"prompt_logprobs": 1, "max_new_tokens": new, "n": 2}} for new in (0, 3)]
    rows += [{"prompt": "a", "params": params} for params in ({"max_tokens": 0}, {"max_tokens": 0, "prompt_logprobs": False})]
    scored, answered, *refused = job(rows, code=3)
    assert scored["prompt_logprobs"] == answered["prompt_logprobs"]
    assert (scored["completion_tokens"], answered["completion_tokens"]) == (0, 6)
    first, *others = scored["prompt_logprobs"]
    assert first is None
    assert len(others) == scored["prompt_tokens"] - 1
    assert all({*entry} == {"id", "token", "logprob", "top"} and len(entry["top"]) == 1 for entry in others)
    assert all("0 goes with prompt_logprobs" in row["error"]["message"] for row in refused)


def test_openai_completion_with_echo_has_those_of_the_prompt_before_those_of_the_answer(job):
    body = {"prompt": [QUESTIONS[0], QUESTIONS[1]], "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}
    rows = [{"custom_id": "a", "body": body}, {"custom_id": "b", "body": {**body, "max_tokens": 0, "n": 1}}]
    answered, scored = (row["response"]["body"]["choices"] for row in job(rows))
    assert (len(answered), len(scored)) == (4, 2)
    for index, choice in enumerate(answered):
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == f"<s>{choice['text']}"
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert all(value < 0.1 for value in logprobs["token_logprobs"][1:])
        placed = zip(logprobs["text_offset"][1:], logprobs["tokens"][1:], strict=True)
        assert all(choice["text"][place:].startswith(token) for place, token in placed)
        alone = scored[index // 2]
        assert alone["text"] == QUESTIONS[index // 2]
        assert logprobs["token_logprobs"][:-3] == alone["logprobs"]["token_logprobs"]
    assert len(job(rows, out="out.parquet")) == 2


def test_constrained_rows_that_score_their_prompt_are_answered_as_others():
    engine = LookaheadEngine(MODEL)
    constraint = Constraint.of("choice", ["yes", "no"])
    wishes = [GenerationParams(constraint=constraint, prompt_logprobs=most) for most in (None, 0)]
    plain, scored = engine.generate([QUESTIONS[0]] * 2, wishes)
    assert plain.token_ids == scored.token_ids
    assert scored.complete
