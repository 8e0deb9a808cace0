"""What `lookahead.draft` is to draft, in plain Python: matches by search through all of the text, the mixture, what is learned.

Written for short texts, from the method as the modules tell it; constants, and the layout of cells and factors, are theirs.
Numbers are float32 where the kernels hold float32 (F), so that one on the border of two buckets falls on the same side.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lookahead.draft import cells, mixture
from lookahead.draft.arrays import EXPERTS, LEADERS, MOST_SAMPLED, SKIPPED, STEPS
from lookahead.draft.cells import NEVER, ORDERS, OTHER, OWN, SKIP_CELLS, order_bucket
from lookahead.draft.drafter import Drafter
from lookahead.draft.experts import LAST, RESOLUTION
from lookahead.draft.planner import MIN_REMAINING_MASS
from lookahead.draft.recycled import ANY, ASKED, BEST, KINDS
from lookahead.trie.suffixes import DEPTH

F = np.float32
OWN_TEXT = -1  # among the texts that an aligned place may stand in
END = 1 << 40  # closes each document; sorts behind every token
ZERO, ONE = F(0), F(1)
NOTHING = F(2.0**-24)  # path probability below which nothing is drafted


# ---- where a context stands
@dataclasses.dataclass
class Text:
    """Documents in a row, each closed by END; suffixes begin at `positions`. A place is where a context goes on."""

    tokens: list[int]
    positions: list[int]
    source: int
    document_weights: list[float]  # at each position
    _places: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], source: int, weights: Sequence[float]) -> Text:
        tokens = [token for document in documents for token in (*document, END)]
        of_each = [weight for document, weight in zip(documents, weights, strict=True) for _ in (*document, END)]
        return cls(tokens, [p for p, token in enumerate(tokens) if token != END], source, of_each)

    def follows(self, place: int) -> int:
        return self.tokens[place] if 0 <= place < len(self.tokens) else END

    def places_of(self, token: int) -> list[int]:
        """Behind each occurrence of a token, sorted by what follows up to the end of the document."""
        if token not in self._places:
            places = [position + 1 for position in self.positions if self.tokens[position] == token]
            places.sort(key=lambda place: (self.tokens[place : self.tokens.index(END, place) + 1][: DEPTH - 1], place))
            self._places[token] = places
        return self._places[token]


@dataclasses.dataclass
class Step:
    """The places of a context's last tokens, for any number of them from `least` to `order`."""

    places: list[int]
    order: int
    least: int


def narrowed(text: Text, steps: Sequence[Step], token: int) -> list[Step]:
    """The steps of the context with one more token."""
    candidates = []
    for step in steps:
        places = [place + 1 for place in step.places if text.follows(place) == token]
        if len(places) == 1 or step.least + 1 < DEPTH:  # else they are not sorted by what follows
            candidates.append(Step(places, step.order + 1, step.least + 1))
    candidates.append(Step(text.places_of(token), 1, 1))
    found = []
    for _, group in itertools.groupby((step for step in candidates if step.places), lambda step: len(step.places)):
        same = [*group]  # places, as there are as many
        found.append(Step(same[-1].places, same[0].order, same[-1].least))
    return found if len(found) <= STEPS else [*found[: STEPS - 1], found[-1]]


def agreeing(text: Sequence[int], place: int, context: Sequence[int]) -> int:
    """How many tokens up to `place` agree with the context's end; 32 count as all."""
    reversed_pairs = zip(text[place::-1], context[::-1], strict=False)
    return min(32, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], reversed_pairs)))


def own_occurrences(text: Sequence[int], context: Sequence[int]) -> list[tuple[int, int, int]]:
    """(tokens that agree, the token that follows, place): by 8, 4, 2, 1 tokens or more, each newest first.

    Of each, the newest 32 are looked at, and 16 that were not taken as longer ones are taken.
    """
    found = []
    matches = {place: agreeing(text, place, context) for place in range(len(text) - 1, -1, -1)}
    for least, most in ((8, 32), (4, 7), (2, 3), (1, 1)):
        looked_at = [(match, place) for place, match in matches.items() if match >= least][:32]
        found += [(match, text[place + 1], place) for match, place in looked_at if match <= most and place + 1 < len(text)][:16]
    return found


