"""A request while it holds a slot. In: the scores of its draft tree. Out: tokens that it emits, and what it brings to a step.

Knows nothing of other rows, costs and clocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

import numpy as np

from lookahead.decode.chooser import AHEAD, Chooser
from lookahead.decode.logprobs import AT_ONCE, logprobs_of
from lookahead.decode.request import Generation
from lookahead.decode.verify import verify_and_accept
from lookahead.draft.drafter import Row
from lookahead.draft.explain import Step
from lookahead.draft.tree import Accepted, root_only
from lookahead.forward.slots import Scores, Slots
from lookahead.step.batch import RowState, StepBatch
from lookahead.step.layout import DECODES, ENDS_PREFILL, PREFILLS, SCORES_PROMPT, WAITS


class RunningRow:
    """A request in a slot.

    text: int32, tokens that are prefilled before it decodes. prefilled: how many of them the slot holds; None: it has not
    begun.
    number: in the order in which rows took slots. prefill_tokens: that were prefilled for it, in all. taken_over: tokens whose
    keys and values a text that begins alike had.
    is_followed: nothing but the scores, or the answer that is forced, determines what the row emits.
    """

    def __init__(self, generation: Generation, drafts: Row, chooser: Chooser, began: float, number: int = 0):
        self.generation = generation
        self.number, self.prefill_tokens, self.taken_over = number, 0, 0
        self.drafts = drafts
        self.chooser = chooser
        self.began = began
        self.text = np.empty(0, np.int32)
        self.prefilled: int | None = None
        self.is_followed = chooser.is_followed and generation.logprobs is None
        self._without_logprobs: list[int] = []  # nodes behind which tokens were emitted that still lack log-probabilities

    def enter(self, slots: Slots, batch: StepBatch, longest_text: int) -> None:
        """Take the next slot, again if it had one before: all that was emitted by then but the last token is prefilled too."""
        generation = self.generation
        emitted = generation.token_ids
        self.text = np.array([*generation.prompt_ids, *emitted[:-1]], np.int32)
        self.prefilled = None
        if self.scores_prompt:
            generation.prompt_token_logprobs.clear()
        left, drafts = generation.room - len(emitted), batch.drafter.options.decoding_length
        slots.add(self.text.tolist(), min(left, AHEAD) + drafts)
        forced = None if generation.forced is None else generation.forced[len(emitted) : len(emitted) + left]
        lengths = self.length, left, longest_text - self.length
        last, stops = emitted[-1] if emitted else None, sorted(generation.stop_ids)
        batch.add(RowState(self.drafts, *lengths, last, stops, forced, self.is_followed, self.chooser.guide))

    def leave(self, batch: StepBatch, slot: int) -> None:
        """Leave the slot, which the last row takes over."""
        self.count(batch, slot)
        batch.remove(slot)

    def count(self, batch: StepBatch, slot: int) -> None:
        """Add what was drafted and accepted in the steps since the latest call."""
        steps, draft_tokens, accepted, by_source = batch.counts(slot)
        generation = self.generation
        generation.steps += steps
        generation.draft_tokens += draft_tokens
        generation.accepted_tokens += accepted
        generation.accepted_by_source.update(by_source)

    @property
    def decodes(self) -> bool:
        """The text is prefilled."""
        return self.prefilled == len(self.text)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.generation.prompt_ids) + len(self.generation.token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of the prompt are still to be noted."""
        generation = self.generation
        scored = generation.prompt_logprobs_start + len(generation.prompt_token_logprobs)
        return generation.prompt_logprobs is not None and scored < generation.prompt_tokens

    @property
    def before_scores(self) -> int:
        """Tokens of the text behind which no scores are wanted, so that they can be taken over from other texts."""
        return self.generation.prompt_logprobs_start - 1 if self.scores_prompt else len(self.text)

    def next_input(self, most: int) -> tuple[int, np.ndarray | None]:
        """(What it does in the next step, see step/layout.py; the chunk of up to `most` tokens that it prefills)."""
        if self.prefilled is None:
            return WAITS, None
        if self.decodes:
            return DECODES, None
        scores = self.scores_prompt and self.prefilled >= self.before_scores
        if scores:  # its last token has a chunk of its own, as any prompt's last chunk emits
            most = min(most, AT_ONCE, self.generation.prompt_tokens - 1 - self.prefilled)
        else:
            most = min(most, self.before_scores - self.prefilled)
        chunk = self.text[self.prefilled : self.prefilled + most]
        if not len(chunk):
            return WAITS, None
        self.prefilled += len(chunk)
        self.prefill_tokens += len(chunk)
        if scores:
            return SCORES_PROMPT, chunk
        return (ENDS_PREFILL if self.decodes and not self.generation.token_ids else PREFILLS), chunk

    def finish(self) -> None:
        """The request is over: its output stays with the drafter."""
        if self.chooser.guide:
            self.generation.complete = self.chooser.guide.is_complete
        self.drafts.finish()

    def observe(self, batch: StepBatch, slot: int, accepted: Accepted) -> None:
        """Notify the observer of a decode step. accepted: what it emitted, which is a part of the answer already."""
        generation, names = self.generation, batch.drafter.source_names
        self.count(batch, slot)
        assert generation.observer
        output, found = generation.token_ids, (batch.trees_of([slot])[0], accepted.nodes, accepted.token_ids, names)
        generation.observer(Step.of(generation.steps, generation.prompt_ids, output, *found))

    def verify(self, batch: StepBatch, slot: int, scores: Scores, prefills: bool) -> Accepted:
        """Verify the row's draft tree token by token: what the model emits, and which nodes are kept.

        prefills: the last chunk of its text instead of a tree.
        """
        generation, chooser = self.generation, self.chooser
        verified = 0

        def next_token(node: int) -> int:
            nonlocal verified
            verified = node
            return chooser.next_token(scores, slot, node)

        def goes_on(token: int) -> bool:
            generation.add(token, chooser.accept_token(token))
            if generation.logprobs is not None:
                self._without_logprobs.append(verified)
            return not generation.finish_reason

        try:
            tree = root_only(int(self.text[-1])) if prefills else batch.trees_of([slot])[0]
            return verify_and_accept(tree, next_token, goes_on)
        except Exception as error:  # a processor of the user's fails in its own way, and for this row only
            generation.fail(error)
            return Accepted([], [])


