"""Draft sources of a user's own, in addition to ours. In: what they propose after a context. Out: one tree of their drafts and
ours.

A source is any Python object with the two methods of `DraftSource`. What it proposes is checked here, so that nothing it does
can change an output: it may be wrong, slow or broken, and only the number of steps changes. How often its proposals are right
is counted by source, depth, rank and by how probable our own mixture holds the same token; with that share as their probability
they compete for nodes of the tree. A source that raises or returns what is not a proposal is disabled with one warning.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from lookahead.budget.worth import SourceUtility
from lookahead.draft.mixture import MEMORY
from lookahead.draft.tree import GRAMMAR
from lookahead.errors import UsageError

log = logging.getLogger(__name__)

LONGEST, MOST_PATHS = 1024, 256  # tokens of a path, paths of a proposal: more is taken for a mistake
DEPTHS, RANKS = 8, 4  # classes of each that are distinguished; the last stands for all beyond
OURS = (0.0, 0.05, 0.2, 0.5)  # probabilities by our own mixture in classes, from above these on; 0: not drafted by us
ITS_OWN = 0.5  # of the tokens accepted from a source, those that no other would have drafted instead


class DraftSource(Protocol):
    """A user's own source of drafts. `name`, if it has one, is what reports call it; else the name of its class.

    Example: drafts what followed the last two tokens in a list of known texts.

        class KnownTexts:
            name = "known texts"

            def __init__(self, texts):
                self.texts = texts

            def propose(self, request, context, most):
                end = context[-2:].tolist()
                found = [(text, at) for text in self.texts for at in range(2, len(text)) if text[at - 2 : at] == end]
                return [text[at : at + most] for text, at in found[:8]]

            def observe(self, request, token_ids, ended):
                pass

        drafter = Drafter(sources=[KnownTexts([[5, 6, 7, 8, 9]])])  # or LookaheadEngine(model, sources=[...])
        tree = drafter.start([1, 5, 6]).draft()
    """

    def propose(self, request: int, context: np.ndarray, most: int) -> Iterable[Sequence[int]]:
        """Likely continuations of a text, the most probable first; nothing if there is none.

        request: a number that no other request has. context: int32 [length], read-only: the token ids of its prompt and answer
        so far. most: tokens of a continuation that can be used; longer ones are cut. It is called once per row and step.
        """

    def observe(self, request: int, token_ids: Sequence[int], ended: bool) -> None:
        """The model has decoded these tokens next in this request. ended: it is over, and its number will not come again."""


@dataclasses.dataclass
class _Source:
    """State of one source. number: in the drafter's source names. seconds: of the calls since the latest step."""

    draft: Any
    name: str
    number: int
    hits: np.ndarray
    tried: np.ndarray
    worth: SourceUtility = dataclasses.field(default_factory=lambda: SourceUtility(ITS_OWN))
    broken: bool = False
    seconds: float = 0.0


@dataclasses.dataclass
class _Proposed:
    """Pending proposals of a source for a row: the tokens proposed behind each path, and the class of each."""

    source: _Source
    following: dict[tuple[int, ...], list[tuple[int, tuple[int, int, int]]]]


