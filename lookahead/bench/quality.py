"""What quantizing costs in quality. In: models, texts. Out: their losses, and where greedy answers part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from lookahead.corpus.read import CorpusReport, expand, read_documents
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import chain, side_by_side
from lookahead.errors import CorpusError
from lookahead.forward.slots import slots_of
from lookahead.forward.target import TargetModel

MOST_TOKENS = 512  # of a text: the rest is left out
ANSWERED, ANSWER_TOKENS = 16, 64  # texts whose first half is answered, and tokens of an answer


@dataclasses.dataclass(frozen=True)
class Quality:
    """Of a model on texts. loss: nats per token. answers: greedy tokens after the first halves of the first texts."""

    loss: float
    tokens: int
    answers: list[list[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def texts_of(path: str, tokenizer: Any | None, vocab_size: int, rows: int) -> list[list[int]]:
    """The first documents of a corpus file (as build-trie reads them), as ids. Raises CorpusError if none has 2 tokens."""
    report = CorpusReport()
    documents = read_documents(expand([path]), tokenizer, report, vocab_size=vocab_size)
    texts = [[int(token) for token in document.token_ids][:MOST_TOKENS] for document in islice(documents, rows)]
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise CorpusError(report.problems[0] if report.problems else f"{path}: no usable document.")
    return texts


@torch.inference_mode()
def quality_of(target: TargetModel, texts: Sequence[Sequence[int]]) -> Quality:
    """texts: of ids, two or more of each."""
    total, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([text[: target.longest_text]], device=target.device)
        scores = target.model(input_ids=ids).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(scores, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
    engine = DecodingEngine(target, Drafter((), DraftOptions("off")), 1)
    requests = [engine.request(list(text[: max(1, len(text) // 2)]), ANSWER_TOKENS) for text in texts[:ANSWERED]]
    for _ in engine.run(requests):
        pass
    return Quality(total / tokens, tokens, [request.token_ids for request in requests])


@torch.inference_mode()
def loss_of(target: TargetModel, texts: Sequence[Sequence[int]]) -> float | None:
    """nats per token of texts as the model takes prompts in, its KV cache quantized where it is; None where none has 2 tokens.

    texts: of ids. Their last tokens are left out where the model has no room for them.
    """
    total, tokens = 0.0, 0
    for text in texts:
        ids = np.array(text[: min(MOST_TOKENS, target.longest_text)], np.int32)
        if len(ids) > 1:
            scores = _scores_of(target, ids)[:-1].float()
            after = torch.from_numpy(ids[1:].astype(np.int64)).to(scores.device)
            total += float(torch.nn.functional.cross_entropy(scores, after, reduction="sum"))
            tokens += len(after)
    return total / tokens if tokens else None


def _scores_of(target: TargetModel, ids: np.ndarray) -> torch.Tensor:
    """[tokens, vocab]"""
    if target.mode == "plain":
        scores: torch.Tensor = target.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(target.device)).logits[0]
        return scores
    slots = slots_of(target)
    slots.begin(slots.add(ids.tolist()))
    return slots.forward(side_by_side([chain(ids)], ["all"])).of(0)


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where greedy answers of two models part. text, token: counted from 0; None: all are the same."""

    identical: int
    answers: int
    text: int | None
    token: int | None


def parting(before: Quality, after: Quality) -> Parting:
    """The answers of one model against those of another."""
    first = []
    for text, (left, right) in enumerate(zip(before.answers, after.answers, strict=True)):
        if left != right:
            same = (a == b for a, b in zip(left, right, strict=False))
            place = next((place for place, equal in enumerate(same) if not equal), min(len(left), len(right)))
            first.append((place, text))
    earliest = min(first, default=(None, None))
    return Parting(len(before.answers) - len(first), len(before.answers), earliest[1], earliest[0])
