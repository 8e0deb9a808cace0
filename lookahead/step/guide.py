"""Constrains draft trees. In: a grown tree and a guide. Out: the nodes that may come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lookahead.draft.arrays import TREE_PARENTS, TREE_TOKENS, Block


class Guide(Protocol):
    """Constraint on what a row may emit (decode/constraint.py)."""

    def forced(self) -> list[int]:
        """Tokens that come next, as nothing else may."""

    def possible(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Tell which nodes of a tree could be accepted; parents come before children, node 0 is the token emitted last."""


def keep_possible(rows: Block, number: int, guide: Guide) -> int:
    """Take out of a row's tree what can never be accepted; returns how many nodes are left."""
    nodes = rows.nodes[number]
    tree, reach = rows.trees[number, :, :nodes], rows.reach[number, :, :nodes]
    kept = np.flatnonzero(guide.possible(tree[TREE_TOKENS].tolist(), tree[TREE_PARENTS].tolist()))
    if len(kept) < nodes:
        index_of = np.zeros(nodes + 1, np.int32)  # of each old node among those kept; the last: of the root's parent
        index_of[kept], index_of[-1] = np.arange(len(kept)), -1
        tree[:, : len(kept)], reach[:, : len(kept)] = tree[:, kept], reach[:, kept]
        tree[TREE_PARENTS, : len(kept)] = index_of[tree[TREE_PARENTS, : len(kept)]]
        rows.nodes[number] = len(kept)
    return len(kept)
