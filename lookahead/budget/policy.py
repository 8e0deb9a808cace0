"""Decides how many draft tokens pay, and whether drafting pays at all. In: costs, draft trees, measured steps. Out: what to
verify.

Costs: a `StepCost` holds seconds of a forward by tokens, measured before the first row (ladder.py). One pace, the median of
what recent steps took relative to it, scales all of it: a slow machine is slow for all sizes. What steps of a size take beyond
the pace corrects that size, as much as one more measurement does.

Choice: the nodes of all rows stand in one queue, the most probable first. Of each number of them

    seconds that a token is worth x (probabilities of the nodes) - seconds by which they make the forward longer

is computed, and the best is verified. A token is worth what the job, as fast as it has been recently, takes for one: goodput
(arXiv 2406.14066) over the job. None is best where the curve is steep.

Switch: each drafted step adds to an account what it cost, drafting included, less what a plain step takes for as many tokens.
Gains are kept up to CREDIT. Where the account reaches LIMIT plain steps, drafts go off: a sequential test (CUSUM, Page 1954)
whose price is known beforehand. After a pause a trial may lose TRIAL plain steps; each trial that fails doubles the pause, and
one that brings the account to 0 ends it. The account uses expected, not emitted tokens, and costs of the curve, not of the
clock: both scatter, their corrections hardly do. Now and then a few plain steps stand between drafted ones, so that the curve
is right for both.

Units: seconds; accounts in plain steps of the same number of rows.
"""

from __future__ import annotations

import math

import numpy as np

from lookahead.native.kernels import inlined, kernel

MEMORY = 0.99  # weight of the past in the speed of the job, at each step
LIMIT, TRIAL = 3.0, 0.25  # plain steps that drafts may lose until they go off, and in a trial
CREDIT = 10.0  # times as many may be lost behind as many that were gained: some parts of a text are harder than others
PAUSE = 64.0  # plain steps without drafts before the first trial; each further pause is twice as long
SHARE = 0.005  # of the time goes into plain steps between drafted ones, at most
BLOCK = 4  # plain steps in a row, compared with the drafted ones before them
FIRST = 3  # plain steps that a job begins with
RECENT = 9  # steps whose median is the pace
LATEST = 16.0  # steps of a size that count for its correction, at most
FARTHER = 0.5  # of a correction, for the next larger size
UNUSUAL = 0.2  # log: a step that deviates more from what is expected counts as if by so much
STRENGTH = 32.0  # accepted tokens that the drafter's own probabilities stand for
MARGIN = 0.5  # of the least probability that pays: what is less probable need not be drafted

# The state of a budget. Sums over steps, the past fading, in plain steps: what was emitted, what was spent. Tokens: expected,
# accepted. Seconds of steps outside of their forwards, at the curve's pace: plain, drafted. The pace. Plain steps that may go
# into blocks. Least probability that pays. Tokens of the latest forward. Share by which one of another size takes longer.
EMITTED, SPENT, EXPECTED, ACCEPTED, PLAIN_HOST, DRAFT_HOST, PACE, SPARE, PRICE, BEFORE, CHANGE = range(11)
# Of a step, see `Budget.observe`; share: see `StepCost.share`.
ROWS, FORWARD, OUT, HOPED, SECONDS, IN_FORWARD, DRAFTED, HOW_MANY, OF_ROWS = range(9)
# Of each number of rows (its binary digits): plain steps that were lost, length of the next pause, steps left of this one.
LOST, NEXT_PAUSE, LEFT = range(3)
# Of each size of a forward: tokens, seconds with 1 row and with a whole batch, log of the correction, measurements.
TOKENS, OF_ONE, OF_BATCH, CORRECTION, MEASURED = range(5)
# Of the steps so far: those that the pace is of, drafted ones since the latest block, plain ones left of a block, drafted ones.
STEPS, SINCE, BLOCK_LEFT, DRAFTED_STEPS = range(4)


SHAPE = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
UNKNOWN_COST = SHAPE, 1e-3 * (1 + SHAPE / 64)  # seconds of forwards of which nothing is known


