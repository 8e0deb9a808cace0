"""Runner-up tokens. In: its best few tokens behind each verified node. Out: what is likely behind the last tokens.

A forward scores every token behind every node, those that are not accepted included; plain decoding keeps one and throws the
rest away. Token Recycling (arXiv 2408.08696) keeps the best few in a table by the token that they stood behind. Here they are
kept by the last two tokens as well.

What a key holds is summed up: the shares of its candidates (softmax over the best few) are added, and what was there before
counts KEPT as much. The table is a hash table of fixed size; of the WAYS entries that a key may take it takes the least seen.
It is small, as older text is a source by itself: four times the entries gave 0.2 % longer drafts at most, eight
candidates instead of four 0.7 %.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from lookahead.native.kernels import inlined, kernel

BEST = 4  # candidates of a key
ENTRIES = 1 << 15
WAYS = 4
ANY = -1  # in a key: any token; in the table: no key

KINDS = 2  # of keys, in the order in which they are asked: the last two tokens; the last one
ASKED = np.array([4, 2])  # bucket of the longest match up to which each kind is asked before it
KEPT = np.array([0.3, 0.5], np.float32)  # weight of what is known when a key is seen again


@dataclasses.dataclass
class Recycled:
    """Keys and what they hold.

    keys     int32 [entries, 2]: the last token and the one before, ANY where a kind has none
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
            np.empty((entries, 2), np.int32),
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

        token_ids, parents: integers [nodes], tree after tree, as in `DraftTree`. sizes: int64 [trees]. before: int32 [trees],
        the token before each root, ANY where the text begins. ids: int32 [nodes, best], best first; scores: float32 likewise.
        """
        if len(self.seen):
            add_trees(token_ids, parents, sizes, before, ids, scores, *self.arrays)
            self.has_keys = True


@inlined
def entry_of(keys, kind, last, before):
    """(Entry of the key of this kind behind these tokens, or -1; the first that it may take, -1 if there is no such key).

    before: ANY where the text begins; there a key of two tokens is none.
    """
    if kind == 0 and before == ANY:
        return np.int64(-1), np.int64(-1)
    second = before if kind == 0 else np.int64(ANY)
    mixed = np.uint64(last + 1) * np.uint64(0x9E3779B97F4A7C15)
    mixed = ((mixed ^ (mixed >> np.uint64(29))) + np.uint64(second + 1)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    first = np.int64((mixed >> np.uint64(31)) & np.uint64(len(keys) - WAYS))
    for entry in range(first, first + WAYS):
        if keys[entry, 0] == last and keys[entry, 1] == second:
            return entry, first
    return np.int64(-1), first


@inlined
def _taken(keys, seen, weights, kind, last, before):
    """The entry of a key, which it takes if it has none yet; -1 if there is no such key."""
    entry, first = entry_of(keys, kind, last, before)
    if entry >= 0 or first < 0:
        return entry
    entry = first
    for other in range(first, first + WAYS):
        if seen[other] < seen[entry]:
            entry = other
    for other in range(first, first + WAYS):
        seen[other] -= seen[other] >> 2  # what does not come up any more gives way in time
    keys[entry, 0], keys[entry, 1] = last, before if kind == 0 else np.int64(ANY)
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
            last, parent = np.int64(token_ids[node]), parents[node]
            second = np.int64(before[tree] if parent < 0 else token_ids[start + parent])
            for kind in range(KINDS):
                entry = _taken(keys, seen, weights, kind, last, second)
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
