"""Chooses the tokens of a row. In: the model's scores at one node. Out: the token that plain decoding would emit there.

Processors and stopping rules are transformers' own, so that a row emits what `model.generate` emits; they run along the
accepted path only. A row draws from a random stream of its own, once for each token it emits, so its sample depends neither on
drafts nor on other rows: it is what `generate` gives after `torch.manual_seed` with the row's seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from lookahead.decode.constraint import Grammars, Guide
from lookahead.decode.generation_config import bad_word_ids, generation_config, own_stop_strings, quiet_generation
from lookahead.decode.own_state import own_copies
from lookahead.decode.sampling import Sampling
from lookahead.decode.text import StopTexts
from lookahead.errors import LookaheadError, ModelError, UsageError
from lookahead.forward.backends import callers_device
from lookahead.forward.batch import upload
from lookahead.forward.slots import Scores
from lookahead.forward.target import TargetModel
from lookahead.tokenizer import first_line

AHEAD = 4096  # tokens of an answer that memory is reserved for before they are there


class CountPenalty(LogitsProcessor):
    """Frequency and presence penalty over what was emitted after the prompt."""

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros_like(scores)
        emitted = input_ids[:, self.prompt_length :]
        counts.scatter_add_(1, emitted, torch.ones_like(emitted, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Allowed(LogitsProcessor):
    """Rules out what a constraint does not allow. The last processor that may rule out anything.

    others: what else may, for errors. generated_from: first generated position; this processor advances the grammar itself and
    forces the answer's completion in time.
    """

    def __init__(self, guide: Guide, others: str = "", generated_from: int | None = None):
        self._guide, self._others, self._generated_from = guide, others, generated_from
        self._scores: torch.Tensor | None = None  # before

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._generated_from is not None:
            self.notify(input_ids)
        mask = upload(self._guide.allowed(), scores.device)
        self._scores, scores = scores, scores.masked_fill(~mask[: scores.shape[1]], -torch.inf)
        best = token = int(scores.argmax(-1))
        if not scores[0, best] > -torch.inf:
            token = self._guide.refused(self._others)
            scores[:, token] = 0.0
        elif self._generated_from is not None and (token := self.in_time(best)) != best:
            scores[:, :] = -torch.inf
            scores[:, token] = 0.0
        return scores

    def notify(self, input_ids: torch.Tensor) -> None:
        """Notify the guide of what was emitted since the last call."""
        for token in input_ids[0, self._generated_from :].tolist():
            self._guide.accept_token(token)
        self._generated_from = input_ids.shape[1]

    def in_time(self, token: int) -> int:
        """Return `Guide.in_time`'s token, unless another processor rules it out; the end of the answer always wins."""
        end = self._guide.in_time(token)
        refused = self._scores is not None and end not in self._guide.eos and self._scores[0, end] == -torch.inf
        return token if refused else end


class Chooser(Protocol):
    """Chooses the tokens of a row. It is asked once for each, in the order in which they are emitted.

    guide: what drafts may hold; None: anything. is_followed: it emits the best token, regardless of earlier ones, or the answer
    that the request brings, and need not be asked nor notified.
    """

    guide: Guide | None

    @property
    def is_followed(self) -> bool: ...

    def next_token(self, scores: Scores, slot: int, node: int) -> int:
        """The next token, by the scores behind this node of the slot."""

    def accept_token(self, token: int) -> bool:
        """`token` was emitted; True ends the answer, as a stop text is complete with it."""


class ForcedTokens:
    """Emits the answer that a request brings: ignores the scores, but still waits for the forward.

    remaining_forced: what is still to be emitted of it, a number of tokens at most.
    """

    guide: Guide | None = None
    is_followed = True

    def __init__(self, remaining_forced: Callable[[int], Sequence[int]]):
        self._remaining = remaining_forced

    def next_token(self, scores: Scores, slot: int, node: int) -> int:
        scores.best(slot, node)
        return self._remaining(1)[0]

    def accept_token(self, token: int) -> bool:
        return False


