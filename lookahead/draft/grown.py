"""Trees between growing and cutting, and what may constrain them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


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
