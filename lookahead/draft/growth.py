"""Scratch memory of the threads that grow trees, and how many of them share a batch."""

from __future__ import annotations

import numpy as np

from lookahead.draft import planner
from lookahead.draft.arrays import MOST_THREADS, Block, scratch_block
from lookahead.native.threads import most_threads, run_in


class TreeBuilder:
    """first: the scratch block that is always there. nodes: of a tree at most. texts: as of the shared block."""

    def __init__(self, nodes: int, texts: int):
        self._sizes = nodes, texts
        self._scratch = [scratch_block(nodes, texts)]
        self._scratch_at = np.full(MOST_THREADS, self.first.address)

    @property
    def first(self) -> Block:
        return self._scratch[0]

    @property
    def scratch_at(self) -> int:
        """Address of the array of the threads' scratch blocks."""
        return int(self._scratch_at.ctypes.data)

    def threads(self, rows: int, nodes: int) -> int:
        """Choose how many threads grow the trees of that many rows, about `nodes` in all, and make their scratch memory."""
        threads = min(rows, nodes // planner.NODES_PER_THREAD, MOST_THREADS)
        threads = min(threads, most_threads()) if threads > 1 else 1
        while len(self._scratch) < threads:
            self._scratch.append(scratch_block(*self._sizes))
            self._scratch_at[len(self._scratch) - 1] = self._scratch[-1].address
        return threads

    def grow(self, blocks: tuple[int, int], limits: np.ndarray, spans: np.ndarray, single: bool, price: float) -> None:
        """Fill the trees of rows in this thread, see `planner.grow_rows`. blocks: the addresses of shared and rows."""
        arrays = limits.ctypes.data, spans.ctypes.data, 0
        run_in(1, planner.grow_rows, planner.TASK.pack(0, 0, len(limits), *arrays, single, price, *blocks, self.scratch_at))
