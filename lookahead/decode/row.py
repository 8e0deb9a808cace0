"""A request while it holds a slot. In: the scores of its draft tree. Out: tokens that it emits, and what it brings to a step.

Knows nothing of other rows, costs and clocks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from lookahead.budget.backoff import Backoff
from lookahead.decode.chooser import AHEAD, Chooser
from lookahead.decode.logprobs import AT_ONCE, logprobs_of
from lookahead.decode.request import Generation
from lookahead.decode.verify import Accepted, verify_and_accept
from lookahead.draft.drafter import Row
from lookahead.draft.tree import DraftTree, chain, root_only
from lookahead.forward.slots import Scores, Slots, Wanted


@dataclasses.dataclass(slots=True)
class StepInput:
    """What a row brings to a step: a draft tree, all of whose scores are wanted, or a prefill chunk. tree None: nothing.

    wanted: "all" of a draft tree; "chunk": all of a prefill chunk, which scores the prompt and emits nothing.
    """

    tree: DraftTree | None
    wanted: Wanted = "none"

    def __len__(self) -> int:
        return 0 if self.tree is None else len(self.tree)


class RunningRow:
    """A request in a slot.

    text: tokens that are prefilled before it decodes. prefilled: how many of them the slot holds; None: it has not begun.
    number: in the order in which rows took slots. prefill_tokens: that were prefilled for it, in all.
    is_drafted_for: at this step. backoff: when it is drafted for. is_followed: nothing but the scores, or the answer that is
    given, determines what the row emits.
    """

    def __init__(self, generation: Generation, drafts: Row, chooser: Chooser, backoff: Backoff, began: float, number: int = 0):
        self.generation = generation
        self.number, self.prefill_tokens = number, 0
        self.drafts = drafts
        self.chooser = chooser
        self.backoff = backoff
        self.began = began
        self.text: list[int] = []
        self.prefilled: int | None = None
        self.is_drafted_for = True
        self.is_followed = chooser.is_followed and generation.logprobs is None
        self._notified = len(generation.token_ids)  # tokens of the answer that the drafter knows
        self._without_logprobs: list[int] = []  # nodes behind which tokens were emitted that still lack log-probabilities

    def enter(self, slots: Slots, longest_draft: int) -> None:
        """Take the next slot, again if it had one before: all that was emitted by then but the last token is prefilled too."""
        self.notify()
        self.text = [*self.generation.prompt_ids, *self.generation.token_ids[:-1]]
        self.prefilled = None
        if self.scores_prompt:
            self.generation.prompt_token_logprobs.clear()
        left = self.generation.room - len(self.generation.token_ids)
        slots.add(self.text, min(left, AHEAD) + longest_draft)

    @property
    def decodes(self) -> bool:
        """The text is prefilled."""
        return self.prefilled == len(self.text)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.generation.prompt_ids) + len(self.generation.token_ids)

    @property
    def is_constrained(self) -> bool:
        return self.chooser.guide is not None

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of the prompt are still to be noted, so that nothing of it can be taken over from other texts."""
        generation = self.generation
        return generation.prompt_logprobs is not None and len(generation.prompt_token_logprobs) < generation.prompt_tokens - 1

    def next_chunk(self, most: int) -> StepInput:
        """Up to `most` of the tokens that are still to be prefilled."""
        assert self.prefilled is not None
        if scores := self.scores_prompt:  # its last token has a chunk of its own, as any prompt's last chunk emits
            most = min(most, AT_ONCE, self.generation.prompt_tokens - 1 - self.prefilled)
        ids = self.text[self.prefilled : self.prefilled + most]
        if not ids:
            return StepInput(None)
        self.prefilled += len(ids)
        self.prefill_tokens += len(ids)
        if scores:
            return StepInput(chain(ids), "chunk")
        return StepInput(chain(ids), "last" if self.decodes and not self.generation.token_ids else "none")

    @property
    def unnoticed(self) -> int:
        """Of the tokens emitted, the last ones: how many the drafter does not know yet."""
        return len(self.generation.token_ids) - self._notified

    @unnoticed.setter
    def unnoticed(self, tokens: int) -> None:
        self._notified = len(self.generation.token_ids) - tokens

    def next_tokens(self) -> list[int]:
        """Tokens emitted since the latest call: those that the drafter does not know yet."""
        tokens = self.generation.token_ids[self._notified :]
        self._notified += len(tokens)
        return tokens

    def notify(self) -> None:
        """Let the drafter know what was emitted. What was emitted while nothing was drafted teaches little."""
        self.drafts.accept(self.next_tokens(), self.is_drafted_for)

    def finish(self) -> None:
        """The request is over: its output stays with the drafter."""
        if self.chooser.guide:
            self.generation.complete = self.chooser.guide.is_complete
        self.notify()
        self.drafts.finish()

    def root(self) -> DraftTree:
        """The draft tree of a step without drafts."""
        return root_only(self.generation.token_ids[-1])

    def accept(self, said: list[int], path: list[int]) -> Accepted:
        """What the row emits of the tokens that its tree was followed by (`Scores.follow`)."""
        generation = self.generation
        for count, token in enumerate(said, 1):
            generation.add(token)
            if generation.finish_reason:
                return Accepted(said[:count], path[: count + 1])
        return Accepted(said, path)

    def verify(self, inputs: StepInput, scores: Scores, slot: int) -> Accepted:
        """What the model emits after the row's draft tree, and which of its nodes are kept; token by token."""
        generation, chooser = self.generation, self.chooser
        if inputs.tree is None or inputs.wanted in ("none", "chunk"):
            return Accepted([], list(range(len(inputs))))
        verified = 0

        def next_token(node: int) -> int:
            nonlocal verified
            verified = node
            return chooser.say(scores, slot, node)

        def goes_on(token: int) -> bool:
            generation.add(token, chooser.told(token))
            if generation.logprobs is not None:
                self._without_logprobs.append(verified)
            return not generation.finish_reason

        try:
            if inputs.wanted == "last":
                emitted = verify_and_accept(root_only(self.text[-1]), next_token, goes_on)
                return Accepted(emitted.token_ids, list(range(len(inputs))))
            return verify_and_accept(inputs.tree, next_token, goes_on)
        except Exception as error:  # a processor of the user's fails in its own way, and for this row only
            generation.fail(error)
            return Accepted([], [])


