"""`model.generate(..., custom_generate=lookahead_generate)` returns what `model.generate` does: ids, scores, what is streamed.

Truth is `generate` itself with the same arguments. Scores agree within 1e-4 in float32.
"""

import copy
import threading

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, StopStringCriteria, TextIteratorStreamer, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from lookahead import hf
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.forward import kv_cache
from lookahead.hf import lookahead_generate
from tests.architectures import plainly
from tests.support.depth import deep, some_deep
from tests.support.drafts import VOCAB_SIZE, KnownAnswer, random_trees

ARCHITECTURES = ["llama", "qwen2", "gpt2", "gpt_neox", "gemma3", "mistral"]  # the last two with windows of 8 tokens
LENGTHS = (9, 14, 3, 11)
NEW_TOKENS = 16
PROMPTS = [[int(t) for t in np.random.default_rng(length).integers(3, VOCAB_SIZE, length)] for length in LENGTHS]
ALL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
OURS = {"custom_generate": lookahead_generate}
WAYS = {}, OURS  # arguments of `generate`: by itself, with lookahead


@pytest.fixture(scope="module")
def llama(tiny_model, device):
    return tiny_model("llama", device)


def padded(prompts, device):
    """Prompts side by side, padded on the left as `generate` wants them."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return {"input_ids": ids, "attention_mask": mask}


class Guessing(KnownAnswer):
    """A drafter whose drafts are right by half, so that steps keep none, some or all. It knows rows that go on again too."""

    def __init__(self, answers):
        super().__init__(answers, random_trees(0))

    def start(self, prompt_ids):
        for prompt, answer in list(self.answers.items()):
            if tuple(prompt_ids[: len(prompt)]) == prompt:
                self.answers[tuple(prompt_ids)] = answer[len(prompt_ids) - len(prompt) :]
        return super().start(prompt_ids)


def guessing(model, prompts, new_tokens=NEW_TOKENS):
    return Guessing([(prompt, plainly(model, prompt, new_tokens)) for prompt in prompts])


def both(model, prompts, drafter=None, seed=0, inputs=None, **wishes):
    """(what `generate` returns, what it returns with lookahead). The random stream must stand at the same place after both."""
    inputs = padded(prompts, model.device) if inputs is None else inputs
    wishes = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **wishes}
    outputs, streams = [], []
    for own in ({}, {**OURS, "drafter": drafter}):
        torch.manual_seed(seed)
        outputs.append(model.generate(**inputs, **copy.deepcopy(wishes), **own))  # processors may have a state
        streams.append(torch.cuda.get_rng_state() if model.device.type == "cuda" else torch.get_rng_state())
    assert torch.equal(*streams)
    return outputs


def assert_equal(plain, ours):
    """Ids and, where there are any, scores of all steps and rows."""
    if isinstance(plain, torch.Tensor):
        assert ours.tolist() == plain.tolist()
        assert ours.dtype == plain.dtype
        return
    assert type(ours) is type(plain)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        expected, got = getattr(plain, name), getattr(ours, name)
        assert (got is None) == (expected is None)
        assert len(got or ()) == len(expected or ())
        for ours_at, plain_at in zip(got or (), expected or (), strict=True):
            torch.testing.assert_close(ours_at, plain_at, atol=1e-4, rtol=1e-4)
            assert not ours_at.is_inference()


def forwards(model, call):
    """How many forwards a call takes."""
    counted = []
    hook = model.register_forward_hook(lambda *_: counted.append(1))
    try:
        call()
    finally:
        hook.remove()
    return len(counted)


class Counting(LogitsProcessor):
    """A processor of the user's, with a state: the more often it was asked, the more it favours token 5."""

    def __init__(self):
        self.asked = 0

    def __call__(self, input_ids, scores):
        self.asked += 1
        favour = torch.zeros_like(scores)
        favour[:, 5] = self.asked
        return scores + favour


def ends_at(*tokens):
    """A criterion of the user's: ends a row with one of these tokens."""
    return lambda input_ids, scores, **_: torch.isin(input_ids[:, -1], torch.tensor(tokens, device=input_ids.device))


class Recording(BaseStreamer):
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.got.append("end")


