"""Sorted text that drafts come from, read by address. In: arrays of trie segments and of the job's memory. Out: one table.

A kernel cannot take a list of arrays of different types, so each sorted text is a row of numbers that give where its arrays
lie; whoever makes a row keeps the arrays alive. A mapped file may lie about positions: every read here is bounded first.

A *step* is a range of sorted suffixes that all begin with the context's last `length` tokens: low, high, length, and order, the
largest number of the context's tokens for which these are the occurrences (unlike `length` it does not matter for reading). The
steps of a context, longest first, hold fewer occurrences each than the next: lengths with the same occurrences share a step.
Appending a token to the context narrows each step to the occurrences where that token follows, and adds the occurrences of the
token alone.

Example: in "a b a b a c", the context "a b" has the steps ("a b": 2 occurrences); then appending "a" gives ("b a": 2
occurrences, order 3) and ("a": 3 occurrences, order 1).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from lookahead.draft.arrays import COLUMNS, RANGES, STEPS
from lookahead.native.kernels import fetch_address, float32_at, inlined, kernel, uint16_at, uint32_at, uint64_at
from lookahead.trie.suffixes import DEPTH

# Columns of a row of the table. Addresses and sizes in bytes, counts in entries.
TOKENS, TOKEN_BYTES, LENGTH, SUFFIXES, SUFFIX_BYTES, SIZE, FIRST, FIRST_BYTES, VOCABULARY, SOURCE = range(10)
DOCUMENT_ENDS, DOCUMENT_END_BYTES, DOCUMENTS, DOCUMENT_SOURCES, SOURCE_WEIGHTS, WEIGHTS, SORTED, VERSION = range(10, 18)

END = np.int64(1) << 40  # read where a text ends: larger than every token
LOW, HIGH, PREFIX, ORDER = range(4)  # of a step
FEW = 8  # occurrences searched one by one


@dataclasses.dataclass(frozen=True)
class SortedText:
    """One row of the table and the arrays it points to.

    tokens    uint16 or uint32: documents, each closed by an id of `vocabulary` or more
    suffixes  uint32 or uint64: positions in `tokens`, sorted by the text that starts there
    first     uint32 or uint64 [vocabulary + 1]: where the suffixes of each first token begin
    source    number that accepted tokens are attributed to
    depth     tokens that the suffixes are sorted by
    weighing  document ends, document sources (uint16) and source weights (float32), where weights differ
    version   a number that no text with other suffixes has
    """

    tokens: np.ndarray
    suffixes: np.ndarray
    first: np.ndarray
    source: int
    depth: int = DEPTH
    weighing: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    version: int = dataclasses.field(default_factory=itertools.count(1).__next__)

    @functools.cached_property
    def row(self) -> np.ndarray:
        """int64 [COLUMNS]"""
        row = np.zeros(COLUMNS, np.int64)
        row[[TOKENS, TOKEN_BYTES, LENGTH]] = self.tokens.ctypes.data, self.tokens.itemsize, len(self.tokens)
        row[[SUFFIXES, SUFFIX_BYTES, SIZE]] = self.suffixes.ctypes.data, self.suffixes.itemsize, len(self.suffixes)
        row[[FIRST, FIRST_BYTES, VOCABULARY]] = self.first.ctypes.data, self.first.itemsize, len(self.first) - 1
        row[SOURCE], row[SORTED], row[VERSION] = self.source, self.depth, self.version
        if self.weighing is not None:
            ends, sources, weights = self.weighing
            row[[DOCUMENT_ENDS, DOCUMENT_END_BYTES, DOCUMENTS]] = ends.ctypes.data, ends.itemsize, len(ends)
            row[[DOCUMENT_SOURCES, SOURCE_WEIGHTS, WEIGHTS]] = sources.ctypes.data, weights.ctypes.data, len(weights)
        return row


def table_of(texts: list[SortedText]) -> np.ndarray:
    """int64 [texts, COLUMNS]"""
    return np.array([text.row for text in texts], np.int64).reshape(len(texts), COLUMNS)


@inlined
def _read(address, size, index):
    """Entry `index` of unsigned integers of `size` bytes."""
    if size == 4:
        return np.int64(uint32_at(address)[index])
    if size == 2:
        return np.int64(uint16_at(address)[index])
    return np.int64(uint64_at(address)[index])


@inlined
def token_at(texts, text, position):
    """The token at a position, END outside of the text and at the end of a document."""
    if position < 0 or position >= texts[text, LENGTH]:
        return END
    token = _read(texts[text, TOKENS], texts[text, TOKEN_BYTES], position)
    return token if token < texts[text, VOCABULARY] else END


@inlined
def suffix_at(texts, text, rank):
    return _read(texts[text, SUFFIXES], texts[text, SUFFIX_BYTES], rank)


@inlined
def fetch_suffix(texts, text, rank):
    """`suffix_at` is called soon."""
    fetch_address(texts[text, SUFFIXES] + rank * texts[text, SUFFIX_BYTES])


@inlined
def fetch_token(texts, text, position):
    """`token_at` is called soon."""
    fetch_address(texts[text, TOKENS] + position * texts[text, TOKEN_BYTES])


@inlined
def weight_at(texts, text, position):
    """Weight of the source that the document at a position came from."""
    if texts[text, WEIGHTS] == 0:
        return np.float32(1.0)
    low, high = np.int64(0), texts[text, DOCUMENTS] - 1
    while low < high:
        middle = (low + high) >> 1
        if _read(texts[text, DOCUMENT_ENDS], texts[text, DOCUMENT_END_BYTES], middle) < position:
            low = middle + 1
        else:
            high = middle
    source = np.int64(uint16_at(texts[text, DOCUMENT_SOURCES])[low])
    return float32_at(texts[text, SOURCE_WEIGHTS])[min(source, texts[text, WEIGHTS] - 1)]


@inlined
def sampled(k, taken, width):
    """The k-th of that many occurrences that represent `width` ones evenly."""
    return k if taken == width else (2 * k + 1) * width // (2 * taken)


# Memory is read in three rounds, for all texts at once: ranks in sorted texts, positions, tokens. What a round reads has been
# fetched since the one before, so that a processor waits for memory three times, not at each occurrence.


@inlined
def sample_range(texts, text, low, width, most, sample, filled):
    """First round: note which of `width` ranks from `low` are sampled, `most` at most, behind `filled` others. Returns how many
    there are.
    """
    taken = min(width, most)
    for k in range(taken):
        rank = low + sampled(k, taken, width)
        sample[filled + k, 0] = rank
        fetch_suffix(texts, text, rank)
    return filled + taken


@inlined
def sample_positions(texts, text, taken, prefix, sample, filled):
    """Second round: of ranks their positions, whose tokens behind `prefix` others are read next. Returns how many there are."""
    for k in range(filled, filled + taken):
        sample[k, 0] = suffix_at(texts, text, sample[k, 0])
        fetch_token(texts, text, sample[k, 0] + prefix)
    return filled + taken


@inlined
def first_range(texts, text, token):
    """(low, high) of the suffixes that begin with this token."""
    if token < 0 or token >= texts[text, VOCABULARY]:
        return np.int64(0), np.int64(0)
    low = min(max(_read(texts[text, FIRST], texts[text, FIRST_BYTES], token), np.int64(0)), texts[text, SIZE])
    high = min(max(_read(texts[text, FIRST], texts[text, FIRST_BYTES], token + 1), low), texts[text, SIZE])
    return low, high


@inlined
def _key(texts, text, low, high, prefix, token):
    """A hash of a range of a text's suffixes, how many tokens they share, and the token that follows: never 0."""
    mixed = (np.uint64(low) ^ (np.uint64(texts[text, VERSION]) << np.uint64(40))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29)) ^ np.uint64(high)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(32)) ^ np.uint64(prefix) ^ (np.uint64(token) << np.uint64(16))) * np.uint64(
        0x94D049BB133111EB
    )
    return np.int64((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1))


