"""Runner-up tokens. In: its best few tokens behind each verified node. Out: what is likely behind the last tokens.

A forward scores every token behind every node, those that are not accepted included; plain decoding keeps one and throws the
rest away. Token Recycling (arXiv 2408.08696) keeps the best few in a table by the token that they stood behind. Here keys
are made of the last token or of two of the last three, and some leave one out: in the last step the model was asked what
follows other tokens at the position where it then emitted this one, and what follows is often the same ("12 apples", "15
apples").

What a key holds is summed up: the shares of its candidates (softmax over the best few) are added, and what was there before
counts KEPT as much. The table is a hash table of fixed size; of the WAYS entries that a key may take it takes the least seen.
It is small, as older text is a source by itself.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from lookahead.native.kernels import inlined, kernel

BEST = 8  # candidates of a key
ENTRIES = 1 << 16
WAYS = 4
ANY = -1  # in a key: any token; in the table: no key

# Kinds of keys: which of the last tokens they are made of, newest first; in the order in which they are asked.
KINDS = np.array([(1, 1, 0), (1, 0, 1), (1, 0, 0), (0, 1, 1)])
ASKED = np.array([4, 4, 2, 4])  # bucket of the longest match up to which each kind is asked before it
KEPT = np.array([0.3, 0.5, 0.5, 0.5], np.float32)  # weight of what is known when a key is seen again


@dataclasses.dataclass
class Recycled:
    """Keys and what they hold.

    keys     int32 [entries, 3]: token ids, newest first, ANY where a kind has none
    seen     int32 [entries]: how often the key came up; less where others wanted its entry
    tokens   int32 [entries, BEST]: candidates, most probable first
    weights  float32 [entries, BEST]: their sums of shares, 0 where there is no candidate
    has_keys it holds something
    """

    keys: np.ndarray
    seen: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    has_keys: bool = False

    @staticmethod
    def empty(entries: int = ENTRIES) -> Recycled:
        """A table. entries: a power of two, or 0 for one that holds nothing."""
        table = Recycled(
            np.empty((entries, 3), np.int32),
            np.zeros(entries, np.int32),
            np.zeros((entries, BEST), np.int32),
            np.zeros((entries, BEST), np.float32),
        )
        table.clear()
        return table

    def __len__(self) -> int:
        """Keys."""
        return int((self.keys != ANY).any(1).sum())

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.keys, self.seen, self.tokens, self.weights

    def clear(self) -> None:
        """Forget everything."""
        self.keys.fill(ANY)
        self.seen.fill(0)
        self.weights.fill(0)
        self.has_keys = False

    def add(
        self,
        token_ids: np.ndarray,
        parents: np.ndarray,
        sizes: np.ndarray,
        before: np.ndarray,
        ids: np.ndarray,
        scores: np.ndarray,
    ) -> None:
        """The best tokens behind each node of some trees.

        token_ids, parents: integers [nodes], tree after tree, as in `DraftTree`. sizes: int64 [trees]. before: int32 [trees,
        2], the tokens before each root, newest first, ANY where the text begins. ids: int32 [nodes, best], best first; scores:
        float32 likewise.
        """
        if len(self.seen):
            add_trees(token_ids, parents, sizes, before, ids, scores, *self.arrays)
            self.has_keys = True


@inlined
def entry_of(keys, kind, t1, t2, t3):
    """(Entry of the key of this kind behind the tokens t1, t2, t3, newest first, or -1; the first that it may take).

    Tokens are ANY where the text begins; there a kind that needs them has no key.
    """
    a = t1 if KINDS[kind, 0] else np.int64(ANY)
    b = t2 if KINDS[kind, 1] else np.int64(ANY)
    c = t3 if KINDS[kind, 2] else np.int64(ANY)
    mixed = np.uint64(a + 1) * np.uint64(0x9E3779B97F4A7C15)
    mixed = ((mixed ^ (mixed >> np.uint64(29))) + np.uint64(b + 1)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = ((mixed ^ (mixed >> np.uint64(32))) + np.uint64(c + 1)) * np.uint64(0x94D049BB133111EB)
    first = np.int64((mixed >> np.uint64(31)) & np.uint64(len(keys) - WAYS))
    if (KINDS[kind, 0] and a == ANY) or (KINDS[kind, 1] and b == ANY) or (KINDS[kind, 2] and c == ANY):
        return np.int64(-1), np.int64(-1)
    for entry in range(first, first + WAYS):
        if keys[entry, 0] == a and keys[entry, 1] == b and keys[entry, 2] == c:
            return entry, first
    return np.int64(-1), first


@inlined
def _taken(keys, seen, weights, kind, t1, t2, t3):
    """The entry of a key, which it takes if it has none yet; -1 if there is no such key."""
    entry, first = entry_of(keys, kind, t1, t2, t3)
    if entry >= 0 or first < 0:
        return entry
    entry = first
    for other in range(first, first + WAYS):
        if seen[other] < seen[entry]:
            entry = other
    for other in range(first, first + WAYS):
        seen[other] -= seen[other] >> 2  # what does not come up any more gives way in time
    keys[entry, 0] = t1 if KINDS[kind, 0] else np.int64(ANY)
    keys[entry, 1] = t2 if KINDS[kind, 1] else np.int64(ANY)
    keys[entry, 2] = t3 if KINDS[kind, 2] else np.int64(ANY)
    seen[entry] = 0
    for k in range(weights.shape[1]):
        weights[entry, k] = 0
    return entry


@kernel
def add_trees(token_ids, parents, sizes, before, ids, scores, keys, seen, tokens, weights):
    """See `Recycled.add`."""
    most, best = ids.shape[1], tokens.shape[1]
    shares = np.empty(most, np.float32)
    start = 0
    for tree in range(len(sizes)):
        for node in range(start, start + sizes[tree]):
            total = np.float32(0.0)
            for k in range(most):
                shares[k] = np.exp(scores[node, k] - scores[node, 0])
                total += shares[k]
            if not total > 0:  # scores that are not numbers
                continue
            t1, parent = np.int64(token_ids[node]), parents[node]
            t2, t3 = np.int64(before[tree, 0]), np.int64(before[tree, 1])
            if parent >= 0:
                grandparent = parents[start + parent]
                t3 = t2 if grandparent < 0 else np.int64(token_ids[start + grandparent])
                t2 = np.int64(token_ids[start + parent])
            for kind in range(len(KINDS)):
                entry = _taken(keys, seen, weights, kind, t1, t2, t3)
                if entry < 0:
                    continue
                seen[entry] += 1
                for k in range(best):
                    weights[entry, k] *= KEPT[kind]
                for k in range(most):
                    token, weight, at = ids[node, k], shares[k] / total, best - 1
                    for have in range(best):
                        if weights[entry, have] > 0 and tokens[entry, have] == token:
                            weight += weights[entry, have]
                            at = have
                            break
                    if weight <= weights[entry, at]:
                        continue
                    while at > 0 and weights[entry, at - 1] < weight:
                        tokens[entry, at], weights[entry, at] = tokens[entry, at - 1], weights[entry, at - 1]
                        at -= 1
                    tokens[entry, at], weights[entry, at] = token, weight
        start += sizes[tree]
