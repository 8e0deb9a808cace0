"""The text of one running request: its prompt and its output. In: tokens, one at a time. Out: earlier occurrences of its
end.

A token log with hash chains, as LZ77 match finders keep: for each position, the one before it that ends in the same 1, 2, 4 or
8 tokens. Appending is O(1); the occurrences of a context are found newest first, those that match longest before the others.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence

import numpy as np

from lookahead.draft.arrays import CHAINS, LEADERS, OWN_COLUMNS, PER_CHAIN
from lookahead.native.kernels import carray, fetch_entry, inlined, int32_at, int64_at, kernel

TOKEN, CHAIN, SEEN = 0, 1, 1 + CHAINS  # rows of OwnText.log; chain c links positions that agree in 2^c tokens
LONGEST_MATCH = 32  # tokens compared; a longer match counts as this
CHAIN_STEPS = 2 * PER_CHAIN  # positions looked at on a chain

# Columns of a row's own text among the arrays of all rows.
LOG, CAPACITY, HEADS, HEAD_SLOTS, LEADING, LENGTH, PROMPT_LENGTH = range(OWN_COLUMNS)
Own = namedtuple("Own", ("log", "heads", "top_tokens", "length", "prompt_length"))


class OwnText:
    """The log of a request.

    log      int32 [2 + CHAINS, capacity]: row TOKEN the tokens; rows CHAIN... the position before, in that chain, or -1;
             row SEEN in how many different contexts of one token the token had been seen by then
    heads    int32 [CHAINS, slots]: the newest position of each hash
    top_tokens  int64 [LEADERS, 3]: token, contexts, newest position; most frequent first
    columns  int64 [OWN_COLUMNS]: addresses and sizes of these, and the length, for kernels, see `describe`
    """

    def __init__(self) -> None:
        self.log = np.empty((2 + CHAINS, 1 << 10), np.int32)
        self.heads = np.full((CHAINS, 1 << 11), -1, np.int32)
        self.top_tokens = np.zeros((LEADERS, 3), np.int64)
        self.columns = np.zeros(OWN_COLUMNS, np.int64)

    def __len__(self) -> int:
        return self.length

    @property
    def length(self) -> int:
        """Tokens."""
        return self.columns.item(LENGTH)

    @length.setter
    def length(self, length: int) -> None:
        self.columns[LENGTH] = length

    @property
    def tokens(self) -> np.ndarray:
        """int32 [length]"""
        return self.log[TOKEN, : self.length]

    def clear(self, expected: int = 0) -> None:
        """Forget everything; the next text will hold about `expected` tokens."""
        slots = 1 << max(11, min(20, (2 * expected).bit_length()))
        if slots != self.heads.shape[1]:
            self.heads = np.empty((CHAINS, slots), np.int32)
        self.heads.fill(-1)
        self.top_tokens.fill(0)
        self.length = 0

    def reserve(self, more: int) -> bool:
        """Make room for that many more tokens; True if the arrays are new ones."""
        needed = self.length + more
        if needed <= self.log.shape[1]:
            return False
        grown = np.empty((2 + CHAINS, max(needed, 2 * self.log.shape[1])), np.int32)
        grown[:, : self.length] = self.log[:, : self.length]
        self.log = grown
        return True

    def describe(self, columns: np.ndarray, prompt_length: int) -> None:
        """Keep addresses, sizes and the length in int64 [OWN_COLUMNS] from now on."""
        log, heads = (self.log.ctypes.data, self.log.shape[1]), (self.heads.ctypes.data, self.heads.shape[1])
        columns[:] = *log, *heads, self.top_tokens.ctypes.data, self.length, prompt_length
        self.columns = columns

    def append(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens."""
        added = np.asarray(token_ids, np.int32)
        self.reserve(len(added))
        self.length = append_tokens(
            self.log, self.heads, self.top_tokens, self.length, added, np.empty(8, np.int64), np.empty(CHAINS, np.int64)
        )


@inlined
def own_arrays(columns, row):
    """The Own of a row of what `OwnText.describe` wrote."""
    return Own(
        carray(int32_at(columns[row, LOG]), (2 + CHAINS, columns[row, CAPACITY])),
        carray(int32_at(columns[row, HEADS]), (CHAINS, columns[row, HEAD_SLOTS])),
        carray(int64_at(columns[row, LEADING]), (LEADERS, 3)),
        columns[row, LENGTH],
        columns[row, PROMPT_LENGTH],
    )


@inlined
def _mix(mixed, token):
    """Hash of one token more, further back."""
    mixed = (mixed ^ np.uint64(token)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(29))


