"""Rows of an engine's batch to requests. In: what an engine reports at each step. Out: drafts in the form that it takes.

ByTree: by request id, draft trees of a set width, as tokens and tree masks, for engines that verify a tree of as many nodes for
every row. Node 0 of a row's tree is its latest token. Where fewer were drafted, the rest is filler: a branch of its own below
the root, whose first token no other child of the root has. So no two children of a node are the same token, which verification
by sampling relies on, and nodes come after their parents.

    guessed: 7 -> 5 -> 6, 7 -> 8, width 6      tokens [7 5 8 6 0 0], parents [-1 0 0 1 0 4]

ById: by request id, chains of a set width with confidences: what is not drafted is filler, the last token again, of confidence
0. An engine reports only how many tokens a row has emitted, and the last one: the others are the first of its draft.

ByText: by text, for engines without request ids. A row that is where it was, with the text that it had, is the same request;
else any request with this text is, as rows may move. Two requests with one text (several samples of a prompt, as long as they
agree) may swap: they have emitted the same, so nothing is lost.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from lookahead.draft.tree import DraftTree
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
        """Take what a forward has emitted; return the draft tokens of each row, of its most probable path.

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
        """Find the request ids of rows that were in the batch before. before: the text of each row without its new tokens."""
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


LEAST = 1e-9  # of a path's probability


class Running(NamedTuple):
    """Describes a request as the engine has it.

    prefilled: tokens that it began or resumed with. longest: tokens that its text may have. text: int32 [prefilled].
    """

    prefilled: int
    longest: int
    text: Callable[[], np.ndarray]


class ById:
    """Fills arrays with the drafts of rows.

    tokens: int64 [rows or more, K]. confidences: float32, likewise: that a token is accepted if those before it are.
    """

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
        """Take what a forward has emitted; fill the first rows of the arrays.

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
            drafted, reach = tree.draft_tokens, tree.probabilities
            self.tokens[row, :drafted] = tree.token_ids[1:]
            self.confidences[row, :drafted] = reach[1:] / np.maximum(reach[:-1], LEAST)
            self._drafted[request_ids[row]] = self.tokens[row].tolist()
        for request_id in [each for each in self._drafted if each not in self.requests]:
            del self._drafted[request_id], self._begun[request_id]

    def _new(self, request_id: str, emitted: int, last: int, running: Running) -> NewTokens:
        """Return what a request has emitted. One that is new, or has resumed, begins."""
        requests = self.requests
        if request_id in requests and self._begun[request_id] == running.prefilled:
            tokens = [*self._drafted[request_id][: emitted - 1], last]
        else:
            requests.begin(request_id, running.text())
            self._begun[request_id] = running.prefilled
            tokens = [last]
        room = running.longest - requests.length(request_id) - len(tokens) - 1
        return NewTokens(request_id, tokens, max(0, room))


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Holds a request's text at a step: its prompt, at least one token, and what it has emitted, at least one token.

    late: the end of what it has emitted, where an engine that overlaps its steps has not added it to `output` yet.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    late: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output) + len(self.late)

    def emitted(self, begin: int) -> list[int]:
        """Return the emitted tokens but for the first `begin`."""
        return [*self.output[begin:], *self.late[max(0, begin - len(self.output)) :]]


class ByTree:
    """Drafts trees for the requests of one engine. width: nodes of each tree, root included."""

    def __init__(self, requests: Requests, width: int):
        self.requests, self.width = requests, width

    def step(self, request_ids: Sequence[str], texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens int64 [rows * width], mask int64 [rows * width * width]) after a forward, a row behind the other.

        mask[row, i, j] is 1 where node j is node i or stands before it on its path. A request that is new, or that has resumed
        with another text than it had, begins.
        """
        requests = self.requests
        new = []
        for request_id, text in zip(request_ids, texts, strict=True):
            prompt = len(text.prompt)
            if request_id not in requests or not prompt <= requests.length(request_id) < len(text):
                requests.begin(request_id, [*text.prompt, *text.emitted(0)[:-1]])
            new.append(NewTokens(request_id, text.emitted(requests.length(request_id) - prompt), self.width - 1))
        trees = requests.step(new)
        tokens = np.zeros((len(trees), self.width), np.int64)
        mask = np.zeros((len(trees), self.width, self.width), np.int64)
        for row, tree in enumerate(trees):
            write_tree(tree, tokens[row], mask[row])
        return tokens.ravel(), mask.ravel()

    def finish(self, request_ids: Sequence[str]) -> None:
        """End requests that have left the batch; one that was preempted begins again when it is back."""
        for request_id in request_ids:
            self.requests.finish(request_id)

    def clear(self) -> None:
        """End all requests."""
        self.requests.keep_only(())


def write_tree(tree: DraftTree, tokens: np.ndarray, mask: np.ndarray) -> None:
    """Fill the arrays of one row. tokens: int64 [width]. mask: int64 [width, width], zero."""
    width, nodes = len(tokens), min(len(tree), len(tokens))
    tokens[:nodes] = tree.token_ids[:nodes]
    mask[0, 0] = 1
    for node, parent in enumerate(tree.parents[1:nodes].tolist(), 1):
        mask[node] = mask[parent]
        mask[node, node] = 1
    if nodes < width:
        taken = tree.token_ids[1:nodes][tree.parents[1:nodes] == 0]  # by the root's children
        tokens[nodes:] = next(token for token in range(len(taken) + 1) if token not in taken)
        mask[nodes:, 0] = 1
        mask[nodes:, nodes:] = np.tri(width - nodes, dtype=np.int64)


def only_filler(last: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what `ByTree.step` does where nothing is drafted. last: the latest token of each row."""
    tokens = np.zeros((len(last), width), np.int64)
    tokens[:, 0] = last
    return tokens.ravel(), np.tile(np.tri(width, dtype=np.int64).ravel(), len(last))
