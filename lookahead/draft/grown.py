"""Trees between growing and cutting, and what constrains them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lookahead.draft.arrays import TREE_PARENTS, TREE_TOKENS, Block


class Guide(Protocol):
    """Constraint on what a row may emit (decode/constraint.py)."""

    def forced(self) -> list[int]:
        """Tokens that come next, as nothing else may."""

    def possible(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a tree could be accepted; parents come before children, node 0 is the token emitted last."""


@dataclasses.dataclass(slots=True)
class GrownTrees:
    """The trees of some rows, as grown, most probable nodes first. They hold until the next `Drafter.grow`.

    rows           of drafter.py
    limits         int64 [rows, 5], see `planner.grow_rows`
    probabilities  float32, calibrated, of paths: those of all rows' nodes in one array
    spans          int64 [rows, 2]: where a tree begins there, and its nodes, root included
    """

    rows: Sequence[Any]
    limits: np.ndarray
    probabilities: np.ndarray
    spans: np.ndarray


def forced_tokens(guides: Sequence[Guide | None], limits: np.ndarray) -> np.ndarray:
    """int64: what each row must emit next, one row behind the other; notes in `limits` where a row's begin and end."""
    forced: list[int] = []
    for k, guide in enumerate(guides):
        limits[k, 3] = len(forced)
        forced += guide.forced() if guide else ()
        limits[k, 4] = len(forced)
    return np.array(forced, np.int64)


def keep_possible(rows: Block, number: int, guide: Guide) -> int:
    """Take out of a row's tree what can never be accepted; returns how many nodes are left."""
    nodes = rows.nodes[number]
    tree, reach = rows.trees[number, :, :nodes], rows.reach[number, :, :nodes]
    kept = np.flatnonzero(guide.possible(tree[TREE_TOKENS].tolist(), tree[TREE_PARENTS].tolist()))
    if len(kept) < nodes:
        place_of = np.zeros(nodes + 1, np.int32)  # of each old node among those kept; the last: of the root's parent
        place_of[kept], place_of[-1] = np.arange(len(kept)), -1
        tree[:, : len(kept)], reach[:, : len(kept)] = tree[:, kept], reach[:, kept]
        tree[TREE_PARENTS, : len(kept)] = place_of[tree[TREE_PARENTS, : len(kept)]]
        rows.nodes[number] = len(kept)
    return len(kept)
