"""Sorted runs to one sorted stream, within a memory limit. In: mapped or resident arrays. Out: blocks of positions.

A run is a stretch of the tokens whose suffixes are sorted: one load of memory of a build, or one segment of a trie file.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np

from lookahead.errors import LookaheadError, TrieFormatError
from lookahead.files.atomic import reason, uninterrupted, write_pieces
from lookahead.trie.suffixes import DEPTH, compare_suffixes, count_before, key_digits, merge_block, pack_texts, ties_in_order

BLOCK = 1 << 14  # suffixes merged at a time: their texts stay in the cache
SWEEP = 1 << 16  # texts read between two looks at what is resident
BASE_BYTES = 192 << 20  # the interpreter with its libraries; the rest of a memory limit is for arrays


@dataclasses.dataclass(frozen=True)
class Run:
    """Sorted positions, counted from the start of a stretch of `length` tokens that begins at `offset`.

    check: of what comes from a file, raises TrieFormatError that tells where it is wrong.
    """

    suffixes: np.ndarray
    offset: int
    length: int
    name: str = "a sorted run"  # whose it is, for messages
    check: Callable[[], None] | None = None

    def positions(self, begin: int, end: int) -> np.ndarray:
        """int64 positions in all tokens. Raises TrieFormatError for one outside the stretch."""
        block = self.suffixes[begin:end]
        if len(block) and int(block.max()) >= self.length:
            if self.check:
                self.check()
            raise TrieFormatError(f"{self.name}: a suffix points outside the tokens. Rebuild.")
        return block.astype(np.int64) + self.offset


class Pages:
    """Mapped files whose resident pages are released when the process holds more than `limit` bytes; they stay in the cache."""

    def __init__(self, limit: int):
        self.limit = limit
        self._once: list[tuple[mmap.mmap, int, int]] = []
        self._often: list[tuple[mmap.mmap, int, int]] = []

    def watch(self, mapped: mmap.mmap, begin: int = 0, end: int | None = None, often: bool = False) -> None:
        """Count bytes begin to end of a mapping in. often: they are read here and there all the time, so they go last."""
        start = begin - begin % mmap.PAGESIZE
        (self._often if often else self._once).append((mapped, start, (len(mapped) if end is None else end) - start))

    def release(self) -> None:
        """Release everything: what comes next reads other pages."""
        _let_go(self._once)
        _let_go(self._often)

    def trim(self) -> None:
        """Release what is resident if it is too much. Any reader may continue: the pages come back when touched."""
        for ranges in (self._once, self._often):
            if resident_bytes() > self.limit:
                _let_go(ranges)


def _let_go(ranges: Sequence[tuple[mmap.mmap, int, int]]) -> None:
    if hasattr(mmap, "MADV_DONTNEED"):
        for mapped, begin, length in ranges:
            mapped.madvise(mmap.MADV_DONTNEED, begin, length)


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


class Scratch:
    """Arrays put on disk next to the output, in a file without a name: it is gone when the process ends, however it ends."""

    def __init__(self, folder: Path, pages: Pages):
        self._folder = folder
        self._pages = pages
        self._file: IO[bytes] | None = None
        self._used = 0

    def put(self, array: np.ndarray) -> np.ndarray:
        """The same array, mapped from disk. Raises LookaheadError if the disk is full."""
        if not len(array):
            return array
        with self._room(array.nbytes) as (file, begin):
            file.seek(begin)
            write_pieces(file, array.view(np.uint8).data)
            file.flush()
            return self._map(file, begin, len(array), array.dtype, mmap.ACCESS_READ)

    def zeros(self, entries: int, dtype: type) -> np.ndarray:
        """A writable array of zeros, mapped from disk. Raises LookaheadError if the disk is full."""
        size = entries * np.dtype(dtype).itemsize
        with self._room(size) as (file, begin):
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), begin, size)  # a full disk shows here, not when a page is touched
            else:
                file.truncate(begin + size)
            return self._map(file, begin, entries, np.dtype(dtype), mmap.ACCESS_WRITE)

    @contextlib.contextmanager
    def _room(self, size: int) -> Iterator[tuple[IO[bytes], int]]:
        """(the file, where the next `size` bytes go)."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - as long as its arrays
            begin = self._used
            self._used += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            yield self._file, begin
        except OSError as error:
            raise LookaheadError(f"{self._folder}: {size:,} bytes of scratch cannot be kept here ({reason(error)}).") from error

    def _map(self, file: IO[bytes], begin: int, entries: int, dtype: np.dtype, access: int) -> np.ndarray:
        mapped = uninterrupted(lambda: mmap.mmap(file.fileno(), entries * dtype.itemsize, access=access, offset=begin))
        self._pages.watch(mapped, often=access == mmap.ACCESS_WRITE)
        return np.frombuffer(mapped, dtype, entries)


