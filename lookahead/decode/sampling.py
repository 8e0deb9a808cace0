"""Sampling parameters of a request. In: fields, from a row or from Python. Out: checked values."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformers import LogitsProcessor

from lookahead.decode import limits
from lookahead.decode.constraint import Constraint
from lookahead.decode.sampling_options import SamplingFields
from lookahead.errors import UsageError

SamplingMode = Literal["greedy", "model"]


@dataclasses.dataclass(frozen=True)
class Sampling(SamplingFields):
    """Sampling parameters of a request. None: what `sampling` sets of the first five, else the model's generation config.

    temperature: 0 is greedy decoding, which uses none of the next four. top_k: the most probable tokens only (0: all).
    top_p: the least set of tokens with this mass. min_p: tokens at least so probable against the best. typical_p: as
    transformers' TypicalLogitsWarper.
    frequency_penalty, presence_penalty: taken off the score of a token for each time, or once, it was emitted in the answer.
    logit_bias: token id -> added to its score. bad_words_ids: sequences never emitted; bad_words: the same as texts, at the
    beginning and behind a space. Both instead of those of the generation config. stop: texts after which an answer ends,
    instead of the generation config's stop_strings; it ends at stop_token_ids, too; a single text or id may be given as such.
    include_stop: the stop text is part of the answer's text and log-probabilities.
    processors: transformers LogitsProcessors of your own, applied before sampling, copied for each answer. constraint: what the
    answer must look like; other tokens are ruled out before top_k and its like choose among the rest.
    sampling: "greedy": temperature 0 and no limits where they are None. "model": then do_sample, temperature, top_k, top_p,
    min_p, typical_p, top_h, epsilon_cutoff and eta_cutoff are those of `model.generate`, by the model's generation config.
    Raises UsageError for what is out of range or more than limits.py allows.
    """

    min_new_tokens: int | None = None
    bad_words_ids: Sequence[Sequence[int]] = ()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    processors: Sequence[LogitsProcessor] = ()
    constraint: Constraint | None = None
    bad_words: Sequence[str] = ()
    sampling: SamplingMode = "greedy"
    include_stop: bool = True

    def __post_init__(self) -> None:
        names = (*limits.NUMBERS, *limits.COUNTS, *limits.LISTS, *limits.OTHERS, "constraint")
        for name, value in limits.checked({name: getattr(self, name) for name in names}).items():
            object.__setattr__(self, name, value)
        if isinstance(self.processors, LogitsProcessor):
            object.__setattr__(self, "processors", (self.processors,))


GREEDY = Sampling()


def check_vocabulary(sampling: Sampling, vocab_size: int) -> None:
    """Raises UsageError for a token id that the model does not have, and for a bias that leaves no token."""
    named = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": sampling.logit_bias}
    for name, ids in {**named, "bad_words_ids": itertools.chain(*sampling.bad_words_ids)}.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                raise UsageError(f"{name} holds token id {token}, outside the model's vocabulary of {vocab_size}.")
    if sum(bias <= limits.LEAST_BIAS for bias in sampling.logit_bias.values()) >= vocab_size:
        raise UsageError("logit_bias rules out every token of the vocabulary.")


def seed_of(seed: int, row_id: Any, sample: int = 0) -> int:
    """The seed of one row's random stream (of one of its samples), the same in any order rows come."""
    digest = hashlib.blake2b(f"{seed}\n{sample}\n{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