class Sampler:
    """One row's choices, as `model.generate` makes them. seed: of its random stream. room: tokens that it may emit at most."""

    def __init__(
        self,
        target: TargetModel,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        room: int,
        seed: int,
        tokenizer: Any = None,
        grammars: Grammars | None = None,
    ):
        self.prompt_length = len(prompt_ids)
        config = generation_config(
            target, sampling, self.prompt_length, room, bad_word_ids(tuple(sampling.bad_words), tokenizer)
        )
        self.draws = bool(config.do_sample)
        self.guide = guide_of(sampling, grammars, room)
        own = own_processors(sampling, self.prompt_length)
        self._allowed = Allowed(self.guide, ruling_out(config, sampling)) if self.guide else None
        if self._allowed:
            own.append(self._allowed)
        self.processors = _processors(target, config, prompt_ids, own)
        if self.guide and not self.draws and len(self.processors or ()) == 1:  # the best token mostly needs no mask
            self.processors = None
        self._stops = stop_texts(target, sampling, tokenizer)
        if self.draws:
            self._stream = torch.Generator(target.device).manual_seed(seed)
        self._text = torch.empty(1, 0, dtype=torch.int64)
        if not self.is_greedy:
            self._text = torch.zeros(1, self.prompt_length + min(room, AHEAD), dtype=torch.int64, device=target.device)
            self._text[0, : self.prompt_length] = torch.tensor(prompt_ids)
        self._emitted = 0

    @property
    def is_greedy(self) -> bool:
        """The token with the highest score of those allowed is always the one."""
        return not self.processors and not self.draws

    @property
    def is_followed(self) -> bool:
        """See `Chooser`."""
        return self.is_greedy and self.guide is None and not self._stops

    def next_token(self, scores: Scores, slot: int, node: int) -> int:
        token = self._chosen(scores, slot, node)
        return self._allowed.in_time(token) if self._allowed else token

    def _chosen(self, scores: Scores, slot: int, node: int) -> int:
        if self.is_greedy:
            best = scores.best(slot, node)
            token = self.guide.settled(best) if self.guide else best
            if token is not None:
                return token
            assert self._allowed
            return int(self._allowed(self._text, scores.of(slot)[node][None].float()).argmax(-1))
        here = scores.of(slot)[node][None].float()
        if self.processors:
            with callers_device():
                here = processed(self.processors, self._text[:, : self.prompt_length + self._emitted], here.clone())
        if self.draws:
            try:
                return draw(here.softmax(-1), self._stream)
            except RuntimeError as error:
                problem = "no token can be drawn: temperature, penalties or biases make scores that are not finite"
                raise UsageError(f"{problem} ({first_line(error)}).") from error
        return int(here.argmax(-1))

    def accept_token(self, token: int) -> bool:
        ended = self.guide is not None and self.guide.accept_token(token)
        if not self.is_greedy:
            if self.prompt_length + self._emitted == self._text.shape[1]:
                self._text = torch.cat([self._text, torch.zeros_like(self._text)], 1)
            self._text[0, self.prompt_length + self._emitted] = token
            self._emitted += 1
        return bool(self._stops and self._stops.accept_token(token)) or ended


def draw(probabilities: torch.Tensor, stream: torch.Generator | None = None) -> int:
    """Draw a token as `torch.multinomial(probabilities, 1, generator=stream)` does, on a CPU in a third of the time.

    probabilities: float32 [1, vocab]. torch divides them by exponential random numbers, which it makes one by one. Raises as
    multinomial does.
    """
    plain = probabilities.device.type != "cpu" or probabilities.dtype != torch.float32
    if plain or not 0 < float(probabilities.sum()) < torch.inf or not _draws_alike():
        return int(torch.multinomial(probabilities, 1, generator=stream))
    return _drawn(probabilities, stream)


def _drawn(probabilities: torch.Tensor, stream: torch.Generator | None) -> int:
    uniform = torch.rand(probabilities.shape, dtype=torch.float64, device="cpu", generator=stream)
    return int((probabilities / torch.log1p(uniform.neg_()).neg_().float()).argmax(-1))


@functools.cache
def _draws_alike() -> bool:
    """Tell whether this version of torch draws as `draw` does."""
    ours, theirs = (torch.Generator("cpu").manual_seed(1) for _ in range(2))
    for size in (10, 1000, 50_000):
        alike = torch.full((1, size), 1 / size, device="cpu")
        if _drawn(alike, ours) != int(torch.multinomial(alike, 1, generator=theirs)):
            return False
    return torch.equal(ours.get_state(), theirs.get_state())


