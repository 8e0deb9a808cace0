"""The experts of the mixture. In: the occurrences of a context. Out: the tokens that each expert names, credited in
scratch.slots.

Each `ask_*` asks one expert (`ask_aligned`: several) and returns its cell and the share that it gives the actual token, from
which its weight learns. Arguments: see `mixture.mix`; rest: of the stick; rank: of the expert, recycled ones not counted.
"""

from __future__ import annotations

import numpy as np

from lookahead.draft.arrays import EXPERTS, HASHES, LEADERS, MOST_SAMPLED, SKIPPED, SLOTS
from lookahead.draft.cells import (
    AT,
    BEFORE,
    BEST,
    COUNT,
    LATEST,
    MOST,
    NEVER,
    OTHER,
    OUTPUT,
    OWN,
    PROMPT,
    RANKED,
    RECYCLED,
    SLOT_COUNT,
    SLOT_MATCH,
    SLOT_OFFERED,
    SLOT_OTHER,
    SLOT_OWN,
    SLOT_POSITION,
    SLOT_RECYCLED,
    SLOT_SOURCE,
    SLOT_TOKEN,
    UNRANKED,
    P,
    aligned_cell,
    cell_of,
    order_bucket,
    recycled_cell,
    skip_cell,
)
from lookahead.draft.own_text import TOKEN
from lookahead.draft.recycled import ANY, entry_of
from lookahead.draft.recycled import BEST as CANDIDATES
from lookahead.draft.sorted_text import (
    END,
    HIGH,
    LOW,
    ORDER,
    PREFIX,
    SOURCE,
    WEIGHTS,
    first_range,
    has_step,
    sample_positions,
    sample_range,
    token_at,
    weight_at,
)
from lookahead.native.kernels import inlined

# A wide range is represented by that many occurrences, evenly, for each share that can matter; by MOST_SAMPLED at most.
RESOLUTION = np.float32(4.0)
LAST = 2  # experts that are asked behind all matches
LEAST_WEIGHT = np.float32(1e-30)  # of all occurrences of an expert; they may weigh nothing


@inlined
def slot_of(scratch, stamp, token):
    """The slot of a token, made if need be; when all are taken, one behind them that nobody reads.

    Slots are unsigned, as every index that is used often: a signed one may count from the end, and is checked for it.
    """
    key = (stamp << 40) | token
    h = np.uint64(token * 40503) & np.uint64(HASHES - 1)
    while scratch.hashes[h] != key:
        if scratch.hashes[h] >> 40 != stamp:
            slot = np.uint64(scratch.counters[1])
            if slot < np.uint64(SLOTS):
                scratch.counters[1] += 1
                scratch.hashes[h], scratch.numbers[h] = key, slot
            slots, values = scratch.slots, scratch.values
            slots[slot, SLOT_TOKEN], slots[slot, SLOT_POSITION], slots[slot, SLOT_COUNT] = token, -1, 0
            slots[slot, SLOT_OWN], slots[slot, SLOT_OTHER] = NEVER, NEVER
            slots[slot, SLOT_RECYCLED] = UNRANKED
            values[slot, P], values[slot, BEST], values[slot, COUNT] = 0, 0, 0
            return slot
        h = (h + np.uint64(1)) & np.uint64(HASHES - 1)
    return np.uint64(scratch.numbers[h])


@inlined
def credit(scratch, slot, gain, source, match):
    """A token gains probability; the largest gain tells its source and match length."""
    scratch.values[slot, P] += gain
    if gain > scratch.values[slot, BEST]:
        scratch.values[slot, BEST] = gain
        scratch.slots[slot, SLOT_SOURCE], scratch.slots[slot, SLOT_MATCH] = source, match


@inlined
def ask(scratch, rank, cell, believed, share):
    scratch.experts[rank] = cell
    scratch.expert_values[rank, 0], scratch.expert_values[rank, 1] = believed, share


