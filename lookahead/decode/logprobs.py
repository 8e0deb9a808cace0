"""Computes log-probabilities of emitted tokens. In: the model's raw scores. Out: log-probabilities, under the model's own
distribution.

That is the softmax of the scores as the model gives them, in float32: before temperature, penalties and everything else that a
request asks of the choice. So a token that a penalty or a constraint has pushed may be improbable, and the best one another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

AT_ONCE = 64  # rows that are taken to float32 together


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability (natural logarithm) of an emitted token; (token id, log-probability) of the most probable, descending."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], most: int) -> list[TokenLogprobs]:
    """Compute log-probabilities of the tokens emitted at these rows of scores. logits: [any, vocab]. most: of the most
    probable, that many.

    One pass over a row for its sum and one for the best; nothing is sorted. A row's bits do not depend on the others.
    """
    found: list[TokenLogprobs] = []
    for begin in range(0, len(rows), AT_ONCE):
        emitted = token_ids[begin : begin + AT_ONCE]
        scores = logits[torch.tensor(rows[begin : begin + AT_ONCE], device=logits.device)].float()  # [emitted, vocab]
        own = scores.gather(1, torch.tensor(emitted, device=logits.device)[:, None])
        best = scores.topk(min(most, scores.shape[1]))
        # Row by row: how torch splits a sum depends on how many rows there are, and a row's bits must not.
        sums = torch.cat([row.clone().logsumexp(0, keepdim=True) for row in scores])[:, None]
        values = (torch.cat([own, best.values], 1) - sums).tolist()
        for token, (logprob, *others), ids in zip(emitted, values, best.indices.tolist(), strict=True):
            found.append(TokenLogprobs(token, logprob, tuple(zip(ids, others, strict=True))))
    return found
