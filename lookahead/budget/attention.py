"""Groups slots into calls of attention. In: tokens that slots bring and hold. Out: calls."""

from __future__ import annotations

import numpy as np

from lookahead.native.kernels import kernel

READ = 10  # products of a query with a key (over all heads) in the time that reading the key and its value takes


@kernel
def runs_of(sizes, pasts, call):
    """int64 [runs, 4]: first slot and last + 1 of those that share a call of attention, which are neighbours; queries and keys
    of each, padding included.

    sizes, pasts: int64 [slots], tokens that each brings and that are held of it; those that bring none are left out. A call
    takes as long as `call` products of a query with a key, reading a key as long as READ: the runs are those that take least.

    Example: sizes 2, 2, 256, 0, 4 behind 100 tokens each, where a call is 1000, become slots 0 to 1, 2, and 4.
    """
    count = len(sizes)
    least = np.empty(count + 1)  # of the slots before
    begins = np.empty(count + 1, np.int64)  # where the last run of these begins; -1: the slot before brings nothing
    least[0] = 0.0
    for last in range(1, count + 1):
        least[last], begins[last] = np.inf, -1
        width = length = 0
        if sizes[last - 1] == 0:
            least[last] = least[last - 1]
        for first in range(last - 1, -1, -1):
            if sizes[first] == 0:
                break
            width, length = max(width, sizes[first]), max(length, pasts[first] + sizes[first])
            cost = least[first] + call + (last - first) * length * (READ + width)
            if cost < least[last]:
                least[last], begins[last] = cost, first
    runs = np.empty((count, 4), np.int64)
    run, last = count, count
    while last > 0:
        first = begins[last]
        if first >= 0:
            run -= 1
            runs[run, 0], runs[run, 1] = first, last
            runs[run, 2], runs[run, 3] = 0, 0
            for slot in range(first, last):
                runs[run, 2] = max(runs[run, 2], sizes[slot])
                runs[run, 3] = max(runs[run, 3], pasts[slot] + sizes[slot])
        last = first if first >= 0 else last - 1
    return runs[run:]
