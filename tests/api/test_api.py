"""The engine from Python: what jobs answer, in a list or as it comes; one thing at a time; errors of one family."""

import contextlib
import dataclasses
import gc
import json
import logging
import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from transformers import LogitsProcessor

from lookahead import Drafter, DraftOptions, GenerationParams, LookaheadEngine, LookaheadError, TokenDocument, Trie, build_trie
from lookahead.decode.sampling import Sampling
from lookahead.errors import TokenizerMismatchError, UsageError
from lookahead.models.load import load_model
from lookahead.tokenizer import identity, load_tokenizer
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, PROMPTS

FIXED = DraftOptions(decoding_length=16, adaptive=False)  # the same drafts in every run, whatever forwards cost
SHORT = GenerationParams(max_new_tokens=24)
WILD = GenerationParams(max_new_tokens=40, temperature=3.0)  # parts of characters, too


@pytest.fixture(scope="module")
def target():
    return load_model(str(MODEL), device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODEL))


@pytest.fixture
def make(target, tokenizer):
    return lambda: LookaheadEngine(target, tokenizer, batch_size=3, drafts=FIXED)


@pytest.fixture
def engine(make):
    return make()


def engines(target, tokenizer):
    """At several batch sizes, with drafts and without."""
    for batch_size, drafts in ((1, FIXED), (3, FIXED), (8, DraftOptions("off")), (2, DraftOptions(adaptive=True))):
        yield LookaheadEngine(target, tokenizer, batch_size=batch_size, drafts=drafts, prefill_chunk=50)


def said_by(results):
    return [(result.text, result.token_ids, result.finish_reason) for result in results]


def streamed(engine, prompt, params):
    """(the pieces of a stream, the result that it returns)."""
    stream, pieces = engine.stream(prompt, params), []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


# ---- generate
def test_answers_are_those_of_the_models_own_generate_in_the_order_of_the_prompts(target, tokenizer):
    expected = []
    for prompt in PROMPTS[:4]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        said = target.model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
        expected.append((tokenizer.decode(said, skip_special_tokens=True), said.tolist()))
    for engine in engines(target, tokenizer):
        results = engine.generate(PROMPTS[:4], SHORT)
        assert [(result.text, result.token_ids) for result in results] == expected
        assert [result.prompt_tokens for result in results] == [len(tokenizer(p)["input_ids"]) for p in PROMPTS[:4]]


@pytest.mark.deep
def test_samples_are_those_of_a_job_on_a_file_of_the_same_prompts(target, tokenizer, cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS[:3]])
    job = ("--max-new-tokens", 40, "--temperature", 3.0, "--seed", 5, "--token-ids")
    rows = [json.loads(line) for line in cli("generate", "--model", MODEL, "--input", source, *job).out.splitlines()]
    expected = [(row["text"], row["token_ids"], row["finish_reason"]) for row in rows]
    params = dataclasses.replace(WILD, seed=5)
    for engine in engines(target, tokenizer):
        assert said_by(engine.generate(PROMPTS[:3], params)) == expected
    assert said_by(engine.generate(PROMPTS[:3], WILD)) != expected


def test_result_counts_what_a_generation_counts(engine):
    (result,) = engine.generate([PROMPTS[0]], GenerationParams(max_new_tokens=60))
    assert result.finish_reason in ("stop", "length")
    assert 0 < result.accepted_tokens == sum(result.accepted_by_source.values()) < result.draft_tokens
    assert result.edl == (len(result.token_ids) - 1) / result.steps > 1
    assert result.error is None


def test_prompts_may_be_text_messages_ids_and_arrays_one_or_several(engine, tokenizer):
    question = PROMPTS[0].removeprefix("Question: ").removesuffix("\nAnswer:")
    ids = tokenizer(PROMPTS[0])["input_ids"]
    chat = [{"role": "user", "content": question}]
    forms = [PROMPTS[0], chat, ids, tuple(ids), np.array(ids), torch.tensor(ids), [*np.array(ids)]]
    expected = said_by(engine.generate(PROMPTS[0], SHORT))
    assert len(expected) == 1
    for form in forms:
        assert said_by(engine.generate(form, SHORT)) == expected
    assert said_by(engine.generate(forms, SHORT)) == expected * len(forms)
    assert said_by(engine.generate(torch.tensor([ids, ids]), SHORT)) == expected * 2
    assert engine.generate([]) == []


