"""Grows draft trees. In: the context of each row and a budget. Out: the most probable tree of each.

The tree grows by the probability of the whole path, best first: long single branches where text is being copied, bushes where
it is not. Every node that is taken is looked up afresh on context + path (`mixture.mix`), for its children to compete with all
others.

What cannot come into the tree any more is not computed: the budget-th best probability offered so far is a cutoff for later
ones, and once what an expert list leaves over is under it, no further expert is asked.
"""

from __future__ import annotations

import struct

import numpy as np

from lookahead.draft.arrays import (
    BINS,
    CHAINS,
    MOST_THREADS,
    RECENT,
    STEPS,
    TREE_MATCHES,
    TREE_PARENTS,
    TREE_SOURCES,
    TREE_TOKENS,
    rows_arrays,
    scratch_arrays,
    shared_arrays,
)
from lookahead.draft.calibration import LEAST, bin_of, calibrated, computed, count_nodes, edge_of
from lookahead.draft.cells import SLOT_MATCH, SLOT_SOURCE, SLOT_TOKEN, P
from lookahead.draft.mixture import MIN_LEARN_PROB, learn, match_own, mix, move_aligned, rescore
from lookahead.draft.own_text import CHAIN, LENGTH, TOKEN, append_tokens, own_arrays, slots_of
from lookahead.draft.sorted_text import LOW, fetch_suffix, narrow_all
from lookahead.draft.tree import GRAMMAR
from lookahead.native.kernels import carray, fetch_entry, float64_at, inlined, int32_at, int64_at, kernel
from lookahead.native.threads import add

MIN_REMAINING_MASS = np.float32(0.1)  # of probability, below which an expert is skipped while learning
# Columns of a candidate.
CANDIDATE_TOKEN, CANDIDATE_PARENT, CANDIDATE_DEPTH, CANDIDATE_SOURCE, CANDIDATE_MATCH = range(5)


# What `grow_rows` receives, 8 bytes each: counters of threads and of rows that were begun; rows, and where limits, spans,
# forced tokens are; whether only the best child of a node may grow; the price, a float64;
# where the addresses of the shared block, of the rows' block and of each thread's scratch block stand.
BEGUN, NEXT, ROWS, LIMITS, SPANS, FORCED, SINGLE, PRICE, OF_SHARED, OF_ROWS, OF_SCRATCH = range(11)
NODES_PER_THREAD = 8  # of a batch's trees: fewer, by the latest drafts, are not worth another thread
TASK = struct.Struct("=7qd3q")


def grow_rows(address):
    """Grow the trees of rows, which the threads that call this share among them.

    address: of the arguments, see above. limits: int64 [rows, 5], the row's number, nodes below the root at most, depth at
    most, and where in `forced` (int64) the tokens begin and end with which every branch begins, as nothing else may come.
    price: calibrated path probability that a node must have. spans: int64 [rows, 2] gets where a tree's probabilities begin in
    rows.reach and how many nodes it has, root included, as does rows.nodes. A row's tree is the same in any thread.
    """
    args = carray(int64_at(address), (OF_SCRATCH + 1,))
    blocks = carray(int64_at(args[OF_SCRATCH]), (MOST_THREADS,))
    shared, rows = shared_arrays(int64_at(args[OF_SHARED])), rows_arrays(int64_at(args[OF_ROWS]))
    scratch = scratch_arrays(int64_at(blocks[add(address + 8 * BEGUN, 1)]))
    limits, spans = carray(int64_at(args[LIMITS]), (args[ROWS], 5)), carray(int64_at(args[SPANS]), (args[ROWS], 2))
    price = carray(float64_at(address + 8 * PRICE), (1,))[0]
    least = np.float32(computed(price, shared.edges, shared.curve)) if price > 0 else LEAST
    row = add(address + 8 * NEXT, 1)
    while row < args[ROWS]:
        _fetch_next(shared, rows, scratch, limits, row)
        forced = carray(int64_at(args[FORCED] + 8 * limits[row, 3]), (limits[row, 4] - limits[row, 3],))
        number, most, longest = limits[row, 0], limits[row, 1], limits[row, 2]
        _grow(shared, rows, scratch, number, most, longest, forced, max(least, LEAST), args[SINGLE] != 0)
        spans[row, 0], spans[row, 1] = (2 * number + 1) * rows.reach.shape[2], rows.nodes[number]
        row = add(address + 8 * NEXT, 1)


