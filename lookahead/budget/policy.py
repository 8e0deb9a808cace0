"""How many draft tokens pay, and whether drafting pays at all. In: step costs, draft trees, measured steps. Out: what to verify.

Costs: a `StepCost` holds seconds of a forward by tokens, measured before the first row (ladder.py). One pace, the median of
what recent steps took relative to it, scales all of it: a slow machine is slow for all sizes.

Choice: the nodes of all rows stand in one queue, the most probable first. Of each number of them

    seconds that a token is worth x (probabilities of the nodes) - seconds by which they make the forward longer

is computed, and the best is verified. A token is worth what the job, as fast as it has been recently, takes for one: goodput
(arXiv 2406.14066) over the job. None is best where the curve is steep.

Switch: each drafted step adds to an account what it cost, drafting included, less what a plain step takes for as many tokens.
The account never falls below 0. Where it reaches LIMIT plain steps, drafts go off: a sequential test (CUSUM, Page 1954) whose
price is known beforehand. After a pause a trial may lose TRIAL plain steps; each trial that fails doubles the pause, and one
that brings the account to 0 ends it. The account uses expected, not emitted tokens, and costs of the curve, not of the clock:
both scatter, their corrections hardly do. Those are: one factor for tokens, accepted / expected so far; one for seconds of
drafted steps, from blocks of plain steps and the drafted ones next to them, as only these share the machine's pace.

Units: seconds; accounts in plain steps of the same number of rows.
"""

from __future__ import annotations

import math

import numpy as np

from lookahead.native.kernels import inlined, kernel

MEMORY = 0.99  # weight of the past in the speed of the job, at each step
LIMIT, TRIAL = 6.0, 1.5  # plain steps that drafts may lose until they go off, and in a trial
PAUSE = 64.0  # plain steps without drafts before the first trial; each further pause is twice as long
SHARE = 0.005  # of the time goes into plain steps between drafted ones, at most
BLOCK = 4  # plain steps in a row, compared with the drafted ones before them
BELIEVED = 2.0  # blocks that the curve stands for, next to the measured ones
STRENGTH = 32.0  # accepted tokens that the drafter's own probabilities stand for
RECENT = 9  # steps whose median is the pace
MARGIN = 0.5  # of the least probability that pays: what is less probable need not be drafted

# The state of a budget. Sums over steps, the past fading, in plain steps: what was emitted, what was spent. Tokens: expected,
# accepted. Seconds: of drafting (by the curve's pace). Pace; log of the factor of drafted steps; blocks that it rests on; plain
# steps that may go into blocks; least probability that pays.
EMITTED, SPENT, EXPECTED, ACCEPTED, DRAFTING, PACE, FACTOR, BLOCKS, SPARE, PRICE = range(10)
# Of each number of rows (its binary digits): plain steps that were lost, length of the next pause, steps left of this one.
LOST, NEXT_PAUSE, LEFT = range(3)


