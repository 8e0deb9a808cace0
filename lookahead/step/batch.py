"""The rows of a decode step side by side. In: requests in slots. Out: what the forward gets, and what each row emits.

Before the forward stands `propose`, behind it `accept`; each is one native call (kernels.py) unless a row needs what only
Python has: grammars, draft sources of the user's own, samplers. Plain decoding is a step that proposes nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lookahead.budget.policy import Budget
from lookahead.draft import planner
from lookahead.draft.drafter import Drafter, Row
from lookahead.draft.recycled import BEST
from lookahead.draft.tree import Accepted, DraftTree, Scores, TreeBatch, as_parallel, name_of, root_only
from lookahead.native.kernels import Block
from lookahead.native.threads import c_function, openmp_address, run_in
from lookahead.step import kernels
from lookahead.step.best_tokens import NONE
from lookahead.step.guide import Guide, keep_possible
from lookahead.step.layout import (
    CHOOSE,
    COMMIT,
    DECODES,
    FOLLOW,
    GROW,
    LAY_OUT,
    LEARN,
    ROW,
    RUNNER_UP,
    STEP,
    UNKNOWN,
    WAITS,
)

TIMED = 8  # at one step in that many it is timed how long runner-up tokens take


@dataclasses.dataclass(slots=True)
class RowState:
    """State that a row brings when it takes a slot.

    length: tokens of prompt and answer so far. left: that it may still emit. positions_left: behind `length`. emitted: the
    latest token; None: it has not emitted any. stops: tokens that end it. forced: what is left of an answer that is taken as
    the model's choice; None: nothing is forced. follows: it emits the best tokens, or what is forced; else Python chooses.
    """

    drafts: Row
    length: int
    left: int
    positions_left: int
    emitted: int | None
    stops: Sequence[int]
    forced: Sequence[int] | None
    follows: bool
    guide: Guide | None = None


class StepBatch:
    """Rows in slots, slot by slot.

    vocab_size: of the model. adaptive: the budget chooses how much is drafted. None: the drafter's options decide.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, adaptive: bool | None = None):
        self.drafter = drafter
        self._adaptive = drafter.options.adaptive if adaptive is None else adaptive
        self._vocab_size = vocab_size
        self._states: list[RowState] = []
        self._held: list[tuple[np.ndarray, ...]] = []  # arrays whose addresses a row's line has
        self._names = [name_of(source - 2, drafter.source_names) for source in range(len(drafter.source_names) + 2)]
        self._pointed: tuple[Any, ...] = ()
        self._unindexed = 0  # rows
        self._prefills, self._room_rows = True, 0
        self.runner_up_seconds = 0.0  # that it takes to find them in a step
        self.reading_seconds = 0.0  # of the latest `propose`, in reading the texts of rows
        self.choosing_seconds = 0.0  # of the latest step, in which Python chose tokens: with drafts as many as without
        self._make_block(1, 1)

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: RowState) -> None:
        """A row takes the next slot."""
        slot = len(self._states)
        if slot == self._block.sizes["rows"]:
            self._make_block(2 * slot, self._block.sizes["tokens"])
        stops, forced = np.array([*state.stops], np.int64), np.array(() if state.forced is None else state.forced, np.int64)
        self.lines[slot] = np.zeros((), ROW)
        line, drafts = self.lines[slot], state.drafts
        off = self.drafter.options.strategy == "off"
        line["number"], line["phase"], line["follows"] = drafts.number, WAITS, state.follows
        line["drafted"] = not off
        line["length"], line["left"], line["positions_left"] = state.length, state.left, state.positions_left
        line["most"], line["tree"], line["nodes"] = self.drafter.options.decoding_length, -1, 1
        line["stops_at"], line["stops"] = stops.ctypes.data, len(stops)
        line["forced_at"], line["forced"] = forced.ctypes.data, len(forced)
        if state.emitted is not None:
            self._block.emitted[slot, 0] = state.emitted
            line["emitted"] = line["known"] = 1
        self._block.by_source[slot] = 0
        self._states.append(state)
        self._held.append((stops, forced))
        self._unindexed += not off
        self.call["rows"] = slot + 1
        self._note_index(slot)

    def remove(self, slot: int) -> None:
        """A row leaves its slot, which the last one takes. The drafter knows all of its tokens then."""
        self._tell(slot)
        last = len(self._states) - 1
        self._unindexed -= self._waits_for_index(slot)
        for array in (self.lines, self._block.emitted, self._block.by_source):
            array[slot] = array[last]
        self._states[slot], self._held[slot] = self._states[-1], self._held[-1]
        self._states.pop()
        self._held.pop()
        self.call["rows"] = last

    def counts(self, slot: int) -> tuple[int, int, int, dict[str, int]]:
        """(Decode steps, draft tokens, accepted draft tokens, these by source) of a row since the latest call."""
        line, by_source = self.lines[slot], self._block.by_source[slot]
        found = {self._names[source]: by_source.item(source) for source in by_source.nonzero()[0].tolist()}
        steps, draft_tokens, accepted = line["steps"].item(), line["draft_tokens"].item(), line["accepted"].item()
        line["steps"] = line["draft_tokens"] = line["accepted"] = 0
        by_source[:] = 0
        return steps, draft_tokens, accepted, found

    def set_input(self, slot: int, phase: int, chunk: np.ndarray | None = None) -> None:
        """Set what a row does in the next step. chunk: int32, what it prefills; the caller keeps it until the step is over."""
        line = self.lines[slot]
        line["phase"] = phase
        line["chunk_at"], line["chunk"] = (0, 0) if chunk is None else (chunk.ctypes.data, len(chunk))
        self._prefills = self._prefills or chunk is not None

    def propose(self, budget: Budget, step: int, drafts: bool) -> None:
        """Learn what rows have emitted, draft for those that decode, and lay out the forward.

        step: its number. drafts: for all rows that decode, else for none.
        """
        self.reading_seconds = 0.0
        if self.call["full"]:
            self._note_emitted()
        if self._prefills or len(self) > self._room_rows:
            self._make_room()
        drafter, call, everything = self.drafter, self.call, LEARN | GROW | CHOOSE | LAY_OUT
        drafts = drafts and drafter.options.strategy != "off"
        call["step"], call["drafts"], call["recycles"] = step, drafts, 0
        if not (drafts or call["active"]):
            self._run(kernels.propose, everything)
            return
        self._get_ready(budget, drafts)
        call["threads"] = drafter.growth.threads(len(self), int(call["grown"]))
        call["share"] = budget.cost.share(len(self))
        call["recycles"] = drafter.wants_runner_up and self._vocab_size >= BEST and drafts
        if not self._is_staged():
            self._run(kernels.propose, everything)
            return
        self._force_tokens()
        self._run(kernels.propose, LEARN | GROW)
        self._edit_trees()
        self._run(kernels.propose, CHOOSE)
        if drafter.options.strategy == "parallel":
            self._make_parallel()
        self._run(kernels.propose, LAY_OUT)

    def _is_staged(self) -> bool:
        """Python has its part in drafting."""
        options, sources = self.drafter.options, self.drafter.sources
        return bool(sources) or options.strategy == "parallel" or any(state.guide is not None for state in self._states)

    @property
    def active(self) -> int:
        """Rows that are drafted for at this step."""
        return int(self.call["active"])

    @property
    def decoding(self) -> int:
        """Rows that decode."""
        return int(self.call["decoding"])

    @property
    def emitted(self) -> int:
        """Tokens that these emitted at this step."""
        return int(self.call["emitted"])

    @property
    def tokens(self) -> int:
        """Tokens of the forward."""
        return int(self.call["tokens"])

    @property
    def expected(self) -> float:
        """Draft tokens that are to be accepted: the sum of the probabilities of all that are verified."""
        return float(self.call["expected"])

    @property
    def phases(self) -> list[int]:
        """Phase of each row in this step, see layout.py."""
        phases: list[int] = self.lines["phase"][: len(self)].tolist()
        return phases

    @property
    def sizes(self) -> list[int]:
        """Tokens that each row brings to this step."""
        sizes: list[int] = self._block.brought[: len(self)].tolist()
        return sizes

    @property
    def trees(self) -> TreeBatch:
        """Input of the forward: the trees and chunks of all rows."""
        block, tokens, rows = self._block, int(self.call["tokens"]), len(self)
        return TreeBatch(block.token_ids[:tokens], block.parents[:tokens], block.brought[:rows], block.wanted[:rows])

    def accept(self, scores: Scores, chosen: Sequence[int] = ()) -> None:
        """Follow the tree of each row along what the model emits. chosen: slots for which Python chooses, with `set_accepted`;
        then `commit` ends the step.
        """
        call, block = self.call, self._block
        kind, address, vocab = scores.native()
        call["scores_kind"], call["scores_at"], call["vocab"] = kind, address, vocab
        if kind == NONE and (scored := int(call["scored"])):
            block.best[:scored] = scores.best_tokens()[:scored]
        stages = RUNNER_UP | FOLLOW | (0 if chosen else COMMIT)
        if call["recycles"] and call["step"] % TIMED == 0:
            began = time.perf_counter()
            self._run(kernels.accept, RUNNER_UP)
            self.runner_up_seconds = time.perf_counter() - began
            stages -= RUNNER_UP
        self._run(kernels.accept, stages)
        if kind == NONE and call["recycles"] and (asked := int(call["asked"])):
            block.few_ids[:asked], block.few_scores[:asked] = scores.best_few(block.asked[:asked], BEST)

    def set_accepted(self, slot: int, token_ids: Sequence[int], nodes: Sequence[int]) -> None:
        """Set what a row emits for which Python chooses. nodes: of its tree, the root included."""
        line, block = self.lines[slot], self._block
        first = int(line["begin"]) + (0 if line["phase"] == DECODES else int(line["size"]) - 1)
        block.new_tokens[first : first + len(token_ids)] = token_ids
        if line["phase"] == DECODES:
            block.path[first : first + len(nodes)] = nodes
            line["path"] = len(nodes)
        line["new"] = len(token_ids)

    def commit(self) -> None:
        """Make what rows emit in this step part of their answers."""
        self._run(kernels.accept, COMMIT)

    def accepted(self) -> list[Accepted]:
        """Return what each row emits, and which nodes of its tree, or tokens of its chunk, are kept."""
        rows, block = len(self), self._block
        tokens = int(self.call["tokens"])
        ids, path = block.new_tokens[:tokens].tolist(), block.path[:tokens].tolist()
        found = []
        lines = self.lines[:rows]
        columns = (lines[name].tolist() for name in ("phase", "begin", "size", "new", "path"))
        for phase, begin, size, new, kept in zip(*columns, strict=True):
            if phase == DECODES:
                found.append(Accepted(ids[begin : begin + new], path[begin : begin + kept]))
            else:
                first = begin + size - 1
                found.append(Accepted(ids[first : first + new], range(size)))
        if (sources := self.drafter.sources) and self.drafter.options.strategy != "off":
            for state, each, drafted in zip(self._states, found, lines["drafted"].tolist(), strict=True):
                sources.accept(state.drafts.number, each.token_ids, bool(drafted) and self.drafter.options.learn)
        return found

    def trees_of(self, slots: Sequence[int]) -> list[DraftTree]:
        """The trees that rows which decode have brought to this step, copied."""
        lines = self.lines[np.asarray(slots, np.int64)]
        found = self.drafter.copied_trees(lines["number"], lines["nodes"])
        for k, (slot, nodes) in enumerate(zip(slots, lines["nodes"].tolist(), strict=True)):
            if nodes == 1:
                found[k] = root_only(int(self._block.token_ids[lines["begin"][k]]))
            elif self.call["own_trees"]:
                token_ids, parents, sources, matches = self._block.own_trees[slot, :, :nodes].copy()
                found[k] = DraftTree(token_ids, parents, self._own_reach[slot, :nodes], sources, matches)
        return found

    def emit(self, slot: int, token_ids: Sequence[int], room: int) -> None:
        """A row that is decoded elsewhere has emitted tokens and decodes in the next step, with `room` draft tokens at most."""
        line, block = self.lines[slot], self._block
        for begin in range(0, len(token_ids), UNKNOWN):
            new = token_ids[begin : begin + UNKNOWN]
            if line["emitted"] + len(new) > block.emitted.shape[1]:
                self._tell(slot)
            block.emitted[slot, line["emitted"] : line["emitted"] + len(new)] = new
            line["emitted"] += len(new)
        line["phase"], line["most"], line["left"], line["positions_left"] = DECODES, room, room + 1, room
        if (sources := self.drafter.sources) and self.drafter.options.strategy != "off":
            sources.accept(int(line["number"]), token_ids, bool(line["drafted"]) and self.drafter.options.learn)

    def unknown_tokens(self, slot: int) -> np.ndarray:
        """int32: what a row has emitted that the drafter does not know yet."""
        known, emitted = self.lines[slot]["known"], self.lines[slot]["emitted"]
        return self._block.emitted[slot, known:emitted]

    def wait(self) -> None:
        """No row does anything in the next step but those that `set_input` or `emit` tells something."""
        self.lines["phase"][: len(self)] = WAITS

    def accepted_from(self, source: str) -> int:
        """Draft tokens of this source that the latest step accepted."""
        return self._block.step_sources.item(self._names.index(source))

    def _run(self, kernel: Any, stages: int) -> None:
        self.call["stages"] = stages
        run_in(1, kernel, self._block.address)

    def _get_ready(self, budget: Budget, drafts: bool) -> None:
        """Bring the drafter up to date and index texts before the native call."""
        drafter = self.drafter
        if self._unindexed and drafts:
            phases = self.phases
            slots = [slot for slot in range(len(self)) if self._waits_for_index(slot) and phases[slot] == DECODES]
            began = time.perf_counter()
            drafter.read([self._states[slot].drafts for slot in slots])
            for slot in slots:
                self._note_index(slot)
            self.reading_seconds = time.perf_counter() - began
        drafter.recycled.has_keys |= bool(self.call["pending"])
        drafter.get_ready()
        if self.call["adaptive"]:
            budget.make_room(len(self), len(self) * drafter.options.decoding_length)
        pointed = drafter.shared, drafter.rows, budget.cost, budget.curve, budget.kept, self._block
        if len(self._pointed) != len(pointed) or any(a is not b for a, b in zip(pointed, self._pointed, strict=True)):
            self._pointed = pointed
            self._point(budget)

    def _note_index(self, slot: int) -> None:
        """The drafter has read the text of a row, or not; if so it has room for what kernels append."""
        drafts = self._states[slot].drafts
        if self.drafter.options.strategy != "off" and drafts.unread is None:
            self._unindexed -= not self.lines[slot]["indexed"]
            self.lines[slot]["indexed"] = 1
            drafts.reserve(4 * UNKNOWN)

    def _waits_for_index(self, slot: int) -> bool:
        return self.drafter.options.strategy != "off" and not self.lines[slot]["indexed"]

    def _tell(self, slot: int) -> None:
        """The drafter gets to know what a row has emitted."""
        line, drafts = self.lines[slot], self._states[slot].drafts
        emitted, known = int(line["emitted"]), int(line["known"])
        if emitted > known:
            tokens = self._block.emitted[slot, known:emitted].tolist()
            self.drafter.append(drafts, tokens, bool(line["drafted"]))
            self._block.emitted[slot, 0] = self._block.emitted[slot, emitted - 1]
            line["emitted"] = line["known"] = 1
            self._note_index(slot)

    def _note_emitted(self) -> None:
        """Make room for what rows will emit next."""
        self.call["full"] = 0
        for slot in range(len(self)):
            if self.lines[slot]["emitted"] > UNKNOWN:
                self._tell(slot)
            self._note_index(slot)

    def _force_tokens(self) -> None:
        """Collect the next tokens that grammars force."""
        tokens: list[int] = []
        for slot, state in enumerate(self._states):
            line = self.lines[slot]
            line["forced_begin"] = len(tokens)
            if state.guide is not None and line["phase"] == DECODES:
                tokens += state.guide.forced()
            line["forced_end"] = len(tokens)
        self._forced = np.array(tokens, np.int64)
        self.call["forced_at"] = self._forced.ctypes.data if tokens else 0

    def _edit_trees(self) -> None:
        """Put in what draft sources of the user's own propose, take out what grammars do not allow."""
        drafter, call, block, count = self.drafter, self.call, self._block, int(self.call["trees"])
        slots = [slot for slot, tree in enumerate(self.lines["tree"][: len(self)].tolist()) if tree >= 0]
        if drafter.sources:
            price = float(call["least_price"] if not call["adaptive"] else max(call["least_price"], call["price"]))
            rows = [self._states[slot].drafts for slot in slots]
            drafter.merge_sources(rows, block.limits[:count], price, block.spans[:count])
        for tree, slot in enumerate(slots):
            if guide := self._states[slot].guide:
                block.spans[tree, 1] = keep_possible(drafter.rows, self._states[slot].drafts.number, guide)

    def _make_parallel(self) -> None:
        """The branches of each tree stand side by side."""
        rows, block, most = self.drafter.rows, self._block, self.drafter.options.decoding_length
        self._own_reach = np.zeros((len(self), most), np.float32)
        for slot, state in enumerate(self._states):
            line, number = self.lines[slot], state.drafts.number
            if (nodes := int(line["nodes"])) == 1:
                continue
            budget = int(block.limits[line["tree"], 1]) if not self.call["adaptive"] else nodes - 1
            token_ids, parents, sources, matches = rows.trees[number, :, :nodes]
            grown = DraftTree(token_ids, parents, rows.reach[number, 1, :nodes], sources, matches)
            tree = as_parallel(grown, budget)
            line["nodes"] = len(tree)
            block.own_trees[slot, :, : len(tree)] = tree.token_ids, tree.parents, tree.sources, tree.matches
            self._own_reach[slot, : len(tree)] = tree.probabilities

    def _make_block(self, rows: int, tokens: int) -> None:
        """Allocate the block with room for that many rows, and tokens of a step."""
        options, before = self.drafter.options, getattr(self, "_block", None)
        parallel = options.decoding_length if options.strategy == "parallel" else 1
        sizes = {"rows": rows, "unknown": 2 * UNKNOWN, "sources": len(self._names), "parallel": parallel, "tokens": tokens}
        block = Block(STEP, **sizes)
        if before is not None:
            for name in block.names:
                old, new = getattr(before, name), getattr(block, name)
                kept = tuple(slice(0, min(a, b)) for a, b in zip(old.shape, new.shape, strict=True))
                new[kept] = old[kept]
        self._block, self.lines, self.call = block, block.rows, block.call[0]
        call = self.call
        call["adaptive"], call["learns"], call["least_price"] = self._adaptive, options.learn, options.price
        call["nodes"], call["depth"] = options.decoding_length - 1, min(options.decoding_length - 1, options.branch_length)
        call["own_trees"] = options.strategy == "parallel"
        call["draft_rows_at"] = self.drafter.rows.address
        self._pointed = ()

    def _make_room(self) -> None:
        """Make room for the tokens of the next step: those of all trees, and the chunks."""
        self._prefills, self._room_rows = False, len(self)
        tokens = 64 + len(self) * (self.drafter.options.decoding_length + 1) + int(self.lines["chunk"][: len(self)].sum())
        if tokens > self._block.sizes["tokens"]:
            self._make_block(self._block.sizes["rows"], 1 << (tokens - 1).bit_length())

    def _point(self, budget: Budget) -> None:
        """Addresses, which stay the same until something grows."""
        drafter, block, call = self.drafter, self._block, self.call
        call["accept_at"], call["grow_at"] = (c_function(kernel)[1] for kernel in (planner.accept_rows, planner.grow_rows))
        call["parallel_at"] = openmp_address()
        blocks = call["shared_at"], call["draft_rows_at"] = drafter.shared.address, drafter.rows.address
        table, reach = budget.cost.table, drafter.rows.reach
        call["table_at"], call["table_sizes"], call["buckets"] = table.ctypes.data, table.shape[1], budget.cost.buckets
        call["curve_at"], call["curve_room"] = budget.curve.ctypes.data, budget.curve.shape[1]
        call["state_at"] = budget.state.ctypes.data
        call["kept_at"], call["kept_room"] = budget.kept.ctypes.data, len(budget.kept)
        call["reach_at"], call["reach_room"] = reach.ctypes.data, reach.size
        single = drafter.options.strategy == "single"
        task = 0, 0, block.unknown.ctypes.data, *blocks, drafter.growth.first.address
        block.accepting.reshape(-1)[: planner.FIRST_ROW] = task
        arrays = block.limits.ctypes.data, block.spans.ctypes.data, 0
        block.growing[:] = 0, 0, 0, *arrays, single, 0, *blocks, drafter.growth.scratch_at