# ---- ids and scores
@pytest.mark.parametrize(
    ("architecture", "rows"),
    [
        ("llama", 1),
        *((each, 4) for each in ARCHITECTURES[::2]),
        *deep((each, 4) for each in ARCHITECTURES[1::2]),
        *deep((each, 1) for each in ARCHITECTURES if each != "llama"),
    ],
)
def test_greedy_and_sampled_rows_are_those_of_generate(tiny_model, device, architecture, rows):
    model, prompts = tiny_model(architecture, device), PROMPTS[:rows]
    drafter = guessing(model, prompts)
    plain, ours = both(model, prompts, drafter, **ALL)
    assert_equal(plain, ours)
    said = plain.sequences[:, -NEW_TOKENS:].tolist()
    assert len({token for row in said for token in row}) > rows  # not one token for ever
    assert_equal(*both(model, prompts, drafter, seed=3, do_sample=True, temperature=0.9, top_k=20, top_p=0.9, **ALL))
    assert drafter.running == 0
    wishes = {"drafter": drafter, "max_new_tokens": NEW_TOKENS, **OURS}
    assert forwards(model, lambda: model.generate(**padded(prompts, device), **wishes)) < 0.8 * NEW_TOKENS


PROCESSED = {
    "repetition": {"repetition_penalty": 1.8},
    "no-repeat-ngram": {"no_repeat_ngram_size": 2},
    "min-length": {"min_new_tokens": 9, "eos_token_id": list(range(40))},
    "bad-words": {"bad_words_ids": [[6, 7], *([token] for token in range(20, 60))]},
    "bias": {"sequence_bias": {(9,): 8.0, (10, 11): 4.0}},
    "prompt-repetition": {"encoder_repetition_penalty": 1.5},
    "prompt-ngrams": {"encoder_no_repeat_ngram_size": 1},
    "prefixes": {
        "prefix_allowed_tokens_fn": lambda row, ids: [token for token in range(3, 97) if (token + len(ids)) % 4 == row]
    },
    "forced-end": {"forced_eos_token_id": 2},
    "suppressed": {"suppress_tokens": [*range(50)], "begin_suppress_tokens": [60, 61]},
    "decay": {"exponential_decay_length_penalty": (4, 1.5)},
    "guidance": {"guidance_scale": 1.7},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "own": {"logits_processor": [Counting()]},
}
PROCESSED["everything"] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "renormalize_logits": True, **PROCESSED["own"]}


@pytest.mark.parametrize("rows", [4, *deep([1])])
@pytest.mark.parametrize("name", some_deep(PROCESSED, [*list(PROCESSED)[::4], "own"]))
def test_processors_do_what_they_do_in_generate(llama, name, rows):
    prompts, drafter = PROMPTS[:rows], guessing(llama, PROMPTS)
    plain, ours = both(llama, prompts, drafter, **PROCESSED[name], **ALL)
    assert_equal(plain, ours)
    assert_equal(*both(llama, prompts, drafter, seed=1, do_sample=True, min_p=0.01, **PROCESSED[name]))
    assert any(not torch.equal(*pair) for pair in zip(plain.scores, plain.logits, strict=True))


def test_negative_prompts_of_guidance_belong_to_their_rows(llama):
    negative = padded([prompt[::-1] for prompt in PROMPTS], llama.device)
    wishes = {"guidance_scale": 1.7, "negative_prompt_ids": negative["input_ids"]}
    wishes["negative_prompt_attention_mask"] = negative["attention_mask"]
    assert_equal(*both(llama, PROMPTS, guessing(llama, PROMPTS), **wishes, **ALL))


@pytest.mark.parametrize("rows", [1, 4])
def test_several_samples_of_a_prompt(llama, rows):
    wishes = {"num_return_sequences": 3, "do_sample": True, "encoder_repetition_penalty": 1.2, "repetition_penalty": 1.2}
    plain, ours = both(llama, PROMPTS[:rows], guessing(llama, PROMPTS), seed=5, **wishes, **ALL)
    assert_equal(plain, ours)
    assert len({tuple(row) for row in ours.sequences.tolist()}) == 3 * rows


def test_default_drafter_remembers_what_the_model_said_before(llama):
    model = copy.deepcopy(llama)  # that nobody has asked before
    asked = {**padded(PROMPTS[:1], model.device), "max_new_tokens": 64, "eos_token_id": []}
    plain = model.generate(**asked)

    def again():
        assert model.generate(**asked, **OURS).tolist() == plain.tolist()

    again()
    kept = vars(model)[hf.KEPT]  # drafts that do not pay on so small a model: of a fixed length from now on
    kept._drafter.options = DraftOptions(decoding_length=16, recycle=False, adaptive=False)
    kept._engines.clear()
    assert forwards(model, again) < 64 / 4


