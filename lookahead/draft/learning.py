"""Learning from each token that the model emits. In: what the experts of a mixture gave it. Out: beliefs, trust and factors."""

from __future__ import annotations

import numpy as np

from lookahead.draft.cells import GAVE, LATEST, MIXTURE_GAVE, SLOT_TOKEN, P
from lookahead.kernels import woven

MEMORY = 250.0  # observations that a cell remembers
RATE, FIRST_GRADIENTS, MOST_GRADIENTS = 0.1, 0.1, 3.0  # of AdaGrad: step size, sum of squares at the beginning and at most
TRUST_MEMORY = np.float32(0.998)  # of the past, at each token
DOUBT = np.float32(2.0)  # tokens' worth of equal trust
LEAST_TRUST = np.float32(0.05)


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
