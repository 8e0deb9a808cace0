"""Rows checked without a model's weights. In: requests, the model's config and tokenizer. Out: what is wrong with each row.

What only answering can show stays unknown: a processor that fails, no memory, a constraint that the vocabulary cannot meet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from lookahead.decode.engine import room_of
from lookahead.decode.limits import check_samples
from lookahead.decode.sampling import check_vocabulary
from lookahead.errors import LookaheadError
from lookahead.forward.target import longest_text
from lookahead.job.prompt import prompts_of
from lookahead.job.request import Request
from lookahead.job.runner import JobOptions
from lookahead.job.setup import EngineSettings
from lookahead.models.load import read_config


@dataclasses.dataclass(frozen=True)
class Checked:
    """A row. problem: why it would be an error row, or "". prompt_tokens: of all its prompts."""

    request: Request
    problem: str = ""
    prompt_tokens: int = 0


def checked_rows(requests: Iterable[Request], settings: EngineSettings, options: JobOptions) -> Iterator[Checked]:
    """Each row, in order. Raises LookaheadError if the model's config or tokenizer, or an input, cannot be read."""
    config = read_config(settings.model, settings.trust_remote_code, settings.revision).get_text_config(decoder=True)
    vocab_size, longest, tokenizer = int(config.vocab_size), longest_text(config), settings.load_tokenizer()
    for request in requests:
        try:
            yield Checked(request, "", _prompt_tokens(request, tokenizer, options, vocab_size, longest))
        except LookaheadError as error:
            yield Checked(request, str(error))


def _prompt_tokens(request: Request, tokenizer: Any | None, options: JobOptions, vocab_size: int, longest: int) -> int:
    """Raises LookaheadError where the row could not be answered."""
    if request.problem:
        raise LookaheadError(f"{request.problem}.")
    prompts = prompts_of(request, tokenizer, options.chat, options.system, longest)
    check_samples(len(prompts) * (request.n or options.n), "the number of answers")
    sampling = dataclasses.replace(options.sampling, **request.sampling)
    check_vocabulary(sampling, vocab_size)
    for prompt_ids in prompts:
        room_of(prompt_ids, request.max_new_tokens or options.max_new_tokens, vocab_size, longest)
    if tokenizer is None and (sampling.stop or sampling.constraint or request.openai):
        raise LookaheadError("the model has no tokenizer, which stop texts, constraints and OpenAI lines need.")
    if sampling.constraint is not None and sampling.constraint != options.sampling.constraint:
        sampling.constraint.check()
    return sum(map(len, prompts))