def lead(top_tokens: list[list[int]], token: int, count: int, note: int) -> None:
    """Put a token where it belongs among the commonest, behind those as common."""
    at = next((k for k, leader in enumerate(top_tokens) if leader[0] == token), len(top_tokens))
    if at == LEADERS:
        at -= 1
        if count <= top_tokens[at][1]:
            return
    top_tokens[at : at + 1] = [[token, count, note]]
    while at and top_tokens[at - 1][1] < count:
        top_tokens[at - 1], top_tokens[at] = top_tokens[at], top_tokens[at - 1]
        at -= 1


# ---- who says what
@dataclasses.dataclass
class Aligned:
    """A match that broke: where it would be now, how long it was, misses, hits since the last one."""

    at: int
    before: int
    missed: int
    hit: int


@dataclasses.dataclass
class Node:
    """A context: the text of a row and a path below it."""

    context: list[int]
    steps: list[list[Step]]  # of each text
    aligned: dict[int, Aligned]  # by text
    parent: Node | None = None
    looked_up: bool = False  # in the sorted texts; else nobody knows whether a match breaks
    own: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    longest: dict[int, list[tuple[int, Any]]] = dataclasses.field(default_factory=dict)  # by text: what it said


@dataclasses.dataclass
class Expert:
    """Says `each` x count for each token; an offer is (source, match length)."""

    cell: int  # as the first one that is asked
    order: int  # bucket
    group: int | None  # None: an aligned or a recycled one
    each: Any
    counts: dict[int, Any]
    offers: dict[int, tuple[int, int]]
    ranked: dict[int, int] = dataclasses.field(default_factory=dict)  # what a recycled one takes from a factor's number


@dataclasses.dataclass
class Guess:
    """A token that some expert says."""

    p: Any = ZERO
    most: Any = ZERO  # that one expert gives
    offer: tuple[int, int] = (-1, 0)  # of this expert
    orders: list[int] = dataclasses.field(default_factory=lambda: [NEVER, NEVER])  # at which own and other say it first
    recycled: int = cells.UNRANKED
    factors: tuple[int, ...] = ()


def summed(numbers: Iterable[Any], start: Any = ZERO) -> Any:
    """One after the other, so that all round alike; shares of 7 in 10 and of 7 in 20 are borders of buckets."""
    return functools.reduce(operator.add, numbers, start)


