"""How many drafts pay. In: the rows' draft trees and how steps went. Out: the part of each tree that the next forward holds.

Every node has the probability that the model says it. All rows' nodes stand in one queue, the most probable first. A node is
worth the time in which the job would otherwise say as much, so the forward takes those nodes for which

    seconds that a token is worth x (rows + probabilities of the nodes) - seconds of the forward

is largest: time saved by what is said less time spent. Attention pads trees to the widest, so queues of narrower ones are tried
too. A token is worth its share of a plain step, divided by how many times faster than plain decoding the job has been of late,
so that this holds for any number of rows. It is goodput (arXiv 2406.14066) over the whole job rather than in each step by
itself, and none is the right number where drafts do not pay. Costs are those of cost.py. Without a profile the first steps try
several sizes; later ones look left and right, as often as that costs a set share of the time.

Probabilities are right on average, but not for each kind of tree: at first those that promise most keep least. So what trees of
about the same promise (the sum over their first nodes) have kept is remembered, and their nodes count accordingly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from lookahead.budget.cost import LATEST, SIZE, SIZES, CostCurve, bucket, faster_of, observe, place_of, seconds_of
from lookahead.draft.tree import DraftTree, root_only
from lookahead.trie.suffixes import inlined, kernel

TRIALS = (15, 3, 0, 7) * 3  # draft tokens of the first steps with one row; with several, times the root of their number
LOOKS = (2.0, 0.5, 1.4, 0.7)  # later: these multiples of the best number of draft tokens, in turn
LOOK_SHARE = 0.004  # of the time goes into looking
LOOK_APART = 20  # steps between two looks at least
MEMORY = 0.99  # weight of the past at each step: about 100 steps count
CAUTION = 0.8  # a node is drafted if its probability is worth this part of what it costs now

PROMISED, KEPT = 0, 1  # rows of the record: draft tokens that trees of about one promise should have kept, and that they did
PROMISES = np.array([0.25, 0.4, 0.6, 0.85, 1.15, 1.5, 2.0, 2.7, 3.6, 5.0])  # of the first FIRST draft tokens
FIRST = 15
DOUBT = 10.0  # tokens kept as promised, before any were
FADING = 0.998  # weight of the past in the record at each draft

EMPTY = 8  # drafts in a row without a token that pays, after which a row rests
LONGEST_REST = 8  # steps
NARROWER = 4  # of the widths of trees that are tried, the next is narrower by one in so many
SECANTS = (1, 8, 64)  # further tokens over which the price of one more is taken
AS_MANY_AS_PAY = -1
SAVED, PRICE, PADDING = 0, 1, 2  # what choosing tells
# Sums over steps, the past fading: steps of plain decoding that were saved or taken, and what was spent, in such steps as well
# (a job's first forward may take a hundred times as long as others, and is to count as one). Then seconds of a step outside of
# its forward, and seconds that may go into looks.
PLAIN, SPENT, OTHER, SPARE = range(4)


class GoodputBudget:
    """The size of each forward that saves most time.

    price: path probability below which nodes need not be drafted. speedup: over plain decoding, by what steps should have
    taken; None before the first.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self.price = 0.0
        self._looks = itertools.cycle(LOOKS)
        self._steps = self._looked = 0  # observed; number of the latest that looked
        self._others = np.zeros(LATEST)
        self._sums = np.zeros(4)
        self._told = np.zeros(3)
        self._drafted = 0  # draft tokens of the latest forward that had any
        self._record = np.zeros((2, len(PROMISES) + 1))
        self._doubt = np.array([DOUBT])  # in units of the record
        self._bets: np.ndarray | None = None  # of each tree of the latest cut: its promise's column, tokens it should keep

    @property
    def speedup(self) -> float | None:
        return float(self._sums[PLAIN] / self._sums[SPENT]) if self._sums[SPENT] else None

    @property
    def tries(self) -> bool:
        """The next step is to be of a set size, as costs are unknown."""
        return not self.curve.known and self._steps < len(TRIALS)

    def free(self, rows: int) -> int:
        """Draft tokens of a row that come at no cost: if it decodes alone, those that its forward will have room for."""
        return self._drafted if rows == 1 else 0

    def cut(self, trees: Sequence[DraftTree], fed: int = 0, keys: int = 0, chains: bool = False) -> list[DraftTree]:
        """The most probable nodes of all trees, as many as pay.

        fed: tokens of prompts that the forward takes in beside. keys: tokens in the cache of all these rows. Where there are
        fewer nodes than a forward of one of SIZES takes, one tree is filled up, as forwards of other sizes are slow on some
        CPUs; not if it must be a chain.
        """
        sizes = np.array([len(tree) for tree in trees])
        probabilities = trees[0].probabilities if len(trees) == 1 else np.concatenate([tree.probabilities for tree in trees])
        kept, self._bets = np.empty(len(trees), np.int64), np.empty((len(trees), 2))
        drafted = self._choose(probabilities, sizes, fed, keys, not (chains or fed or self.curve.bucketed), kept, self._bets)
        padding = int(self._told[PADDING])
        self._drafted = drafted + padding or self._drafted
        chosen = [tree if count == len(tree) else tree.first(count) for tree, count in zip(trees, kept.tolist(), strict=True)]
        if padding:
            filled = int(np.where(kept > 1, kept, len(probabilities)).argmin())  # the smallest that has drafts
            chosen[filled] = chosen[filled].filled_up(padding)
        return chosen

    @property
    def waits(self) -> bool:
        """The latest cut is to be settled."""
        return self._bets is not None

    def settle(self, accepted: Sequence[int]) -> None:
        """Of each tree of the latest cut so many draft tokens were accepted; -1, or where the list ends: nobody knows.

        Once for each cut, or never; without one nothing happens.
        """
        if self._bets is not None:
            settle(self._bets, np.array(accepted, np.int64), self._record, self._doubt)
            self._bets = None

    def observe(
        self,
        tokens: int,
        forward_seconds: float,
        step_seconds: float,
        rows: int = 1,
        keys: int = 0,
        width: int = 0,
        said: int = 1,
        stands_for: int = 1,
    ) -> None:
        """A step without prompts: its forward over `tokens` tokens and the whole of it took so long; `said` tokens came out.

        rows, keys, width: see `CostCurve`. stands_for: steps like it that are not told.
        """
        curve, sums = self.curve, self._sums
        self._steps += 1
        learn(
            shape_of(tokens, curve.bucketed), rows, keys, width, forward_seconds, step_seconds, said, stands_for, self._steps,
            curve.table, curve.terms, curve.latest, self._others, sums,
        )  # fmt: skip

    def _choose(
        self,
        probabilities: np.ndarray,
        sizes: np.ndarray,
        fed: int,
        keys: int,
        fills: bool,
        kept: np.ndarray,
        bets: np.ndarray,
    ) -> int:
        """Fill `kept` with the nodes of each tree that the next forward takes, roots included, and `bets`.

        Returns the draft tokens among them.
        """
        curve, told, rows = self.curve, self._told, len(sizes)
        known = probabilities, sizes, fed, keys, self._sums[OTHER], max(1.0, self.speedup or 1.0), curve.bucketed, fills
        arrays = curve.table, curve.terms, self._record, self._doubt, kept, bets, told
        if self.tries:
            return choose(*known, nodes_near(TRIALS[self._steps] * rows**0.5, rows + fed), *arrays)
        best = choose(*known, AS_MANY_AS_PAY, *arrays)
        self.price = CAUTION * told[PRICE]
        if self._steps - self._looked >= LOOK_APART and self._sums[SPARE] > 0:
            saved = told[SAVED]
            best = choose(*known, nodes_near(max(best, 3) * next(self._looks), rows + fed), *arrays)
            self._sums[SPARE] -= saved - told[SAVED]
            self._looked = self._steps
        return int(best)


