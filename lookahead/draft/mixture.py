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

from lookahead.draft.arrays import EXPERTS, HASHES, LEADERS, MOST_SAMPLED, SLOTS
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

OWN, OTHER = 0, 1  # groups
ORDERS, COUNTS, SHARES, RANKS = 8, 7, 4, 4  # values of each feature of a cell
ALIGNED = ORDERS * 2 * COUNTS * SHARES * RANKS  # first cell of the aligned experts
HITS, MISSES, SEENS = 4, 4, 5
RECYCLED_CELLS = ALIGNED + HITS * 2 * ORDERS * MISSES  # first cell of the recycled experts
CELLS = RECYCLED_CELLS + len(KINDS) * SEENS * SHARES * RANKS
MEMORY = 250.0  # observations that a cell remembers
FEWEST = 6  # places, up to MOST_SAMPLED, represent a wider range, evenly: as many as shares that matter can be told apart
RESOLUTION = np.float32(4.0)
LEAST_WEIGHT = np.float32(1e-30)  # of all places of an expert; they may weigh nothing
PROMPT, OUTPUT, SESSION, RECYCLED = range(4)  # sources; tries follow

# Columns of a slot: one token that some expert proposes.
SLOT_TOKEN, SLOT_SOURCE, SLOT_MATCH, SLOT_OWN, SLOT_OTHER, SLOT_PLACE, SLOT_COUNT, SLOT_OFFERED, SLOT_RECYCLED = range(9)
P, BEST, COUNT, MOST = range(4)  # MOST: what one text alone counts
NEVER = ORDERS  # order bucket of a group that does not propose the token

# Rescoring factors: by orders at which own and other propose a token and the longest order there is; by recency; by last token;
# by its ranks among what was recycled behind the last two tokens, the last one, and the two before it.
BY_ORDERS = 0
BY_RECENCY = BY_ORDERS + (NEVER + 1) * (NEVER + 1) * ORDERS
RECENCIES = 24
BY_LAST = BY_RECENCY + (NEVER + 1) * RECENCIES
LAST_TOKENS = 1024
BY_RECYCLED = BY_LAST + 4 * LAST_TOKENS
# Of each kind of key, what a rank counts in a factor's number. There are PLACED ranks; one more: not among them.
RANKED = np.array([0, PLACED + 1, 0, 1, (PLACED + 1) ** 2])
UNPLACED = (PLACED + 1) ** 3 - 1
FACTORS = BY_RECYCLED + 4 * (UNPLACED + 1)
RATE, FIRST_GRADIENTS, MOST_GRADIENTS = 0.1, 0.1, 3.0  # of AdaGrad: step size, sum of squares at the beginning and at most
HOPE = np.float32(8.0)  # times as probable as the experts say: no token gets there by its factors

# Columns of a text's trust: shares that its longest matches gave to what was said, and what the mixture gave; latest share.
GAVE, MIXTURE_GAVE, LATEST = range(3)
TRUST_MEMORY = np.float32(0.998)  # of the past, at each token
DOUBT = np.float32(2.0)  # tokens' worth of equal trust
LEAST_TRUST = np.float32(0.05)

# Columns of an aligned place: where the broken match would be now, its order when it broke, misses, hits since the last miss.
AT, BEFORE, MISSED, HIT = range(4)
ALIGN_FROM = 3  # match length from which a broken match is kept
ALIGN_MOST = 4  # places that such a match may have had


# Buckets are sums of comparisons: a chain of branches is mispredicted too often to be cheap.
@inlined
def order_bucket(order):
    """0, 1, 2, 3, 4-5, 6-8, 9-16, 17 and more."""
    return min(np.int64(order), np.int64(4)) + (order > 5) + (order > 8) + (order > 16)


@inlined
def _count_bucket(count):
    """1, 2, 3-4, 5-9, 10-29, 30-149, 150 and more; counts may be weighted."""
    return (count >= 1.5) + (count >= 2.5) + (count >= 4.5) + (count >= 9.5) + (count >= 29.5) + (count >= 149.5)


@inlined
def _share_bucket(share):
    """All, more than 70 %, more than 35 %, less."""
    return (share <= 0.999) + np.int64(share <= 0.7) + (share <= 0.35)


@inlined
def _recency_bucket(distance):
    """2 and the binary logarithm of a distance of 1 or more."""
    return min(RECENCIES - 1, (np.float32(distance).view(np.int32) >> 23) - 125)


