"""Slots: where sequences live while they are decoded, one in each. In: a draft tree for each slot. Out: scores of its nodes.

Slots 0 ... `open` - 1 are in use; when one closes, the last one takes its number.
    PackedSlots    all trees in one forward
    SeparateSlots  one forward for each slot, for models that cannot be packed (see sequence.py); the same methods
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from lookahead.draft.tree import TreeBatch, side_by_side
from lookahead.forward.backend import backend_of
from lookahead.forward.batch import KEYS, Pack, pack, upload
from lookahead.forward.kv_cache import SlotCache
from lookahead.forward.memory import free_memory
from lookahead.forward.scores import Scores
from lookahead.forward.sequence import BufferState, ReplayState
from lookahead.forward.target import NO_LIMIT, TargetModel

SHARED_FROM = 8  # tokens that two texts must begin with alike for a copy to pay
LEFT = 16  # one part in that many of a GPU's free memory is left to what forwards compute
WAIT_FOR = 16  # tokens that another slot is about to prefill and that are worth a step of waiting


def logits_of(target: TargetModel, cache: SlotCache, packed: Pack, kept: Sequence[int] | None = None) -> torch.Tensor:
    """[wanted nodes, vocab] of a packed forward. kept: which of the pack's tokens are wanted; None: all."""
    cache.pack = packed
    index = None if kept is None else upload(np.array(kept, np.int64), target.device)
    if target.program is not None and packed.meta is not None:
        return target.program.run(packed, index, cache)
    chosen = {"logits_to_keep": index} if index is not None and "logits_to_keep" in target.arguments else {}
    with target.packed_attention.over(packed) as mask:
        logits: torch.Tensor = target.model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=mask,
            use_cache=True,
            **{target.state_name: cache},
            **chosen,
        ).logits[0]
    return logits if index is None or chosen else logits[index]


