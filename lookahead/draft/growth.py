"""Where trees are grown: scratch memory of threads, and how many share a batch. In: what to grow. Out: the rows' trees."""

from __future__ import annotations

import numpy as np

from lookahead.draft import planner
from lookahead.draft.arrays import MOST_THREADS, Block, scratch_block
from lookahead.native.threads import most_threads, run_in


class TreeBuilder:
    """first: the scratch block that is always there. num_nodes: of the latest drafts of several rows.

    nodes: of a tree at most. texts: as of the shared block.
    """

    def __init__(self, nodes: int, texts: int):
        self._sizes = nodes, texts
        self._scratch = [scratch_block(nodes, texts)]
        self._scratch_at = np.full(MOST_THREADS, self.first.address)
        self.num_nodes = 0

    @property
    def first(self) -> Block:
        return self._scratch[0]

    @property
    def scratch_at(self) -> int:
        """Where the addresses of the threads' scratch blocks stand."""
        return int(self._scratch_at.ctypes.data)

    def threads(self, rows: int, nodes: int) -> int:
        """How many are to grow the trees of that many rows, about `nodes` together; each has scratch memory then."""
        threads = min(rows, nodes // planner.NODES_PER_THREAD, MOST_THREADS)
        threads = min(threads, most_threads()) if threads > 1 else 1
        while len(self._scratch) < threads:
            self._scratch.append(scratch_block(*self._sizes))
            self._scratch_at[len(self._scratch) - 1] = self._scratch[-1].address
        return threads

    def grow(self, blocks: tuple[int, int], limits: np.ndarray, spans: np.ndarray, single: bool, price: float) -> None:
        """Fill the trees of rows. See `planner.grow_rows`. blocks: addresses of the shared block and of the rows'."""
        arrays = limits.ctypes.data, spans.ctypes.data, 0
        args = planner.TOLD.pack(0, 0, len(limits), *arrays, single, price, *blocks, self.scratch_at)
        run_in(self.threads(len(limits), self.num_nodes), planner.grow_rows, args)
        self.num_nodes = int(spans[:, 1].sum()) if len(spans) > 1 else 0
