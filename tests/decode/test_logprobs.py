"""Log-probabilities of answers and prompts are those of a plain forward, whatever was drafted and however it is prefilled."""

import dataclasses
import itertools
import math

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from lookahead import Constraint, GenerationParams, LookaheadEngine
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.logprobs import logprobs_of
from lookahead.decode.sampling import Sampling, seed_of
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError, UsageError
from lookahead.job.openai import LogprobsOf
from lookahead.models.load import load_model
from lookahead.models.probe import probed
from lookahead.tokenizer import load_tokenizer
from tests.decode.test_sampling import PROMPTS
from tests.support.cli import write_jsonl
from tests.support.depth import deep
from tests.support.drafts import VOCAB_SIZE
from tests.support.jobs import MODEL, rows_of
from tests.support.jobs import PROMPTS as QUESTIONS

WISHES = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.5, top_k=20),
    "penalties": Sampling(repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={9: 4.0}),
    "sampled-penalties": Sampling(temperature=0.8, presence_penalty=1.0, no_repeat_ngram_size=2),
}
NEAR = 1e-4


@pytest.fixture(scope="module")
def target(tiny_model, device):
    return probed(tiny_model("llama", device), "llama")


def run(target, drafts, batch_size, sampling, asked=3, new_tokens=16):
    engine = DecodingEngine(target, Drafter([], drafts), batch_size, prefill_chunk=7)
    for _ in range(2):  # the second time with the first answers as drafts
        requests = [engine.request(p, new_tokens, sampling, seed_of(0, n), asked) for n, p in enumerate(PROMPTS)]
        assert len(list(engine.run(requests))) == len(requests)
    assert (sum(request.accepted_tokens for request in requests) > 10) == (drafts.strategy != "off")
    return requests


def assert_exact(target, request, asked, of_prompt=False):
    """Each is the log-softmax of a plain forward."""
    ids = request.prompt_ids if of_prompt else [*request.prompt_ids, *request.token_ids]
    logprobs, begin = request.token_logprobs, request.prompt_tokens
    if of_prompt:
        logprobs, begin = request.prompt_token_logprobs, request.prompt_logprobs_start
    with torch.inference_mode():
        exact = target.model(torch.tensor([ids], device=target.device)).logits[0, begin - 1 : -1].double().log_softmax(-1)
    assert [found.token_id for found in logprobs] == ids[begin:]
    for found, row in zip(logprobs, exact, strict=True):
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=NEAR)
        assert [logprob for _, logprob in found.top] == pytest.approx(row.topk(asked).values.tolist(), abs=NEAR)
        assert [logprob for _, logprob in found.top] == pytest.approx([float(row[token]) for token, _ in found.top], abs=NEAR)
        assert len({token for token, _ in found.top}) == asked


@pytest.mark.parametrize("batch_size", [3, *deep([1])])
@pytest.mark.parametrize("name", WISHES)
def test_they_are_those_of_a_plain_forward_with_drafts_and_without(target, name, batch_size):
    plain = run(target, DraftOptions("off"), batch_size, WISHES[name])
    drafted = run(target, DraftOptions(decoding_length=16, adaptive=False), batch_size, WISHES[name])
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert_exact(target, one, 3)
        assert_exact(target, other, 3)


def test_rows_of_a_batch_get_as_many_as_each_asked_for(target):
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=16, adaptive=False)), 5)
    asked = [None, 0, 1, 5, 1000]
    requests = [engine.request(prompt, 8, logprobs=most) for prompt, most in zip(PROMPTS, asked, strict=True)]
    assert len(list(engine.run(requests))) == 5
    assert requests[0].token_logprobs == []
    for request, most in zip(requests[1:], (0, 1, 5, VOCAB_SIZE), strict=True):
        assert_exact(target, request, most)


