"""Rows of a batch by request id, drafts as arrays of a set width. In: counts and last tokens. Out: tokens and confidences.

For engines that verify as many draft tokens of every row, or choose them by confidence: what is not drafted is filler, the
last token again, of confidence 0. An engine reports only how many tokens a row has emitted, and the last one: the others are
the first of its draft, filler included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from lookahead.draft.tree import DraftTree
from lookahead.engines.requests import NewTokens, Requests

LEAST = 1e-9  # of a path's probability


class Running(NamedTuple):
    """A request as the engine has it. prefilled: tokens that it began or resumed with. longest: tokens that its text may have.

    text: int32 [prefilled], those tokens.
    """

    prefilled: int
    longest: int
    text: Callable[[], np.ndarray]


class ById:
    """tokens: int64 [rows or more, K]. confidences: float32, likewise: that a token is accepted if those before it are."""

    def __init__(self, requests: Requests, tokens: np.ndarray, confidences: np.ndarray):
        self.requests, self.tokens, self.confidences = requests, tokens, confidences
        self._begun: dict[str, int] = {}  # request id -> tokens that it was prefilled with
        self._drafted: dict[str, list[int]] = {}  # request id -> its latest row of tokens

    def step(
        self,
        request_ids: Sequence[str],
        emitted: np.ndarray,
        last: np.ndarray,
        running: Collection[str],
        about: Callable[[str], Running],
    ) -> None:
        """A forward is over: fill the first rows of the arrays.

        request_ids: of the batch's rows. emitted, last: [rows], tokens that each has emitted, 0 while it prefills, and the last
        of them. running: ids of all requests that the engine has.
        """
        count = len(request_ids)
        self.tokens[:count] = last[:, None]
        self.confidences[:count] = 0
        self.requests.keep_only(running)
        new: dict[int, NewTokens] = {}
        for row, request_id in enumerate(request_ids):
            if emitted[row]:
                new[row] = self._new(request_id, int(emitted[row]), int(last[row]), about(request_id))
        trees = self.requests.step(list(new.values()), count - len(new))
        for row, tree in zip(new, trees, strict=True):
            self._write(row, tree)
            self._drafted[request_ids[row]] = self.tokens[row].tolist()
        for request_id in [each for each in self._drafted if each not in self.requests]:
            del self._drafted[request_id], self._begun[request_id]

    def _new(self, request_id: str, emitted: int, last: int, running: Running) -> NewTokens:
        """What a request has emitted. One that is new, or has resumed, begins."""
        requests = self.requests
        if request_id in requests and self._begun[request_id] == running.prefilled:
            tokens = [*self._drafted[request_id][: emitted - 1], last]
        else:
            requests.begin(request_id, running.text())
            self._begun[request_id] = running.prefilled
            tokens = [last]
        room = running.longest - requests.length(request_id) - len(tokens) - 1
        return NewTokens(request_id, tokens, max(0, room))

    def _write(self, row: int, tree: DraftTree) -> None:
        """Put a chain into the arrays."""
        drafted, reach = tree.draft_tokens, tree.probabilities
        self.tokens[row, :drafted] = tree.token_ids[1:]
        self.confidences[row, :drafted] = reach[1:] / np.maximum(reach[:-1], LEAST)