@inlined
def cell_of(order, group, count, share, rank):
    """Cell of an expert. order: a bucket; count: places, possibly weighted; share: of its commonest successor."""
    features = ((order * 2 + group) * COUNTS + _count_bucket(count)) * SHARES + _share_bucket(share)
    return features * RANKS + min(rank, RANKS - 1)


@inlined
def aligned_cell(aligned, node, text, group):
    """Cell of an aligned expert."""
    hits, misses = min(aligned[node, text, HIT], HITS - 1), min(aligned[node, text, MISSED], MISSES - 1)
    return ALIGNED + ((hits * 2 + group) * ORDERS + order_bucket(aligned[node, text, BEFORE])) * MISSES + misses


@inlined
def recycled_cell(kind, seen, share, rank):
    """Cell of what was recycled behind a key that came up so often. share: of the first candidate."""
    seen = (seen >= 2) + np.int64(seen >= 4) + (seen >= 10) + (seen >= 30)
    return RECYCLED_CELLS + ((kind * SEENS + seen) * SHARES + _share_bucket(share)) * RANKS + min(rank, RANKS - 1)


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
            slots[slot, SLOT_TOKEN], slots[slot, SLOT_PLACE], slots[slot, SLOT_COUNT] = token, -1, 0
            slots[slot, SLOT_OWN], slots[slot, SLOT_OTHER] = NEVER, NEVER
            slots[slot, SLOT_RECYCLED] = UNPLACED
            values[slot, P], values[slot, BEST], values[slot, COUNT] = 0, 0, 0
            return slot
        h = (h + np.uint64(1)) & np.uint64(HASHES - 1)
    return np.uint64(scratch.numbers[h])


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
    texts, lambdas, slots, values = shared.texts, shared.lambdas, scratch.slots, scratch.values
    steps, current, touched, found = scratch.steps, scratch.current, scratch.touched, scratch.found
    number_of_texts, own_text = shared.used[0], len(texts)
    stamp = scratch.counters[0] + 1
    scratch.counters[0], scratch.counters[1] = stamp, 0
    scratch.best[node, 0], scratch.best[node, 1] = 0, -1
    rest, rank, recycled = np.float32(1.0), np.int64(0), np.int64(0)  # experts asked, and those of them that are recycled
    for text in range(number_of_texts):
        shared.trust[text, LATEST] = -1.0

    for k in range(number_of_texts + 1):  # aligned places, own first
        text = own_text if k == 0 else k - 1
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
        believed = lambdas[cell]
        _credit(scratch, slot_of(scratch, stamp, token), rest * believed, source, scratch.aligned[node, text, BEFORE])
        _ask(scratch, rank, cell, believed, np.float32(token == actual))
        rest *= np.float32(1.0) - believed
        rank += 1
        if rest < floor:
            return rank

    places = own_places(own.log, own.heads, own.length, scratch.recent, have, found, scratch.chains)
    own_order = np.int64(0)  # bucket of the next own expert
    for k in range(places):
        if found[k, 0] > scratch.best[node, 0]:
            scratch.best[node, 0], scratch.best[node, 1] = found[k, 0], found[k, 2]
        own_order = max(own_order, order_bucket(found[k, 0]))
    own_used, own_total = 0, 0
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
        share = np.float32(0.0)
        if kind < len(KINDS) and max(own_order, order_bucket(other_order)) <= ASKED[kind]:
            place, _ = place_of(shared.recycled_keys, kind, scratch.recent[0], second, third)
            kind += 1
            if place < 0:
                continue
            tokens, weights = shared.recycled_tokens[place], shared.recycled_weights[place]
            total = np.float32(0.0)
            for k in range(len(weights)):
                total += weights[k]
            each = np.float32(1.0) / max(total, LEAST_WEIGHT)
            cell = recycled_cell(kind - 1, shared.recycled_seen[place], weights[0] * each, rank - recycled)
            gain = rest * lambdas[cell] * each
            for k in range(len(weights)):
                if weights[k] > 0:
                    slot = slot_of(scratch, stamp, np.int64(tokens[k]))
                    _credit(scratch, slot, gain * weights[k], RECYCLED, 0)
                    slots[slot, SLOT_RECYCLED] -= (PLACED - k) * RANKED[kind - 1]
                    if tokens[k] == actual:
                        share = weights[k] * each
            recycled += 1
        elif own_order > 0 and own_order >= order_bucket(other_order):
            order, before = own_order, own_total
            own_order = np.int64(0)
            for k in range(places):
                bucket = order_bucket(found[k, 0])
                if bucket < order:
                    own_order = max(own_order, bucket)
                elif bucket == order:
                    slot = slot_of(scratch, stamp, found[k, 1])
                    if slots[slot, SLOT_COUNT] == 0:
                        scratch.own_slots[own_used, 0], scratch.own_slots[own_used, 1] = slot, found[k, 0]
                        own_used += 1
                        slots[slot, SLOT_OWN] = order
                    slots[slot, SLOT_COUNT] += 1
                    slots[slot, SLOT_PLACE] = max(slots[slot, SLOT_PLACE], found[k, 2])
                    own_total += 1
            if own_total == before:
                continue
            top = np.int64(0)
            for k in range(own_used):
                top = max(top, slots[np.uint64(scratch.own_slots[k, 0]), SLOT_COUNT])
            each = np.float32(1.0) / np.float32(own_total)
            cell = cell_of(order, OWN, np.float32(own_total), top * each, rank - recycled)
            gain = rest * lambdas[cell] * each
            for k in range(own_used):
                slot, match = np.uint64(scratch.own_slots[k, 0]), scratch.own_slots[k, 1]
                source = PROMPT if slots[slot, SLOT_PLACE] + 1 < own.prompt_length else OUTPUT
                _credit(scratch, slot, gain * slots[slot, SLOT_COUNT], source, match)
                if slots[slot, SLOT_TOKEN] == actual:
                    share = slots[slot, SLOT_COUNT] * each
        elif other_order > 0:
            order = order_bucket(other_order)
            total, distinct = np.float32(0.0), 0
            sample = np.int64(MOST_SAMPLED)
            if floor > 0:
                sample = np.int64(min(max(RESOLUTION * rest / floor, FEWEST), MOST_SAMPLED))
            for text in range(number_of_texts):
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
            cell = cell_of(order, OTHER, total, top_count * each, rank - recycled)
            gain = rest * lambdas[cell] * each
            for k in range(distinct):
                slot = np.uint64(touched[k])
                _credit(scratch, slot, gain * values[slot, COUNT], slots[slot, SLOT_OFFERED], other_order)
                if slots[slot, SLOT_TOKEN] == actual:
                    share = values[slot, COUNT] * each
                values[slot, COUNT] = 0
        else:
            break
        believed = lambdas[cell]
        _ask(scratch, rank, cell, believed, share)
        rest *= np.float32(1.0) - believed
        rank += 1

    if rest >= floor and own.leaders[0, 1] > 0:  # order 0
        total, share = np.float32(0.0), np.float32(0.0)
        for k in range(LEADERS):
            total += own.leaders[k, 1]
        each = np.float32(1.0) / total
        cell = cell_of(0, OWN, total, own.leaders[0, 1] * each, rank - recycled)
        believed = lambdas[cell]
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
        _ask(scratch, rank, cell, believed, share)
        rest *= np.float32(1.0) - believed
        rank += 1
    if rest >= floor and shared.common_shares[0] > 0:
        cell = cell_of(0, OTHER, np.float32(1e6), shared.common_shares[0], rank - recycled)
        believed, share = lambdas[cell], np.float32(0.0)
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
        _ask(scratch, rank, cell, believed, share)
        rank += 1
    return rank


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
                recency = _recency_bucket(own.length - slots[slot, SLOT_PLACE] - 1)
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