@inlined
def ask_aligned(shared, scratch, own, node, stamp, floor, actual):
    """All aligned positions, own first, as long as the rest is above the floor. Returns (rest, experts asked)."""
    rest, rank = np.float32(1.0), np.int64(0)
    for k in range(shared.used[0] + 1):
        text = len(shared.texts) if k == 0 else k - 1
        at = scratch.aligned[node, text, AT]
        if at < 0 or rank == EXPERTS - LAST or (rank > 0 and rest < floor):
            continue
        if k == 0:
            token = np.int64(own.log[TOKEN, at + 1]) if at + 1 < own.length else END
            group, source = OWN, PROMPT if at + 1 < own.prompt_length else OUTPUT
        else:
            token = token_at(shared.texts, text, at + 1)
            group, source = OTHER, shared.texts[text, SOURCE]
        if token == END:
            continue
        cell = aligned_cell(scratch.aligned, node, text, group)
        believed = shared.lambdas[cell]
        credit(scratch, slot_of(scratch, stamp, token), rest * believed, source, scratch.aligned[node, text, BEFORE])
        ask(scratch, rank, cell, believed, np.float32(token == actual))
        rest *= np.float32(1.0) - believed
        rank += 1
    return rest, rank


@inlined
def longest_own_match(scratch, node, occurrences):
    """The order bucket of the longest of the occurrences found in the row's own text, which is noted in scratch.best."""
    longest, found = np.int64(0), scratch.found
    for k in range(occurrences):
        if found[k, 0] > scratch.best[node, 0]:
            scratch.best[node, 0], scratch.best[node, 1] = found[k, 0], found[k, 2]
        longest = max(longest, order_bucket(found[k, 0]))
    return longest


@inlined
def next_other_order(shared, scratch, node):
    """The order of the longest match in other texts that has not been asked; 0 if there is none."""
    order, steps, current = np.int64(0), scratch.steps, scratch.current
    for text in range(shared.used[0]):
        if has_step(shared.texts, steps, scratch.made, scratch.keys, node, text, current[text] + 1, scratch.ranges):
            order = max(order, steps[node, text, current[text] + 1, ORDER])
    return order


@inlined
def ask_recycled(shared, scratch, kind, have, stamp, rest, rank, actual):
    """The runner-up tokens behind the key of this kind; the cell is -1 if there is no such key."""
    cell, share = np.int64(-1), np.float32(0.0)
    second = scratch.recent[1] if have > 1 else np.int64(ANY)
    third = scratch.recent[2] if have > 2 else np.int64(ANY)
    entry, _ = entry_of(shared.recycled_keys, kind, scratch.recent[0], second, third)
    if entry >= 0:
        tokens, weights = shared.recycled_tokens[entry], shared.recycled_weights[entry]
        total = np.float32(0.0)
        for k in range(len(weights)):
            total += weights[k]
        each = np.float32(1.0) / max(total, LEAST_WEIGHT)
        cell = recycled_cell(kind, shared.recycled_seen[entry], weights[0] * each, rank)
        gain = rest * shared.lambdas[cell] * each
        for k in range(len(weights)):
            if weights[k] > 0:
                slot = slot_of(scratch, stamp, np.int64(tokens[k]))
                credit(scratch, slot, gain * weights[k], RECYCLED, 0)
                scratch.slots[slot, SLOT_RECYCLED] -= (CANDIDATES - k) * RANKED[kind]
                if tokens[k] == actual:
                    share = weights[k] * each
    return cell, share


@inlined
def count_own(scratch, occurrences, order, stamp, own_used, own_total):
    """Count the tokens behind the own occurrences of this order bucket. Returns (bucket of the next, tokens seen, occurrences
    seen).
    """
    slots, found, following = scratch.slots, scratch.found, np.int64(0)
    for k in range(occurrences):
        bucket = order_bucket(found[k, 0])
        if bucket < order:
            following = max(following, bucket)
        elif bucket == order:
            slot = slot_of(scratch, stamp, found[k, 1])
            if slots[slot, SLOT_COUNT] == 0:
                scratch.own_slots[own_used, 0], scratch.own_slots[own_used, 1] = slot, found[k, 0]
                own_used += 1
                slots[slot, SLOT_OWN] = order
            slots[slot, SLOT_COUNT] += 1
            slots[slot, SLOT_POSITION] = max(slots[slot, SLOT_POSITION], found[k, 2])
            own_total += 1
    return following, own_used, own_total


