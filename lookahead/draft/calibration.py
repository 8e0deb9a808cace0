"""Calibrates path probabilities. In: trees and emitted tokens. Out: the share of such nodes that are accepted.

The product over a path's tokens promises too much where the path is long: what is uncertain about each adds up, and the best
of many is taken. So it is multiplied by a factor of its depth: what was accepted there over what such products promised, next
to that of first tokens, and never more than that of a lesser depth. Trees grow by what comes of it, the computed probability.

Nodes are counted by their computed probability, eight bins to an octave. A bin's ratio of accepted to predicted is smoothed
over the bins within an octave and drawn towards the ratio that was measured beforehand, which stands for STRENGTH accepted
nodes (the ratio of a depth, towards 1); the curve never falls, so the order of nodes stays as it is.
"""

from __future__ import annotations

import numpy as np

from lookahead.draft.arrays import BINS, DEPTHS, TREE_PARENTS, TREE_SOURCES, TREE_TOKENS
from lookahead.draft.priors import STRENGTH
from lookahead.draft.tree import GRAMMAR
from lookahead.native.kernels import inlined

MEMORY = 50_000  # accepted nodes after which the past counts half
CLASSES = np.frexp(np.arange(DEPTHS).clip(1))[1] - 1  # depths that share a factor: 0 to 1, 2 to 3, 4 to 7, ...
LEAST = np.float32(2.0**-24)  # path probability below which nothing is drafted
OCTAVE = 8  # bins; those within one share their counts, less the farther they are
FIRST_BIN = (127 - 24) * OCTAVE


@inlined
def bin_of(probability):
    """Bin of a probability from LEAST to 1: exponent and three bits of the mantissa."""
    return max(0, min(BINS - 1, (np.float32(probability).view(np.int32) >> 20) - FIRST_BIN))


@inlined
def edge_of(number):
    """Least probability of a bin."""
    return np.int32((number + FIRST_BIN) << 20).view(np.float32)


EDGES = np.array([(b + FIRST_BIN) << 20 for b in range(BINS)], np.int32).view(np.float32)


class Calibration:
    """curve: float32 [BINS], the probability at the lower edge of each bin (`EDGES`); between edges it is interpolated.

    by_depth: float32 [DEPTHS], the factor of each depth.
    prior: float32 [BINS], the ratio to start from (default: 1, the computed probability itself).
    counted, counted_by_depth: float64 [2, BINS or DEPTHS], what was promised, and accepted nodes.
    """

    def __init__(
        self,
        prior: np.ndarray | None = None,
        counted: np.ndarray | None = None,
        counted_by_depth: np.ndarray | None = None,
    ):
        self.prior = np.ones(BINS, np.float32) if prior is None else prior
        self.counted = np.zeros((2, BINS)) if counted is None else counted
        self.counted_by_depth = np.zeros((2, DEPTHS)) if counted_by_depth is None else counted_by_depth
        self.refit()

    def refit(self) -> None:
        """Draw the curve and the factors again from all counts so far."""
        for counted in (self.counted, self.counted_by_depth):
            if counted[1].sum() > MEMORY:
                counted /= 2
        promised, accepted = (np.bincount(CLASSES, counts) for counts in self.counted_by_depth)
        ratios = (accepted + STRENGTH) / (promised + STRENGTH)
        self.by_depth = np.minimum.accumulate(ratios / ratios[0])[CLASSES].astype(np.float32)
        self.curve = np.maximum.accumulate(np.minimum(EDGES * self.ratio(), 1)).astype(np.float32)

    def ratio(self) -> np.ndarray:
        """float64 [BINS]: accepted / predicted."""
        near = 1 - np.abs(np.arange(1 - OCTAVE, OCTAVE)) / OCTAVE
        predicted, accepted = (np.convolve(counts, near, "same") for counts in self.counted)
        return (accepted + STRENGTH * self.prior) / (predicted + STRENGTH)


@inlined
def count_nodes(tree, reach, nodes, verified, emitted, by_depth, counted, counted_by_depth):
    """The model emitted `emitted` where this tree was drafted: count each node below the root whose fate is known in any case.

    tree: int32 [4, nodes]; reach: float32 [nodes], computed probabilities. verified: that many nodes, the first ones, were.

    counted[0] gets its probability, counted[1] 1 if it lies on the path that was emitted; counted_by_depth the same, but for
    the factor of its depth. Forced ones are not drafts, and nodes with a computed probability of 0 are not ours (sources.py).
    Of nodes behind one that was not verified only failures would come to be known.
    """
    depths = np.zeros(nodes, np.int64)
    for node in range(1, nodes):
        depths[node] = depth = min(depths[tree[TREE_PARENTS, node]] + 1, DEPTHS - 1)
        if tree[TREE_SOURCES, node] != GRAMMAR and reach[node] > 0 and tree[TREE_PARENTS, node] < verified:
            counted[0, bin_of(reach[node])] += reach[node]
            counted_by_depth[0, depth] += reach[node] / by_depth[depth]
    node = 0
    for position in range(len(emitted)):
        token, child = emitted[position], node + 1
        while child < nodes and (tree[TREE_PARENTS, child] != node or tree[TREE_TOKENS, child] != token):
            child += 1
        if child >= nodes or node >= verified:
            break
        if tree[TREE_SOURCES, child] != GRAMMAR and reach[child] > 0:
            counted[1, bin_of(reach[child])] += 1
            counted_by_depth[1, depths[child]] += 1
        node = child


@inlined
def deeper(by_depth, depth):
    """Return the factor of a path that continues from `depth`, besides the next token's probability."""
    return by_depth[min(depth + 1, DEPTHS - 1)] / by_depth[min(depth, DEPTHS - 1)]


@inlined
def calibrated(reach, edges, curve):
    """The curve's value at a computed probability."""
    b = bin_of(reach)
    if b == len(curve) - 1:
        return curve[b]
    part = (reach - edges[b]) / (edges[b + 1] - edges[b])
    return curve[b] + min(np.float32(1.0), max(np.float32(0.0), part)) * (curve[b + 1] - curve[b])


@inlined
def computed(probability, edges, curve):
    """The computed probability that is worth `probability`; 1 if none is worth more."""
    if probability >= curve[-1]:
        return np.float32(1.0)
    b = 0  # by a loop: np.searchsorted takes a second to compile
    while curve[b] < probability:
        b += 1
    if b == 0:
        return edges[0]
    between = edges[b - 1] + (probability - curve[b - 1]) / (curve[b] - curve[b - 1]) * (edges[b] - edges[b - 1])
    return min(np.float32(1.0), np.float32(between))