@woven
def learn(shared, scratch, asked, actual):
    """Each expert's share of what `actual` has just proved right goes to its cell; then trust and factors are learned.

    earned: float32 [CELLS, 2], earned and asked; lambdas: float32 [CELLS], their quotient, kept up to date.
    """
    lambdas, earned, values = shared.lambdas, shared.earned, scratch.expert_values
    total, rest = np.float32(0.0), np.float32(1.0)
    for e in range(asked):
        total += rest * values[e, 0] * values[e, 1]
        rest *= np.float32(1.0) - values[e, 0]
    reaches, rest = np.float32(1.0), np.float32(1.0)
    for e in range(asked):
        share = rest * values[e, 0] * values[e, 1] / total if total > 0 else np.float32(0.0)
        rest *= np.float32(1.0) - values[e, 0]
        cell = scratch.experts[e]
        earned[cell, 0] += share
        earned[cell, 1] += reaches
        if earned[cell, 1] > MEMORY:
            earned[cell, 0] *= np.float32(0.5)
            earned[cell, 1] *= np.float32(0.5)
        lambdas[cell] = earned[cell, 0] / earned[cell, 1]
        reaches -= share
        if reaches <= 1e-6:
            break
    _learn_trust(shared, scratch, actual)
    _learn_factors(shared, scratch, actual)


