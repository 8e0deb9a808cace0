"""Decides whether a slow draft source saves more time than it takes. In: what it took and gave at each step. Out: use it, or
not now.

It pays while the tokens that it alone gives save more time than it takes. Where it does not it backs off, longer each time, and
is tried again after that: the text may have become another.
"""

from __future__ import annotations

TRIAL = 64  # steps of one row before it is judged; of a batch fewer, as it tells as much in less, but a quarter at least
MEMORY = 0.98  # weight of the past at each step
REST, LONGEST_REST = 8 * TRIAL, 128 * TRIAL  # steps
ITS_OWN = 0.2  # of the tokens accepted from it, those that no other source would have drafted instead: 0.1 to 0.35


class SourceUtility:
    """pays: use the source at the next step."""

    def __init__(self, its_own: float = ITS_OWN) -> None:
        """its_own: of the tokens accepted from it, those that no other source would have drafted instead."""
        self.pays = True
        self._its_own = its_own
        self._left = TRIAL  # steps until it is judged, or tried again
        self._rest = REST
        self._saved = 0.0  # seconds, the past fading

    def observe(self, seconds: float, tokens: int, step_seconds: float, emitted: float, rows: int) -> None:
        """Count a step in which the source took `seconds` and `tokens` of its tokens were accepted.

        step_seconds, emitted, rows: of the whole step: its time, the tokens that all rows emitted, and their number.
        """
        self._left -= min(rows, 4) if self.pays else 1
        if self.pays:
            self._saved = MEMORY * self._saved + self._its_own * tokens * step_seconds / max(1, emitted) - seconds
            if self._left <= 0 and self._saved < 0:
                self.pays, self._left = False, self._rest
                self._rest = min(2 * self._rest, LONGEST_REST)
        elif self._left <= 0:
            self.pays, self._left, self._saved = True, TRIAL, 0.0
