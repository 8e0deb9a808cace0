"""What a draft budget knows, as arrays that its kernels share. In: a cost curve. Out: the books of a budget without steps."""

from __future__ import annotations

import numpy as np

from lookahead.budget.cost import BUCKETED, LATEST, OWN, SIZES, CostCurve, faster_of
from lookahead.budget.profile import Forward
from lookahead.native.kernels import Block, Layout, inlined, unpacker

# The state. Sums over steps, the past fading: steps of plain decoding that were saved or taken, and what was spent in such
# steps (a job's first forward may take a hundred times as long as others, and is to count as one). Then seconds of a step
# outside of its forward, without drafts and with, how many steps of either kind show it, and seconds that may go into looks.
# The latest choice: seconds that it saves, that its drafts save, and the probability at which one more node would pay.
PLAIN, SPENT, BESIDE, BESIDE_DRAFTED, UNDRAFTED, DRAFTED, SPARE, SAVED, GAINED, PRICE = range(10)
# Of each of SIZES, taken for a number of rows: the sums PLAIN and SPENT of steps with about that many. From GAINS on, taken
# likewise, each has a row of the array: seconds that forwards of each size would have saved over plain ones, recently.
ROWS_PLAIN, ROWS_SPENT, GAINS = range(3)

# What a budget knows, for its kernels.
BOOKS: Layout = {
    "table": (np.float64, (OWN + 1, len(SIZES))),  # these three are the curve's, see cost.py
    "terms": (np.float64, (BUCKETED + 1,)),
    "latest": (np.float64, (len(SIZES), LATEST)),
    "beside": (np.float64, (2, LATEST)),  # seconds outside of forwards, of the latest steps without drafts and with
    "state": (np.float64, (PRICE + 1,)),
    "of_sizes": (np.float64, (GAINS + len(SIZES), len(SIZES))),
    "kept": (np.int64, ("trees",)),  # nodes of each tree that the latest choice takes, its root included
}
books_arrays = unpacker("Books", BOOKS)


def books_on(curve: CostCurve) -> Block:
    """Those of a budget that knows nothing but this curve."""
    books = Block(BOOKS, trees=1)
    books.table, books.terms, books.latest = curve.table, curve.terms, curve.latest
    books.state[SPARE] = curve.seconds(Forward(1)) if curve.known else 0.0  # a plain step may go into looks from the start
    books.refresh()
    return books


@inlined
def note_beside(step, beside, state):
    """What a step takes outside of its forward. Until one without drafts was seen, one with drafts stands in, less drafting."""
    drafted = int(step.draft_seconds > 0)
    seconds = step.seconds - step.forward_seconds
    seen = int(state[UNDRAFTED + drafted])
    beside[drafted, seen % LATEST] = seconds
    state[UNDRAFTED + drafted] = seen + 1
    state[BESIDE + drafted] = faster_of(beside[drafted], min(seen + 1, LATEST))
    if state[UNDRAFTED] == 0:
        state[BESIDE] = max(0.0, seconds - step.draft_seconds)
