"""Steps with drafts in one native call: how drafts are verified. In: trees and chunks of rows. Out: what each row emits.

What one step of drafted_kernel.py does behind drafting: all trees side by side in one forward, the path of each that the model
itself emits, and the keys and values that stay.
"""

from __future__ import annotations

import numpy as np

from lookahead.backends.cpu import program_kernel
from lookahead.backends.cpu.steps_kernel import in_threads
from lookahead.decode.drafted_layout import (
    ACCEPTED,
    ACTIVE,
    BEST_FEW,
    CAPACITY,
    CHUNK,
    CHUNK_AT,
    DECODES,
    DRAFT_ROWS,
    DRAFT_TOKENS,
    EMITTED,
    ENDS_PREFILL,
    GIVEN,
    GIVEN_AT,
    KINDS,
    LEFT,
    LENGTH,
    LIMITS,
    NUMBER,
    OBSERVED,
    PARALLEL,
    PAST,
    PENDING,
    PHASE,
    PREFILLS,
    PREPARE,
    RECYCLED,
    RECYCLES,
    ROOM,
    ROWS,
    RUN,
    RUN_HEAD,
    SAID,
    SCORES,
    SIZE,
    STOPS,
    STOPS_AT,
    TAKEN,
    TEXT_LEFT,
    TOKENS,
    WIDEST,
)
from lookahead.draft.arrays import TREE_MATCHES, TREE_PARENTS, TREE_SOURCES, TREE_TOKENS, rows_arrays
from lookahead.draft.cells import RECYCLED as RECYCLED_SOURCE
from lookahead.draft.own_text import TOKEN, own_arrays
from lookahead.draft.recycled import ANY
from lookahead.forward import best_kernel
from lookahead.forward.batch_kernel import move
from lookahead.forward.tree_meta import FIELDS, POSITION, fill
from lookahead.native.kernels import address_of, carray, inlined, int16_at, int32_at, int64_at
from lookahead.native.threads import call_with


@inlined
def is_drafted_for(line):
    """A row, at this step."""
    return line[ACTIVE] != 0 and line[PHASE] == DECODES


@inlined
def lay_out(of, padding, padded):
    """All trees and chunks side by side, and the trees that are to be followed: see `best_kernel.follow_floats`. Of a chunk
    behind which its row emits, that is its last token. Returns whether there is room for the forward.

    padding: nodes that are added to the tree of the active row with the number `padded`.
    """
    n, task = of.numbers, of.following
    nodes, given, active, trees = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    n[TOKENS] = n[WIDEST] = 0
    of_trees = carray(int64_at(address_of(task) + 8 * best_kernel.HEAD), (n[ROWS], 5))
    for row in range(n[ROWS]):
        line = of.rows[row]
        size = line[SIZE] if line[PHASE] == DECODES else line[CHUNK]
        if is_drafted_for(line):
            size += padding if active == padded else 0
            active += 1
        of.tree_sizes[row], of.pasts[row] = size, line[PAST]
        n[TOKENS] += size
        if line[PHASE] == DECODES:
            n[WIDEST] = max(n[WIDEST], size)
        if line[PAST] + size > n[CAPACITY]:
            return False
        if line[PHASE] != PREFILLS:
            followed = size if line[PHASE] == DECODES else np.int64(1)
            some = min(followed, line[GIVEN])
            of_trees[trees, 0], of_trees[trees, 1], of_trees[trees, 2] = nodes, nodes + followed, nodes
            of_trees[trees, 3], of_trees[trees, 4] = given, given + some
            trees, nodes, given = trees + 1, nodes + followed, given + some
    if n[TOKENS] > n[ROOM]:
        return False
    task[best_kernel.PLACES], task[best_kernel.TREES], task[best_kernel.NODES] = nodes, trees, nodes
    task[best_kernel.GIVEN] = given
    _fill(of)
    return True


