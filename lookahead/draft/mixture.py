"""What comes next: a mixture of experts, one for each context length. In: the occurrences of a context. Out: tokens with
probabilities.

An *expert* is one group of occurrences that agree with the context in at least `order` tokens, and gives P_e(t) = the share of
them that t follows. There are two groups: the request's *own* text, and all *other* text (tries and finished outputs, their
counts added). The experts are asked in turn, longest order first, own before other; each is believed with a learned weight
lambda and leaves the rest to those behind it (stick-breaking):

    P(t) = sum over e of [product over earlier j of (1 - lambda_j)] * lambda_e * P_e(t)

lambda is the mean of what the expert's *cell* has earned so far: cells tell experts apart by order, group, number of
occurrences, share of the most frequent successor, and rank: how many were asked before, recycled ones not counted. After the
longest match there has broken off, *aligned* experts stand first: they continue where the broken match would be now, as text
that was copied with one word changed does. Before the shorter matches (ASKED), *recycled* experts propose the runner-up tokens
there (recycled.py). Then one expert *skips* the last token: it proposes what stands two tokens behind the occurrences of the
token before it, as text does in which one word is another. Last, order 0 offers the most frequent tokens of the own text.
Learned factors rescore each token (`rescore`).

Worked example: own text "a b a b", context "... b": one own expert of order 2 (one occurrence, "a" follows), lambda .6, and one
of order 1 with the same occurrence, skipped; then P(a) = .6 and .4 is left for order 0.
"""

from __future__ import annotations

import numpy as np

from lookahead.draft.arrays import EXPERTS
from lookahead.draft.cells import (
    ALIGNED,
    AT,
    BEFORE,
    BINARY,
    COUNTS,
    GAVE,
    HIT,
    LATEST,
    MISSED,
    MISSES,
    MIXTURE_GAVE,
    NEVER,
    ORDERS,
    RANKS,
    SHARES,
    SLOT_OTHER,
    SLOT_OWN,
    SLOT_RECYCLED,
    SLOT_TOKEN,
    UNRANKED,
    P,
    binary_bucket,
    order_bucket,
)
from lookahead.draft.experts import (
    LAST,
    ask,
    ask_aligned,
    ask_leaders,
    ask_other,
    ask_own,
    ask_recycled,
    ask_skip,
    count_own,
    longest_own_match,
    next_other_order,
)
from lookahead.draft.own_text import TOKEN, fetch_latest, latest_position, more_occurrences, own_occurrences, slots_of
from lookahead.draft.recycled import ASKED, KINDS
from lookahead.draft.sorted_text import END, HIGH, LOW, ORDER, PREFIX, suffix_at, token_at
from lookahead.native.kernels import fetch_entry, inlined

MEMORY = 250.0  # observations that a cell remembers

# Rescoring factors of a token: by orders at which own and other text propose it and the longest order there is; by how far back
# it stands in the own text; by its ranks among what was recycled behind the last two tokens, the last one, and the two before
# it; by the token itself. What has 4 factors of each has them by whether own text proposes the token, and other text. Tokens
# share factors if their hashes agree.
BY_ORDERS = 0
BY_POSITION = BY_ORDERS + (NEVER + 1) * (NEVER + 1) * ORDERS
BY_RECYCLED = BY_POSITION + BINARY
BY_TOKEN = BY_RECYCLED + 4 * (UNRANKED + 1)
TOKENS = 1 << 12
FACTORS = BY_TOKEN + 4 * TOKENS
RATE = FIRST_GRADIENTS = 0.1  # of AdaGrad: step size, sum of squares at the beginning
MIN_LEARN_PROB = np.float32(1e-3)  # probability of a token that was wrong, from which its factors learn
MAX_RESCORE = np.float32(8.0)  # times as probable as by the experts: no token gets there by its factors

TRUST_MEMORY = np.float32(1 - 1 / MEMORY)  # weight of the past at each token

ALIGN_FROM = 3  # match length from which a broken match is kept, and occurrences that it may have had at most