@inlined
def ask_own(shared, scratch, own, order, own_used, own_total, rest, rank, actual):
    """The row's own text, by the occurrences counted so far."""
    slots, top, share = scratch.slots, np.int64(0), np.float32(0.0)
    for k in range(own_used):
        top = max(top, slots[np.uint64(scratch.own_slots[k, 0]), SLOT_COUNT])
    each = np.float32(1.0) / np.float32(own_total)
    cell = cell_of(order, OWN, np.float32(own_total), top * each, rank)
    gain = rest * shared.lambdas[cell] * each
    for k in range(own_used):
        slot, match = np.uint64(scratch.own_slots[k, 0]), scratch.own_slots[k, 1]
        source = PROMPT if slots[slot, SLOT_POSITION] + 1 < own.prompt_length else OUTPUT
        credit(scratch, slot, gain * slots[slot, SLOT_COUNT], source, match)
        if slots[slot, SLOT_TOKEN] == actual:
            share = slots[slot, SLOT_COUNT] * each
    return cell, share


@inlined
def ask_other(shared, scratch, node, other_order, stamp, rest, rank, floor, actual):
    """All other texts together, each by its longest match of this order or more. Of many occurrences some are sampled."""
    texts, slots, values, touched = shared.texts, scratch.slots, scratch.values, scratch.touched
    steps, current = scratch.steps, scratch.current
    order, share = order_bucket(other_order), np.float32(0.0)
    total, distinct = np.float32(0.0), 0
    sample, most, filled = scratch.sample, np.int64(MOST_SAMPLED), np.int64(0)
    if floor > 0:
        most = np.int64(min(RESOLUTION * rest / floor, MOST_SAMPLED))
    for text in range(shared.used[0]):
        number = current[text] + 1
        if number < scratch.made[node, text, 0] and steps[node, text, number, ORDER] >= other_order:
            current[text] = number
        if current[text] >= 0:
            low, width = steps[node, text, current[text], LOW], steps[node, text, current[text], HIGH]
            filled = sample_range(texts, text, low, width - low, most, sample, filled)
    filled = np.int64(0)
    for text in range(shared.used[0]):
        if current[text] >= 0:
            step = steps[node, text, current[text]]
            filled = sample_positions(texts, text, min(step[HIGH] - step[LOW], most), step[PREFIX], sample, filled)
    filled = np.int64(0)
    for text in range(shared.used[0]):
        number = current[text]
        if number < 0:
            continue
        prefix = steps[node, text, number, PREFIX]
        width = steps[node, text, number, HIGH] - steps[node, text, number, LOW]
        weighted, source = texts[text, WEIGHTS] > 0, texts[text, SOURCE]
        taken = min(width, most)
        each = shared.weights[text] * (np.float32(width) / np.float32(taken))
        last, slot, here = np.int64(-1), np.uint64(0), np.float32(0.0)
        hit, seen = np.float32(0.0), np.float32(0.0)
        begin, filled = filled, filled + taken
        for k in range(begin, filled):
            sample[k, 1] = token_at(texts, text, sample[k, 0] + prefix)
        for k in range(begin, filled):
            token = sample[k, 1]
            count = each * weight_at(texts, text, sample[k, 0]) if weighted else each
            seen += count
            if token == actual:
                hit += count
            if token == END:
                continue
            if token != last:
                last, slot, here = token, slot_of(scratch, stamp, token), np.float32(0.0)
                if values[slot, COUNT] == 0:
                    values[slot, MOST] = 0
                    touched[np.uint64(distinct)] = slot
                    distinct += 1
                if slots[slot, SLOT_OTHER] == NEVER:
                    slots[slot, SLOT_OTHER] = order
            values[slot, COUNT] += count
            here += count
            if here > values[slot, MOST]:
                values[slot, MOST], slots[slot, SLOT_OFFERED] = here, source
        total += seen
        if actual >= 0 and number == 0:
            shared.trust[text, LATEST] = hit / seen
    top_count = np.float32(0.0)
    for k in range(distinct):
        top_count = max(top_count, values[np.uint64(touched[k]), COUNT])
    each = np.float32(1.0) / max(total, LEAST_WEIGHT)
    cell = cell_of(order, OTHER, total, top_count * each, rank)
    gain = rest * shared.lambdas[cell] * each
    for k in range(distinct):
        slot = np.uint64(touched[k])
        credit(scratch, slot, gain * values[slot, COUNT], slots[slot, SLOT_OFFERED], other_order)
        if slots[slot, SLOT_TOKEN] == actual:
            share = values[slot, COUNT] * each
        values[slot, COUNT] = 0
    return cell, share


