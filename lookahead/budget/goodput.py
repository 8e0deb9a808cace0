"""How many drafts pay. In: the rows' draft trees and how steps went. Out: the part of each tree that the next forward holds.

Every node has the probability that the model emits it. All rows' nodes stand in one queue, the most probable first. A node is
worth the time in which the job would otherwise emit as much, so the forward takes those nodes for which

    seconds that a token is worth x (rows + probabilities of the nodes) - seconds of the forward

is largest: time saved by what is emitted less time spent. Attention pads trees to the widest unless they go alone, so queues of
narrower ones are tried too. A token is worth its share of a plain step, divided by how many times faster than plain decoding
the job has been recently with about as many rows. It is goodput (arXiv 2406.14066) over the whole job rather than in each step
by itself, and none is the right number where drafts do not pay. Costs are those of cost.py. Without a profile the first steps
try several sizes; later ones look left and right, as often as that costs a set share of the time. Sizes near the usual one that
the job has not seen come first, as many steps each as make them believed: a profile may have been measured in a bad moment, and
a size that is wrongly seen as expensive would be avoided permanently.

On CPUs a forward of another size than the one before takes 2 to 5 % longer, so sizes change for good reason only: there is a
usual one for each number of rows, which would have saved most recently, and leaving it costs the way back, too.

Nodes that are not taken were drafted in vain. So the next trees end where nodes become much less probable than the least one
that was taken.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import numpy as np

from lookahead.budget.backoff import APART
from lookahead.budget.books import (
    BESIDE,
    BESIDE_DRAFTED,
    GAINED,
    GAINS,
    PLAIN,
    PRICE,
    ROWS_PLAIN,
    ROWS_SPENT,
    SAVED,
    SPARE,
    SPENT,
    books_arrays,
    books_on,
    note_beside,
)
from lookahead.budget.cost import (
    BELIEVED,
    BUCKETED,
    SEEN,
    SIZE,
    SIZES,
    UP,
    CostCurve,
    MeasuredStep,
    StepLog,
    bucket,
    observe,
    place_of,
    resized,
    seconds_of,
    shape_of,
    step_of,
)
from lookahead.budget.profile import Forward
from lookahead.native.kernels import carray, float32_at, inlined, int64_at, kernel
from lookahead.native.threads import run_in

TRIALS = (15, 3, 0, 7) * 3  # draft tokens of the first steps with one row; with several, times the root of their number
LOOKS = (2.0, 0.5)  # later: these multiples of the best number of draft tokens, in turn
LOOK_SHARE = 0.002  # of the time goes into looking, at one step in APART at most
NEAR = (1, -1, 2, -2, 3, -3)  # columns from the usual size in SIZES, of those that are looked at first if not believed
MEMORY = 0.99  # weight of the past at each step, choice or draft: about 100 count
CHANGED = 1.03  # times what it takes otherwise: a forward of another size than the one before, unless shapes are bucketed
MARGIN = 0.5  # of the least probability that was taken at the latest choice: what is less probable is not to be drafted
NARROWER = 4  # of the widths of trees that are tried, all even, the next is narrower by one in that many
SECANTS = (1, 8, 64)  # further tokens over which the price of one more is taken
AS_MANY_AS_PAY = -1
TOLD = 8  # steps that are learned from at once: behind a forward, nothing that a kernel needs is in the caches any more


class GoodputBudget:
    """The size of each forward that saves most time.

    price: path probability below which nodes need not be drafted. returns: time that the latest choice's drafts save, in times
    that drafting takes; infinite where that is not known. drafting: seconds that it takes; 0: not known yet. drafted: draft
    tokens of the latest forward that had any. before: tokens of the latest forward.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self.price, self.returns = 0.0, np.inf
        self.drafting = 0.0
        self._looks = itertools.cycle(LOOKS)
        self._steps = self._looked = 0  # observed; number of the latest that looked
        self._saved = 0.0
        self._again = self._unseen = 0  # steps that are still to look at a size that is not believed; that size
        self.drafted = self.before = 0
        self.books = books_on(curve)
        self._state, self._table = self.books.state, self.books.table
        self._told = StepLog(TOLD)  # steps to be learned from

    @property
    def tries(self) -> bool:
        """The next step is to be of a set size, as costs are unknown."""
        return not self.curve.known and self._steps < len(TRIALS)

    @property
    def speed(self) -> float:
        """Times as fast as plain decoding recently, by the costs of forwards; infinite where that is not known."""
        spent = self._state.item(SPENT)
        return self._state.item(PLAIN) / spent if spent else np.inf

    def free(self, rows: int) -> int:
        """Draft tokens of each row that come at next to no cost: those that make a forward of the latest size an even one."""
        return self.drafted if rows == 1 else self.drafted // rows | 1

    def choose(
        self,
        probabilities: np.ndarray,
        trees: np.ndarray,
        plain: Forward | None = None,
        fed: int = 0,
        chains: bool = False,
    ) -> tuple[list[int], int, int]:
        """The most probable nodes of all trees, as many as pay: (of each tree the first that many, root included; tokens more,
        which are not drafts; the number of the tree that takes those).

        probabilities: float32, of paths; those of a tree begin at one of `trees`[:, 0] and are as many as `trees`[:, 1] states
        (int64), root included, parents before children. plain: the forward of all rows that decode if none had a draft: a token
        each, also of those without a tree; None: of the rows with trees, and nothing is in the cache. fed: tokens of prompts
        that the forward prefills alongside. Where there are fewer nodes than make a forward one of SIZES, one tree is filled
        up, as other sizes are slow on some CPUs; not if it must be a chain.
        """
        count = len(trees)
        plain = plain or Forward(count, count)
        self.make_room(count)
        wanted = self.wished(plain.rows, fed)
        arrays = np.ascontiguousarray(probabilities, np.float32), np.ascontiguousarray(trees, np.int64)
        sizes = len(arrays[0]), count, plain.rows, plain.keys, plain.calls
        at = arrays[0].ctypes.data, arrays[1].ctypes.data, self.books.address
        drafted, padding, filled, tokens = self._choose(*at, *sizes, fed, chains, self.before, wanted)
        self.drafted = (drafted and tokens - plain.rows - fed) or self.drafted  # looks aside
        self.returns = np.inf
        if wanted == AS_MANY_AS_PAY:
            if self.drafting:
                more = self._state.item(BESIDE_DRAFTED) - self._state.item(BESIDE)  # accounting takes longer, too
                self.returns = self._state.item(GAINED) / max(self.drafting, more)
            self.price = self._state.item(PRICE)
            if not fed and self.is_to_look:
                look = self.look(drafted, tokens, plain.rows, self.before)
                drafted, padding, filled, tokens = self._choose(*at, *sizes, fed, chains, self.before, look)
                self.looked()
        self.before = tokens
        return self.books.kept[:count].tolist(), padding, filled

    def wished(self, rows: int, fed: int = 0) -> int:
        """Draft tokens that the next step, of that many rows that decode, is to have. fed: see `choose`."""
        return nodes_near(TRIALS[self._steps] * rows**0.5, rows + fed) if self.tries else AS_MANY_AS_PAY

    @property
    def is_to_look(self) -> bool:
        """The next choice, of a step that only decodes, is to be of a size that is looked at."""
        return self._again > 0 or (self._steps - self._looked >= APART and self._state.item(SPARE) > 0)

    def drafted_in(self, seconds: float) -> None:
        """The latest drafts, and their choice, took so long. Where it is more than before, another program may be why:
        like the pace of forwards, what drafting seems to take rises by UP at most.
        """
        self.drafting = min(seconds, UP * self.drafting or seconds)

    def observe(self, step: MeasuredStep) -> None:
        """A step without prompts."""
        self._steps += 1
        self.before = int(step.forward.tokens)
        self._told.add(step, bucket(self.before) if self.curve.bucketed else None)
        if len(self._told) == TOLD or (not self.curve.known and self._steps <= len(TRIALS)):
            learn(self._told.take(), self.books.addresses)

    def look(self, drafted: int, tokens: int, rows: int, before: int) -> int:
        """Draft tokens of a step that looks; that many, of how many tokens, would pay. before: tokens of the latest forward."""
        self._saved, self._looked = self._state.item(SAVED), self._steps
        if self._again:
            self._again -= 1
            return max(0, self._unseen - rows)
        if not self.curve.known and self._table[SEEN, int(np.searchsorted(SIZES[:-1], rows))] < BELIEVED:
            self._again, self._unseen = BELIEVED - 1, rows  # what all is weighed against: a plain step of that many rows
            return 0
        for near in NEAR if tokens == before else ():
            column = int(np.searchsorted(SIZES, tokens)) + near
            if 0 <= column < len(SIZES) and SIZES[column] >= rows and self._table[SEEN, column] < BELIEVED:
                self._again, self._unseen = BELIEVED - 1, int(SIZES[column])
                return self._unseen - rows
        return nodes_near(max(drafted, 3) * next(self._looks), rows)

    def looked(self) -> None:
        """After the choice of that many."""
        self._state[SPARE] -= self._saved - self._state.item(SAVED)

    def _choose(self, *told: float) -> Sequence[int]:
        """See `choose`: its arguments, and what it leaves."""
        task = array("q", (*map(int, told), *[0] * (CHOICE - TAKEN)))
        run_in(1, choose, task.buffer_info()[0])
        return task[TAKEN:]

    def make_room(self, trees: int) -> None:
        """For that many trees in one choice."""
        books = self.books
        if (more := trees - len(books.kept)) > 0:
            books.sizes["trees"] = trees
            books.kept = np.pad(books.kept, (0, more))
            books.refresh()


