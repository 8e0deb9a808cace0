"""The mutable store of the running job. In: tokens, one at a time. Out: arrays that drafting kernels walk.

A token log with two hash chains, as LZ77 match finders keep: for each place, the place before it that ends in the same
token, and the one that ends in the same two tokens. Appending is O(1). When the log is full its older half is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.trie.suffixes import kernel

BREAK = -1  # stands between documents
UNLINKED = -2  # in previous1: no draft starts behind this place


class TokenLog:
    """tokens[:length] with chains previous1/previous2 and their heads; see the module's docstring.

    capacity: tokens kept at most; memory is 12 bytes each plus the heads.
    """

    def __init__(self, capacity: int, hash_bits: int = 16):
        self.capacity = capacity
        self.tokens = np.empty(min(capacity, 1 << 12), np.int32)
        self.previous1 = np.empty_like(self.tokens)
        self.previous2 = np.empty_like(self.tokens)
        self.head1 = np.full(1 << hash_bits, -1, np.int32)
        self.head2 = np.full(1 << hash_bits, -1, np.int32)
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def append(self, token_ids: Sequence[int] | np.ndarray, unlinked: int = 0) -> None:
        """Add tokens. The first `unlinked` serve as left context only: no draft starts behind them."""
        start = max(0, len(token_ids) - self.capacity)
        added = np.asarray(token_ids, np.int32)[start:]
        linked = np.arange(start, len(token_ids)) >= unlinked
        if self.length + len(added) > self.capacity:
            self._drop_oldest(len(added))
        self._reserve(self.length + len(added))
        self.length = append_tokens(*self._arrays(), self.length, added, linked)

    def append_document(self, left_context: Sequence[int] | np.ndarray, token_ids: Sequence[int] | np.ndarray) -> None:
        """Add one finished document: continuations start behind the last token of `left_context` at the earliest."""
        left = list(left_context)
        self.append([BREAK, *left, *token_ids], unlinked=len(left))

    def clear(self) -> None:
        """Forget everything."""
        self.head1.fill(-1)
        self.head2.fill(-1)
        self.length = 0

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.previous1, self.previous2, self.head1, self.head2

    def _reserve(self, length: int) -> None:
        if length <= len(self.tokens):
            return
        size = min(self.capacity, max(length, 2 * len(self.tokens)))
        for name in ("tokens", "previous1", "previous2"):
            grown = np.empty(size, np.int32)
            grown[: self.length] = getattr(self, name)[: self.length]
            setattr(self, name, grown)

    def _drop_oldest(self, needed: int) -> None:
        """Keep the newest half, or less where more room is needed, and chain it anew."""
        kept = min(self.capacity // 2, self.capacity - needed)
        newest = self.tokens[self.length - kept : self.length].copy()
        linked = self.previous1[self.length - kept : self.length] != UNLINKED
        self.clear()
        self.length = append_tokens(*self._arrays(), 0, newest, linked)


@kernel
def hash_one(token, size):
    return np.int64((np.uint64(token) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & (size - 1)


@kernel
def hash_two(before, token, size):
    mixed = np.uint64(before) * np.uint64(0xC2B2AE3D27D4EB4F) + np.uint64(token)
    return np.int64((mixed * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & (size - 1)


@kernel
def append_tokens(tokens, previous1, previous2, head1, head2, length, added, linked):
    """Write `added` behind `length` tokens and chain those places where `linked` is true; returns the new length."""
    for j in range(len(added)):
        place = length + j
        tokens[place] = added[j]
        previous1[place] = -1
        previous2[place] = -1
        if not linked[j] or added[j] < 0:
            previous1[place] = UNLINKED
            continue
        slot = hash_one(added[j], len(head1))
        previous1[place] = head1[slot]
        head1[slot] = place
        if place > 0 and tokens[place - 1] >= 0:
            slot = hash_two(tokens[place - 1], added[j], len(head2))
            previous2[place] = head2[slot]
            head2[slot] = place
    return length + len(added)