def test_chat_template_writes_one_time_in_all_prompts_of_a_call(engine, monkeypatch):
    template = "{{ strftime_now('%f') }} people each have {{ strftime_now('%f') }} apples. {{ messages[0].content }} Answer:"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    assert len(set(map(str, said_by(engine.generate([[{"role": "user", "content": "How many?"}]] * 4, SHORT))))) == 1


def test_each_prompt_may_have_params_of_its_own(engine):
    several = [GenerationParams(max_new_tokens=limit, stop=stop) for limit, stop in ((3, ()), (60, (".",)), (5, ()))]
    results = engine.generate(PROMPTS[:3], several)
    assert [len(results[place].token_ids) for place in (0, 2)] == [3, 5]
    assert results[1].finish_reason == "stop"
    assert results[1].text.endswith(".")
    for wrong in (several[:2], [SHORT], [SHORT] * 4):
        with pytest.raises(UsageError, match=f"{len(wrong)} params for 3 prompts"):
            engine.generate(PROMPTS[:3], wrong)
    for wrong in (Sampling(), {"temperature": 1}, [SHORT, SHORT, 3]):
        with pytest.raises(UsageError, match="give GenerationParams"):
            engine.generate(PROMPTS[:3], wrong)


def test_prompt_that_fails_has_an_error_and_takes_no_other_down(engine):
    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise ValueError("not me")

    bad = {
        "": '"prompt" is empty',
        (5, -1): "not a list of token ids",
        (5, 99999): "outside the model's vocabulary",
        (5,) * 2000: "no room for an answer",
        ("a", 5): "not a list of token ids",
        7: "a prompt is a int",
        None: "a prompt is a NoneType",
    }
    params = [SHORT] * (len(bad) + 2) + [GenerationParams(processors=(Failing(),))]
    results = engine.generate([PROMPTS[0], *bad, PROMPTS[1], PROMPTS[2]], params)
    assert said_by([results[0], results[-2]]) == said_by(engine.generate(PROMPTS[:2], SHORT))
    for number, (result, saying) in enumerate(zip(results[1:-2], bad.values(), strict=True), 2):
        assert (result.finish_reason, result.text, result.token_ids) == ("error", "", [])
        assert isinstance(result.error, LookaheadError)
        assert saying in str(result.error)
        assert "a prompt is" in saying or f"prompt {number}: " in str(result.error)
    assert str(results[-1].error) == "ValueError: not me"
    assert isinstance(results[-1].error.__cause__, ValueError)