def test_results_from_python_hold_them(target):
    engine = LookaheadEngine(target, drafts=DraftOptions(decoding_length=16, adaptive=False))
    with_them, without = engine.generate(PROMPTS[:2], [GenerationParams(max_new_tokens=6, logprobs=2), GenerationParams()])
    assert [found.token_id for found in with_them.logprobs] == with_them.token_ids
    assert all(found.top[0][1] >= found.top[1][1] for found in with_them.logprobs)
    assert [found.top[0] for found in with_them.logprobs] == [(found.token_id, found.logprob) for found in with_them.logprobs]
    assert without.logprobs is None
    for wrong in (-1, 1.5, True):
        with pytest.raises(UsageError, match="logprobs is"):
            GenerationParams(logprobs=wrong)


# ---- in output rows
@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODEL))


@pytest.fixture
def generate(cli, tmp_path):
    """generate(rows, *options) -> output rows, of a job that ends with `code`."""

    def run(rows, *options, out="out.jsonl", code=0):
        source = write_jsonl(tmp_path / "in.jsonl", rows)
        job = ("--model", MODEL, "--input", source, "-o", tmp_path / out, "--overwrite", "--max-new-tokens", 8)
        result = cli("generate", *job, *options)
        assert result.code == code, result.err
        return rows_of(tmp_path / out) if out.endswith("jsonl") else pyarrow.parquet.read_table(tmp_path / out).to_pylist()

    return run


def assert_entries(entries, token_ids, top, tokenizer):
    assert [entry["id"] for entry in entries] == token_ids
    assert "".join(entry["token"] for entry in entries) == tokenizer.decode(token_ids)
    for entry in entries:
        assert len(entry["top"]) == top
        assert sorted(entry["top"], key=lambda other: -other["logprob"]) == entry["top"]
        assert all(other["logprob"] <= 0 and other["token"] for other in entry["top"])
        assert all(entry["logprob"] == other["logprob"] for other in entry["top"] if other["id"] == entry["id"])
        assert all(entry["logprob"] <= other["logprob"] for other in entry["top"][:1])


def test_rows_hold_them_for_each_sample_and_a_rows_own_wish_wins(generate, tokenizer):
    rows = [{"prompt": QUESTIONS[0], "params": params} for params in ({}, {"n": 2}, {"logprobs": 0}, {"logprobs": False})]
    drafted = generate(rows, "--logprobs", 2, "--token-ids", "--temperature", 0.9)
    text = torch.tensor([[*tokenizer(QUESTIONS[0])["input_ids"], *drafted[0]["token_ids"]]])
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        exact = model(text).logits[0, -9:-1].log_softmax(-1)
    for entry, row in zip(drafted[0]["logprobs"], exact, strict=True):
        assert entry["logprob"] == pytest.approx(float(row[entry["id"]]), abs=NEAR)
        assert [other["logprob"] for other in entry["top"]] == pytest.approx(row.topk(2).values.tolist(), abs=NEAR)
    assert_entries(drafted[0]["logprobs"], drafted[0]["token_ids"], 2, tokenizer)
    assert len(drafted[1]["samples"]) == 2
    for sample in drafted[1]["samples"]:
        assert_entries(sample["logprobs"], sample["token_ids"], 2, tokenizer)
    assert drafted[1]["logprobs"] == drafted[1]["samples"][0]["logprobs"]
    assert_entries(drafted[2]["logprobs"], drafted[2]["token_ids"], 0, tokenizer)
    assert "logprobs" not in drafted[3]
    plain = generate(rows, "--logprobs", 2, "--temperature", 0.9, "--strategy", "off", "--batch-size", 1)
    for one, other in itertools.zip_longest(drafted[0]["logprobs"], plain[0]["logprobs"]):
        assert one["id"] == other["id"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=NEAR)
    assert not any("logprobs" in row for row in generate(rows[:2]))


CHAT = {"messages": [{"role": "user", "content": "How many legs do 3 cats have?"}], "max_tokens": 6}


def openai(body):
    return {"custom_id": "a", "body": body}