def nodes_near(nodes: float, others: int) -> int:
    """About that many draft tokens, which make a forward with `others` other tokens one of SIZES."""
    return max(0, int(SIZES[np.abs(SIZES - others - nodes).argmin()]) - others)


def warm_up() -> None:
    """Compile the kernels (once per machine), so that no step waits for it."""
    budget = GoodputBudget(CostCurve())
    budget.choose(np.ones(1, np.float32), np.array([[0, 1]]))
    budget.observe(MeasuredStep(Forward(1), 1, 1e-3, 1e-3))  # without a profile it is learned from at once
    bucket(1)


@kernel
def learn(told, addresses):
    """See `GoodputBudget.observe`. told: float64 [steps, 12], see `StepLog`: those since the last time. addresses: of BOOKS."""
    books = books_arrays(addresses)
    table, terms, state, of_sizes = books.table, books.terms, books.state, books.of_sizes
    for k in range(len(told)):
        note_beside(step_of(told[k]), books.beside, state)
    for k in range(len(told)):
        step = step_of(told[k])
        forward, stands_for, rows = step.forward, step.stands_for, step.forward.rows
        observe(forward, step.forward_seconds, table, terms, books.latest)
        spent = seconds_of(forward, forward.tokens, table, terms, 0) + state[BESIDE + (step.draft_seconds > 0)]
        plain = seconds_of(resized(forward, rows, 0), rows, table, terms, 0) + state[BESIDE]
        column = place_of(rows, table, 0)
        steps_spent, steps_plain = stands_for * spent / plain, stands_for * step.emitted / rows
        state[SPENT] = MEMORY * state[SPENT] + steps_spent
        state[PLAIN] = MEMORY * state[PLAIN] + steps_plain
        of_sizes[ROWS_SPENT, column] = MEMORY * of_sizes[ROWS_SPENT, column] + steps_spent
        of_sizes[ROWS_PLAIN, column] = MEMORY * of_sizes[ROWS_PLAIN, column] + steps_plain
        state[SPARE] += LOOK_SHARE * stands_for * spent


