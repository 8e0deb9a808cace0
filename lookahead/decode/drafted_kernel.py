"""Steps with drafts in one native call: the kernel. In: the address of a block that describes them (`LAYOUT`).

A step is what the engine's is (engine.py): let the drafter learn what was emitted, draft, choose how many nodes pay, verify all
trees in one forward, keep what the model itself emits. Each part is the C function that Python calls, too; what stands here is
what goes from one to the next. The call ends behind the step in which an answer ends, and before a step that needs what only
Python has: more memory, or a step without any drafts.
"""

from __future__ import annotations

import numpy as np

from lookahead.budget import cost, goodput
from lookahead.budget.backoff import APART, DEBT
from lookahead.budget.books import BESIDE, BESIDE_DRAFTED, GAINED, books_arrays
from lookahead.budget.books import PRICE as OF_PRICE
from lookahead.clock import seconds_at
from lookahead.draft import planner
from lookahead.draft.arrays import TREE_MATCHES, TREE_PARENTS, TREE_SOURCES, TREE_TOKENS, rows_arrays, shared_arrays
from lookahead.draft.cells import RECYCLED as RECYCLED_SOURCE
from lookahead.draft.own_text import TOKEN, own_arrays
from lookahead.draft.recycled import ANY, add_trees
from lookahead.forward import best_kernel, program_kernel
from lookahead.forward.batch_kernel import attended, move
from lookahead.forward.best_kernel import FEW
from lookahead.forward.steps_kernel import in_threads
from lookahead.forward.tree_meta import FIELDS, POSITION, fill
from lookahead.kernels import Layout, address_of, carray, float64_at, inlined, int16_at, int32_at, int64_at, unpacker
from lookahead.threads import call_with

# Numbers of the call. ROWS in slots 0 ...; steps that are to be taken at MOST, and that were TAKEN; number of the first STEP.
# Positions of a slot, tokens of a forward: as many as there is room for. Draft tokens of a tree and on a path at most (NODES,
# DEPTH). DRAFTED, BEFORE: see `GoodputBudget`. Whether the budget chooses (ADAPTIVE), the drafter learns (LEARNS) and runner-up
# tokens are kept (RECYCLES). SCRATCHES: threads that may draft at once. GREW: nodes at the latest drafts. PENDING: trees whose
# runner-up tokens are still to be added. FAILED: the program found ids or positions that the model has no row for.
(ROWS, MOST, TAKEN, STEP, CAPACITY, ROOM, NODES, DEPTH, DRAFTED, BEFORE, ADAPTIVE, LEARNS, RECYCLES) = range(13)
(SCRATCHES, GREW, PENDING, FAILED) = range(13, 17)
# Addresses: of C functions, of what describes a run of the program, of the scores, of the masks' limits and of blocks.
(ACCEPT, GROW, CHOOSE, PREPARE, RUN, BEST_FEW, FOLLOW, PARALLEL, CLOCK) = range(17, 26)
(RUN_HEAD, SCORES, VOCAB, KINDS, LIMITS, SHARED, DRAFT_ROWS, BOOKS) = range(26, 34)
OBSERVED = 34  # whether trees are noted, for observers
NUMBERS = 35
# Path probability that a node must have, at least and now; seconds that drafting takes, and that the call may take; what a call
# of attention costs.
(LEAST_PRICE, PRICE, DRAFTING, LONGEST, CALL) = range(5)
# A row: its number with the drafter; tokens that the cache holds, that may still be emitted, that there are positions for, of
# prompt and answer; UNTIL: number of the step at which it is drafted for; ACTIVE: it is, at this step; tokens EMITTED, and
# those of them that the drafter knows; of an answer that is given, where it stands and its tokens; where tokens that end the
# answer stand, and how many; nodes of its tree; sums: draft tokens, accepted ones.
(NUMBER, PAST, LEFT, TEXT_LEFT, LENGTH, UNTIL, ACTIVE, EMITTED, KNOWN, GIVEN_AT, GIVEN, STOPS_AT, STOPS) = range(13)
(SIZE, DRAFT_TOKENS, ACCEPTED) = range(13, 16)
COLUMNS = 16
BEGAN, DRAWN, COMPUTED, NOTED, VERIFIED, ADDING, RECYCLED = range(7)  # of a step: clock readings, seconds, accepted tokens
BUFFER = 6  # of keys and values: address, and sizes in 2 bytes, see `batch_kernel.move`

