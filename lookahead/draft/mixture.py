"""What comes next: a mixture of experts, one for each context length. In: the places of a context. Out: tokens with
probabilities.

An *expert* is one group of places that agree with the context in at least `order` tokens, and says P_e(t) = the share of them
that t follows. There are two groups: the request's *own* text, and all *other* text (tries and finished outputs, their counts
added). The experts are asked in turn, longest order first, own before other; each is believed with a learned weight lambda and
leaves the rest to those behind it (stick-breaking):

    P(t) = sum over e of [product over earlier j of (1 - lambda_j)] * lambda_e * P_e(t)

lambda is the mean of what the expert's *cell* has earned so far: cells tell experts apart by order, group, number of places,
share of the commonest successor, and rank: how many were asked before, recycled ones not counted. After the longest match there
has broken off, *aligned* experts stand first: they go on where the broken match would be now, as text that was copied with one
word changed does. Before the shorter matches (ASKED), *recycled* experts tell what the model almost said there (recycled.py).
Last, order 0 offers the commonest tokens. A second learned factor rescores each token by who proposes it (`rescore`).

Worked example: own text "a b a b", context "... b": one own expert of order 2 (one place, "a" follows), lambda .6, and one of
order 1 with the same place, skipped; then P(a) = .6 and .4 is left for order 0.
"""

from __future__ import annotations

import numpy as np

from lookahead.draft.aligned import AT, BEFORE, aligned_cell
from lookahead.draft.arrays import EXPERTS, LEADERS, MOST_SAMPLED
from lookahead.draft.cells import (
    ALIGNED,
    BEST,
    BY_LAST,
    BY_ORDERS,
    BY_RECENCY,
    BY_RECYCLED,
    COUNT,
    COUNTS,
    LAST_TOKENS,
    LATEST,
    MOST,
    NEVER,
    ORDERS,
    OTHER,
    OUTPUT,
    OWN,
    PROMPT,
    RANKED,
    RANKS,
    RECENCIES,
    RECYCLED,
    SHARES,
    SLOT_COUNT,
    SLOT_MATCH,
    SLOT_OFFERED,
    SLOT_OTHER,
    SLOT_OWN,
    SLOT_PLACE,
    SLOT_RECYCLED,
    SLOT_SOURCE,
    SLOT_TOKEN,
    P,
    cell_of,
    order_bucket,
    recency_bucket,
    recycled_cell,
    slot_of,
)
from lookahead.draft.own_text import TOKEN, own_places
from lookahead.draft.places import (
    END,
    HIGH,
    LOW,
    ORDER,
    PREFIX,
    SOURCE,
    WEIGHTS,
    has_step,
    suffix_at,
    token_at,
    weight_at,
)
from lookahead.draft.recycled import ANY, ASKED, KINDS, place_of
from lookahead.draft.recycled import BEST as PLACED
from lookahead.kernels import inlined, woven

FEWEST = 6  # places, up to MOST_SAMPLED, represent a wider range, evenly: as many as shares that matter can be told apart
RESOLUTION = np.float32(4.0)
LEAST_WEIGHT = np.float32(1e-30)  # of all places of an expert; they may weigh nothing
HOPE = np.float32(8.0)  # times as probable as the experts say: no token gets there by its factors


@woven
def _credit(scratch, slot, gain, source, match):
    """A token gains probability; the largest gain tells its source and match length."""
    scratch.values[slot, P] += gain
    if gain > scratch.values[slot, BEST]:
        scratch.values[slot, BEST] = gain
        scratch.slots[slot, SLOT_SOURCE], scratch.slots[slot, SLOT_MATCH] = source, match


@woven
def _ask(scratch, rank, cell, believed, share):
    scratch.experts[rank] = cell
    scratch.expert_values[rank, 0], scratch.expert_values[rank, 1] = believed, share


