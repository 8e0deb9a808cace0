"""Memory layout of the block that the native halves of a decode step (kernels.py) share with Python."""

from __future__ import annotations

import numpy as np

from lookahead.draft import planner
from lookahead.draft.recycled import BEST
from lookahead.native.kernels import Layout, unpacker

LEARN, GROW, CHOOSE, LAY_OUT = 1, 2, 4, 8  # stages of `propose`
RUNNER_UP, FOLLOW, COMMIT = 1, 2, 4  # stages of `accept`
# What a row does in a step: nothing, as it waits for another's prompt; prefill; prefill and score each token; prefill the last
# chunk, behind which it emits a token; decode.
WAITS, PREFILLS, SCORES_PROMPT, ENDS_PREFILL, DECODES = range(5)
UNKNOWN = 1056  # room for emitted tokens of a row that the drafter does not know yet: the longest branch and some

ROW = np.dtype(
    [
        ("number", np.int64),  # of the drafter's row
        ("phase", np.int64),
        ("follows", np.int64),  # it emits the best tokens, or its forced answer; else Python chooses
        ("drafted", np.int64),  # it is drafted for at this step; at the beginning of a step: it was at the latest
        ("indexed", np.int64),  # the drafter has read its text
        ("length", np.int64),  # tokens of prompt and answer
        ("left", np.int64),  # tokens that it may still emit
        ("most", np.int64),  # draft tokens of its tree
        ("positions_left", np.int64),
        ("emitted", np.int64),  # tokens in the block's `emitted`, the latest one among them
        ("known", np.int64),  # of them, to the drafter
        ("stops_at", np.int64),  # address of tokens that end the answer, int64, and how many
        ("stops", np.int64),
        ("forced_at", np.int64),  # address of what is left of an answer that is forced, int64, and its tokens
        ("forced", np.int64),
        ("forced_begin", np.int64),  # where in the block's `forced` the tokens begin and end that a grammar forces
        ("forced_end", np.int64),
        ("chunk_at", np.int64),  # address of the chunk that it prefills, int32, and its tokens
        ("chunk", np.int64),
        ("tree", np.int64),  # number of its tree among those that are grown; -1: none
        ("nodes", np.int64),  # of its tree, root included
        ("begin", np.int64),  # of its tokens in the step, and how many these are
        ("size", np.int64),
        ("scores", np.int64),  # its first row of scores
        ("new", np.int64),  # tokens that the step emitted, and nodes of the path along which it did, root included
        ("path", np.int64),
        ("ended", np.int64),
        ("steps", np.int64),  # sums: decode steps, draft tokens, accepted ones
        ("draft_tokens", np.int64),
        ("accepted", np.int64),
    ],
    align=True,
)
CALL = np.dtype(
    [
        ("stages", np.int64),
        ("rows", np.int64),  # in slots 0 ...
        ("step", np.int64),  # number of this step
        ("adaptive", np.int64),  # the budget chooses
        ("drafts", np.int64),  # rows are drafted for at this step
        ("learns", np.int64),  # the drafter learns from what is accepted
        ("recycles", np.int64),  # runner-up tokens are kept
        ("nodes", np.int64),  # of a tree, and on a path, at most, below the root
        ("depth", np.int64),
        ("own_trees", np.int64),  # trees stand in the block's `own_trees`
        ("threads", np.int64),  # that may grow trees
        ("price", np.float64),  # path probability that a node must have, now and at least
        ("least_price", np.float64),
        ("grown", np.int64),  # nodes of the latest trees, of several rows
        ("pending", np.int64),  # trees whose runner-up tokens are still to be added, and their nodes
        ("asked", np.int64),
        ("full", np.int64),  # some row's memory is to grow before the next step
        ("active", np.int64),  # rows that are drafted for
        ("decoding", np.int64),
        ("prefilled", np.int64),  # tokens of prompts
        ("trees", np.int64),
        ("tokens", np.int64),  # of the forward, and those that are scored
        ("scored", np.int64),
        ("expected", np.float64),  # draft tokens that are to be accepted: the sum of their probabilities
        ("emitted", np.int64),  # tokens, by rows that decode
        ("ended", np.int64),  # answers
        ("vocab", np.int64),
        ("scores_kind", np.int64),  # see best_tokens.py
        ("scores_at", np.int64),
        ("forced_at", np.int64),  # tokens that grammars force, int64
        ("accept_at", np.int64),  # C functions
        ("grow_at", np.int64),
        ("parallel_at", np.int64),
        ("shared_at", np.int64),  # blocks
        ("draft_rows_at", np.int64),
        ("table_at", np.int64),  # the arrays of the budget (budget/policy.py) and their sizes
        ("table_sizes", np.int64),
        ("curve_at", np.int64),
        ("curve_room", np.int64),
        ("state_at", np.int64),
        ("kept_at", np.int64),
        ("kept_room", np.int64),
        ("reach_at", np.int64),  # probabilities of the drafter's trees
        ("reach_room", np.int64),
        ("buckets", np.int64),
        ("share", np.float64),  # of the rows of a whole batch
    ],
    align=True,
)

STEP: Layout = {
    "call": (CALL, (1,)),
    "rows": (ROW, ("rows",)),
    "emitted": (np.int32, ("rows", "unknown")),  # of each row what the drafter does not know yet, and the token before
    "unknown": (np.int32, ("rows", "unknown")),  # the same, one row behind the other, for planner.accept_rows
    "by_source": (np.int64, ("rows", "sources")),  # accepted tokens; the first two are GRAMMAR and GIVEN
    "step_sources": (np.int64, ("sources",)),  # of the latest step
    "accepting": (np.int64, ("rows + 3", 3)),  # see `planner.accept_rows`
    "growing": (np.int64, (planner.OF_SCRATCH + 1,)),  # see `planner.grow_rows`
    "limits": (np.int64, ("rows", 5)),
    "spans": (np.int64, ("rows", 2)),
    "own_trees": (np.int32, ("rows", 4, "parallel")),  # where trees are not those that were grown
    "brought": (np.int64, ("rows",)),  # tokens of each row, and those of them, the last ones, that are scored
    "wanted": (np.int64, ("rows",)),
    "token_ids": (np.int32, ("tokens",)),  # of the step, and the parents of these within their trees
    "parents": (np.int32, ("tokens",)),
    "scored": (np.int64, ("tokens",)),  # tokens of the step that are
    "best": (np.int64, ("tokens",)),  # the best token of each row of scores, -1 where nobody has looked
    "new_tokens": (np.int64, ("tokens",)),  # of each row from `begin` on (prefill: from its last token on): what it emits
    "path": (np.int64, ("tokens",)),  # and the nodes along which it does
    "depths": (np.int64, ("tokens",)),
    "asked": (np.int64, ("tokens",)),  # rows of scores whose best few are wanted
    "few_ids": (np.int32, ("tokens", BEST)),  # these, and their scores
    "few_scores": (np.float32, ("tokens", BEST)),
    "few_tokens": (np.int32, ("tokens",)),  # the nodes behind which these stand
    "few_parents": (np.int32, ("tokens",)),
    "few_sizes": (np.int64, ("rows",)),  # of their trees
    "few_before": (np.int32, ("rows", 2)),
}
step_arrays = unpacker("Step", STEP)