def nodes_near(nodes: float, others: int) -> int:
    """About so many draft tokens, which make a forward with `others` other tokens one of SIZES."""
    return max(0, int(SIZES[np.abs(SIZES - others - nodes).argmin()]) - others)


def warm_up() -> None:
    """Compile the kernels (once per machine), so that no step waits for it."""
    budget = GoodputBudget(CostCurve())
    for step in range(len(TRIALS) + 1):
        budget.cut([root_only(0), root_only(0)] if step % 2 else [root_only(0)])
        budget.settle([0, 0] if step % 2 else [0])
        budget.observe(1, 1e-3, 1e-3)


@kernel
def learn(
    tokens, rows, keys, width, forward_seconds, step_seconds, said, stands_for, steps, table, terms, latest, others, sums
):
    """See `GoodputBudget.observe`. steps: so far, this one included. others: float64 [LATEST], seconds outside of forwards."""
    observe(tokens, rows, keys, width, forward_seconds, table, terms, latest)
    others[(steps - 1) % LATEST] = step_seconds - forward_seconds
    sums[OTHER] = faster_of(others, min(steps, LATEST))
    spent = seconds_of(tokens, rows, keys, width, table, terms, 0) + sums[OTHER]
    plain = seconds_of(rows, rows, keys, 0, table, terms, 0) + sums[OTHER]
    sums[SPENT] = MEMORY * sums[SPENT] + stands_for * spent / plain
    sums[PLAIN] = MEMORY * sums[PLAIN] + stands_for * said / rows
    sums[SPARE] += LOOK_SHARE * stands_for * spent


