"""What a trie holds, in figures. In: an opened trie. Out: depth table and commonest branches."""

from __future__ import annotations

import dataclasses

import numpy as np

from lookahead.trie.file import Match, Trie
from lookahead.trie.suffixes import kernel


@dataclasses.dataclass(frozen=True)
class DepthRow:
    """Nodes at one depth (1: first tokens). branching: children per node above. singletons: share of nodes seen once."""

    depth: int
    nodes: int
    branching: float
    singletons: float


def depth_table(trie: Trie, deepest: int = 8) -> list[DepthRow]:
    """Nodes, branching and share of singletons at depths 1 to `deepest`. Reads the whole trie."""
    counts = node_counts(trie.tokens, trie.suffixes, trie.header.separator, min(deepest, trie.header.depth))
    rows = []
    for depth, (nodes, single) in enumerate(counts.tolist(), 1):
        if not nodes:
            break
        above = counts[depth - 2][0] if depth > 1 else 1
        rows.append(DepthRow(depth, nodes, round(nodes / above, 3), round(single / nodes, 4)))
    return rows


def top_branches(trie: Trie, length: int = 4, most: int = 10) -> list[tuple[list[int], int]]:
    """The commonest branches of `length` tokens, as (token ids, count), commonest first."""
    starts, counts = branch_counts(trie.tokens, trie.suffixes, trie.header.separator, length)
    order = np.argsort(-counts, kind="stable")[:most]
    positions = trie.suffixes[starts[order]].astype(np.int64)
    return [(trie.tokens[p : p + length].tolist(), int(counts[k])) for p, k in zip(positions, order, strict=True)]


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A node of the continuation tree below a query. share: of the parent's count."""

    token_id: int
    count: int
    share: float
    children: tuple[Continuation, ...]


def continuations(trie: Trie, context: np.ndarray, depth: int = 4, width: int = 4) -> tuple[Match, tuple[Continuation, ...]]:
    """(the longest match of the context's end, the commonest continuations below it, `depth` deep and `width` wide)."""
    match = trie.longest_match(context, trie.header.depth - depth)
    return match, _below(trie, match, depth, width) if match.length else ()


def _below(trie: Trie, match: Match, depth: int, width: int) -> tuple[Continuation, ...]:
    if depth == 0:
        return ()
    return tuple(
        Continuation(token, child.count, child.count / match.count, _below(trie, child, depth - 1, width))
        for token, child in trie.children(match, width)
    )


@kernel
def node_counts(tokens, suffixes, separator, deepest):
    """int64 [deepest, 2]: nodes at each depth, and those of them that are seen once."""
    n = np.int64(len(tokens))
    counts = np.zeros((deepest, 2), np.int64)
    run = np.zeros(deepest, np.int64)  # suffixes in the node that is open at each depth
    for k in range(len(suffixes) + 1):
        shared = 0
        here = np.int64(suffixes[k]) if k < len(suffixes) else n
        if 0 < k < len(suffixes):
            before = np.int64(suffixes[k - 1])
            while (
                shared < deepest
                and before + shared < n
                and here + shared < n
                and tokens[before + shared] == tokens[here + shared]
                and tokens[here + shared] != separator
            ):
                shared += 1
        for depth in range(shared, deepest):
            if run[depth]:
                counts[depth, 0] += 1
                counts[depth, 1] += run[depth] == 1
            run[depth] = 0
        for depth in range(deepest):
            if here + depth >= n or tokens[here + depth] == separator:
                break
            run[depth] += 1
    return counts


@kernel
def branch_counts(tokens, suffixes, separator, length):
    """(places in `suffixes` where a branch of `length` tokens begins, how many suffixes share it); ends cut none short."""
    n = np.int64(len(tokens))
    starts = np.empty(len(suffixes), np.int64)
    counts = np.zeros(len(suffixes), np.int64)
    found = 0
    last = np.int64(-1)
    for k in range(len(suffixes)):
        here = np.int64(suffixes[k])
        whole = 0
        while whole < length and here + whole < n and tokens[here + whole] != separator:
            whole += 1
        if whole < length:
            continue
        same = last >= 0
        for j in range(length):
            if not same or tokens[last + j] != tokens[here + j]:
                same = False
                break
        if not same:
            starts[found] = k
            found += 1
        counts[found - 1] += 1
        last = here
    return starts[:found], counts[:found]
