"""Steps with drafts in one native call: the kernel. In: the address of a block that describes them (`LAYOUT`).

A step is what the engine's is (engine.py): let the drafter learn what was emitted, draft, choose how many nodes pay, verify all
trees in one forward, keep what the model itself emits. Each part is the C function that Python calls, too; what stands here is
what goes from one to the next. Rows may prefill at the first step. The call ends behind the step in which an answer ends, and
before a step that needs what only Python has: more memory, or a step without any drafts.
"""

from __future__ import annotations

import numpy as np

from lookahead.backends.cpu.steps_kernel import in_threads
from lookahead.budget import cost, goodput
from lookahead.budget.backoff import APART, DEBT
from lookahead.budget.books import BESIDE, BESIDE_DRAFTED, GAINED, books_arrays
from lookahead.budget.books import PRICE as OF_PRICE
from lookahead.budget.goodput import AS_MANY_AS_PAY
from lookahead.decode.drafted_layout import (
    ACCEPT,
    ACTIVE,
    ADAPTIVE,
    ADDING,
    BEFORE,
    BEGAN,
    BOOKS,
    CALL,
    CHOOSE,
    CHUNK,
    CLOCK,
    COMPUTED,
    DECODES,
    DECODING,
    DEPTH,
    DRAFT_ROWS,
    DRAFTED,
    DRAFTING,
    DRAWN,
    EMITTED,
    FED,
    FOLLOW,
    GREW,
    GROW,
    KNOWN,
    LEARNS,
    LEAST_PRICE,
    LEFT,
    LENGTH,
    LONGEST,
    MOST,
    NODES,
    NOTED,
    NUMBER,
    PARALLEL,
    PENDING,
    PHASE,
    PRICE,
    ROWS,
    SAID,
    SCRATCHES,
    SHARED,
    SIZE,
    STEP,
    TAKEN,
    TEXT_LEFT,
    TOKENS,
    UNTIL,
    VERIFIED,
    WIDEST,
    WISHED,
    of_call,
)
from lookahead.decode.drafted_verify import find_few, forward, is_drafted_for, keep, lay_out
from lookahead.draft import planner
from lookahead.draft.arrays import rows_arrays, shared_arrays
from lookahead.draft.recycled import add_trees
from lookahead.forward.batch_kernel import attended
from lookahead.native.clock import seconds_at
from lookahead.native.kernels import address_of, carray, float64_at, inlined, int32_at, int64_at
from lookahead.native.threads import call_with


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
        if not forward(of):
            return
        of.times[step, COMPUTED] = _now(of)
        find_few(of)
        of.times[step, NOTED] = _now(of)
        call_with(n[FOLLOW], address_of(of.following))
        ended = keep(of)
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
    n[DECODING] = n[FED] = 0
    for row in range(n[ROWS]):
        line = of.rows[row]
        n[DECODING] += line[PHASE] == DECODES
        n[FED] += line[CHUNK]
        if is_drafted_for(line):
            of.limits[count, 0], of.limits[count, 1] = line[NUMBER], n[NODES]
            of.limits[count, 2] = min(n[DEPTH], line[LEFT] - 1, max(0, line[TEXT_LEFT]))
            count += 1
    free = np.int64(0)
    if n[ADAPTIVE] != 0:
        free = n[DRAFTED] if n[DECODING] == 1 else n[DRAFTED] // n[DECODING] | 1
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
    return lay_out(of, padding, padded)


@inlined
def _choose(of, count):
    """How many nodes of each tree are verified becomes SIZE of rows, and `kept` of the drafter's. Returns how many tokens fill
    the forward up, and the number of the tree that these join.
    """
    n, books, draft_rows = of.numbers, books_arrays(int64_at(of.numbers[BOOKS])), rows_arrays(int64_at(of.numbers[DRAFT_ROWS]))
    keys, calls, choice, decoding = np.int64(0), np.int64(1), of.choice, np.int64(0)
    for row in range(n[ROWS]):
        if of.rows[row, PHASE] == DECODES:
            of.lengths[decoding] = of.rows[row, LENGTH]
            keys += of.rows[row, LENGTH]
            decoding += 1
    if decoding > 1:
        keys, calls = attended(of.lengths[:decoding], of.reals[CALL])
    choice[goodput.COUNT], choice[goodput.PLAIN_ROWS], choice[goodput.FED] = count, decoding, n[FED]
    choice[goodput.KEYS], choice[goodput.CALLS], choice[goodput.BEFORE] = keys, calls, n[BEFORE]
    choice[goodput.PADDING], choice[goodput.FILLED], returns = 0, -1, np.inf
    if n[ADAPTIVE] != 0:
        choice[goodput.WANTED] = n[WISHED]
        call_with(n[CHOOSE], address_of(choice))
        n[BEFORE] = choice[goodput.TOKENS]
        if choice[goodput.TAKEN] > 0 and n[BEFORE] > decoding + n[FED]:
            n[DRAFTED] = n[BEFORE] - decoding - n[FED]
        if n[WISHED] == AS_MANY_AS_PAY:
            of.reals[PRICE] = books.state[OF_PRICE]
            if of.reals[DRAFTING] > 0:
                beside = books.state[BESIDE_DRAFTED] - books.state[BESIDE]
                returns = books.state[GAINED] / max(of.reals[DRAFTING], beside)
    tree, step = np.int64(0), n[STEP] + n[TAKEN]
    for row in range(n[ROWS]):
        line = of.rows[row]
        line[SIZE] = 1
        if is_drafted_for(line):
            line[SIZE] = books.kept[tree] if n[ADAPTIVE] != 0 else of.spans[tree, 1]
            draft_rows.kept[line[NUMBER]] = line[SIZE]
            if n[ADAPTIVE] != 0:  # see `Backoff.drafted`
                of.debts[row] = min(max(0.0, of.debts[row] + 1 - (returns if line[SIZE] > 1 else 0.0)), float(DEBT))
                line[UNTIL] = (step // APART + 1) * APART if of.debts[row] >= DEBT else step + 1
            tree += 1
    return choice[goodput.PADDING], choice[goodput.FILLED]


@inlined
def _log(of):
    """The step that was taken, as a `MeasuredStep`, and what drafting takes, as `GoodputBudget.drafted_in` has it."""
    n, step = of.numbers, of.numbers[TAKEN] - 1
    times, line = of.times[step], of.log[step]
    line[cost.FORWARD_TOKENS], line[cost.FORWARD_ROWS] = n[TOKENS], n[DECODING]
    line[cost.FORWARD_KEYS], line[cost.FORWARD_CALLS] = of.choice[goodput.KEYS], of.choice[goodput.CALLS]
    line[cost.FORWARD_WIDTH], line[cost.EMITTED] = n[WIDEST], n[SAID]
    line[cost.SECONDS] = times[VERIFIED] - (times[BEGAN] if step == 0 else of.times[step - 1, VERIFIED])
    line[cost.FORWARD_SECONDS], line[cost.RECYCLING] = times[VERIFIED] - times[DRAWN], times[NOTED] - times[COMPUTED]
    line[cost.DRAFT_SECONDS] = drafting = times[DRAWN] - times[BEGAN]
    line[cost.PREFILLED], line[cost.STANDS_FOR] = n[FED], 1
    of.reals[DRAFTING] = min(drafting, cost.UP * of.reals[DRAFTING]) if of.reals[DRAFTING] > 0 else drafting
