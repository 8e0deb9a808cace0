"""Runs a whole forward as a list of instructions, in one native call. In: the address of an array that describes it.

A program is a list of stages, each a few instructions that do not wait for each other:

    ROWS        numbers of single tokens: embeddings, norms, rotations, activations, sums. Threads share the tokens.
    PRODUCTS    tokens times weight matrices in panels (panel_kernel.py). Threads share the panels of all products of the stage.
    ATTENTION   one call of lookahead::tree_attention (attention_kernel.py). Threads take shares of it.

All threads of OpenMP's team run the same list. A stage is cut into shares, of which each thread takes its own first and then
those of others (threads.py); it is over when all shares are done, so nobody waits for a thread that the system has taken off
its core and that holds none. Stages behind the last attention are late: they work on the tokens whose scores are wanted alone.

Rows are float32, also where the model's numbers are of half precision: then results are rounded to what that holds. An operand
of an instruction is `outer` times `inner` numbers of a row, or of a constant; it is found by an address, by what is added to it
for each token and each thread, and by two strides. Nothing in an instruction depends on other tokens, and no sum on how many
there are, so a token gets the same bits next to any other tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lookahead.backends.cpu import attention_kernel as attention
from lookahead.backends.cpu.panel_kernel import COUNT, OUTPUTS, PANEL, TASK, TOKENS, look_up, multiply_panels
from lookahead.backends.cpu.quantized_cache_kernel import quantize4, quantize8
from lookahead.backends.cpu.quantized_code import quantize
from lookahead.backends.cpu.vector_math import compute, total
from lookahead.backends.lowering import ops
from lookahead.forward.tree_meta import FIELDS, NODE, PAST, SLOT
from lookahead.native.kernels import carray, float32_at, inlined, int32_at, int64_at, part
from lookahead.native.threads import COUNTS, DONE, SHARES, call_with, number_by, take_share, wait_for, write
from lookahead.native.vectors import narrow, widen

# The array that describes a run: numbers and addresses. The first ones each run brings, the others follow from the plan.
# SCORES goes to SCORES_AT in a table; what lies below MOST_IDS, MOST_POSITIONS can be looked up; OUTSIDE: IDS or POSITIONS, if
# some do not.
HEAD = 22
RUN = 8
(BASE_COUNT, OUTSIDE, ALL, WANTED, _, META, KEPT, SCORES) = range(RUN)  # ops.IDS stands in the gap, ops.POSITIONS behind
(THREADS, STAGES, STAGE_TABLE, ROW_TABLE, PRODUCT_TABLE, ATTENTION_TABLE) = range(RUN + 1, 15)
(ATTEND, YIELDS, COUNTERS, SCORES_AT, MOST_IDS, MOST_POSITIONS, NUMBER) = range(15, 22)
# A stage. LAYERS: of attention, the kind of its layer
STAGE = 5
(STAGE_KIND, FIRST, SOME, LATE, LAYERS) = range(STAGE)
ROWS, PRODUCTS, ATTENTION = range(3)
# An instruction of a stage of rows: what, how many numbers, three operands, and what further the kind of instruction needs.
# AS: how results are rounded, NOT and so on
ROW = 32
(OP, OUTER, INNER, AS, TARGET, LEFT, RIGHT, MORE) = (0, 1, 2, 3, 4, 10, 16, 22)
OPERAND = 6
(BASE, BY_TOKEN, BY_THREAD, BY_WANTED, BY_OUTER, BY_INNER) = range(OPERAND)


@inlined
def _address(line, operand, token, wanted, thread):
    """Return where an operand of an instruction begins for a token."""
    row = wanted if line[operand + BY_WANTED] != 0 else token
    return line[operand + BASE] + row * line[operand + BY_TOKEN] + thread * line[operand + BY_THREAD]


@part
def _copy(count, target, target_step, source, step):
    z, x = carray(float32_at(target), (count * target_step,)), carray(float32_at(source), (count * max(step, 1),))
    for i in range(count):
        z[i * target_step] = x[i * step]


@part
def _turn(op, count, target):
    """Cosines or sines, in place."""
    z = carray(float32_at(target), (count,))
    for i in range(count):
        z[i] = math.cos(np.float64(z[i])) if op == ops.COSINE else math.sin(np.float64(z[i]))


@part
def _widen(dtype, source, count, target):
    """Numbers of the dtype that `ops.NOT` and so on round to."""
    one = np.float32(1)
    if dtype == ops.NOT:
        widen(np.float32(0), source, count, one, target)
    elif dtype == ops.TO_BFLOAT16:
        widen(np.uint16(0), source, count, one, target)
    else:
        widen(np.int16(0), source, count, one, target)


@part
def _compute(op, rounds, count, target, left, left_step, right, right_step):
    compute(op, rounds, count, target, left, left_step, right, right_step)


@part
def _round(rounds, target, count):
    """In place, to what the model's dtype holds."""
    _compute(ops.COPY, rounds, count, target, target, 1, target, 1)


