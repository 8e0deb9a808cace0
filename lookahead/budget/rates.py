"""Whether drafts make a job faster, by the clock. In: how long steps took and what they gave. Out: whether to draft now.

The draft budget weighs forwards of one size against another's (goodput.py). What it cannot see is what drafting does to a step
besides: caches that a draft has emptied, threads that went to sleep meanwhile. Where drafts gain much that does not matter.
Where they gain little, a few steps without drafts are taken now and then, in a row, and steps with drafts are weighed against
those as they went: tokens by seconds, from the end of one step to the end of the next.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

UNDISPUTED = 1.5  # times as fast as plain decoding: where the budget believes this, nobody looks
STRETCH = 9  # steps without drafts that are taken to look; the first one says nothing
APART = 240  # steps with drafts between two looks, a tenth of it before the first; without, until drafts are tried again
LATEST = 32  # steps of each kind that count
LOSS = 0.98  # times as fast with drafts as without: by less, noise is as probable

Steps = deque[tuple[float, int]]  # seconds, tokens


class Rates:
    """Of a job's steps: without drafts and with, by about how many rows they had."""

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[Steps, Steps]] = {}
        self._gains: dict[int, float] = {}
        self._plainly = 0  # steps without drafts that are still to be taken
        self._until = APART // 10  # steps with drafts until then
        self._without = 0  # steps without drafts since drafts were last given a chance
        self._drafted = True  # the latest step had drafts

    def rest(self, rows: int, speed: float) -> bool:
        """Whether the next step, of so many rows, is to go without drafts: they make it slower, or that is being looked at.

        speed: times as fast as plain decoding, as the budget believes.
        """
        if not self._plainly and self._until <= 0:
            self._until = APART
            self._plainly = STRETCH if speed < UNDISPUTED else 0
        return self._plainly > 0 or self._gains.get(rows.bit_length(), 1.0) < LOSS

    def note(self, rows: int, drafted: bool, seconds: float, emitted: int) -> None:
        """A step, from the end of the one before it, of the same rows."""
        follows, self._drafted = self._drafted == drafted, drafted
        self._plainly = 0 if drafted else max(0, self._plainly - 1)
        self._until -= drafted
        self._without += not drafted
        kind = rows.bit_length()
        plain, with_drafts = steps = self._kinds.setdefault(kind, (deque(maxlen=LATEST), deque(maxlen=LATEST)))
        if follows:
            steps[drafted].append((seconds, emitted))
        if self._without >= APART:  # drafts get another chance
            self._without = 0
            for _, others in self._kinds.values():
                others.clear()
            self._gains.clear()
        if min(len(plain), len(with_drafts)) < STRETCH - 1:
            self._gains.pop(kind, None)
        elif self._until % 8 == 0 or kind not in self._gains:
            self._gains[kind] = _rate(with_drafts) / _rate(plain)


def _rate(steps: Steps) -> float:
    """Tokens of a second."""
    return fmean(emitted for _, emitted in steps) / median(seconds for seconds, _ in steps)