class Rest:
    """When a row is drafted for: at each step while drafts pay; while none does, ever more rarely, down to one step in 9."""

    def __init__(self) -> None:
        self._empty = 0  # drafts in a row of which nothing was worth verifying
        self._left = 0  # steps without a draft

    def is_over(self) -> bool:
        """To be asked once a step: the row is to be drafted for."""
        self._left -= 1
        return self._left < 0

    def drafted(self, tokens: int) -> None:
        """So many draft tokens were worth verifying."""
        self._empty = 0 if tokens else self._empty + 1
        self._left = 0 if self._empty < EMPTY else min(LONGEST_REST, 1 << (self._empty - EMPTY))


@kernel
def choose(
    probabilities, sizes, fed, keys, other, speed, bucketed, fills, wanted, table, terms, record, doubt, kept, bets, told
):
    """Take draft nodes, the most probable first; returns how many and fills kept (int64 [rows], roots included).

    probabilities: of the nodes of all trees, parents before children. wanted: take so many; or AS_MANY_AS_PAY.
    record: see PROMISED. doubt: float64 [1], in its units. bets: float64 [rows, 2], takes of each tree the record's column and
    the tokens that it should keep.
    fills: a forward that takes all nodes is filled up to one of SIZES.
    told: float64 [3], takes the seconds that the step saves, the probability at which one more node would pay, and the tokens
    that fill the forward up.

    Attention pads all trees to the widest, so other widths than that of the most probable nodes are tried, down to 2.
    """
    rows = len(sizes)
    starts = np.cumsum(sizes) - sizes
    owners = np.empty(len(probabilities), np.int64)
    worth = (seconds_of(rows, rows, keys, 0, table, terms, 0) + other) / (rows * speed)  # seconds, of one token
    counts_as = np.empty(rows)
    for row in range(rows):
        column = np.searchsorted(PROMISES, promised(probabilities, starts[row], min(sizes[row], 1 + FIRST)))
        counts_as[row] = (record[KEPT, column] + doubt[0]) / (record[PROMISED, column] + doubt[0])
        bets[row, 0] = column
    most = rows * worth - seconds_of(shape_of(rows + fed, bucketed), rows, keys, 0, table, terms, 0)
    best, widest, padding = 0, 1, 0
    kept[:] = 1
    limit = len(probabilities)
    while limit > 1:
        saved, taken, width, filling = _take(
            probabilities, sizes, starts, counts_as, limit, fed, keys, worth, bucketed, fills, wanted, table, terms, owners
        )
        if saved > most or wanted >= 0:
            most, best, widest, padding = saved, taken, width, filling
            kept[:] = 1
            for node in range(taken):
                kept[owners[node]] += 1
        if wanted >= 0 or rows == 1:
            break
        limit = min(limit, width)
        limit -= max(1, limit // NARROWER)
    for row in range(rows):
        bets[row, 1] = promised(probabilities, starts[row], kept[row])
    tokens = shape_of(rows + fed + best, bucketed) + padding
    now, price = seconds_of(tokens, rows, keys, widest, table, terms, 0), np.inf
    for more in SECANTS:
        larger = shape_of(rows + fed + best + padding + more, bucketed)
        price = min(price, (seconds_of(larger, rows, keys, widest, table, terms, 0) - now) / more)
    told[SAVED], told[PRICE], told[PADDING] = most, max(0.0, price) / worth, padding
    return best


@kernel
def settle(bets, accepted, record, doubt):
    """See `GoodputBudget.settle`. bets: as `choose` gives them."""
    for row in range(len(accepted)):
        column, should_keep = int(bets[row, 0]), bets[row, 1]
        if should_keep > 0 and accepted[row] >= 0:
            doubt[0] /= FADING  # all that was recorded weighs so much less
            weight = doubt[0] / DOUBT
            record[PROMISED, column] += weight * should_keep
            record[KEPT, column] += weight * accepted[row]
            if weight > 1e9:
                record[:] /= weight
                doubt[0] = DOUBT


@inlined
def _take(probabilities, sizes, starts, counts_as, limit, fed, keys, worth, bucketed, fills, wanted, table, terms, owners):
    """Of trees of at most `limit` nodes: (seconds saved, draft nodes, width of the widest tree, tokens that fill up) at best.

    owners: int64 [nodes], takes the row of each node in the order in which they are taken.
    """
    rows = len(sizes)
    nodes = np.minimum(sizes, limit).sum() - rows
    heads = np.ones(rows, np.int64)  # next node of each tree
    reach = np.ones(rows)  # least probability of its nodes, that one included
    ahead = np.empty(rows)  # what that one counts; -1: there is none
    for row in range(rows):
        ahead[row] = -1.0
        if sizes[row] > 1 and limit > 1:
            reach[row] = min(1.0, probabilities[starts[row] + 1])
            ahead[row] = counts_as[row] * reach[row]
    exactly = wanted >= 0
    wanted = min(wanted, nodes) if exactly else nodes
    said = float(rows)
    most, best, taken = -np.inf, 0, 0
    width = widest = 1
    padding = place = 0
    while taken < wanted:
        owner = 0
        for row in range(1, rows):
            if ahead[row] > ahead[owner]:
                owner = row
        said += min(1.0, ahead[owner])
        owners[taken] = owner
        taken += 1
        heads[owner] += 1
        width = max(width, heads[owner])
        ahead[owner] = -1.0
        if heads[owner] < min(limit, sizes[owner]):
            reach[owner] = min(reach[owner], probabilities[starts[owner] + heads[owner]])
            ahead[owner] = counts_as[owner] * reach[owner]
        tokens, filling = shape_of(rows + fed + taken, bucketed), 0
        place = place_of(tokens, table, place)
        if tokens != table[SIZE, place]:
            if taken < (wanted if exactly else len(probabilities) - rows):
                continue
            if fills and tokens < table[SIZE, place + 1]:
                filling = int(table[SIZE, place + 1]) - tokens
        saved = said * worth - seconds_of(tokens + filling, rows, keys, width, table, terms, place)
        if saved > most or exactly:
            most, best, widest, padding = saved, taken, width, filling
    return most, best, widest, padding


@inlined
def promised(probabilities, start, count):
    """Draft tokens that a tree's first `count` nodes should keep, its root not counted."""
    total, least = 0.0, 1.0
    for node in range(start + 1, start + count):
        least = min(least, probabilities[node])
        total += least
    return total


@inlined
def shape_of(tokens, bucketed):
    """Tokens of a forward, padding included."""
    return bucket(tokens) if bucketed else tokens