@inlined
def _fetch_next(shared, rows, scratch, numbers, at):
    """Prefetch what the two rows behind the one at `at` are read by first.

    numbers: int64 [rows, columns], the first column that of the row.
    """
    used = np.uint64(shared.used[0])
    if at + 2 < len(numbers):
        row = numbers[at + 2, 0]
        own = own_arrays(rows.own, row)
        fetch_entry(own.log, own.length - 1)
        for chain in range(CHAINS):
            fetch_entry(own.log, (CHAIN + chain) * own.log.shape[1] + own.length - 1)
        for text in range(used):
            fetch_entry(rows.steps, (row * len(shared.texts) + text) * (STEPS * 4))
            fetch_entry(rows.steps, (row * len(shared.texts) + text) * (STEPS * 4) + 8)
            fetch_entry(rows.made, (row * len(shared.texts) + text) * 2)
    if at + 1 < len(numbers):
        row = numbers[at + 1, 0]
        own = own_arrays(rows.own, row)
        have = _look_back(scratch.keys, np.int64(0), own, scratch.recent)
        for chain in range(slots_of(scratch.recent, have, own.heads.shape[1], scratch.chains)):
            fetch_entry(own.heads, chain * own.heads.shape[1] + scratch.chains[chain])
        for text in range(used):
            for step in range(min(2, rows.made[row, text, 0])):
                fetch_suffix(shared.texts, text, rows.steps[row, text, step, LOW])


