"""The loop of lookahead decoding (arXiv 2312.12728). In: requests. Out: the tokens plain decoding gives, step by step.

A step drafts for every row, verifies all drafts in one forward, keeps what the model itself says and tells the drafter
(`DecodingEngine._step`). Rows that are still taking in their prompts share the forward with those that decode; one that ends
leaves its slot to the next request at once. Limits and counting stand in `Generation`, choosing tokens in sampling.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import StoppingCriteriaList

from lookahead.budget.cost import MeasuredStep
from lookahead.budget.gain import Gain
from lookahead.budget.goodput import GoodputBudget, Rest
from lookahead.budget.profile import Forward
from lookahead.budget.worth import Worth
from lookahead.decode.batch import ALL_AT_ONCE, attended
from lookahead.decode.constraint import Grammars
from lookahead.decode.generation_config import bad_word_ids, generate_alone, generation_config
from lookahead.decode.limits import check_vocabulary
from lookahead.decode.logprobs import TokenLogprobs, logprobs_of
from lookahead.decode.memory import ran_out
from lookahead.decode.model import TargetModel
from lookahead.decode.sampling import (
    GREEDY,
    Allowed,
    Chooser,
    Given,
    Sampler,
    Sampling,
    guide_of,
    own_processors,
    stop_texts,
)
from lookahead.decode.slots import Scores, Slots, Wanted
from lookahead.decode.verify import Accepted, verify_and_accept
from lookahead.draft.drafter import Drafter, Row
from lookahead.draft.explain import Observer, Step
from lookahead.draft.recycled import BEST
from lookahead.draft.sources import Sources
from lookahead.draft.tree import DraftTree, chain, name_of, root_only
from lookahead.errors import LookaheadError

log = logging.getLogger(__name__)

PLAIN_APART = 4  # of steps without drafts, one in so many is timed

FinishReason = Literal["", "stop", "length", "error"]


@dataclasses.dataclass
class Generation:
    """One request, waiting, running or ended.

    prompt_ids: its text so far. room: new tokens at most. stop_ids: tokens that end the answer. seed: of its random stream.
    token_ids: the output, the token that ended it included. finish_reason: "" until then. error: why it failed.
    steps: forwards after the prefill. draft_tokens, accepted_tokens: guessed and right, summed over steps;
    accepted_by_source: the latter by who guessed. seconds: from its first step to its last.
    observer: is told what each decode step drafted and accepted.
    forced: the answer that is taken as the model's choices, whatever its scores, which are computed all the same.
    chooser: chooses tokens in place of `sampling` and `seed`; not where the model's own `generate` decodes.
    logprobs: so many of the most probable tokens are noted with each token that is said, in token_logprobs; None: nothing is.
    """

    prompt_ids: list[int]
    room: int
    stop_ids: frozenset[int]
    sampling: Sampling = GREEDY
    seed: int = 0
    observer: Observer | None = None
    forced: Sequence[int] | None = None
    chooser: Chooser | None = None
    logprobs: int | None = None
    token_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason = ""
    error: Exception | None = None
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_source: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def edl(self) -> float:
        """Effective decoding length: tokens per decode step. The first token comes from the prefill and is not counted."""
        return (len(self.token_ids) - 1) / self.steps if self.steps else 0.0

    def add(self, token: int, stops: bool = False) -> None:
        """Take a token. stops: a stop text is complete with it."""
        self.token_ids.append(token)
        if stops or token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.room:
            self.finish_reason = "length"

    def fail(self, error: Exception) -> None:
        self.finish_reason, self.error = "error", error

    def count(self, tree: DraftTree, nodes: Sequence[int], source_names: Sequence[str]) -> None:
        """Add one step to the counts. nodes: the root and the accepted."""
        self.steps += 1
        self.draft_tokens += tree.draft_tokens
        self.accepted_tokens += len(nodes) - 1
        for node in nodes[1:]:
            self.accepted_by_source[name_of(tree.sources[node], source_names)] += 1


@dataclasses.dataclass
class Clock:
    """Seconds that went into drafting (the budget included), forwards (prefill included) and verification, and how often.

    taken_in: tokens of prompts that went through forwards.
    """

    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    steps: int = 0
    taken_in: int = 0

    def add(self, draft: float, forward: float, verify: float, taken_in: int = 0) -> None:
        self.draft += draft
        self.forward += forward
        self.verify += verify
        self.steps += 1
        self.taken_in += taken_in


@dataclasses.dataclass(slots=True)
class Piece:
    """What a row brings to a step: a draft tree, whose scores are all wanted, or a part of its prompt. tree None: nothing."""

    tree: DraftTree | None
    wanted: Wanted = "none"


class RunningRow:
    """A request in a slot."""

    def __init__(self, generation: Generation, drafts: Row, chooser: Chooser, rest: Rest, began: float):
        self.generation = generation
        self.drafts = drafts
        self.chooser = chooser
        self.began = began
        self.text: list[int] = []  # to be taken in before it decodes
        self.taken_in: int | None = None  # tokens of `text` that the slot holds; None: it has not begun
        self.told = len(generation.token_ids)  # tokens of the answer that the drafter knows
        self.rest = rest
        self.is_drafted_for = True  # at this step
        self.unscored: list[int] = []  # nodes behind which tokens were said whose log-probabilities are still to be noted

    def enter(self, slots: Slots, most_drafted: int) -> None:
        """Take the next slot, anew if it had one before: what was said by then but for the last token is taken in too."""
        self.tell()
        self.text = [*self.generation.prompt_ids, *self.generation.token_ids[:-1]]
        self.taken_in = None
        slots.add(self.text, self.generation.room - len(self.generation.token_ids) + most_drafted)

    @property
    def decodes(self) -> bool:
        """The text is taken in."""
        return self.taken_in == len(self.text)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.generation.prompt_ids) + len(self.generation.token_ids)

    def next_piece(self, most: int) -> Piece:
        """Up to `most` of the tokens still to be taken in."""
        assert self.taken_in is not None
        ids = self.text[self.taken_in : self.taken_in + most]
        if not ids:
            return Piece(None)
        self.taken_in += len(ids)
        return Piece(chain(ids), "last" if self.decodes and not self.generation.token_ids else "none")

    def untold(self) -> list[int]:
        """What the drafter is now to be told that the model said."""
        said = self.generation.token_ids[self.told :]
        self.told += len(said)
        return said

    def tell(self) -> None:
        """Let the drafter know what the model said. What it said while nothing was drafted teaches little."""
        self.drafts.accept(self.untold(), self.is_drafted_for)

    def finish(self) -> None:
        """The request is over: what it said stays with the drafter."""
        self.tell()
        self.drafts.finish()

    def verify(self, piece: Piece, scores: Scores, slot: int) -> Accepted:
        """What the model says after the row's piece, and which of its nodes stay."""
        if piece.tree is None or piece.wanted == "none":
            return Accepted([], list(range(len(piece.tree or ()))))

        asked = 0

        def say(node: int) -> int:
            nonlocal asked
            asked = node
            return self.chooser.say(scores, slot, node)

        def goes_on(token: int) -> bool:
            self.generation.add(token, self.chooser.told(token))
            if self.generation.logprobs is not None:
                self.unscored.append(asked)
            return not self.generation.finish_reason

        try:
            if piece.wanted == "last":
                said = verify_and_accept(root_only(self.text[-1]), say, goes_on)
                return Accepted(said.token_ids, list(range(len(piece.tree))))
            return verify_and_accept(piece.tree, say, goes_on)
        except Exception as error:  # a processor of the user's fails in its own way, and for this row only
            self.generation.fail(error)
            return Accepted([], [])