@inlined
def mix(shared, scratch, own, node, have, floor, actual):
    """Fill scratch.slots with what the experts propose behind the context of `node`, scratch.recent[:have]; returns their
    number.

    floor   the rest of the stick below which no further expert is asked
    actual  a token: scratch.expert_values[e, 1] becomes the share that expert e gives it (for learning), or -1
    """
    lambdas, current, used = shared.lambdas, scratch.current, shared.used[0]
    stamp = scratch.counters[0] + 1
    scratch.counters[0], scratch.counters[1] = stamp, 0
    scratch.best[node, 0], scratch.best[node, 1] = 0, -1
    for text in range(used):
        shared.trust[text, LATEST] = -1.0
        current[text] = -1  # the step that counts
    rest, rank = ask_aligned(shared, scratch, own, node, stamp, floor, actual)
    if rank > 0 and rest < floor:
        return rank
    chains = slots_of(scratch.recent, have, own.heads.shape[1], scratch.chains)
    occurrences = own_occurrences(own.log, own.heads, own.length, scratch.recent, have, chains, scratch.found, scratch.chains)
    nearest = chains > 0  # occurrences that agree in one token only are still to be found
    own_order = longest_own_match(scratch, node, occurrences)  # bucket of the next own expert
    own_used, own_total = np.int64(0), np.int64(0)
    kind = np.int64(0 if shared.used[1] > 0 else len(KINDS))  # of the next recycled expert
    recycled = np.int64(0)  # experts asked that are recycled
    while rest >= floor and rank < EXPERTS - LAST:
        other_order = next_other_order(shared, scratch, node)
        if nearest and own_order == 0 and other_order <= 1:
            nearest, before = False, occurrences
            occurrences = more_occurrences(
                own.log, own.heads, own.length, scratch.recent, have, 0, scratch.found, scratch.chains, before
            )
            own_order = np.int64(occurrences > before)
        cell, share = np.int64(-1), np.float32(0.0)
        if kind < len(KINDS) and max(own_order, order_bucket(other_order)) <= ASKED[kind]:
            cell, share = ask_recycled(shared, scratch, kind, have, stamp, rest, rank - recycled, actual)
            kind += 1
            recycled += cell >= 0
        elif own_order > 0 and own_order >= order_bucket(other_order):
            order, before = own_order, own_total
            own_order, own_used, own_total = count_own(scratch, occurrences, order, stamp, own_used, own_total)
            if own_total > before:
                cell, share = ask_own(shared, scratch, own, order, own_used, own_total, rest, rank - recycled, actual)
        elif other_order > 0:
            cell, share = ask_other(shared, scratch, node, other_order, stamp, rest, rank - recycled, floor, actual)
        else:
            break
        if cell >= 0:
            ask(scratch, rank, cell, lambdas[cell], share)
            rest *= np.float32(1.0) - lambdas[cell]
            rank += 1
    if rest >= floor and have > 1:
        cell, share = ask_skip(shared, scratch, node, stamp, rest, actual)
        if cell >= 0:
            ask(scratch, rank, cell, lambdas[cell], share)
            rest *= np.float32(1.0) - lambdas[cell]
            rank += 1
    if rest >= floor and own.top_tokens[0, 1] > 0:
        cell, share = ask_leaders(shared, scratch, own, stamp, rest, rank - recycled, actual)
        ask(scratch, rank, cell, lambdas[cell], share)
        rank += 1
    return rank


@inlined
def match_own(shared, scratch, own, have, floor):
    """Note the longest match of the root's context, scratch.recent[:have], in the own text, if `mix` asks for it: all that
    `move_aligned` needs of `mix`.
    """
    stamp = scratch.counters[0] + 1
    scratch.counters[0], scratch.counters[1] = stamp, 0
    scratch.best[0, 0], scratch.best[0, 1] = 0, -1
    rest, rank = ask_aligned(shared, scratch, own, np.int64(0), stamp, floor, np.int64(-1))
    if rank > 0 and rest < floor:
        return
    chains = slots_of(scratch.recent, have, own.heads.shape[1], scratch.chains)
    occurrences = own_occurrences(own.log, own.heads, own.length, scratch.recent, have, chains, scratch.found, scratch.chains)
    longest_own_match(scratch, np.int64(0), occurrences)


@inlined
def _of_token(token):
    """Index of the first factor of a token."""
    return BY_TOKEN + 4 * ((token * 40503 >> 3) & (TOKENS - 1))