@inlined
def ask_skip(shared, scratch, node, stamp, rest, actual):
    """Credit what stands two tokens behind the occurrences of the token before the last; the cell is -1 if there is nothing."""
    before = scratch.keys[node, 1] if node > 0 else np.int64(len(scratch.skipped) - 1)
    if scratch.skipped[before] < 0:
        _find_skips(shared, scratch, before, scratch.recent[1])
    found, share, cell = scratch.skipped[before], np.float32(0.0), np.int64(-1)
    if found > 0:
        cell = skip_cell(found)
        each = np.float32(1.0) / max(scratch.skip_totals[before], LEAST_WEIGHT)
        gain = rest * shared.lambdas[cell] * each
        for k in range(found):
            token, count = np.int64(scratch.skips[before, k, 0]), scratch.skip_counts[before, k]
            slot = slot_of(scratch, stamp, token)
            if scratch.values[slot, BEST] > 0:  # it is a match that tells its source
                scratch.values[slot, P] += gain * count
            else:
                credit(scratch, slot, gain * count, scratch.skips[before, k, 1], 0)
            if token == actual:
                share = count * each
    return cell, share


@inlined
def _find_skips(shared, scratch, node, token):
    """Note what stands two tokens behind the occurrences of a node's token: its children share it."""
    texts, found, total = shared.texts, np.int64(0), np.float32(0.0)
    sample, filled = scratch.sample, np.int64(0)
    for text in range(shared.used[0]):
        low, high = first_range(texts, text, token)
        filled = sample_range(texts, text, low, high - low, SKIPPED, sample, filled)
    filled = np.int64(0)
    for text in range(shared.used[0]):
        low, high = first_range(texts, text, token)
        filled = sample_positions(texts, text, min(high - low, SKIPPED), np.int64(1), sample, filled)
    filled = np.int64(0)
    for text in range(shared.used[0]):
        low, high = first_range(texts, text, token)
        weighted, source, begin = texts[text, WEIGHTS] > 0, texts[text, SOURCE], filled
        filled += min(high - low, SKIPPED)
        for k in range(begin, filled):
            follows = token_at(texts, text, sample[k, 0] + 2)
            if token_at(texts, text, sample[k, 0] + 1) == END:
                continue
            count = shared.weights[text] * weight_at(texts, text, sample[k, 0]) if weighted else shared.weights[text]
            total += count
            if follows == END:
                continue
            at = np.int64(0)
            while at < found and scratch.skips[node, at, 0] != follows:
                at += 1
            if at == found:
                scratch.skips[node, found, 0], scratch.skips[node, found, 1] = follows, source
                scratch.skip_counts[node, found] = np.float32(0.0)
                found += 1
            scratch.skip_counts[node, at] += count
    scratch.skipped[node], scratch.skip_totals[node] = found, total


@inlined
def ask_leaders(shared, scratch, own, stamp, rest, rank, actual):
    """The most frequent tokens of the row's own text, for any context."""
    slots, total, share = scratch.slots, np.float32(0.0), np.float32(0.0)
    for k in range(LEADERS):
        total += own.top_tokens[k, 1]
    each = np.float32(1.0) / total
    cell = cell_of(0, OWN, total, own.top_tokens[0, 1] * each, rank)
    believed = shared.lambdas[cell]
    for k in range(LEADERS):
        token, count, position = own.top_tokens[k, 0], own.top_tokens[k, 1], own.top_tokens[k, 2]
        if count == 0:
            break
        slot = slot_of(scratch, stamp, token)
        source = PROMPT if position < own.prompt_length else OUTPUT
        credit(scratch, slot, rest * believed * each * count, source, 0)
        if slots[slot, SLOT_OWN] == NEVER:
            slots[slot, SLOT_OWN], slots[slot, SLOT_POSITION] = 0, position - 1
        if token == actual:
            share = count * each
    return cell, share