def room_of(prompt_ids: Sequence[int], max_new_tokens: int, vocab_size: int, longest: int) -> int:
    """Tokens that an answer may have. longest: positions of the model.

    Raises LookaheadError for an empty prompt, one that leaves no room, and unknown ids.
    """
    if not len(prompt_ids):
        raise LookaheadError("the prompt is empty.")
    unknown = next((t for t in prompt_ids if not 0 <= t < vocab_size), None)
    if unknown is not None:
        raise LookaheadError(f"prompt token id {unknown} is outside the model's vocabulary of {vocab_size}.")
    room = min(max_new_tokens, longest - len(prompt_ids))
    if room < 1:
        raise LookaheadError(
            f"the prompt has {len(prompt_ids)} tokens and the model has {longest} positions: no room for an answer."
        )
    return room


class DecodingEngine:
    """Decodes requests, `batch_size` at a time; what they say is remembered by the drafter.

    prefill_chunk: tokens of prompts that a step takes in at most. tokenizer: for requests with stop texts.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter, batch_size: int = 1, prefill_chunk: int = 512, tokenizer: Any = None
    ):
        self.target = target
        self.drafter = drafter
        self.batch_size = batch_size
        self.prefill_chunk = prefill_chunk
        self.tokenizer = tokenizer
        self.clock = Clock()
        self._slots: Slots | None = None  # of the latest run
        self.budget = GoodputBudget(target.costs())
        self.gain = Gain(self.budget.curve)
        self._recycling = Worth()  # what the model almost said, where lengths are chosen by what pays
        self._steps = 0
        self._rested = Rest()  # of the row that ended last
        self._sources: Sources | None = getattr(drafter, "sources", None)  # of the user's own
        if self._sources is not None:
            self._sources.vocab_size = target.vocab_size
        if target.mode in ("chain", "replay"):
            drafter.restrict_to_chains()

    def request(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        logprobs: int | None = None,
    ) -> Generation:
        """A request that has not begun.

        Raises LookaheadError for an empty prompt, one that leaves no room in the model's positions, and unknown ids.
        """
        target = self.target
        room = room_of(prompt_ids, max_new_tokens, target.vocab_size, target.longest_text)
        check_vocabulary(sampling, target.vocab_size)
        stop_ids = target.eos_token_ids.union(sampling.stop_token_ids)
        return Generation(list(prompt_ids), room, stop_ids, sampling, seed, logprobs=logprobs)

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 256,
        observer: Observer | None = None,
        sampling: Sampling = GREEDY,
        seed: int = 0,
    ) -> Generation:
        """The continuation of one prompt, until a token or text that stops it or for `max_new_tokens`.

        observer: is told what was drafted and accepted in each step. Raises LookaheadError as `request` does.
        """
        generation = self.request(prompt_ids, max_new_tokens, sampling, seed)
        generation.observer = observer
        for _ in self.stream(generation):
            pass
        return generation

    def stream(self, generation: Generation) -> Generator[list[int]]:
        """Decode one request; yields the new tokens of each step."""
        given = 0
        for _ in self.steps(iter([generation])):
            if len(generation.token_ids) > given:
                yield generation.token_ids[given:]
            given = len(generation.token_ids)
        if generation.error:
            raise generation.error

    def run(
        self, generations: Iterable[Generation | None], stopped: Callable[[], bool] = lambda: False
    ) -> Generator[Generation]:
        """Decode requests, the next one as soon as a slot is free; yields each as it ends. One that failed has its `error`.

        generations: None where there is none at the moment; it is asked again after each step as long as one is running.
        stopped: asked after each step; True ends the run, and requests that are being answered are given up.
        """
        for ended in self.steps(iter(generations)):
            yield from ended
            if stopped():
                return

    @torch.inference_mode()
    def steps(self, waiting: Iterator[Generation | None]) -> Iterator[list[Generation]]:
        """`run`, step by step: fill free slots, take a step, free the slots of what has ended. Yields that after each step."""
        slots = self._free_slots()
        rows: list[RunningRow] = []
        again: list[RunningRow] = []  # without a slot: new, or turned out when memory ran out
        try:
            while True:
                while len(rows) < self.batch_size:
                    if not again:
                        generation = next(waiting, None)
                        if generation is None:
                            break
                        again += self._started(generation)
                        if generation.finish_reason:  # it needs no slot
                            yield [generation]
                            continue
                    slots = slots or self._new_slots()
                    rows.append(again.pop(0))
                    rows[-1].enter(slots, self.drafter.options.decoding_length)
                if not rows or not slots:
                    return
                try:
                    self._step(rows, slots)
                except Exception as error:  # of the forward: all rows have lost their slots
                    slots = self._new_slots()
                    again += self._after(error, rows)
                    for row in rows:
                        row.enter(slots, 0)
                yield self._retire(rows, slots)
        finally:
            for row in (*rows, *again):
                row.finish()
            while slots and slots.open:  # left early
                slots.close(slots.open - 1)

    def _free_slots(self) -> Slots | None:
        """Those of the latest run, which hold beginnings that new prompts may share, if it is over."""
        return self._slots if self._slots and not self._slots.open else None

    def _new_slots(self) -> Slots:
        self._slots = self.target.slots()
        return self._slots

    def let_go(self) -> None:
        """Drop keys and values of earlier requests, which free slots hold. No request may be running."""
        self._slots = None

    def forget(self) -> None:
        """Remember nothing of earlier requests. The budget keeps what it learned. No request may be running."""
        self.let_go()
        self._recycling, self._rested = Worth(), Rest()
        self.drafter.forget()

    def _step(self, rows: list[RunningRow], slots: Slots) -> None:
        """Draft, verify all in one forward, accept, keep, count. rows[k] sits in slot k."""
        now = self.target.now
        began = now()
        self._steps += 1
        pieces = self._pieces(rows, slots)
        awake = any(row.is_drafted_for for row in rows)
        drafted = now()
        scores = slots.forward([piece.tree for piece in pieces], [piece.wanted for piece in pieces])
        scores.wait()
        computed = now()
        if awake:
            self._recycle(rows, pieces, scores)
        recycled = now()
        accepted = [row.verify(piece, scores, slot) for slot, (row, piece) in enumerate(zip(rows, pieces, strict=True))]
        _note_logprobs(rows, scores)
        slots.keep([each.nodes for each in accepted])
        verified = now()
        before = self._accepted_from_recycled(rows) if awake else 0
        before_own = self._accepted_from_sources(rows)
        for row, piece, each in zip(rows, pieces, accepted, strict=True):
            self._count(row, piece, each, verified)
        if awake:
            self.budget.drafted_in(drafted - began)
        taken_in = sum(len(piece.tree or ()) for piece in pieces if piece.wanted != "all")
        self.clock.add(drafted - began, computed - drafted, verified - computed, taken_in)
        kept = _accepted_of(rows, pieces, accepted) if self.budget.waits else ()
        tells = self.drafter.options.strategy != "off" and (awake or self._steps % PLAIN_APART == 0)
        # Steps that took in prompts say nothing about the cost of those that do not.
        parts = verified - drafted, drafted - began, recycled - computed
        if tells and all(piece.wanted == "all" for piece in pieces):
            said, step = sum(len(each.token_ids) for each in accepted), now() - began
            self._learn_cost(rows, pieces, step, parts, said, kept)
            if awake:
                given = self._accepted_from_recycled(rows) - before
                self._learn_worth(recycled - computed, step, given, said, len(rows))
                if self._sources:
                    after = self._accepted_from_sources(rows)
                    counts = [count - then for count, then in zip(after, before_own, strict=True)]
                    self._sources.observe_step(counts, step, said, len(rows), self.target.agreed)
        else:
            self.budget.settle(kept)
            if self.drafter.options.strategy != "off" and taken_in:
                self._note_prefill(rows, pieces, accepted, now() - began, parts)

    def _recycle(self, rows: list[RunningRow], pieces: list[Piece], scores: Scores) -> None:
        """Hand what the model almost said to the drafter, of the rows that are drafted for at present.

        Not of those whose answers are given: the scores say nothing of them.
        """
        options = self.drafter.options
        if not options.recycle or options.strategy == "off" or not self._recycling.pays:
            return
        drafts: list[Row] = []
        trees: list[DraftTree] = []
        places: list[int] = []
        for slot, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            if piece.tree is None or piece.wanted == "none":
                continue
            if row.is_drafted_for and row.generation.forced is None:
                drafts.append(row.drafts)
                trees.append(piece.tree.guesses if piece.wanted == "all" else root_only(row.text[-1]))
                places += range(scores.place(slot, 0), scores.place(slot, len(trees[-1])))
        if drafts:
            self.drafter.recycle(drafts, trees, scores.best_few(places, BEST))

    def _pieces(self, rows: list[RunningRow], slots: Slots) -> list[Piece]:
        """Of prompts to be taken in `prefill_chunk` tokens, first come, first served; draft trees of rows that decode."""
        pieces, spare = [], self.prefill_chunk
        for slot, row in enumerate(rows):
            if row.taken_in is None:
                row.taken_in = slots.begin(slot)
            pieces.append(Piece(None) if row.decodes or row.taken_in is None else row.next_piece(spare))
            spare -= len(pieces[-1].tree or ())
        decoding = [slot for slot, row in enumerate(rows) if row.decodes and pieces[slot].tree is None]
        trees = self._draft([rows[slot] for slot in decoding], self.prefill_chunk - spare) if decoding else []
        for slot, tree in zip(decoding, trees, strict=True):
            pieces[slot] = Piece(tree, "all")
        return pieces

    def _draft(self, rows: list[RunningRow], fed: int) -> list[DraftTree]:
        """A tree for each row; of one that rests, its root. fed: tokens of prompts that the forward takes in beside."""
        options, budget = self.drafter.options, self.budget
        due = [not options.adaptive or row.rest.is_over(self._steps) or row.chooser.guide is not None for row in rows]
        awake = list(itertools.compress(rows, due))
        # Of those that were drafted for at the last step some scores are still to be recycled.
        telling = [row for row, now in zip(rows, due, strict=True) if now or row.is_drafted_for]
        if telling:
            said = [row.untold() for row in telling]
            self.drafter.accept_rows([row.drafts for row in telling], said, [row.is_drafted_for for row in telling])
        for row, now in zip(rows, due, strict=True):
            row.is_drafted_for = now
        if not awake:
            return [root_only(row.generation.token_ids[-1]) for row in rows]
        most = self.target.longest_text
        rooms = [min(row.generation.room - len(row.generation.token_ids) - 1, max(0, most - row.length)) for row in awake]
        drafts = [row.drafts for row in awake]
        guides = [row.chooser.guide for row in awake]
        limits = drafts, [None] * len(awake), rooms
        if not options.adaptive:
            return self.drafter.draft_rows(*limits, options.price, guides)
        beside = self._plain(rows), fed, options.strategy == "single"
        price, free = max(options.price, budget.price), budget.free(len(rows))
        drafted = self.drafter.draft_rows(
            *limits, price, guides, free, lambda reach, grown: budget.choose(reach, grown, *beside)
        )
        for row, tree in zip(awake, drafted, strict=True):
            row.rest.drafted(budget.returns if tree.draft_tokens else 0.0, self._steps)
        if len(awake) == len(rows):
            return drafted
        trees = iter(drafted)
        return [next(trees) if now else root_only(row.generation.token_ids[-1]) for row, now in zip(rows, due, strict=True)]

    def _count(self, row: RunningRow, piece: Piece, accepted: Accepted, now: float) -> None:
        """Count the step, and let the observer know what the model said."""
        generation, names = row.generation, self.drafter.source_names
        generation.seconds = now - row.began
        if not accepted.token_ids:
            return
        if piece.wanted == "all":
            assert piece.tree is not None
            generation.count(piece.tree, accepted.nodes, names)
            if generation.observer:
                prompt, said = generation.prompt_ids, accepted.token_ids
                step = Step.of(generation.steps, prompt, generation.token_ids, piece.tree, accepted.nodes, said, names)
                generation.observer(step)

    def _learn_cost(
        self,
        rows: list[RunningRow],
        pieces: list[Piece],
        step: float,
        parts: tuple[float, float, float],
        said: int,
        kept: Sequence[int],
    ) -> None:
        """What the step took and gave. Of plain steps, once costs are known, only some tell.

        parts: seconds of its forward (recycling and verification included), drafting and recycling.
        """
        sizes, stands_for = [0 if piece.tree is None else len(piece.tree) for piece in pieces], 1
        if max(sizes) == 1 and not self.budget.tries:
            if self._steps % PLAIN_APART:
                return
            stands_for = PLAIN_APART
        forward = self._plain(rows)._replace(tokens=sum(sizes), width=max(sizes))
        measured = MeasuredStep(forward, said, step, *parts, stands_for=stands_for)
        self.budget.observe(measured, kept)
        self.gain.step(measured)

    def _note_prefill(
        self,
        rows: list[RunningRow],
        pieces: list[Piece],
        accepted: list[Accepted],
        step: float,
        parts: tuple[float, float, float],
    ) -> None:
        """A step that took in prompts, maybe beside rows that decode. parts: as of `_learn_cost`."""
        decoding = [slot for slot, piece in enumerate(pieces) if piece.wanted == "all"]
        sizes = [0 if piece.tree is None else len(piece.tree) for piece in pieces]
        own, keys = [sizes[slot] for slot in decoding], sum(rows[slot].length for slot in decoding)
        said = sum(len(accepted[slot].token_ids) for slot in decoding)
        prefilled = sum(sizes) - sum(own)
        forward = Forward(sum(sizes), len(decoding), keys, max(own, default=0))
        self.gain.step(MeasuredStep(forward, said, step, *parts, prefilled=prefilled))

    def _plain(self, rows: list[RunningRow]) -> Forward:
        """The forward in which each of these rows brings a token."""
        lengths = [row.length for row in rows]
        if len(rows) == 1 or self.budget.curve.separate:
            return Forward(len(rows), len(rows), sum(lengths))
        keys, calls = attended(np.array(lengths), ALL_AT_ONCE if self.budget.curve.bucketed else self.target.call)
        return Forward(len(rows), len(rows), keys, calls=calls)

    def _accepted_from_recycled(self, rows: list[RunningRow]) -> int:
        """Tokens of their answers so far, if it is to be known."""
        options = self.drafter.options
        if not (options.recycle and options.adaptive and self._recycling.pays):
            return 0
        return sum(row.generation.accepted_by_source["recycled"] for row in rows)

    def _accepted_from_sources(self, rows: list[RunningRow]) -> list[int]:
        """The same of each of the user's own sources."""
        names = self._sources.names if self._sources else ()
        return [sum(row.generation.accepted_by_source[name] for row in rows) for name in names]

    def _learn_worth(self, seconds: float, step: float, given: int, said: int, rows: int) -> None:
        """Whether recycling pays, which gave so many of the tokens said. Where lengths are set, it is always done."""
        options, recycling = self.drafter.options, self._recycling
        if options.recycle and options.adaptive:
            paid = recycling.pays
            taken_in = self.target.agreed(self.drafter.taken_in_seconds)
            recycling.observe(seconds + taken_in, given, step, said, rows)
            if recycling.pays is not paid:
                self.drafter.use_recycled(recycling.pays)

    def _started(self, generation: Generation) -> list[RunningRow]:
        """A request that is about to take a slot; nothing if it needs none, as it has been decoded plainly or has failed."""
        if self.target.decodes_plainly(generation.prompt_tokens + generation.room):
            self._decode_plainly(generation)
            return []
        try:
            chooser = generation.chooser or self._chooser(generation)
        except Exception as error:  # transformers refuses some wishes
            generation.fail(error)
            return []
        drafts, rest = self.drafter.start(generation.prompt_ids), Rest(self._rested)
        return [RunningRow(generation, drafts, chooser, rest, self.target.now())]

    @functools.cached_property
    def _grammars(self) -> Grammars | None:
        if self.tokenizer is None:
            return None
        return Grammars(self.tokenizer, self.target.vocab_size, self.target.eos_token_ids)

    def _chooser(self, generation: Generation) -> Chooser:
        """As the request wishes."""
        if generation.forced is not None:
            return Given(generation.forced)
        prompt, room = generation.prompt_ids, generation.room
        return Sampler(self.target, generation.sampling, prompt, room, generation.seed, self.tokenizer, self._grammars)

    def _after(self, error: Exception, rows: list[RunningRow]) -> list[RunningRow]:
        """A step failed. If memory ran out, the batch is halved and its rows, returned, begin anew; else they fail too."""
        self.budget.settle([])
        going_on = [row for row in rows if not row.generation.finish_reason]
        if ran_out(error) and len(rows) > 1:
            self.batch_size = len(rows) // 2
            log.warning("out of memory with %d rows at once: going on with %d.", len(rows), self.batch_size)
            rows[:] = [row for row in rows if row.generation.finish_reason]
            return going_on
        for row in going_on:
            row.generation.fail(error.with_traceback(None))
        return []

    def _retire(self, rows: list[RunningRow], slots: Slots) -> list[Generation]:
        """Free the slots of requests that have ended; those are returned."""
        ended = []
        for slot in range(len(rows) - 1, -1, -1):
            row = rows[slot]
            if row.generation.finish_reason:
                ended.append(row.generation)
                row.finish()
                self._rested = row.rest
                slots.close(slot)
                rows[slot] = rows[-1]
                rows.pop()
        return ended[::-1]

    def _decode_plainly(self, generation: Generation) -> None:
        """By the model's own `generate`, for models whose state cannot be rolled back."""
        began = self.target.now()
        sampling, length = generation.sampling, len(generation.prompt_ids)
        text = torch.tensor([generation.prompt_ids], device=self.target.device)
        try:
            stops, guide = (
                stop_texts(self.target, sampling, self.tokenizer),
                guide_of(sampling, self._grammars, generation.room),
            )
            processors = own_processors(sampling, length)
            if guide:
                processors.append(Allowed(guide, said_from=length))
            bad_words = bad_word_ids(tuple(sampling.bad_words), self.tokenizer)
            config = generation_config(self.target, sampling, length, generation.room, bad_words)
            config.return_dict_in_generate, config.output_logits = True, generation.logprobs is not None
            with torch.random.fork_rng(devices=[self.target.device] if self.target.device.type == "cuda" else []):
                torch.manual_seed(generation.seed)
                output = generate_alone(
                    self.target,
                    config,
                    inputs=text,
                    attention_mask=torch.ones_like(text),
                    logits_processor=processors,
                    stopping_criteria=StoppingCriteriaList([stops] if stops else []),
                )
            said = output.sequences[0, length:].tolist()
            stopped = stops is not None and bool(stops(output.sequences, None))
            for place, token in enumerate(said, 1):
                generation.add(token, stopped and place == len(said))
            if generation.logprobs is not None:
                scores = torch.cat(output.logits)
                generation.token_logprobs = logprobs_of(scores, range(len(said)), said, generation.logprobs)
        except Exception as error:
            generation.fail(error)
        generation.steps = max(0, len(generation.token_ids) - 1)
        generation.seconds = self.target.now() - began
        self.clock.add(0.0, generation.seconds, 0.0)


