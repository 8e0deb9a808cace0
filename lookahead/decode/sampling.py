"""How a row chooses its tokens. In: the model's scores at one node. Out: the token that plain decoding would say there.

Processors and stopping rules are transformers' own, so that a row says what `model.generate` says; they run along the accepted
path only. A row draws from a random stream of its own, once for each token it says, so its sample depends neither on drafts nor
on the rows beside it: it is what `generate` gives after `torch.manual_seed` with the row's seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StopStringCriteria

from lookahead.decode.batch import upload
from lookahead.decode.constraint import Constraint, Grammars, Guide
from lookahead.decode.generation_config import bad_word_ids, generation_config, own_stop_strings, quiet_generation
from lookahead.decode.limits import check_sampling
from lookahead.decode.own_state import own_copies
from lookahead.errors import UsageError

if TYPE_CHECKING:
    from lookahead.decode.model import TargetModel
    from lookahead.decode.slots import Scores


SamplingMode = Literal["greedy", "model"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What a request asks of its tokens. None: what `sampling` says of the first five, else the model's generation config.

    temperature: 0 is greedy decoding, which uses none of the next four. top_k: the most probable tokens only (0: all).
    top_p: the least set of tokens with this mass. min_p: tokens at least so probable against the best. typical_p: as
    transformers' TypicalLogitsWarper.
    frequency_penalty, presence_penalty: taken off the score of a token for each time, or once, it was said in the answer.
    logit_bias: token id -> added to its score. bad_words_ids: sequences never said; bad_words: the same as texts, at the
    beginning and behind a space. Both in place of those of the generation config. stop: texts after which an answer ends, in
    place of the generation config's stop_strings; it ends at stop_token_ids, too; a single text or id may be given as such.
    processors: transformers LogitsProcessors of your own, applied before sampling, copied for each answer. constraint: what the
    answer must look like; other tokens are ruled out before top_k and its like choose among the rest.
    sampling: "greedy": temperature 0 and no limits where they are None. "model": then do_sample, temperature, top_k, top_p,
    min_p, typical_p, top_h, epsilon_cutoff and eta_cutoff are those of `model.generate`, by the model's generation config.
    Raises UsageError for what is out of range or more than limits.py allows.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    bad_words_ids: Sequence[Sequence[int]] = ()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    processors: Sequence[LogitsProcessor] = ()
    constraint: Constraint | None = None
    bad_words: Sequence[str] = ()
    sampling: SamplingMode = "greedy"

    def __post_init__(self) -> None:
        check_sampling(self)
        if isinstance(self.processors, LogitsProcessor):
            object.__setattr__(self, "processors", (self.processors,))


GREEDY = Sampling()


class CountPenalty(LogitsProcessor):
    """Frequency and presence penalty over what was said after the prompt."""

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros_like(scores)
        said = input_ids[:, self.prompt_length :]
        counts.scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Allowed(LogitsProcessor):
    """Rules out what a constraint does not allow.

    said_from: the guide is to be told what stands there from then on, as nobody else does; and the best token to be in time.
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
    """How a row chooses its tokens. It is asked once for each, in the order in which they are said.

    guide: what drafts may hold; None: anything.
    """

    guide: Guide | None

    def say(self, scores: Scores, slot: int, node: int) -> int:
        """The next token, by the scores behind this node of the slot."""

    def told(self, token: int) -> bool:
        """`token` was said; True ends the answer, as a stop text is complete with it."""


class Given:
    """Says a given answer, whatever the scores, which are waited for all the same."""

    guide: Guide | None = None

    def __init__(self, token_ids: Sequence[int]):
        self._next = iter(token_ids)

    def say(self, scores: Scores, slot: int, node: int) -> int:
        scores.best(slot, node)
        return next(self._next)

    def told(self, token: int) -> bool:
        return False


class Sampler:
    """One row's choices, as `model.generate` makes them. seed: of its random stream. room: tokens that it may say at most."""

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


def seed_of(seed: int, row_id: Any, sample: int = 0) -> int:
    """The seed of one row's random stream (of one of its samples), the same in whatever order rows come."""
    digest = hashlib.blake2b(f"{seed}\n{sample}\n{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def own_processors(sampling: Sampling, prompt_length: int) -> LogitsProcessorList:
    """What transformers has no name for in a generation config: the caller's processors and the counting penalties."""
    own = LogitsProcessorList(own_copies(sampling.processors))
    if sampling.frequency_penalty or sampling.presence_penalty:
        own.append(CountPenalty(prompt_length, sampling.frequency_penalty, sampling.presence_penalty))
    return own


def guide_of(sampling: Sampling, grammars: Grammars | None, room: int) -> Guide | None:
    """What follows an answer that must be something. Raises ConstraintError if nothing can be that."""
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
