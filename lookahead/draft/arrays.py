"""The arrays that drafting kernels share, handed over as addresses. In: sizes. Out: named tuples of arrays, inside a kernel."""

from __future__ import annotations

import numpy as np

from lookahead.native.kernels import Block, Layout, unpacker

HASHES = 512
SLOTS = HASHES // 2  # different tokens that the experts of one node may propose: their hash table is half full at most
EXPERTS = 48
STEPS = 12  # context lengths kept of one context in one text
COLUMNS = 18  # of the table of texts, see sorted_text.py
MOST_SAMPLED = 32  # occurrences of one step that are looked at
SKIPPED = 16  # occurrences in a text of the token before the last that are looked at
CHAINS = 4
LEADERS = 32
PER_CHAIN = 16  # occurrences taken of each chain of a row's own text, see own_text.py
MOST_OCCURRENCES = CHAINS * PER_CHAIN
RECENT = 33  # tokens of a context that are looked at
BINS = 8 * 24 + 8
OWN_COLUMNS = 7  # see own_text.py
MOST_THREADS = 64  # that draft
RANGES = 1 << 13  # narrowed ranges of sorted suffixes that a thread remembers
TREE_TOKENS, TREE_PARENTS, TREE_SOURCES, TREE_MATCHES = range(4)  # of a row's tree

# One thread's scratch space. A node is one of the tree that is being grown, the root first.
SCRATCH: Layout = {
    "keys": (np.int64, ("nodes", 2)),  # token and parent of each node
    "steps": (np.int64, ("nodes", "texts", STEPS, 4)),  # see sorted_text.py
    "made": (np.int64, ("nodes", "texts", 2)),
    "skips": (np.int32, ("nodes + 1", "skips", 2)),  # see experts.py: token and source; the last: before the root's token
    "skip_counts": (np.float32, ("nodes + 1", "skips")),
    "skip_totals": (np.float32, ("nodes + 1",)),
    "skipped": (np.int64, ("nodes + 1",)),  # tokens found, -1 if not looked for yet
    "aligned": (np.int64, ("nodes", "texts + 1", 4)),  # see mixture.py
    "best": (np.int64, ("nodes", 2)),  # longest match in the own text and its position
    "candidates": (np.int32, ("candidates", 5)),  # see planner.py
    "reach": (np.float32, ("candidates",)),
    "heap": (np.int32, ("candidates",)),
    "offered": (np.int64, (BINS,)),
    "slots": (np.int32, (SLOTS + 1, 9)),
    "values": (np.float32, (SLOTS + 1, 4)),
    "hashes": (np.int64, (HASHES,)),
    "numbers": (np.int32, (HASHES,)),
    "counters": (np.int64, (2,)),  # stamp of the hash table, slots used
    "found": (np.int64, (MOST_OCCURRENCES, 3)),  # see own_text.py
    "experts": (np.int64, (EXPERTS,)),  # their cells
    "expert_values": (np.float32, (EXPERTS, 2)),  # lambda, share of the token that was emitted
    "current": (np.int64, ("texts",)),
    "sample": (np.int64, ("offers", 2)),  # occurrences that are sampled: positions and the tokens behind them
    "touched": (np.int64, ("offers",)),  # slots that an expert credits, as often as texts offer them
    "own_slots": (np.int64, (SLOTS, 2)),  # and the match length of the first occurrence found
    "used_factors": (np.int32, (SLOTS, 4)),
    "chains": (np.int64, (CHAINS,)),  # slots in the own text's hash tables
    "recent": (np.int64, (RECENT,)),  # the context's last tokens, newest first
    "ranges": (np.int64, (RANGES, 3)),  # narrowed before, see sorted_text.py
}
scratch_arrays = unpacker("Scratch", SCRATCH)

# What all rows share. Each array is explained where it is used.
SHARED: Layout = {
    "texts": (np.int64, ("texts", COLUMNS)),
    "weights": (np.float32, ("texts",)),  # of an occurrence in each text: given x trust
    "given": (np.float32, ("texts",)),
    "trust": (np.float32, ("texts", 3)),  # see mixture.py
    "lambdas": (np.float32, ("cells",)),
    "earned": (np.float32, ("cells", 2)),
    "factors": (np.float32, ("factors",)),
    "learned": (np.float32, ("factors", 2)),
    "edges": (np.float32, (BINS,)),
    "curve": (np.float32, (BINS,)),
    "counted": (np.float64, (2, BINS)),
    "used": (np.int64, (2,)),  # texts that hold anything, which come first; 1 if what was recycled is asked
    "recycled_keys": (np.int32, ("entries", 3)),  # see recycled.py
    "recycled_seen": (np.int32, ("entries",)),
    "recycled_tokens": (np.int32, ("entries", "best")),
    "recycled_weights": (np.float32, ("entries", "best")),
}
shared_arrays = unpacker("Shared", SHARED)

# What is kept of each row: its own text's addresses, what its context matches, and the latest tree.
ROWS: Layout = {
    "own": (np.int64, ("rows", OWN_COLUMNS)),
    "steps": (np.int64, ("rows", "texts", STEPS, 4)),
    "made": (np.int64, ("rows", "texts", 2)),
    "aligned": (np.int64, ("rows", "texts + 1", 4)),
    "trees": (np.int32, ("rows", 4, "nodes")),  # TREE_TOKENS, ...
    "reach": (np.float32, ("rows", 2, "nodes")),  # computed and calibrated probability of the path
    "nodes": (np.int64, ("rows",)),  # root included; 0: no tree was grown for this step
    "kept": (np.int64, ("rows",)),  # of them, to be verified
}
rows_arrays = unpacker("Rows", ROWS)


def scratch_block(nodes: int, texts: int) -> Block:
    candidates, offers, skips = 32 * nodes + SLOTS, texts * MOST_SAMPLED, texts * SKIPPED
    return Block(SCRATCH, nodes=nodes, texts=texts, candidates=candidates, offers=offers, skips=skips)


def shared_block(texts: int, cells: int, factors: int, entries: int, best: int) -> Block:
    return Block(SHARED, texts=texts, cells=cells, factors=factors, entries=entries, best=best)


def rows_block(rows: int, texts: int, nodes: int) -> Block:
    return Block(ROWS, rows=rows, texts=texts, nodes=nodes)
