"""The loop of lookahead decoding (arXiv 2312.12728). In: requests. Out: the tokens of plain decoding, step by step.

A step drafts for every row, verifies all drafts in one forward, keeps what the model itself emits and notifies the drafter
(`DecodingEngine._step`). Several steps are one native call where nothing between them needs Python: without drafts
(plain_steps.py) and with (drafted_steps.py). Rows that still prefill their prompts share the forward with those that decode.
Slots are given out in scheduler.py, a row's part of a step is row.py, choosing tokens sampling.py, clocks and costs
accounting.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch

from lookahead.budget.backoff import Backoff
from lookahead.budget.goodput import GoodputBudget
from lookahead.budget.speedup import Speedup
from lookahead.decode.accounting import Accounting, Clock, StepTimes
from lookahead.decode.chooser import Chooser, Given, Sampler
from lookahead.decode.constraint import Grammars
from lookahead.decode.drafted_steps import DraftedSteps
from lookahead.decode.generation_config import own_stop_strings
from lookahead.decode.plain import decode_plainly
from lookahead.decode.plain_steps import most_plain_steps
from lookahead.decode.request import FinishReason, Generation, room_of
from lookahead.decode.row import RunningRow, StepInput, note_logprobs, note_prompt_logprobs, verify
from lookahead.decode.sampling import GREEDY, Sampling, check_vocabulary
from lookahead.decode.scheduler import Scheduler, prefill_chunks
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import Observer
from lookahead.draft.recycled import BEST
from lookahead.draft.tree import root_only
from lookahead.forward.backends import by_own_settings
from lookahead.forward.slots import Scores, Slots, slots_of
from lookahead.forward.target import TargetModel

__all__ = ["Clock", "DecodingEngine", "FinishReason", "Generation", "room_of"]


class DecodingEngine:
    """Decodes requests, `batch_size` at a time; the drafter remembers their outputs.

    prefill_chunk: prompt tokens that a step prefills at most. tokenizer: for requests with stop texts.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter, batch_size: int = 1, prefill_chunk: int = 512, tokenizer: Any = None
    ):
        self.target = target
        self.drafter = drafter
        self.batch_size = batch_size
        self.prefill_chunk = prefill_chunk
        self.tokenizer = tokenizer
        self.budget = GoodputBudget(target.costs())
        self.accounting = Accounting(target, drafter, self.budget, prefill_chunk)
        self._drafted_steps = DraftedSteps(target, drafter, self.budget, self.accounting)
        self._slots: Slots | None = None  # of the latest run
        self._backoff = Backoff()  # of the row that ended last, which the next ones inherit
        if sources := getattr(drafter, "sources", None):
            sources.vocab_size = target.vocab_size
        if target.mode in ("chain", "replay"):
            drafter.restrict_to_chains()

    @property
    def speedup(self) -> Speedup | None:
        """Of all runs so far, see `Accounting.speedup`."""
        return self.accounting.speedup

    @property
    def clock(self) -> Clock:
        """Seconds of all steps so far, by stage. May be replaced."""
        return self.accounting.clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self.accounting.clock = clock

    def request(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Generation:
        """A request that has not begun. Of no new tokens, which goes with prompt_logprobs, it scores the prompt and ends.

        Raises LookaheadError for an empty prompt, one that leaves no room in the model's positions, and unknown ids.
        """
        target = self.target
        room = room_of(prompt_ids, max_new_tokens, target.vocab_size, target.longest_text)
        check_vocabulary(sampling, target.vocab_size)
        stop_ids = target.eos_token_ids.union(sampling.stop_token_ids)
        generation = Generation(
            list(prompt_ids), room, stop_ids, sampling, seed, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
        generation.stop = sampling.stop or own_stop_strings(target)
        return generation

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 256,
        observer: Observer | None = None,
        sampling: Sampling = GREEDY,
        seed: int = 0,
    ) -> Generation:
        """The continuation of one prompt, until a token or text that stops it or for `max_new_tokens`.

        observer: is notified of what was drafted and accepted in each step. Raises LookaheadError as `request` does.
        """
        generation = self.request(prompt_ids, max_new_tokens, sampling, seed)
        generation.observer = observer
        for _ in self.run([generation]):
            pass
        if generation.error:
            raise generation.error
        return generation

    def stream(self, generation: Generation) -> Generator[list[int]]:
        """Decode one request; yields the new tokens of each step."""
        emitted, generation.streamed = 0, True
        for _ in self.steps(iter([generation])):
            if len(generation.token_ids) > emitted:
                yield generation.token_ids[emitted:]
            emitted = len(generation.token_ids)
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

    @by_own_settings
    @torch.inference_mode()
    def steps(self, waiting: Iterator[Generation | None]) -> Iterator[list[Generation]]:
        """`run`, step by step: fill free slots, take a step, free the slots of what has ended. Yields that after each step."""
        free = self._slots if self._slots and not self._slots.open else None  # else another run uses them
        scheduler = Scheduler(self._start, self._new_slots, free, self.drafter.options.decoding_length)
        self.accounting.begin(scheduler.rows)
        try:
            while True:
                for generation in scheduler.admit(waiting, self.batch_size):
                    yield [generation]
                if not scheduler.rows or not scheduler.slots:
                    return
                try:
                    self._step(scheduler.rows, scheduler.slots)
                except Exception as error:  # of the forward
                    self.batch_size = scheduler.recover(error, self.batch_size)
                began, ended = self.target.now(), scheduler.retire()
                if ended:
                    self._backoff = ended[0].backoff
                    self.accounting.retired(ended, began)
                yield [row.generation for row in ended]
        finally:
            scheduler.stop()
            self.accounting.end()

    def _step(self, rows: list[RunningRow], slots: Slots) -> None:
        """Draft, verify all draft trees in one forward, accept, compact the KV cache. rows[k] is in slot k."""
        now, began = self.target.now, self.target.now()
        self.accounting.steps += 1
        inputs = prefill_chunks(rows, slots, self.prefill_chunk)
        decoding = [slot for slot, row in enumerate(rows) if row.decodes and inputs[slot].tree is None]
        active = self._notify([rows[slot] for slot in decoding], len(rows))
        if active:  # rows that are to decode next are read before anything is drafted for them
            self.drafter.read([row.drafts for row, each in zip(rows, inputs, strict=True) if each.wanted == "last"])
            if self._drafted_steps.take(rows, inputs, slots):
                return
        self._draft(rows, inputs, decoding, active)
        drafted = now()
        if self._take_plain_steps(rows, inputs, slots, (began, drafted)):
            return
        scores = slots.forward([each.tree for each in inputs], [each.wanted for each in inputs])
        scores.wait()
        computed = now()
        self._note_runner_up(rows, inputs, scores)
        noted = now()
        accepted = verify(rows, inputs, scores)
        note_logprobs(rows, scores)
        note_prompt_logprobs(rows, inputs, scores)
        slots.keep([each.nodes for each in accepted])
        self.accounting.record(rows, inputs, accepted, StepTimes(began, drafted, computed, noted, now()), scores.is_first)

    def _draft(self, rows: list[RunningRow], inputs: list[StepInput], decoding: list[int], active: list[RunningRow]) -> None:
        """Add the draft trees of the rows in the slots `decoding`, those of `active` ones with drafts, to `inputs`: all rows'
        most probable nodes, as many as pay.
        """
        prefilled, single = sum(map(len, inputs)), self.drafter.options.strategy == "single"
        if active:
            price, free = self._prices(len(decoding))
            depths, guides = [self._longest_branch(row) for row in active], [row.chooser.guide for row in active]
            grown = self.drafter.grow([row.drafts for row in active], [None] * len(active), depths, price, guides, free)
            if self.drafter.options.adaptive:
                plain = self.accounting.plain_forward([rows[slot] for slot in decoding])
                kept = self.budget.choose(grown.probabilities, grown.spans, plain, prefilled, single)
                trees = iter(self.drafter.cut(grown, *kept))
            else:
                trees = iter(self.drafter.cut(grown))
        for slot in decoding:
            row = rows[slot]
            tree = next(trees) if row.is_drafted_for else row.root()
            inputs[slot] = StepInput(tree, "all")
            if row.is_drafted_for and self.drafter.options.adaptive:
                row.backoff.drafted(self.budget.returns if tree.draft_tokens else 0.0, self.accounting.steps)

    def _notify(self, rows: list[RunningRow], running: int) -> list[RunningRow]:
        """Let the drafter know what was emitted; returns the rows that are drafted for at this step, which do not back off.

        running: how many rows hold slots. Those that prefill will soon decode, so drafts rest as with that many rows.
        """
        options, step = self.drafter.options, self.accounting.steps
        if not rows:
            return []
        if options.strategy == "off":
            active = [False] * len(rows)
        else:
            rates = self.accounting.rates
            off = options.adaptive and rates.rest(running, self.budget.speed)
            looks = off and rates.looks(running)
            active = [
                not options.adaptive or (row.is_constrained and not looks) or (row.backoff.is_over(step) and not off)
                for row in rows
            ]
        # Of those that were drafted for at the last step some scores are still to be kept as runner-up tokens.
        due = [row for row, now in zip(rows, active, strict=True) if now or (row.is_drafted_for and row.drafts.unread is None)]
        if due:
            emitted = [row.next_tokens() for row in due]
            self.drafter.accept_rows([row.drafts for row in due], emitted, [row.is_drafted_for for row in due])
        for row, now in zip(rows, active, strict=True):
            row.is_drafted_for = now
        return [row for row in rows if row.is_drafted_for]

    def _take_plain_steps(
        self, rows: list[RunningRow], inputs: list[StepInput], slots: Slots, times: tuple[float, float]
    ) -> bool:
        """Take this step and those after it at once, as long as nothing is drafted and no answer ends; False if it cannot be.

        times: clock readings, when the step began and when there was no draft.
        """
        accounting = self.accounting
        if not (most := most_plain_steps(rows, inputs, accounting, self.drafter.options, self.target.longest_text)):
            return False
        tokens = [row.generation.token_ids[-1] for row in rows]
        given = [row.generation.still_given(most) for row in rows]
        emitted = slots.plain_steps(tokens, most, frozenset().union(*(row.generation.stop_ids for row in rows)), given)
        if not emitted:
            return False
        computed, steps = self.target.now(), len(emitted[0])
        accepted = [row.accept(of_row, list(range(steps))) for row, of_row in zip(rows, emitted, strict=True)]
        slots.keep([each.nodes for each in accepted])
        accounting.steps += steps - 1
        accounting.record(rows, inputs, accepted, StepTimes(*times, computed, computed, self.target.now()), steps=steps)
        return True

    def _prices(self, rows: int) -> tuple[float, int]:
        """(path probability below which a node is not drafted, draft tokens of each row that cost next to nothing)."""
        options = self.drafter.options
        if not options.adaptive:
            return options.price, 0
        return max(options.price, self.budget.price), self.budget.free(rows)

    def _longest_branch(self, row: RunningRow) -> int:
        """Longest branch that could be accepted whole."""
        generation = row.generation
        return min(generation.room - len(generation.token_ids) - 1, max(0, self.target.longest_text - row.length))

    def _note_runner_up(self, rows: list[RunningRow], inputs: list[StepInput], scores: Scores) -> None:
        """Hand the runner-up tokens to the drafter, of the rows that are drafted for.

        Not of those whose answers are given: the scores tell nothing about them. Nor of those that will not be, as drafts rest.
        """
        if not self.drafter.wants_runner_up:
            return
        rests = self.accounting.rates.steps_left(len(rows)) > 0
        slots = [
            slot
            for slot, (row, each) in enumerate(zip(rows, inputs, strict=True))
            if row.is_drafted_for
            and (row.is_constrained or not rests)
            and each.tree is not None
            and each.wanted in ("all", "last")
            and row.generation.forced is None
        ]
        if not slots:
            return
        trees = []
        for slot in slots:
            tree = inputs[slot].tree
            assert tree is not None
            trees.append(tree.guesses if inputs[slot].wanted == "all" else root_only(rows[slot].text[-1]))
        nodes = [scores.place(slot, node) for slot, tree in zip(slots, trees, strict=True) for node in range(len(tree))]
        self.drafter.note_runner_up([rows[slot].drafts for slot in slots], trees, scores.best_few(nodes, BEST))

    def _new_slots(self) -> Slots:
        self._slots = slots_of(self.target)
        return self._slots

    def release_cache(self) -> None:
        """Drop keys and values of earlier requests, which free slots hold. No request may be running."""
        self._slots = None

    def forget(self) -> None:
        """Remember nothing of earlier requests. The budget keeps what it learned. No request may be running."""
        self.release_cache()
        self._backoff = Backoff()
        self.drafter.forget()

    def _start(self, generation: Generation) -> RunningRow | None:
        """The row of a request that is about to take a slot; None if it needs none: it is decoded plainly or has failed."""
        if self.target.decodes_plainly(generation.prompt_tokens + generation.room):
            decode_plainly(self.target, generation, self.tokenizer, self._grammars)
            self.clock.add(0.0, generation.seconds, 0.0)
            return None
        if not generation.room and (generation.prompt_logprobs is None or generation.prompt_tokens == 1):
            generation.finish_reason = "length"
            return None
        try:
            chooser = generation.chooser or self._chooser(generation)
        except Exception as error:  # transformers refuses some settings
            generation.fail(error)
            return None
        began, drafts = self.target.now(), self.drafter.start(generation.prompt_ids)
        number = self.accounting.started(began)
        return RunningRow(generation, drafts, chooser, Backoff(self._backoff), self.target.now(), number)

    @functools.cached_property
    def _grammars(self) -> Grammars | None:
        if self.tokenizer is None:
            return None
        return Grammars(self.tokenizer, self.target.vocab_size, self.target.eos_token_ids)

    def _chooser(self, generation: Generation) -> Chooser:
        """As the request asks."""
        if generation.forced is not None or not generation.room:
            return Given(generation.still_given)
        prompt, room = generation.prompt_ids, generation.room
        return Sampler(self.target, generation.sampling, prompt, room, generation.seed, self.tokenizer, self._grammars)