class PackedSlots:
    """All slots in one forward. A text that begins as one that is held takes over its keys and values.

    call: what a call of attention costs, see `batch.runs_of`. captured: steps that are graphs; None: there are none.
    """

    def __init__(self, target: TargetModel):
        self.target = target
        self.cache = SlotCache(target.layers, target.kv_dtype)
        cuda = backend_of("cuda") if target.capture else None
        self.captured = cuda.captured_steps(target, self.cache, target.capture) if cuda else None
        self.call = target.call
        self.open = 0
        self._held: list[list[int]] = []  # tokens whose keys and values each slot's buffers hold, closed slots included
        self._texts: list[np.ndarray] = []  # what the slot has to prefill before it decodes
        self._begun: list[bool] = []
        self._longest = 0  # of all texts so far, once grown
        self._trees = side_by_side([], [])

    def add(self, text: Sequence[int], room: int = 0) -> int:
        """Open a slot for a text that may grow by `room` tokens, drafts included, and further; returns its number.

        Room is made for no more than that and the model's positions, until the text grows beyond them.
        """
        slot = self.open
        self.open += 1
        if slot == len(self._held):
            self._held.append([])
            self._texts.append(np.empty(0, np.int32))
            self._begun.append(False)
        self._texts[slot] = np.array(text, np.int32)
        self._begun[slot] = False
        self._longest = max(self._longest, min(len(text) + room, self.target.longest_text))
        return slot

    def begin(self, slot: int, most: int = NO_LIMIT) -> int | None:
        """Return how many tokens at the beginning of the slot's text are held already: `most` and all but the last at most.

        None: another slot is prefilling what this one shares with it; ask again at the next step.
        """
        text = self._texts[slot][:-1][:most]
        source, shared, promised = slot, _common(self._held[slot], text), 0
        for other, held in enumerate(self._held):
            needed = max(shared + 1, SHARED_FROM)
            may = needed <= min(len(held), len(text)) and held[needed - 1] == text[needed - 1]
            if may and (common := _common(held, text)) >= needed:
                source, shared = other, common
            if other < self.open and self._begun[other] and len(held) < len(self._texts[other]):
                promised = max(promised, _common(self._texts[other], text))
        if promised >= shared + WAIT_FOR:
            return None
        if source != slot:
            self._make_room(0)
            self.cache.copy(source, slot, shared)
        self._held[slot] = text[:shared].tolist()
        self._begun[slot] = True
        return shared

    def forward(self, trees: TreeBatch) -> Scores:
        """Scores behind the tree of each open slot, whose root is the slot's next token to prefill."""
        target, pasts = self.target, [len(held) for held in self._held[: self.open]]
        sizes, wanted = trees.sizes.tolist(), trees.wanted.tolist()
        self._make_room(max(map(sum, zip(pasts, sizes, strict=True))))
        if self.captured and self.captured.serves(trees) and (scores := self.captured.forward(trees, pasts)):
            self._trees = trees
            return scores
        spare = self.cache.slots - 1 if target.bucketed else None
        even = target.device.type == "cpu" and target.program is None and sizes != wanted
        settings = target.mask_plan, target.dtype, target.device, spare, even, self.call, target.attends_by_op
        packed = pack(trees, pasts, *settings)
        self._trees, kept = trees, None
        if sizes != wanted:  # the last tokens of each slot
            ends = itertools.accumulate(sizes)
            kept = [token for end, want in zip(ends, wanted, strict=True) for token in range(end - want, end)]
        return Scores(logits_of(target, self.cache, packed, kept), wanted)

    def _make_room(self, needed: int) -> None:
        """Give all open slots `needed` positions, and if memory allows as many as the longest text may need.

        Raises MemoryError if it does not even allow that.
        """
        cache, slots = self.cache, self.open + self.target.bucketed
        if slots <= cache.slots and needed <= cache.capacity and cache.merged:
            return
        free = free_memory(self.target.device)
        if free is not None:
            free = int(self.target.agreed(free))
            free -= free // LEFT if self.target.bucketed else 0
        own, held = self.target.kv_bytes * cache.slots * cache.capacity, [len(held) for held in self._held[: cache.slots]]
        ahead = self._longest if needed <= self._longest else min(needed + needed // 2, self.target.longest_text)
        for wished, fits_both in itertools.product((ahead, needed), (True, False)):
            capacity = -(-max(needed, cache.capacity, wished) // KEYS) * KEYS
            size = self.target.kv_bytes * max(slots, cache.slots) * capacity
            if free is None or size < free + (0 if fits_both else own):
                cache.reserve(slots, capacity, held, fits_both)
                return
        raise MemoryError(f"{size:,} bytes of keys and values for {self.open} rows do not fit into {free:,} that are free")

    def keep(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep these nodes of each open slot's latest tree, a path from its root; none: keep nothing."""
        moves: list[tuple[int, int, int]] = []
        begin, token_ids = 0, self._trees.token_ids.tolist()
        for slot, (size, kept) in enumerate(zip(self._trees.sizes.tolist(), nodes, strict=True)):
            held = self._held[slot]
            if len(kept) and kept[-1] != len(kept) - 1:
                moves += [(slot, len(held) + node, len(held) + index) for index, node in enumerate(kept) if index != node]
            held += [token_ids[begin + node] for node in kept]
            begin += size
        self.cache.move(moves)

    def close(self, slot: int) -> None:
        """The slot's text has ended; the last open slot takes its number."""
        self.open -= 1
        last = self.open
        if slot != last:
            self.cache.copy(last, slot, len(self._held[last]))
            self._held[slot] = list(self._held[last])
            self._texts[slot], self._begun[slot] = self._texts[last], self._begun[last]

    def kv_bytes(self) -> int:
        """Memory of the keys and values of one token, as far as the slots themselves hold them."""
        return self.cache.kv_bytes()


class SeparateSlots:
    """Each slot in a forward of its own."""

    def __init__(self, target: TargetModel):
        self.target = target
        self.open = 0
        self._states: list[BufferState | ReplayState] = []
        self._trees = side_by_side([], [])

    def add(self, text: Sequence[int], room: int = 0) -> int:
        capacity, replays = min(len(text) + room, self.target.longest_text), self.target.mode == "replay"
        self._states.append(ReplayState(self.target) if replays else BufferState(self.target, capacity))
        self.open += 1
        return self.open - 1

    def begin(self, slot: int, most: int = NO_LIMIT) -> int | None:
        return 0

    def forward(self, trees: TreeBatch) -> Scores:
        logits, self._trees = [], trees
        for slot, (state, wanted) in enumerate(zip(self._states, trees.wanted.tolist(), strict=True)):
            tree = trees.tree(slot)
            if tree is None:
                continue
            scores = state.forward(tree, wanted == len(tree))
            if wanted:
                logits.append(scores[-wanted:])
        return Scores(torch.cat(logits) if logits else torch.empty(0, 0), trees.wanted.tolist())

    def keep(self, nodes: Sequence[Sequence[int]]) -> None:
        for state, size, kept in zip(self._states, self._trees.sizes.tolist(), nodes, strict=True):
            if size:
                state.keep(kept)

    def close(self, slot: int) -> None:
        self._states[slot] = self._states[-1]
        self._states.pop()
        self.open -= 1

    def kv_bytes(self) -> int:
        return 0


Slots = PackedSlots | SeparateSlots


def slots_of(target: TargetModel) -> Slots:
    """Return where the sequences of a model live while they are decoded. Not for models of mode "plain"."""
    if target.slots_factory:
        return target.slots_factory(target)
    return PackedSlots(target) if target.mode == "packed" else SeparateSlots(target)


def _common(a: Sequence[int] | np.ndarray, b: np.ndarray) -> int:
    """Tokens that two texts begin with alike."""
    most = min(len(a), len(b))
    if not most or a[0] != b[0]:
        return 0
    differ = np.asarray(a[:most]) != b[:most]
    return int(differ.argmax()) if differ.any() else most
