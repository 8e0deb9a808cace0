"""The memory of the running job. In: finished outputs. Out: sorted text that drafting reads as it reads a trie file.

Outputs are appended to one token log. Two runs of sorted suffixes cover it, the older part and the recent one, as in an LSM
store: a new output is sorted and merged into the recent run, and when that has grown to a share of the older one, the two are
merged. So a token is moved a bounded number of times. When the log is full its older half is dropped: what is stale leaves, and
memory stays bounded.

What running requests have emitted so far can stand behind the log, sorted by itself. It is in the recent run until that
changes, and is then added to it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.native.kernels import kernel
from lookahead.trie.suffixes import DEPTH, compare_suffixes, first_table

CLOSED = np.uint32(0x7FFFFFFF)  # stands behind each output; larger than every token id
RECENT = 1 << 14  # suffixes in the recent run before it is merged into the older one, at least
SHARE = 8  # and at least one in that many of the older one's


class Run:
    """Sorted suffixes of a part of the log.

    suffixes  uint32: positions in the log, sorted by the text that starts there
    first     uint32 [vocabulary + 1]: where the suffixes of each first token begin
    """

    def __init__(self) -> None:
        self.suffixes = np.empty(0, np.uint32)
        self.first = np.zeros(1, np.uint32)

    def add(self, tokens: np.ndarray, suffixes: np.ndarray, first: np.ndarray) -> None:
        """Merge sorted suffixes of later text into this run."""
        self.suffixes = merge_sorted(tokens, self.suffixes, suffixes)
        self.first = _grown(self.first, len(first)) + _grown(first, len(self.first))

    def cut(self, tokens: np.ndarray, dropped: int, end: int) -> None:
        """The first `dropped` tokens of the log are gone, and those from `end` on; `tokens` are those left."""
        kept = self.suffixes[(self.suffixes >= dropped) & (self.suffixes < end)] - np.uint32(dropped)
        self.suffixes, self.first = kept, first_table(tokens[kept], len(self.first) - 1)


class SessionMemory:
    """tokens[:length], and `runs` over it: older, recent. `version` changes whenever positions or ranks do.

    capacity: tokens kept at most; memory is 8 bytes each.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.version = 0
        self.clear()

    def __len__(self) -> int:
        return self.length

    def clear(self) -> None:
        """Forget everything."""
        self.tokens = np.empty(min(self.capacity, 1 << 12), np.uint32)
        self.length = 0
        self.runs = (Run(), Run())
        self.running = self._running_sorted = np.empty(0, np.uint32)
        self.version += 1

    def set_running(self, documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Set what running requests have emitted, each behind its left context: added by the next `append_documents`."""
        texts = [part for left, ids in documents if len(ids) for part in (left[-1:], ids, [CLOSED])]
        self.running = np.concatenate(texts).astype(np.uint32) if texts else np.empty(0, np.uint32)
        order = sort_text(self.running, 0, len(self.running))
        self._running_sorted = order[self.running[order] != CLOSED]

    def append_documents(self, documents: Sequence[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]]) -> None:
        """Add finished outputs, each behind its left context, whose last token is the first of its text."""
        if len(recent := self.runs[1].suffixes) and int(recent.max()) >= self.length:  # those that ran before
            self.runs[1].cut(self.tokens, 0, self.length)
            self.version += 1
        start = self.length
        for left_context, token_ids in documents:
            text = np.asarray([*left_context[-1:], *token_ids], np.uint32)[-max(0, self.capacity - 1) :]
            if self.capacity < 2 or not len(token_ids):
                continue
            if self.length + len(text) + 1 > self.capacity:
                self._sort(start)
                self._drop_oldest(len(text) + 1)
                start = self.length
            self._reserve(len(text) + 1)
            self.tokens[self.length : self.length + len(text)] = text
            self.tokens[self.length + len(text)] = CLOSED
            self.length += len(text) + 1
        self._sort(start)
        if 0 < len(self.running) <= self.capacity - self.length:
            self._reserve(len(self.running))
            self.tokens[self.length : self.length + len(self.running)] = self.running
            starts = self.running[self._running_sorted]
            first = first_table(starts, int(starts[-1]) + 1)
            self.runs[1].add(self.tokens, self._running_sorted + np.uint32(self.length), first)
            self.version += 1

    def _sort(self, start: int) -> None:
        """The log's tokens from `start` on join the recent run."""
        if start == self.length:
            return
        starts = sort_text(self.tokens, start, self.length - start)
        starts = starts[self.tokens[starts] != CLOSED]
        text = self.tokens[starts]
        older, recent = self.runs
        recent.add(self.tokens, starts, first_table(text, int(text[-1]) + 1))
        if len(recent.suffixes) >= max(RECENT, len(older.suffixes) // SHARE):
            older.add(self.tokens, recent.suffixes, recent.first)
            self.runs = (older, Run())
        self.version += 1

    def _reserve(self, more: int) -> None:
        if self.length + more > len(self.tokens):
            grown = np.empty(min(self.capacity, max(self.length + more, 2 * len(self.tokens))), np.uint32)
            grown[: self.length] = self.tokens[: self.length]
            self.tokens = grown

    def _drop_oldest(self, needed: int) -> None:
        """Keep the newest half, or less where more room is needed, from the beginning of an output on."""
        wanted = self.length - min(self.capacity // 2, self.capacity - needed)
        ends = np.flatnonzero(self.tokens[: self.length] == CLOSED) + 1
        dropped = int(ends[np.searchsorted(ends, wanted)])
        self.length -= dropped
        self.tokens[: self.length] = self.tokens[dropped : dropped + self.length].copy()
        for run in self.runs:
            run.cut(self.tokens, dropped, dropped + self.length)


def _grown(first: np.ndarray, length: int) -> np.ndarray:
    """`first` for a larger vocabulary, whose further tokens it does not hold."""
    return np.concatenate([first, np.full(max(0, length - len(first)), first[-1], np.uint32)])


@kernel
def _before(tokens, a, b):
    """True if the text at `a` sorts before the one at `b`; what is equal in DEPTH tokens stands by position."""
    order = compare_suffixes(tokens, CLOSED, np.int64(a), np.int64(b), 0, DEPTH)
    return order < 0 or (order == 0 and a < b)


@kernel
def sort_text(tokens, start, count):
    """uint32 [count]: positions from `start` on, sorted (merge sort)."""
    order = np.arange(start, start + count).astype(np.uint32)
    other = np.empty_like(order)
    width = 1
    while width < count:
        for low in range(0, count, 2 * width):
            middle, high = min(low + width, count), min(low + 2 * width, count)
            a, b = low, middle
            for k in range(low, high):
                if b == high or (a < middle and _before(tokens, order[a], order[b])):
                    other[k] = order[a]
                    a += 1
                else:
                    other[k] = order[b]
                    b += 1
        order, other = other, order
        width *= 2
    return order


@kernel
def merge_sorted(tokens, many, few):
    """uint32: two sorted lists of positions as one. From each suffix of `few` to the next, `many` is searched by galloping."""
    merged = np.empty(len(many) + len(few), np.uint32)
    done = 0
    for k in range(len(few)):
        reach = 1
        low, high = done, done
        while high < len(many) and _before(tokens, many[high], few[k]):
            low = high + 1
            high += reach
            reach *= 2
        high = min(high, len(many))
        while low < high:
            middle = (low + high) >> 1
            if _before(tokens, many[middle], few[k]):
                low = middle + 1
            else:
                high = middle
        for index in range(done, low):
            merged[index + k] = many[index]
        merged[low + k] = few[k]
        done = low
    for index in range(done, len(many)):
        merged[index + len(few)] = many[index]
    return merged
