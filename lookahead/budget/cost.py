"""What a forward costs on this machine, now. In: a profile, if there is one, and the job's steps. Out: seconds of any forward.

The profile gives what a forward of any size should take (profile.py); how much longer or shorter forwards of about one size
really take is learned from the latest steps of that size. Without a profile a rough shape stands in, so that all is learned.

Steps are only ever slowed down by what else the machine does. So of the latest steps of a size, one of the faster ones counts
(their 30th percentile), and it takes three of them to be believed. Where the whole machine becomes slower or faster, steps of
any size tell of all sizes (`PACE`): else one that was last seen in a slow hour would be avoided permanently.

Where there is a profile, what one size takes relative to the usual is most probably noise where it is little (`NOISE`) and has
been seen in few steps: what a token costs is a difference of two forwards, and 3 % of one are the price of eight tokens.
Costs need not rise with size: float32 products of two or three rows take longer than those of eight on some CPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lookahead.budget.profile import NEVER, CostProfile, Forward, in_attention
from lookahead.native.kernels import inlined, kernel

# Forwards with drafts take one of these sizes: kernels are compiled for each size again, and few sizes are soon known.
SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096])
EVEN = 16  # larger forwards that prefill prompts, too, take a multiple of that many tokens, on CPUs: see `evened`
LATEST = 64  # steps that a size remembers
FASTER = 0.3  # quantile of them that counts
BELIEVED = 3  # steps of a size before it is, as the first ones of a size are slow
NOISE = 0.05  # of a forward: by so much, or less, sizes seem at first to differ that take what a profile gives; see `observe`
FLAT = 64.0  # tokens that double the cost of a forward of which nothing is known

# Rows of the curve's table, a column for each of SIZES. RATIO: of real to expected seconds, as believed; OWN: by its own steps.
SIZE, BASE, RATIO, SEEN, OWN = range(5)
# And the terms that depend on what lies in the cache.
PER_ROW, PER_KEY, PER_QUERY_KEY, PER_PADDING, PER_CALL, SEPARATE, PACE, KNOWN, BUCKETED = range(9)
# PACE, how slow the machine is now, is to be above as many steps as FASTER gives: it goes up or down at each.
UP, DOWN = 1 + 0.04 * FASTER, 1 - 0.04 * (1 - FASTER)


class MeasuredStep(NamedTuple):
    """What a step took and gave.

    forward: its size, prompts' tokens included. emitted: tokens that came out for the rows that decode, the model's own
    included. seconds: of the whole step. forward_seconds: of what follows drafting: the forward, recycling and verification.
    draft_seconds, recycling_seconds: of it, what a plain step would not take; 0 where nothing was drafted. prefilled: tokens of
    prompts alongside the rows that decode. stands_for: steps like it, this one included, of which only this one is noted.
    """

    forward: Forward
    emitted: float
    seconds: float
    forward_seconds: float
    draft_seconds: float = 0.0
    recycling_seconds: float = 0.0
    prefilled: int = 0
    stands_for: int = 1


# Columns of a `StepLog`: the forward's fields, then the others in their order.
LOGGED = len(Forward._fields) + len(MeasuredStep._fields) - 1
(FORWARD_TOKENS, FORWARD_ROWS, FORWARD_KEYS, FORWARD_WIDTH, FORWARD_CALLS, EMITTED, SECONDS) = range(7)
(FORWARD_SECONDS, DRAFT_SECONDS, RECYCLING, PREFILLED, STANDS_FOR) = range(7, LOGGED)


class StepLog:
    """Measured steps until a kernel takes them, at most `room`; an array, as structured ones take numba 50 us to recognise."""

    def __init__(self, room: int) -> None:
        self._rows = np.empty((room, LOGGED))
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    def add(self, step: MeasuredStep, tokens: float | None = None) -> None:
        """tokens: of its forward, instead of those that it gives."""
        row = self._rows[self._filled]
        row[:] = (*step.forward, *step[1:])
        if tokens is not None:
            row[0] = tokens
        self._filled += 1

    def take(self) -> np.ndarray:
        """float64 [steps, 12], each for `step_of`, until the next one is added. The log is empty then."""
        rows, self._filled = self._rows[: self._filled], 0
        return rows


@inlined
def step_of(row):
    """The `MeasuredStep` of a row of a `StepLog`: its fields in their order, those of the forward first."""
    forward = Forward(int(row[0]), int(row[1]), int(row[2]), int(row[3]), int(row[4]))
    return MeasuredStep(forward, row[5], row[6], row[7], row[8], row[9], row[10], row[11])


@inlined
def resized(forward, tokens, width):
    """A `Forward` of the same rows over that many tokens, `width` of the row with the most (0: all have as many)."""
    return Forward(int(tokens), forward.rows, forward.keys, int(width), forward.calls)


class CostCurve:
    """Seconds of a `Forward`. known: there is a profile.

    bucketed: forwards take one of a few shapes, see `bucket`. separate: rows go one at a time, and nothing is padded.
    """

    def __init__(self, profile: CostProfile | None = None, bucketed: bool = False) -> None:
        self.known = profile is not None
        self.bucketed = profile.bucketed if profile else bucketed
        self.separate = profile is not None and profile.separate
        self.table = np.zeros((OWN + 1, len(SIZES)))
        self.table[SIZE] = SIZES
        self.table[BASE] = 1 + SIZES / FLAT if profile is None else [profile.at(int(size)) for size in SIZES]
        self.table[RATIO], self.table[OWN] = 1.0, 1.0
        call = NEVER if self.bucketed else 0.0
        self.terms = np.array([0.0, 0.0, 0.0, 0.0, call, self.separate, 1.0, self.known, self.bucketed])
        if profile is not None:
            self.terms[:PER_CALL] = profile.per_row, profile.per_key, profile.per_query_key, profile.per_padding
            self.terms[PER_CALL] = call if self.bucketed else profile.per_call
        self.latest = np.zeros((len(SIZES), LATEST))

    def observe(self, forward: Forward, seconds: float) -> None:
        """A forward took `seconds`."""
        observe(forward, seconds, self.table, self.terms, self.latest)

    def has_seen(self, tokens: float) -> bool:
        """Steps of this size, or of those on both sides, are believed."""
        column = int(np.searchsorted(SIZES, tokens))
        return bool((self.table[SEEN, [max(0, column - 1), min(column, len(SIZES) - 1)]] >= BELIEVED).all())

    def seconds(self, forward: Forward) -> float:
        """Of a forward of this size. Needs a profile or an observed step."""
        return float(seconds_of(forward, forward.tokens, self.table, self.terms, 0))


@kernel
def bucket(size):
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below `size`."""
    power = 1
    while power < size:
        power *= 2
    return power // 4 * 3 if power >= 4 and size <= power // 4 * 3 else power