@pytest.mark.parametrize(
    ("result_of", "problem"),
    [
        (
            lambda scores: torch.cat([scores, scores[:, :10]], 1),
            "returns scores of shape [1, 4106]: it must be a tensor of shape",
        ),
        (lambda scores: scores[:, :10], "returns scores of shape [1, 10]"),
        (lambda scores: scores.repeat(2, 1), "returns scores of shape [2, 4096]"),
        (lambda scores: scores[0], "returns scores of shape [4096]"),
        (lambda scores: None, "returns a NoneType: it must be a tensor of shape [1, 4096]"),
        (lambda scores: scores.numpy(), "returns a ndarray"),
        (lambda scores: scores.long(), "returns torch.int64 on cpu: it must be floating-point numbers"),
        (lambda scores: scores.to("meta"), "returns torch.float32 on meta"),
        (lambda scores: scores * float("nan"), "returns scores that are not numbers (NaN)"),
        (lambda scores: scores.mul_(float("nan")), "returns scores that are not numbers (NaN)"),
        (lambda scores: scores.double(), ""),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processor_whose_scores_are_wrong_fails_its_own_row_only(engine, result_of, problem, temperature):
    class Wrong(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return result_of(scores)

    params = [GenerationParams(max_new_tokens=5, processors=[Wrong()], temperature=temperature), SHORT, SHORT]
    wrong, *others = engine.generate(PROMPTS[:3], params)
    assert said_by(others) == said_by(engine.generate(PROMPTS[1:3], SHORT))
    assert f"the logits processor Wrong {problem}" in str(wrong.error) if problem else wrong.error is None


@pytest.mark.parametrize(
    "value", [b"abc", bytearray(b"abc"), memoryview(b"abc"), {5, 6}, np.array(5), torch.tensor(5), (i for i in [5])]
)
def test_what_is_neither_text_nor_a_sequence_of_ids_is_no_prompt(engine, value):
    with pytest.raises(UsageError, match=f"prompts is a {type(value).__name__}: give text, chat messages or token ids"):
        engine.generate(value)
    good, wrong = engine.generate([PROMPTS[0], value], SHORT)
    assert "a prompt is a" in str(wrong.error) or "not a list of token ids" in str(wrong.error)
    assert good.error is None
    with pytest.raises(LookaheadError):
        engine.stream(value)


# ---- what an engine is made of
def test_model_may_be_a_name_an_object_or_a_target(target, tokenizer):
    expected = said_by(LookaheadEngine(target, tokenizer).generate(PROMPTS[:2], SHORT))
    target.model.train()
    for engine in (LookaheadEngine(MODEL, device="cpu"), LookaheadEngine(target.model, tokenizer)):
        assert said_by(engine.generate(PROMPTS[:2], SHORT)) == expected
    assert not target.model.training


def test_without_a_tokenizer_prompts_are_ids_and_answers_have_no_text(target, tokenizer):
    engine, ids = LookaheadEngine(target.model), tokenizer(PROMPTS[0])["input_ids"]
    results = engine.generate([ids, PROMPTS[0]], SHORT)
    assert results[0].token_ids == LookaheadEngine(target, tokenizer).generate(ids, SHORT)[0].token_ids
    assert [result.text for result in results] == [None, None]
    assert "no tokenizer" in str(results[1].error)
    with pytest.raises(LookaheadError, match="no tokenizer"):
        engine.stream(ids)


def test_model_that_takes_no_drafts_answers_and_streams(tiny_model, caplog):
    engine = LookaheadEngine(tiny_model("mamba"))
    assert "verifies by plain" in caplog.text
    assert len(engine.generate([5, 6, 7], GenerationParams(max_new_tokens=4))[0].token_ids) <= 4


def test_engines_in_several_threads_load_and_sample_as_alone_and_leave_the_process_as_it_was(tiny_model):
    def state():
        loggers = [logging.getLogger(name).level for name in ("transformers", "huggingface_hub")]
        bars, filters = transformers.utils.logging.is_progress_bar_enabled(), [*warnings.filters]
        return sys.stdout, sys.stderr, loggers, bars, filters, dict(os.environ), torch.get_default_dtype()

    def answers(_=None):
        LookaheadEngine(MODEL, device="cpu")
        params = [GenerationParams(max_new_tokens=40, temperature=1.0, seed=seed) for seed in range(4)]
        return said_by(LookaheadEngine(model).generate([[5, 6, 7]] * 4, params))

    model = tiny_model("mamba")  # decodes by its own `generate`, with the random state of the process
    expected, before = answers(), state()
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(answers, range(3))] == [expected] * 3
    assert state() == before


def test_tries_are_drafted_from_and_those_of_another_tokenizer_refused(target, tokenizer, tokenizer_folder, tmp_path):
    answers = LookaheadEngine(target, tokenizer).generate(PROMPTS[:3], SHORT)
    documents = [TokenDocument(answer.token_ids, "answers") for answer in answers]
    build_trie(documents, tmp_path / "answers.trie", identity(tokenizer, "demo"))
    for trie in (tmp_path / "answers.trie", str(tmp_path / "answers.trie"), Trie(tmp_path / "answers.trie")):
        engine = LookaheadEngine(target, tokenizer, trie, drafts=FIXED, weights=2.0)
        results = engine.generate(PROMPTS[:3], SHORT)
        assert said_by(results) == said_by(answers)
        assert sum(result.accepted_by_source.get("trie:answers", 0) for result in results) > 30
    other = load_tokenizer(str(tokenizer_folder))
    build_trie([TokenDocument([1, 2], "x")], tmp_path / "other.trie", identity(other, "other"))
    with pytest.raises(TokenizerMismatchError, match="Rebuild"):
        LookaheadEngine(target, tokenizer, [tmp_path / "other.trie"])


@pytest.mark.parametrize(
    ("wishes", "saying"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"prefill_chunk": 1.5}, "prefill_chunk is 1.5"),
        ({"weights": [1.0]}, "0 tries"),
        ({"dtype": "float32"}, "given by name"),
        ({"device": "cpu"}, "given by name"),
        ({"model": 3}, "model is a int"),
        ({"model": "no-model/"}, "no such folder|cannot be read"),
        ({"tries": ["no.trie"]}, "no.trie: cannot be read"),
        ({"tries": 5}, "tries: got 5"),
        ({"tries": [], "weights": "2"}, "weights: got"),
    ],
)
def test_what_makes_no_engine_is_refused(target, tokenizer, wishes, saying):
    with pytest.raises(LookaheadError, match=saying):
        LookaheadEngine(**{"model": target, "tokenizer": tokenizer, **wishes})