@inlined
def mix(shared, scratch, own, node, have, floor, actual):
    """Fill scratch.slots with what the experts say behind the context of `node`, scratch.recent[:have]; returns their number.

    floor   the rest of the stick below which no further expert is asked
    actual  a token: scratch.expert_values[e, 1] becomes the share that expert e gives it (for learning), or -1
    """
    texts, lambdas, steps, current, found = shared.texts, shared.lambdas, scratch.steps, scratch.current, scratch.found
    number_of_texts = shared.used[0]
    stamp = scratch.counters[0] + 1
    scratch.counters[0], scratch.counters[1] = stamp, 0
    scratch.best[node, 0], scratch.best[node, 1] = 0, -1
    for text in range(number_of_texts):
        shared.trust[text, LATEST] = -1.0
    rest, rank = _ask_aligned(shared, scratch, own, node, stamp, floor, actual)  # rank: of the next expert
    if rest < floor:
        return rank
    places = own_places(own.log, own.heads, own.length, scratch.recent, have, found, scratch.chains)
    own_order = np.int64(0)  # bucket of the next own expert
    for k in range(places):
        if found[k, 0] > scratch.best[node, 0]:
            scratch.best[node, 0], scratch.best[node, 1] = found[k, 0], found[k, 2]
        own_order = max(own_order, order_bucket(found[k, 0]))
    own_used, own_total, recycled = np.int64(0), np.int64(0), np.int64(0)  # recycled: experts of this kind asked
    for text in range(number_of_texts):
        current[text] = -1  # the step that counts
    kind = np.int64(0 if shared.used[1] > 0 else len(KINDS))  # of the next recycled expert
    second = scratch.recent[1] if have > 1 else np.int64(ANY)
    third = scratch.recent[2] if have > 2 else np.int64(ANY)
    while rest >= floor and rank < EXPERTS - 2:
        other_order = np.int64(0)  # of the next other expert
        for text in range(number_of_texts):
            if has_step(texts, steps, scratch.made, scratch.keys, node, text, current[text] + 1):
                other_order = max(other_order, steps[node, text, current[text] + 1, ORDER])
        if kind < len(KINDS) and max(own_order, order_bucket(other_order)) <= ASKED[kind]:
            place, _ = place_of(shared.recycled_keys, kind, scratch.recent[0], second, third)
            kind += 1
            if place < 0:
                continue
            cell, share = _ask_recycled(shared, scratch, stamp, rest, place, kind - 1, rank - recycled, actual)
            recycled += 1
        elif own_order > 0 and own_order >= order_bucket(other_order):
            order, before = own_order, own_total
            own_order, own_used, own_total = _gather_own(scratch, stamp, places, order, own_used, own_total)
            if own_total == before:
                continue
            cell, share = _ask_own(shared, scratch, own, rest, order, own_used, own_total, rank - recycled, actual)
        elif other_order > 0:
            cell, share = _ask_other(shared, scratch, stamp, rest, node, other_order, floor, rank - recycled, actual)
        else:
            break
        believed = lambdas[cell]
        _ask(scratch, rank, cell, believed, share)
        rest *= np.float32(1.0) - believed
        rank += 1

    if rest >= floor and own.leaders[0, 1] > 0:  # order 0
        believed = _ask_own_common(shared, scratch, own, stamp, rest, rank, rank - recycled, actual)
        rest *= np.float32(1.0) - believed
        rank += 1
    if rest >= floor and shared.common_shares[0] > 0:
        _ask_common(shared, scratch, stamp, rest, rank, rank - recycled, actual)
        rank += 1
    return rank


@woven
def _ask_aligned(shared, scratch, own, node, stamp, floor, actual):
    """Aligned places, the request's own first. Returns (the rest of the stick, experts asked)."""
    texts, rest, rank = shared.texts, np.float32(1.0), np.int64(0)
    for k in range(shared.used[0] + 1):
        text = len(texts) if k == 0 else k - 1
        at = scratch.aligned[node, text, AT]
        if at < 0 or rank == EXPERTS - 2:  # two of order 0 come last
            continue
        if k == 0:
            token = np.int64(own.log[TOKEN, at + 1]) if at + 1 < own.length else END
            group, source = OWN, PROMPT if at + 1 < own.prompt_length else OUTPUT
        else:
            token = token_at(texts, text, at + 1)
            group, source = OTHER, texts[text, SOURCE]
        if token == END:
            continue
        cell = aligned_cell(scratch.aligned, node, text, group)
        believed = shared.lambdas[cell]
        _credit(scratch, slot_of(scratch, stamp, token), rest * believed, source, scratch.aligned[node, text, BEFORE])
        _ask(scratch, rank, cell, believed, np.float32(token == actual))
        rest *= np.float32(1.0) - believed
        rank += 1
        if rest < floor:
            break
    return rest, rank