@inlined
def slots_of(recent, have, size, slots):
    """slots[c] becomes the slot of the last 2^c tokens of recent[:have] (newest first); returns for how many chains."""
    mixed, chains = np.uint64(1), 0
    for k in range(min(have, 1 << (CHAINS - 1))):
        mixed = _mix(mixed, recent[k])
        if k + 1 == 1 << chains:
            slots[chains] = np.int64(mixed >> np.uint64(20)) & (size - 1)
            chains += 1
    return chains


@kernel
def append_tokens(log, heads, top_tokens, length, added, recent, slots):
    """Write `added` behind `length` tokens and chain them; returns the new length.

    recent (int64 [8] or more) and slots (int64 [CHAINS]) are overwritten.
    """
    for position in range(len(added)):
        token, index = added[position], length
        log[TOKEN, index] = token
        length += 1
        have = min(8, length)
        for k in range(have):
            recent[k] = log[TOKEN, index - k]
        seen, new_context = 0, True
        for chain in range(CHAINS):
            log[CHAIN + chain, index] = -1
        for c in range(slots_of(recent, have, heads.shape[1], slots)):
            before = heads[c, slots[c]]
            log[CHAIN + c, index] = before
            heads[c, slots[c]] = index
            steps = 0
            while c < 2 and before >= 0 and steps < CHAIN_STEPS:
                if log[TOKEN, before] == token and (c == 0 or (before > 0 and log[TOKEN, before - 1] == recent[1])):
                    seen = log[SEEN, before] if c == 0 else seen
                    new_context = new_context and c == 0
                    break
                before = log[CHAIN + c, before]
                steps += 1
        log[SEEN, index] = seen + new_context
        insert_top_token(top_tokens, token, seen + new_context, index)
    return length


@inlined
def insert_top_token(top_tokens, token, seen, index):
    """Put a token where it belongs among the most frequent."""
    at = 0
    while at < LEADERS and top_tokens[at, 1] > 0 and top_tokens[at, 0] != token:
        at += 1
    if at == LEADERS:
        if seen <= top_tokens[LEADERS - 1, 1]:
            return
        at = LEADERS - 1
    top_tokens[at, 0], top_tokens[at, 1], top_tokens[at, 2] = token, seen, index
    while at > 0 and top_tokens[at - 1, 1] < seen:
        for column in range(3):
            top_tokens[at - 1, column], top_tokens[at, column] = top_tokens[at, column], top_tokens[at - 1, column]
        at -= 1


@inlined
def _slot_of_one(own, token):
    return np.int64(_mix(np.uint64(1), token) >> np.uint64(20)) & (own.heads.shape[1] - 1)


@inlined
def fetch_latest(own, token):
    """`latest_position` is called soon."""
    fetch_entry(own.heads, _slot_of_one(own, token))


@inlined
def latest_position(own, token):
    """The newest position of a token in the own text, -1 if it is not among the newest of its hash."""
    index = own.heads[0, _slot_of_one(own, token)]
    for _ in range(CHAIN_STEPS):
        if index < 0 or (own.log[TOKEN, index] == token and index < own.length):
            return np.int64(index)
        index = own.log[CHAIN, index]
    return np.int64(-1)


@inlined
def own_occurrences(log, heads, length, recent, have, chains, found, slots):
    """Occurrences before the end of `log` that agree with recent[:have] (newest first) in two tokens or more.

    found: int64 [MOST_OCCURRENCES, 3] gets match length, the token that follows, and the position; longer matches first by
    chain, each chain newest first. chains: how many there are, whose slots stand in `slots`. Returns how many were found.
    """
    filled = 0
    for chain in range(chains - 1, 0, -1):
        filled = more_occurrences(log, heads, length, recent, have, chain, found, slots, filled)
    return filled


@inlined
def more_occurrences(log, heads, length, recent, have, chain, found, slots, filled):
    """Add the occurrences of one chain to the `filled` that were found before, see `own_occurrences`.

    Chain 0 has those that agree in one token.
    """
    order = 1 << chain
    above = 2 * order if chain < CHAINS - 1 else LONGEST_MATCH + 1
    index, taken = heads[chain, slots[chain]], 0
    for _ in range(CHAIN_STEPS):
        if index < 0 or taken == PER_CHAIN:
            break
        here = index
        index = log[CHAIN + chain, here]
        if here + 1 >= length:
            continue
        match, limit = 0, min(LONGEST_MATCH, have, here + 1)
        while match < limit and log[TOKEN, here - match] == recent[match]:
            match += 1
        if match < order or match >= above:
            continue  # a collision, or taken as a longer match
        found[filled, 0], found[filled, 1], found[filled, 2] = match, log[TOKEN, here + 1], here
        filled += 1
        taken += 1
    return filled