@kernel
def evened(size):
    """The size of a forward on a CPU that prefills prompts, too, and so would have any.

    Kernels are compiled for each size again (2 ms for a model of 15M parameters), and one that is not a multiple of 16 takes as
    long as the next one that is.
    """
    return (size + EVEN - 1) // EVEN * EVEN if size > 4 * EVEN else size


@inlined
def shape_of(tokens, fed, bucketed):
    """Tokens of a forward, padding included. fed: those of prompts among them."""
    return bucket(tokens) if bucketed else evened(tokens) if fed > 0 else tokens


@inlined
def place_of(tokens, table, place):
    """The column behind which a size lies; place: one that is not behind it."""
    while place < table.shape[1] - 2 and table[SIZE, place + 1] <= tokens:
        place += 1
    return place


@kernel
def faster_of(latest, filled):
    """The quantile that counts of the first `filled` entries. np.sort would take a second to compile."""
    rank = int(FASTER * (filled - 1))
    for k in range(filled):
        less = same = 0
        for other in range(filled):
            less += latest[other] < latest[k]
            same += latest[other] == latest[k]
        if less <= rank < less + same:
            return latest[k]
    return latest[0]


@kernel
def seconds_of(forward, own, table, terms, place):
    """See `CostCurve.seconds`. own: tokens of the rows themselves, without those of prompts alongside them.

    place: where to begin looking for the size's columns.
    """
    return _seconds(forward, own, table, terms, place, True)