@woven
def _ask_recycled(shared, scratch, stamp, rest, place, kind, rank, actual):
    """What was recycled behind a key: its place in the table, and its kind. Returns (cell, share of `actual`)."""
    tokens, weights = shared.recycled_tokens[place], shared.recycled_weights[place]
    total, share = np.float32(0.0), np.float32(0.0)
    for k in range(len(weights)):
        total += weights[k]
    each = np.float32(1.0) / max(total, LEAST_WEIGHT)
    cell = recycled_cell(kind, shared.recycled_seen[place], weights[0] * each, rank)
    gain = rest * shared.lambdas[cell] * each
    for k in range(len(weights)):
        if weights[k] > 0:
            slot = slot_of(scratch, stamp, np.int64(tokens[k]))
            _credit(scratch, slot, gain * weights[k], RECYCLED, 0)
            scratch.slots[slot, SLOT_RECYCLED] -= (PLACED - k) * RANKED[kind]
            if tokens[k] == actual:
                share = weights[k] * each
    return cell, share


@woven
def _gather_own(scratch, stamp, places, order, used, total):
    """Count the own places of an order bucket, beside the `total` of longer ones, whose slots are scratch.own_slots[:used].

    Returns (bucket of the next own expert, used, total).
    """
    slots, found, further = scratch.slots, scratch.found, np.int64(0)
    for k in range(places):
        bucket = order_bucket(found[k, 0])
        if bucket < order:
            further = max(further, bucket)
        elif bucket == order:
            slot = slot_of(scratch, stamp, found[k, 1])
            if slots[slot, SLOT_COUNT] == 0:
                scratch.own_slots[used, 0], scratch.own_slots[used, 1] = slot, found[k, 0]
                used += 1
                slots[slot, SLOT_OWN] = order
            slots[slot, SLOT_COUNT] += 1
            slots[slot, SLOT_PLACE] = max(slots[slot, SLOT_PLACE], found[k, 2])
            total += 1
    return further, used, total


@woven
def _ask_own(shared, scratch, own, rest, order, used, total, rank, actual):
    """The own places that were counted. Returns (cell, share of `actual`)."""
    slots, top, share = scratch.slots, np.int64(0), np.float32(0.0)
    for k in range(used):
        top = max(top, slots[np.uint64(scratch.own_slots[k, 0]), SLOT_COUNT])
    each = np.float32(1.0) / np.float32(total)
    cell = cell_of(order, OWN, np.float32(total), top * each, rank)
    gain = rest * shared.lambdas[cell] * each
    for k in range(used):
        slot, match = np.uint64(scratch.own_slots[k, 0]), scratch.own_slots[k, 1]
        source = PROMPT if slots[slot, SLOT_PLACE] + 1 < own.prompt_length else OUTPUT
        _credit(scratch, slot, gain * slots[slot, SLOT_COUNT], source, match)
        if slots[slot, SLOT_TOKEN] == actual:
            share = slots[slot, SLOT_COUNT] * each
    return cell, share


@woven
def _ask_other(shared, scratch, stamp, rest, node, other_order, floor, rank, actual):
    """The places of this order in all sorted texts, of wide ranges a sample. Returns (cell, share of `actual`)."""
    texts, slots, values = shared.texts, scratch.slots, scratch.values
    steps, current, touched = scratch.steps, scratch.current, scratch.touched
    order, share = order_bucket(other_order), np.float32(0.0)
    total, distinct = np.float32(0.0), 0
    sample = np.int64(MOST_SAMPLED)
    if floor > 0:
        sample = np.int64(min(max(RESOLUTION * rest / floor, FEWEST), MOST_SAMPLED))
    for text in range(shared.used[0]):
        number = current[text] + 1
        if number < scratch.made[node, text, 0] and steps[node, text, number, ORDER] >= other_order:
            current[text] = number
        number = current[text]
        if number < 0:
            continue
        low, prefix = steps[node, text, number, LOW], steps[node, text, number, PREFIX]
        width = steps[node, text, number, HIGH] - low
        weighted, source = texts[text, WEIGHTS] > 0, texts[text, SOURCE]
        taken = min(width, sample)
        each = shared.weights[text] * (np.float32(width) / np.float32(taken))
        last, slot, here = np.int64(-1), np.uint64(0), np.float32(0.0)
        hit, seen = np.float32(0.0), np.float32(0.0)
        for k in range(taken):
            place = low + k if taken == width else low + (2 * k + 1) * width // (2 * taken)
            position = suffix_at(texts, text, place)
            count = each * weight_at(texts, text, position) if weighted else each
            seen += count
            token = token_at(texts, text, position + prefix)
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
        _credit(scratch, slot, gain * values[slot, COUNT], slots[slot, SLOT_OFFERED], other_order)
        if slots[slot, SLOT_TOKEN] == actual:
            share = values[slot, COUNT] * each
        values[slot, COUNT] = 0
    return cell, share