@woven
def _learn_trust(shared, scratch, actual):
    """How a text's longest matches fare against the mixture says how much its places count beside those of the other texts.

    So what is stale or off the subject does not drown what is not: a memory of another topic, a trie of another domain.
    """
    trust, said, most = shared.trust, np.float32(0.0), np.float32(0.0)
    for slot in range(np.uint64(scratch.counters[1])):
        if scratch.slots[slot, SLOT_TOKEN] == actual:
            said = scratch.values[slot, P]
    for text in range(shared.used[0]):
        if trust[text, LATEST] >= 0:
            trust[text, GAVE] = TRUST_MEMORY * trust[text, GAVE] + trust[text, LATEST]
            trust[text, MIXTURE_GAVE] = TRUST_MEMORY * trust[text, MIXTURE_GAVE] + said
        most = max(most, (trust[text, GAVE] + DOUBT) / (trust[text, MIXTURE_GAVE] + DOUBT))
    for text in range(shared.used[0]):
        ratio = (trust[text, GAVE] + DOUBT) / (trust[text, MIXTURE_GAVE] + DOUBT) / most
        shared.weights[text] = shared.given[text] * max(LEAST_TRUST, ratio * ratio)


@woven
def _learn_factors(shared, scratch, actual):
    """One step of AdaGrad on the log-likelihood of `actual`.

    learned: float32 [FACTORS, 2]: f, sum of squared gradients; factors: float32 [FACTORS]: e^f.
    """
    factors, learned = shared.factors, shared.learned
    for slot in range(np.uint64(scratch.counters[1])):
        gradient = -scratch.values[slot, P]
        if scratch.slots[slot, SLOT_TOKEN] == actual:
            gradient += np.float32(1.0)
        elif gradient > -1e-3:
            continue
        for k in range(4):
            f = scratch.used_factors[slot, k]
            learned[f, 1] = min(learned[f, 1] + gradient * gradient, np.float32(MOST_GRADIENTS))
            learned[f, 0] += np.float32(RATE) * gradient / np.sqrt(learned[f, 1])
            factors[f] = np.exp(learned[f, 0])


@inlined
def move_aligned(texts, steps, made, aligned, used, node, own, own_match, own_place, token, moved, child):
    """moved[child]: the aligned places behind `token`, from those of `node` and its steps, made as far as they were needed.

    A match of ALIGN_FROM tokens or more that the token breaks leaves an aligned place; one that goes on removes it.
    """
    for k in range(used + 1):
        text = k if k < used else len(texts)  # the own text stands last
        at, missed = aligned[node, text, AT], aligned[node, text, MISSED]
        broken_at, order, goes_on = np.int64(-1), np.int64(0), False
        if k < used:
            if made[node, text, 0] > 0:
                low, high = steps[node, text, 0, LOW], steps[node, text, 0, HIGH]
                order, prefix = steps[node, text, 0, ORDER], steps[node, text, 0, PREFIX]
                if order >= ALIGN_FROM and high - low <= ALIGN_MOST:
                    for rank in range(low, high):
                        goes_on = goes_on or token_at(texts, text, suffix_at(texts, text, rank) + prefix) == token
                    broken_at = suffix_at(texts, text, low) + prefix
                    if token_at(texts, text, broken_at) == END:  # the document has ended, the match is not broken
                        broken_at = np.int64(-1)
        elif own_match >= ALIGN_FROM and own_place + 1 < own.length:
            goes_on = own.log[TOKEN, own_place + 1] == token
            broken_at, order = own_place + 1, own_match
        hits = np.int64(0)
        if broken_at >= 0:
            missed = missed + 1 if at >= 0 and at + 1 == broken_at else np.int64(1)
            at = np.int64(-1) if goes_on else broken_at
        elif at >= 0:
            at, order = at + 1, aligned[node, text, BEFORE]
            if k < used:
                expected = token_at(texts, text, at)
            else:
                expected = np.int64(own.log[TOKEN, at]) if at < own.length else END
            hits = aligned[node, text, HIT] + 1 if expected == token else np.int64(0)
            missed += expected != token
            if expected == END or missed >= MISSES:
                at = np.int64(-1)
        moved[child, text, AT], moved[child, text, BEFORE] = at, order
        moved[child, text, MISSED], moved[child, text, HIT] = missed, hits
