"""The two halves of a decode step that are the same for every backend: the kernels. In: the address of a block (step.py).

`propose` stands before the forward: learn what the latest step emitted, grow trees, choose how many nodes pay, lay all trees
and prefill chunks side by side. `accept` stands behind it: follow each tree along the tokens that the model itself emits, note
runner-up tokens, end answers. Between the stages of either Python may take its part (grammars, sources of the user's own,
samplers): `stages` holds those that a call takes.
"""

from __future__ import annotations

import numpy as np

from lookahead.budget import policy
from lookahead.draft import planner
from lookahead.draft.arrays import TREE_PARENTS, TREE_SOURCES, TREE_TOKENS, rows_arrays, shared_arrays
from lookahead.draft.own_text import CAPACITY, LENGTH, TOKEN, own_arrays
from lookahead.draft.recycled import ANY, add_trees
from lookahead.native.kernels import address_of, carray, float32_at, float64_at, inlined, int32_at, int64_at
from lookahead.native.threads import call_with, in_threads
from lookahead.step.best_tokens import best_few, best_token_of
from lookahead.step.layout import (
    CHOOSE,
    COMMIT,
    DECODES,
    ENDS_PREFILL,
    FOLLOW,
    GROW,
    LAY_OUT,
    LEARN,
    RUNNER_UP,
    SCORES_PROMPT,
    UNKNOWN,
    step_arrays,
)


def propose(address):
    of = step_arrays(int64_at(address))
    call = of.call[0]
    if call.stages & LEARN != 0:
        _learn(of, call)
    if call.stages & GROW != 0:
        _grow(of, call)
    if call.stages & CHOOSE != 0:
        _choose(of, call)
    if call.stages & LAY_OUT != 0:
        _lay_out(of, call)


@inlined
def _learn(of, call):
    """Hand the tokens that rows have emitted to the drafter; decide which rows are drafted for at this step."""
    task, count, tokens, active_rows = (
        carray(int64_at(address_of(of.accepting)), (3 * call.rows + planner.FIRST_ROW,)),
        np.int64(0),
        np.int64(0),
        np.int64(0),
    )
    unknown_tokens = carray(int32_at(address_of(of.unknown)), (of.unknown.shape[0] * of.unknown.shape[1],))
    for row in range(call.rows):
        line = of.rows[row]
        if line.phase != DECODES:
            continue
        active = call.drafts != 0
        unknown = line.emitted - line.known
        if line.indexed != 0 and unknown > 0 and (active or line.drafted != 0):
            at = planner.FIRST_ROW + 3 * count
            task[at], task[at + 1] = line.number, unknown
            task[at + 2] = planner.LEARN if line.drafted != 0 and call.learns != 0 else planner.APPEND
            for k in range(line.known, line.emitted):
                unknown_tokens[tokens] = of.emitted[row, k]
                tokens += 1
            of.emitted[row, 0] = of.emitted[row, line.emitted - 1]
            line.emitted = line.known = 1
            count += 1
        line.drafted = active
        active_rows += active
    call.active = active_rows
    if count > 0:
        task[planner.ACCEPTED], task[planner.TOKENS] = count, tokens
        call_with(call.accept_at, address_of(task))
    if active_rows > 0 and call.pending > 0:
        shared = shared_arrays(int64_at(call.shared_at))
        add_trees(
            of.few_tokens, of.few_parents, of.few_sizes[: call.pending], of.few_before, of.few_ids, of.few_scores,
            shared.recycled_keys, shared.recycled_seen, shared.recycled_tokens, shared.recycled_weights,
        )  # fmt: skip
        call.pending, shared.used[1] = 0, 1


