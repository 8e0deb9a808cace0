"""Exact models: a token's scores are the same bits in any forward, and so are answers, in half precision too."""

import copy

import pytest
import torch

from lookahead.backends.cpu import linear
from lookahead.backends.cpu.linear import OneDnnWeight, lay_out
from lookahead.backends.cpu.panels import Panels
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import ModelError
from lookahead.models import exact
from lookahead.models.exact import batch_invariance_violation, tried_for_exactness
from lookahead.models.load import load_model
from lookahead.models.probe import probed
from tests.architectures import random_prompts
from tests.support.cpu import needs_halves
from tests.support.depth import deep
from tests.support.drafts import drafter_of

DEMO = "samples/demo-model"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_halves)])
def test_demo_model_is_exact(dtype):
    target = load_model(DEMO, dtype=dtype, exact=True)
    assert target.attends_by_op
    assert target.exact


@pytest.mark.parametrize("name", ["llama", *deep(["gemma3", "qwen3", "olmo2"])])
def test_answers_in_bfloat16_hang_neither_on_drafts_nor_on_the_batch(tiny_model, name):
    target = probed(lay_out(copy.deepcopy(tiny_model(name)).to(torch.bfloat16)))
    assert target.attends_by_op
    prompts = random_prompts()

    def answers(drafter, batch_size):
        engine = DecodingEngine(target, drafter, batch_size)
        requests = [engine.request(prompt, 20) for prompt in prompts]
        assert len(list(engine.run(requests))) == len(requests)
        return [request.token_ids for request in requests]

    plain = answers(Drafter([], DraftOptions("off")), 1)
    assert answers(Drafter([], DraftOptions("off")), 3) == plain
    assert answers(Drafter([], DraftOptions(decoding_length=16, adaptive=False)), 1) == plain
    assert answers(drafter_of("random_trees", [*zip(prompts, plain, strict=True)], None), 4) == plain


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "bloom", "mamba"])
def test_model_whose_attention_is_another_is_not_exact(tiny_model, name):
    """Sinks, soft caps, biases by position, none at all."""
    target = probed(tiny_model(name))
    assert not target.attends_by_op
    assert "attention" in batch_invariance_violation(target)
    assert not tried_for_exactness(target).exact


def test_what_differs_is_found_and_refused(monkeypatch):
    """A matrix product that rounds otherwise for large forwards."""
    right = Panels.product

    def product(weight, tokens, bias):
        rounded = tokens * (1 + 1e-6) if tokens.numel() > 8 * tokens.shape[-1] else tokens
        return right(weight, rounded, bias)

    monkeypatch.setattr(Panels, "takes", staticmethod(lambda weight: True))
    monkeypatch.setattr(Panels, "product", product)
    with pytest.raises(ModelError, match="--exact: scores are not the same bits in every forward"):
        load_model(DEMO, exact=True, engine_mode="modules")


def test_single_token_goes_through_twice_where_it_would_get_other_bits(monkeypatch):
    sizes = []

    def product(weight, tokens, bias):
        sizes.append(tokens.numel() // tokens.shape[-1])
        exactly = tokens @ weight.to_dense().T  # of whole numbers
        return exactly * (1 + 1e-6) if sizes[-1] == 1 else exactly

    monkeypatch.setattr(linear, "_differ_alone", {})
    monkeypatch.setattr(linear.OneDnnWeight, "_product", product)
    weight = OneDnnWeight(torch.randint(-9, 9, (24, 40)).float())
    tokens = torch.randint(-9, 9, (5, 40)).float()
    together = weight.product(tokens, None)
    del sizes[:]
    assert weight.product(tokens[:1], None).equal(together[:1])
    assert weight.product(tokens[None, 1:2], None).equal(together[None, 1:2])
    assert sizes == [2, 2]


def test_model_without_room_for_the_texts_is_not_called_exact(tiny_model):
    target = probed(tiny_model("llama"))
    object.__setattr__(target, "longest_text", exact.BEGINNING)
    assert "positions" in batch_invariance_violation(target)
