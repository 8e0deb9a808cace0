"""Gives slots to requests. In: requests as they come. Out: the rows of each step, and those that have ended.

A request takes a slot as soon as one is free; one that ends frees its slot at once. When memory runs out, the batch is halved
and its rows restart. Knows nothing of drafts and scores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from lookahead.decode.request import Generation
from lookahead.decode.row import RunningRow
from lookahead.forward.memory import ran_out
from lookahead.forward.slots import Slots
from lookahead.step.batch import StepBatch
from lookahead.step.layout import DECODES

log = logging.getLogger(__name__)


class Scheduler:
    """The rows of one run. rows[k] is in slot k.

    start: makes the row of a request; None if it needs no slot, as it has ended. new_slots: makes slots. slots: those of an
    earlier run, whose free slots hold beginnings that prompts may share. batch: the rows of a step, slot by slot. longest_text:
    positions of the model.
    """

    def __init__(
        self,
        start: Callable[[Generation], RunningRow | None],
        new_slots: Callable[[], Slots],
        slots: Slots | None,
        batch: StepBatch,
        longest_text: int,
    ):
        self.rows: list[RunningRow] = []
        self.slots = slots
        self._start, self._new_slots = start, new_slots
        self.batch, self._longest_text = batch, longest_text
        self.prefilling = 0  # rows, in the step that was prepared
        self._queue: list[RunningRow] = []  # evicted when memory ran out

    def admit(self, waiting: Iterator[Generation | None], batch_size: int) -> Iterator[Generation]:
        """Fill free slots; yields requests that have ended without one. waiting: None where there is none at the moment."""
        while len(self.rows) < batch_size:
            if self._queue:
                row: RunningRow | None = self._queue.pop(0)
            else:
                generation = next(waiting, None)
                if generation is None:
                    return
                row = self._start(generation)
                if row is None:
                    yield generation
                    continue
            assert row is not None
            self.slots = self.slots or self._new_slots()
            self._enter(row, self.slots)
            self.rows.append(row)

    def recover(self, error: Exception, batch_size: int) -> int:
        """A step failed and all rows lost their slots. If memory ran out, the rows restart in smaller batches; else they fail.

        Returns the batch size from now on.
        """
        rows = [row for row in self.rows if not row.generation.finish_reason]
        ended = [row for row in self.rows if row.generation.finish_reason]
        self._leave()
        self.slots = self._new_slots()
        if ran_out(error) and len(self.rows) > 1:
            batch_size = len(self.rows) // 2
            log.warning("out of memory with %d rows at once: going on with %d.", len(self.rows), batch_size)
            self._queue += rows
            self.rows = ended
        else:
            for row in rows:
                row.generation.fail(error.with_traceback(None))
        for row in self.rows:
            self._enter(row, self.slots)
        return batch_size

    def retire(self) -> list[RunningRow]:
        """Free the slots of requests that have ended, and return their rows."""
        rows, ended = self.rows, []
        for slot in range(len(rows) - 1, -1, -1):
            row = rows[slot]
            if row.generation.finish_reason:
                ended.append(row)
                row.leave(self.batch, slot)
                row.finish()
                assert self.slots
                self.slots.close(slot)
                rows[slot] = rows[-1]
                rows.pop()
        return ended[::-1]

    def stop(self) -> None:
        """Give up the requests that are still running or waiting for a slot."""
        self._leave()
        for row in (*self.rows, *self._queue):
            row.finish()
        while self.slots and self.slots.open:
            self.slots.close(self.slots.open - 1)

    def prepare(self, most: int) -> int:
        """Set what each row does in the next step: decode, or prefill its next chunk, `most` tokens together, first come, first
        served. Returns tokens of chunks.
        """
        if not self.prefilling:
            return 0
        left = most
        self.prefilling = 0
        for slot, row in enumerate(self.rows):
            if row.prefilled is None:
                assert self.slots
                row.prefilled = self.slots.begin(slot, row.before_scores)
                row.taken_over = row.prefilled or 0
            phase, chunk = row.next_input(left)
            self.batch.set_input(slot, phase, chunk)
            self.prefilling += phase != DECODES
            left -= 0 if chunk is None else len(chunk)
        return most - left

    def _enter(self, row: RunningRow, slots: Slots) -> None:
        row.enter(slots, self.batch, self._longest_text)
        self.prefilling += 1

    def _leave(self) -> None:
        """No row has a slot any more."""
        for slot in range(len(self.batch) - 1, -1, -1):
            self.rows[slot].leave(self.batch, slot)
