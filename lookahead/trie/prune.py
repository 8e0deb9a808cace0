"""Pruning tries. In: a trie file and limits. Out: a smaller one; the input stays as it is."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lookahead.arguments import texts_of
from lookahead.errors import LookaheadError, UsageError
from lookahead.files.atomic import locked, replacing, scratch_sibling
from lookahead.native.kernels import kernel
from lookahead.token_documents import TokenDocument
from lookahead.trie import format
from lookahead.trie.check import (
    UNSORTED,
    check_first,
    check_suffixes,
    checked_documents,
    checked_section,
    checked_tokens,
)
from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_into
from lookahead.trie.runs import Scratch
from lookahead.trie.segment import BuildResources, SourceTable, finish_segment, header_like
from lookahead.trie.suffixes import (
    AHEAD,
    DEPTH,
    SAMPLE,
    bit_length,
    compare_suffixes,
    fetch_texts,
    first_token_shares,
    key_digits,
    pack,
)
from lookahead.trie.writer import TrieWriter

# A branch is pruned by the count of its first tokens: the context token, and the continuation that it would draft.
BRANCH_DEPTH = 3
UNIT = 1024  # tokens; a longer document is kept or dropped in pieces of this size
SCORED_DEPTHS = np.array([2, 4, 8])  # see mark_suffixes
INDEXED = 0x80  # mark of a position whose suffix stays; the other bits are its score
DROPPED, KEPT, CUT = 0, 1, 2  # what becomes of a token whose suffix does not: gone, text, or a separator instead
MOVED = 1 << 18  # tokens and suffixes written at a time
RANK = 64  # tokens between two entries of the table of new positions


def prune_trie(
    path: str | Path,
    out: str | Path,
    min_count: int = 1,
    max_tokens: int | None = None,
    max_bytes: int | None = None,
    drop_sources: Sequence[str] = (),
    drop_documents: TokenDocument | Iterable[TokenDocument] = (),
    options: Mapping[str, Any] | None = None,
    resources: BuildResources | None = None,
) -> format.TrieHeader:
    """Write a smaller trie. Returns the header written.

    drop_sources: documents of these sources go. drop_documents: documents with exactly these tokens go, of any source. If
    nothing else is pruned, the file is that of a build over the other documents, byte for byte.
    max_tokens, max_bytes: documents go until the file is small
    enough, those first whose branches are worth least per byte: a branch seen c times is worth log2 c where it stands first,
    and nothing where it is repeated (`mark_suffixes`). Documents longer than UNIT tokens go piecewise.
    min_count: branches seen fewer times go, and the text that no branch needs any more.
    options: what the header states about how it was made.
    Waits for another process that is writing `out`.
    Raises UsageError for an unknown source, TrieFormatError for a damaged trie, LookaheadError if nothing would be left and if
    it holds none of the documents to be dropped; resources.notice gets a line if it does not hold some.
    """
    resources = resources or BuildResources()
    drop_sources = texts_of(drop_sources, "drop_sources")
    unwanted = [drop_documents] if isinstance(drop_documents, TokenDocument) else list(drop_documents)
    only_drops = bool(drop_sources or unwanted) and min_count == 1 and max_tokens is None and max_bytes is None
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(out, resources.notice))
        trie = Trie(path)
        known = [s.name for s in trie.header.sources]
        for name in drop_sources:
            if name not in known:
                raise UsageError(f"--drop-source {name}: no such source in {trie.path} (sources: {', '.join(known)}).")
        made = trie.header.options if only_drops else {"pruned_from": trie.path.name, "min_count": min_count}
        described = dict(options or made)
        if len(trie.segments) > 1:
            joined = stack.enter_context(scratch_sibling(out))
            merge_into(joined, [trie], Path(out).parent, resources, described)
            trie = Trie(joined.name)
        dropped = [number for number, name in enumerate(known) if name in drop_sources]
        pruning = _Pruning(trie, min_count, Path(out), resources)
        room = math.inf if max_bytes is None else max_bytes - pruning.fixed_bytes(described)
        documents = pruning.numbers_of(unwanted, path) if unwanted else []
        pruning.choose(dropped, documents, math.inf if max_tokens is None else max_tokens, room)
        file = stack.enter_context(replacing(out))
        writer = TrieWriter(file)
        sources = pruning.write(writer)
        return writer.finish(header_like(trie.header, sources, described))


def drop_oldest(path: str | Path, max_tokens: int, resources: BuildResources | None = None) -> None:
    """Make a trie hold at most that many tokens: whole sources go, the first added first; the latest is pruned if need be."""
    sources = Trie(path).header.sources  # in the order in which they were added
    left, dropped = sum(source.tokens for source in sources), 0
    while left > max_tokens and dropped < len(sources) - 1:
        left -= sources[dropped].tokens
        dropped += 1
    if dropped or left > max_tokens:
        limit = max_tokens if left > max_tokens else None
        prune_trie(path, path, max_tokens=limit, drop_sources=[s.name for s in sources[:dropped]], resources=resources)


class _Pruning:
    """The passes of pruning one segment: mark (suffixes), choose (units of documents), write.

    marks: uint8 for each token, on disk next to the output; at first INDEXED and the score, then what becomes of the token.
    """

    def __init__(self, trie: Trie, min_count: int, out: Path, resources: BuildResources):
        self.trie, self.out, self.resources = trie, out, resources
        self.segment = trie.segments[0]
        self.separator, self.depth = trie.header.separator, trie.header.depth
        self.n = len(self.segment.tokens)
        self.pages = resources.pages()
        tokens = self.segment.section("tokens")
        self.pages.watch(trie.mapped, tokens.end)
        self.pages.watch(trie.mapped, tokens.offset, tokens.end, often=True)
        self._check()
        self.marks = Scratch(out.parent, self.pages).zeros(self.n, np.uint8)
        self._mark(min_count)
        lengths = np.diff(self.ends, prepend=-1) - 1
        pieces = -(-lengths // UNIT)
        self.document_of = np.repeat(np.arange(len(lengths)), pieces)  # of each unit
        piece = np.arange(len(self.document_of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.starts = (self.ends - lengths)[self.document_of] + piece * UNIT
        self.stops = np.minimum(self.starts + UNIT, self.ends[self.document_of])

    def _check(self) -> None:
        """Read what is used, so that damage gets no fresh checksum and no position leads out of the file."""
        trie, segment, section = self.trie, self.segment, self.segment.section("suffixes")
        self.ends, self.numbers = checked_documents(trie, segment, self.pages)
        collections.deque(checked_tokens(trie, segment, self.ends, self.pages), 0)
        begin = 0
        for chunk in checked_section(trie, section, self.pages):
            if int(chunk.max()) >= self.n:
                raise trie.damaged("a suffix points outside the tokens", section, begin + int(np.argmax(chunk >= self.n)))
            begin += len(chunk)
        collections.deque(checked_section(trie, segment.section("first"), self.pages), 0)
        check_first(trie, segment)
        self.first = segment.first.astype(np.int64)

    def _mark(self, min_count: int) -> None:
        """Pass over the sorted suffixes, split between threads where the first token changes: no branch is split."""
        shares = first_token_shares(self.first, self.resources.workers)
        limit, self.pages.limit = self.pages.limit, self.pages.limit * 5 // 6  # a share touches much before it looks

        def mark(begin: int, end: int) -> int:
            segment = self.segment
            suffixes = segment.suffixes[begin:end]
            if not mark_suffixes(segment.tokens, self.separator, suffixes, min_count, SCORED_DEPTHS, self.marks):
                check_suffixes(self.trie, segment)  # tells where
                raise self.trie.damaged(UNSORTED, segment.section("suffixes"), begin)
            self.pages.trim()
            return end

        with ThreadPoolExecutor(self.resources.workers) as pool:
            for done in pool.map(mark, shares[:-1], shares[1:]):
                self.resources.progress("counting", done, len(self.segment.suffixes))
        self.pages.limit = limit

    def fixed_bytes(self, options: Mapping[str, Any]) -> int:
        """Bound the bytes that the file needs in addition to its documents."""
        header = self.trie.path.stat().st_size - self.trie.header.sections[-1].end + len(str(options)) + 256
        padding = format.ALIGNMENT * (len(format.SECTION_DTYPES) + 1)
        return header + padding + self.segment.samples.itemsize

    def numbers_of(self, documents: Sequence[TokenDocument], path: str | Path) -> list[int]:
        """The segment's documents that are equal to one of these. Raises LookaheadError if none is. path: for messages."""
        wanted = {np.asarray(d.token_ids, np.int64).tobytes(): number for number, d in enumerate(documents, 1)}
        lengths = np.diff(self.ends, prepend=-1) - 1
        found, held = [], set()
        for number in np.flatnonzero(np.isin(lengths, [len(ids) // 8 for ids in wanted])).tolist():
            end = self.ends[number]
            ids = self.segment.tokens[end - lengths[number] : end].astype(np.int64).tobytes()
            if ids in wanted:
                found.append(number)
                held.add(ids)
        if missing := [number for ids, number in wanted.items() if ids not in held]:
            which = f"{path}: {len(missing)} of the {len(wanted)} documents to be dropped are not in this trie"
            if not found:
                raise LookaheadError(f"{which}. List what it holds: lookahead inspect-trie {path} --documents")
            self.resources.notice(f"{which}; the first of them is document {missing[0]}")
        return found

    def choose(
        self, dropped_sources: Sequence[int], dropped_documents: Sequence[int], max_tokens: float, max_bytes: float
    ) -> None:
        """Decide what becomes of each token. Raises LookaheadError if nothing would be left."""
        segment = self.segment
        gains, entries = np.zeros(len(self.starts), np.int64), np.zeros(len(self.starts), np.int64)
        for some in self._chunks():
            add_scores(self.marks, self.starts[some], self.stops[some], gains[some], entries[some])
            self.pages.trim()
        lengths = self.stops - self.starts
        sizes = (lengths + 1) * segment.tokens.itemsize + entries * (
            segment.suffixes.itemsize + segment.samples.itemsize / SAMPLE
        )
        sizes += segment.document_ends.itemsize + segment.document_sources.itemsize
        keep = (entries > 0) & ~np.isin(self.numbers[self.document_of], dropped_sources)
        keep &= ~np.isin(self.document_of, dropped_documents)
        order = np.flatnonzero(keep)
        order = order[np.argsort(-(gains[order] / sizes[order]), kind="stable")]
        tables = format.stores_first(np.cumsum(entries[order]), self.separator) * segment.first.itemsize * (self.separator + 1)
        fits = (np.cumsum(lengths[order]) <= max_tokens) & (np.cumsum(sizes[order]) + tables <= max_bytes)
        keep[:] = False
        keep[order[fits]] = True
        if not keep.any():
            raise LookaheadError(f"{self.out}: nothing would be left. Loosen the limits, or delete the file.")
        # Units that follow each other in a document stay one text.
        joined = keep[1:] & keep[:-1] & (self.document_of[1:] == self.document_of[:-1])
        begins, ends = keep.copy(), keep.copy()
        begins[1:] &= ~joined
        ends[:-1] &= ~joined
        self.starts, self.stops, self.document_of = self.starts[begins], self.stops[ends], self.document_of[begins]
        at = 0
        for some in self._chunks():
            at = settle(self.marks, self.ends, self.document_of[some], self.starts[some], self.stops[some], at, self.depth)
            self.pages.trim()
        self.marks[at:] = DROPPED

    def write(self, writer: TrieWriter) -> tuple[format.Source, ...]:
        """Write what was chosen as one segment; returns its sources."""
        segment, separator = self.segment, self.separator
        step = MOVED // RANK * RANK
        ranks = np.empty(self.n // RANK + 1, np.int64)  # new position of every RANK-th token
        n = 0
        new_ends, new_numbers = [], []
        sources = SourceTable([dataclasses.replace(s, documents=0, tokens=0) for s in self.trie.header.sources])
        writer.begin("tokens", segment.tokens.dtype)
        self.pages.release()
        for begin in range(0, self.n, step):
            marks = self.marks[begin : begin + step]
            stay = marks != DROPPED
            tokens = segment.tokens[begin : begin + step].copy()
            tokens[marks == CUT] = separator
            writer.append(tokens[stay])
            targets = np.cumsum(stay) + n - stay
            ranks[begin // RANK : begin // RANK + len(targets[::RANK])] = targets[::RANK]
            closing = np.flatnonzero(marks == CUT)
            new_ends.append(targets[closing])
            new_numbers.append(self.numbers[np.searchsorted(self.ends, closing + begin)])
            n += int(np.count_nonzero(stay))
            self.resources.progress("writing", n, None)
            self.pages.trim()
        ends, numbers = np.concatenate(new_ends), np.concatenate(new_numbers)
        sources.count(numbers, np.diff(ends, prepend=-1) - 1)
        left = numbers[np.sort(np.unique(numbers, return_index=True)[1])]  # as a build numbers them: as they come first
        renumbered = np.empty(len(self.trie.header.sources), np.int64)
        renumbered[left] = np.arange(len(left))
        self.pages.release()
        finish_segment(writer, n, self._moved(ranks), ends, renumbered[numbers], separator, self.resources.progress)
        return tuple(sources.sources()[number] for number in left)

    def _moved(self, ranks: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(new positions, keys) of the suffixes that stay, in sorted order, block by block."""
        for begin in range(0, len(self.segment.suffixes), MOVED):
            block = self.segment.suffixes[begin : begin + MOVED]
            moved, keys = np.empty(len(block), np.int64), np.empty(len(block), np.uint64)
            found = move(block, self.marks, ranks, self.segment.tokens, self.separator, moved, keys)
            yield moved[:found], keys[:found]
            self.pages.trim()

    def _chunks(self) -> Iterator[slice]:
        """Ranges of units, of about CHUNK tokens each."""
        begin = 0
        while begin < len(self.starts):
            end = max(begin + 1, int(np.searchsorted(self.starts, self.starts[begin] + format.CHUNK)))
            yield slice(begin, end)
            begin = end


@kernel
def mark_suffixes(tokens, separator, suffixes, min_count, depths, marks):
    """Mark the positions of sorted suffixes, which hold whole branches, in marks (uint8 for each token).

    A suffix whose first BRANCH_DEPTH tokens stand at least `min_count` times is INDEXED. For each of `depths` (ascending), the
    suffixes that share that many tokens are a branch; one of c > 1 members adds floor(log2 c) to the score of its first
    occurrence in the text. So a document scores by the repeated branches that it is the first to hold: on four workloads, at
    equal bytes, this keeps 1 to 3 % more EDL than random documents, and more than those that share most with others, which are
    near-duplicates (a greedy choice that looks at all that was chosen before would keep 1 % more).
    Returns False if the suffixes are not sorted, of which no first token is in two calls.
    """
    deepest = depths[-1]
    members = np.zeros(len(depths), np.int64)
    targets = np.zeros(len(depths), np.int64)
    branch = 0  # where the group of equal first BRANCH_DEPTH tokens begins
    previous = np.int64(-1)
    touched = np.int64(0)
    for k in range(len(suffixes) + 1):
        if k % AHEAD == 0:
            touched += fetch_texts(tokens, suffixes, k)
        here = np.int64(suffixes[k]) if k < len(suffixes) else np.int64(-1)
        shared = np.int64(0)
        same = False  # both end in the same separator, or share BRANCH_DEPTH tokens
        if previous >= 0 and here >= 0:
            while shared < deepest and tokens[previous + shared] == tokens[here + shared]:
                if tokens[here + shared] == separator:
                    same = shared < BRANCH_DEPTH
                    break
                shared += 1
            order = compare_suffixes(tokens, separator, previous, here, shared, DEPTH)
            if order > 0 or (order == 0 and previous >= here):
                return False
        if k and not same and shared < BRANCH_DEPTH:
            if k - branch >= min_count:
                for j in range(branch, k):
                    marks[np.int64(suffixes[j])] |= INDEXED
            branch = k
        for i in range(len(depths)):
            if shared >= depths[i]:
                members[i] += 1
                targets[i] = min(targets[i], here)
                continue
            worth, count = 0, members[i]
            while count > 1:
                worth += 1
                count >>= 1
            if worth:
                marks[targets[i]] += worth
            members[i], targets[i] = 0, here
            if here >= 0:
                whole = shared
                while whole < depths[i] and tokens[here + whole] != separator:
                    whole += 1
                members[i] = whole == depths[i]
        previous = here
    return touched >= 0  # always


@kernel
def add_scores(marks, starts, stops, gains, entries):
    """Sum up for each unit, marks[starts[u]:stops[u]], the sum of its scores and how many of its positions are indexed."""
    for u in range(len(starts)):
        for p in range(starts[u], stops[u]):
            gains[u] += marks[p] & (INDEXED - 1)
            entries[u] += marks[p] >= INDEXED


@kernel
def settle(marks, ends, documents, starts, stops, at, depth):
    """Turn the marks from `at` on into what becomes of each token, for kept texts in order; returns where they end.

    A text is marks[starts[u]:stops[u]] of document documents[u]. What no indexed suffix reaches within `depth` tokens goes, and
    the first token gone is replaced by a separator. Where a text is cut, suffixes that looked past the cut are indexed no
    more: the others keep their order.
    """
    for u in range(len(starts)):
        start, stop = starts[u], stops[u]
        end = ends[documents[u]]
        marks[at:start] = DROPPED
        reach = np.int64(-1)
        for p in range(start, stop):
            if marks[p] >= INDEXED and (stop == end or p + depth <= stop):
                marks[p] = INDEXED
                reach = p + depth
            else:
                marks[p] = KEPT if p < reach else CUT if p == reach else DROPPED
        marks[stop] = CUT if reach >= stop else DROPPED
        at = stop + 1
    return at


@kernel
def move(suffixes, marks, ranks, tokens, separator, moved, keys):
    """New positions and keys of those suffixes that stay, into `moved` and `keys`; returns how many."""
    bits = bit_length(separator)
    digits = key_digits(bits)
    found = 0
    for k in range(len(suffixes)):
        p = np.int64(suffixes[k])
        if marks[p] != INDEXED:
            continue
        target = ranks[p // RANK]
        for q in range(p // RANK * RANK, p):
            target += marks[q] != DROPPED
        moved[found] = target
        keys[found] = pack(tokens, separator, bits, p, digits)
        found += 1
    return found