@inlined
def _narrowed(texts, text, low, high, prefix, token, ranges):
    """(low, high) of the suffixes low to high that have `token` behind their first `prefix` tokens.

    ranges: int64 [RANGES, 3], what was found before: key, low, high.
    """
    if high - low <= FEW:
        return _searched(texts, text, low, high, prefix, token)
    key = _key(texts, text, low, high, prefix, token)
    entry = np.uint64(key >> 1) & np.uint64(RANGES - 1)
    if ranges[entry, 0] != key or ranges[entry, 1] < low or ranges[entry, 2] > high:
        ranges[entry, 0] = key
        ranges[entry, 1], ranges[entry, 2] = _searched(texts, text, low, high, prefix, token)
    return ranges[entry, 1], ranges[entry, 2]


@inlined
def _searched(texts, text, low, high, prefix, token):
    """Narrow a range as `_narrowed` does, by searching the text itself."""
    if high - low <= FEW:  # without branches that depend on tokens: these are fetched at once
        below, equal = np.int64(0), np.int64(0)
        for rank in range(low, high):
            here = token_at(texts, text, suffix_at(texts, text, rank) + prefix)
            below += here < token
            equal += here == token
        return low + below, low + below + equal
    stop = high
    while low < high:
        middle = (low + high) >> 1
        if token_at(texts, text, suffix_at(texts, text, middle) + prefix) < token:
            low = middle + 1
        else:
            high = middle
    begin, reach = low, np.int64(1)
    high = begin
    # Gallop: most ranges are short.
    while high < stop and token_at(texts, text, suffix_at(texts, text, high) + prefix) == token:
        low = high + 1
        high = min(stop, high + reach)
        reach <<= 1
    while low < high:
        middle = (low + high) >> 1
        if token_at(texts, text, suffix_at(texts, text, middle) + prefix) == token:
            low = middle + 1
        else:
            high = middle
    return begin, low