def test_without_padding_or_mask_and_on_one_token(llama):
    for ids in ([PROMPTS[0]] * 2, [[7]], None):
        inputs = {"input_ids": torch.tensor(ids, device=llama.device)} if ids else {}
        assert_equal(*both(llama, [], inputs=inputs, max_new_tokens=5))


@pytest.mark.parametrize(
    "setting",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"max_length": 20, "max_new_tokens": None},
        {"min_length": 18},
        {"max_time": 1e-9},
    ],
    ids=str,
)
def test_other_settings_of_generate(llama, setting):
    assert_equal(*both(llama, PROMPTS, guessing(llama, PROMPTS), **setting, **ALL))


# ---- where rows end
def ends(model, prompts=PROMPTS, at=(3, 8, 12)):
    """Tokens with which rows end at different places, found in what they say."""
    said = [plainly(model, prompt, NEW_TOKENS) for prompt in prompts]
    return [said[row % len(said)][place] for row, place in enumerate(at)]


@pytest.mark.parametrize("architecture", ["llama", *deep(["gpt2"]), "gemma3"])
@pytest.mark.parametrize("rows", [4, *deep([1])])
def test_ended_rows_are_padded_and_scored_as_in_generate(tiny_model, device, architecture, rows):
    model = tiny_model(architecture, device)
    wishes = {"eos_token_id": ends(model), "repetition_penalty": 1.1, **ALL}
    plain, ours = both(model, PROMPTS[:rows], guessing(model, PROMPTS), **wishes)
    assert_equal(plain, ours)
    assert_equal(*both(model, PROMPTS[:rows], guessing(model, PROMPTS), do_sample=True, **wishes))
    said = plain.sequences[:, max(map(len, PROMPTS[:rows])) :].tolist()
    assert rows == 1 or len({row.index(0) if 0 in row else len(row) for row in said}) > 2


@pytest.mark.parametrize(("with_scores", "sampled"), [(False, False), (True, True), *deep([(False, True), (True, False)])])
def test_without_end_tokens_ended_rows_go_on_until_all_have_ended(llama, with_scores, sampled):
    llama = copy.deepcopy(llama)
    llama.generation_config.eos_token_id = None
    tokens = ends(llama, at=(3, 8, 5, 10))
    wishes = {"stopping_criteria": [ends_at(*tokens)], "do_sample": sampled, "max_new_tokens": 40}
    wishes |= ALL if with_scores else {}
    plain, ours = both(llama, PROMPTS, guessing(llama, PROMPTS), pad_token_id=None, **wishes)
    assert_equal(plain, ours)
    sequences = plain.sequences if with_scores else plain
    width = max(map(len, PROMPTS))
    assert sampled or width + 3 < sequences.shape[1] < width + 40


def test_criteria_may_look_at_scores(llama):
    def is_sure(input_ids, scores, **_):
        return sum(at.amax(-1) for at in scores) > bound - 0.1

    whole, _ = both(llama, PROMPTS, guessing(llama, PROMPTS), **ALL)
    bound = float(sum(at.amax(-1) for at in whole.scores).min())  # the least sure row gets there last
    plain, ours = both(llama, PROMPTS, guessing(llama, PROMPTS), stopping_criteria=[is_sure], **ALL)
    assert_equal(plain, ours)
    assert (plain.sequences[:, -NEW_TOKENS:] == 0).any()


