"""What the model almost said. In: its best few tokens behind each verified node. Out: what may follow a token, or two.

A forward scores every token behind every node, also behind those that are not accepted; plain decoding keeps one and throws the
rest away. Token Recycling (arXiv 2408.08696) keeps the best of them in a table by the token they stand behind. Here they are
kept behind the last token and behind the last two, and summed up: each time the same key is seen, what it held counts KEPT as
much and the shares of its candidates (softmax over the best few) are added.

The table is a bounded hash table. Of the WAYS places that a key may take it takes the least seen.
"""

from __future__ import annotations

import numpy as np

from lookahead.trie.suffixes import inlined, kernel

BEST = 8  # candidates of a key
PLACES = 1 << 17
WAYS = 4
KEPT = np.float32(0.5)  # weight of what is known when a key is seen again
NO_TOKEN = -1  # before the first


@inlined
def _hash(kind, t1, t2, t3):
    mixed = np.uint64(kind)
    if kind != 4: mixed = (mixed ^ np.uint64(t1 + 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    if 1 < kind < 5: mixed = (mixed ^ np.uint64(t2 + 1)) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(31)
    if 2 < kind: mixed = (mixed ^ np.uint64(t3 + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(32))


@inlined
def place_of_key(tags, kind, t1, t2, t3):
    """Where a key is kept, or -1. tags: int32 [PLACES]."""
    mixed = _hash(kind, t1, t2, t3)
    tag = np.int32(mixed >> np.uint64(33)) | np.int32(1)
    first = np.int64(mixed & np.uint64(len(tags) - WAYS))
    for place in range(first, first + WAYS):
        if tags[place] == tag:
            return place
    return np.int64(-1)


@inlined
def _taken_place(tags, seen, weights, kind, t1, t2, t3):
    """Where a key is kept; if it is not yet, it takes a place."""
    place = place_of_key(tags, kind, t1, t2, t3)
    if place >= 0:
        return place
    mixed = _hash(kind, t1, t2, t3)
    first = np.int64(mixed & np.uint64(len(tags) - WAYS))
    place = first
    for other in range(first, first + WAYS):
        if seen[other] < seen[place]:
            place = other
    for other in range(first, first + WAYS):
        seen[other] -= seen[other] >> 2  # what is never seen again gives way in time
    tags[place], seen[place] = np.int32(mixed >> np.uint64(33)) | np.int32(1), 0
    weights[place] = 0
    return place


@inlined
def _add(tokens, weights, ids, shares, kept):
    """Candidates with their shares come to one key's. Each array: [BEST]."""
    for k in range(len(weights)):
        weights[k] *= kept
    for k in range(len(ids)):
        least = 0
        for have in range(len(weights)):
            if weights[have] > 0 and tokens[have] == ids[k]:
                weights[have] += shares[k]
                break
            if weights[have] < weights[least]:
                least = have
        else:
            if shares[k] > weights[least]:
                tokens[least], weights[least] = ids[k], shares[k]


@kernel
def recycle(token_ids, previous, grand, ids, scores, tags, seen, tokens, weights, tuning, good):
    """Behind node n, which says token_ids[n] after previous[n], the best are ids[n] with scores[n], best first.

    token_ids, previous: int64 [nodes]. ids: int32 [nodes, best]; scores: float32 likewise. The table: tags, seen: int32
    [PLACES]; tokens: int32 [PLACES, BEST]; weights: float32 likewise, 0 where there is none.
    """
    shares = np.empty(ids.shape[1], np.float32)
    for node in range(len(token_ids)):
        total = np.float32(0.0)
        for k in range(len(shares)):
            shares[k] = np.exp(scores[node, k] - scores[node, 0])
            total += shares[k]
        if not total > 0:  # scores that are no numbers
            continue
        for k in range(len(shares)):
            shares[k] /= total
        for kind in range(1, 6):
            if not (np.int64(tuning[7]) >> (kind - 1)) & 1: continue
            place = _taken_place(tags, seen, weights, kind, np.int64(token_ids[node]), np.int64(previous[node]), np.int64(grand[node]))
            seen[place] += 1
            kept = tuning[3] if kind == 1 else tuning[4] if kind == 2 else tuning[0] if kind == 3 else tuning[6] if kind == 4 else tuning[5]
            st = np.float32(1) if good[node] else tuning[2]
            kept = np.float32(1) - (np.float32(1) - kept) * st
            _add(tokens[place], weights[place], ids[node], shares * st, kept)
