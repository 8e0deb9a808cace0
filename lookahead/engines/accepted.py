"""Who drafted the tokens that requests have accepted, for those who ask once a request has ended. In: steps. Out: counts.

Whoever asks is in another process, or knows other request ids: requests are identified by their text.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lookahead.draft.tree import GIVEN, DraftTree, name_of

MOST_ENDED = 4096  # texts of requests that nobody has asked for yet; older ones are dropped
OWN = GIVEN - 2  # instead of a source: a token that the model has emitted by itself


class Emitted:
    """What a request has emitted since it began, or resumed with `begin` tokens: for each token who drafted it."""

    __slots__ = ("begin", "drafted", "sources", "taken")

    def __init__(self, begin: int):
        self.begin = begin
        self.sources: list[int] = []  # see DraftTree.sources, or OWN
        self.drafted: DraftTree | None = None  # its latest draft
        self.taken = False  # it has been asked for

    def add(self, token_ids: Sequence[int]) -> None:
        """A step has emitted tokens."""
        self.sources += self.of_step(token_ids)

    def of_step(self, token_ids: Sequence[int]) -> list[int]:
        """Who drafted each of a step's tokens: all but the last one are a path of the latest draft, filler included."""
        found: list[int] = []
        node, tree = 0, self.drafted
        for token in token_ids[:-1]:
            if tree is None:
                break
            children = np.flatnonzero((tree.parents == node) & (tree.token_ids == token))
            if not len(children):
                break
            node = int(children[0])
            found.append(int(tree.sources[node]))
        return [*found, *[GIVEN] * (len(token_ids) - 1 - len(found)), OWN]


class TextSpan(NamedTuple):
    """A part of a text, from `emitted.begin`. text: int32, from the prompt's first token on."""

    text: np.ndarray
    emitted: Emitted


class AcceptedTokens:
    """Of requests that are running, or have ended and have not been asked for. source_names: of the drafter."""

    def __init__(self, source_names: Sequence[str]):
        self._names = source_names
        self._ended: deque[TextSpan] = deque(maxlen=MOST_ENDED)

    def end(self, text: np.ndarray, emitted: Emitted) -> None:
        """A request has ended, or is preempted. text: int32, all of it."""
        if emitted.sources and not emitted.taken:
            self._ended.append(TextSpan(text.copy(), emitted))

    def take(self, text: np.ndarray, prompt: int, running: Callable[[], Iterable[TextSpan]]) -> Counter[str]:
        """Accepted tokens of the request with this text by draft source. It can be asked for once.

        text: int32, prompt and answer. prompt: tokens of the prompt. running: gives requests that have not ended, for one that
        is not among those that have. A request that was preempted has several stretches. What is not known is not counted.
        """
        counts: Counter[str] = Counter()
        length = len(text)
        while length > prompt:
            agreeing = [each for each in self._ended if _agree(each, text[:length], prompt)]
            if not any(len(each.text) >= length for each in agreeing):
                agreeing += [each for each in running() if _agree(each, text[:length], prompt)]
            if not agreeing:
                break
            found = max(agreeing, key=lambda each: min(len(each.text), length))
            begin, found.emitted.taken = found.emitted.begin, True
            sources = found.emitted.sources[: length - begin]
            if length > len(found.text):  # an engine may not tell what the last step has emitted
                sources += found.emitted.of_step(text[len(found.text) : length].tolist())
            for source in sources:
                if source != OWN:
                    counts[name_of(source, self._names)] += 1
            length = begin
        self._ended = deque((each for each in self._ended if not each.emitted.taken), MOST_ENDED)
        return counts


def _agree(stretch: TextSpan, text: np.ndarray, prompt: int) -> bool:
    """It begins within the answer, and is the same as far as both go: an engine may cut what was emitted last."""
    emitted, common = stretch.emitted, min(len(stretch.text), len(text))
    return not emitted.taken and prompt <= emitted.begin < common and bool(np.array_equal(stretch.text[:common], text[:common]))