def sampled(places: Sequence[int], most: int) -> list[int]:
    """So many places that represent all, evenly."""
    if len(places) <= most:
        return [*places]
    return [places[(2 * k + 1) * len(places) // (2 * most)] for k in range(most)]


class SlowRow:
    """One request."""

    def __init__(self, prompt: Sequence[int]):
        self.tokens: list[int] = []
        self.prompt_length = len(prompt)
        self.top_tokens: list[list[int]] = []  # token, different tokens it came behind, newest place
        self.root = Node([], [], {})
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        behind = {self.tokens[p - 1] if p else -1 for p, t in enumerate(self.tokens) if t == token}
        lead(self.top_tokens, token, len(behind), len(self.tokens) - 1)

    def source_of(self, place: int) -> int:
        return cells.PROMPT if place < self.prompt_length else cells.OUTPUT

    def follows(self, place: int) -> int:
        return self.tokens[place] if place < len(self.tokens) else END


class SlowDrafter:
    """Mirrors a drafter that was just made: tell it what the drafter is told, behind the drafter.

    tries: of each trie its documents by segment, and a weight of each document by segment.
    """

    def __init__(self, drafter: Drafter, tries: Sequence[tuple[list[list[list[int]]], list[list[float]]]]):
        self.drafter = drafter
        self.tries = [
            Text.of(documents, cells.RECYCLED + 1 + number, weights)
            for number, (segments, of_each) in enumerate(tries)
            for documents, weights in zip(segments, of_each, strict=True)
        ]
        self.rows: list[SlowRow] = []
        self.believe_the_drafter()
        self._read_session()

    def believe_the_drafter(self) -> None:
        """Take over what it has learned, so that differences of rounding do not grow."""
        shared = self.drafter.shared
        self.lambdas, self.earned = shared.lambdas.copy(), shared.earned.copy()
        self.factors, self.learned = shared.factors.copy(), shared.learned.copy()
        self.trust, self.weights = shared.trust[:, :2].copy(), shared.weights.copy()

    # what a drafter does

    def start(self, prompt: Sequence[int]) -> SlowRow:
        row = SlowRow(prompt)
        self.rows.append(row)
        self._find_root(row)
        return row

    def accept(self, row: SlowRow, said: Sequence[int], learning: bool = True) -> None:
        for token in said:
            node = row.root
            guesses, asked = self.mix(row, node, MIN_REMAINING_MASS, mixture.MIN_LEARN_PROB, token)
            if learning:
                self.learn_cells(asked, token)
                self.learn_trust(node, guesses[token].p if token in guesses else ZERO, token)
                self.learn_factors(guesses, token)
            aligned = self.move_aligned(row, node, token)
            steps = [narrowed(text, s, token) for text, s in zip(self.texts, node.steps, strict=True)]
            row.append(token)
            row.root = Node(row.tokens[:], steps, aligned, looked_up=True)

    def finish(self, row: SlowRow) -> None:
        """Behind `Row.finish`: what the session holds is read from the drafter."""
        self.rows.remove(row)
        if len(row.tokens) > row.prompt_length:
            self._read_session()
            for other in self.rows:
                self._find_root(other)

    # what it must know for that

    def _read_session(self) -> None:
        session = self.drafter.session
        log = session.tokens[: len(session)].tolist()
        older, recent = session.runs
        self.texts = [*self.tries]
        for run in (recent, older) if len(older.suffixes) else (recent,):
            tokens = [token if token < len(run.first) - 1 else END for token in log]
            self.texts.append(Text(tokens, sorted(run.suffixes.tolist()), cells.SESSION, [1.0] * len(tokens)))

    def _find_root(self, row: SlowRow) -> None:
        steps: list[list[Step]] = [[] for _ in self.texts]
        for token in row.tokens[-33:]:
            steps = [narrowed(text, s, token) for text, s in zip(self.texts, steps, strict=True)]
        row.root = Node(row.tokens[:], steps, row.root.aligned, looked_up=True)

    # the experts, in turn; `sample` tells how many places of a text are to be looked at now

    def experts(self, row: SlowRow, node: Node, sample: Callable[[], int]) -> Iterator[Expert]:
        matching = itertools.chain(self._aligned(row, node), self._matching(row, node, sample))
        yield from itertools.islice(matching, EXPERTS - LAST)
        if len(node.context) > 1:
            yield from self._skipping(node.context[-2])
        if row.top_tokens:
            total = sum(count for _, count, _ in row.top_tokens)
            each = np.float64(1) / total
            yield Expert(
                cells.cell_of(0, OWN, total, row.top_tokens[0][1] * each, 0),
                0,
                OWN,
                each,
                {token: np.float64(count) for token, count, _ in row.top_tokens},
                {token: (row.source_of(place), 0) for token, _, place in row.top_tokens},
            )

    def _aligned(self, row: SlowRow, node: Node) -> Iterator[Expert]:
        for number, aligned in sorted(node.aligned.items()):
            if number == OWN_TEXT:
                token, group, source = row.follows(aligned.at + 1), OWN, row.source_of(aligned.at + 1)
            else:
                token, group, source = self.texts[number].follows(aligned.at + 1), OTHER, self.texts[number].source
            if token != END:
                offers = {token: (source, aligned.before)}
                cell = cells.aligned_cell(np.array([[dataclasses.astuple(aligned)]]), 0, 0, group)
                yield Expert(cell, 0, None, ONE, {token: ONE}, offers)

    def _matching(self, row: SlowRow, node: Node, sample: Callable[[], int]) -> Iterator[Expert]:
        """Longest order first, own before other."""
        above: Node | None = node
        while above:
            above.looked_up, above = True, above.parent
        node.own = own_occurrences(row.tokens, node.context)
        own_orders = sorted({order_bucket(match) for match, _, _ in node.own})
        other_orders = sorted({step.order for steps in node.steps for step in steps})
        kinds = [*range(len(KINDS))]
        while own_orders or other_orders or kinds:
            longest = max([*own_orders, *map(order_bucket, other_orders)], default=0)
            if kinds and longest <= ASKED[kinds[0]]:
                yield from self._recycled_expert(node, kinds.pop(0))
            elif own_orders and (not other_orders or own_orders[-1] >= order_bucket(other_orders[-1])):
                yield self._own_expert(row, node, own_orders.pop())
            else:
                yield self._other_expert(node, other_orders.pop(), sample())

    def _skipping(self, before: int) -> Iterator[Expert]:
        """What stands two tokens behind the places of a token."""
        said: list[tuple[int, Any, int]] = []
        total = ZERO
        for text, weight in zip(self.texts, self.weights, strict=False):
            for place in sampled(text.places_of(before), SKIPPED):
                if text.follows(place) != END:
                    count = weight * F(text.document_weights[place - 1])
                    total += count
                    if text.follows(place + 1) != END:
                        said.append((text.follows(place + 1), count, text.source))
        if said:
            counts: dict[int, Any] = {}
            for token, count, _ in said:
                counts[token] = counts.get(token, ZERO) + count
            offers = {token: (source, 0) for token, _, source in reversed(said)}
            yield Expert(cells.skip_cell(len(counts)), 0, None, ONE / total, counts, offers)

    def _recycled_expert(self, node: Node, kind: int) -> Iterator[Expert]:
        """What stands in the drafter's table behind the context's last tokens, if anything."""
        latest = [*reversed(node.context[-3:]), ANY, ANY, ANY][:3]
        key = [token if counts else ANY for token, counts in zip(latest, KINDS[kind], strict=True)]
        table = self.drafter.recycled
        found = np.flatnonzero((table.keys == key).all(1))
        if not len(found) or any(token == ANY for token, counts in zip(latest, KINDS[kind], strict=True) if counts):
            return
        (place,) = found
        weights = table.weights[place]
        held = [(token, weight) for token, weight in zip(table.tokens[place].tolist(), weights, strict=True) if weight > 0]
        each = ONE / summed(weights)
        yield Expert(
            cells.recycled_cell(kind, table.seen[place], weights[0] * each, 0),
            0,
            None,
            each,
            dict(held),
            {token: (cells.RECYCLED, 0) for token, _ in held},
            ranked={token: int(cells.RANKED[kind]) * (BEST - rank) for rank, (token, _) in enumerate(held)},
        )

    def _own_expert(self, row: SlowRow, node: Node, order: int) -> Expert:
        agree = [(token, match, place) for match, token, place in node.own if order_bucket(match) >= order]
        counts = Counter(token for token, _, _ in agree)
        newest = {token: max(place for t, _, place in agree if t == token) for token in counts}
        longest: dict[int, int] = {}
        for token, match, _ in sorted(agree, key=lambda found: -order_bucket(found[1])):
            longest.setdefault(token, match)
        each = ONE / F(len(agree))
        return Expert(
            cells.cell_of(order, OWN, len(agree), max(counts.values()) * np.float64(each), 0),
            order,
            OWN,
            each,
            {token: np.float64(count) for token, count in counts.items()},
            {token: (row.source_of(place + 1), longest[token]) for token, place in newest.items()},
        )

    def _other_expert(self, node: Node, order: int, most: int) -> Expert:
        """Each text offers its longest match that is no longer than `order`, if it has had one as long as that."""
        total, counts = ZERO, dict[int, Any]()
        best: dict[int, Any] = {}
        offers: dict[int, tuple[int, int]] = {}
        for number, (text, steps) in enumerate(zip(self.texts, node.steps, strict=True)):
            reached = [step for step in steps if step.order >= order]
            if not reached:
                continue
            each, weighed = self._weighed(text, reached[-1], self.weights[number], most)
            if len(reached) == 1:
                node.longest[number] = weighed
            total += each * summed(weight for _, weight in weighed)
            for token in dict.fromkeys(token for token, _ in weighed if token != END):
                here = each * summed(weight for said, weight in weighed if said == token)
                counts[token] = counts.get(token, ZERO) + here
                if here > best.get(token, ZERO):
                    best[token], offers[token] = here, (text.source, order)
        each = ONE / total
        cell = cells.cell_of(order_bucket(order), OTHER, total, max(counts.values(), default=ZERO) * each, 0)
        return Expert(cell, order_bucket(order), OTHER, each, counts, offers)

    def _weighed(self, text: Text, step: Step, weight: Any, most: int) -> tuple[Any, list[tuple[int, Any]]]:
        """(what each counts, what follows some places of a step with the weights of their documents)."""
        places = sampled(step.places, most)
        each = weight * (F(len(step.places)) / F(len(places)))
        return each, [(text.follows(place), F(text.document_weights[place - 1])) for place in places]

    # the mixture

    def mix(
        self, row: SlowRow, node: Node, floor: Any = ZERO, least: Any = ZERO, actual: int = -1
    ) -> tuple[dict[int, Guess], list[tuple[int, Expert]]]:
        """(tokens with probabilities, experts that were asked and their cells) until less than `floor` of the stick is left.

        Tokens so improbable that factors could not lift them to `least` are not rescored, but for the actual one.
        """
        guesses: dict[int, Guess] = {}
        asked: list[tuple[int, Expert]] = []
        rest = ONE
        node.own, node.longest = [], {}

        def sample() -> int:
            if floor <= 0:
                return MOST_SAMPLED
            return int(min(RESOLUTION * rest / floor, F(MOST_SAMPLED)))

        experts = self.experts(row, node, sample)
        while rest >= floor and (expert := next(experts, None)):
            rank = sum(cell < cells.RECYCLED_CELLS or cell >= SKIP_CELLS for cell, _ in asked)
            ranked = expert.cell < cells.ALIGNED or cells.RECYCLED_CELLS <= expert.cell < SKIP_CELLS
            cell = expert.cell + (min(rank, cells.RANKS - 1) if ranked else 0)
            believed = self.lambdas[cell]
            for token, count in expert.counts.items():
                guess = guesses.setdefault(token, Guess())
                gain = rest * believed * expert.each * count
                guess.p = F(guess.p + gain)
                guess.recycled -= expert.ranked.get(token, 0)
                if gain > guess.most and (cell < SKIP_CELLS or guess.most == 0):
                    guess.most, guess.offer = F(gain), expert.offers[token]
                if expert.group is not None and guess.orders[expert.group] == NEVER:
                    guess.orders[expert.group] = expert.order
            asked.append((cell, expert))
            rest = rest * (ONE - believed)
        self._rescore(row, node, guesses, asked, (least, actual))
        return guesses, asked

    def _rescore(
        self, row: SlowRow, node: Node, guesses: dict[int, Guess], asked: list[tuple[int, Expert]], spared: tuple[Any, int]
    ) -> None:
        longest = next((expert.order for _, expert in asked if expert.group is not None), 0)
        total = after = ZERO
        for token, guess in guesses.items():
            total += guess.p
            if guess.p * mixture.MAX_RESCORE >= spared[0] or token == spared[1]:
                own, other = guess.orders
                groups = (own < NEVER) + 2 * (other < NEVER)
                back = len(row.tokens) - max((p for p, t in enumerate(row.tokens) if t == token), default=len(row.tokens))
                guess.factors = (
                    mixture.BY_ORDERS + (own * (NEVER + 1) + other) * ORDERS + int(longest),
                    mixture.BY_POSITION + cells.binary_bucket(back),
                    mixture.BY_RECYCLED + 4 * guess.recycled + groups,
                    mixture.BY_TOKEN + 4 * ((token * 40503 >> 3) % mixture.TOKENS) + groups,
                )
                one, two, three, four = self.factors[list(guess.factors)]
                guess.p = guess.p * (one * two * three * four)
            after += guess.p
        none_of_these = max(F(1e-6), ONE - total)
        for guess in guesses.values():
            guess.p = guess.p * (ONE / (after + none_of_these))

    # what is learned

    def learn_cells(self, asked: list[tuple[int, Expert]], actual: int) -> None:
        """What was said is shared out among those who said it; each had been asked with what those before had not got."""
        gave, rest = [], ONE
        for cell, expert in asked:
            share = F(expert.counts.get(actual, ZERO) * expert.each)
            gave.append(rest * self.lambdas[cell] * share)
            rest = rest * (ONE - self.lambdas[cell])
        total = summed(gave)
        reaches = ONE
        for (cell, _), part in zip(asked, gave, strict=True):
            share = part / total if total > 0 else ZERO
            self.earned[cell] += share, reaches
            if self.earned[cell, 1] > mixture.MEMORY:
                self.earned[cell] /= 2
            self.lambdas[cell] = self.earned[cell, 0] / self.earned[cell, 1]
            reaches = reaches - share
            if reaches <= 1e-6:
                break

    def learn_trust(self, node: Node, said: Any, actual: int) -> None:
        """What a text's longest match gave to what was said, if it was asked, against what the mixture gave."""
        for number, weighed in node.longest.items():
            gave = summed(count for token, count in weighed if token == actual)
            self.trust[number] *= mixture.TRUST_MEMORY
            self.trust[number] += gave / summed(count for _, count in weighed), said
        used = self.trust[: len(self.texts)]
        ratios = (used[:, 0] + ONE) / (used[:, 1] + ONE)
        relative = ratios / ratios.max()
        self.weights[: len(used)] = self.drafter.shared.given[: len(used)] * relative**2

    def learn_factors(self, guesses: dict[int, Guess], actual: int) -> None:
        """One step of AdaGrad on the log-likelihood; what is hardly wrong teaches nothing."""
        for token, guess in guesses.items():
            gradient = F(token == actual) - guess.p
            if token != actual and gradient > -mixture.MIN_LEARN_PROB:
                continue
            for f in guess.factors:
                squares = self.learned[f, 1] = self.learned[f, 1] + gradient * gradient
                self.learned[f, 0] += F(mixture.RATE) * gradient / np.sqrt(squares)
                self.factors[f] = np.exp(self.learned[f, 0])

    def move_aligned(self, row: SlowRow, node: Node, token: int) -> dict[int, Aligned]:
        """The aligned places behind `token`."""
        moved = {}
        for number in (OWN_TEXT, *range(len(self.texts))):
            follows = row.follows if number == OWN_TEXT else self.texts[number].follows
            order, places = self._longest_match(node, number)
            expected = {follows(place) for place in places} - {END}  # where all documents end, no match is broken
            before = node.aligned.get(number)
            if order >= mixture.ALIGN_FROM and len(places) <= mixture.ALIGN_FROM and expected:
                if token not in expected:
                    missed_before = before.missed if before and before.at + 1 == places[0] else 0
                    moved[number] = Aligned(places[0], order, missed_before + 1, 0)
            elif before and (said := follows(before.at + 1)) != END:
                missed, hit = before.missed + (said != token), before.hit + 1 if said == token else 0
                if missed < cells.MISSES:
                    moved[number] = Aligned(before.at + 1, before.before, missed, hit)
        return moved

    def _longest_match(self, node: Node, number: int) -> tuple[int, list[int]]:
        """(its length, the places where it goes on; of the own text the one that is found first)"""
        if number == OWN_TEXT:
            match, _, place = max(node.own, key=lambda found: found[0], default=(0, 0, -1))
            return match, [place + 1]
        if node.looked_up and node.steps[number]:
            return node.steps[number][0].order, node.steps[number][0].places
        return 0, []

    # the tree

    def check_growth(
        self,
        row: SlowRow,
        tree: Sequence[tuple[int, int, float, int, int]],
        budget: int,
        branch_length: int,
        price: float = 0.0,
        single: bool = False,
    ) -> None:
        """Each node of `tree` (token, parent, probability of the path, source, match) is the most probable one that was not
        yet taken; the tree ends at the budget or where nothing is left.

        price: least computed probability. Of probabilities that differ by less than a hundred-thousandth either may be first.
        """
        least = max(F(price), NOTHING)
        cutoff, offered = least, list[float]()
        waiting: dict[tuple[int, int], tuple[float, tuple[int, int]]] = {}
        nodes, depths = [row.root], [0]
        while True:
            node, number, whole = nodes[-1], len(nodes) - 1, F(tree[len(nodes) - 1][2])
            floor = cutoff / whole
            if number < budget and depths[-1] < branch_length and floor <= 1 and whole >= least:
                guesses, _ = self.mix(row, node, floor, floor)
                paths = {token: whole * guess.p for token, guess in guesses.items()}
                if single:
                    best = max(paths.values(), default=ZERO)
                    paths = {token: path for token, path in paths.items() if path >= (1 - 1e-5) * float(best)}
                worth = {token: float(path) for token, path in paths.items() if path >= cutoff}
                waiting |= {(number, token): (path, guesses[token].offer) for token, path in worth.items()}
                offered += [*worth.values()][: 1 if single else None]
                best = sorted(offered, reverse=True)
                cutoff = max(least, bin_floor(best[budget - 1]) if len(best) >= budget else 0.0)
            if len(nodes) == len(tree):
                break
            token, parent, probability, *offer = tree[len(nodes)]
            path, expected_offer = waiting.pop((parent, token))  # KeyError: this node was never offered
            assert abs(path - probability) <= 1e-5 * path
            assert tuple(offer) == expected_offer
            assert path >= (1 - 1e-5) * max((p for p, _ in waiting.values()), default=0.0)
            if single:
                waiting.clear()
            above = nodes[parent]
            nodes.append(
                Node(
                    [*above.context, token],
                    [narrowed(text, s, token) for text, s in zip(self.texts, above.steps, strict=True)],
                    self.move_aligned(row, above, token),
                    above,
                )
            )
            depths.append(depths[parent] + 1)
        assert len(tree) == budget + 1 or max((p for p, _ in waiting.values()), default=0.0) < least


def bin_floor(probability: float) -> Any:
    """The largest number not above `probability` that has three bits behind its first."""
    mantissa, exponent = math.frexp(probability)
    return F(math.ldexp(math.floor(mantissa * 16) / 16, exponent))