@inlined
def _seconds(forward, own, table, terms, place, now):
    """Seconds of a forward: now, or as expected without what steps have taught."""
    times, tokens, own, rows, keys = 1.0, float(forward.tokens), float(own), forward.rows, float(forward.keys)
    width, calls = forward.width, forward.calls
    if terms[SEPARATE] > 0:
        tokens, own, keys, times, place = tokens / rows, own / rows, keys / rows, float(rows), 0
        rows, width, calls = 1, 0, 1
    place = place_of(tokens, table, place)
    share = (tokens - table[SIZE, place]) / (table[SIZE, place + 1] - table[SIZE, place])
    base = table[BASE, place] + share * (table[BASE, place + 1] - table[BASE, place])
    ratio = 1.0
    if now:
        ratio = terms[PACE] * (table[RATIO, place] + min(1.0, share) * (table[RATIO, place + 1] - table[RATIO, place]))
    in_cache = in_attention(
        Forward(own, rows, keys, width, calls), terms[PER_KEY], terms[PER_QUERY_KEY], terms[PER_PADDING], terms[PER_CALL]
    )
    return times * ratio * (base + terms[PER_ROW] * rows + in_cache)


@inlined
def _usual_size(table):
    """The column whose ratio is the median over steps of what the believed sizes show; -1 if there are none."""
    steps, usual = 0.0, -1
    for column in range(table.shape[1]):
        steps += min(table[SEEN, column], LATEST) if table[SEEN, column] >= BELIEVED else 0.0
    for column in range(table.shape[1]):
        ratio, below = table[OWN, column], 0.0
        if table[SEEN, column] < BELIEVED or (usual >= 0 and table[OWN, usual] <= ratio):
            continue
        for other in range(table.shape[1]):
            if table[SEEN, other] >= BELIEVED and table[OWN, other] <= ratio:
                below += min(table[SEEN, other], LATEST)
        if 2 * below >= steps:
            usual = column
    return usual


@kernel
def observe(forward, seconds, table, terms, latest):
    """See `CostCurve.observe`. latest: float64 [sizes, LATEST], ratios of real to expected seconds, by the pace of then.

    Then each size's ratio again: the usual one and what it takes relative to that, less noise, whose square halves with the
    first BELIEVED steps; a size that nobody has seen with what those next to it do.
    """
    columns = table.shape[1]
    ratio = seconds / _seconds(forward, forward.tokens, table, terms, 0, False) / terms[PACE]
    size = forward.tokens / forward.rows if terms[SEPARATE] > 0 else float(forward.tokens)
    column = 0
    while column < columns - 1 and table[SIZE, column] < size:
        column += 1
    if table[SEEN, column] >= BELIEVED:
        terms[PACE] *= UP if ratio > table[OWN, column] else DOWN
    latest[column, int(table[SEEN, column]) % LATEST] = ratio
    table[SEEN, column] += 1
    table[OWN, column] = faster_of(latest[column], min(int(table[SEEN, column]), LATEST))
    usual, before = _usual_size(table), -1  # before: the believed column before `other`
    if usual < 0:
        for other in range(columns):
            table[RATIO, other] = table[OWN, column]
        return
    for other in range(columns):
        if table[SEEN, other] < BELIEVED:
            continue
        apart = table[OWN, other] / table[OWN, usual] - 1
        if terms[KNOWN] > 0:
            noise = NOISE * NOISE * BELIEVED / (BELIEVED + min(table[SEEN, other], LATEST))
            apart *= apart * apart / (apart * apart + noise)
        table[RATIO, other] = apart  # for the moment, until all are known
        for between in range(before + 1, other):
            share = 1.0
            if before >= 0:
                share = (table[SIZE, between] - table[SIZE, before]) / (table[SIZE, other] - table[SIZE, before])
            table[RATIO, between] = (1 - share) * table[RATIO, max(0, before)] + share * apart
        before = other
    for other in range(before + 1, columns):
        table[RATIO, other] = table[RATIO, before]
    for other in range(columns):
        table[RATIO, other] = table[OWN, usual] * (1 + table[RATIO, other])