class Sources:
    """The sources of a drafter and what is learned about them.

    taken: names that they cannot have. first: number of the first of them. vocab_size: ids must lie below it.
    """

    def __init__(
        self, sources: DraftSource | Sequence[DraftSource], taken: Sequence[str], first: int, vocab_size: int = 1 << 31
    ) -> None:
        """Raises UsageError for an object that is not a source, and for a name that is taken."""
        self.vocab_size = vocab_size
        self._all: list[_Source] = []
        names = list(taken)
        for source in [sources] if hasattr(sources, "propose") else list(sources):
            if isinstance(source, type) or not callable(getattr(source, "propose", None)):
                what = f"the class {source.__name__}" if isinstance(source, type) else f"a {type(source).__name__}"
                raise UsageError(f"{what} is not a draft source: give an object with the methods of DraftSource.")
            name = getattr(source, "name", None)
            name = name if isinstance(name, str) and name else type(source).__name__
            if name in names:
                raise UsageError(f'draft source "{name}": the name is taken. Give each source a name of its own.')
            shape = DEPTHS, RANKS, len(OURS) + 1
            self._all.append(_Source(source, name, first + len(self._all), np.zeros(shape), np.zeros(shape)))
            names.append(name)
        self._requests: dict[int, int] = {}  # number of the request in each row
        self._proposed: dict[int, list[_Proposed]] = {}  # by row
        self._next = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self._all)

    def __bool__(self) -> bool:
        """True if any source works."""
        return any(not source.broken for source in self._all)

    def forget(self) -> None:
        """Trust them as at first; what is broken stays so."""
        for source in self._all:
            source.hits[:], source.tried[:], source.worth = 0, 0, SourceUtility(ITS_OWN)
        self._proposed.clear()

    def start(self, row: int) -> None:
        """A request begins in this row."""
        self._requests[row] = self._next
        self._next += 1
        self._proposed.pop(row, None)

    def accept(self, row: int, token_ids: Sequence[int], learn: bool) -> None:
        """The model has emitted these tokens: they tell what of the latest proposals was right."""
        proposed = self._proposed.pop(row, [])
        if learn:
            for each in proposed:
                _judge(each, token_ids)
        if len(token_ids):
            self._tell(row, [int(token) for token in token_ids], False)

    def finish(self, row: int) -> None:
        """The request in this row is over."""
        self._proposed.pop(row, None)
        self._tell(row, [], True)
        self._requests.pop(row, None)

    def observe_step(self, counts: Sequence[int], step: float, emitted: float, rows: int, agreed: Any = None) -> None:
        """A step of `rows` rows took that many seconds and emitted that many tokens, `counts` of them from each source.

        Sources whose calls take more time than their tokens save are not asked for a while. agreed: of a time, what all
        processes that share a model take it for.
        """
        for source, count in zip(self._all, counts, strict=True):
            seconds, source.seconds = source.seconds, 0.0
            source.worth.observe(agreed(seconds) if agreed else seconds, count, step, emitted, rows)

    def grow(self, row: int, context: np.ndarray, grown: Grown, limits: Limits) -> Grown:
        """The most probable tree of what was grown for a row and what the sources propose for it."""
        proposals = []
        text = context.view()
        text.flags.writeable = False
        for source in self._all:
            if source.broken or limits.depth < 1 or (limits.adaptive and not source.worth.pays):
                continue
            began = time.perf_counter()
            paths = self._ask(source, self._requests[row], text, limits.depth)
            source.seconds += time.perf_counter() - began
            if paths:
                proposals.append((source, paths))
        if not proposals:
            return grown
        merged = _Merge(grown)
        self._proposed[row] = [_Proposed(source, merged.add(source, paths)) for source, paths in proposals]
        return merged.chain(limits) if limits.single else merged.best(limits)

    def _ask(self, source: _Source, request: int, context: np.ndarray, most: int) -> list[list[int]]:
        """The paths that a source proposes, checked and cut to `most` tokens; a source that fails is disabled."""
        try:
            return _checked(source.draft.propose(request, context, most), most, self.vocab_size)
        except Exception as error:  # anything that a user's code raises
            self._disable(source, error)
            return []

    def _tell(self, row: int, token_ids: list[int], ended: bool) -> None:
        for source in self._all:
            observe = getattr(source.draft, "observe", None)
            if source.broken or observe is None:
                continue
            began = time.perf_counter()
            try:
                observe(self._requests.get(row, -1), list(token_ids), ended)
            except Exception as error:
                self._disable(source, error)
            source.seconds += time.perf_counter() - began

    def _disable(self, source: _Source, error: Exception) -> None:
        source.broken = True
        what = str(error) if isinstance(error, _NoProposal) else f"{type(error).__name__}: {error}"
        log.warning('draft source "%s" is disabled: %s. Outputs are not affected.', source.name, what.rstrip("."))


