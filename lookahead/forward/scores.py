"""What the model emits after each node of the draft trees of a step. In: logits. Out: best tokens, and the best few."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lookahead.draft.tree import DraftTree
from lookahead.forward.batch import upload
from lookahead.forward.best import best_tokens, bits_of, follow_in
from lookahead.forward.best_kernel import best_token
from lookahead.forward.memory import copied
from lookahead.native.threads import run_in


class Scores:
    """What the model emits after the wanted nodes of all slots. logits: [nodes, vocab], slot after slot.

    is_first: they took longer than other steps of this size will, as kernels were compiled or captured.
    """

    is_first = False

    def __init__(self, logits: torch.Tensor, counts: Sequence[int]):
        self.logits = logits
        self._starts = [*itertools.accumulate(counts, initial=0)]

    def of(self, slot: int) -> torch.Tensor:
        """[nodes, vocab] of one slot."""
        return self.logits[self._starts[slot] : self._starts[slot + 1]]

    def place(self, slot: int, node: int) -> int:
        """The row of `logits` behind a node of a slot."""
        return self._starts[slot] + node

    def best(self, slot: int, node: int) -> int:
        """The token with the highest score after a node, the first if there are several."""
        place = self.place(slot, node)
        if self._known[place] < 0:
            self._known[place] = best_token(*bits_of(self._scores), place)
        return self._known[place]

    def follow(
        self, slots: Sequence[int], trees: Sequence[DraftTree], given: Sequence[Sequence[int]]
    ) -> list[tuple[list[int], list[int]]]:
        """(Tokens, path of nodes) along which the tree of each of these slots holds the best tokens; see `DraftTree.follow`.

        given: tokens that a slot is followed by instead of the best; none: by the best.
        """
        spans: list[int] = []
        end = known = 0
        for slot, tree, of_slot in zip(slots, trees, given, strict=True):
            spans += (end, end + len(tree), self._starts[slot], known, known + len(of_slot))
            end, known = end + len(tree), known + len(of_slot)
        scores, best = self._scores, self._known
        told = scores.data_ptr(), scores.shape[-1], best.buffer_info()[0], len(best), len(trees), end, known
        nodes = [tree.token_ids.tobytes() for tree in trees] + [tree.parents.tobytes() for tree in trees]
        assert sum(map(len, nodes)) == 8 * end, "token ids and parents are int32"
        found = 8 * (3 * end + 2 * len(trees))
        task = b"".join((array("q", (*told, *spans, *itertools.chain(*given))).tobytes(), *nodes, bytes(found)))
        run_in(1, follow_in(scores.dtype), task)
        results = memoryview(task)[-found:].cast("q").tolist()
        counts, paths = 2 * end, end
        return [
            (
                results[begin : begin + results[counts + 2 * k]],
                results[paths + begin : paths + begin + results[counts + 2 * k + 1]],
            )
            for k, begin in enumerate(spans[::5])
        ]

    def best_few(self, places: Sequence[int], most: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """What tells (int32 [rows, most] token ids, float32 scores) of these rows of `logits`, best first.

        A device finds them while others continue; only what tells them waits for it. On the CPU `best` need not look any more.
        """
        every = len(places) == len(self.logits)
        if not self.logits.is_cuda:
            found = best_tokens(self.logits, np.arange(len(places)) if every else np.array(places), most)
            np.frombuffer(self._known, np.int64)[places] = found[0][:, 0]
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
            self._known  # noqa: B018

    @functools.cached_property
    def _scores(self) -> torch.Tensor:
        """[rows, vocab] of a type that `follow_in` knows. Of what a device has, nothing: it knows the best tokens itself."""
        if self.logits.is_cuda:
            return torch.empty(0, 0)
        known = self.logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return (self.logits if known else self.logits.float()).contiguous()

    @functools.cached_property
    def _known(self) -> array[int]:
        """int64: the best token of each row of `logits`, -1 where nobody has looked. Here a step waits for the device."""
        if self.logits.is_cuda:
            return array("q", self.logits.argmax(-1).cpu().numpy().tobytes())
        return array("q", [-1]) * len(self.logits)
