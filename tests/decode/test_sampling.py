"""Sampling is lossless too: what a row says depends on its seed alone, not on drafts, batches or order.

Truth: `model.generate` after `torch.manual_seed` with the row's seed.
"""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

from lookahead.decode.chooser import draw
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.sampling import Sampling, seed_of
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import UsageError
from lookahead.models.probe import probed
from tests.support.depth import deep, some_deep
from tests.support.drafts import VOCAB_SIZE

PROMPTS = [[int(t) for t in np.random.default_rng(size).integers(3, VOCAB_SIZE, size)] for size in (1, 9, 20, 4, 13)]
NEW_TOKENS = 16


class Halving(LogitsProcessor):
    """A processor of the user's: halves the scores of odd tokens."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 1::2] /= 2
        return scores


SETTINGS = {
    "temperature": Sampling(temperature=0.7),
    "hot": Sampling(temperature=3.0),
    "top-k": Sampling(temperature=1.0, top_k=5),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "min-p": Sampling(temperature=1.0, min_p=0.1),
    "typical": Sampling(temperature=1.0, typical_p=0.7),
    "repetition": Sampling(temperature=0.3, repetition_penalty=3.0),
    "no-repeat-ngram": Sampling(temperature=0.1, no_repeat_ngram_size=1),
    "bad-words": Sampling(temperature=1.0, bad_words_ids=((6, 7), *((token,) for token in range(20, 60)))),
    "min-new-tokens": Sampling(temperature=1.0, min_new_tokens=12, logit_bias={2: 6.0}),
    "logit-bias": Sampling(temperature=1.0, logit_bias={9: 3.0, 10: -5.0}),
    "stop-tokens": Sampling(temperature=1.0, stop_token_ids=(11, 12, 13, 14, 15, 16, 17)),
    "own-processor": Sampling(temperature=1.0, processors=(Halving(),)),
    "everything": Sampling(0.8, 20, 0.9, 0.02, 0.95, 1.2, no_repeat_ngram_size=3, min_new_tokens=3, logit_bias={4: 1.0}),
    "greedy-penalties": Sampling(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=10),
}


@pytest.fixture(scope="module")
def target(tiny_model, device):
    return probed(tiny_model("llama", device), "llama")


def by_generate(target, prompt, sampling, seed, new_tokens=NEW_TOKENS):
    """What transformers itself says."""
    wishes = {
        name: getattr(sampling, name)
        for name in ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens")
        if getattr(sampling, name) is not None
    }
    if sampling.temperature:
        unlimited = {"top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0}
        asked = {name: getattr(sampling, name) or default for name, default in unlimited.items()}
        wishes |= {"do_sample": True, "temperature": sampling.temperature, **asked}
    if sampling.bad_words_ids:
        wishes["bad_words_ids"] = [list(words) for words in sampling.bad_words_ids]
    if sampling.logit_bias:
        wishes["sequence_bias"] = {(token,): bias for token, bias in sampling.logit_bias.items()}
    stops = [2, *sampling.stop_token_ids]
    text = torch.tensor([prompt], device=target.device)
    torch.manual_seed(seed)
    output = target.model.generate(
        text,
        attention_mask=torch.ones_like(text),
        generation_config=GenerationConfig(**wishes, max_new_tokens=new_tokens, eos_token_id=stops, pad_token_id=0),
        logits_processor=list(sampling.processors),
    )
    return output[0, len(prompt) :].tolist()


def run(engine, sampling, prompts=PROMPTS, new_tokens=NEW_TOKENS):
    requests = [engine.request(prompt, new_tokens, sampling, seed_of(0, n)) for n, prompt in enumerate(prompts)]
    assert {id(g) for g in engine.run(requests)} == {id(g) for g in requests}
    assert not any(request.error for request in requests)
    return [request.token_ids for request in requests]


@pytest.mark.parametrize("batch_size", [3, *deep([1, 8])])
@pytest.mark.parametrize("name", some_deep(SETTINGS, list(SETTINGS)[::4]))
def test_row_says_what_generate_says_with_its_seed_whatever_is_drafted_and_beside_whom(target, name, batch_size):
    sampling = SETTINGS[name]
    expected = [by_generate(target, prompt, sampling, seed_of(0, n)) for n, prompt in enumerate(PROMPTS)]
    assert run(DecodingEngine(target, Drafter([], DraftOptions("off"))), sampling) == expected
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=16, adaptive=False)), batch_size, prefill_chunk=7)
    for _ in range(2):  # the second time with the first answers as drafts
        assert run(engine, sampling) == expected
    assert batch_size > 1 or engine.clock.steps < 2 * sum(map(len, expected))  # drafts were accepted


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("temperature", "hot")])
def test_each_setting_changes_what_is_said(target, name):
    engine = DecodingEngine(target, Drafter([], DraftOptions("off")), 8)
    assert run(engine, SETTINGS[name]) != run(engine, Sampling(SETTINGS[name].temperature))


def test_rows_may_ask_for_different_things_in_one_batch(target):
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=16, adaptive=False)), 4)
    asked = [*SETTINGS.values()]
    requests = [engine.request(PROMPTS[n % 5], NEW_TOKENS, sampling, n) for n, sampling in enumerate(asked)]
    list(engine.run(requests))
    for n, (request, sampling) in enumerate(zip(requests, asked, strict=True)):
        assert request.token_ids == by_generate(target, PROMPTS[n % 5], sampling, n)


def test_random_streams_of_rows_and_samples_differ_and_repeat():
    seeds = {seed_of(seed, row, sample) for seed in (0, 1) for row in ("a", 1, "1a") for sample in (0, 1)}
    assert len(seeds) == 12
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_of(0, "a") == seed_of(0, "a", 0)


@pytest.mark.parametrize("wish", [{"temperature": -1}, {"top_p": 0}, {"min_p": 2}, {"stop": ("",)}, {"repetition_penalty": -2}])
def test_wish_that_makes_no_sense_is_refused(wish):
    with pytest.raises(UsageError):
        Sampling(**wish)


# ---- draws
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 5.0, 50.0])
def test_draw_is_that_of_multinomial_and_leaves_the_stream_as_that_does(sharpness):
    ours, theirs = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for size in (1, 2, 7, 100, 5000, 49_152):
        for _ in range(20):
            scores = sharpness * torch.randn(1, size)
            scores[0, size // 2 + 1 :: 3] = -torch.inf
            probabilities = scores.softmax(-1)
            assert draw(probabilities, ours) == int(torch.multinomial(probabilities, 1, generator=theirs))
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -1.0, 0.0])
def test_what_cannot_be_drawn_from_is_refused_as_by_multinomial(wrong):
    with pytest.raises(RuntimeError, match=r"prob|sum"):
        draw(torch.tensor([[0.0, wrong]]))
