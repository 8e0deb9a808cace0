"""What a caller sets of torch and numpy changes no token, and is as it was whenever the caller runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor

from lookahead import GenerationParams, LookaheadEngine, lookahead_generate
from lookahead.models.load import load_model
from lookahead.tokenizer import load_tokenizer
from tests.support.jobs import MODEL, PROMPTS


def set_by(change: Callable[[Any], object], value: Any, before: Any) -> Callable[[], Any]:
    """A setting of the process that a pair of calls sets and resets."""

    @contextlib.contextmanager
    def open_it() -> Iterator[None]:
        change(value)
        try:
            yield
        finally:
            change(before)

    return open_it


SETTINGS: dict[str, Callable[[], Any]] = {
    "default device": set_by(torch.set_default_device, "meta", None),
    "device context": lambda: torch.device("meta"),
    "float64": set_by(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": set_by(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "gradients": torch.enable_grad,
    "inference": torch.inference_mode,
    "deterministic": set_by(torch.use_deterministic_algorithms, True, False),
    "print options": set_by(lambda digits: torch.set_printoptions(precision=digits), 1, 4),
    "numpy errors": lambda: np.errstate(all="raise"),
}


class Noting(LogitsProcessor):
    """Notes the device that its own tensors come to."""

    def __init__(self) -> None:
        self.seen = set[str]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.add(torch.empty(0).device.type)
        return scores


def now() -> tuple[Any, ...]:
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return torch.get_default_device(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), *grad


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODEL))


def answers(target: Any, tokenizer: Any, setting: Callable[[], Any]) -> list[Any]:
    """By each door, with the setting."""
    engine, found = LookaheadEngine(target, tokenizer), []
    greedy, drawn = GenerationParams(max_new_tokens=24), GenerationParams(max_new_tokens=24, temperature=1.0, logprobs=1)
    prompt = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 2}
    with setting():
        settings = now()
        for params in (greedy, drawn):
            found += [(result.token_ids, result.error) for result in engine.generate(PROMPTS[:2], params)]
        assert now() == settings
        found.append(target.model.generate(prompt, **asked, custom_generate=lookahead_generate).tolist())
        assert now() == settings
    before, pieces, text = now(), engine.stream(PROMPTS[0], greedy), ""
    for _ in range(greedy.max_new_tokens + 1):
        with setting():
            settings, piece = now(), next(pieces, None)
            assert now() == settings
        assert now() == before
        text += piece or ""
    return [*found, text]


@pytest.fixture(scope="module")
def expected(tokenizer):
    return answers(load_model(str(MODEL)), tokenizer, contextlib.nullcontext)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_caller_change_no_token_and_stay_as_they_are(name, tokenizer, expected):
    with SETTINGS[name]():
        settings, loaded = now(), load_model(str(MODEL))
        assert now() == settings
    assert answers(loaded, tokenizer, SETTINGS[name]) == expected


def test_processors_of_the_caller_run_with_its_default_device(tokenizer):
    engine = LookaheadEngine(load_model(str(MODEL)), tokenizer)
    noting = Noting()
    prompt = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    with torch.device("meta"):
        engine._engine.target.model.generate(
            prompt, max_new_tokens=4, pad_token_id=2, logits_processor=[noting], custom_generate=lookahead_generate
        )
    assert noting.seen == {"meta"}