@woven
def _ask_own_common(shared, scratch, own, stamp, rest, expert, rank, actual):
    """The own text's commonest tokens, as this expert. Returns how much it is believed."""
    slots, total, share = scratch.slots, np.float32(0.0), np.float32(0.0)
    for k in range(LEADERS):
        total += own.leaders[k, 1]
    each = np.float32(1.0) / total
    cell = cell_of(0, OWN, total, own.leaders[0, 1] * each, rank)
    believed = shared.lambdas[cell]
    for k in range(LEADERS):
        token, count, place = own.leaders[k, 0], own.leaders[k, 1], own.leaders[k, 2]
        if count == 0:
            break
        slot = slot_of(scratch, stamp, token)
        source = PROMPT if place < own.prompt_length else OUTPUT
        _credit(scratch, slot, rest * believed * each * count, source, 0)
        if slots[slot, SLOT_OWN] == NEVER:
            slots[slot, SLOT_OWN], slots[slot, SLOT_PLACE] = 0, place - 1
        if token == actual:
            share = count * each
    _ask(scratch, expert, cell, believed, share)
    return believed


@woven
def _ask_common(shared, scratch, stamp, rest, expert, rank, actual):
    """The commonest tokens of all sorted texts, as this expert."""
    slots = scratch.slots
    cell = cell_of(0, OTHER, np.float32(1e6), shared.common_shares[0], rank)
    believed, share = shared.lambdas[cell], np.float32(0.0)
    for k in range(LEADERS):
        token = shared.common[k, 0]
        if shared.common_shares[k] == 0:
            break
        slot = slot_of(scratch, stamp, token)
        _credit(scratch, slot, rest * believed * shared.common_shares[k], shared.common[k, 2], 0)
        if slots[slot, SLOT_OTHER] == NEVER:
            slots[slot, SLOT_OTHER] = 0
        if token == actual:
            share = shared.common_shares[k]
    _ask(scratch, expert, cell, believed, share)


@inlined
def rescore(shared, scratch, own, asked, least, learning):
    """Multiply each token's probability by learned factors and normalise with the mass of "none of these".

    asked: number of experts. least: a probability that does not matter; tokens far below it are left as they are.
    learning: scratch.used_factors takes which factors each slot used.
    """
    slots, values, factors, used = scratch.slots, scratch.values, shared.factors, scratch.used_factors
    longest = np.int64(0)  # order bucket of the first expert that is not an aligned one
    for e in range(asked):
        if scratch.experts[e] < ALIGNED:
            longest = scratch.experts[e] // (2 * COUNTS * SHARES * RANKS)
            break
    total, after = np.float32(0.0), np.float32(0.0)
    last_row = BY_LAST + 4 * ((scratch.recent[0] * 40503) & (LAST_TOKENS - 1))
    for slot in range(np.uint64(scratch.counters[1])):
        probability = values[slot, P]
        total += probability
        if probability * HOPE >= least:
            own_order, other_order = slots[slot, SLOT_OWN], slots[slot, SLOT_OTHER]
            recency = 0
            if own_order < NEVER:
                recency = recency_bucket(own.length - slots[slot, SLOT_PLACE] - 1)
            by_orders = BY_ORDERS + (own_order * (NEVER + 1) + other_order) * ORDERS + longest
            by_recency = BY_RECENCY + own_order * RECENCIES + recency
            by_last = last_row + (own_order < NEVER) + 2 * (other_order < NEVER)
            by_recycled = BY_RECYCLED + slots[slot, SLOT_RECYCLED] * 4 + (own_order < NEVER) + 2 * (other_order < NEVER)
            if learning:
                used[slot, 0], used[slot, 1], used[slot, 2], used[slot, 3] = by_orders, by_recency, by_last, by_recycled
            probability *= factors[by_orders] * factors[by_recency] * factors[by_last] * factors[by_recycled]
            values[slot, P] = probability
        after += probability
    scale = np.float32(1.0) / (after + max(np.float32(1e-6), np.float32(1.0) - total))
    for slot in range(np.uint64(scratch.counters[1])):
        values[slot, P] *= scale