@inlined
def _grow(shared, rows, scratch, row, budget, branch_length, forced, priced, single):
    own = own_arrays(rows.own, row)
    keys, values, slots = scratch.keys, scratch.values, scratch.slots
    candidates, reach, heap, offered = scratch.candidates, scratch.reach, scratch.heap, scratch.offered
    _begin(scratch, rows, row)
    keys[0, 0], keys[0, 1] = own.log[TOKEN, own.length - 1], -1
    tree, reached = rows.trees[row], rows.reach[row]
    tree[TREE_TOKENS, 0], tree[TREE_PARENTS, 0], tree[TREE_SOURCES, 0], tree[TREE_MATCHES, 0] = keys[0, 0], -1, -1, 0
    reached[0, 0], reached[1, 0] = 1.0, 1.0
    for bin_ in range(BINS):
        offered[bin_] = 0
    cutoff, above, edge = priced, np.int64(0), np.int64(0)
    nodes, filled, waiting = 1, 0, 0
    node, depth, probability = np.int64(0), np.int64(0), np.float32(1.0)
    while nodes <= budget:
        floor = cutoff / probability
        if depth < branch_length and floor <= 1 and probability >= priced:
            have = _look_back(keys, node, own, scratch.recent)
            if node > 0:
                parent = keys[node, 1]
                for text in range(scratch.made.shape[1]):
                    scratch.made[node, text, 0], scratch.made[node, text, 1] = 0, 0
                scratch.skipped[node] = -1
                move_aligned(
                    shared.texts, scratch.steps, scratch.made, scratch.aligned, shared.used[0], parent, own,
                    scratch.best[parent, 0], scratch.best[parent, 1], keys[node, 0], scratch.aligned, node,
                )  # fmt: skip
            asked = mix(shared, scratch, own, node, have, floor, np.int64(-1))
            rescore(shared, scratch, own, asked, floor, np.int64(-1))
            if node < len(forced):
                slots[0, SLOT_TOKEN], values[0, P], scratch.counters[1] = forced[node], 1.0, 1
                slots[0, SLOT_SOURCE], slots[0, SLOT_MATCH] = GRAMMAR, 0
            favourite = 0
            if single:
                for slot in range(1, scratch.counters[1]):
                    if values[slot, P] > values[favourite, P]:
                        favourite = slot
            for slot in range(np.uint64(scratch.counters[1])):
                path = probability * values[slot, P]
                if path < cutoff or filled == len(candidates) or (single and slot != favourite):
                    continue
                candidates[filled, CANDIDATE_TOKEN], candidates[filled, CANDIDATE_PARENT] = slots[slot, SLOT_TOKEN], node
                candidates[filled, CANDIDATE_DEPTH] = depth + 1
                candidates[filled, CANDIDATE_SOURCE] = slots[slot, SLOT_SOURCE]
                candidates[filled, CANDIDATE_MATCH] = slots[slot, SLOT_MATCH]
                reach[filled] = path
                _push(heap, waiting, reach, filled)
                filled += 1
                waiting += 1
                bin_ = bin_of(path)
                offered[bin_] += 1
                above += bin_ >= edge
                while edge < BINS - 1 and above - offered[edge] >= budget:  # as many as are wanted lie above this bin
                    above -= offered[edge]
                    edge += 1
            cutoff = max(priced, edge_of(edge))
        if waiting == 0 or reach[heap[0]] < priced:
            break
        taken = _pop(heap, waiting, reach)
        waiting -= 1
        node = nodes
        nodes += 1
        keys[node, 0], keys[node, 1] = candidates[taken, CANDIDATE_TOKEN], candidates[taken, CANDIDATE_PARENT]
        depth, probability = candidates[taken, CANDIDATE_DEPTH], reach[taken]
        tree[TREE_TOKENS, node], tree[TREE_PARENTS, node] = keys[node, 0], keys[node, 1]
        tree[TREE_SOURCES, node] = candidates[taken, CANDIDATE_SOURCE]
        tree[TREE_MATCHES, node] = candidates[taken, CANDIDATE_MATCH]
        reached[0, node], reached[1, node] = probability, calibrated(probability, shared.edges, shared.curve)
    rows.nodes[row] = nodes


@inlined
def _begin(scratch, rows, row):
    """The root of a tree is where the text of this row ends."""
    scratch.skipped[0], scratch.skipped[len(scratch.skipped) - 1] = -1, -1
    for text in range(rows.made.shape[1]):
        for k in range(2):
            scratch.made[0, text, k] = rows.made[row, text, k]
        for step in range(rows.made[row, text, 0]):
            for k in range(4):
                scratch.steps[0, text, step, k] = rows.steps[row, text, step, k]
    _copy_aligned(rows, row, scratch)


@inlined
def _copy_aligned(rows, row, scratch):
    """The aligned positions of a row become those of the root."""
    for text in range(scratch.aligned.shape[1]):
        for k in range(4):
            scratch.aligned[0, text, k] = rows.aligned[row, text, k]


@inlined
def _look_back(keys, node, own, recent):
    """Fill `recent` with the last tokens of the context of `node`, newest first; returns how many there are."""
    have = 0
    while have < RECENT and node > 0:
        recent[have] = keys[node, 0]
        have += 1
        node = keys[node, 1]
    position = own.length - 1
    while have < RECENT and position >= 0:
        recent[have] = own.log[TOKEN, position]
        have += 1
        position -= 1
    return have


@inlined
def _push(heap, size, reach, candidate):
    """Add a candidate to a heap of `size`, the most probable first."""
    index = size
    while index > 0 and reach[candidate] > reach[heap[(index - 1) >> 1]]:
        heap[index] = heap[(index - 1) >> 1]
        index = (index - 1) >> 1
    heap[index] = candidate


