"""What tokens of packed draft trees see, as numbers. In: each slot's tree and past. Out: a line of int32 for each token.

A token sees its slot's positions from `first` to `past + trunk`, which lie side by side: earlier tokens, and the nodes that its
tree begins with up to where it first branches. Behind these it sees its ancestors, to be found by their parents, and itself.
Nothing before position `first`, which windows and chunks decide, so layers of each kind have lines of their own.

    slot      where the token's keys are; -1: fills the pack up, as do all behind it
    past      tokens that the slot held before this step; node n of the tree is at position past + n
    node      the token's number in its tree; the tree's first token is `node` before it in the pack
    parent    node that it follows; -1 for a root
    trunk     nodes 0 ... trunk - 1 are all its ancestors or itself
    first     the first position that it sees
    position  past + its depth
    size      nodes of its tree
    tile      not of this token: line k has the first token of the pack's k-th tile, -1 behind the last

A tile is up to TILE neighbouring tokens of one tree, nodes 0 to 15, 16 to 31 and so on: what kernels on GPUs work on at a time.

Example: behind 100 tokens, a chain 0-1 that branches into 2 and 3. Node 3 has parent 1, trunk 2, position 102: it sees
positions 0 to 101 and 103. Its line is (slot, 100, 3, 1, 2, 0, 102, 4, -1).
"""

from __future__ import annotations

import numpy as np

from lookahead.native.kernels import inlined, kernel

SLOT, PAST, NODE, PARENT, TRUNK, FIRST, POSITION, SIZE, TILE_START = range(9)
FIELDS = 9
TILE = 16  # tokens


@kernel
def arrange(token_ids, parents, sizes, pasts, windows, chunks, spare, inputs, meta):
    """Fill `meta`, int32 [kinds, tokens, FIELDS], and `inputs`, int64 [4, tokens]: ids, positions, slots and cache positions.

    parents: within each tree, trees one after the other. sizes, pasts: int64 [slots], nodes that each slot brings and tokens
    that it holds. windows, chunks: int64 [kinds], how far back layers see and the size of the blocks that they see within; both
    large where there is no limit. spare: the slot of padding.
    """
    for kind in range(len(windows)):
        for token in range(meta.shape[1]):
            meta[kind, token, TILE_START], meta[kind, token, SLOT] = -1, -1
    token = tiles = 0
    for slot in range(len(sizes)):
        start = token
        for node in range(sizes[slot]):
            parent = parents[token]
            position, trunk = pasts[slot], np.int64(1)
            if parent >= 0:
                position = np.int64(meta[0, start + parent, POSITION]) + 1
                trunk = np.int64(meta[0, start + parent, TRUNK])
                if trunk == node:  # its parent is the node before it, and so on to the root
                    trunk += 1
            for kind in range(len(windows)):
                line = meta[kind, token]
                line[SLOT], line[PAST], line[NODE], line[PARENT] = slot, pasts[slot], node, parent
                line[TRUNK], line[POSITION], line[SIZE] = trunk, position, sizes[slot]
                line[FIRST] = first_seen(position, windows[kind], chunks[kind])
            if node % TILE == 0:
                for kind in range(len(windows)):
                    meta[kind, tiles, TILE_START] = token
                tiles += 1
            token += 1
    for token in range(inputs.shape[1]):
        line, own = meta[0, token], token < len(token_ids)
        inputs[0, token] = token_ids[token] if own else np.int32(0)
        inputs[1, token] = line[POSITION] if own else np.int32(0)
        inputs[2, token] = line[SLOT] if own else np.int32(spare)
        inputs[3, token] = line[PAST] + line[NODE] if own else np.int32(0)


@inlined
def first_seen(position, window, chunk):
    """The first position that a token sees of its slot's."""
    return max(0, position - window + 1, position // chunk * chunk)
