"""Rows of a batch by request id, draft trees as arrays of a set width. In: texts by request id. Out: tokens and tree masks.

For engines that verify a tree of as many nodes for every row. Node 0 of a row's tree is its latest token. Where fewer were
drafted, the rest is filler: a branch of its own below the root, whose first token no other child of the root has. So no two
children of a node are the same token, which verification by sampling relies on, and nodes come after their parents.

    guessed: 7 -> 5 -> 6, 7 -> 8, width 6      tokens [7 5 8 6 0 0], parents [-1 0 0 1 0 4]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lookahead.draft.tree import DraftTree
from lookahead.engines.requests import NewTokens, Requests


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A request's text at a step: its prompt, at least one token, and what it has emitted, at least one token.

    late: the end of what it has emitted, where an engine that overlaps its steps has not added it to `output` yet.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    late: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output) + len(self.late)

    def emitted(self, begin: int) -> list[int]:
        """Emitted tokens, but for the first `begin`."""
        return [*self.output[begin:], *self.late[max(0, begin - len(self.output)) :]]


class ByTree:
    """The requests of one engine. width: nodes of each tree, root included."""

    def __init__(self, requests: Requests, width: int):
        self.requests, self.width = requests, width

    def step(self, request_ids: Sequence[str], texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        """A forward is over. Returns (tokens int64 [rows * width], mask int64 [rows * width * width]), a row behind the other.

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
        """Requests that have left the batch; one that was preempted begins again when it is back."""
        for request_id in request_ids:
            self.requests.finish(request_id)

    def clear(self) -> None:
        """All requests have ended."""
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
        tokens[nodes:] = filler_for(tree.token_ids[1:nodes][tree.parents[1:nodes] == 0])
        mask[nodes:, 0] = 1
        mask[nodes:, nodes:] = np.tri(width - nodes, dtype=np.int64)


def filler_for(taken: np.ndarray) -> int:
    """The smallest token id that is not `taken`, the tokens of the root's children."""
    return next(token for token in range(len(taken) + 1) if token not in taken)


def only_filler(last: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """What `ByTree.step` returns where nothing is drafted. last: the latest token of each row."""
    tokens = np.zeros((len(last), width), np.int64)
    tokens[:, 0] = last
    return tokens.ravel(), np.tile(np.tri(width, dtype=np.int64).ravel(), len(last))