class StepCost:
    """Seconds of a forward by its tokens, for 1 row and for `batch` rows. Between sizes and rows it is interpolated, beyond the
    largest size it continues; more tokens never cost less.

    sizes: increasing, tokens. seconds: float64 [2, sizes] (or [sizes]: for any rows). measured: how often each size was.
    buckets: forwards take one of these shapes only. change: share by which a forward of another size than the one before takes
    longer.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        seconds: np.ndarray,
        batch: int = 1,
        buckets: bool = False,
        measured: np.ndarray | float = 3.0,
        change: float = 0.0,
    ) -> None:
        self.table = np.zeros((MEASURED + 1, len(sizes)))
        self.table[TOKENS], self.table[OF_ONE : OF_BATCH + 1], self.table[MEASURED] = sizes, seconds, measured
        self.batch, self.buckets, self.change = batch, buckets, change

    def share(self, rows: int) -> float:
        """Interpolation weight of that many rows between one (0) and a whole batch (1)."""
        return min(1.0, (rows - 1) / (self.batch - 1)) if self.batch > 1 else 0.0


class Budget:
    """The draft budget of one engine.

    cost: of forwards as they were measured; None: only a rough shape is assumed. is_measured: it was.
    """

    def __init__(self, cost: StepCost | None = None) -> None:
        self.is_measured = cost is not None
        self.cost = cost = cost or StepCost(*UNKNOWN_COST, measured=0.0)
        self.state = np.zeros(CHANGE + 1)
        self.state[PACE], self.state[SPARE] = 1.0, 0.5
        self.state[CHANGE] = 2 * cost.change  # there and back
        self.by_rows = np.zeros((3, 16))
        self.recent = np.zeros(RECENT)  # log of seconds / the curve's, of the latest steps
        self.counts = np.zeros(DRAFTED_STEPS + 1, np.int64)
        self._kind = 0  # of the latest step: its rows' binary digits
        self._step = np.zeros(OF_ROWS + 1)
        self.curve, self.kept = np.zeros((3, 128)), np.zeros(64, np.int64)
        self.choose(np.ones(1, np.float32), np.array([[0, 1]]), cost.batch)  # the first price

    def measured(self, cost: StepCost, rows: int, plain_seconds: float) -> None:
        """Costs of forwards are known from now on. plain_seconds: the forward of a plain step of that many rows took."""
        self.cost, self.is_measured = cost, True
        pace = plain_seconds / forward_seconds(cost.table, float(rows), cost.share(rows), cost.buckets)
        self.state[CHANGE] = 2 * cost.change
        self.state[[PLAIN_HOST, DRAFT_HOST]] *= self.state[PACE] / pace
        self.recent[:FIRST], self.counts[STEPS], self.state[PACE] = math.log(pace), FIRST, pace
        self.choose(np.ones(1, np.float32), np.array([[0, 1]]), cost.batch)

    def seconds(self, tokens: int, rows: int) -> float:
        """Seconds of a forward of that many tokens for that many rows, at the present pace."""
        share, cost = self.cost.share(rows), self.cost
        return float(forward_seconds(cost.table, float(tokens), share, cost.buckets) * self.state[PACE])

    def first_seconds(self, rows: int) -> float | None:
        """Seconds of a plain step's forward by the first FIRST steps, of that many rows; None as long as there are fewer. The
        very first is left out: it touches memory that none has touched.
        """
        if self.counts[STEPS] < FIRST:
            return None
        cost = self.cost
        return float(
            np.exp(self.recent[1:FIRST].min()) * forward_seconds(cost.table, float(rows), cost.share(rows), cost.buckets)
        )

    @property
    def price(self) -> float:
        """Path probability below which a node need not be drafted."""
        return float(self.state[PRICE])

    @property
    def speed(self) -> float:
        """Times as fast as plain decoding recently, by the curve."""
        return float(self.state[EMITTED] / self.state[SPENT]) if self.state[SPENT] else 1.0

    def drafts(self, rows: int) -> bool:
        """Decide whether to draft at the next step, of that many rows that decode."""
        return self.plain_steps_left(rows) == 0

    def plain_steps_left(self, rows: int) -> int:
        """Count the steps, of that many rows, that go without drafts from now on."""
        return max(int(self.counts[BLOCK_LEFT]), math.ceil(self.by_rows[LEFT, rows.bit_length()]), 0)

    def choose(self, probabilities: np.ndarray, trees: np.ndarray, rows: int, prefill: int = 0) -> np.ndarray:
        """int64 [trees]: nodes to verify of each tree, its root included; valid until the next call.

        probabilities: float32, of paths. trees: int64 [trees, 2], where each tree begins there, and its nodes, root included.
        rows: that decode, those without a tree included. prefill: tokens of prompts in the same forward.
        """
        count = len(trees)
        self.make_room(count, len(probabilities))
        share = self.cost.share(rows)
        choose(
            probabilities, trees, rows, prefill, share, self.cost.buckets, self.cost.table, self.curve, self.state, self.kept
        )
        return self.kept[:count]

    def make_room(self, trees: int, nodes: int) -> None:
        """Make room for a choice among that many nodes of that many trees."""
        if trees > len(self.kept):
            self.kept = np.zeros(2 * trees, np.int64)
        if nodes + 2 > self.curve.shape[1]:
            self.curve = np.zeros((3, 2 * nodes + 2))

    def observe(
        self,
        rows: int,
        tokens: int,
        emitted: float,
        expected: float,
        seconds: float,
        forward_seconds: float,
        drafted: bool,
        steps: int = 1,
    ) -> None:
        """A step without prompts has ended; or `steps` plain ones, of which all is given of one.

        tokens: of its forward. emitted: by all rows. expected: draft tokens that were to be accepted, the sum of the
        probabilities of verified nodes. seconds: of the whole step. drafted: trees were grown, of which nothing
        may have been verified.
        """
        kind = rows.bit_length()
        if kind != self._kind and self._kind and self.by_rows[NEXT_PAUSE, kind] == 0:
            self.by_rows[:, kind] = self.by_rows[:, self._kind]
        self._kind = kind
        share = self.cost.share(rows)
        self._step[:] = rows, tokens, emitted, expected, seconds, forward_seconds, drafted, steps, share
        observe(self._step, self.cost.buckets, self.cost.table, self.state, self.by_rows[:, kind], self.recent, self.counts)


@inlined
def seconds_at(table, column, share):
    """Seconds of a forward of one of the table's sizes; share: of the rows of a whole batch."""
    seconds = table[OF_ONE, column] + share * (table[OF_BATCH, column] - table[OF_ONE, column])
    return seconds * math.exp(table[CORRECTION, column])