@part
def _store(source, count, target, stored):
    """Numbers from float32 scratch memory that is padded to a multiple of 16, see ops.AS_FLOAT32."""
    one = np.float32(1)
    if stored == ops.AS_FLOAT32:
        narrow(np.float32(0), source, count, one, target)
    elif stored == ops.AS_BFLOAT16:
        narrow(np.uint16(0), source, count, one, target)
    else:
        narrow(np.int16(0), source, count, one, target)


@part
def _special(head, line, op, token, target, source):
    """Instructions that read more than rows."""
    outer, inner = line[OUTER], line[INNER]
    if op == ops.EMBED:
        # MORE: address of the table, bytes of a row (none where it is quantized), kind of its numbers; what is added to the id,
        # which list
        ids = carray(int64_at(head[line[MORE + 4]]), (head[ALL],))
        row = ids[token] + line[MORE + 3]
        if line[MORE + 2] < 0:
            look_up(line[MORE + 2], line[MORE], row, inner, target)
            _round(line[AS], target, inner)
        else:
            _widen(line[MORE + 2], line[MORE] + row * line[MORE + 1], inner, target)
    elif op == ops.POSITION:
        positions = carray(int64_at(head[ops.POSITIONS]), (head[ALL],))
        carray(float32_at(target), (1,))[0] = np.float32(positions[token] + line[MORE])
    elif op == ops.QUANTIZE:  # MORE: groups of 8 bits
        quantize(source, inner, target, line[MORE])
    elif op == ops.GATHER:  # MORE: address of the indices of numbers
        order = carray(int64_at(line[MORE]), (inner,))
        z, x = carray(float32_at(target), (inner,)), carray(float32_at(source), (inner,))
        for i in range(inner):
            z[i] = x[order[i]]
    else:  # WRITE. MORE: address and strides of slot, head and position of the buffer, how numbers are stored
        about = carray(int32_at(head[META]), (head[ALL], FIELDS))[token]
        if about[SLOT] >= 0:
            into = line[MORE] + about[SLOT] * line[MORE + 1] + (about[PAST] + about[NODE]) * line[MORE + 3]
            for number in range(outer):
                begin, home = source + number * line[LEFT + BY_OUTER] * 4, into + number * line[MORE + 2]
                if line[MORE + 4] == ops.IN_8_BITS:
                    quantize8(begin, inner, home)
                elif line[MORE + 4] == ops.IN_4_BITS:
                    quantize4(begin, inner, home)
                else:
                    _store(begin, inner, home, line[MORE + 4])


@part
def _row(head, line, token, wanted, thread):
    """One instruction for one token."""
    op, outer, inner = line[OP], line[OUTER], line[INNER]
    target = _address(line, TARGET, token, wanted, thread)
    left = _address(line, LEFT, token, wanted, thread)
    right = _address(line, RIGHT, token, wanted, thread)
    if op in (ops.EMBED, ops.POSITION, ops.WRITE, ops.QUANTIZE, ops.GATHER):
        _special(head, line, op, token, target, left)
        return
    for _ in range(outer):
        if op == ops.STORE:
            _store(left, inner, target, line[MORE])
            target += line[TARGET + BY_OUTER] * line[MORE + 1]
            left += line[LEFT + BY_OUTER] * 4
            continue
        if op == ops.WIDEN:
            _widen(line[MORE], left, inner, target)
            left += line[LEFT + BY_OUTER] * 2
            target += line[TARGET + BY_OUTER] * 4
            continue
        left_step, right_step, target_step = line[LEFT + BY_INNER], line[RIGHT + BY_INNER], line[TARGET + BY_INNER]
        if op == ops.SUM:
            carray(float32_at(target), (1,))[0] = total(left, inner)
        elif op == ops.COPY and (target_step != 1 or left_step > 1):
            _copy(inner, target, target_step, left, left_step)
        elif op in (ops.COSINE, ops.SINE):
            _copy(inner, target, 1, left, left_step)
            _turn(op, inner, target)
            _round(line[AS], target, inner)
        elif left_step > 1:  # operands of two lie side by side, or are one number
            _copy(inner, target, 1, left, left_step)
            _compute(op, line[AS], inner, target, target, 1, target, 1)
        else:
            _compute(op, line[AS], inner, target, left, left_step, right, right_step)
        target += line[TARGET + BY_OUTER] * 4
        left += line[LEFT + BY_OUTER] * 4
        right += line[RIGHT + BY_OUTER] * 4


@inlined
def _panels(head, stage):
    """Multiply all panels of a stage."""
    total = np.int64(0)
    for number in range(stage[FIRST], stage[FIRST] + stage[SOME]):
        task = carray(int64_at(head[PRODUCT_TABLE] + number * TASK * 8), (TASK,))
        total += (task[OUTPUTS] + PANEL - 1) // PANEL
    return total


@inlined
def _products(head, stage, begin, end, sums, room):
    """Some panels of the products of a stage."""
    at = np.int64(0)
    for number in range(stage[FIRST], stage[FIRST] + stage[SOME]):
        task = carray(int64_at(head[PRODUCT_TABLE] + number * TASK * 8), (TASK,))
        panels = (task[OUTPUTS] + PANEL - 1) // PANEL
        multiply_panels(task, max(begin - at, 0), min(end - at, panels), sums, room)
        at += panels