@inlined
def _pop(heap, size, reach):
    """Take the most probable candidate from a heap of `size`."""
    taken, moved = heap[0], heap[size - 1]
    index = 0
    while 2 * index + 1 < size - 1:
        child = 2 * index + 1
        if child + 1 < size - 1 and reach[heap[child + 1]] > reach[heap[child]]:
            child += 1
        if reach[heap[child]] <= reach[moved]:
            break
        heap[index] = heap[child]
        index = child
    heap[index] = moved
    return taken


# The arguments of `accept_rows`, 8 bytes each, before its rows: how many rows, how many tokens, and where these, the shared
# block, the rows' block and a scratch block stand. Of each row its number, how many tokens are its own, and what to do: append
# them; learn from each, too.
ACCEPTED, TOKENS, TOKENS_AT, SHARED_AT, ROWS_AT, SCRATCH_AT, FIRST_ROW = range(7)
APPEND, LEARN = range(2)


def accept_rows(address):
    """The texts of rows continue: learn what each token proves where that is asked for, append it, and narrow what the context
    matches.

    address: of the arguments, see above. The tokens are int32, those of one row after those of the other.
    """
    args = carray(int64_at(address), (FIRST_ROW,))
    of_rows = carray(int64_at(address + 8 * FIRST_ROW), (args[ACCEPTED], 3))
    emitted = carray(int32_at(args[TOKENS_AT]), (args[TOKENS],))
    shared, rows = shared_arrays(int64_at(args[SHARED_AT])), rows_arrays(int64_at(args[ROWS_AT]))
    scratch, end = scratch_arrays(int64_at(args[SCRATCH_AT])), np.int64(0)
    for k in range(args[ACCEPTED]):
        start, end = end, end + of_rows[k, 1]
        _fetch_next(shared, rows, scratch, of_rows, k)
        _accept(shared, rows, scratch, of_rows[k, 0], emitted[start:end], of_rows[k, 2] == LEARN)


@inlined
def _accept(shared, rows, scratch, row, emitted, learns):
    if len(emitted) and rows.nodes[row] > 0:
        count_nodes(rows.trees[row], rows.reach[row, 0], rows.nodes[row], rows.kept[row], emitted, shared.counted)
        rows.nodes[row] = 0
    for j in range(len(emitted)):
        own, token = own_arrays(rows.own, row), np.int64(emitted[j])
        if own.length > 0:
            have = _look_back(scratch.keys, np.int64(0), own, scratch.recent)
            if learns:
                _begin(scratch, rows, row)
                asked = mix(shared, scratch, own, np.int64(0), have, MIN_REMAINING_MASS, token)
                rescore(shared, scratch, own, asked, MIN_LEARN_PROB, token)
                learn(shared, scratch, asked, token)
            else:
                _copy_aligned(rows, row, scratch)
                match_own(shared, scratch, own, have, MIN_REMAINING_MASS)
            move_aligned(
                shared.texts, rows.steps, rows.made, rows.aligned, shared.used[0], row, own,
                scratch.best[0, 0], scratch.best[0, 1], token, rows.aligned, row,
            )  # fmt: skip
        narrow_all(shared.texts, 0, shared.used[0], rows.steps, rows.made, row, token, scratch.ranges)
        rows.own[row, LENGTH] = append_tokens(
            own.log, own.heads, own.top_tokens, own.length, emitted[j : j + 1], scratch.recent, scratch.chains
        )


@kernel
def find_roots(numbers, begin, end, shared_addresses, rows_addresses, scratch_addresses):
    """Look the ends of the texts of these rows (int64, their numbers) up in the sorted texts from `begin` to `end`."""
    shared, rows, scratch = shared_arrays(shared_addresses), rows_arrays(rows_addresses), scratch_arrays(scratch_addresses)
    for number in numbers:
        own = own_arrays(rows.own, number)
        for text in range(begin, end):
            rows.made[number, text, 0], rows.made[number, text, 1] = 0, -1
        for position in range(max(0, own.length - RECENT), own.length):
            token = np.int64(own.log[TOKEN, position])
            narrow_all(shared.texts, begin, end, rows.steps, rows.made, number, token, scratch.ranges)
