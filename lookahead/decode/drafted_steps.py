"""Steps with drafts that are one native call. In: rows of which some are drafted for. Out: what each emits in these steps.

Between two steps nothing is Python's (drafted_kernel.py) where all rows take the best token or have their answers given, and
all that the next step depends on is known: the drafts' own sources, costs of forwards as they were at the beginning, and when
rows back off. What a step took and gave is logged, and learned from at the end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lookahead.budget import goodput
from lookahead.budget.goodput import AS_MANY_AS_PAY, GoodputBudget
from lookahead.clock import clock_address
from lookahead.decode import drafted_kernel as kernel
from lookahead.decode.accounting import Accounting
from lookahead.decode.plain_steps import LONGEST
from lookahead.decode.row import RunningRow, StepInput
from lookahead.draft import planner
from lookahead.draft.counts import DraftCounts
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import Step
from lookahead.draft.runner_up import Ranked
from lookahead.draft.tree import DraftTree, name_of
from lookahead.forward import best_kernel, program_kernel
from lookahead.forward.best import follow_in
from lookahead.forward.program import Program
from lookahead.forward.slots import NativeForward, Slots
from lookahead.forward.target import TargetModel
from lookahead.kernels import Block
from lookahead.threads import c_function, openmp_address, run_in

MOST_AT_ONCE = 16  # steps: what they teach about costs is learned no later


class DraftedSteps:
    """Takes such steps for one engine."""

    def __init__(self, target: TargetModel, drafter: Drafter, budget: GoodputBudget, accounting: Accounting):
        self._target, self._drafter, self._budget, self._accounting = target, drafter, budget, accounting
        self._block: Block | None = None
        self._sources: list[str] = []  # names of those that the kernel counts
        self._can = (
            isinstance(target.program, Program)
            and target.now is time.perf_counter
            and not target.is_shared
            and target.vocab_size >= best_kernel.FEW
            and clock_address() > 0
            and isinstance(drafter, Drafter)
            and not drafter.sources
        )

    def take(self, rows: Sequence[RunningRow], inputs: Sequence[StepInput], slots: Slots) -> bool:
        """Take this step, at which some of these rows are drafted for, and some after it; False if that cannot be.

        The drafter has been notified. rows[k] is in slot k.
        """
        most = self._most(rows, inputs)
        native = slots.native(self._drafter.options.decoding_length + 1) if most else None
        if native is None:
            return False
        with native as forward:
            block = self._described(rows, forward, most)
            run_in(1, kernel.drafted_steps, block.address)
        if taken := int(block.numbers[kernel.TAKEN]):
            self._take_over(rows, slots, block, forward.pasts, taken)
        return taken > 0

    def _most(self, rows: Sequence[RunningRow], inputs: Sequence[StepInput]) -> int:
        """How many steps may be taken at once; 0: none."""
        options = self._drafter.options
        if not self._can or options.strategy in ("off", "parallel"):
            return 0
        for row, each in zip(rows, inputs, strict=True):
            generation = row.generation
            given = generation.forced is None or len(generation.forced) >= generation.room
            if each.tree is not None or not row.decodes or not row.is_followed or row.is_constrained:
                return 0
            if not given or row.drafts.unread is not None:
                return 0
        if not options.adaptive:
            return MOST_AT_ONCE
        return min(MOST_AT_ONCE, self._budget.steps_until_look(), self._accounting.rates.drafted_steps_left(len(rows)))

    def _described(self, rows: Sequence[RunningRow], forward: NativeForward, most: int) -> Block:
        """The kernel's arguments."""
        drafter, options, target = self._drafter, self._drafter.options, self._target
        depth = min(options.decoding_length - 1, options.branch_length)
        begun = [row.generation.token_ids[-max(1, row.unnoticed) :] for row in rows]
        lefts = [row.generation.room - len(row.generation.token_ids) for row in rows]
        emitted = max(len(tokens) + min(left, most * (depth + 1)) for tokens, left in zip(begun, lefts, strict=True))
        drafter.lend([row.drafts for row in rows], emitted)
        block = self._room_for(len(rows), emitted, forward)
        block.times[:most], block.by_source[: len(rows)] = 0, 0
        answers, stops = [], []
        for k, row in enumerate(rows):
            generation, known = row.generation, len(begun[k]) - row.unnoticed
            answers.append(np.array(generation.still_given(lefts[k]), np.int64))
            stops.append(np.array([*generation.stop_ids], np.int64))
            block.emitted[k, : len(begun[k])] = begun[k]
            block.rows[k] = (
                *(row.drafts.number, forward.pasts[k], lefts[k], target.longest_text - row.length, row.length),
                *(row.backoff.until, row.is_drafted_for, len(begun[k]), known),
                *(answers[k].ctypes.data, len(answers[k]), stops[k].ctypes.data, len(stops[k]), 1, 0, 0),
            )
            block.debts[k] = row.backoff.debt
        self._held = answers, stops  # as long as the kernel reads them
        self._describe(block, rows, forward, most)
        return block

    def _describe(self, block: Block, rows: Sequence[RunningRow], forward: NativeForward, most: int) -> None:
        """What is the same for all rows."""
        drafter, options, budget, run = self._drafter, self._drafter.options, self._budget, forward.run
        halves = run.scores.dtype != torch.float32
        budget.make_room(len(rows))
        block.buffers[:] = forward.buffers
        block.numbers[:] = (
            *(len(rows), most, 0, self._accounting.steps, forward.capacity, run.room, options.decoding_length - 1),
            *(options.branch_length, budget.drafted, budget.before, options.adaptive, options.learn),
            *(drafter.wants_runner_up, drafter.growth.threads(len(rows)), drafter.growth.grew, 0, 0),
            *map(_address, (planner.accept_rows, planner.grow_rows, goodput.choose)),
            *map(_address, (program_kernel.prepare, program_kernel.run)),
            _address(best_kernel.best_few_halves if halves else best_kernel.best_few_floats),
            *(_address(follow_in(run.scores.dtype)), openmp_address(), clock_address()),
            *(run.head_at, run.scores.data_ptr(), run.scores.shape[1], len(forward.limits[0]), forward.limits.ctypes.data),
            *(drafter.shared.address, drafter.rows.address, budget.books.address),
            any(row.generation.observer for row in rows),
        )
        block.reals[:] = options.price, budget.price, budget.drafting, LONGEST, self._target.call
        scratch, single = drafter.growth.scratch_at, options.strategy == "single"
        blocks = drafter.shared.address, drafter.rows.address
        block.accepting[: planner.FIRST_ROW] = 0, 0, block.said.ctypes.data, *blocks, drafter.growth.first.address, blocks[1]
        spans, reach = block.spans, drafter.rows.reach
        arrays = block.limits.ctypes.data, spans.ctypes.data, 0
        block.growing[:] = 0, 0, 0, *arrays, 0, single, 0, *blocks, scratch
        block.choice[: goodput.TAKEN] = (
            *(reach.ctypes.data, spans.ctypes.data, budget.books.address, reach.size, 0, 0, 0, 0, 0, single, 0, AS_MANY_AS_PAY),
        )
        scores = run.scores.data_ptr(), run.scores.shape[1]
        block.following[: best_kernel.HEAD] = *scores, block.known.ctypes.data, 0, 0, 0, 0
        block.few[:] = (
            *(*scores, block.asked.ctypes.data, block.few_ids.ctypes.data, block.few_scores.ctypes.data),
            *(block.known.ctypes.data, 0, 0, block.few_bits.ctypes.data, run.scores.dtype == torch.bfloat16),
        )

    def _room_for(self, rows: int, emitted: int, forward: NativeForward) -> Block:
        """A block with room for that many rows and tokens of each: the one there is, or a new one."""
        sizes = {
            "rows": rows,
            "emitted": emitted,
            "sources": len(self._drafter.source_names) + 2,
            "steps": MOST_AT_ONCE,
            "words": best_kernel.HEAD + 7 * rows + 5 * forward.run.room,
            "tokens": forward.run.room,
            "kinds": len(forward.limits[0]),
            "buffers": len(forward.buffers),
        }
        buffers, before = sizes["buffers"], self._block.sizes if self._block else {}
        if self._block is None or buffers != before["buffers"] or any(before[name] < size for name, size in sizes.items()):
            most = {name: max(size, before.get(name, 0)) for name, size in sizes.items()}
            self._block = Block(kernel.LAYOUT, **{**most, "buffers": buffers})
            self._sources = [name_of(source - 2, self._drafter.source_names) for source in range(sizes["sources"])]
        return self._block

    def _take_over(self, rows: Sequence[RunningRow], slots: Slots, block: Block, pasts: Sequence[int], taken: int) -> None:
        """What the kernel has done counts as done here."""
        drafter, numbers = self._drafter, block.numbers
        drafter.take_back([row.drafts for row in rows])
        drafter.growth.grew = int(numbers[kernel.GREW])
        if numbers[kernel.RECYCLES]:
            trees = int(numbers[kernel.PENDING])
            drafter.runner_up.note_ranked(self._ranked(block, trees) if trees else None)
        filled = []
        for row, line, emitted, past in zip(rows, block.rows.tolist(), block.emitted, pasts, strict=False):
            generation, begun = row.generation, max(1, row.unnoticed)
            tokens = emitted[begun : line[kernel.EMITTED]].tolist()
            filled.append([generation.token_ids[-1], *tokens][: line[kernel.PAST] - past])
            generation.token_ids += tokens[:-1]
            generation.add(tokens[-1])
            row.unnoticed = line[kernel.EMITTED] - line[kernel.KNOWN]
            row.is_drafted_for = bool(line[kernel.ACTIVE])
            row.backoff.debt, row.backoff.until = float(block.debts[len(filled) - 1]), line[kernel.UNTIL]
            counts = block.by_source[len(filled) - 1].tolist()
            by_source = Counter({name: count for name, count in zip(self._sources, counts, strict=True) if count})
            generation.add_counts(
                DraftCounts(
                    steps=taken,
                    draft_tokens=line[kernel.DRAFT_TOKENS],
                    accepted_tokens=line[kernel.ACCEPTED],
                    accepted_by_source=by_source,
                )
            )
        slots.took(filled)
        if numbers[kernel.OBSERVED]:
            self._notify_observers(rows, block, taken)
        self._budget.take_back(int(numbers[kernel.DRAFTED]), int(numbers[kernel.BEFORE]), float(block.reals[kernel.DRAFTING]))
        self._accounting.steps += taken - 1
        self._accounting.record_drafted(rows, block.log[:taken], block.times[:taken])

    def _notify_observers(self, rows: Sequence[RunningRow], block: Block, taken: int) -> None:
        """Of each step of each row. The rows' answers and counts hold all of them already."""
        ends = [len(row.generation.token_ids) - int(block.seen_counts[:taken, k, 2].sum()) for k, row in enumerate(rows)]
        for step in range(taken):
            for k, row in enumerate(rows):
                generation, (size, kept, said) = row.generation, block.seen_counts[step, k].tolist()
                ends[k] += said
                if generation.observer is None:
                    continue
                token_ids, parents, sources, matches = block.seen[step, k, :, :size].copy()
                tree = DraftTree(token_ids, parents, block.seen_reach[step, k, :size].copy(), sources, matches)
                output, path = generation.token_ids[: ends[k]], block.seen_path[step, k, :kept].tolist()
                number, names = generation.steps - taken + step + 1, self._drafter.source_names
                generation.observer(Step.of(number, generation.prompt_ids, output, tree, path, output[-said:], names))

    @staticmethod
    def _ranked(block: Block, trees: int) -> Ranked:
        """The trees whose runner-up tokens the kernel has not added yet, and these."""
        nodes = int(block.few_sizes[:trees].sum())
        arrays = block.few_tokens[:nodes], block.few_parents[:nodes], block.few_sizes[:trees], block.few_before[:trees]
        token_ids, parents, sizes, before = (array.copy() for array in arrays)
        return token_ids, parents, sizes, before, block.few_ids[:nodes].copy(), block.few_scores[:nodes].copy()


def _address(function: Callable[[int], None]) -> int:
    """Of the C function that a kernel of one address is."""
    return c_function(function)[1]