@inlined
def _grow(of, call):
    """Grow the trees of the rows that are drafted for."""
    count, decoding, prefilled = np.int64(0), np.int64(0), np.int64(0)
    draft_rows = rows_arrays(int64_at(call.draft_rows_at))
    for row in range(call.rows):
        line = of.rows[row]
        line.tree = -1
        prefilled += line.chunk
        if line.phase != DECODES:
            continue
        decoding += 1
        if line.drafted != 0:
            limits = of.limits[count]
            limits[0], limits[1] = line.number, min(call.nodes, line.most)
            limits[2] = min(call.depth, line.left - 1, max(0, line.positions_left))
            limits[3], limits[4] = line.forced_begin, line.forced_end
            line.tree = count
            count += 1
            if draft_rows.own[line.number, LENGTH] + 2 * UNKNOWN > draft_rows.own[line.number, CAPACITY]:
                call.full = 1
    call.decoding, call.prefilled, call.trees = decoding, prefilled, count
    if count == 0:
        return
    task = of.growing
    task[planner.BEGUN], task[planner.NEXT], task[planner.ROWS] = 0, 0, count
    task[planner.FORCED] = call.forced_at
    price = call.least_price if call.adaptive == 0 else max(call.least_price, call.price)
    carray(float64_at(address_of(task) + 8 * planner.PRICE), (1,))[0] = price
    threads = min(count, call.grown // planner.NODES_PER_THREAD, call.threads)
    if threads > 1:
        in_threads(call.parallel_at, call.grow_at, address_of(task), threads)
    else:
        call_with(call.grow_at, address_of(task))
    call.grown = 0
    for k in range(count if count > 1 else 0):
        call.grown += of.spans[k, 1]


@inlined
def _choose(of, call):
    """Choose how many nodes of each tree are verified: `nodes` of rows, `kept` of the drafter's."""
    draft_rows, kept = rows_arrays(int64_at(call.draft_rows_at)), carray(int64_at(call.kept_at), (call.kept_room,))
    if call.adaptive != 0 and call.trees > 0:
        spans = carray(int64_at(address_of(of.spans)), (call.trees, 2))
        state = carray(float64_at(call.state_at), (policy.CHANGE + 1,))
        policy.choose(
            carray(float32_at(call.reach_at), (call.reach_room,)), spans, call.decoding, call.prefilled, call.share,
            call.buckets != 0, carray(float64_at(call.table_at), (policy.MEASURED + 1, call.table_sizes)),
            carray(float64_at(call.curve_at), (3, call.curve_room)), state, kept,
        )  # fmt: skip
        call.price = state[policy.PRICE]
    call.expected = 0.0
    for row in range(call.rows):
        line = of.rows[row]
        line.nodes = 1
        if line.tree < 0:
            continue
        line.nodes = kept[line.tree] if call.adaptive != 0 else of.spans[line.tree, 1]
        draft_rows.kept[line.number] = line.nodes
        for node in range(1, line.nodes):
            call.expected += draft_rows.reach[line.number, 1, node]


@inlined
def _lay_out(of, call):
    """All trees and chunks side by side, and which of their tokens are scored."""
    draft_rows = rows_arrays(int64_at(call.draft_rows_at))
    tokens, scored = np.int64(0), np.int64(0)
    for row in range(call.rows):
        line = of.rows[row]
        line.begin, line.scores = tokens, scored
        if line.phase == DECODES:
            size = line.nodes
            drafted = draft_rows.trees[line.number] if call.own_trees == 0 else of.own_trees[row]
            of.token_ids[tokens], of.parents[tokens], wanted = of.emitted[row, line.emitted - 1], -1, size
            for node in range(1, size):
                of.token_ids[tokens + node] = drafted[TREE_TOKENS, node]
                of.parents[tokens + node] = drafted[TREE_PARENTS, node]
        else:
            size, chunk = line.chunk, carray(int32_at(line.chunk_at), (line.chunk,))
            for k in range(size):
                of.token_ids[tokens + k], of.parents[tokens + k] = chunk[k], k - 1
            wanted = size if line.phase == SCORES_PROMPT else np.int64(line.phase == ENDS_PREFILL)
        line.size = of.brought[row] = size
        of.wanted[row] = wanted
        for k in range(wanted):
            of.scored[scored + k], of.best[scored + k] = tokens + size - wanted + k, -1
        tokens += size
        scored += wanted
    call.tokens, call.scored = tokens, scored


def accept(address):
    of = step_arrays(int64_at(address))
    call = of.call[0]
    if call.stages & RUNNER_UP != 0:
        _find_runner_up(of, call)
    if call.stages & FOLLOW != 0:
        for row in range(call.rows):
            line = of.rows[row]
            if line.follows != 0 and (line.phase == DECODES or line.phase == ENDS_PREFILL):
                _follow(of, call, line)
    if call.stages & COMMIT != 0:
        _commit(of, call)


@inlined
def _find_runner_up(of, call):
    """The best few tokens behind the nodes of rows that are drafted for, unless their answers are forced."""
    draft_rows, asked, trees = rows_arrays(int64_at(call.draft_rows_at)), np.int64(0), np.int64(0)
    if call.recycles == 0:
        return
    for row in range(call.rows):
        line = of.rows[row]
        size = line.nodes if line.phase == DECODES else np.int64(line.phase == ENDS_PREFILL)
        if size == 0 or line.drafted == 0 or line.forced > 0 or line.indexed == 0:
            continue
        first = line.begin if line.phase == DECODES else line.begin + line.size - 1
        for node in range(size):
            of.asked[asked], of.few_tokens[asked] = line.scores + node, of.token_ids[first + node]
            of.few_parents[asked] = of.parents[first + node] if node > 0 else np.int32(-1)
            asked += 1
        own = own_arrays(draft_rows.own, line.number)
        for k in range(2):
            index = own.length - 2 - k
            of.few_before[trees, k] = own.log[TOKEN, index] if index >= 0 else ANY
        of.few_sizes[trees] = size
        trees += 1
    call.pending, call.asked = trees, asked
    if call.scores_kind != 0 and asked > 0:
        scores = call.scores_kind, call.scores_at, call.scored, call.vocab
        best_few(*scores, of.asked[:asked], of.few_ids, address_of(of.few_scores), of.best)


@inlined
def _follow(of, call, line):
    """The tokens that a row emits, the best ones or its forced answer, and the nodes of its tree along which it does."""
    nodes = line.size if line.phase == DECODES else np.int64(1)
    first = line.begin + line.size - nodes
    forced, count = carray(int64_at(line.forced_at), (line.forced,)), np.int64(0)
    for node in range(nodes):
        of.depths[first + node] = -1
    of.depths[first], node = 0, np.int64(0)
    while line.forced == 0 or count < line.forced:
        index = line.scores + node
        if of.best[index] < 0:  # looked for even where the answer is forced, as that is to take as long
            of.best[index] = best_token_of(call.scores_kind, call.scores_at, call.scored, call.vocab, index)
        token = of.best[index] if line.forced == 0 else forced[count]
        of.new_tokens[first + count] = token
        child = np.int64(-1)
        for below in range(node + 1, nodes):
            if of.token_ids[first + below] == token and of.depths[first + of.parents[first + below]] == count:
                of.depths[first + below] = count + 1
                child = below if child < 0 else child
        count += 1
        if child < 0:
            break
        node = child
    line.new, line.path = count, of.depths[first + node] + 1
    for step in range(line.path - 1, -1, -1):
        of.path[first + step] = node
        node = of.parents[first + node]


@inlined
def _commit(of, call):
    """Append what rows emit to their answers; sum up for accounting."""
    draft_rows = rows_arrays(int64_at(call.draft_rows_at))
    call.emitted, call.ended = 0, 0
    for source in range(of.step_sources.shape[0]):
        of.step_sources[source] = 0
    for row in range(call.rows):
        line = of.rows[row]
        if line.phase != DECODES and line.phase != ENDS_PREFILL:
            line.new, line.path = 0, line.size
            continue
        decodes = line.phase == DECODES
        first = line.begin if decodes else line.begin + line.size - 1
        stops, new, over = carray(int64_at(line.stops_at), (line.stops,)), np.int64(0), False
        while new < line.new and not over:
            token = of.new_tokens[first + new]
            of.emitted[row, line.emitted + new] = token
            new += 1
            over = line.follows != 0 and new == line.left
            for k in range(len(stops) if line.follows != 0 else 0):
                over = over or token == stops[k]
        line.new, line.path = new, min(line.path, new + 1)
        line.ended = over
        call.ended += over
        if decodes:
            sources = draft_rows.trees[line.number, TREE_SOURCES] if call.own_trees == 0 else of.own_trees[row, TREE_SOURCES]
            for step in range(1, line.path):
                node = of.path[first + step]
                source = sources[node]
                of.by_source[row, source + 2] += 1
                of.step_sources[source + 2] += 1
            line.steps += new > 0
            line.draft_tokens += line.size - 1
            line.accepted += line.path - 1
            call.emitted += new
        line.emitted += new
        line.left -= new
        line.positions_left -= new
        line.length += new
        if line.forced > 0:
            line.forced_at += 8 * new
            line.forced -= new
        if line.emitted + UNKNOWN > of.emitted.shape[1]:
            call.full = 1
