"""Places that carry on from the context's end. In: a source's arrays and the context. Out: rows of one candidate table.

A candidate is a place of some text that ends as the context ends: how many tokens agree (its match length), and the
tokens that follow there. A table row copies them, so that the planner need not know what kind of source they come from.
"""

from __future__ import annotations

import numpy as np

from lookahead.trie.session import hash_one, hash_two
from lookahead.trie.suffixes import kernel

LONGEST_MATCH = 32  # tokens compared; a longer match counts as this
PER_TOKEN = 1.5  # a match one token longer is believed this many times as much (tuned on training rows of replays)
OWN = 8.0  # the request's own text against any other, at equal match length
PER_ORDER = 32  # places taken of one match length of a trie, evenly over its range
PER_TRIE = 96
PER_CHAIN = 24  # places taken of each hash chain
CHAIN_STEPS = 64  # places looked at on a chain


class CandidateTable:
    """Reused from draft to draft: filled by sources, read by the planner.

    tokens   int32 [rows, depth]   what follows
    lengths  int32 [rows]          how many of them
    weights  float32 [rows]        how much the place is believed (`weight_of`)
    sources  int32 [rows]          index into the drafter's source names
    """

    def __init__(self, rows: int, depth: int):
        self.tokens = np.zeros((rows, depth), np.int32)
        self.lengths = np.zeros(rows, np.int32)
        self.weights = np.zeros(rows, np.float32)
        self.sources = np.zeros(rows, np.int32)
        self.arrays = (self.tokens, self.lengths, self.weights, self.sources)


@kernel
def weight_of(match, own):
    """Belief in one place: by its match length up to 12 tokens, and OWN times for the request's own text."""
    return np.float32((OWN if own else 1.0) * PER_TOKEN ** min(match, 12))


@kernel
def from_log(
    tokens, lengths, weights, sources, filled,
    log, log_length, previous1, previous2, head1, head2,
    context, context_length, own, prompt_length, source,
):  # fmt: skip
    """Add places of a token log, newest first; returns the number of rows filled.

    own: the context is this log's own end; places before `prompt_length` get `source`, later ones `source` + 1.
    """
    depth = tokens.shape[1]
    last = context[context_length - 1]
    before = context[context_length - 2] if context_length > 1 else -1
    stop = min(len(lengths), filled + 2 * PER_CHAIN)
    for order in range(2, 0, -1):
        if order == 2 and before < 0:
            continue
        place = head2[hash_two(before, last, len(head2))] if order == 2 else head1[hash_one(last, len(head1))]
        taken = 0
        for _ in range(CHAIN_STEPS):
            if place < 0 or taken == PER_CHAIN or filled == stop:
                break
            here = place
            place = previous2[here] if order == 2 else previous1[here]
            if log[here] != last or here + 1 >= log_length or log[here + 1] < 0:
                continue
            longer = here > 0 and before >= 0 and log[here - 1] == before
            if longer != (order == 2):
                continue  # a hash collision, or already taken as a longer match
            match = 1
            limit = min(LONGEST_MATCH, context_length, here + 1)
            while match < limit and log[here - match] == context[context_length - 1 - match]:
                match += 1
            length = 0
            start = here + 1
            while length < depth:
                if start + length < log_length:
                    token = log[start + length]
                    if token < 0:
                        break
                elif own:  # text that repeats itself goes on repeating
                    token = tokens[filled, length - (log_length - start)]
                else:
                    break
                tokens[filled, length] = token
                length += 1
            lengths[filled] = length
            weights[filled] = weight_of(match, own)
            sources[filled] = source + 1 if own and start >= prompt_length else source
            filled += 1
            taken += 1
    return filled


@kernel
def from_trie(
    tokens, lengths, weights, sources, filled,
    trie_tokens, suffixes, separator, document_ends, document_sources, source_weights, weighted,
    matches, segment, context, context_length, source,
):  # fmt: skip
    """Add places of one segment of a trie, longest matches first, each place once; returns the number of rows filled.

    matches: int64 [segments, 2, LONGEST_MATCH + 1], the ranges of each match length in each segment of the trie, empty where
    there is none. A segment takes its share of the places that the whole trie takes of each length.
    weighted: multiply each place's weight by that of its document's source.
    """
    depth = tokens.shape[1]
    n = np.int64(len(trie_tokens))
    lows, highs = matches[segment]
    longest = LONGEST_MATCH
    while longest > 0 and lows[longest] >= highs[longest]:
        longest -= 1
    everywhere = np.zeros(LONGEST_MATCH + 1, np.int64)
    for number in range(len(matches)):
        for match in range(1, LONGEST_MATCH + 1):
            everywhere[match] += matches[number, 1, match] - matches[number, 0, match]
    shortest, offered = LONGEST_MATCH + 1, 0
    while shortest > 1 and (len(matches) == 1 or offered < PER_TRIE):
        shortest -= 1
        if shortest == LONGEST_MATCH or everywhere[shortest] > everywhere[shortest + 1]:
            offered += min(everywhere[shortest], PER_ORDER)
    stop = min(len(lengths), filled + PER_TRIE)
    for match in range(longest, shortest - 1, -1):
        low, width = lows[match], highs[match] - lows[match]
        if match < longest and width == highs[match + 1] - lows[match + 1]:
            continue  # the same places as one token longer
        taken = min(width, max(np.int64(1), PER_ORDER * width // everywhere[match]))
        step = width / taken
        for k in range(taken):
            if filled == stop:
                return filled
            position = np.int64(suffixes[low + np.int64((k + 0.5) * step)])
            if position < 0 or position >= n - match:
                continue
            start = position + match
            if match < longest and position > 0 and trie_tokens[position - 1] == context[context_length - match - 1]:
                continue  # already taken as a longer match
            length = 0
            while length < depth and start + length < n:
                token = trie_tokens[start + length]
                if token >= separator:
                    break
                tokens[filled, length] = token
                length += 1
            if length == 0:
                continue
            lengths[filled] = length
            weights[filled] = weight_of(match, False)
            if weighted:
                document = min(np.searchsorted(document_ends, position), len(document_sources) - 1)
                weights[filled] *= source_weights[min(document_sources[document], len(source_weights) - 1)]
            sources[filled] = source
            filled += 1
    return filled
