"""Decoding by the model's own `generate`, for models whose state cannot be rolled back. In: a request. Out: its tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lookahead.decode.chooser import Allowed, guide_of, own_processors, ruling_out, stop_texts
from lookahead.decode.constraint import Grammars
from lookahead.decode.generation_config import GENERATING, bad_word_ids, generate_alone, generation_config
from lookahead.decode.logprobs import logprobs_of
from lookahead.decode.request import Generation
from lookahead.decode.text import StopTexts
from lookahead.forward.backends import without_cudnn
from lookahead.forward.target import TargetModel


def decode_plainly(target: TargetModel, generation: Generation, tokenizer: Any, grammars: Grammars | None) -> None:
    """Answer a request to its end; an error fails it."""
    began = target.now()
    try:
        with GENERATING:
            _generate(target, generation, tokenizer, grammars)
    except Exception as error:
        generation.fail(error)
    generation.steps = max(0, len(generation.token_ids) - 1)
    generation.seconds = target.now() - began


class _Stopping(StoppingCriteria):
    """Asked once for each token."""

    def __init__(self, stops: StopTexts):
        self._stops, self.ended = stops, False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        self.ended = self._stops.accept_token(int(input_ids[0, -1]))
        return torch.tensor([self.ended], device=input_ids.device)


@without_cudnn()
def _generate(target: TargetModel, generation: Generation, tokenizer: Any, grammars: Grammars | None) -> None:
    sampling, length = generation.sampling, len(generation.prompt_ids)
    text = torch.tensor([generation.prompt_ids], device=target.device)
    start = generation.prompt_logprobs_start
    if generation.prompt_logprobs is not None and length > start:  # by one forward, as its state takes no chunks
        with torch.inference_mode():
            scores = target.model(input_ids=text[:, :-1], use_cache=False).logits[0]
        rows, following = range(start - 1, length - 1), generation.prompt_ids[start:]
        generation.prompt_token_logprobs = logprobs_of(scores, rows, following, generation.prompt_logprobs)
    if not generation.room:
        generation.finish_reason = "length"
        return
    stops, guide = stop_texts(target, sampling, tokenizer), guide_of(sampling, grammars, generation.room)
    stopping, allowed = _Stopping(stops) if stops else None, None
    processors = own_processors(sampling, length)
    bad_words = bad_word_ids(tuple(sampling.bad_words), tokenizer)
    config = generation_config(target, sampling, length, generation.room, bad_words)
    if guide:
        processors.append(allowed := Allowed(guide, ruling_out(config, sampling), generated_from=length))
    config.return_dict_in_generate, config.output_logits = True, generation.logprobs is not None
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(generation.seed)
        output = generate_alone(
            target,
            config,
            inputs=text,
            attention_mask=torch.ones_like(text),
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([stopping] if stopping else []),
        )
    emitted = output.sequences[0, length:].tolist()
    if guide and allowed:
        allowed.notify(output.sequences)
        generation.complete = guide.is_complete
    stopped = stopping is not None and stopping.ended
    for number, token in enumerate(emitted, 1):
        generation.add(token, stopped and number == len(emitted))
    if generation.logprobs is not None:
        scores = torch.cat(output.logits)
        generation.token_logprobs = logprobs_of(scores, range(len(emitted)), emitted, generation.logprobs)