class _NoProposal(Exception):
    """Raised when a source returns something else than paths of token ids."""


def _checked(proposed: Any, most: int, vocab_size: int) -> list[list[int]]:
    """Paths of plain ints, each once, without empty ones. Raises _NoProposal."""
    paths: dict[tuple[int, ...], None] = {}
    if proposed is None:
        return []
    if isinstance(proposed, str | bytes) or not isinstance(proposed, Iterable):
        raise _NoProposal(f"propose returned a {type(proposed).__name__}, not continuations")
    for number, path in enumerate(proposed):
        if number >= MOST_PATHS:
            raise _NoProposal(f"propose returned more than {MOST_PATHS} continuations")
        if isinstance(path, str | bytes) or not isinstance(path, Iterable):
            raise _NoProposal(f"propose returned a {type(path).__name__} as a continuation, not token ids")
        ids: list[int] = []
        for token in path:
            if len(ids) == LONGEST:
                raise _NoProposal(f"propose returned a continuation of more than {LONGEST} tokens")
            if isinstance(token, bool) or not hasattr(type(token), "__index__"):
                raise _NoProposal(f"propose returned a {type(token).__name__} as a token id")
            token = operator.index(token)
            if not 0 <= token < vocab_size:
                raise _NoProposal(f"propose returned token id {token}, outside the vocabulary of {vocab_size}")
            ids.append(token)
        if ids:
            paths[tuple(ids[:most])] = None
    return [list(path) for path in paths]


def _judge(proposed: _Proposed, token_ids: Sequence[int]) -> None:
    """Count each proposal at a position that the model has reached."""
    emitted: tuple[int, ...] = ()
    source = proposed.source
    for token in token_ids:
        for following, kind in proposed.following.get(emitted, ()):
            source.tried[kind] += 1
            source.hits[kind] += following == token
            if source.tried[kind] > MEMORY:  # as a cell of the mixture
                source.tried[kind] *= 0.5
                source.hits[kind] *= 0.5
        emitted = (*emitted, int(token))