# ---- stream
@pytest.mark.parametrize("params", [SHORT, WILD, GenerationParams(stop=(". ", "="))], ids=["greedy", "wild", "stop"])
def test_pieces_of_a_stream_are_the_text_that_generate_gives_and_the_result_is_returned(target, tokenizer, params):
    for engine in [*engines(target, tokenizer)][:2]:
        for prompt in PROMPTS[:2]:
            pieces, result = streamed(engine, prompt, params)
            assert "".join(pieces) == result.text != ""
            assert said_by([result]) == said_by(engine.generate(prompt, params))


@pytest.mark.parametrize("stop", [(". ", "="), ("<<",), "2", ("zzz", "\n")])
def test_stop_text_that_is_not_included_is_neither_in_the_text_nor_streamed(engine, tokenizer, stop):
    wishes = {"max_new_tokens": 60, "stop": stop, "logprobs": 0}
    for prompt in PROMPTS[:2]:
        (whole,) = engine.generate(prompt, GenerationParams(**wishes))
        (cut,) = engine.generate(prompt, GenerationParams(include_stop=False, **wishes))
        assert cut.token_ids == whole.token_ids
        first = min([whole.text.find(text) for text in stop if text in whole.text], default=len(whole.text))
        assert cut.text == whole.text[:first]
        assert len(tokenizer.decode([each.token_id for each in cut.logprobs])) >= first
        assert cut.logprobs == whole.logprobs[: len(cut.logprobs)]
        assert "".join(engine.stream(prompt, GenerationParams(include_stop=False, **wishes))) == cut.text


def test_stop_text_counts_in_the_answer_only(engine, tokenizer):
    """Not across the border of prompt and answer."""
    (free,) = engine.generate(PROMPTS[0], SHORT)
    border = PROMPTS[0][-1] + free.text[:2]
    for prompt in (PROMPTS[0], tokenizer(PROMPTS[0])["input_ids"]):
        (result,) = engine.generate(prompt, dataclasses.replace(SHORT, stop=border))
        assert border not in free.text
        assert result.token_ids == free.token_ids


@pytest.mark.parametrize("where", ["generation config", "params"])
def test_token_that_ends_an_answer_is_not_in_its_text_though_it_is_not_special(target, tokenizer, where, monkeypatch):
    cut = SHORT.max_new_tokens - 4
    ids = LookaheadEngine(target, tokenizer).generate(PROMPTS[0], SHORT)[0].token_ids[:cut]
    end = next(token for token in reversed(ids) if len(tokenizer.decode([token]).strip()) > 1)  # text of its own
    ids = ids[: ids.index(end) + 1]
    params = dataclasses.replace(SHORT, logprobs=0, stop_token_ids=(end,) if where == "params" else ())
    if where == "generation config":
        monkeypatch.setattr(target.model.generation_config, "eos_token_id", end)
    target = dataclasses.replace(target)  # its end tokens are read again
    for batch_size, drafts in ((1, FIXED), (3, DraftOptions("off"))):
        engine = LookaheadEngine(target, tokenizer, batch_size=batch_size, drafts=drafts)
        result = engine.generate(PROMPTS[0], params)[0]
        assert (result.token_ids, result.finish_reason) == (ids, "stop")
        assert result.text == tokenizer.decode(ids[:-1])
        assert [each.token_id for each in result.logprobs] == ids
        assert "".join(engine.stream(PROMPTS[0], params)) == result.text
    plainly = LookaheadEngine(dataclasses.replace(target, mode="plain"), tokenizer)
    assert plainly.generate(PROMPTS[0], params)[0].text == result.text


def test_token_that_ends_an_answer_is_in_no_text_of_a_job(engine, tokenizer, cli, tmp_path):
    end = engine.generate(PROMPTS[0], SHORT)[0].token_ids[9]
    (expected,) = engine.generate(PROMPTS[0], dataclasses.replace(SHORT, stop_token_ids=end))
    assert len(tokenizer.decode(expected.token_ids)) > len(expected.text)
    rows = [
        {"id": "ours", "prompt": PROMPTS[0], "params": {"n": 2, "stop_token_ids": [end]}},
        {"custom_id": "theirs", "body": {"prompt": PROMPTS[0], "stop_token_ids": [end], "max_tokens": 24}},
    ]
    given = "--model", MODEL, "--input", write_jsonl(tmp_path / "in.jsonl", rows), "--max-new-tokens", 24, "--token-ids", "-q"
    ours, theirs = map(json.loads, cli("generate", *given).out.splitlines())
    for row in (ours, *ours["samples"], theirs["response"]["body"]["choices"][0]):
        assert (row["text"], row["token_ids"], row["finish_reason"]) == said_by([expected])[0]