def verify(rows: Sequence[RunningRow], inputs: Sequence[StepInput], scores: Scores) -> list[Accepted]:
    """What the model emits after each row's draft tree. rows[k] is in slot k.

    All rows that emit the best token behind each node, any token, are followed at once.
    """
    found: dict[int, tuple[list[int], list[int]]] = {}
    at_once = [slot for slot, row in enumerate(rows) if inputs[slot].wanted == "all" and row.is_followed]
    if at_once and (len(rows) > 1 or len(inputs[0]) > 1):
        trees = [inputs[slot].tree or rows[slot].root() for slot in at_once]
        given = [rows[slot].generation.still_given(len(tree)) for slot, tree in zip(at_once, trees, strict=True)]
        found = dict(zip(at_once, scores.follow(at_once, trees, given), strict=True))
    return [
        row.accept(*found[slot]) if slot in found else row.verify(inputs[slot], scores, slot) for slot, row in enumerate(rows)
    ]


def note_logprobs(rows: Sequence[RunningRow], scores: Scores) -> None:
    """Of the tokens that this step emitted, for the rows that want them. rows[k] is in slot k; an error fails those rows."""
    wanting = [(slot, row) for slot, row in enumerate(rows) if row._without_logprobs]
    if not wanting:
        return
    places = [scores.place(slot, node) for slot, row in wanting for node in row._without_logprobs]
    emitted = [token for _, row in wanting for token in row.generation.token_ids[-len(row._without_logprobs) :]]
    try:
        found = iter(logprobs_of(scores.logits, places, emitted, max(row.generation.logprobs or 0 for _, row in wanting)))
        for _, row in wanting:
            most = row.generation.logprobs
            of_row = itertools.islice(found, len(row._without_logprobs))
            row.generation.token_logprobs += [dataclasses.replace(each, top=each.top[:most]) for each in of_row]
            row._without_logprobs.clear()
    except Exception as error:  # such as no memory: the tokens are emitted and would stay without
        for _, row in wanting:
            row.generation.fail(error)


def note_prompt_logprobs(rows: Sequence[RunningRow], inputs: Sequence[StepInput], scores: Scores) -> None:
    """Of the prompt tokens that this step scored; rows that are to emit nothing end with the last. rows[k] is in slot k."""
    for slot, (row, each) in enumerate(zip(rows, inputs, strict=True)):
        if each.wanted != "chunk" or row.generation.finish_reason:
            continue
        generation = row.generation
        begin = len(generation.prompt_token_logprobs) + 1
        places = [scores.place(slot, node) for node in range(len(each))]
        token_ids = generation.prompt_ids[begin : begin + len(each)]
        try:
            generation.prompt_token_logprobs += logprobs_of(scores.logits, places, token_ids, generation.prompt_logprobs or 0)
        except Exception as error:  # such as no memory
            generation.fail(error)
            continue
        if not generation.room and not row.scores_prompt:
            generation.finish_reason = "length"