@inlined
def column_of(table, tokens):
    """Find the last size at or below `tokens`, never the largest: what is beyond continues as between the two largest."""
    column = 0
    while column < table.shape[1] - 2 and table[TOKENS, column + 1] <= tokens:
        column += 1
    return column


@inlined
def seconds_of(table, tokens, share, buckets):
    column = column_of(table, tokens)
    if buckets and table[TOKENS, column] < tokens <= table[TOKENS, column + 1]:
        tokens = table[TOKENS, column + 1]
    low, high = seconds_at(table, column, share), seconds_at(table, column + 1, share)
    part = (tokens - table[TOKENS, column]) / (table[TOKENS, column + 1] - table[TOKENS, column])
    return low + max(part, 0.0) * max(high - low, 0.0)


@kernel
def forward_seconds(table, tokens, share, buckets):
    """See `Budget.seconds`."""
    return seconds_of(table, tokens, share, buckets)


@inlined
def fill_curve(table, share, buckets, start, most, curve):
    """curve[0, n]: seconds of `start` + n tokens, n up to `most`, none less than a smaller one; curve[1, n]: the least that
    one more costs from there on, by the lower convex hull of what lies beyond. curve[2]: scratch.
    """
    before = 0.0
    for n in range(most + 2):
        curve[0, n] = before = max(before, seconds_of(table, start + n, share, buckets))
    top = 0
    curve[2, 0] = most + 1
    for back in range(most + 1):
        n = most - back
        while top > 0:
            near, far = int(curve[2, top]), int(curve[2, top - 1])
            if (curve[0, near] - curve[0, n]) * (far - n) < (curve[0, far] - curve[0, n]) * (near - n):
                break
            top -= 1
        near = int(curve[2, top])
        curve[1, n] = (curve[0, near] - curve[0, n]) / (near - n)
        top += 1
        curve[2, top] = n


@kernel
def choose(probabilities, trees, rows, prefill, share, buckets, table, curve, state, kept):
    """See `Budget.choose`."""
    count, nodes = len(trees), np.int64(0)
    for tree in range(count):
        nodes += trees[tree, 1] - 1
        kept[tree] = 1
    fill_curve(table, share, buckets, rows + prefill, nodes, curve)
    right = (state[ACCEPTED] + STRENGTH) / (state[EXPECTED] + STRENGTH)
    speed = max(1.0, state[EMITTED] / state[SPENT]) if state[SPENT] > 0 else 1.0
    worth = right * (seconds_of(table, rows, share, buckets) + state[PLAIN_HOST]) / (rows * speed)  # seconds of the curve
    undrafted = curve[0, 0] * (1 + state[CHANGE] * (rows + prefill != state[BEFORE]))
    gained, most, best, taken = 0.0, 0.0, np.int64(0), np.int64(0)
    order = np.empty(nodes, np.int64)
    while True:
        owner, p = np.int64(-1), 0.0
        for tree in range(count):
            if kept[tree] < trees[tree, 1] and probabilities[trees[tree, 0] + kept[tree]] > p:
                owner, p = tree, probabilities[trees[tree, 0] + kept[tree]]
        if owner < 0 or p * worth < curve[1, taken]:
            break
        kept[owner] += 1
        order[taken] = owner
        taken += 1
        gained += p
        changed = state[CHANGE] * (rows + prefill + taken != state[BEFORE])
        saved = gained * worth - (curve[0, taken] * (1 + changed) - undrafted)
        if saved > most:
            most, best = saved, taken
    for n in range(best, taken):
        kept[order[n]] -= 1
    state[PRICE] = MARGIN * curve[1, best] / worth