LAYOUT: Layout = {
    "numbers": (np.int64, (NUMBERS,)),
    "reals": (np.float64, (5,)),
    "rows": (np.int64, ("rows", COLUMNS)),
    "debts": (np.float64, ("rows",)),  # see backoff.py
    "emitted": (np.int64, ("rows", "emitted")),  # what the drafter did not know at the beginning comes first
    "by_source": (np.int64, ("rows", "sources")),  # accepted tokens; the first two are GRAMMAR and GIVEN
    "times": (np.float64, ("steps", 7)),
    "log": (np.float64, ("steps", cost.LOGGED)),  # see `StepLog`
    "lengths": (np.int64, ("rows",)),
    "tree_sizes": (np.int64, ("rows",)),
    "pasts": (np.int64, ("rows",)),
    "limits": (np.int64, ("rows", 5)),
    "spans": (np.int64, ("rows", 2)),
    "accepting": (np.int64, ("words",)),  # see `planner.accept_rows`
    "said": (np.int32, ("rows", "emitted")),
    "growing": (np.int64, (planner.OF_SCRATCH + 1,)),  # see `planner.grow_rows`
    "choice": (np.int64, (goodput.CHOICE,)),
    "following": (np.int64, ("words",)),  # see `best_kernel.follow_floats`
    "fed": (np.int64, (2, "tokens")),  # ids and positions, those behind these
    "meta": (np.int32, ("kinds", "tokens", FIELDS)),
    "known": (np.int64, ("tokens",)),  # best tokens
    "moves": (np.int64, (3, "tokens")),  # slots, and positions, see `SlotCache.move`
    "few": (np.int64, (best_kernel.FEW_TASK,)),
    "asked": (np.int64, ("tokens",)),  # and what is found there, see `best_kernel.best_few_floats`
    "few_ids": (np.int32, ("tokens", FEW)),
    "few_scores": (np.float32, ("tokens + 4", FEW)),
    "few_bits": (np.int16, ("tokens", FEW)),
    "few_tokens": (np.int32, ("tokens",)),  # the nodes behind which these stand
    "few_parents": (np.int32, ("tokens",)),
    "few_sizes": (np.int64, ("rows",)),  # of their trees
    "few_before": (np.int32, ("rows", 2)),
    "buffers": (np.int64, ("buffers", BUFFER)),
    "timespec": (np.int64, (2,)),
    "seen": (np.int32, ("steps", "rows", 4, "tokens")),  # for observers: trees, TREE_TOKENS ...
    "seen_reach": (np.float32, ("steps", "rows", "tokens")),  # their probabilities
    "seen_path": (np.int64, ("steps", "rows", "tokens")),  # nodes that were walked along
    "seen_counts": (np.int64, ("steps", "rows", 3)),  # nodes of the tree, of the path; tokens emitted
}
of_call = unpacker("DraftedSteps", LAYOUT)


def drafted_steps(address):
    of = of_call(int64_at(address))
    n, ended = of.numbers, False
    while n[TAKEN] < n[MOST] and not ended:
        step = n[TAKEN]
        of.times[step, BEGAN] = _now(of)
        if step > 0 and not _learn(of):
            return
        if not _draft(of):
            return
        of.times[step, DRAWN] = _now(of)
        if not _forward(of):
            return
        of.times[step, COMPUTED] = _now(of)
        _find_few(of)
        of.times[step, NOTED] = _now(of)
        call_with(n[FOLLOW], address_of(of.following))
        ended = _keep(of)
        of.times[step, VERIFIED] = _now(of)
        n[TAKEN] += 1
        _log(of)
        ended = ended or of.times[step, VERIFIED] - of.times[0, BEGAN] > of.reals[LONGEST]


@inlined
def _now(of):
    return seconds_at(of.numbers[CLOCK], address_of(of.timespec))