def processed(processors: LogitsProcessorList, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Apply all processors to the scores, which may change in place.

    Raises LookaheadError naming a processor of the user's whose result is not scores of the vocabulary.
    """
    for processor in processors:
        if type(processor).__module__.startswith(("transformers.", "lookahead.")):
            scores = processor(input_ids, scores)
            continue
        had_nan, name, shape = bool(scores.isnan().any()), type(processor).__name__, list(scores.shape)
        found = processor(input_ids, scores)
        if not isinstance(found, torch.Tensor) or found.shape != scores.shape:
            what = f"scores of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            raise LookaheadError(f"the logits processor {name} returns {what}: it must be a tensor of shape {shape}.")
        if not found.is_floating_point() or found.device != scores.device:
            wanted = f"floating-point numbers on {scores.device}"
            raise LookaheadError(f"the logits processor {name} returns {found.dtype} on {found.device}: it must be {wanted}.")
        scores = found
        if not had_nan and bool(scores.isnan().any()):
            raise LookaheadError(f"the logits processor {name} returns scores that are not numbers (NaN).")
    return scores


def own_processors(sampling: Sampling, prompt_length: int) -> LogitsProcessorList:
    """Make the processors that a generation config cannot name: the caller's own and the counting penalties."""
    own = LogitsProcessorList(own_copies(sampling.processors))
    if sampling.frequency_penalty or sampling.presence_penalty:
        own.append(CountPenalty(prompt_length, sampling.frequency_penalty, sampling.presence_penalty))
    return own


RULES_OUT = {  # fields of a generation config -> what users call them
    **{name: name for name in ("suppress_tokens", "begin_suppress_tokens", "no_repeat_ngram_size", "forced_eos_token_id")},
    **{name: name for name in ("encoder_no_repeat_ngram_size", "forced_bos_token_id")},
    "bad_words_ids": "bad_words",
    "sequence_bias": "logit_bias",
}


def ruling_out(config: Any, sampling: Sampling) -> str:
    """List what of a request and of the model's generation config may rule out tokens; "" if nothing does."""
    # Minimum lengths rule out ends only, and the end of a complete answer wins: what is left are a request's own stop tokens.
    least = ["min_new_tokens"] if sampling.stop_token_ids and config.min_new_tokens else []
    found = [name for field, name in RULES_OUT.items() if getattr(config, field, None) not in (None, 0, [], {})]
    return ", ".join([*found, *least, *dict.fromkeys(f"processors ({type(own).__name__})" for own in sampling.processors)])


def guide_of(sampling: Sampling, grammars: Grammars | None, room: int) -> Guide | None:
    """Make the guide of a constrained answer. Raises ConstraintError if nothing can be that."""
    if sampling.constraint is None:
        return None
    if grammars is None:
        raise UsageError("constraints need the model's tokenizer, and there is none.")
    return grammars.guide(sampling.constraint, room)


def stop_texts(target: TargetModel, sampling: Sampling, tokenizer: Any) -> StopTexts | None:
    """Make the detector of stop texts; None if there are none."""
    texts = sampling.stop or own_stop_strings(target)
    if not texts:
        return None
    if tokenizer is None:
        raise UsageError("stop texts need the model's tokenizer, and there is none: use stop_token_ids.")
    return StopTexts(tokenizer, texts)


def _processors(
    target: TargetModel, config: Any, prompt_ids: Sequence[int], own: LogitsProcessorList
) -> LogitsProcessorList | None:
    """All that `generate` would apply to scores with this config and processors of the caller's `own`; None: nothing."""
    text = torch.tensor([prompt_ids], device=target.device)
    with quiet_generation():
        target.model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=target.device)
        processors = target.model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt_ids),
            encoder_input_ids=text,  # of a decoder, its prompt
            device=target.device,
            logits_processor=own,
        )
    return processors or None


def check_generation_config(target: TargetModel, tokenizer: Any | None, asked: Sampling) -> None:
    """Raise ModelError if the model's generation config is wrong, or needs what is not there.

    asked: as of `generation_config.not_used`.
    """
    if target.model is None:  # nothing but a cost profile
        return
    where = f"{target.name}: its generation config"
    if own_stop_strings(target) and tokenizer is None:
        raise ModelError(f"{where} has stop_strings, which need a tokenizer, and there is none: name one with --tokenizer.")
    try:
        with quiet_generation():
            generation_config(target, asked, 2, 8).validate()
        Sampler(target, asked, [0, 0], 8, 0, tokenizer)
    except Exception as error:  # transformers raises many kinds
        raise ModelError(f"{where} cannot be used ({first_line(error)}). Correct generation_config.json.") from error
