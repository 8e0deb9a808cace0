"""Whether drafts make a job faster, by the clock. In: how long steps took and what they gave. Out: whether to draft now.

The draft budget weighs forwards of one size against another's (goodput.py). What it cannot see is what drafting does to a step
besides: caches that a draft has emptied, threads that went to sleep meanwhile. So APART steps without drafts are taken now and
then, in a row, and the steps right before are weighed against those as they went: tokens by seconds, from the end of one step
to the end of the next; the first one is left out. Where drafts gain much that is done rarely, for the speedup that a job
reports (speedup.py). Steps at which rows back off (backoff.py) count among those before. Where drafts lose, they rest for a
while, then are weighed again, against the steps that went without them; a loss that is clear after a few steps ends that early.
Steps that are one native call count as one by one, what Python does for all of them in equal shares
(`Accounting.record_drafted`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median

from lookahead.budget.backoff import APART
from lookahead.budget.cost import LATEST

UNDISPUTED = 1.5  # times as fast as plain decoding: from there on looks come late, and are short
SHORT, SHORT_PAUSE = 4, 150  # steps of those, and from one to the next: many short looks see all phases of a noisy machine
LOSS = 0.98  # times as fast with drafts as without: by less, noise is as probable
# Steps of a rest, and with drafts from a rest to the next look. Each further rest is four times as long, up to 16 times,
# until a look finds no loss; between two looks there are four times as many. The first look is early, as a job may be short.
REST = 60
AT_ONCE = 4  # steps that try drafts before it is asked whether they lose

Steps = deque[tuple[bool, float, float]]  # whether it had drafts, seconds, tokens


class Rates:
    """Of a job's steps, by about how many rows they had."""

    def __init__(self) -> None:
        self._kinds: defaultdict[int, _Rate] = defaultdict(_Rate)

    def rest(self, rows: int, speed: float) -> bool:
        """Whether the next step, of that many rows, is to go without drafts. speed: as the budget believes, see UNDISPUTED."""
        return self._of(rows).rest(speed)

    def looks(self, rows: int) -> bool:
        """Whether the next step, of that many rows, goes without any drafts, to be timed, where `rest` is True for it."""
        return self._of(rows).looks

    def steps_left(self, rows: int) -> int:
        """How many steps, of that many rows, are to go without drafts from now on, where `rest` is True for the next one."""
        return self._of(rows).steps_left

    def drafted_steps_left(self, rows: int) -> int:
        """How many steps, of that many rows, may be taken at once where `rest` is False for the next one."""
        return self._of(rows).drafted_steps_left

    def note_drafted(self, rows: int, steps: Iterable[tuple[float, float]]) -> None:
        """Steps that were taken at once, all with drafts: seconds and tokens of each. Those after a clear loss do not count."""
        rate = self._of(rows)
        for seconds, emitted in steps:
            if not rate.rests:
                rate.note(True, seconds, emitted)

    def note(self, rows: int, drafted: bool, seconds: float, emitted: float) -> None:
        """A step, from the end of the one before it, of the same rows. drafted: it was to have drafts."""
        self._of(rows).note(drafted, seconds, emitted)

    def _of(self, rows: int) -> _Rate:
        return self._kinds[rows.bit_length()]


class _Rate:
    """Steps of one kind: drafted for until a look is due, or rested."""

    def __init__(self) -> None:
        self._steps: tuple[Steps, Steps] = deque(maxlen=LATEST), deque(maxlen=LATEST)  # drafts rested, or not
        self._state, self._left = "drafts", 2 * APART  # steps that are left in this state
        self._pause = REST
        self._waited = False  # before the first look
        self._before = True  # drafts did not rest at the latest step

    @property
    def steps_left(self) -> int:
        """See `Rates.steps_left`."""
        return self._left if self.rests else 0

    @property
    def drafted_steps_left(self) -> int:
        """See `Rates.drafted_steps_left`."""
        return max(1, self._left if self._state == "drafts" else min(self._left, AT_ONCE))

    @property
    def looks(self) -> bool:
        """See `Rates.looks`."""
        return self._state == "looks"

    @property
    def rests(self) -> bool:
        """Drafts rest."""
        return self._state in ("looks", "rests")

    def rest(self, speed: float) -> bool:
        """See `Rates.rest`."""
        if self._state == "drafts" and self._left <= 0:
            if speed >= UNDISPUTED and not self._waited:
                self._left, self._waited = REST, True
            else:
                self._state, self._waited = "looks", True
                self._left = SHORT if speed >= UNDISPUTED else APART
                self._steps[False].clear()
        return self.rests

    def note(self, drafted: bool, seconds: float, emitted: float) -> None:
        """See `Rates.note`."""
        free = self._state in ("drafts", "tries")
        if free == self._before:  # the first one of a kind is not representative
            self._steps[free].append((drafted, seconds, emitted))
        self._before = free
        self._left -= 1
        if self._state == "drafts" or (self._left > 0 and not self._clearly_loses()):
            return
        if self._state == "rests":
            self._state, self._left = "tries", 2 * APART
            self._steps[True].clear()
        elif self._gain() < LOSS:
            self._state, self._left = "rests", self._pause
            self._pause = min(16 * REST, 4 * self._pause)
        elif self._state == "looks":
            self._state, self._left, self._pause = "drafts", SHORT_PAUSE if self._gain() >= UNDISPUTED else 4 * REST, REST
        else:
            self._state, self._left = "drafts", REST

    def _clearly_loses(self) -> bool:
        """Steps that try drafts lose more than chance would have it: what one gives deviates from the mean by about as much as
        that is.
        """
        return self._state == "tries" and (1 - self._gain()) * len(self._steps[True]) ** 0.5 > 1

    def _gain(self) -> float:
        """Times as fast as while drafts rest; 1 where nothing is known."""
        plain, free = self._steps
        return _rate(free) / _rate(plain) if plain and free else 1.0


def _rate(steps: Steps) -> float:
    """Tokens of a second."""
    total = 0.0
    for kind in (False, True):
        if took := [seconds for drafted, seconds, _ in steps if drafted == kind]:
            total += len(took) * median(took)
    return sum(emitted for _, _, emitted in steps) / total