@inlined
def _fill(of):
    """Token ids and parents of what was laid out."""
    n, task, draft_rows = of.numbers, of.following, rows_arrays(int64_at(of.numbers[DRAFT_ROWS]))
    at = address_of(task) + 8 * (best_kernel.HEAD + 5 * task[best_kernel.TREES])
    given = carray(int64_at(at), (task[best_kernel.GIVEN],))
    followed, followed_parents = _followed(task)
    fed, token, tree = carray(int64_at(address_of(of.fed)), (2, n[TOKENS])), np.int64(0), np.int64(0)
    of_trees = carray(int64_at(address_of(task) + 8 * best_kernel.HEAD), (task[best_kernel.TREES], 5))
    for row in range(n[ROWS]):
        line, size = of.rows[row], of.tree_sizes[row]
        if line[PHASE] == DECODES:
            drafted, root = draft_rows.trees[line[NUMBER]], of.emitted[row, line[EMITTED] - 1]
            for node in range(size):
                is_drafted = 0 < node < line[SIZE]
                fed[0, token + node] = drafted[TREE_TOKENS, node] if is_drafted else root
                of.parents[token + node] = drafted[TREE_PARENTS, node] if is_drafted else np.int32(0)
            of.parents[token] = -1
        else:
            chunk = carray(int32_at(line[CHUNK_AT]), (size,))
            for place in range(size):
                fed[0, token + place], of.parents[token + place] = chunk[place], place - 1
        token += size
        if line[PHASE] == PREFILLS:
            continue
        answer, begin, end = carray(int64_at(line[GIVEN_AT]), (line[GIVEN],)), of_trees[tree, 0], of_trees[tree, 1]
        for k in range(of_trees[tree, 4] - of_trees[tree, 3]):
            given[of_trees[tree, 3] + k] = answer[k]
        for node in range(begin, end):
            of.wanted[node] = token - end + node
            followed[node], followed_parents[node] = fed[0, of.wanted[node]], of.parents[of.wanted[node]]
            of.known[node] = -1
        followed_parents[begin] = -1
        tree += 1


@inlined
def _followed(task):
    """Token ids and parents of the nodes that are followed."""
    nodes = task[best_kernel.NODES]
    at = address_of(task) + 8 * (best_kernel.HEAD + 5 * task[best_kernel.TREES] + task[best_kernel.GIVEN])
    return carray(int32_at(at), (nodes,)), carray(int32_at(at + 4 * nodes), (nodes,))


@inlined
def forward(of):
    """The forward of what was laid out. Returns whether its ids and positions have rows in the model's tables."""
    n, head = of.numbers, carray(int64_at(of.numbers[RUN_HEAD]), (program_kernel.HEAD,))
    rows, kinds, tokens = n[ROWS], n[KINDS], n[TOKENS]
    limits = carray(int64_at(n[LIMITS]), (2, kinds))
    meta = carray(int32_at(address_of(of.meta)), (kinds, tokens, FIELDS))
    fill(of.parents, of.tree_sizes[:rows], of.pasts[:rows], limits[0], limits[1], meta)
    fed = carray(int64_at(address_of(of.fed)), (2, tokens))
    for token in range(tokens):
        fed[1, token] = meta[0, token, POSITION]
    head[program_kernel.TICKET] = head[program_kernel.OUTSIDE] = 0
    head[program_kernel.ALL], head[program_kernel.WANTED] = tokens, of.following[best_kernel.NODES]
    head[program_kernel.IDS], head[program_kernel.META] = address_of(of.fed), address_of(of.meta)
    head[program_kernel.KEPT], head[program_kernel.SCORES] = address_of(of.wanted), n[SCORES]
    call_with(n[PREPARE], n[RUN_HEAD])
    if head[program_kernel.OUTSIDE] != 0:  # `Program.native` raises an error for it
        return False
    if head[program_kernel.THREADS] > 1:
        in_threads(n[PARALLEL], n[RUN], n[RUN_HEAD], head[program_kernel.THREADS])
    else:
        call_with(n[RUN], n[RUN_HEAD])
    return True


@inlined
def find_few(of):
    """The best few tokens behind the nodes of active rows whose answers are not given: see `DecodingEngine._note_runner_up`."""
    n, draft_rows = of.numbers, rows_arrays(int64_at(of.numbers[DRAFT_ROWS]))
    begin, nodes, trees = np.int64(0), np.int64(0), np.int64(0)
    if n[RECYCLES] == 0:
        return
    token_ids, parents = _followed(of.following)
    for row in range(n[ROWS]):
        line = of.rows[row]
        followed = of.tree_sizes[row] if line[PHASE] == DECODES else np.int64(line[PHASE] == ENDS_PREFILL)
        size = min(followed, line[SIZE])  # without what fills the forward up
        if size > 0 and line[ACTIVE] != 0 and line[GIVEN] == 0:
            for node in range(begin, begin + size):
                of.asked[nodes], of.few_tokens[nodes], of.few_parents[nodes] = node, token_ids[node], parents[node]
                nodes += 1
            own = own_arrays(draft_rows.own, line[NUMBER])
            for k in range(2):
                place = own.length - 2 - k
                of.few_before[trees, k] = own.log[TOKEN, place] if place >= 0 else ANY
            of.few_sizes[trees] = size
            trees += 1
        begin += followed
    n[PENDING] = trees
    of.few[best_kernel.ASKED_ROWS], of.few[best_kernel.ALL_ROWS] = nodes, begin
    if nodes > 0:
        call_with(n[BEST_FEW], address_of(of.few))


