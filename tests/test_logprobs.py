"""Log-probabilities are those of a plain forward over prompt and answer, whatever was drafted and however tokens are chosen."""

from __future__ import annotations

import pytest
import torch

from lookahead.api import GenerationParams, LookaheadEngine
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.logprobs import AT_ONCE, logprobs_of
from lookahead.decode.probe import probed
from lookahead.decode.sampling import Sampling, seed_of
from lookahead.draft.drafter import Drafter, DraftOptions
from lookahead.errors import UsageError
from tests.drafts import VOCAB_SIZE
from tests.test_sampling import PROMPTS

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


def assert_exact(target, request, asked):
    """Each is the log-softmax of a plain forward."""
    text = torch.tensor([[*request.prompt_ids, *request.token_ids]], device=target.device)
    with torch.inference_mode():
        exact = target.model(text).logits[0, request.prompt_tokens - 1 : -1].double().log_softmax(-1)
    assert [found.token_id for found in request.token_logprobs] == request.token_ids
    for found, row in zip(request.token_logprobs, exact, strict=True):
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=NEAR)
        assert [logprob for _, logprob in found.top] == pytest.approx(row.topk(asked).values.tolist(), abs=NEAR)
        assert [logprob for _, logprob in found.top] == pytest.approx([float(row[token]) for token, _ in found.top], abs=NEAR)
        assert len({token for token, _ in found.top}) == asked


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", WISHES)
def test_they_are_those_of_a_plain_forward_with_drafts_and_without(target, name, batch_size):
    plain = run(target, DraftOptions("off"), batch_size, WISHES[name])
    drafted = run(target, DraftOptions(decoding_length=16), batch_size, WISHES[name])
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert_exact(target, one, 3)
        assert_exact(target, other, 3)


@pytest.mark.parametrize("architecture", ["gptj", "gpt_neo", "mamba"])  # trees, chains, the model's own generate
def test_they_are_those_of_a_plain_forward_in_every_mode(tiny_model, device, architecture):
    target = probed(tiny_model(architecture, device), architecture)
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=8)), 2)
    for sampling in (WISHES["greedy"], WISHES["sampled-penalties"]):
        requests = [engine.request(prompt, 10, sampling, 1, 2) for prompt in PROMPTS[:3]]
        for request in engine.run(requests):
            assert request.error is None
            assert_exact(target, request, 2)


def test_rows_of_a_batch_get_as_many_as_each_asked_for(target):
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=16)), 5)
    asked = [None, 0, 1, 5, 1000]
    requests = [engine.request(prompt, 8, logprobs=most) for prompt, most in zip(PROMPTS, asked, strict=True)]
    assert len(list(engine.run(requests))) == 5
    assert requests[0].token_logprobs == []
    for request, most in zip(requests[1:], (0, 1, 5, VOCAB_SIZE), strict=True):
        assert_exact(target, request, most)


def test_nothing_is_computed_that_nobody_asked_for(target, monkeypatch):
    monkeypatch.setattr("lookahead.decode.engine.logprobs_of", lambda *_: pytest.fail("computed"))
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=16)), 2)
    assert not any(request.error for request in engine.run([engine.request(prompt, 8) for prompt in PROMPTS]))


def test_row_whose_log_probabilities_fail_fails_and_no_other(target, monkeypatch):
    def failing(*_):
        raise MemoryError("no room")

    monkeypatch.setattr("lookahead.decode.engine.logprobs_of", failing)
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=16)), 2)
    requests = [engine.request(PROMPTS[0], 8), engine.request(PROMPTS[1], 8, logprobs=1)]
    assert len(list(engine.run(requests))) == 2
    assert [str(request.error) for request in requests] == ["None", "no room"]


def test_half_precision_is_summed_in_float32_and_long_lists_are_cut():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(AT_ONCE + 9, 5000, generator=generator).bfloat16()
    rows = [row % len(logits) for row in range(2, 2 * AT_ONCE + 20)]
    said = [(7 * row) % 5000 for row in rows]
    found = logprobs_of(logits, rows, said, 4)
    exact = logits.double().log_softmax(-1)
    for each, row, token in zip(found, rows, said, strict=True):
        assert each.token_id == token
        assert each.logprob == pytest.approx(float(exact[row, token]), abs=NEAR)
        assert [value for _, value in each.top] == pytest.approx(exact[row].topk(4).values.tolist(), abs=NEAR)
    assert len(found) == len(rows)


def test_results_from_python_hold_them(target):
    engine = LookaheadEngine(target, drafts=DraftOptions(decoding_length=16))
    with_them, without = engine.generate(PROMPTS[:2], [GenerationParams(max_new_tokens=6, logprobs=2), GenerationParams()])
    assert [found.token_id for found in with_them.logprobs] == with_them.token_ids
    assert all(found.top[0][1] >= found.top[1][1] for found in with_them.logprobs)
    assert [found.top[0] for found in with_them.logprobs] == [(found.token_id, found.logprob) for found in with_them.logprobs]
    assert without.logprobs is None
    for wrong in (-1, 1.5, True):
        with pytest.raises(UsageError, match="logprobs is"):
            GenerationParams(logprobs=wrong)
