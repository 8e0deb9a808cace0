"""One request. In: a prompt and what the caller asks. Out: the tokens emitted so far, and what decoding them took."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from lookahead.decode.chooser import Chooser
from lookahead.decode.logprobs import TokenLogprobs
from lookahead.decode.sampling import GREEDY, Sampling
from lookahead.decode.text import text_of, without_stop
from lookahead.draft.counts import DraftCounts
from lookahead.draft.explain import Observer
from lookahead.errors import LookaheadError

FinishReason = Literal["", "stop", "length", "error"]


@dataclasses.dataclass
class Generation(DraftCounts):
    """One request, waiting, running or finished.

    prompt_ids: its text so far. room: maximum number of new tokens. stop_ids, stop: tokens and texts that end the answer.
    seed: of its random stream. token_ids: the output, with the token that ended it. finish_reason: "" until then. error: why
    it failed. seconds: from its first step to its last. What its steps drafted and accepted: see `DraftCounts`.
    observer: is notified of what each decode step drafted and accepted.
    forced: an answer that is taken as the model's choices, regardless of its scores, which are computed all the same.
    chooser: chooses tokens instead of `sampling` and `seed`; not where the model's own `generate` decodes.
    logprobs: how many of the most probable tokens are kept with each emitted token, in token_logprobs; None: none are.
    prompt_logprobs: the same of the prompt's tokens from the one at index prompt_logprobs_start (1 or more) on, in
    prompt_token_logprobs; room may be 0 then.
    complete: of a constrained answer that has ended, whether it is all that the constraint asks for; None: unconstrained.
    streamed: somebody reads the tokens step by step, so that no call takes several steps.
    """

    prompt_ids: list[int]
    room: int
    stop_ids: frozenset[int]
    sampling: Sampling = GREEDY
    seed: int = 0
    observer: Observer | None = None
    forced: Sequence[int] | None = None
    chooser: Chooser | None = None
    logprobs: int | None = None
    stop: Sequence[str] = ()
    token_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 1
    prompt_token_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    complete: bool | None = None
    streamed: bool = False
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason = ""
    error: Exception | None = None
    seconds: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def edl(self) -> float | None:
        """Effective decoding length: tokens per decode step, None without one. The first token is the prefill's."""
        return (len(self.token_ids) - 1) / self.steps if self.steps else None

    @property
    def text_ids(self) -> list[int]:
        """Tokens whose text is that of the answer: without the token that ended it, special or not."""
        ended = self.finish_reason == "stop" and bool(self.token_ids) and self.token_ids[-1] in self.stop_ids
        return self.token_ids[:-1] if ended else self.token_ids

    def add(self, token: int, stops: bool = False) -> None:
        """Append an emitted token. stops: a stop text is complete with it."""
        self.token_ids.append(token)
        if stops or token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.room:
            self.finish_reason = "length"

    def text(self, tokenizer: Any) -> str:
        """Decode the answer. Where it does not include the stop text, log-probabilities end before that, too."""
        if self.sampling.include_stop or not self.stop:
            return text_of(tokenizer, self.text_ids)
        text, tokens = without_stop(tokenizer, self.text_ids, self.stop)
        if tokens < len(self.text_ids):
            del self.token_logprobs[tokens:]
        return text

    def remaining_forced(self, most: int) -> Sequence[int]:
        """Return the next tokens of a forced answer, at most that many; none if nothing is forced."""
        return () if self.forced is None else self.forced[len(self.token_ids) : len(self.token_ids) + most]

    def fail(self, error: Exception) -> None:
        self.finish_reason, self.error = "error", error


def room_of(prompt_ids: Sequence[int], max_new_tokens: int, vocab_size: int, longest: int) -> int:
    """Maximum number of tokens of an answer. longest: positions of the model. max_new_tokens 0: only the prompt is scored, the
    last token of which takes no position.

    Raises LookaheadError for an empty prompt, one that leaves no room, and unknown ids.
    """
    if not len(prompt_ids):
        raise LookaheadError("the prompt is empty.")
    unknown = next((t for t in prompt_ids if not 0 <= t < vocab_size), None)
    if unknown is not None:
        raise LookaheadError(f"prompt token id {unknown} is outside the model's vocabulary of {vocab_size}.")
    room = min(max_new_tokens, longest + (not max_new_tokens) - len(prompt_ids))
    if room < min(1, max_new_tokens):
        raise LookaheadError(
            f"the prompt has {len(prompt_ids)} tokens and the model has {longest} positions: no room for an answer."
        )
    return room
