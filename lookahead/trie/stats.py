"""What a trie holds, in figures. In: an opened trie. Out: depth table, most frequent branches, continuations of a query."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lookahead.native.kernels import kernel
from lookahead.token_documents import LEFT_CONTEXT
from lookahead.trie.file import Match, Trie
from lookahead.trie.runs import Run, blocks_of, merged
from lookahead.trie.segment import BuildResources
from lookahead.trie.suffixes import first_token_shares

SEEN = 4096  # occurrences of a branch in a segment that are looked at
BRANCH_LENGTH = 4  # tokens of the branches that `overview` lists


@dataclasses.dataclass(frozen=True)
class DepthRow:
    """Nodes at one depth (1: first tokens). branching: children per node above. singletons: share of nodes seen once."""

    depth: int
    nodes: int
    branching: float
    singletons: float


@dataclasses.dataclass(frozen=True)
class Overview:
    """Nodes by depth, and the most frequent branches of BRANCH_LENGTH tokens as (token ids, count), most frequent first."""

    depths: list[DepthRow]
    top: list[tuple[list[int], int]]


def overview(trie: Trie, deepest: int = 8, most: int = 10, resources: BuildResources | None = None) -> Overview:
    """Nodes, branching and share of singletons at depths 1 to `deepest`, and the `most` most frequent branches.

    Reads the whole trie once, all its segments as one.
    """
    resources = resources or BuildResources()
    counted = max(BRANCH_LENGTH, deepest)
    tokens, parts = _parts(trie, resources)

    def count(blocks: Iterator[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return _count(tokens, blocks, trie.header.separator, counted, most)

    counts, top = np.zeros((counted, 2), np.int64), np.empty((0, 2), np.int64)
    with ThreadPoolExecutor(resources.workers) as pool:
        for some, most_frequent in pool.map(count, parts):
            counts += some
            top = _most_frequent(top, most_frequent, most)
    rows: list[DepthRow] = []
    for depth, (nodes, single) in enumerate(counts[: min(deepest, trie.header.depth)].tolist(), 1):
        if not nodes:
            break
        above = rows[-1].nodes if rows else 1
        rows.append(DepthRow(depth, nodes, round(nodes / above, 3), round(single / nodes, 4)))
    return Overview(rows, [(tokens[begin : begin + BRANCH_LENGTH].tolist(), count) for begin, count in top.tolist()])


def begins_documents(trie: Trie, branch: list[int]) -> bool:
    """Tell whether most occurrences of a branch begin in the tokens of a prompt that documents keep (a chat template)."""
    found = total = 0
    for segment, (low, high) in zip(trie.segments, trie.match(branch).ranges, strict=True):
        step = max(1, (high - low) // SEEN)
        positions = segment.suffixes[low:high:step].astype(np.int64)
        ends = np.concatenate([[-1], segment.document_ends.astype(np.int64)])
        within = positions - ends[np.searchsorted(ends, positions) - 1] <= LEFT_CONTEXT
        found, total = found + step * int(np.count_nonzero(within)), total + step * len(positions)
    return 2 * found > total


def _parts(trie: Trie, resources: BuildResources) -> tuple[np.ndarray, list[Iterator[np.ndarray]]]:
    """(an array that holds the tokens of all segments, sorted positions in it, in parts that share no branch, in blocks)."""
    pages = resources.pages()
    for segment in trie.segments:
        section = segment.section("tokens")
        pages.watch(trie.mapped, section.offset, section.end, often=True)
        pages.watch(trie.mapped, section.end, segment.header.sections[-1].end)
    separator, name = trie.header.separator, str(trie.path)
    if len(trie.segments) == 1:
        (segment,) = trie.segments
        run = Run(segment.suffixes, 0, len(segment.tokens), name)
        shares = first_token_shares(segment.first, resources.workers)
        return segment.tokens, [blocks_of(run, begin, end, pages) for begin, end in itertools.pairwise(shares)]
    # One view of the whole file, so that one kernel reaches the tokens of every segment.
    dtype = trie.segments[0].tokens.dtype
    tokens = np.frombuffer(trie.mapped, dtype, len(trie.mapped) // dtype.itemsize)
    starts = [segment.section("tokens").offset // dtype.itemsize for segment in trie.segments]
    runs = [Run(s.suffixes, start, len(s.tokens), name) for s, start in zip(trie.segments, starts, strict=True)]
    blocks = merged(tokens, separator, runs, resources.workers, pages)
    return tokens, [(positions for positions, _ in blocks)]


def _count(
    tokens: np.ndarray, blocks: Iterator[np.ndarray], separator: int, deepest: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [deepest, 2] nodes and nodes seen once by depth, rows (position, count) of the `most` most frequent branches)."""
    counts, open_nodes = np.zeros((deepest, 2), np.int64), np.zeros(deepest, np.int64)
    top = np.empty((0, 2), np.int64)
    last = -1
    for block in itertools.chain(blocks, [np.array([-1])]):
        branches = np.empty((len(block), 2), np.int64)
        found = add_nodes(tokens, block, last, separator, counts, open_nodes, branches, BRANCH_LENGTH)
        top = _most_frequent(top, branches[:found], most)
        last = int(block[-1])
    return counts, top