def _accepted_of(rows: list[RunningRow], pieces: list[Piece], accepted: list[Accepted]) -> list[int]:
    """Draft tokens that were accepted of each row that was drafted for; -1 where nobody knows."""
    return [
        len(each.nodes) - 1 if each.token_ids else -1
        for row, piece, each in zip(rows, pieces, accepted, strict=True)
        if piece.wanted == "all" and row.is_drafted_for
    ]


def _note_logprobs(rows: list[RunningRow], scores: Scores) -> None:
    """Of the tokens that the step has said, for the rows that want it. rows[k] sits in slot k; what goes wrong fails them."""
    wanting = [(slot, row) for slot, row in enumerate(rows) if row.unscored]
    if not wanting:
        return
    places = [scores.place(slot, node) for slot, row in wanting for node in row.unscored]
    said = [token for _, row in wanting for token in row.generation.token_ids[-len(row.unscored) :]]
    try:
        found = iter(logprobs_of(scores.logits, places, said, max(row.generation.logprobs or 0 for _, row in wanting)))
        for _, row in wanting:
            most = row.generation.logprobs
            noted = [dataclasses.replace(each, top=each.top[:most]) for each in itertools.islice(found, len(row.unscored))]
            row.generation.token_logprobs += noted
            row.unscored.clear()
    except Exception as error:  # such as no memory: the tokens are said and would stay without
        for _, row in wanting:
            row.generation.fail(error)
