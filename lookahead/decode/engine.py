"""The loop of lookahead decoding (arXiv 2312.12728). In: requests. Out: the tokens of plain decoding, step by step.

A step (`DecodingEngine._step`) drafts for every row, verifies all drafts in one forward, keeps what the model itself emits and
notifies the drafter. Rows that still prefill their prompts share the forward with those that decode. What stands before and
behind the forward is step/batch.py, slots are given out in scheduler.py, a row's part of a step is row.py, choosing tokens
sampling.py, clocks and costs accounting.py.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch

from lookahead.budget.policy import Budget
from lookahead.budget.speedup import Speedup
from lookahead.decode.accounting import Accounting, Clock, StepTimes
from lookahead.decode.chooser import Chooser, ForcedTokens, Sampler
from lookahead.decode.constraint import Grammars
from lookahead.decode.costs import measured_cost
from lookahead.decode.generation_config import own_stop_strings
from lookahead.decode.plain import decode_plainly
from lookahead.decode.request import FinishReason, Generation, room_of
from lookahead.decode.row import RunningRow, accept
from lookahead.decode.sampling import GREEDY, Sampling, check_vocabulary
from lookahead.decode.scheduler import Scheduler
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import Observer
from lookahead.forward.backends import by_own_settings
from lookahead.forward.slots import Slots, slots_of
from lookahead.forward.target import TargetModel
from lookahead.step.batch import StepBatch

AT_ONCE = 0.05  # seconds of steps between which nothing else is done

__all__ = ["Clock", "DecodingEngine", "FinishReason", "Generation", "room_of"]


class DecodingEngine:
    """Decodes requests, `batch_size` at a time; the drafter remembers their outputs.

    prefill_chunk: prompt tokens that a step prefills at most. tokenizer: for requests with stop texts.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter, batch_size: int = 1, prefill_chunk: int = 512, tokenizer: Any = None
    ):
        self.batch_size = batch_size
        self.prefill_chunk = prefill_chunk
        self.tokenizer = tokenizer
        self.budget = Budget(target.step_cost(batch_size))
        self.expected_rows = 0  # of the job, where that is known: costs are measured in a share of its time
        self.accounting = Accounting(target, drafter, self.budget, prefill_chunk)
        self._slots: Slots | None = None  # of the latest run
        self._decode_with(target, drafter)

    def _decode_with(self, target: TargetModel, drafter: Drafter) -> None:
        self.target = self.accounting.target = target
        self.drafter = self.accounting.drafter = drafter
        if sources := getattr(drafter, "sources", None):
            sources.vocab_size = target.vocab_size
        if target.mode in ("chain", "replay"):
            drafter.restrict_to_chains()
        self._batch = self._new_batch()

    def replace(self, load: Callable[[], TargetModel], drafter: Drafter) -> None:
        """Decode with another model of the same shape and vocabulary, such as one with another adapter. No request may be
        running. The model before is given up first, as there may be no memory for two. Budget and clock continue.
        """
        self.release_cache()
        del self.target, self.accounting.target
        gc.collect()  # modules may refer to each other
        self._decode_with(load(), drafter)

    @property
    def speedup(self) -> Speedup | None:
        """Speedup of all runs so far, see `Accounting.speedup`."""
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
        prompt_logprobs_start: int = 0,
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
        generation.prompt_logprobs_start = max(1, prompt_logprobs_start)
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
        stopped: asked when requests have ended, and every AT_ONCE seconds; True ends the run, and requests that are being
        answered are given up.
        """
        if isinstance(generations, Sized):
            self.expected_rows = len(generations)
        for ended in self.steps(iter(generations)):
            yield from ended
            if stopped():
                return

    @by_own_settings
    @torch.inference_mode()
    def steps(self, waiting: Iterator[Generation | None]) -> Iterator[list[Generation]]:
        """`run`: fill free slots, take a step, free the slots of what has ended, which it yields. Where nothing has, it yields
        nothing after each step of a request that is streamed or of a model that is shared, else after AT_ONCE seconds.
        """
        free = self._slots if self._slots and not self._slots.open else None  # else another run uses them
        if len(self._batch):
            self._batch = self._new_batch()
        scheduler = Scheduler(self._start, self._new_slots, free, self._batch, self.target.longest_text)
        self.accounting.begin(scheduler.rows)
        yielded = self.target.now()
        try:
            while True:
                for generation in scheduler.admit(waiting, self.batch_size):
                    yield [generation]
                if not scheduler.rows or not scheduler.slots:
                    return
                try:
                    self._step(scheduler, scheduler.slots)
                except Exception as error:  # of the forward
                    self.batch_size = scheduler.recover(error, self.batch_size)
                began, ended = self.target.now(), scheduler.retire()
                if ended:
                    self.accounting.retired(ended, began)
                streamed = any(row.generation.streamed for row in scheduler.rows)
                # Processes that share a model yield at the same steps.
                if ended or self.target.is_shared or streamed or began - yielded > AT_ONCE:
                    self.accounting.pause()
                    yield [row.generation for row in ended]
                    yielded = began
        finally:
            scheduler.stop()
            self.accounting.end()

    def _step(self, scheduler: Scheduler, slots: Slots) -> None:
        """Draft, verify all draft trees in one forward, accept, compact the KV cache. rows[k] is in slot k."""
        now, rows, batch, accounting = self.target.now, scheduler.rows, scheduler.batch, self.accounting
        began = now()
        prefilled = scheduler.prepare(self.prefill_chunk)
        number, drafts = accounting.begin_step(len(rows))
        if not self.budget.is_measured and not scheduler.prefilling and self.drafter.options.adaptive:
            drafts = self._measure_costs(rows, slots)
            began = now()
        batch.propose(self.budget, number, drafts)
        drafted = now()
        scores = slots.forward(batch.trees)
        scores.wait()
        computed = now()
        accepted = accept(rows, batch, scores)
        slots.keep([each.nodes for each in accepted])
        accounting.record(rows, batch, prefilled, StepTimes(began, drafted, computed, now()), scores.is_first)

    def _measure_costs(self, rows: Sequence[RunningRow], slots: Slots) -> bool:
        """Measure what forwards cost, behind the first steps that only decode, which are plain ones; True if it was."""
        if (seconds := self.budget.first_seconds(len(rows))) is None:
            return False
        began, left = self.target.now(), [row.generation.room - len(row.generation.token_ids) for row in rows]
        steps = max(left) * max(1.0, self.expected_rows / len(rows))
        cost = measured_cost(self.target, slots, [row.length for row in rows], steps, seconds)
        if cost:
            self.budget.measured(cost, len(rows), seconds)
            self.accounting.measured(began)
        self.budget.is_measured = True  # or cannot be
        return True

    def _new_batch(self) -> StepBatch:
        return StepBatch(self.drafter, self.target.vocab_size)

    def _new_slots(self) -> Slots:
        self._slots = slots_of(self.target)
        return self._slots

    def release_cache(self) -> None:
        """Drop keys and values of earlier requests, which free slots hold. No request may be running."""
        self._slots = None

    def forget(self) -> None:
        """Remember nothing of earlier requests. The budget keeps what it learned. No request may be running."""
        self.release_cache()
        self.drafter.forget()

    def _start(self, generation: Generation) -> RunningRow | None:
        """The row of a request that is about to take a slot; None if it needs none: it is decoded plainly or has failed."""
        if self.target.decodes_plainly(generation.prompt_tokens + generation.room):
            decode_plainly(self.target, generation, self.tokenizer, self._grammars)
            self.clock.add(0.0, generation.seconds, 0.0)
            return None
        scores = generation.prompt_logprobs is not None and generation.prompt_tokens > generation.prompt_logprobs_start
        if not generation.room and not scores:
            generation.finish_reason = "length"
            return None
        try:
            chooser = generation.chooser or self._chooser(generation)
        except Exception as error:  # transformers refuses some settings
            generation.fail(error)
            return None
        began, drafts = self.target.now(), self.drafter.start(generation.prompt_ids)
        number = self.accounting.started(began)
        return RunningRow(generation, drafts, chooser, self.target.now(), number)

    @functools.cached_property
    def _grammars(self) -> Grammars | None:
        if self.tokenizer is None:
            return None
        return Grammars(self.tokenizer, self.target.vocab_size, self.target.eos_token_ids)

    def _chooser(self, generation: Generation) -> Chooser:
        """Make the chooser that the request asks for."""
        if generation.forced is not None or not generation.room:
            return ForcedTokens(generation.remaining_forced)
        prompt, room = generation.prompt_ids, generation.room
        return Sampler(self.target, generation.sampling, prompt, room, generation.seed, self.tokenizer, self._grammars)