class StepCost:
    """Seconds of a forward by its tokens, for 1 row and for `batch` rows. Between sizes and rows it is interpolated, beyond the
    largest size it continues; more tokens never cost less.

    sizes: increasing, tokens. seconds: float64 [2, sizes] (or [1, sizes]: whatever the rows). buckets: forwards take one of
    these shapes only.
    """

    def __init__(self, sizes: np.ndarray, seconds: np.ndarray, batch: int = 1, buckets: bool = False) -> None:
        self.sizes = np.asarray(sizes, np.float64)
        self.seconds = np.maximum.accumulate(np.atleast_2d(np.asarray(seconds, np.float64)), axis=1)
        self.batch, self.buckets = batch, buckets
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def table(self, rows: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Of that many rows: (seconds of forwards of 0, 1, 2, ... at least `tokens` tokens, the least that one token more costs
        from each size on).
        """
        found = self._tables.get(rows)
        if found is None or len(found[0]) <= tokens:
            found = self._tables[rows] = self._table(rows, max(64 * rows, 2 * tokens, 128))
        return found

    def _table(self, rows: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        share = min(1.0, (rows - 1) / (self.batch - 1)) if self.batch > 1 else 0.0
        known = self.seconds[0] + share * (self.seconds[-1] - self.seconds[0])
        at = np.arange(tokens + 2, dtype=np.float64)
        if self.buckets:
            at = self.sizes[np.minimum(np.searchsorted(self.sizes, at), len(self.sizes) - 1)]
        seconds = np.interp(at, self.sizes, known)
        slope = (known[-1] - known[-2]) / (self.sizes[-1] - self.sizes[-2])
        seconds += slope * np.maximum(np.arange(tokens + 2) - self.sizes[-1], 0)
        least = np.full(tokens + 2, slope)
        hull = [tokens + 1]  # the lower convex hull of what lies to the right
        for n in range(tokens, -1, -1):
            while len(hull) > 1 and (seconds[hull[-1]] - seconds[n]) * (hull[-2] - n) >= (seconds[hull[-2]] - seconds[n]) * (
                hull[-1] - n
            ):
                hull.pop()
            least[n] = (seconds[hull[-1]] - seconds[n]) / (hull[-1] - n)
            hull.append(n)
        return seconds, least


class Budget:
    """The draft budget of one engine.

    cost: of steps as they were measured. drafting: seconds that growing the trees takes, as long as none was seen.
    """

    def __init__(self, cost: StepCost, drafting: float = 5e-5) -> None:
        self.cost = cost
        self.state = np.zeros(PRICE + 1)
        self.state[DRAFTING], self.state[PACE], self.state[SPARE] = drafting, 1.0, 1.0
        self.by_rows = np.zeros((3, 16))
        self.by_rows[NEXT_PAUSE] = PAUSE
        self.recent = np.zeros((2, RECENT))  # log of seconds / the curve's, of the latest steps: plain, drafted
        self.seen = np.zeros(3, np.int64)  # plain and drafted steps since the latest block; plain ones left of a block
        self.kept = np.zeros(64, np.int64)

    @property
    def price(self) -> float:
        """Path probability below which a node need not be drafted."""
        return float(self.state[PRICE])

    @property
    def speed(self) -> float:
        """Times as fast as plain decoding recently, by the curve."""
        return float(self.state[EMITTED] / self.state[SPENT]) if self.state[SPENT] else 1.0

    def drafts(self, rows: int) -> bool:
        """Whether to draft at the next step, of that many rows that decode."""
        return bool(self.seen[2] <= 0 and self.by_rows[LEFT, rows.bit_length()] <= 0)

    def plain_steps_left(self, rows: int) -> int:
        """How many steps, of that many rows, go without drafts from now on."""
        return int(max(self.seen[2], self.by_rows[LEFT, rows.bit_length()], 0))

    def choose(self, probabilities: np.ndarray, trees: np.ndarray, rows: int, prefill: int = 0) -> np.ndarray:
        """int64 [trees]: nodes to verify of each tree, its root included; valid until the next call.

        probabilities: float32, of paths. trees: int64 [trees, 2], where each tree begins there, and its nodes, root included.
        rows: that decode, those without a tree included. prefill: tokens of prompts in the same forward.
        """
        count = len(trees)
        if count > len(self.kept):
            self.kept = np.zeros(2 * count, np.int64)
        seconds, least = self.cost.table(rows, rows + prefill + len(probabilities))
        choose(probabilities, trees, rows, prefill, seconds, least, self.state, self.kept)
        return self.kept[:count]

    def observe(
        self,
        rows: int,
        tokens: int,
        emitted: float,
        expected: float,
        seconds: float,
        draft_seconds: float = 0.0,
        steps: int = 1,
    ) -> None:
        """A step without prompts has ended; or `steps` plain ones, of which all is given of one.

        tokens: of its forward. emitted: by all rows. expected: draft tokens that were to be accepted, the sum of the
        probabilities of verified nodes. seconds: of the whole step. draft_seconds: of it, in drafting; 0: nothing was drafted.
        """
        curve = self.cost.table(rows, tokens)[0]
        observe(
            rows, tokens, emitted, expected, seconds, draft_seconds, steps, curve, self.state,
            self.by_rows[:, rows.bit_length()], self.recent, self.seen,
        )  # fmt: skip


@kernel
def choose(probabilities, trees, rows, prefill, seconds, least, state, kept):
    """See `Budget.choose`. seconds, least: see `StepCost.table`."""
    count = len(trees)
    start = rows + prefill
    factor = math.exp(state[FACTOR])
    right = (state[ACCEPTED] + STRENGTH) / (state[EXPECTED] + STRENGTH)
    speed = max(1.0, state[EMITTED] / state[SPENT]) if state[SPENT] > 0 else 1.0
    worth = right * (seconds[rows] + 0.0) / (rows * speed) / factor  # seconds of the curve
    for tree in range(count):
        kept[tree] = 1
    gained, most, best, tokens = 0.0, 0.0, np.int64(0), np.int64(0)
    order = np.empty(len(probabilities), np.int64)
    while True:
        owner, p = -1, 0.0
        for tree in range(count):
            if kept[tree] < trees[tree, 1] and probabilities[trees[tree, 0] + kept[tree]] > p:
                owner, p = tree, probabilities[trees[tree, 0] + kept[tree]]
        if owner < 0 or p * worth < least[start + tokens]:
            break
        kept[owner] += 1
        order[tokens] = owner
        tokens += 1
        gained += p
        saved = gained * worth - (seconds[start + tokens] - seconds[start])
        if saved > most:
            most, best = saved, tokens
    for n in range(best, tokens):
        kept[order[n]] -= 1
    state[PRICE] = MARGIN * least[start + best] / worth


@inlined
def median_of(values, count):
    """Of the first `count`, the lower one of two."""
    for k in range(count):
        less = same = 0
        for other in range(count):
            less += values[other] < values[k]
            same += values[other] == values[k]
        if less <= (count - 1) // 2 < less + same:
            return values[k]
    return 0.0


@kernel
def observe(rows, tokens, emitted, expected, seconds, draft_seconds, steps, curve, state, switch, recent, seen):
    """See `Budget.observe`. switch: the column of `by_rows`."""
    drafted = draft_seconds > 0
    kind = np.int64(drafted)
    ratio = math.log(max(seconds - draft_seconds, 1e-9) / curve[tokens])
    recent[kind, seen[kind] % RECENT] = ratio
    seen[kind] += 1
    level = median_of(recent[kind], min(seen[kind], RECENT))
    state[PACE] = math.exp(level - (state[FACTOR] if drafted else 0.0))
    if not drafted:
        if seen[2] > 0:
            seen[2] -= steps
        if seen[0] == BLOCK and seen[1] >= BLOCK:  # a block has ended
            apart = median_of(recent[1], min(seen[1], RECENT)) - level
            state[BLOCKS] = min(state[BLOCKS] + 1, 16.0)
            state[FACTOR] += (apart - state[FACTOR]) / (state[BLOCKS] + BELIEVED)
        switch[LEFT] -= steps
        spent, plain = 1.0, emitted / rows
        if seen[0] >= BLOCK:
            seen[1] = 0
    else:
        seen[0] = 0
        state[DRAFTING] = min(draft_seconds / state[PACE], 2 * state[DRAFTING])
        state[EXPECTED] += expected
        state[ACCEPTED] += emitted - rows
        right = (state[ACCEPTED] + STRENGTH) / (state[EXPECTED] + STRENGTH)
        spent = (curve[tokens] * math.exp(state[FACTOR]) + state[DRAFTING]) / curve[rows]
        plain = 1 + right * expected / rows
        switch[LOST] = max(0.0, switch[LOST] + spent - plain)
        if switch[LOST] <= 0:
            switch[NEXT_PAUSE] = PAUSE
        if switch[LOST] >= LIMIT:
            switch[LEFT], switch[LOST] = switch[NEXT_PAUSE], LIMIT - TRIAL
            switch[NEXT_PAUSE] *= 2
        state[SPARE] += SHARE * spent
        loss = BLOCK * (1 - state[SPENT] / state[EMITTED]) if state[EMITTED] > 0 else 0.0
        if seen[1] >= 16 and state[SPARE] >= loss and switch[LEFT] <= 0:
            state[SPARE] -= max(loss, 0.0)
            seen[2] = BLOCK
    state[EMITTED] = MEMORY * state[EMITTED] + steps * plain
    state[SPENT] = MEMORY * state[SPENT] + steps * spent
