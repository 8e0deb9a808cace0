"""Calibrates path probabilities. In: trees and emitted tokens. Out: the share of such nodes that are accepted.

Nodes are counted by their computed probability, eight bins to an octave. A bin's ratio of accepted to predicted is smoothed
over the bins within an octave and drawn towards the ratio that was measured beforehand, which stands for STRENGTH accepted
nodes; the curve never falls, so the order of nodes stays as it is.
"""

from __future__ import annotations

import numpy as np

from lookahead.draft.arrays import BINS, TREE_PARENTS, TREE_SOURCES, TREE_TOKENS
from lookahead.draft.priors import STRENGTH
from lookahead.draft.tree import GRAMMAR
from lookahead.native.kernels import inlined

MEMORY = 50_000  # accepted nodes after which the past counts half
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

    prior: float32 [BINS], the ratio to start from (default: 1, the computed probability itself).
    counted: float64 [2, BINS], what was promised, and accepted nodes.
    """

    def __init__(self, prior: np.ndarray | None = None, counted: np.ndarray | None = None):
        self.prior = np.ones(BINS, np.float32) if prior is None else prior
        self.counted = np.zeros((2, BINS)) if counted is None else counted
        self.refit()

    def refit(self) -> None:
        """Draw the curve again from all counts so far."""
        if self.counted[1].sum() > MEMORY:
            self.counted /= 2
        self.curve = np.maximum.accumulate(np.minimum(EDGES * self.ratio(), 1)).astype(np.float32)

    def ratio(self) -> np.ndarray:
        """float64 [BINS]: accepted / predicted."""
        near = 1 - np.abs(np.arange(1 - OCTAVE, OCTAVE)) / OCTAVE
        predicted, accepted = (np.convolve(counts, near, "same") for counts in self.counted)
        return (accepted + STRENGTH * self.prior) / (predicted + STRENGTH)


@inlined
def count_nodes(tree, reach, nodes, verified, emitted, counted):
    """The model emitted `emitted` where this tree was drafted: count each node below the root whose fate is known in any case.

    tree: int32 [4, nodes]; reach: float32 [nodes], computed probabilities. verified: that many nodes, the first ones, were.

    counted[0] gets its probability, counted[1] 1 if it lies on the path that was emitted. Forced ones are not drafts, and nodes
    with a computed probability of 0 are not ours (sources.py). Of nodes behind one that was not verified only failures would
    come to be known.
    """
    for node in range(1, nodes):
        if tree[TREE_SOURCES, node] != GRAMMAR and reach[node] > 0 and tree[TREE_PARENTS, node] < verified:
            counted[0, bin_of(reach[node])] += reach[node]
    node = 0
    for position in range(len(emitted)):
        token, child = emitted[position], node + 1
        while child < nodes and (tree[TREE_PARENTS, child] != node or tree[TREE_TOKENS, child] != token):
            child += 1
        if child >= nodes or node >= verified:
            break
        if tree[TREE_SOURCES, child] != GRAMMAR and reach[child] > 0:
            counted[1, bin_of(reach[child])] += 1
        node = child


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