def blocks_of(run: Run, begin: int, end: int, pages: Pages) -> Iterator[np.ndarray]:
    """The positions of a run's suffixes begin to end, as far as there are any, in blocks."""
    end = min(end, len(run.suffixes))
    for start in range(begin, end, 16 * BLOCK):
        yield run.positions(start, min(start + 16 * BLOCK, end))
        pages.trim()


def merged(
    tokens: np.ndarray, separator: int, runs: Sequence[Run], workers: int, pages: Pages
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of (int64 positions in `tokens`, uint64 keys of the texts there): all suffixes of all runs in sorted order.

    Equal texts come in the order of the runs. Raises TrieFormatError for a run that is not sorted.
    Texts are read before they are compared: in any order where the tokens fit into memory, a few at a time; else millions at
    a time, from the front of the tokens to their end, so that a page is read once for all of them.
    """
    bits = separator.bit_length()
    several = len(runs) > 1
    words = -(-DEPTH // int(key_digits(bits))) if several else 1  # of one run only the keys are wanted
    alone = not several and runs[0].check is not None  # and from a file
    block = BLOCK if several else 16 * BLOCK
    far = 2 * tokens.nbytes > pages.limit
    if far:
        block = max(block, pages.limit // 2 // (workers + 1) // (8 * words + 64))

    def unsorted() -> TrieFormatError:
        for run in runs:
            if run.check:
                run.check()
        names = ", ".join(dict.fromkeys(run.name for run in runs))
        return TrieFormatError(f"{names}: suffixes are not sorted. Rebuild.")

    def merge(positions: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        texts = np.empty((len(positions), words), np.uint64)
        order = np.argsort(positions)
        for begin in range(0, len(order), SWEEP):
            pack_texts(tokens, separator, bits, positions, order[begin : begin + SWEEP], texts)
            if far:
                pages.trim()
        ordered, keys = np.empty_like(positions), np.empty(len(positions), np.uint64)
        if not merge_block(texts, positions, bounds, ordered, keys, several):
            raise unsorted()
        if alone and not ties_in_order(tokens, separator, bits, ordered, keys):
            raise unsorted()
        return ordered, keys

    last = -1
    pending: collections.deque[Future[tuple[np.ndarray, np.ndarray]]] = collections.deque()
    intervals = _split(tokens, separator, runs, block)
    with ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                for positions, bounds in itertools.islice(intervals, workers + 1 - len(pending)):
                    pending.append(pool.submit(merge, positions, bounds))
                if not pending:
                    return
                positions, keys = pending.popleft().result()
                if last >= 0:
                    order = compare_suffixes(tokens, separator, last, positions[0], 0, DEPTH)
                    if order > 0 or (order == 0 and last >= positions[0]):
                        raise unsorted()
                last = int(positions[-1])
                if tokens[last] == separator:  # which sorts behind every token
                    raise unsorted()
                yield positions, keys
                pages.trim()
        finally:
            for future in pending:
                future.cancel()


def _split(tokens: np.ndarray, separator: int, runs: Sequence[Run], block: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(positions of all runs in one interval of the sorted order, bounds of the runs in it), interval after interval.

    Each run offers a window; the window end that sorts first, of all runs, is where the interval ends. Equal texts sort by
    run, so such an element always exists and the run that offers it moves on by a whole window.
    """
    window = max(block // 16, block // len(runs), 1)
    cursors = [0] * len(runs)
    while True:
        offered = [run.positions(at, at + window + 1) for run, at in zip(runs, cursors, strict=True)]
        splitter, owner = -1, -1
        for number, positions in enumerate(offered):
            if len(positions) <= window:
                continue
            end = positions[window : window + 1]
            if splitter < 0 or count_before(tokens, separator, end, splitter, False, DEPTH):
                splitter, owner = int(end[0]), number
        taken = []
        for number, positions in enumerate(offered):
            if splitter < 0:
                count = len(positions)
            elif number == owner:
                count = window
            else:
                count = count_before(tokens, separator, positions[:window], splitter, number < owner, DEPTH)
            taken.append(positions[:count])
            cursors[number] += count
        if not any(len(positions) for positions in taken):
            return
        yield np.concatenate(taken), np.cumsum([0, *(len(positions) for positions in taken)])
