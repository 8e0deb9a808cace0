"""Runs a whole forward as a list of instructions, in one native call. In: the address of an array that describes it.

A program is a list of stages, each a few instructions that do not wait for each other:

    ROWS        numbers of single tokens: embeddings, norms, rotations, activations, sums. Threads share the tokens.
    PRODUCTS    tokens times weight matrices in panels (panel_kernel.py). Threads share the panels of all products of the stage.
    ATTENTION   one call of lookahead::tree_attention (attention_kernel.py). Threads take shares of it.

All threads of OpenMP's team run the same list. A stage is cut into shares, which they take as they come; it is over when all
shares are done, so nobody waits for a thread that the system lets do something else and that holds none. Stages behind the last
attention are late: they work on the tokens whose scores are wanted alone.

Rows are float32, also where the model's numbers are of half precision: then results are rounded to what that holds. An operand
of an instruction is `outer` times `inner` numbers of a row, or of a constant; it is found by an address, by what is added to it
for each token and each thread, and by two strides. Nothing in an instruction depends on other tokens, and no sum on how many
there are, so a token gets the same bits next to any other tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lookahead.backends.cpu.attention_kernel import DONE, TASK_META, TASK_TOKENS, TICKETS
from lookahead.backends.cpu.attention_kernel import TASK as ATTENTION_TASK
from lookahead.backends.cpu.panel_kernel import (
    ASKED,
    COUNT,
    INT4,
    INT8,
    OUTPUTS,
    PANEL,
    TASK,
    TOKENS,
    look_up,
    multiply_panels,
    store,
)
from lookahead.backends.cpu.quantized_cache_kernel import quantize4, quantize8
from lookahead.backends.cpu.quantized_code import quantize
from lookahead.backends.cpu.vector_math import (
    erf,
    exp,
    gelu,
    gelu_tanh,
    relu,
    sigmoid,
    silu,
    tanh,
    to_bfloat16,
    to_float16,
)
from lookahead.backends.lowering import ops
from lookahead.forward.tree_meta import FIELDS, NODE, PAST, SLOT
from lookahead.native.kernels import carray, float32_at, inlined, int32_at, int64_at, part
from lookahead.native.threads import add, call_with, wait_for
from lookahead.native.vectors import take_ticket, widen

# The array that describes a run: numbers and addresses. The first ones each run brings, the others follow from the plan.
# SCORES goes to SCORES_AT in a table; what lies below MOST_IDS, MOST_POSITIONS can be looked up; OUTSIDE: IDS or POSITIONS, if
# some do not.
HEAD = 21
RUN = 8
(TICKET, OUTSIDE, ALL, WANTED, _, META, KEPT, SCORES) = range(RUN)  # ops.IDS stands in the gap, ops.POSITIONS behind
(THREADS, STAGES, STAGE_TABLE, ROW_TABLE, PRODUCT_TABLE, ATTENTION_TABLE) = range(RUN + 1, 15)
(ATTEND, YIELDS, COUNTERS, SCORES_AT, MOST_IDS, MOST_POSITIONS) = range(15, 21)
# A stage. LAYERS: of attention, the kind of its layer
STAGE = 5
(STAGE_KIND, FIRST, SOME, LATE, LAYERS) = range(STAGE)
COUNTER = 16  # int64 that each stage has for its counters, of shares that are taken and that are done: in lines of their own
SHARES = 3  # that a stage is cut into, for each thread
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
def _two(op, count, target, left, left_step, right, right_step):
    """target = left op right. A step of 0: one number for all."""
    z = carray(float32_at(target), (count,))
    x, y = carray(float32_at(left), (count,)), carray(float32_at(right), (count,))
    if left_step != 0 and right_step != 0:
        if op == ops.ADD:
            for i in range(count):
                z[i] = x[i] + y[i]
        elif op == ops.SUBTRACT:
            for i in range(count):
                z[i] = x[i] - y[i]
        elif op == ops.MULTIPLY:
            for i in range(count):
                z[i] = x[i] * y[i]
        else:
            for i in range(count):
                z[i] = x[i] / y[i]
    elif left_step != 0:
        one = y[0]
        if op == ops.ADD:
            for i in range(count):
                z[i] = x[i] + one
        elif op == ops.SUBTRACT:
            for i in range(count):
                z[i] = x[i] - one
        elif op == ops.MULTIPLY:
            for i in range(count):
                z[i] = x[i] * one
        else:
            for i in range(count):
                z[i] = x[i] / one
    else:
        one, step = x[0], np.int64(right_step != 0)
        if op == ops.ADD:
            for i in range(count):
                z[i] = one + y[i * step]
        elif op == ops.SUBTRACT:
            for i in range(count):
                z[i] = one - y[i * step]
        elif op == ops.MULTIPLY:
            for i in range(count):
                z[i] = one * y[i * step]
        else:
            for i in range(count):
                z[i] = one / y[i * step]


@part
def _copy(count, target, target_step, source, step):
    z, x = carray(float32_at(target), (count * target_step,)), carray(float32_at(source), (count * max(step, 1),))
    if step == 1 and target_step == 1:
        for i in range(count):
            z[i] = x[i]
    else:
        for i in range(count):
            z[i * target_step] = x[i * step]


@part
def _one(op, count, target):
    """Apply one instruction in place."""
    z = carray(float32_at(target), (count,))
    if op == ops.NEGATE:
        for i in range(count):
            z[i] = -z[i]
    elif op == ops.SQUARE_ROOT:
        for i in range(count):
            z[i] = math.sqrt(z[i])
    elif op == ops.COSINE:
        for i in range(count):
            z[i] = math.cos(np.float64(z[i]))
    elif op == ops.SINE:
        for i in range(count):
            z[i] = math.sin(np.float64(z[i]))
    elif op == ops.EXP:
        exp(target, count)
    elif op == ops.SIGMOID:
        sigmoid(target, count)
    elif op == ops.SILU:
        silu(target, count)
    elif op == ops.TANH:
        tanh(target, count)
    elif op == ops.ERF:
        erf(target, count)
    elif op == ops.GELU:
        gelu(target, count)
    elif op == ops.GELU_TANH:
        gelu_tanh(target, count)
    elif op == ops.RELU:
        relu(target, count)


@part
def _fold(op, count, source):
    """The sum of numbers, 16 partial ones first, or the largest."""
    x = carray(float32_at(source), (count,))
    if op == ops.LARGEST:
        most = x[0]
        for i in range(1, count):
            most = max(most, x[i])
        return most
    sums = np.zeros(16, np.float32)
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        for lane in range(16):
            sums[lane] += x[i + lane]
    for i in range(whole, count):
        sums[i - whole] += x[i]
    for half in (8, 4, 2, 1):
        for lane in range(half):
            sums[lane] += sums[lane + half]
    return sums[0]


@part
def _round(line, target, count):
    """Results, in-place, to what the model's dtype holds."""
    if line[AS] == ops.TO_BFLOAT16:
        to_bfloat16(target, count)
    elif line[AS] == ops.TO_FLOAT16:
        to_float16(target, count)


