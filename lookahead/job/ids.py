"""Ids that occur more than once. In: the id of each row and its line. Out: the line of an earlier row with this id.

Ids that count up with the lines (q0, q1, q2, ... on the lines 8, 9, 10, ...) are stored as one run, of any length. Each other
id is stored as 64 bits of its hash and its line, in a hash table that is between one and two thirds full: 18 to 36 bytes.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from array import array

COUNTED = re.compile(r'(.*?)(0|[1-9]\d{0,17})"?', re.DOTALL)  # an id in JSON: what stands before its number, the number
SHORTEST_RUN = 64  # of ids that are stored as a run
SMALLEST = 1 << 10  # slots of a table


class SeenIds:
    """Remembers ids by the line on which each was first."""

    def __init__(self) -> None:
        self._table = _Table()
        self._runs: dict[str, list[tuple[int, int, int]]] = {}  # by text: sorted (first number, end, line of the first)
        self._text, self._first, self._end, self._line = "", 0, 0, 0  # of the run at hand

    def add(self, name: str, line: int) -> int | None:
        """Return the line of an equal id; None, and remember this one, if there is none. name: the id in JSON."""
        found = COUNTED.fullmatch(name)
        text, number = (found[1], int(found[2])) if found else (name, -1)
        if before := self._of_run(text, number) or (self._table.get(key_of(name)) if self._table.count else 0):
            return before
        if not found:
            self._table.add(key_of(name), line)
        elif text == self._text and number == self._end and line - self._line == number - self._first:
            self._end += 1
        else:
            self._close_run()
            self._text, self._first, self._end, self._line = text, number, number + 1, line
        return None

    def _of_run(self, text: str, number: int) -> int:
        """Return the line of an id in a run; 0 if no run holds it."""
        if text == self._text and self._first <= number < self._end:
            return self._line + number - self._first
        runs = self._runs.get(text, ())
        index = bisect.bisect_right(runs, number, key=lambda run: run[0]) - 1
        if index < 0 or number >= runs[index][1]:
            return 0
        return runs[index][2] + number - runs[index][0]

    def _close_run(self) -> None:
        if self._end - self._first >= SHORTEST_RUN:
            bisect.insort(self._runs.setdefault(self._text, []), (self._first, self._end, self._line))
            return
        quote = '"' if self._text.startswith('"') else ""
        for number in range(self._first, self._end):
            self._table.add(key_of(f"{self._text}{number}{quote}"), self._line + number - self._first)


def key_of(name: str) -> int:
    """Return 64 bits of an id's hash, never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") or 1


class _Table:
    """Lines by key, in arrays; a key is in the first free slot from its lowest bits on. 0: free, as no line is."""

    def __init__(self, slots: int = SMALLEST):
        self.keys, self.lines, self.count = array("Q", bytes(8 * slots)), array("I", bytes(4 * slots)), 0

    def _slot(self, key: int) -> int:
        keys, mask = self.keys, len(self.keys) - 1
        slot = key & mask
        while keys[slot] and keys[slot] != key:
            slot = (slot + 1) & mask
        return slot

    def get(self, key: int) -> int:
        return self.lines[self._slot(key)]

    def add(self, key: int, line: int) -> None:
        """key: not there."""
        if 3 * self.count >= 2 * len(self.keys):
            larger = _Table(2 * len(self.keys))
            for each, its_line in zip(self.keys, self.lines, strict=True):
                if each:
                    larger.add(each, its_line)
            self.keys, self.lines = larger.keys, larger.lines
        slot = self._slot(key)
        self.keys[slot], self.lines[slot] = key, line
        self.count += 1