def _most_frequent(top: np.ndarray, more: np.ndarray, most: int) -> np.ndarray:
    """The `most` rows of highest count of both; of equal ones those that come first."""
    if len(top) == most and most:
        more = more[more[:, 1] > top[-1, 1]]
    rows = np.concatenate([top, more])
    return rows[np.argsort(-rows[:, 1], kind="stable")[:most]]


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A node of the continuation tree below a query. share: of the parent's count."""

    token_id: int
    count: int
    share: float
    children: tuple[Continuation, ...]


def continuations(trie: Trie, context: np.ndarray, depth: int = 4, width: int = 4) -> tuple[Match, tuple[Continuation, ...]]:
    """(the longest match of the context's end, the most frequent continuations below it, `depth` deep and `width` wide)."""
    match = trie.longest_match(context, max(1, trie.header.depth - depth))
    return match, _below(trie, match, depth, width) if match.length else ()


def _below(trie: Trie, match: Match, depth: int, width: int) -> tuple[Continuation, ...]:
    if depth == 0 or match.length >= trie.header.depth:
        return ()
    return tuple(
        Continuation(token, child.count, child.count / match.count, _below(trie, child, depth - 1, width))
        for token, child in trie.children(match, width)
    )


@kernel
def add_nodes(tokens, block, last, separator, counts, open_nodes, branches, length):
    """Add the nodes that end in a block of sorted positions, behind position `last` (-1: none); -1 in the block ends all.

    counts: int64 [depth, 2], nodes at each depth and those of them seen once. open_nodes: int64 [depth], suffixes so far in
    the node that is open at each depth. branches: rows (position, count) of the nodes of depth `length` that end here.
    Returns how many of these rows are filled.
    """
    n = np.int64(len(tokens))
    deepest = len(open_nodes)
    found = 0
    for k in range(len(block)):
        here = block[k]
        shared = 0
        if last >= 0 and here >= 0:
            while (
                shared < deepest
                and last + shared < n
                and here + shared < n
                and tokens[last + shared] == tokens[here + shared]
                and tokens[here + shared] != separator
            ):
                shared += 1
        for depth in range(shared, deepest):
            if open_nodes[depth]:
                counts[depth, 0] += 1
                counts[depth, 1] += open_nodes[depth] == 1
                if depth == length - 1:
                    branches[found, 0] = last
                    branches[found, 1] = open_nodes[depth]
                    found += 1
            open_nodes[depth] = 0
        if here >= 0:
            for depth in range(deepest):
                if here + depth >= n or tokens[here + depth] == separator:
                    break
                open_nodes[depth] += 1
        last = here
    return found