@inlined
def _rows(head, stage, begin, end, thread):
    """A stage of rows for some tokens."""
    kept = carray(int64_at(head[KEPT]), (head[WANTED],))
    for token in range(begin, end):
        wanted = kept[token] if stage[LATE] else token
        for instruction in range(stage[FIRST], stage[FIRST] + stage[SOME]):
            line = carray(int64_at(head[ROW_TABLE] + instruction * ROW * 8), (ROW,))
            _row(head, line, token, wanted, thread)


@inlined
def _is_outside(address, count, most):
    """Tell whether one of that many int64 is negative or `most` or more."""
    numbers, outside = carray(int64_at(address), (count,)), False
    for k in range(count):
        outside = outside or numbers[k] < 0 or numbers[k] >= most
    return outside


def prepare(address: Any) -> None:
    """Before threads `run` what the array at `address` describes: check ids and positions, and write what this run brings to
    the tables of stages.
    """
    head = carray(int64_at(address), (HEAD,))
    tokens = head[ALL]
    head[ops.POSITIONS] = head[ops.IDS] + 8 * tokens
    if _is_outside(head[ops.POSITIONS], tokens, head[MOST_POSITIONS]):
        head[OUTSIDE] = ops.POSITIONS
    elif _is_outside(head[ops.IDS], tokens, head[MOST_IDS]):
        head[OUTSIDE] = ops.IDS
    stages = carray(int64_at(head[STAGE_TABLE]), (head[STAGES], STAGE))
    for number in range(head[STAGES]):
        stage = stages[number]
        if stage[STAGE_KIND] == PRODUCTS:
            for k in range(stage[FIRST], stage[FIRST] + stage[SOME]):
                product = carray(int64_at(head[PRODUCT_TABLE] + k * TASK * 8), (TASK,))
                product[COUNT] = head[WANTED] if stage[LATE] else tokens
        elif stage[STAGE_KIND] == ATTENTION:
            task = carray(int64_at(head[ATTENTION_TABLE] + stage[FIRST] * stage[SOME]), (attention.TASK,))
            task[attention.TASK_TOKENS] = tokens
            task[attention.TASK_META] = head[META] + stage[LAYERS] * tokens * FIELDS * 4
    carray(int64_at(head[SCORES_AT]), (1,))[0] = head[SCORES]


@inlined
def _attend(head, stage, share, room):
    """A share of a stage of attention. room: address of scratch memory, in which the thread has a task of its own."""
    asked = carray(int64_at(head[ATTENTION_TABLE] + stage[FIRST] * stage[SOME]), (attention.TASK,))
    task = carray(int64_at(room), (attention.TASK,))
    for number in range(attention.TASK):
        task[number] = asked[number]
    task[attention.BEGIN], task[attention.END] = share, share + 1
    call_with(head[ATTEND], room)


@inlined
def _count_shares(head, stage, threads):
    """(items of a stage, shares that they are divided into)"""
    if stage[STAGE_KIND] == ATTENTION:
        task = carray(int64_at(head[ATTENTION_TABLE] + stage[FIRST] * stage[SOME]), (attention.TASK,))
        items = attention.count_shares(task)
        return items, items
    items = _panels(head, stage) if stage[STAGE_KIND] == PRODUCTS else head[WANTED] if stage[LATE] else head[ALL]
    return items, min(items, SHARES * threads if threads > 1 else 1)


def run(address: Any) -> None:
    """One thread's part of the run that the array at `address` describes."""
    head = carray(int64_at(address), (HEAD,))
    threads, base = head[THREADS], head[BASE_COUNT]
    thread = number_by(head[NUMBER]) if threads > 1 else np.int64(0)
    stages = carray(int64_at(head[STAGE_TABLE]), (head[STAGES], STAGE))
    sums, room = np.empty((min(TOKENS, head[ALL]), PANEL), np.float32), np.empty(attention.TASK, np.int64)
    for number in range(head[STAGES]):
        stage, lines = stages[number], head[COUNTERS] + number * threads * COUNTS * 8
        items, shares = _count_shares(head, stage, threads)
        done = np.int64(0)
        for turn in range(threads):
            whose = (thread + turn) % threads
            first, last = -(-shares * whose // threads), -(-shares * (whose + 1) // threads)
            line = lines + whose * COUNTS * 8
            share = take_share(line, base, last - first)
            while share >= 0:
                share += first
                begin, end = items * share // shares, items * (share + 1) // shares
                if stage[STAGE_KIND] == ATTENTION:
                    _attend(head, stage, share, room.ctypes.data)
                elif stage[STAGE_KIND] == PRODUCTS:
                    _products(head, stage, begin, end, sums.ctypes.data, room.ctypes.data)
                else:
                    _rows(head, stage, begin, end, thread)
                done += 1
                share = take_share(line, base, last - first)
            if done == shares:
                break
        if done > 0:
            write(lines + thread * COUNTS * 8 + DONE, base + done)
        wait_for(lines, threads, base, shares, head[YIELDS])
