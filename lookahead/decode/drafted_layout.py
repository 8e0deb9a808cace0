"""Steps with drafts in one native call: what the kernel is given and leaves. Its arguments are one block (`LAYOUT`)."""

from __future__ import annotations

import numpy as np

from lookahead.budget import cost, goodput
from lookahead.draft import planner
from lookahead.forward import best_kernel
from lookahead.forward.best_kernel import FEW
from lookahead.forward.tree_meta import FIELDS
from lookahead.native.kernels import Layout, unpacker

# Numbers of the call. ROWS in slots 0 ...; steps that are to be taken at MOST, and that were TAKEN; number of the first STEP.
# Positions of a slot, tokens of a forward: as many as there is room for. Draft tokens of a tree and on a path at most (NODES,
# DEPTH). DRAFTED, BEFORE: see `GoodputBudget`. Whether the budget chooses (ADAPTIVE), the drafter learns (LEARNS) and runner-up
# tokens are kept (RECYCLES). SCRATCHES: threads that may draft at once. GREW: nodes at the latest drafts. PENDING: trees whose
# runner-up tokens are still to be added.
(ROWS, MOST, TAKEN, STEP, CAPACITY, ROOM, NODES, DEPTH, DRAFTED, BEFORE, ADAPTIVE, LEARNS, RECYCLES) = range(13)
(SCRATCHES, GREW, PENDING) = range(13, 16)
# Addresses: of C functions, of what describes a run of the program, of the scores, of the masks' limits and of blocks.
(ACCEPT, GROW, CHOOSE, PREPARE, RUN, BEST_FEW, FOLLOW, PARALLEL, CLOCK) = range(16, 25)
(RUN_HEAD, SCORES, KINDS, LIMITS, SHARED, DRAFT_ROWS, BOOKS) = range(25, 32)
OBSERVED = 32  # whether trees are noted, for observers
WISHED = 33  # draft tokens that the first step is to have, or AS_MANY_AS_PAY
# Of a step: rows that decode and tokens that these emit; tokens of prompts, of the whole forward, and of the widest tree.
DECODING, SAID, FED, TOKENS, WIDEST = range(34, 39)
NUMBERS = 39
# Path probability that a node must have, at least and now; seconds that drafting takes, and that the call may take; what a call
# of attention costs.
(LEAST_PRICE, PRICE, DRAFTING, LONGEST, CALL) = range(5)
# A row: its number with the drafter; tokens that the cache holds, that may still be emitted, that there are positions for, of
# prompt and answer; UNTIL: number of the step at which it is drafted for; ACTIVE: it is, at this step; tokens EMITTED, and
# those of them that the drafter knows; of an answer that is given, where it stands and its tokens; where tokens that end the
# answer stand, and how many; nodes of its tree; sums: draft tokens, accepted ones; PHASE: see below; prompt tokens that it
# prefills at the first step, where they stand (int32) and how many.
(NUMBER, PAST, LEFT, TEXT_LEFT, LENGTH, UNTIL, ACTIVE, EMITTED, KNOWN, GIVEN_AT, GIVEN, STOPS_AT, STOPS) = range(13)
(SIZE, DRAFT_TOKENS, ACCEPTED, PHASE, CHUNK_AT, CHUNK) = range(13, 19)
COLUMNS = 19
DECODES, ENDS_PREFILL, PREFILLS = range(3)  # PREFILLS: still, behind this step; then it is the only one
BEGAN, DRAWN, COMPUTED, NOTED, VERIFIED, ADDING, RECYCLED = range(7)  # of a step: clock readings, seconds, accepted tokens
BUFFER = 6  # of keys and values: address, and sizes in 2 bytes, see `batch_kernel.move`

LAYOUT: Layout = {
    "numbers": (np.int64, (NUMBERS,)),
    "reals": (np.float64, (5,)),
    "rows": (np.int64, ("rows", COLUMNS)),
    "debts": (np.float64, ("rows",)),  # see backoff.py
    "emitted": (np.int64, ("rows", "emitted")),  # what the drafter did not know at the beginning comes first
    "by_source": (np.int64, ("rows", "sources")),  # accepted tokens; the first two are GRAMMAR and GIVEN
    "times": (np.float64, ("steps", 7)),
    "log": (np.float64, ("steps", cost.LOGGED)),  # see `StepLog`
    "lengths": (np.int64, ("rows",)),
    "tree_sizes": (np.int64, ("rows",)),
    "pasts": (np.int64, ("rows",)),
    "limits": (np.int64, ("rows", 5)),
    "spans": (np.int64, ("rows", 2)),
    "accepting": (np.int64, ("words",)),  # see `planner.accept_rows`
    "said": (np.int32, ("rows", "emitted")),
    "growing": (np.int64, (planner.OF_SCRATCH + 1,)),  # see `planner.grow_rows`
    "choice": (np.int64, (goodput.CHOICE,)),
    "following": (np.int64, ("words",)),  # see `best_kernel.follow_floats`
    "fed": (np.int64, (2, "tokens")),  # ids and positions, those behind these
    "parents": (np.int32, ("tokens",)),
    "wanted": (np.int64, ("tokens",)),  # those whose scores are
    "meta": (np.int32, ("kinds", "tokens", FIELDS)),
    "known": (np.int64, ("tokens",)),  # best tokens
    "moves": (np.int64, (3, "tokens")),  # slots, and positions, see `SlotCache.move`
    "few": (np.int64, (best_kernel.FEW_TASK,)),
    "asked": (np.int64, ("tokens",)),  # and what is found there, see `best_kernel.best_few_floats`
    "few_ids": (np.int32, ("tokens", FEW)),
    "few_scores": (np.float32, ("tokens + 4", FEW)),
    "few_bits": (np.int16, ("tokens", FEW)),
    "few_tokens": (np.int32, ("tokens",)),  # the nodes behind which these stand
    "few_parents": (np.int32, ("tokens",)),
    "few_sizes": (np.int64, ("rows",)),  # of their trees
    "few_before": (np.int32, ("rows", 2)),
    "buffers": (np.int64, ("buffers", BUFFER)),
    "timespec": (np.int64, (2,)),
    "seen": (np.int32, ("steps", "rows", 4, "tokens")),  # for observers: trees, TREE_TOKENS ...
    "seen_reach": (np.float32, ("steps", "rows", "tokens")),  # their probabilities
    "seen_path": (np.int64, ("steps", "rows", "tokens")),  # nodes that were walked along
    "seen_counts": (np.int64, ("steps", "rows", 3)),  # nodes of the tree, of the path; tokens emitted
}
of_call = unpacker("DraftedSteps", LAYOUT)
