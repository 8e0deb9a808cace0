"""How a row chooses its tokens. In: the model's scores at one node. Out: the token that plain decoding would emit there.

Processors and stopping rules are transformers' own, so that a row emits what `model.generate` emits; they run along the
accepted path only. A row draws from a random stream of its own, once for each token it emits, so its sample depends neither on
drafts nor on other rows: it is what `generate` gives after `torch.manual_seed` with the row's seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StopStringCriteria

from lookahead.decode.constraint import Grammars, Guide
from lookahead.decode.generation_config import bad_word_ids, generation_config, own_stop_strings, quiet_generation
from lookahead.decode.own_state import own_copies
from lookahead.decode.sampling import Sampling
from lookahead.errors import ModelError, UsageError
from lookahead.forward.backends import callers_device
from lookahead.forward.batch import upload
from lookahead.forward.slots import Scores
from lookahead.forward.target import TargetModel
from lookahead.tokenizer import first_line


class CountPenalty(LogitsProcessor):
    """Frequency and presence penalty over what was emitted after the prompt."""

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros_like(scores)
        said = input_ids[:, self.prompt_length :]
        counts.scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Allowed(LogitsProcessor):
    """Rules out what a constraint does not allow.

    said_from: the guide is to be notified of what stands there from then on, as nobody else does; and the best token to be in
    time.
    """

    def __init__(self, guide: Guide, said_from: int | None = None):
        self._guide, self._said_from = guide, said_from

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._said_from is not None:
            for token in input_ids[0, self._said_from :].tolist():
                self._guide.told(token)
            self._said_from = input_ids.shape[1]
        mask = upload(self._guide.allowed(), scores.device)
        scores = scores.masked_fill(~mask[: scores.shape[1]], -torch.inf)
        if self._said_from is not None and (token := self._guide.in_time(best := int(scores.argmax(-1)))) != best:
            scores[:, :] = -torch.inf
            scores[:, token] = 0.0
        return scores


class Chooser(Protocol):
    """How a row chooses its tokens. It is asked once for each, in the order in which they are emitted.

    guide: what drafts may hold; None: anything. is_followed: it emits the best token, regardless of earlier ones, or the answer
    that the request brings, and need not be asked nor notified.
    """

    guide: Guide | None

    @property
    def is_followed(self) -> bool: ...

    def say(self, scores: Scores, slot: int, node: int) -> int:
        """The next token, by the scores behind this node of the slot."""

    def told(self, token: int) -> bool:
        """`token` was emitted; True ends the answer, as a stop text is complete with it."""


class Given:
    """Emits the answer that a request brings, regardless of the scores, which are waited for all the same.

    still_given: what is still to be emitted of it, a number of tokens at most.
    """

    guide: Guide | None = None
    is_followed = True

    def __init__(self, still_given: Callable[[int], Sequence[int]]):
        self._still_given = still_given

    def say(self, scores: Scores, slot: int, node: int) -> int:
        scores.best(slot, node)
        return self._still_given(1)[0]

    def told(self, token: int) -> bool:
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
        if self.guide:
            own.append(Allowed(self.guide))
        self.processors = _processors(target, config, prompt_ids, own)
        if self.guide and not self.draws and len(self.processors or ()) == 1:  # the best token mostly needs no mask
            self.processors = None
        self._stops = stop_texts(target, sampling, tokenizer)
        if self.draws:
            self._stream = torch.Generator(target.device).manual_seed(seed)
        self._text = torch.empty(1, 0, dtype=torch.int64)
        if not self.is_greedy or self._stops:
            self._text = torch.zeros(1, self.prompt_length + room, dtype=torch.int64, device=target.device)
            self._text[0, : self.prompt_length] = torch.tensor(prompt_ids)
        self._said = 0

    @property
    def is_greedy(self) -> bool:
        """The token with the highest score of those allowed is always the one."""
        return not self.processors and not self.draws

    @property
    def is_followed(self) -> bool:
        """See `Chooser`."""
        return self.is_greedy and self.guide is None and not self._stops

    def say(self, scores: Scores, slot: int, node: int) -> int:
        token = self._chosen(scores, slot, node)
        return self.guide.in_time(token) if self.guide else token

    def _chosen(self, scores: Scores, slot: int, node: int) -> int:
        if self.is_greedy:
            best = scores.best(slot, node)
            token = self.guide.settled(best) if self.guide else best
            if token is not None:
                return token
            assert self.guide
            return int(Allowed(self.guide)(self._text, scores.of(slot)[node][None].float()).argmax(-1))
        here = scores.of(slot)[node][None].float()
        if self.processors:
            with callers_device():
                here = self.processors(self._text[:, : self.prompt_length + self._said], here.clone())
        if self.draws:
            return int(torch.multinomial(here.softmax(-1), 1, generator=self._stream))
        return int(here.argmax(-1))

    def told(self, token: int) -> bool:
        ended = self.guide is not None and self.guide.told(token)
        if self.is_greedy and not self._stops:
            return ended
        self._text[0, self.prompt_length + self._said] = token
        self._said += 1
        return ended or bool(self._stops and self._stops(self._text[:, : self.prompt_length + self._said], None))


def own_processors(sampling: Sampling, prompt_length: int) -> LogitsProcessorList:
    """What transformers has no name for in a generation config: the caller's processors and the counting penalties."""
    own = LogitsProcessorList(own_copies(sampling.processors))
    if sampling.frequency_penalty or sampling.presence_penalty:
        own.append(CountPenalty(prompt_length, sampling.frequency_penalty, sampling.presence_penalty))
    return own


def guide_of(sampling: Sampling, grammars: Grammars | None, room: int) -> Guide | None:
    """What follows a constrained answer. Raises ConstraintError if nothing can be that."""
    if sampling.constraint is None:
        return None
    if grammars is None:
        raise UsageError("constraints need the model's tokenizer, and there is none.")
    return grammars.guide(sampling.constraint, room)


def stop_texts(target: TargetModel, sampling: Sampling, tokenizer: Any) -> StopStringCriteria | None:
    """What sees that a stop text is complete."""
    texts = sampling.stop or own_stop_strings(target)
    if not texts:
        return None
    if tokenizer is None:
        raise UsageError("stop texts need the model's tokenizer, and there is none: use stop_token_ids.")
    return StopStringCriteria(tokenizer, list(texts))


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