def test_first_text_comes_with_the_prefill_and_later_ones_with_each_step(engine, make, tokenizer):
    (expected,) = make().generate(PROMPTS[0], SHORT)
    clock, pieces = engine._engine.clock, []
    assert clock.steps == 0
    for step, piece in enumerate(engine.stream(PROMPTS[0], SHORT), 1):
        assert clock.steps == step
        pieces.append(piece)
    assert pieces[0] == tokenizer.decode(expected.token_ids[:1])
    assert len(pieces) > 1
    assert "".join(pieces) == expected.text


def test_stream_without_drafts_hands_out_token_by_token(target, tokenizer):
    engine = LookaheadEngine(target, tokenizer, drafts=DraftOptions("off"))
    for _ in range(2):  # once steps have been timed, several plain steps would be one call
        pieces = list(engine.stream(PROMPTS[0], SHORT))
        assert len(pieces) > 18


def test_results_come_as_they_are_finished_and_closing_frees_the_engine(engine):
    params = [GenerationParams(max_new_tokens=limit) for limit in (30, 2, 12, 4)]
    prompts, calls = [*PROMPTS[:3], ""], []
    expected = engine.generate(prompts, params, lambda *numbers: calls.append(numbers))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    found = list(engine.generate_iter(prompts, params))
    assert next(index for index, _ in found) == 1
    assert sorted(index for index, _ in found) == [0, 1, 2, 3]
    for index, result in found:
        assert said_by([result]) == said_by([expected[index]])
    results = engine.generate_iter(prompts, params)
    next(results)
    with pytest.raises(LookaheadError, match="in use"):
        engine.generate(PROMPTS[0], SHORT)
    results.close()
    assert said_by(engine.generate(prompts, params)) == said_by(expected)
    with pytest.raises(UsageError, match="3 params for 4 prompts"):
        engine.generate_iter(prompts, params[:3])


def test_stream_that_is_closed_early_frees_its_slot_and_the_engine_goes_on(engine, make):
    expected = said_by(make().generate(PROMPTS[:4], SHORT))
    for _ in range(4):
        stream = engine.stream(PROMPTS[0], SHORT)
        next(stream)
        stream.close()
        assert engine._engine._slots.open == 0
        drafter = engine._engine.drafter
        assert isinstance(drafter, Drafter)
        assert len(drafter._free) == len(drafter._rows)
    for piece in engine.stream(PROMPTS[1], SHORT):  # left without closing it
        assert piece
        break
    gc.collect()
    assert said_by(engine.generate(PROMPTS[:4], SHORT)) == expected


def test_engine_in_use_says_so_and_goes_on_afterwards(engine):
    expected = "".join(engine.stream(PROMPTS[0], SHORT))
    stream = engine.stream(PROMPTS[0], SHORT)
    waiting = engine.stream(PROMPTS[1], SHORT)  # has not begun
    text = next(stream)
    for call in (lambda: engine.generate(PROMPTS[1]), lambda: next(waiting)):
        with pytest.raises(LookaheadError, match="in use: read its open stream to the end or close"):
            call()
    found = []

    def elsewhere():
        with contextlib.suppress(LookaheadError):
            found.append(engine.generate(PROMPTS[1], SHORT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not found
    assert text + "".join(stream) == expected
    elsewhere()
    assert len(found) == 1


def test_failing_stream_raises_one_of_the_family_and_leaves_the_engine_usable(engine):
    class FailingLater(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > len(ids) + 4:
                raise ValueError("later")
            return scores

    ids = engine.tokenizer(PROMPTS[0])["input_ids"]
    with pytest.raises(LookaheadError, match='"prompt" is empty'):
        engine.stream("")  # at once
    with pytest.raises(LookaheadError, match="ValueError: later"):
        list(engine.stream(ids, GenerationParams(processors=(FailingLater(),))))
    assert engine.generate(ids, SHORT)[0].error is None
