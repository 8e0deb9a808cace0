"""What the model says after each node of the draft trees of a step. In: logits. Out: best tokens, and the best few."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lookahead.forward.batch import upload
from lookahead.forward.best import best_tokens
from lookahead.forward.memory import copied


class Scores:
    """What the model says after the wanted nodes of all slots. logits: [nodes, vocab], slot after slot."""

    def __init__(self, logits: torch.Tensor, counts: Sequence[int]):
        self.logits = logits
        self._starts = [*itertools.accumulate(counts, initial=0)]
        self._first: dict[int, int] = {}  # row of `logits` -> its best token, where it is known already

    def of(self, slot: int) -> torch.Tensor:
        """[nodes, vocab] of one slot."""
        return self.logits[self._starts[slot] : self._starts[slot + 1]]

    def place(self, slot: int, node: int) -> int:
        """The row of `logits` behind a node of a slot."""
        return self._starts[slot] + node

    def best(self, slot: int, node: int) -> int:
        """The token with the highest score after a node, the first if there are several."""
        place = self.place(slot, node)
        if self.logits.is_cuda:
            return self._best[place]
        if (known := self._first.get(place)) is not None:
            return known
        scores = self._array[place]
        token = int(scores.argmax())
        if scores.dtype == np.int16 and scores[token] <= 0:
            return int(self.logits[place].float().numpy().argmax())
        return token

    def best_few(self, places: Sequence[int], most: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """What tells (int32 [places, most] token ids, float32 scores) of these rows of `logits`, best first.

        A device finds them while others go on; only what tells them waits for it. On the CPU `best` need not look any more.
        """
        every = len(places) == len(self.logits)
        if not self.logits.is_cuda:
            found = best_tokens(self.logits, np.arange(len(places)) if every else np.array(places), most)
            self._first = dict(zip(places, found[0][:, 0].tolist(), strict=True))
            return lambda: found
        rows = self.logits if every else self.logits[upload(np.array(places), self.logits.device)]
        best = rows.topk(min(most, rows.shape[1]))
        tell = copied(best.indices, best.values)

        def tell_checked() -> tuple[np.ndarray, np.ndarray]:
            ids, scores = tell()
            if ids.numel() and not 0 <= ids.min() <= ids.max() < rows.shape[1]:  # as drafts they would end the whole process
                raise RuntimeError("runner-up tokens were read before the device had written them")
            return ids.int().numpy(), scores.float().numpy()

        return tell_checked

    def wait(self) -> None:
        """Until the device has them."""
        if self.logits.is_cuda and len(self.logits):
            self._best  # noqa: B018

    @functools.cached_property
    def _array(self) -> np.ndarray:
        """The scores for numpy, which finds the largest ten times faster than torch.

        It knows no bfloat16, and is slow with float16. The bits of either, as whole numbers, are in the same order above 0.
        """
        return (self.logits.view(torch.int16) if self.logits.element_size() == 2 else self.logits).numpy()

    @functools.cached_property
    def _best(self) -> list[int]:
        best: list[int] = self.logits.argmax(-1).tolist()  # the one moment a step waits for the device
        return best