@inlined
def rescore(shared, scratch, own, asked, least, actual):
    """Multiply each token's probability by learned factors and normalise with the mass of "none of these".

    asked: number of experts. least: a probability that does not matter; tokens far below it are left as they are.
    actual: as of `mix`; it is not left as it is, and scratch.used_factors takes which factors each slot used, -1 first if none.
    """
    slots, values, factors, used = scratch.slots, scratch.values, shared.factors, scratch.used_factors
    longest = np.int64(0)  # order bucket of the first expert that is not an aligned one
    for e in range(asked):
        if scratch.experts[e] < ALIGNED:
            longest = scratch.experts[e] // (2 * COUNTS * SHARES * RANKS)
            break
    total, after = np.float32(0.0), np.float32(0.0)
    for slot in range(np.uint64(scratch.counters[1])):
        token = np.int64(slots[slot, SLOT_TOKEN])
        if values[slot, P] * MAX_RESCORE >= least or token == actual:
            fetch_latest(own, token)
            fetch_entry(factors, _of_token(token))
            if actual >= 0:
                fetch_entry(shared.learned, 2 * _of_token(token))
    for slot in range(np.uint64(scratch.counters[1])):
        probability = values[slot, P]
        total += probability
        token, used[slot, 0] = np.int64(slots[slot, SLOT_TOKEN]), -1
        if probability * MAX_RESCORE >= least or token == actual:
            own_order, other_order = slots[slot, SLOT_OWN], slots[slot, SLOT_OTHER]
            groups = (own_order < NEVER) + 2 * (other_order < NEVER)
            position = latest_position(own, token)
            by_orders = BY_ORDERS + (own_order * (NEVER + 1) + other_order) * ORDERS + longest
            by_position = BY_POSITION + (binary_bucket(own.length - position) if position >= 0 else 0)
            by_recycled = BY_RECYCLED + slots[slot, SLOT_RECYCLED] * 4 + groups
            by_token = _of_token(token) + groups
            if actual >= 0:
                used[slot, 0], used[slot, 1], used[slot, 2], used[slot, 3] = by_orders, by_position, by_recycled, by_token
            probability *= factors[by_orders] * factors[by_position] * factors[by_recycled] * factors[by_token]
            values[slot, P] = probability
        after += probability
    scale = np.float32(1.0) / (after + max(np.float32(1e-6), np.float32(1.0) - total))
    for slot in range(np.uint64(scratch.counters[1])):
        values[slot, P] *= scale


@inlined
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


@inlined
def _learn_trust(shared, scratch, actual):
    """Weigh the occurrences of each text by how its longest matches fare against the mixture.

    So what is stale or off the subject does not drown what is not: a memory of another topic, a trie of another domain.
    """
    trust, of_mixture, most = shared.trust, np.float32(0.0), np.float32(0.0)
    one = np.float32(1.0)  # token's worth of equal trust
    for slot in range(np.uint64(scratch.counters[1])):
        if scratch.slots[slot, SLOT_TOKEN] == actual:
            of_mixture = scratch.values[slot, P]
    for text in range(shared.used[0]):
        if trust[text, LATEST] >= 0:
            trust[text, GAVE] = TRUST_MEMORY * trust[text, GAVE] + trust[text, LATEST]
            trust[text, MIXTURE_GAVE] = TRUST_MEMORY * trust[text, MIXTURE_GAVE] + of_mixture
        most = max(most, (trust[text, GAVE] + one) / (trust[text, MIXTURE_GAVE] + one))
    for text in range(shared.used[0]):
        ratio = (trust[text, GAVE] + one) / (trust[text, MIXTURE_GAVE] + one) / most
        shared.weights[text] = shared.given[text] * ratio * ratio


@inlined
def _learn_factors(shared, scratch, actual):
    """One step of AdaGrad on the log-likelihood of `actual`.

    learned: float32 [FACTORS, 2]: f, sum of squared gradients; factors: float32 [FACTORS]: e^f.
    """
    factors, learned = shared.factors, shared.learned
    for slot in range(np.uint64(scratch.counters[1])):
        gradient = -scratch.values[slot, P]
        if scratch.slots[slot, SLOT_TOKEN] == actual:
            gradient += np.float32(1.0)
        elif gradient > -MIN_LEARN_PROB or scratch.used_factors[slot, 0] < 0:
            continue
        for k in range(4):
            f = scratch.used_factors[slot, k]
            learned[f, 1] += gradient * gradient
            learned[f, 0] += np.float32(RATE) * gradient / np.sqrt(learned[f, 1])
            factors[f] = np.exp(learned[f, 0])


@inlined
def move_aligned(texts, steps, made, aligned, used, node, own, own_match, own_position, token, moved, child):
    """moved[child]: the aligned positions behind `token`, from those of `node` and its steps, made as far as they were needed.

    A match of ALIGN_FROM tokens or more that the token breaks leaves an aligned position; one that continues removes it.
    """
    for k in range(used + 1):
        text = k if k < used else len(texts)  # the own text stands last
        at, missed = aligned[node, text, AT], aligned[node, text, MISSED]
        broken_at, order, goes_on = np.int64(-1), np.int64(0), False
        if k < used:
            if made[node, text, 0] > 0:
                low, high = steps[node, text, 0, LOW], steps[node, text, 0, HIGH]
                order, prefix = steps[node, text, 0, ORDER], steps[node, text, 0, PREFIX]
                if order >= ALIGN_FROM and high - low <= ALIGN_FROM:
                    for rank in range(low, high):
                        goes_on = goes_on or token_at(texts, text, suffix_at(texts, text, rank) + prefix) == token
                    broken_at = suffix_at(texts, text, low) + prefix
                    if token_at(texts, text, broken_at) == END:  # the document has ended, the match is not broken
                        broken_at = np.int64(-1)
        elif own_match >= ALIGN_FROM and own_position + 1 < own.length:
            goes_on = own.log[TOKEN, own_position + 1] == token
            broken_at, order = own_position + 1, own_match
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
