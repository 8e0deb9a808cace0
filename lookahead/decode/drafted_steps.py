"""Steps with drafts that are one native call. In: rows of which some are drafted for. Out: what each emits in these steps.

Between two steps nothing is Python's (drafted_kernel.py) where all rows take the best token or have their answers given, and
all that the next step depends on is known: the drafts' own sources, costs of forwards as they were at the beginning, and when
rows back off. Rows may prefill at the first step. What a step took and gave is logged, and learned from at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lookahead.backends.cpu import program_kernel
from lookahead.backends.cpu.program import Program
from lookahead.budget import goodput
from lookahead.budget.goodput import GoodputBudget
from lookahead.decode import drafted_layout as layout
from lookahead.decode.accounting import Accounting
from lookahead.decode.drafted_kernel import drafted_steps
from lookahead.decode.plain_steps import LONGEST
from lookahead.decode.request import Generation
from lookahead.decode.row import RunningRow, StepInput
from lookahead.draft import planner
from lookahead.draft.drafter import Drafter, Row
from lookahead.draft.explain import Step
from lookahead.draft.runner_up import Ranked
from lookahead.draft.tree import DraftTree, name_of
from lookahead.forward import best_kernel
from lookahead.forward.best import follow_in
from lookahead.forward.slots import NativeForward, Slots
from lookahead.forward.target import TargetModel
from lookahead.native.clock import clock_address
from lookahead.native.kernels import Block
from lookahead.native.threads import c_function, openmp_address, run_in

MOST_AT_ONCE = 16  # steps: what they teach about costs is learned no later


class _Begin(NamedTuple):
    """The first step of a call, as the engine has it, and the phase of each row (drafted_layout.py)."""

    rows: Sequence[RunningRow]
    inputs: Sequence[StepInput]
    phases: list[int]

    @property
    def drafts(self) -> list[Row]:
        """Of the rows that decode from the next step on at the latest."""
        return [row.drafts for row, phase in zip(self.rows, self.phases, strict=True) if phase != layout.PREFILLS]


class _Tokens(NamedTuple):
    """What the kernel reads of a request: the answer that is given and the tokens that end it, as addresses and sizes. held:
    the arrays, int64.
    """

    answer_at: int
    given: int
    stops_at: int
    stops: int
    held: tuple[np.ndarray, np.ndarray]

    @staticmethod
    def of(generation: Generation) -> _Tokens:
        answer = np.array(() if generation.forced is None else generation.forced, np.int64)
        stops = np.array([*generation.stop_ids], np.int64)
        return _Tokens(answer.ctypes.data, len(answer), stops.ctypes.data, len(stops), (answer, stops))


class DraftedSteps:
    """Takes such steps for one engine."""

    def __init__(self, target: TargetModel, drafter: Drafter, budget: GoodputBudget, accounting: Accounting):
        self._target, self._drafter, self._budget, self._accounting = target, drafter, budget, accounting
        self._block: Block | None = None
        self._sources: list[str] = []  # names of those that the kernel counts
        self._tokens: dict[RunningRow, _Tokens] = {}  # of the rows of the latest call
        self._pointed: tuple[Any, ...] = ()  # what the block's addresses are of
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

        The drafter has been notified, and knows the prompts of rows that decode from the next step on. rows[k] is in slot k.
        """
        begin = _Begin(rows, inputs, [_phase_of(row, each) for row, each in zip(rows, inputs, strict=True)])
        if not (most := self._most(begin)):
            return False
        widest = self._drafter.options.decoding_length + 1
        native = slots.native([max(widest, len(each)) for each in inputs])
        if native is None:
            return False
        with native as forward:
            block = self._described(begin, forward, most)
            run_in(1, drafted_steps, block.address)
        if taken := int(block.numbers[layout.TAKEN]):
            self._take_over(begin, slots, block, forward.pasts, taken)
        return taken > 0

    def _most(self, begin: _Begin) -> int:
        """How many steps may be taken at once; 0: none."""
        options, streamed = self._drafter.options, False
        if not self._can or options.strategy in ("off", "parallel"):
            return 0
        for row, each, phase in zip(*begin, strict=True):
            generation = row.generation
            given = generation.forced is None or len(generation.forced) >= generation.room
            if phase != layout.PREFILLS and not (given and row.is_followed and row.drafts.unread is None):
                return 0
            if each.wanted == "chunk":
                return 0
            streamed = streamed or generation.streamed
        if streamed or layout.PREFILLS in begin.phases or (options.adaptive and self._budget.tries):
            return 1
        if not options.adaptive:
            return MOST_AT_ONCE
        # What prefills is neither a look nor weighed against steps without drafts.
        prefills = layout.ENDS_PREFILL in begin.phases
        left = min(self._budget.steps_until_look(), self._accounting.rates.drafted_steps_left(len(begin.rows)))
        return min(MOST_AT_ONCE, left + prefills)

    def _described(self, begin: _Begin, forward: NativeForward, most: int) -> Block:
        """The kernel's arguments."""
        rows, inputs, phases = begin
        drafter, options, longest = self._drafter, self._drafter.options, self._target.longest_text
        depth = min(options.decoding_length - 1, options.branch_length)
        begun = [row.generation.token_ids[-max(1, row.unnoticed) :] for row in rows]
        lefts = [row.generation.room - len(row.generation.token_ids) for row in rows]
        emitted = max(len(tokens) + min(left, most * (depth + 1)) for tokens, left in zip(begun, lefts, strict=True))
        drafter.lend(begin.drafts, emitted)
        block = self._room_for(len(rows), emitted, forward)
        block.times[:most], block.by_source[: len(rows)] = 0, 0
        self._tokens = {row: self._tokens.get(row) or _Tokens.of(row.generation) for row in rows}
        lines = []
        for k, (row, tokens) in enumerate(self._tokens.items()):
            tree, length, backoff = inputs[k].tree, row.length, row.backoff
            emitted, said = len(begun[k]), length - len(row.generation.prompt_ids)
            block.emitted[k, :emitted] = begun[k]
            lines.append(
                (
                    *(row.drafts.number, forward.pasts[k], lefts[k], longest - length, length, backoff.until),
                    *(row.is_drafted_for, emitted, emitted - row.unnoticed, tokens.answer_at + 8 * said),
                    *(min(lefts[k], max(0, tokens.given - said)), tokens.stops_at, tokens.stops, 1, 0, 0, phases[k]),
                    *((0, 0) if tree is None else (tree.token_ids.ctypes.data, len(tree))),
                )
            )
        block.rows[: len(rows)] = lines
        block.debts[: len(rows)] = [row.backoff.debt for row in rows]
        decoding, fed = phases.count(layout.DECODES), sum(map(len, inputs))
        self._describe(block, rows, forward, most, self._budget.wished(decoding, fed))
        return block

    def _describe(self, block: Block, rows: Sequence[RunningRow], forward: NativeForward, most: int, wished: int) -> None:
        """What is the same for all rows."""
        drafter, options, budget, run = self._drafter, self._drafter.options, self._budget, forward.run
        budget.make_room(len(rows))
        pointed = block, run.scores, drafter.shared, drafter.rows
        if len(self._pointed) != len(pointed) or any(a is not b for a, b in zip(self._pointed, pointed, strict=True)):
            self._point(block, forward)
            self._pointed = pointed
        block.buffers[:] = forward.buffers
        block.numbers[: layout.ACCEPT] = (
            *(len(rows), most, 0, self._accounting.steps, forward.capacity, run.room, options.decoding_length - 1),
            *(options.branch_length, budget.drafted, budget.before, options.adaptive, options.learn),
            *(drafter.wants_runner_up, drafter.growth.threads(len(rows)), drafter.growth.grew, 0),
        )
        observed = any(row.generation.observer for row in rows)
        block.numbers[[layout.RUN_HEAD, layout.OBSERVED, layout.WISHED]] = run.head_at, observed, wished
        block.reals[:] = options.price, budget.price, budget.drafting, LONGEST, self._target.call

    def _point(self, block: Block, forward: NativeForward) -> None:
        """Addresses, which stay the same from call to call unless something grows."""
        drafter, books, run = self._drafter, self._budget.books, forward.run
        halves, single = run.scores.dtype != torch.float32, drafter.options.strategy == "single"
        block.numbers[layout.ACCEPT : layout.OBSERVED] = (
            *map(_address, (planner.accept_rows, planner.grow_rows, goodput.choose)),
            *map(_address, (program_kernel.prepare, program_kernel.run)),
            _address(best_kernel.best_few_halves if halves else best_kernel.best_few_floats),
            *(_address(follow_in(run.scores.dtype)), openmp_address(), clock_address()),
            *(run.head_at, run.scores.data_ptr(), len(forward.limits[0]), forward.limits.ctypes.data),
            *(drafter.shared.address, drafter.rows.address, books.address),
        )
        scratch, blocks = drafter.growth.scratch_at, (drafter.shared.address, drafter.rows.address)
        block.accepting[: planner.FIRST_ROW] = 0, 0, block.said.ctypes.data, *blocks, drafter.growth.first.address, blocks[1]
        spans, reach = block.spans, drafter.rows.reach
        arrays = block.limits.ctypes.data, spans.ctypes.data, 0
        block.growing[:] = 0, 0, 0, *arrays, 0, single, 0, *blocks, scratch
        block.choice[: goodput.TAKEN] = (
            *(reach.ctypes.data, spans.ctypes.data, books.address, reach.size, 0, 0, 0, 0, 0, single, 0, 0),
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
            "emitted": 1 << (emitted - 1).bit_length(),
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
            self._block = Block(layout.LAYOUT, **{**most, "buffers": buffers})
            self._sources = [name_of(source - 2, self._drafter.source_names) for source in range(sizes["sources"])]
        return self._block

    def _take_over(self, begin: _Begin, slots: Slots, block: Block, pasts: Sequence[int], taken: int) -> None:
        """What the kernel has done counts as done here."""
        (rows, inputs, phases), drafter = begin, self._drafter
        numbers, lines, debts = block.numbers.tolist(), block.rows[: len(rows)].tolist(), block.debts.tolist()
        drafter.take_back(begin.drafts)
        drafter.growth.grew = numbers[layout.GREW]
        if numbers[layout.RECYCLES]:
            trees = numbers[layout.PENDING]
            drafter.runner_up.note_ranked(self._ranked(block, trees) if trees else None)
        filled = []
        for k, (row, each, line) in enumerate(zip(rows, inputs, lines, strict=True)):
            generation, begun = row.generation, min(len(row.generation.token_ids), max(1, row.unnoticed))
            tokens = block.emitted[k, begun : line[layout.EMITTED]].tolist()
            brought = generation.token_ids[-1:] if each.tree is None else each.tree.token_ids.tolist()
            filled.append([*brought, *tokens][: line[layout.PAST] - pasts[k]])
            generation.token_ids += tokens[:-1]
            if tokens:
                generation.add(tokens[-1])
            row.unnoticed = line[layout.EMITTED] - line[layout.KNOWN]
            row.is_drafted_for = bool(line[layout.ACTIVE])
            row.backoff.debt, row.backoff.until = debts[k], line[layout.UNTIL]
            generation.steps += taken - (phases[k] != layout.DECODES)
            generation.draft_tokens += line[layout.DRAFT_TOKENS]
            generation.accepted_tokens += line[layout.ACCEPTED]
        for k, source in zip(*(indices.tolist() for indices in block.by_source[: len(rows)].nonzero()), strict=True):
            rows[k].generation.accepted_by_source[self._sources[source]] += block.by_source.item(k, source)
        slots.took(filled, sum(map(len, inputs)))
        if numbers[layout.OBSERVED]:
            self._notify_observers(rows, block, taken)
        reals = block.reals.tolist()
        self._budget.take_back(numbers[layout.DRAFTED], numbers[layout.BEFORE], reals[layout.DRAFTING], reals[layout.PRICE])
        self._accounting.steps += taken - 1
        self._accounting.record_drafted(rows, block.log[:taken], block.times[:taken])

    def _notify_observers(self, rows: Sequence[RunningRow], block: Block, taken: int) -> None:
        """Of each step of each row. The rows' answers and counts hold all of them already."""
        ends = [len(row.generation.token_ids) - int(block.seen_counts[:taken, k, 2].sum()) for k, row in enumerate(rows)]
        for step in range(taken):
            for k, row in enumerate(rows):
                generation, (size, kept, said) = row.generation, block.seen_counts[step, k].tolist()
                ends[k] += said
                if generation.observer is None or not size:
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


def _phase_of(row: RunningRow, each: StepInput) -> int:
    if each.tree is None and row.decodes:
        return layout.DECODES
    return layout.ENDS_PREFILL if each.wanted == "last" else layout.PREFILLS


def _address(function: Callable[[int], None]) -> int:
    """Of the C function that a kernel of one address is."""
    return c_function(function)[1]