# What `choose` receives, 8 bytes each: addresses of probabilities (float32), of trees (int64 [trees, 2]) and of the books' own
# array of addresses; numbers of probabilities and of trees; the forward's rows, keys and calls if none had a draft; and `fed`,
# `chains`, `before` and `wanted`. Behind these it leaves what it has chosen: draft tokens, tokens that fill the forward up, the
# number of the tree that those are to join, and the forward's tokens.
(PROBABILITIES, TREES, OF_BOOKS, NODES, COUNT, PLAIN_ROWS, KEYS, CALLS, FED, ARE_CHAINS, BEFORE, WANTED) = range(12)
(TAKEN, PADDING, FILLED, TOKENS) = range(12, 16)
CHOICE = 16


def choose(address):
    """Take draft nodes, the most probable first; how many of each tree, root included, the books' `kept` holds then.

    See `GoodputBudget.choose`. address: of the arguments, see above. before: tokens of the latest forward. wanted: take that
    many; or AS_MANY_AS_PAY. Gains are updated, but not alongside prompts.

    Attention pads trees to the widest or takes each alone, so other widths than that of the most probable nodes are tried, too,
    down to 2.
    """
    told = carray(int64_at(address), (CHOICE,))
    probabilities = carray(float32_at(told[PROBABILITIES]), (told[NODES],))
    trees = carray(int64_at(told[TREES]), (told[COUNT], 2))
    rows, fed, before, wanted = told[PLAIN_ROWS], told[FED], told[BEFORE], told[WANTED]
    plain = Forward(rows, rows, told[KEYS], np.int64(0), told[CALLS])
    books = books_arrays(int64_at(told[OF_BOOKS]))
    table, terms, state, of_sizes, kept = books.table, books.terms, books.state, books.of_sizes, books.kept
    count, bucketed = told[COUNT], terms[BUCKETED] > 0
    fills = not (told[ARE_CHAINS] or fed > 0 or bucketed)
    speed = max(1.0, _speed(rows, table, state, of_sizes))
    of_plain = seconds_of(resized(plain, rows, 0), rows, table, terms, 0)
    worth = (of_plain + state[BESIDE]) / (rows * speed)  # seconds, of one token
    total, limit = np.int64(0), np.int64(0)
    for tree in range(count):
        total += trees[tree, 1] - 1
        limit = max(limit, trees[tree, 1])
    owners = np.empty(total, np.int64)
    tokens = shape_of(rows + fed, fed, bucketed)
    usual, gain, gains = float(tokens), 0.0, of_sizes[GAINS + place_of(rows, table, 0)]
    for column in range(len(gains)):
        if gains[column] > gain and table[SIZE, column] > tokens:
            usual, gain = table[SIZE, column], gains[column]
    undrafted = seconds_of(resized(plain, tokens, 0), rows if fed > 0 else tokens, table, terms, 0)
    before = 0 if bucketed or fed > 0 else before  # prompts are of any size: each choice changes it
    most = rows * worth - undrafted * changed(tokens, before, usual)
    saves = np.full(len(gains), -np.inf)
    best, widest, padding = 0, 1, 0
    for tree in range(count):
        kept[tree] = 1
    while limit > 1:
        saved, taken, width, filling = _take(
            probabilities, trees, total, limit, plain, fed, worth, bucketed, fills, wanted, table,
             terms, before, usual, saves, owners,
        )  # fmt: skip
        if saved > most or (wanted >= 0 and taken > 0):
            most, best, widest, padding = saved, taken, width, filling
            for tree in range(count):
                kept[tree] = 1
            for node in range(taken):
                kept[owners[node]] += 1
        if wanted >= 0 or rows == 1:
            break
        width += width % 2  # an odd one takes as long
        limit = width if width < limit else limit - max(2, limit // NARROWER)
        limit += limit % 2
    for column in range(len(gains) if wanted < 0 and fed == 0 else 0):
        if saves[column] > -np.inf:
            gains[column] = MEMORY * gains[column] + (1 - MEMORY) * (saves[column] - (rows * worth - undrafted))
    filled = -1  # the smallest that has drafts
    for tree in range(count):
        if kept[tree] > 1 and (filled < 0 or kept[tree] < kept[filled]):
            filled = tree
    tokens = shape_of(rows + fed + best, fed, bucketed) + padding
    state[SAVED], state[GAINED] = most, np.inf
    if fed == 0:
        now, price = seconds_of(resized(plain, tokens, widest), tokens, table, terms, 0), np.inf
        for more in SECANTS:
            larger = shape_of(tokens + more, fed, bucketed)
            price = min(price, (seconds_of(resized(plain, larger, widest), larger, table, terms, 0) - now) / more)
        least = 1.0 if 0 < best < total else 0.0  # probability that was taken, where something was not
        for tree in range(count):
            if kept[tree] > 1:
                least = min(least, probabilities[trees[tree, 0] + kept[tree] - 1])
        state[PRICE] = max(price / worth, MARGIN * least)
        state[GAINED] = most + now * (changed(tokens, before, usual) - 1) - (rows * worth - undrafted)
    told[TAKEN], told[PADDING], told[FILLED], told[TOKENS] = best, padding, filled, tokens


@inlined
def _speed(rows, table, state, of_sizes):
    """Times as fast as plain decoding the job has been recently with about that many rows; 0 where nothing is known."""
    if state[SPENT] == 0:
        return 0.0
    column = place_of(rows, table, 0)
    overall = state[PLAIN] / state[SPENT]  # counts as a step with that many
    return (of_sizes[ROWS_PLAIN, column] + overall) / (of_sizes[ROWS_SPENT, column] + 1)


@inlined
def changed(tokens, before, usual):
    """Times what it takes otherwise, a forward of that many tokens after one of `before` (0: this does not matter), and the way
    back to the usual size.
    """
    if before == 0:
        return 1.0
    return 1 + (CHANGED - 1) * ((tokens != before) + (tokens != usual))


@inlined
def _take(
    probabilities, trees, total, limit, plain, fed, worth, bucketed, fills, wanted, table,
     terms, before, usual, saves, owners,
):  # fmt: skip
    """Of trees of at most `limit` nodes: (seconds saved, draft nodes, width of the widest tree, tokens that fill up) at best.

    total: draft nodes of all trees. before, usual: tokens of the latest forward, and of the usual one. saves: float64 [SIZES],
    takes the seconds that forwards of these sizes save, changes aside, where that is more. owners: int64 [total], takes the
    tree of each node in the order in which they are taken.
    """
    count, nodes, rows = len(trees), 0, plain.rows
    heads = np.ones(count, np.int64)  # next node of each tree
    ahead = np.empty(count)  # least probability of its nodes, that one included; -1: there is none
    for tree in range(count):
        nodes += min(trees[tree, 1], limit) - 1
        ahead[tree] = min(1.0, probabilities[trees[tree, 0] + 1]) if trees[tree, 1] > 1 else -1.0
    exactly = wanted >= 0
    wanted = min(wanted, nodes) if exactly else nodes
    said = float(rows)
    most, best, taken, least = -np.inf, 0, 0, 0.0
    width = widest = 1
    padding = place = 0
    while taken < wanted:
        owner = 0
        for tree in range(1, count):
            if ahead[tree] > ahead[owner]:
                owner = tree
        least = ahead[owner]
        said += least
        owners[taken] = owner
        taken += 1
        heads[owner] += 1
        width = max(width, heads[owner])
        ahead[owner] = -1.0
        if heads[owner] < min(limit, trees[owner, 1]):
            ahead[owner] = min(least, probabilities[trees[owner, 0] + heads[owner]])
        tokens, filling = shape_of(rows + fed + taken, fed, bucketed), 0
        place = place_of(tokens, table, place)
        if tokens != table[SIZE, place] and fed == 0:
            if taken < (wanted if exactly else total if rows == 1 else nodes):  # a row alone is not made narrower
                continue
            if fills and taken == total and tokens < table[SIZE, place + 1]:
                filling = int(table[SIZE, place + 1]) - tokens
        own = rows + taken if fed > 0 else tokens + filling
        seconds = seconds_of(resized(plain, tokens + filling, width), own, table, terms, place)
        saved = said * worth - seconds * changed(tokens + filling, before, usual)
        if tokens == table[SIZE, place]:
            saves[place] = max(saves[place], said * worth - seconds)
        if saved > most or exactly:
            most, best, widest, padding = saved, taken, width, filling
    for column in range(place + 1, len(saves) if taken == total else 0):
        further = table[SIZE, column] - rows - fed - taken
        size = int(table[SIZE, column])
        seconds = seconds_of(resized(plain, size, width), size, table, terms, place)
        saves[column] = max(saves[column], (said + further * least) * worth - seconds)
    return most, best, widest, padding