def test_openai_chat_is_answered_in_openais_shape(generate, tokenizer):
    (row,) = generate([openai({**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1.0})])
    choices = row["response"]["body"]["choices"]
    for choice in choices:
        content = choice["logprobs"]["content"]
        text = "".join(entry["token"] for entry in content if not entry["token"].startswith("<"))
        assert text == choice["message"]["content"]
        for entry in content:
            assert {*entry} == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(entry["top_logprobs"]) == 2
            assert all({*other} == {"token", "logprob", "bytes"} for other in entry["top_logprobs"])
            assert bytes(entry["bytes"]).decode() == entry["token"]
    assert choices[0]["logprobs"] != choices[1]["logprobs"]
    (row,) = generate([openai({**CHAT, "logprobs": True})])
    assert all(entry["top_logprobs"] == [] for entry in row["response"]["body"]["choices"][0]["logprobs"]["content"])
    for quiet in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}):
        (row,) = generate([openai({**CHAT, **quiet})])
        assert row["response"]["body"]["choices"][0]["logprobs"] is None


def test_openai_completion_is_answered_in_its_older_shape(generate):
    (row,) = generate([openai({"prompt": QUESTIONS[0], "max_tokens": 6, "logprobs": 3})])
    (choice,) = row["response"]["body"]["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for place, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][place:].startswith(token)
    for token, logprob, top in zip(*(logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 3


def test_parquet_holds_what_the_lines_hold(generate):
    rows = [{"prompt": QUESTIONS[0], "params": {"n": 2, "logprobs": 1}}, openai({**CHAT, "logprobs": True, "top_logprobs": 1})]
    rows.append({"custom_id": "b", "body": {"prompt": QUESTIONS[0], "logprobs": 2}})
    lines, table = generate(rows), generate(rows, out="out.parquet")
    assert table[0]["logprobs"] == lines[0]["logprobs"]
    assert [sample["logprobs"] for sample in table[0]["samples"]] == [sample["logprobs"] for sample in lines[0]["samples"]]
    chat, completion = ([row["response"]["body"]["choices"][0]["logprobs"] for row in of[1:]] for of in (lines, table))
    assert chat[0]["content"] == completion[0]["content"]
    assert [dict(top) for top in completion[1].pop("top_logprobs")] == chat[1].pop("top_logprobs")
    assert {name: completion[1][name] for name in chat[1]} == chat[1]


def test_resuming_with_other_log_probabilities_is_refused(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": QUESTIONS[0]}])
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl", "--max-new-tokens", 4)
    assert cli(*job, "--logprobs", 1).code == 0
    assert cli(*job, "--logprobs", 1, "--resume").code == 0
    cli.fails(2, *job, "--logprobs", 2, "--resume", saying=["--logprobs 1 then, --logprobs 2 now"])
    cli.fails(2, *job, "--resume", saying=["--logprobs 1 then, no --logprobs now"])


def test_rows_without_a_tokenizer_hold_ids_and_what_cannot_be_is_a_number_of_json(target):
    engine = DecodingEngine(target, Drafter([], DraftOptions("off")))
    request = engine.request(PROMPTS[0], 3, logprobs=1)
    list(engine.run([request]))
    assert all({*entry} == {"id", "logprob", "top"} for entry in LogprobsOf(None).in_row(request))
    assert LogprobsOf(None).of_completion(request)["tokens"] == [f"token_id:{token}" for token in request.token_ids]
    request.token_logprobs = [dataclasses.replace(request.token_logprobs[0], logprob=-math.inf)]
    assert LogprobsOf(None).in_row(request)[0]["logprob"] == -9999.0


def test_bits_of_a_row_do_not_depend_on_the_others():
    logits, threads = torch.randn(40, 49_152, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    token_ids = logits.argmax(1).tolist()
    torch.set_num_threads(2)  # with which torch sums one row in another order than several
    try:
        alone = [logprobs_of(logits, [row], [token], 3)[0] for row, token in enumerate(token_ids)]
        assert logprobs_of(logits, range(40), token_ids, 3) == alone
    finally:
        torch.set_num_threads(threads)


# ---- prompts


LONG = [*PROMPTS[0], *range(3, 83)]  # several chunks
DRAFTED = DraftOptions(decoding_length=8, adaptive=False)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gptj", "gpt_neo", "mamba"])  # and windows, trees, chains, none
@pytest.mark.parametrize("batch_size", [1, 8])
def test_those_of_prompts_are_those_of_a_plain_forward_and_change_no_answer(tiny_model, device, architecture, batch_size):
    target = probed(tiny_model(architecture, device), architecture)
    prompts = [LONG, *PROMPTS[:2], LONG[:1], [*LONG[:-1], 5], LONG]
    plain = DecodingEngine(target, Drafter([], DraftOptions("off")), 1)
    expected = [plain.generate(prompt, 6).token_ids for prompt in prompts]
    engine = DecodingEngine(target, Drafter([], DRAFTED), batch_size, prefill_chunk=50)
    for new_tokens in (6, 0):  # the second time with all beginnings held
        requests = [engine.request(prompt, new_tokens, logprobs=2, prompt_logprobs=2) for prompt in prompts]
        assert len(list(engine.run(requests))) == len(prompts)
        for request, answer in zip(requests, expected, strict=True):
            assert (request.error, request.token_ids) == (None, answer[:new_tokens])
            assert request.finish_reason == "length" or new_tokens
            assert_exact(target, request, 2, of_prompt=True)
            assert_exact(target, request, 2)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_neo", "mamba"])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_scores_from_a_start_on_are_exact_and_what_is_before_is_computed_once(tiny_model, device, architecture, batch_size):
    target = probed(tiny_model(architecture, device), architecture)
    choices = [[*LONG[:60], 5], [*LONG[:60], 6, 7, 8], [*LONG[:60], 9], [*LONG[:60], 5]]
    engine = DecodingEngine(target, Drafter([], DRAFTED), batch_size, prefill_chunk=20)
    starts = [60, 60, 61, 99]  # of the last two there is nothing to score
    requests = [
        engine.request(prompt, room, prompt_logprobs=2, prompt_logprobs_start=start)
        for room in (0, 3)
        for prompt, start in zip(choices, starts, strict=True)
    ]
    assert len(list(engine.run(requests))) == len(requests)
    for request, scored in zip(requests, (1, 3, 0, 0) * 2, strict=True):
        assert (request.error, len(request.prompt_token_logprobs), len(request.token_ids)) == (None, scored, request.room)
        if scored:
            assert_exact(target, request, 2, of_prompt=True)
    if target.mode == "packed":
        assert engine.clock.taken_over >= 5 * 59
        assert engine.clock.prefilled < 60 + 6 * 5


@pytest.mark.parametrize(
    ("quantize", "mode"), [("none", "modules"), ("none", "program"), ("int8", "program"), ("int4", "modules")]
)
def test_every_way_to_compute_forwards_gives_those_of_prompts(quantize, mode):
    target = load_model(str(MODEL), dtype="float32", device="cpu", quantize=quantize, engine_mode=mode)
    engine = DecodingEngine(target, Drafter([], DRAFTED), 3)
    requests = [engine.request(LONG, room, prompt_logprobs=asked) for room, asked in ((4, 1), (0, 1), (4, None))]
    list(engine.run(requests))
    alone = DecodingEngine(target, Drafter([], DraftOptions("off")), 1, prefill_chunk=17)
    list(alone.run([lone := alone.request(LONG, 0, prompt_logprobs=1)]))
    for request in requests[:2]:
        if quantize == "none":
            assert_exact(target, request, 1, of_prompt=True)
        for found, other in zip(request.prompt_token_logprobs, lone.prompt_token_logprobs, strict=True):
            assert found.logprob == pytest.approx(other.logprob, abs=NEAR)
    assert requests[0].token_ids == requests[2].token_ids
    assert not requests[2].prompt_token_logprobs


def test_continuation_is_scored_by_its_part_of_the_prompt():
    engine = LookaheadEngine(MODEL, batch_size=2)
    context, params = QUESTIONS[0], GenerationParams(max_new_tokens=8)
    ids = engine.tokenizer(context)["input_ids"]
    (answer,) = engine.generate([ids], GenerationParams(max_new_tokens=8, logprobs=1))
    scoring = GenerationParams(max_new_tokens=0, prompt_logprobs=1)
    texts = [[*ids, *answer.token_ids], [*ids, *answer.token_ids[::-1]]]
    own, other = engine.generate(texts, scoring)
    assert own.prompt_logprobs[0] is None
    assert (own.token_ids, own.text, own.finish_reason) == ([], "", "length")
    of_answer = own.prompt_logprobs[len(ids) :]
    assert sum(e.logprob for e in of_answer) == pytest.approx(sum(e.logprob for e in answer.logprobs), abs=NEAR)
    assert all(e.top[0][0] == e.token_id for e in of_answer)
    assert not all(e.top[0][0] == e.token_id for e in other.prompt_logprobs[len(ids) :])
    from_there = engine.generate(texts, GenerationParams(max_new_tokens=0, prompt_logprobs=1, prompt_logprobs_start=len(ids)))
    assert [each.prompt_logprobs[len(ids) :] for each in from_there] == [of_answer, other.prompt_logprobs[len(ids) :]]
    assert from_there[0].prompt_logprobs[: len(ids)] == [None] * len(ids)
    assert engine.generate([ids], params)[0].token_ids == answer.token_ids


def test_those_of_prompts_that_cannot_be_had_are_refused(tiny_model):
    counts = ({"prompt_logprobs": wrong} for wrong in (-1, 1000, True))
    for wrong in ({"max_new_tokens": 0}, *counts, {"prompt_logprobs_start": 0.5}):
        with pytest.raises(UsageError):
            GenerationParams(**wrong)
    engine = DecodingEngine(probed(tiny_model("llama"), "llama"), Drafter([], DraftOptions("off")), 1)
    with pytest.raises(LookaheadError, match="no room"):
        engine.request([5] * (engine.target.longest_text + 2), 0, prompt_logprobs=1)


def test_last_token_of_a_prompt_that_is_only_scored_needs_no_position(tiny_model):
    target = probed(tiny_model("gpt2"), "gpt2")  # whose positions are a table
    engine = DecodingEngine(target, Drafter([], DraftOptions("off")), 1)
    request = engine.request([7, *[5] * target.longest_text], 0, prompt_logprobs=1)
    list(engine.run([request]))
    assert (request.error, len(request.prompt_token_logprobs)) == (None, target.longest_text)


def test_rows_hold_those_of_prompts_with_null_for_the_first_token(generate):
    rows = [{"prompt": QUESTIONS[0], "params": {"prompt_logprobs": 1, "max_new_tokens": new, "n": 2}} for new in (0, 3)]
    rows += [{"prompt": "a", "params": params} for params in ({"max_tokens": 0}, {"max_tokens": 0, "prompt_logprobs": False})]
    scored, answered, *refused = generate(rows, code=3)
    assert scored["prompt_logprobs"] == answered["prompt_logprobs"]
    assert (scored["completion_tokens"], answered["completion_tokens"]) == (0, 6)
    first, *others = scored["prompt_logprobs"]
    assert first is None
    assert len(others) == scored["prompt_tokens"] - 1
    assert all({*entry} == {"id", "token", "logprob", "top"} and len(entry["top"]) == 1 for entry in others)
    assert all("0 goes with prompt_logprobs" in row["error"]["message"] for row in refused)


def test_openai_completion_with_echo_has_those_of_the_prompt_before_those_of_the_answer(generate):
    body = {"prompt": [QUESTIONS[0], QUESTIONS[1]], "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}
    rows = [{"custom_id": "a", "body": body}, {"custom_id": "b", "body": {**body, "max_tokens": 0, "n": 1}}]
    answered, scored = (row["response"]["body"]["choices"] for row in generate(rows))
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
    assert len(generate(rows, out="out.parquet")) == 2


def test_constrained_rows_that_score_their_prompt_are_answered_as_others():
    engine = LookaheadEngine(MODEL)
    constraint = Constraint.of("choice", ["yes", "no"])
    wishes = [GenerationParams(constraint=constraint, prompt_logprobs=most) for most in (None, 0)]
    plain, scored = engine.generate([QUESTIONS[0]] * 2, wishes)
    assert plain.token_ids == scored.token_ids
    assert scored.complete