@inlined
def _learn(of):
    """Let the drafter know what the latest step emitted, see `DecodingEngine._notify`. Returns whether a row is drafted for."""
    n, task = of.numbers, of.accepting
    said = carray(int32_at(task[planner.TOKENS_AT]), (of.said.shape[0] * of.said.shape[1],))
    step, rows, tokens, active = n[STEP] + n[TAKEN], np.int64(0), np.int64(0), False
    for row in range(n[ROWS]):
        line = of.rows[row]
        now = n[ADAPTIVE] == 0 or step >= line[UNTIL]
        if now or line[ACTIVE] != 0:
            at = planner.FIRST_ROW + 3 * rows
            task[at], task[at + 1] = line[NUMBER], line[EMITTED] - line[KNOWN]
            task[at + 2] = planner.LEARN if line[ACTIVE] != 0 and n[LEARNS] != 0 else planner.APPEND
            for k in range(line[KNOWN], line[EMITTED]):
                said[tokens] = of.emitted[row, k]
                tokens += 1
            line[KNOWN] = line[EMITTED]
            rows += 1
        line[ACTIVE] = now
        active = active or now
    task[planner.ACCEPTED], task[planner.TOKENS] = rows, tokens
    call_with(n[ACCEPT], address_of(task))
    if active and n[PENDING] > 0:
        began, shared = _now(of), shared_arrays(int64_at(n[SHARED]))
        add_trees(
            of.few_tokens, of.few_parents, of.few_sizes[: n[PENDING]], of.few_before, of.few_ids, of.few_scores,
            shared.recycled_keys, shared.recycled_seen, shared.recycled_tokens, shared.recycled_weights,
        )  # fmt: skip
        n[PENDING], shared.used[1] = 0, 1
        of.times[n[TAKEN], ADDING] = _now(of) - began
    return active