def accept(rows: Sequence[RunningRow], batch: StepBatch, scores: Scores) -> list[Accepted]:
    """Accept each row's tokens and nodes: along the best tokens, or as its sampler chooses.

    rows[k] is in slot k.
    """
    phases = batch.phases
    chosen = [slot for slot, row in enumerate(rows) if not row.is_followed and phases[slot] >= ENDS_PREFILL]
    batch.accept(scores, chosen)
    began = time.perf_counter()
    for slot in chosen:
        found = rows[slot].verify(batch, slot, scores, phases[slot] == ENDS_PREFILL)
        batch.set_accepted(slot, found.token_ids, found.nodes)
    batch.choosing_seconds = time.perf_counter() - began if chosen else 0.0
    if chosen:
        batch.commit()
    accepted = batch.accepted()
    for slot, row in enumerate(rows):
        if accepted[slot].token_ids:
            for token in accepted[slot].token_ids if row.is_followed else ():
                row.generation.add(token)
            if row.generation.observer and phases[slot] == DECODES:
                row.observe(batch, slot, accepted[slot])
    note_logprobs(rows, scores)
    if SCORES_PROMPT in phases:
        note_prompt_logprobs(rows, batch, scores)
    return accepted


def note_logprobs(rows: Sequence[RunningRow], scores: Scores) -> None:
    """Note log-probabilities of the tokens that this step emitted. rows[k] is in slot k; an error fails rows that want them."""
    wanting = [(slot, row) for slot, row in enumerate(rows) if row._without_logprobs]
    if not wanting:
        return
    indices = [scores.row(slot, node) for slot, row in wanting for node in row._without_logprobs]
    emitted = [token for _, row in wanting for token in row.generation.token_ids[-len(row._without_logprobs) :]]
    try:
        found = iter(logprobs_of(scores.logits, indices, emitted, max(row.generation.logprobs or 0 for _, row in wanting)))
        for _, row in wanting:
            most = row.generation.logprobs
            of_row = itertools.islice(found, len(row._without_logprobs))
            row.generation.token_logprobs += [dataclasses.replace(each, top=each.top[:most]) for each in of_row]
            row._without_logprobs.clear()
    except Exception as error:  # such as no memory: the tokens are emitted and would stay without
        for _, row in wanting:
            row.generation.fail(error)


def note_prompt_logprobs(rows: Sequence[RunningRow], batch: StepBatch, scores: Scores) -> None:
    """Note log-probabilities of prompt tokens; rows that are to emit nothing end with the last. rows[k] is in slot k."""
    for slot, (row, phase, size) in enumerate(zip(rows, batch.phases, batch.sizes, strict=True)):
        if phase != SCORES_PROMPT or row.generation.finish_reason:
            continue
        generation = row.generation
        begin = generation.prompt_logprobs_start + len(generation.prompt_token_logprobs)
        indices = [scores.row(slot, node) for node in range(size)]
        token_ids = generation.prompt_ids[begin : begin + size]
        try:
            generation.prompt_token_logprobs += logprobs_of(scores.logits, indices, token_ids, generation.prompt_logprobs or 0)
        except Exception as error:  # such as no memory
            generation.fail(error)
            continue
        if not generation.room and not row.scores_prompt:
            generation.finish_reason = "length"