@inlined
def has_step(texts, steps, made, keys, node, text, wanted, ranges):
    """True if the context of `node` has a step of this number; makes those up to it from the steps of the parent.

    steps  int64 [nodes, texts, STEPS, 4]
    made   int64 [nodes, texts, 2]: steps made so far, and the parent's step to narrow next, -1 when all are made
    keys   int64 [nodes, 2]: token and parent of each node
    """
    while made[node, text, 0] <= wanted and made[node, text, 1] >= 0:
        child, number = node, made[node, text, 1]
        while made[keys[child, 1], text, 0] <= number and made[keys[child, 1], text, 1] >= 0:  # an ancestor comes first
            child = keys[child, 1]
            number = made[child, text, 1]
        if made[keys[child, 1], text, 0] > number:
            made[child, text, 1] = number + 1
            _narrow_step(texts, text, steps, keys[child, 1], number, keys[child, 0], child, made, steps, ranges)
        else:
            made[child, text, 1] = -1
            _first_step(texts, text, keys[child, 0], steps, child, made)
    return made[node, text, 0] > wanted


@kernel
def narrow_all(texts, begin, end, steps, made, row, token, ranges):
    """Append `token` to the context of a row, whose steps are all made, in the texts from `begin` to `end`.

    ranges: see `_narrowed`.
    """
    for text in range(begin, end):
        count, made[row, text, 0] = made[row, text, 0], 0
        for number in range(count):  # which is written over what has been read: there are never more
            _narrow_step(texts, text, steps, row, number, token, row, made, steps, ranges)
        _first_step(texts, text, token, steps, row, made)
        made[row, text, 1] = -1


@inlined
def _narrow_step(texts, text, steps, node, number, token, child, made, child_steps, ranges):
    """Add the step of `node` of this number, narrowed by `token`, to those of `child`."""
    prefix = steps[node, text, number, PREFIX]
    low, high = _narrowed(texts, text, steps[node, text, number, LOW], steps[node, text, number, HIGH], prefix, token, ranges)
    if low < high and (high - low == 1 or prefix + 1 < texts[text, SORTED]):  # ties of that length are not sorted further
        _add_step(child_steps, made, child, text, low, high, prefix + 1, steps[node, text, number, ORDER] + 1)


@inlined
def _first_step(texts, text, token, steps, node, made):
    """Add the occurrences of `token` alone."""
    low, high = first_range(texts, text, token)
    if low < high:
        _add_step(steps, made, node, text, low, high, 1, 1)


@inlined
def _add_step(steps, made, node, text, low, high, prefix, order):
    number = made[node, text, 0]
    if number > 0 and steps[node, text, number - 1, HIGH] - steps[node, text, number - 1, LOW] == high - low:  # the same ones
        number -= 1
        order = steps[node, text, number, ORDER]
    elif number == STEPS - 1 and prefix > 1:  # the last is kept for the token alone
        return
    steps[node, text, number, LOW], steps[node, text, number, HIGH] = low, high
    steps[node, text, number, PREFIX], steps[node, text, number, ORDER] = prefix, order
    made[node, text, 0] = number + 1