@inlined
def _draft(of):
    """Grow the trees of active rows and choose what pays, as `DecodingEngine._draft` does. Returns whether there is room."""
    n, task, count = of.numbers, of.growing, np.int64(0)
    for row in range(n[ROWS]):
        line = of.rows[row]
        if line[ACTIVE] != 0:
            of.limits[count, 0], of.limits[count, 1] = line[NUMBER], n[NODES]
            of.limits[count, 2] = min(n[DEPTH], line[LEFT] - 1, max(0, line[TEXT_LEFT]))
            count += 1
    free = np.int64(0)
    if n[ADAPTIVE] != 0:
        free = n[DRAFTED] if n[ROWS] == 1 else n[DRAFTED] // n[ROWS] | 1
    task[planner.BEGUN], task[planner.NEXT], task[planner.ROWS], task[planner.FREE] = 0, 0, count, free
    price = of.reals[LEAST_PRICE] if n[ADAPTIVE] == 0 else max(of.reals[LEAST_PRICE], of.reals[PRICE])
    carray(float64_at(address_of(task) + 8 * planner.PRICE), (1,))[0] = price
    threads = min(count, n[GREW] // planner.NODES_PER_THREAD, n[SCRATCHES])
    if threads > 1:
        in_threads(n[PARALLEL], n[GROW], address_of(task), threads)
    else:
        call_with(n[GROW], address_of(task))
    n[GREW] = 0
    for k in range(count if count > 1 else 0):
        n[GREW] += of.spans[k, 1]
    padding, padded = _choose(of, count)
    return _lay_out(of, padding, padded)


@inlined
def _choose(of, count):
    """How many nodes of each tree are verified becomes SIZE of rows, and `kept` of the drafter's. Returns how many tokens fill
    the forward up, and the number of the tree that these join.
    """
    n, books, draft_rows = of.numbers, books_arrays(int64_at(of.numbers[BOOKS])), rows_arrays(int64_at(of.numbers[DRAFT_ROWS]))
    keys, calls, choice = np.int64(0), np.int64(1), of.choice
    for row in range(n[ROWS]):
        of.lengths[row] = of.rows[row, LENGTH]
        keys += of.rows[row, LENGTH]
    if n[ROWS] > 1:
        keys, calls = attended(of.lengths[: n[ROWS]], of.reals[CALL])
    choice[goodput.COUNT], choice[goodput.PLAIN_ROWS] = count, n[ROWS]
    choice[goodput.KEYS], choice[goodput.CALLS], choice[goodput.BEFORE] = keys, calls, n[BEFORE]
    choice[goodput.PADDING], choice[goodput.FILLED], returns = 0, -1, np.inf
    if n[ADAPTIVE] != 0:
        call_with(n[CHOOSE], address_of(choice))
        n[BEFORE] = choice[goodput.TOKENS]
        if choice[goodput.TAKEN] > 0 and n[BEFORE] > n[ROWS]:
            n[DRAFTED] = n[BEFORE] - n[ROWS]
        of.reals[PRICE] = books.state[OF_PRICE]
        if of.reals[DRAFTING] > 0:
            beside = books.state[BESIDE_DRAFTED] - books.state[BESIDE]
            returns = books.state[GAINED] / max(of.reals[DRAFTING], beside)
    tree, step = np.int64(0), n[STEP] + n[TAKEN]
    for row in range(n[ROWS]):
        line = of.rows[row]
        line[SIZE] = 1
        if line[ACTIVE] != 0:
            line[SIZE] = books.kept[tree] if n[ADAPTIVE] != 0 else of.spans[tree, 1]
            draft_rows.kept[line[NUMBER]] = line[SIZE]
            if n[ADAPTIVE] != 0:  # see `Backoff.drafted`
                of.debts[row] = min(max(0.0, of.debts[row] + 1 - (returns if line[SIZE] > 1 else 0.0)), float(DEBT))
                line[UNTIL] = (step // APART + 1) * APART if of.debts[row] >= DEBT else step + 1
            tree += 1
    return choice[goodput.PADDING], choice[goodput.FILLED]


@inlined
def _lay_out(of, padding, padded):
    """All trees side by side, to be followed: see `best_kernel.follow_floats`. Returns whether there is room for the forward.

    padding: nodes that are added to the tree of the active row with the number `padded`.
    """
    n, task, draft_rows = of.numbers, of.following, rows_arrays(int64_at(of.numbers[DRAFT_ROWS]))
    rows, tokens, given, active = n[ROWS], np.int64(0), np.int64(0), np.int64(0)
    trees = carray(int64_at(address_of(task) + 8 * best_kernel.HEAD), (rows, 5))
    for row in range(rows):
        line = of.rows[row]
        of.tree_sizes[row] = line[SIZE]
        if line[ACTIVE] != 0:
            of.tree_sizes[row] += padding if active == padded else 0
            active += 1
        of.pasts[row], some = line[PAST], min(of.tree_sizes[row], line[GIVEN])
        trees[row, 0], trees[row, 1], trees[row, 2] = tokens, tokens + of.tree_sizes[row], tokens
        trees[row, 3], trees[row, 4] = given, given + some
        tokens, given = tokens + of.tree_sizes[row], given + some
        if line[PAST] + of.tree_sizes[row] > n[CAPACITY]:
            return False
    if tokens > n[ROOM]:
        return False
    task[best_kernel.PLACES], task[best_kernel.TREES], task[best_kernel.NODES] = tokens, rows, tokens
    task[best_kernel.GIVEN] = given
    at = address_of(task) + 8 * (best_kernel.HEAD + 5 * rows)
    all_given, at = carray(int64_at(at), (given,)), at + 8 * given
    token_ids, parents = carray(int32_at(at), (tokens,)), carray(int32_at(at + 4 * tokens), (tokens,))
    for row in range(rows):
        line, begin = of.rows[row], trees[row, 0]
        answer = carray(int64_at(line[GIVEN_AT]), (line[GIVEN],))
        for k in range(trees[row, 4] - trees[row, 3]):
            all_given[trees[row, 3] + k] = answer[k]
        token_ids[begin], parents[begin] = of.emitted[row, line[EMITTED] - 1], -1
        drafted = draft_rows.trees[line[NUMBER]]
        for node in range(1, line[SIZE]):
            token_ids[begin + node], parents[begin + node] = drafted[TREE_TOKENS, node], drafted[TREE_PARENTS, node]
        for node in range(line[SIZE], of.tree_sizes[row]):
            token_ids[begin + node], parents[begin + node] = token_ids[begin], 0
    for token in range(tokens):
        of.known[token] = -1
    return True


@inlined
def _forward(of):
    """The forward of what was laid out. Returns whether its ids and positions have rows in the model's tables."""
    n, task, head = of.numbers, of.following, carray(int64_at(of.numbers[RUN_HEAD]), (program_kernel.HEAD,))
    rows, tokens, kinds = n[ROWS], task[best_kernel.PLACES], n[KINDS]
    at = address_of(task) + 8 * (best_kernel.HEAD + 5 * rows + task[best_kernel.GIVEN])
    token_ids, parents = carray(int32_at(at), (tokens,)), carray(int32_at(at + 4 * tokens), (tokens,))
    limits = carray(int64_at(n[LIMITS]), (2, kinds))
    meta = carray(int32_at(address_of(of.meta)), (kinds, tokens, FIELDS))
    fill(parents, of.tree_sizes[:rows], of.pasts[:rows], limits[0], limits[1], meta)
    fed = carray(int64_at(address_of(of.fed)), (2, tokens))
    for token in range(tokens):
        fed[0, token], fed[1, token] = token_ids[token], meta[0, token, POSITION]
    head[program_kernel.TICKET] = head[program_kernel.OUTSIDE] = 0
    head[program_kernel.ALL] = head[program_kernel.WANTED] = tokens
    head[program_kernel.IDS], head[program_kernel.META] = address_of(of.fed), address_of(of.meta)
    head[program_kernel.SCORES] = n[SCORES]
    call_with(n[PREPARE], n[RUN_HEAD])
    if head[program_kernel.OUTSIDE] != 0:
        n[FAILED] = 1
        return False
    if head[program_kernel.THREADS] > 1:
        in_threads(n[PARALLEL], n[RUN], n[RUN_HEAD], head[program_kernel.THREADS])
    else:
        call_with(n[RUN], n[RUN_HEAD])
    return True


@inlined
def _find_few(of):
    """The best few tokens behind the nodes of active rows whose answers are not given: see `DecodingEngine._note_runner_up`."""
    n, task, draft_rows = of.numbers, of.following, rows_arrays(int64_at(of.numbers[DRAFT_ROWS]))
    rows, nodes, trees = n[ROWS], np.int64(0), np.int64(0)
    if n[RECYCLES] == 0:
        return
    at = address_of(task) + 8 * (best_kernel.HEAD + 5 * rows + task[best_kernel.GIVEN])
    tokens = task[best_kernel.PLACES]
    token_ids, parents = carray(int32_at(at), (tokens,)), carray(int32_at(at + 4 * tokens), (tokens,))
    begins = carray(int64_at(address_of(task) + 8 * best_kernel.HEAD), (rows, 5))
    for row in range(rows):
        line = of.rows[row]
        if line[ACTIVE] == 0 or line[GIVEN] > 0:
            continue
        for node in range(line[SIZE]):
            token = begins[row, 0] + node
            of.asked[nodes], of.few_tokens[nodes], of.few_parents[nodes] = token, token_ids[token], parents[token]
            nodes += 1
        own = own_arrays(draft_rows.own, line[NUMBER])
        for k in range(2):
            place = own.length - 2 - k
            of.few_before[trees, k] = own.log[TOKEN, place] if place >= 0 else ANY
        of.few_sizes[trees] = line[SIZE]
        trees += 1
    n[PENDING] = trees
    of.few[best_kernel.ASKED_ROWS], of.few[best_kernel.ALL_ROWS] = nodes, tokens
    if nodes > 0:
        call_with(n[BEST_FEW], address_of(of.few))


@inlined
def _keep(of):
    """What each row emits, as `RunningRow.accept` has it, and which keys and values stay. Returns whether an answer ends."""
    n, task, draft_rows = of.numbers, of.following, rows_arrays(int64_at(of.numbers[DRAFT_ROWS]))
    rows, tokens, moves, ended = n[ROWS], task[best_kernel.PLACES], np.int64(0), False
    trees = carray(int64_at(address_of(task) + 8 * best_kernel.HEAD), (rows, 5))
    at = address_of(task) + 8 * (best_kernel.HEAD + 5 * rows + task[best_kernel.GIVEN] + tokens)
    emitted, path = carray(int64_at(at), (tokens,)), carray(int64_at(at + 8 * tokens), (tokens,))
    counts = carray(int64_at(at + 16 * tokens), (rows, 2))
    for row in range(rows):
        line, begin, said = of.rows[row], trees[row, 0], np.int64(0)
        stops, over = carray(int64_at(line[STOPS_AT]), (line[STOPS],)), False
        while said < counts[row, 0] and not over:
            token = emitted[begin + said]
            of.emitted[row, line[EMITTED] + said] = token
            said += 1
            over = said == line[LEFT]
            for k in range(len(stops)):
                over = over or token == stops[k]
        kept = min(counts[row, 1], said + 1)
        sources = draft_rows.trees[line[NUMBER], TREE_SOURCES]
        for place in range(1, kept):
            node = path[begin + place]
            if node != place:
                of.moves[0, moves], of.moves[1, moves], of.moves[2, moves] = row, line[PAST] + node, line[PAST] + place
                moves += 1
            source = sources[node] if node < line[SIZE] else np.int64(-1)
            of.by_source[row, source + 2] += 1
            of.times[n[TAKEN], RECYCLED] += source == RECYCLED_SOURCE
        if n[OBSERVED] != 0:
            _note(of, row, path, begin, kept, said)
        line[DRAFT_TOKENS] += of.tree_sizes[row] - 1
        line[ACCEPTED] += kept - 1
        line[PAST] += kept
        line[EMITTED] += said
        line[LEFT] -= said
        line[LENGTH] += said
        line[TEXT_LEFT] -= said
        if line[GIVEN] > 0:
            line[GIVEN_AT] += 8 * said
            line[GIVEN] -= said
        ended = ended or over
    for number in range(len(of.buffers) if moves > 0 else 0):
        about = of.buffers[number]
        buffer = carray(int16_at(about[0]), (about[1], about[2], about[3], about[4], about[5]))
        move(buffer, of.moves[0][:moves], of.moves[1][:moves], of.moves[2][:moves])
    return ended


@inlined
def _note(of, row, path, begin, kept, said):
    """For observers: a row's tree, the nodes of it that were walked along, and how many tokens are emitted."""
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
    counts[0], counts[1], counts[2] = of.tree_sizes[row], kept, said


@inlined
def _log(of):
    """The step that was taken, as a `MeasuredStep`, and what drafting takes, as `GoodputBudget.drafted_in` has it."""
    n, step = of.numbers, of.numbers[TAKEN] - 1
    times, line, widest, emitted = of.times[step], of.log[step], np.int64(0), np.int64(0)
    for row in range(n[ROWS]):
        widest = max(widest, of.tree_sizes[row])
        emitted += of.rows[row, LENGTH] - of.lengths[row]
    line[cost.FORWARD_TOKENS], line[cost.FORWARD_ROWS] = of.following[best_kernel.PLACES], n[ROWS]
    line[cost.FORWARD_KEYS], line[cost.FORWARD_CALLS] = of.choice[goodput.KEYS], of.choice[goodput.CALLS]
    line[cost.FORWARD_WIDTH], line[cost.EMITTED] = widest, emitted
    line[cost.SECONDS] = times[VERIFIED] - (times[BEGAN] if step == 0 else of.times[step - 1, VERIFIED])
    line[cost.FORWARD_SECONDS], line[cost.RECYCLING] = times[VERIFIED] - times[DRAWN], times[NOTED] - times[COMPUTED]
    line[cost.DRAFT_SECONDS] = drafting = times[DRAWN] - times[BEGAN]
    line[cost.PREFILLED], line[cost.STANDS_FOR] = 0, 1
    of.reals[DRAFTING] = min(drafting, cost.UP * of.reals[DRAFTING]) if of.reals[DRAFTING] > 0 else drafting