@inlined
def median_of(values, count):
    """Median of the first `count` values, the lower one of two."""
    for k in range(count):
        less = same = 0
        for other in range(count):
            less += values[other] < values[k]
            same += values[other] == values[k]
        if less <= (count - 1) // 2 < less + same:
            return values[k]
    return 0.0


@inlined
def correct(table, tokens, deviation):
    """A forward of that many tokens deviates so much (log) from what was expected. Where that is unusual, the machine may have
    changed: the measurements before count half.
    """
    is_unusual = abs(deviation) > UNUSUAL
    deviation = min(max(deviation, -UNUSUAL), UNUSUAL)
    column = column_of(table, tokens)
    part = (tokens - table[TOKENS, column]) / (table[TOKENS, column + 1] - table[TOKENS, column])
    weight = 1.0
    for k in range(column, table.shape[1]):
        near = 1 - part if k == column else min(part, 1.0) if k == column + 1 else 0.0
        if k > column + 1:
            weight *= FARTHER
            near = weight / (1 + table[MEASURED, k])
        near = max(near, 0.0)
        table[CORRECTION, k] += near * deviation / (1 + table[MEASURED, k])
        if k <= column + 1:
            known = table[MEASURED, k]
            table[MEASURED, k] = known - near * known / 2 if is_unusual else min(known + near, LATEST)


@kernel
def observe(step, buckets, table, state, switch, recent, counts):
    """See `Budget.observe`. step: see ROWS. switch: the column of `by_rows`."""
    rows, tokens, emitted, expected, share = step[ROWS], step[FORWARD], step[OUT], step[HOPED], step[OF_ROWS]
    seconds, forward_seconds, drafted, steps = step[SECONDS], step[IN_FORWARD], step[DRAFTED] > 0, np.int64(step[HOW_MANY])
    of_curve, of_plain = seconds_of(table, tokens, share, buckets), seconds_of(table, rows, share, buckets)
    ratio = math.log(max(forward_seconds, 1e-9) / of_curve)
    outside = (seconds - forward_seconds) / state[PACE]
    if drafted or counts[SINCE] == 0:  # the first plain step behind drafts is slow: it finds the caches full of other things
        if counts[STEPS] >= RECENT // 2:
            correct(table, tokens, ratio - math.log(state[PACE]))
        recent[counts[STEPS] % RECENT] = ratio
        counts[STEPS] += 1
        state[PACE] = math.exp(median_of(recent, min(counts[STEPS], RECENT)))
        host = PLAIN_HOST + np.int64(drafted)
        if state[host] <= 0 or (outside < state[host] and (counts[DRAFTED_STEPS] if drafted else counts[STEPS]) < RECENT):
            state[host] = outside  # and so are the first drafts
        else:
            state[host] += (min(outside, 2 * state[host]) - state[host]) / RECENT
    state[BEFORE] = tokens
    of_plain += min(state[PLAIN_HOST], state[DRAFT_HOST]) if state[PLAIN_HOST] > 0 else 0.0
    spent, plain = 1.0, emitted / rows
    if not drafted:
        counts[BLOCK_LEFT] -= steps
        counts[SINCE] = 0
        switch[LEFT] -= steps
    else:
        counts[SINCE] += 1
        counts[DRAFTED_STEPS] += 1
        state[EXPECTED] += expected
        state[ACCEPTED] += emitted - rows
        right = (state[ACCEPTED] + STRENGTH) / (state[EXPECTED] + STRENGTH)
        if counts[DRAFTED_STEPS] > 1:
            spent, plain = (of_curve + state[DRAFT_HOST]) / of_plain, 1 + right * expected / rows
        limit = LIMIT / math.sqrt(rows)
        switch[LOST] = max(-CREDIT * limit, switch[LOST] + spent - plain)
        if switch[LOST] <= 0 or switch[NEXT_PAUSE] == 0:
            switch[NEXT_PAUSE] = PAUSE
        state[SPARE] += SHARE * spent
        if switch[LOST] >= limit:
            switch[LEFT], switch[LOST] = switch[NEXT_PAUSE], limit * (1 - TRIAL)
            switch[NEXT_PAUSE] *= 2
        elif counts[SINCE] >= 4 * BLOCK:
            loss = max(0.0, BLOCK * (1 - state[SPENT] / state[EMITTED])) if state[EMITTED] > 0 else 0.0
            if state[SPARE] >= loss:
                state[SPARE] -= loss
                counts[BLOCK_LEFT] = BLOCK
    state[EMITTED] = MEMORY * state[EMITTED] + steps * plain
    state[SPENT] = MEMORY * state[SPENT] + steps * spent
