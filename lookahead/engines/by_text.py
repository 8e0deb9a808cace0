"""Rows of a batch distinguished by their text. In: the texts of a batch's rows at each step. Out: their drafts.

For engines that hand over texts without request ids. A row that is where it was, with the text that it had, is the same
request; else any request with this text is, as rows may move. Two requests with one text (several samples of a prompt, as
long as they agree) may swap: they have emitted the same, so nothing is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from lookahead.engines.requests import NewTokens, Requests


class ByText:
    """Finds out which request each row of a batch is, and begins and finishes them."""

    def __init__(self, requests: Requests):
        self.requests = requests
        self._at: dict[int, int] = {}  # row of the latest batch -> request id
        self._next = 0  # request id

    def step(
        self, emitted: Sequence[Sequence[int]], lengths: Sequence[int] | np.ndarray, texts: np.ndarray, longest: int
    ) -> list[list[int]]:
        """A forward is over. Returns the draft tokens of each row: of its most probable path.

        emitted: new tokens of each row; none of one that is still prefilling. lengths: tokens of each row's text, the new ones
        included. texts: int32 [rows or more, longest text or more]. longest: tokens that a text may have.
        """
        rows = [row for row, tokens in enumerate(emitted) if len(tokens)]
        before = {row: texts[row, : int(lengths[row]) - len(emitted[row])] for row in rows}
        found = self._found(before)
        self.requests.keep_only(set(found.values()))
        for row in rows:
            if row not in found:
                found[row] = self._next
                self.requests.begin(self._next, before[row])
                self._next += 1
        self._at = found
        new = [NewTokens(found[row], emitted[row], max(0, longest - int(lengths[row]) - 1)) for row in rows]
        drafts: list[list[int]] = [[] for _ in emitted]
        for row, tree in zip(rows, self.requests.step(new, len(emitted) - len(rows)), strict=True):
            drafts[row] = tree.token_ids[1:].tolist()
        return drafts

    def _found(self, before: dict[int, np.ndarray]) -> dict[int, int]:
        """Request ids of the rows that were there before. before: the text of each row without its new tokens."""
        requests, found = self.requests, dict[int, int]()
        left = {row: known for row, known in self._at.items() if known in requests}
        for row, text in before.items():
            known = left.get(row)
            if known is not None and requests.has_text(known, text):
                found[row] = left.pop(row)
        if not left or len(found) == len(before):
            return found
        by_length: dict[int, list[int]] = defaultdict(list)
        for known in left.values():
            by_length[requests.length(known)].append(known)
        for row, text in before.items():
            if row in found:
                continue
            alike = by_length[len(text)]
            moved = next((known for known in alike if requests.has_text(known, text)), None)
            if moved is not None:
                alike.remove(moved)
                found[row] = moved
        return found
