"""Scratch memory of the threads that grow trees, and how many of them share a batch."""

from __future__ import annotations

import numpy as np

from lookahead.draft import planner
from lookahead.draft.arrays import MOST_THREADS, Block, scratch_block
from lookahead.native.threads import most_threads, run_in


class TreeBuilder:
    """first: the scratch block that is always there. nodes: of a tree at most. texts: as of the shared block.

    scratch_at: address of the array of the threads' scratch blocks. limits, spans: of `grow`, see `planner.grow_rows`.
    """

    def __init__(self, nodes: int, texts: int):
        self._sizes = nodes, texts
        self._scratch = [scratch_block(nodes, texts)]
        self._scratch_addresses = np.full(MOST_THREADS, self.first.address)
        self.scratch_at = int(self._scratch_addresses.ctypes.data)
        self.limits, self.spans = np.zeros((1, 5), np.int64), np.zeros((1, 2), np.int64)
        self._arrays = int(self.limits.ctypes.data), int(self.spans.ctypes.data), 0

    @property
    def first(self) -> Block:
        return self._scratch[0]

    def threads(self, rows: int, nodes: int) -> int:
        """Choose how many threads grow the trees of that many rows, about `nodes` in all, and make their scratch memory."""
        threads = min(rows, nodes // planner.NODES_PER_THREAD, MOST_THREADS)
        threads = min(threads, most_threads()) if threads > 1 else 1
        while len(self._scratch) < threads:
            self._scratch.append(scratch_block(*self._sizes))
            self._scratch_addresses[len(self._scratch) - 1] = self._scratch[-1].address
        return threads

    def grow(self, blocks: tuple[int, int], row: int, most: int, longest: int, single: bool, price: float) -> int:
        """Grow the tree of one row in this thread, see `planner.grow_rows`; returns its nodes, the root included. blocks: the
        addresses of shared and rows. most, longest: draft tokens at most, in all and on one path.
        """
        self.limits[0, :3] = row, most, longest
        run_in(1, planner.grow_rows, planner.TASK.pack(0, 0, 1, *self._arrays, single, price, *blocks, self.scratch_at))
        return int(self.spans.item(1))