@part
def _special(head, line, op, token, target, source):
    """Instructions that read more than rows."""
    outer, inner = line[OUTER], line[INNER]
    if op == ops.EMBED:
        # MORE: address of the table, bytes of a row (groups, where it is quantized), kind of its numbers; what is added to the
        # id, which list
        ids = carray(int64_at(head[line[MORE + 4]]), (head[ALL],))
        row = ids[token] + line[MORE + 3]
        where = line[MORE] + row * line[MORE + 1]
        one = np.float32(1)
        if line[MORE + 2] < 0:
            look_up(INT8 if line[MORE + 2] == ops.IN_8_BITS else INT4, line[MORE], line[MORE + 1], row, inner, target)
            _round(line, target, inner)
        elif line[MORE + 2] == ops.NOT:
            widen(np.float32(0), where, inner, one, target)
        elif line[MORE + 2] == ops.TO_BFLOAT16:
            widen(np.uint16(0), where, inner, one, target)
        else:
            widen(np.int16(0), where, inner, one, target)
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
                    store(begin, inner, home, line[MORE + 4])


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
            store(left, inner, target, line[MORE])
            target += line[TARGET + BY_OUTER] * line[MORE + 1]
            left += line[LEFT + BY_OUTER] * 4
            continue
        if op == ops.WIDEN:
            if line[MORE] == ops.TO_BFLOAT16:
                widen(np.uint16(0), left, inner, np.float32(1), target)
            else:
                widen(np.int16(0), left, inner, np.float32(1), target)
            left += line[LEFT + BY_OUTER] * 2
            target += line[TARGET + BY_OUTER] * 4
            continue
        if op in (ops.SUM, ops.LARGEST):
            carray(float32_at(target), (1,))[0] = _fold(op, inner, left)
        elif op >= ops.NEGATE:
            _copy(inner, target, 1, left, line[LEFT + BY_INNER])
            _one(op, inner, target)
        elif op == ops.COPY:
            _copy(inner, target, line[TARGET + BY_INNER], left, line[LEFT + BY_INNER])
        else:
            _two(op, inner, target, left, line[LEFT + BY_INNER], right, line[RIGHT + BY_INNER])
        _round(line, target, inner)
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
    """Before threads `run` what the array at `address` describes: check ids and positions, write what this run brings to the
    tables of stages, and reset all counters.
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
        counters = carray(int64_at(head[COUNTERS] + number * COUNTER * 8), (COUNTER,))
        for k in range(COUNTER):
            counters[k] = 0
        if stage[STAGE_KIND] == PRODUCTS:
            for k in range(stage[FIRST], stage[FIRST] + stage[SOME]):
                product = carray(int64_at(head[PRODUCT_TABLE] + k * TASK * 8), (TASK,))
                product[COUNT] = head[WANTED] if stage[LATE] else tokens
        elif stage[STAGE_KIND] == ATTENTION:
            task = carray(int64_at(head[ATTENTION_TABLE] + stage[FIRST] * stage[SOME]), (ATTENTION_TASK,))
            task[TICKETS], task[DONE], task[TASK_TOKENS] = 0, 0, tokens
            task[TASK_META] = head[META] + stage[LAYERS] * tokens * FIELDS * 4
    carray(int64_at(head[SCORES_AT]), (1,))[0] = head[SCORES]


def run(address: Any) -> None:
    """One thread's part of the run that the array at `address` describes."""
    head = carray(int64_at(address), (HEAD,))
    thread, threads = take_ticket(address), head[THREADS]
    stages = carray(int64_at(head[STAGE_TABLE]), (head[STAGES], STAGE))
    sums, room = np.empty((min(TOKENS, head[ALL]), PANEL), np.float32), np.empty(ASKED, np.int64)
    for number in range(head[STAGES]):
        stage = stages[number]
        if stage[STAGE_KIND] == ATTENTION:
            call_with(head[ATTEND], head[ATTENTION_TABLE] + stage[FIRST] * stage[SOME])
            continue
        counter = head[COUNTERS] + number * COUNTER * 8
        items = _panels(head, stage) if stage[STAGE_KIND] == PRODUCTS else head[WANTED] if stage[LATE] else head[ALL]
        shares = min(items, SHARES * threads) if threads > 1 else min(items, 1)
        share, done = take_ticket(counter), np.int64(0)
        while share < shares:
            begin, end = items * share // shares, items * (share + 1) // shares
            if stage[STAGE_KIND] == PRODUCTS:
                _products(head, stage, begin, end, sums.ctypes.data, room.ctypes.data)
            else:
                _rows(head, stage, begin, end, thread)
            done += 1
            share = take_ticket(counter)
        add(counter + COUNTER * 4, done)
        wait_for(counter + COUNTER * 4, shares, head[YIELDS])