@inlined
def keep(of):
    """What each row emits, as `RunningRow.accept` has it, and which keys and values stay. Returns whether an answer ends."""
    n, task, draft_rows = of.numbers, of.following, rows_arrays(int64_at(of.numbers[DRAFT_ROWS]))
    trees, nodes, moves, ended = task[best_kernel.TREES], task[best_kernel.NODES], np.int64(0), False
    of_trees, tree = carray(int64_at(address_of(task) + 8 * best_kernel.HEAD), (trees, 5)), np.int64(0)
    at = address_of(task) + 8 * (best_kernel.HEAD + 5 * trees + task[best_kernel.GIVEN] + nodes)
    emitted, path = carray(int64_at(at), (nodes,)), carray(int64_at(at + 8 * nodes), (nodes,))
    counts = carray(int64_at(at + 16 * nodes), (trees, 2))
    n[SAID] = 0
    for row in range(n[ROWS]):
        line, said = of.rows[row], np.int64(0)
        for k in range(3):
            of.seen_counts[n[TAKEN], row, k] = 0
        if line[PHASE] == PREFILLS:
            line[PAST] += line[CHUNK]
            continue
        begin, stops, over = of_trees[tree, 0], carray(int64_at(line[STOPS_AT]), (line[STOPS],)), False
        while said < counts[tree, 0] and not over:
            token = emitted[begin + said]
            of.emitted[row, line[EMITTED] + said] = token
            said += 1
            over = said == line[LEFT]
            for k in range(len(stops)):
                over = over or token == stops[k]
        kept = min(counts[tree, 1], said + 1)
        sources = draft_rows.trees[line[NUMBER], TREE_SOURCES]
        for place in range(1, kept):
            node = path[begin + place]
            if node != place:
                of.moves[0, moves], of.moves[1, moves], of.moves[2, moves] = row, line[PAST] + node, line[PAST] + place
                moves += 1
            source = sources[node] if node < line[SIZE] else np.int64(-1)
            of.by_source[row, source + 2] += 1
            of.times[n[TAKEN], RECYCLED] += source == RECYCLED_SOURCE
        of.seen_counts[n[TAKEN], row, 2] = said
        if n[OBSERVED] != 0 and line[PHASE] == DECODES:
            _note(of, row, path, begin, kept)
        if line[PHASE] == DECODES:
            line[DRAFT_TOKENS] += of.tree_sizes[row] - 1
            line[ACCEPTED] += kept - 1
            line[PAST] += kept
            n[SAID] += said
        else:
            line[PAST] += line[CHUNK]
            line[PHASE], line[CHUNK] = DECODES, 0
        line[EMITTED] += said
        line[LEFT] -= said
        line[LENGTH] += said
        line[TEXT_LEFT] -= said
        if line[GIVEN] > 0:
            line[GIVEN_AT] += 8 * said
            line[GIVEN] -= said
        ended = ended or over
        tree += 1
    for number in range(len(of.buffers) if moves > 0 else 0):
        about = of.buffers[number]
        buffer = carray(int16_at(about[0]), (about[1], about[2], about[3], about[4], about[5]))
        move(buffer, of.moves[0][:moves], of.moves[1][:moves], of.moves[2][:moves])
    return ended


@inlined
def _note(of, row, path, begin, kept):
    """For observers: a row's tree, and the nodes of it that were walked along."""
    n, line, step = of.numbers, of.rows[row], of.numbers[TAKEN]
    tree, reach, counts = of.seen[step, row], of.seen_reach[step, row], of.seen_counts[step, row]
    draft_rows = rows_arrays(int64_at(n[DRAFT_ROWS]))
    drafted, probable = draft_rows.trees[line[NUMBER]], draft_rows.reach[line[NUMBER], 1]
    for node in range(of.tree_sizes[row]):
        fills = node >= line[SIZE]
        tree[TREE_TOKENS, node] = drafted[TREE_TOKENS, node] if 0 < node < line[SIZE] else of.emitted[row, line[EMITTED] - 1]
        tree[TREE_PARENTS, node] = 0 if fills else -1
        tree[TREE_SOURCES, node], tree[TREE_MATCHES, node], reach[node] = -1, 0, np.float32(not fills)
        if 0 < node < line[SIZE]:
            tree[TREE_PARENTS, node], tree[TREE_SOURCES, node] = drafted[TREE_PARENTS, node], drafted[TREE_SOURCES, node]
            tree[TREE_MATCHES, node], reach[node] = drafted[TREE_MATCHES, node], probable[node]
    for place in range(kept):
        of.seen_path[step, row, place] = path[begin + place]
    counts[0], counts[1] = of.tree_sizes[row], kept