@dataclasses.dataclass(frozen=True)
class Grown:
    """A tree as it stands in the drafter's arrays, parents before children, the most probable first.

    tree: int32 [4, nodes], see arrays.TREE_TOKENS and the others. reach: float32 [2, nodes], computed and calibrated
    probabilities of paths. Computed ones of a merged tree are 0: our calibration does not count it, as the nodes that proposals
    have displaced are missing from it.
    """

    tree: np.ndarray
    reach: np.ndarray


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a tree. most: nodes below the root. depth: of a node. price: path probability that a node must have. single:
    one branch. adaptive: do not ask sources that take more than they save.
    """

    most: int
    depth: int
    price: float = 0.0
    single: bool = False
    adaptive: bool = False

    def allows(self, probability: float, nodes: int) -> bool:
        """A node of this probability next to that many, the root included."""
        return nodes <= self.most and probability >= self.price


class _Merge:
    """Our tree, to which proposals are added."""

    def __init__(self, grown: Grown) -> None:
        tokens, parents, sources, matches = grown.tree.tolist()
        self.tokens, self.parents, self.sources, self.matches = tokens, parents, sources, matches
        self.own = grown.reach[1].tolist()
        self.depths = [0] * len(tokens)
        for node in range(1, len(tokens)):
            self.depths[node] = self.depths[parents[node]] + 1
        self.children: dict[tuple[int, int], int] = {(p, t): n for n, (p, t) in enumerate(zip(parents, tokens, strict=True))}
        self.below: dict[int, list[int]] = {}
        for node in range(1, len(tokens)):
            self.below.setdefault(parents[node], []).append(node)
        self.trusted: dict[int, tuple[float, int]] = {}  # of proposed nodes the best source's share and number

    def add(self, source: _Source, paths: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[tuple[int, Any]]]:
        """Add the paths of one source. Returns what `_Proposed.following` holds."""
        following: dict[tuple[int, ...], list[tuple[int, Any]]] = {}
        seen: set[int] = set()
        for path in paths:
            node = 0
            for at, token in enumerate(path):
                if self._is_forced(node, token):
                    break
                child = self._child(node, token)
                if child not in seen:
                    seen.add(child)
                    rank = len(following.setdefault(tuple(path[:at]), []))
                    kind, share = self._trust(source, child, rank)
                    following[tuple(path[:at])].append((token, kind))
                    if share > self.trusted.get(child, (-1.0, 0))[0]:
                        self.trusted[child] = share, source.number
                node = child
        return following

    def best(self, limits: Limits) -> Grown:
        """Pick the most probable nodes of the whole tree."""
        values = self._path_probabilities()
        order = sorted(range(1, len(values)), key=lambda node: (-values[node], node))
        picked = [0]
        for node in order:
            if not limits.allows(values[node], len(picked)):
                break
            picked.append(node)
        return self._written(picked, values)

    def chain(self, limits: Limits) -> Grown:
        """The most probable child of the root, of that one, and so on."""
        values = self._path_probabilities()
        picked = [0]
        while children := self.below.get(picked[-1]):
            node = max(children, key=lambda child: values[child])
            if not limits.allows(values[node], len(picked)):
                break
            picked.append(node)
        return self._written(picked, values)

    def _child(self, node: int, token: int) -> int:
        """The child of a node with this token, made if need be."""
        child = self.children.get((node, token))
        if child is None:
            child = self.children[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
            self.sources.append(-1)
            self.matches.append(0)
            self.own.append(0.0)
            self.depths.append(self.depths[node] + 1)
            self.below.setdefault(node, []).append(child)
        return child

    def _is_forced(self, node: int, token: int) -> bool:
        """Another token must come here."""
        return any(self.sources[child] == GRAMMAR and self.tokens[child] != token for child in self.below.get(node, ()))

    def _ours(self, node: int) -> float:
        """The probability that our mixture gives a node once its parent is right; 0 if it has not drafted it."""
        before = self.own[self.parents[node]]
        return self.own[node] / before if before > 0 else 0.0

    def _trust(self, source: _Source, node: int, rank: int) -> tuple[tuple[int, int, int], float]:
        """(class of a proposal, share of such that are right)."""
        ours = self._ours(node)
        kind = min(self.depths[node], DEPTHS) - 1, min(rank, RANKS - 1), sum(ours > edge for edge in OURS)
        expected = max(ours, 0.5 / (1 + rank))  # the rule of succession: as if one of two had been right
        return kind, (source.hits[kind] + 2 * expected) / (source.tried[kind] + 2)

    def _path_probabilities(self) -> list[float]:
        """Compute each node's path probability: proposed nodes get their source's share, others what is left over."""
        values = [1.0] * len(self.tokens)
        for node, children in sorted(self.below.items()):
            proposed = [child for child in children if child in self.trusted and self.sources[child] != GRAMMAR]
            shares = {child: self.trusted[child][0] for child in proposed}
            total = sum(shares.values())
            scale = 1 / total if total > 1 else 1.0
            left = max(0.0, 1 - total * scale)
            ours = sum(self._ours(child) for child in proposed)
            rest = min(1.0, left / max(1e-6, 1 - ours))
            for child in children:
                share = shares[child] * scale if child in shares else self._ours(child) * rest
                values[child] = values[node] * share
                if child in shares and share > self._ours(child):
                    self.sources[child] = self.trusted[child][1]
        return values

    def _written(self, picked: Sequence[int], values: Sequence[float]) -> Grown:
        """These nodes as arrays; a parent stands before its children."""
        index_of = {node: index for index, node in enumerate(picked)}
        parents = [index_of.get(self.parents[node], -1) for node in picked]
        columns = [[column[node] for node in picked] for column in (self.tokens, self.sources, self.matches)]
        tree = np.array([columns[0], parents, columns[1], columns[2]], np.int32)
        reach = np.array([[float(node == 0) for node in picked], [values[node] for node in picked]], np.float32)
        return Grown(tree, reach)
