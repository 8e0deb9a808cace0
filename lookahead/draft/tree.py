"""The draft tree of one step. Plain numpy; knows nothing of where drafts come from or who verifies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np

GIVEN, GRAMMAR = -1, -2  # sources that no drafter owns: roots and what a caller brings, tokens that a grammar forces


@dataclasses.dataclass(slots=True, eq=False)
class DraftTree:
    """Draft tokens, parents before children. Node 0 is the root: the last accepted token.

    token_ids      int32 [nodes]
    parents        int32 [nodes], -1 for the root
    probabilities  float32 [nodes], that the path from the root to this node is what the model emits (root: 1)
    sources        int32 [nodes], index into the drafter's source names, or GIVEN (the root) or GRAMMAR
    matches        int32 [nodes], tokens of the context that the best occurrence for this node agrees with (root: 0)
    """

    token_ids: np.ndarray
    parents: np.ndarray
    probabilities: np.ndarray
    sources: np.ndarray
    matches: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def draft_tokens(self) -> int:
        """Nodes below the root."""
        return len(self.token_ids) - 1

    def first(self, nodes: int) -> DraftTree:
        """The tree of its first nodes, the root included."""
        return DraftTree(
            self.token_ids[:nodes], self.parents[:nodes], self.probabilities[:nodes], self.sources[:nodes], self.matches[:nodes]
        )

    def depths(self) -> np.ndarray:
        """int64 [nodes]: tokens between the root and each node (root: 0)."""
        depths = np.zeros(len(self), np.int64)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def is_chain(self) -> bool:
        """True if no node has two children."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def follow(self, next_token: Callable[[int, list[int]], int | None]) -> tuple[list[int], list[int]]:
        """Walk from the root as long as the tree holds what is emitted.

        `next_token`(node, so_far) gives the token after `node`, whose path below the root is `so_far`; None ends the walk.
        Returns (all tokens emitted, nodes of the path walked, root included). Where branches share no prefix, the walk
        goes along all that agree and returns the one that agrees longest.
        """
        parents, token_ids = self.parents.tolist(), self.token_ids.tolist()
        emitted: list[int] = []
        reached = [0]
        while (token := next_token(reached[0], emitted)) is not None:
            emitted.append(token)
            following = _children(parents, token_ids, reached, token)
            if not following:
                break
            reached = following
        path = [reached[0]]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        return emitted, path[::-1]


def _children(parents: list[int], token_ids: list[int], nodes: list[int], token_id: int) -> list[int]:
    """Find the children of `nodes`, which ascend, that are this token; children come after their parents."""
    found, node = [], nodes[0]
    try:
        while True:
            node = token_ids.index(token_id, node + 1)
            if parents[node] in nodes:
                found.append(node)
    except ValueError:
        return found


@dataclasses.dataclass(slots=True, eq=False)
class TreeBatch:
    """The trees of slots side by side, slot by slot: what one forward gets. A slot may bring nothing.

    token_ids  int32 [tokens]
    parents    int32 [tokens], within each tree; -1 for roots
    sizes      int64 [slots], tokens of each
    wanted     int64 [slots], of them, the last ones, after which scores are wanted: all of a draft tree, one or none of a chunk
    """

    token_ids: np.ndarray
    parents: np.ndarray
    sizes: np.ndarray
    wanted: np.ndarray

    def tree(self, slot: int) -> DraftTree | None:
        """Return the tree of one slot, as if its tokens were certain."""
        begin, size = int(self.sizes[:slot].sum()), int(self.sizes[slot])
        if not size:
            return None
        tree = chain(self.token_ids[begin : begin + size])
        tree.parents = self.parents[begin : begin + size]
        return tree


Wanted = Literal["all", "last", "none"]  # scores, after which nodes of a tree


def side_by_side(trees: Sequence[DraftTree | None], wanted: Sequence[Wanted]) -> TreeBatch:
    """One tree for each slot, or None. wanted: of each "all" scores, those of the "last" token, or "none"."""
    shown = [tree for tree in trees if tree is not None]
    sizes = np.array([0 if tree is None else len(tree) for tree in trees], np.int64)
    counts = {"none": 0, "last": 1, "all": 1 << 40}
    return TreeBatch(
        np.concatenate([tree.token_ids for tree in shown] or [np.empty(0, np.int32)]),
        np.concatenate([tree.parents for tree in shown] or [np.empty(0, np.int32)]),
        sizes,
        np.minimum(sizes, [counts[want] for want in wanted]),
    )


@dataclasses.dataclass(slots=True)
class Accepted:
    """Result of a step for one row.

    token_ids: 1 to branch_length + 1 tokens; the last is the model's own.
    nodes: the root and the accepted draft nodes, in path order.
    """

    token_ids: list[int]
    nodes: Sequence[int]


class Scores(Protocol):
    """Interface of a forward's scores, as `StepBatch.accept` needs it."""

    def native(self) -> tuple[int, int, int]:
        """(kind, address, vocabulary) of scores for kernels (step/best_tokens.py); kind NONE: a device has them."""

    def best_tokens(self) -> np.ndarray:
        """int64: the best token of each row of scores, where a device has them."""

    def best_few(self, rows: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """(int32 [rows, most] token ids, float32 scores) of these rows of scores, best first, where a device has them."""


def name_of(source: int, source_names: Sequence[str]) -> str:
    """Return the name of a tree's source."""
    return source_names[source] if source >= 0 else "padding" if source == GIVEN else "grammar"


def root_only(token_id: int) -> DraftTree:
    """The tree of a plain step: nothing drafted."""
    return DraftTree(np.array([token_id], np.int32), *ROOT)


def _unchanging(values: list[float], dtype: type) -> np.ndarray:
    array: np.ndarray = np.array(values, dtype)
    array.flags.writeable = False
    return array


# What all trees of one node have in common.
ROOT = _unchanging([-1], np.int32), _unchanging([1], np.float32), _unchanging([-1], np.int32), _unchanging([0], np.int32)


def chain(token_ids: list[int] | np.ndarray, source: int = GIVEN) -> DraftTree:
    """One branch: token_ids[0] is the root."""
    n = len(token_ids)
    sources = np.full(n, source, np.int32)
    sources[0] = GIVEN
    parents = np.arange(-1, n - 1, dtype=np.int32)
    return DraftTree(np.asarray(token_ids, np.int32), parents, np.ones(n, np.float32), sources, np.zeros(n, np.int32))


def as_parallel(tree: DraftTree, budget: int) -> DraftTree:
    """The branches of `tree` side by side, no prefix shared, most probable leaf first, until `budget` tokens are used."""
    leaf = np.ones(len(tree), bool)
    leaf[tree.parents[1:]] = False
    leaf[0] = False
    nodes: list[int] = [0]
    parents: list[int] = [-1]
    parent_of = tree.parents.tolist()
    for node in sorted(np.flatnonzero(leaf).tolist(), key=lambda n: -tree.probabilities[n]):
        path = []
        while node > 0:
            path.append(node)
            node = parent_of[node]
        path = path[::-1][: budget + 1 - len(nodes)]
        for depth, step in enumerate(path):
            parents.append(0 if depth == 0 else len(nodes) - 1)
            nodes.append(step)
        if len(nodes) > budget:
            break
    picked = np.array(nodes)
    taken = (tree.probabilities[picked], tree.sources[picked], tree.matches[picked])
    return DraftTree(tree.token_ids[picked], np.array(parents, np.int32), *taken)