@pytest.mark.parametrize(("way", "rows"), [("argument", 1), ("criterion", 4), *deep([("argument", 4), ("criterion", 1)])])
def test_stop_strings(llama, tokenizer, rows, way):
    model = copy.deepcopy(llama)
    said = [plainly(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    texts = [tokenizer.decode(said[0][4:6]), tokenizer.decode(said[1][9])]
    if way == "argument":
        wishes = {"stop_strings": texts, "tokenizer": tokenizer}
    else:
        wishes = {"stopping_criteria": [StopStringCriteria(tokenizer, texts)]}
    plain, ours = both(model, PROMPTS[:rows], guessing(model, PROMPTS), **wishes)
    assert_equal(plain, ours)
    assert 0 in plain[0, -3:].tolist() or plain.shape[1] < max(map(len, PROMPTS[:rows])) + NEW_TOKENS


def test_text_beyond_the_models_positions(tiny_model, device):
    """gpt2 has a table of 32 positions: drafts stop before its end, and what goes beyond fails as in generate."""
    model = tiny_model("gpt2_short", device)
    prompt = PROMPTS[0] * 2
    answer = plainly(model, prompt, 14)
    drafter = Guessing([(prompt, answer + [5] * 10)])
    wishes = {"max_new_tokens": 30, "eos_token_id": answer[-1]}
    assert_equal(*both(model, [prompt], drafter, **wishes))
    if device == "cpu":  # elsewhere such an index ends the process's use of the device
        for own in WAYS:
            with pytest.raises(IndexError):
                model.generate(**padded([prompt], device), max_new_tokens=30, eos_token_id=[], pad_token_id=0, **own)


@pytest.mark.parametrize("architecture", ["llama", "gptj"])
def test_memory_is_taken_for_no_more_than_the_models_positions(tiny_model, device, monkeypatch, architecture):
    model, capacities = tiny_model(architecture, device), []
    for cache in (kv_cache.SlotCache, kv_cache.SequenceCache):
        monkeypatch.setattr(
            cache, "reserve", lambda self, *sizes, own=cache.reserve: capacities.append(sizes[:2][-1]) or own(self, *sizes)
        )
    wishes = {"max_new_tokens": 1_000_000, "eos_token_id": ends(model)}
    assert_equal(*both(model, PROMPTS[:2], guessing(model, PROMPTS), **wishes))
    assert 0 < max(capacities) <= 256


def test_text_beyond_its_positions_goes_on_where_the_model_does(llama):
    """Positions of llama are computed, so that `generate` only warns beyond the 256 of its config."""
    wishes = {"max_new_tokens": 270, "eos_token_id": [], "no_repeat_ngram_size": 3}
    assert_equal(*both(llama, PROMPTS[:2], Drafter([], DraftOptions(decoding_length=8, adaptive=False)), **wishes))


# ---- streamers
@pytest.mark.parametrize(
    ("architecture", "ended_by", "rows"),
    [
        ("llama", "tokens", 1),
        ("llama", "criterion", 4),
        ("mamba", "tokens", 1),  # decodes plainly
        *deep([("llama", "tokens", 4), ("llama", "criterion", 1)]),
    ],
)
def test_streamer_gets_prompt_and_tokens_in_the_order_and_shape_of_generate(tiny_model, device, architecture, ended_by, rows):
    model = copy.deepcopy(tiny_model(architecture, device))
    model.generation_config.eos_token_id = None
    tokens, streamed = ends(model), []
    wishes = {"eos_token_id": tokens} if ended_by == "tokens" else {"stopping_criteria": [ends_at(*tokens)]}
    for own in ({}, {**OURS, "drafter": guessing(model, PROMPTS)}):
        streamer = Recording()
        asked = {"streamer": streamer, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **own, **wishes}
        model.generate(**padded(PROMPTS[:rows], device), **asked)
        streamed.append(streamer.got)
    assert streamed[0] == streamed[1]
    assert len(streamed[0]) > 3
    assert streamed[0][-1] == "end"


def test_tokens_are_streamed_as_they_are_accepted(llama):
    """After each forward, what it gave; not all at the end."""
    got_before_forward, streamer = [], Recording()
    hook = llama.register_forward_pre_hook(lambda *_: got_before_forward.append(len(streamer.got)))
    drafter = guessing(llama, PROMPTS)
    hf._kept_of(llama).target_of(llama)
    try:
        got_before_forward.clear()
        llama.generate(**padded(PROMPTS[:1], llama.device), streamer=streamer, max_new_tokens=16, drafter=drafter, **OURS)
    finally:
        hook.remove()
    assert got_before_forward[:2] == [1, 2]  # the prompt, the token of the prefill
    assert got_before_forward == sorted(set(got_before_forward))


def test_text_streamer_in_another_thread(llama, tokenizer):
    texts = []
    for own in WAYS:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
        arguments = {**padded(PROMPTS[:1], llama.device), "streamer": streamer, "max_new_tokens": NEW_TOKENS, **own}
        thread = threading.Thread(target=llama.generate, kwargs=arguments)
        thread.start()
        texts.append("".join(streamer))
        thread.join()
    assert texts[0] == texts[1] != ""
