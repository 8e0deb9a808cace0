"""What the model emits after each node of the draft trees of a step. In: logits. Out: best tokens, and the best few."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from lookahead.forward.batch import upload
from lookahead.step.best_tokens import BFLOAT16, FLOAT16, FLOAT32, NONE, best_token

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}  # that kernels can read


class Scores:
    """Scores after the wanted nodes of all slots. logits: [nodes, vocab], slot after slot.

    is_first: they took longer than other steps of this size will, as kernels were compiled or captured.
    """

    is_first = False

    def __init__(self, logits: torch.Tensor, counts: Sequence[int]):
        self.logits = logits
        self._starts = [*itertools.accumulate(counts, initial=0)]

    def of(self, slot: int) -> torch.Tensor:
        """[nodes, vocab] of one slot."""
        return self.logits[self._starts[slot] : self._starts[slot + 1]]

    def row(self, slot: int, node: int) -> int:
        """The row of `logits` behind a node of a slot."""
        return self._starts[slot] + node

    def best(self, slot: int, node: int) -> int:
        """The token with the highest score after a node, the first if there are several."""
        row = self.row(slot, node)
        if self._known[row] < 0:
            scores, half = self._scores, self._scores.dtype != torch.float32
            bits = scores.view(torch.int16 if half else torch.int32).numpy()
            self._known[row] = best_token(bits, np.int16(0x7FFF) if half else np.int32(0x7FFFFFFF), row)
        return self._known[row]

    def native(self) -> tuple[int, int, int]:
        """(kind, address, vocabulary) of scores, for kernels (step/best_tokens.py); kind NONE: a device has them."""
        if self.logits.is_cuda:
            return NONE, 0, 0
        return KINDS[self._scores.dtype], self._scores.data_ptr(), self._scores.shape[-1]

    def best_tokens(self) -> np.ndarray:
        """int64: the best token of each row of `logits`, where a device has them."""
        return np.frombuffer(self._known, np.int64)

    def best_few(self, rows: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """(int32 [rows, most] token ids, float32 scores) of these rows of `logits`, best first, where a device has them."""
        best = self.logits[upload(rows, self.logits.device)].topk(most)
        return best.indices.int().cpu().numpy(), best.values.float().cpu().numpy()

    def wait(self) -> None:
        """Until the device has them."""
        if self.logits.is_cuda and len(self.logits):
            self._known  # noqa: B018

    @functools.cached_property
    def _scores(self) -> torch.Tensor:
        """[rows, vocab] of a type that kernels can read."""
        return (self.logits if self.logits.dtype in KINDS else self.logits.float()).contiguous()

    @functools.cached_property
    def _known(self) -> array[int]:
        """int64: the best token of each row of `logits`, -1 where nobody has looked. Here a step waits for the device."""
        if self.logits.is_cuda:
            return array("q", self.logits.argmax(-1).cpu().numpy().tobytes())
        return array("q", [-1]) * len(self.logits)
