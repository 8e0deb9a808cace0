"""Explains a decode step. In: a draft tree and what the model made of it. Out: lines to draw, as data.

The loops that decode or replay hand a `Step` to whoever watches them; nothing here prints or knows how text looks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from lookahead.draft.tree import DraftTree, name_of
from lookahead.trie.file import Trie

CONTEXT = 48  # tokens of the text so far that a step tells
MOST = 20  # draft tokens that are drawn, accepted ones apart
OWN = -1  # stands among the nodes for the model's own token

Kind = Literal["accepted", "drafted", "own"]


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step of a request.

    number    1, 2, ... in its request
    context   the last CONTEXT token ids of the text before the step; the last one is the tree's root
    tree      what was drafted
    accepted  nodes of the tree that the model emitted, in path order, without the root
    emitted      token ids that the step gave: those of `accepted`, then the model's own unless the text ended before it
    """

    number: int
    context: tuple[int, ...]
    tree: DraftTree
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    source_names: Sequence[str]

    @staticmethod
    def of(
        number: int,
        prompt: Sequence[int],
        output: Sequence[int],
        tree: DraftTree,
        path: Sequence[int],
        emitted: Sequence[int],
        source_names: Sequence[str],
    ) -> Step:
        """path: nodes as `DraftTree.follow` gives them; output: token ids of the answer, `emitted` included."""
        before = output[: len(output) - len(emitted)][-CONTEXT:]
        context = (*prompt[-CONTEXT:], *before)[-CONTEXT:]
        return Step(number, context, tree, tuple(path[1 : len(emitted) + 1]), tuple(emitted), source_names)

    @property
    def own(self) -> int | None:
        """The model's own token behind the accepted ones; None if the text ended before it."""
        return self.emitted[-1] if len(self.emitted) > len(self.accepted) else None

    def outline(self, most: int = MOST) -> Outline:
        """The tree to draw: the `most` probable nodes and all accepted ones."""
        return outline(self.tree, self.source_names, self.accepted, self.own, most)


Observer = Callable[[Step], None]
ObserverOf = Callable[[int], Observer | None]  # of a row by its number in the job, from 1; None: nobody watches


def nobody(row: int) -> None:
    """No row is watched."""


@dataclasses.dataclass(frozen=True)
class Line:
    """Tokens to draw on one line: one after the other without a fork, of one source, all accepted or none.

    nodes    of the tree; (OWN,) for the model's own token
    before   the token that they follow
    first    probability of the path from the root to the first of them; 1 for the model's own token
    last     that of the path to the last of them
    source   their draft source; "" for the model's own token
    match    tokens of the context that agree with the occurrence where the first of them was found
    forks    of the forks on the way to this line, from the root: True where the way is the fork's last branch
    begins   True: the line begins a branch of the last fork; else it continues behind the line above
    """

    kind: Kind
    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    before: int
    first: float
    last: float
    source: str
    match: int
    forks: tuple[bool, ...]
    begins: bool


@dataclasses.dataclass(frozen=True)
class Outline:
    """Lines from top to bottom; at a fork, what was accepted comes first, then the most probable. left_out: draft tokens."""

    lines: list[Line]
    left_out: int


def outline(
    tree: DraftTree,
    source_names: Sequence[str],
    accepted: Sequence[int] = (),
    own: int | None = None,
    most: int | None = None,
) -> Outline:
    """Choose what to draw of a tree.

    accepted: nodes in path order, without the root. own: the model's own token behind them. most: nodes that are drawn, the
    most probable ones, besides those accepted and all that lead to them (None: all).

    Example: of the nodes 1 -> 2 -> {3, 4}, where 1 and 2 come from one source and 1 to 3 are accepted, the lines are (1, 2),
    behind it the branches (3,) and (4,), and behind 3 the model's own token.
    """
    parents, path = tree.parents.tolist(), set(accepted)
    ranked = np.argsort(-tree.probabilities[1:], kind="stable") + 1
    drafted = ranked[tree.probabilities[ranked] > 0].tolist()  # other nodes only fill a forward up
    shown = path.union(drafted[:most])
    for node in range(len(tree) - 1, 0, -1):
        if node in shown:
            shown.add(parents[node])
    children: dict[int, list[int]] = {node: [] for node in (*shown, 0, OWN)}
    for node in sorted(shown - {0}, key=lambda node: (node not in path, -tree.probabilities[node], node)):
        children[parents[node]].append(node)
    if own is not None:
        children[accepted[-1] if accepted else 0].insert(0, OWN)

    def like(node: int) -> tuple[Kind, str]:
        """Return what nodes on one line have in common."""
        if node == OWN:
            return "own", ""
        source = tree.sources[node]
        return "accepted" if node in path else "drafted", name_of(source, source_names)

    lines: list[Line] = []
    waiting: list[tuple[int, int, tuple[bool, ...], bool]] = []  # (node, its parent, forks, begins), the next to draw last

    def follow(node: int, forks: tuple[bool, ...]) -> None:
        below = children[node]
        for child in below[::-1]:
            fork = len(below) > 1
            waiting.append((child, node, (*forks, child == below[-1]) if fork else forks, fork))

    follow(0, ())
    while waiting:
        node, parent, forks, begins = waiting.pop()
        nodes = [node]
        while len(children[nodes[-1]]) == 1 and like(children[nodes[-1]][0]) == like(node):
            nodes += children[nodes[-1]]
        kind, source = like(node)
        before = int(tree.token_ids[parent])
        if node == OWN:
            assert own is not None
            lines.append(Line(kind, (OWN,), (own,), before, 1.0, 1.0, source, 0, forks, begins))
            continue
        token_ids = tuple(tree.token_ids[nodes].tolist())
        first, last = (float(tree.probabilities[n]) for n in (node, nodes[-1]))
        lines.append(Line(kind, tuple(nodes), token_ids, before, first, last, source, int(tree.matches[node]), forks, begins))
        follow(nodes[-1], forks)
    return Outline(lines, len(set(drafted) - shown))


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Counts in a trie: the context's end stands there `of` times, and the token follows it `count` times."""

    count: int
    of: int


def evidence(trie: Trie, source: int, context: Sequence[int], tree: DraftTree) -> list[Evidence | None]:
    """Look up what the trie holds for each node that `source`, the number of `trie`, drafted behind `context`.

    None for other nodes, and where the match is not exact: the token stands where a broken match would be by now.
    """
    paths: list[list[int]] = [[]]
    found: list[Evidence | None] = [None]
    for node in range(1, len(tree)):
        above, token = paths[tree.parents[node]], int(tree.token_ids[node])
        match = min(int(tree.matches[node]), trie.header.depth - 1)
        behind = [*context, *above][-match:] if match else []
        count = trie.match([*behind, token]).count if tree.sources[node] == source else 0
        of = trie.match(behind).count if count and behind else trie.header.branches
        paths.append([*above, token])
        found.append(Evidence(count, of) if count else None)
    return found
