"""Drafts for one sequence after the other. In: prompts and accepted tokens. Out: one DraftTree a step.

The drafter owns the job's memory: the running request's own prompt and output, the finished outputs of the job, and the
prebuilt tries. A request's prompt serves its own request only and is gone when the request ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from lookahead.draft import candidates, planner
from lookahead.draft.tree import DraftTree, root_only
from lookahead.errors import UsageError
from lookahead.trie.build import LEFT_CONTEXT
from lookahead.trie.file import Trie
from lookahead.trie.session import TokenLog

Strategy = Literal["hierarchical", "parallel", "single", "off"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
LONGEST_REQUEST = 1 << 20  # tokens of one request that its own text is searched in


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """How much is guessed in a step.

    decoding_length  tokens in one forward: the root + the draft tokens
    branch_length    draft tokens on one path below the root
    least            path probability below which a node is not worth verifying
    session_tokens   output tokens of the job that are remembered
    adaptive         decoding_length is the limit; each step verifies what pays at measured costs (budget/goodput.py)
    """

    strategy: Strategy = "hierarchical"
    decoding_length: int = 64
    branch_length: int = 32
    least: float = 1e-3
    session_tokens: int = 4_000_000
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"strategy {self.strategy!r}: choose one of {', '.join(STRATEGIES)}.")
        if not 1 <= self.decoding_length <= 1024 or not 1 <= self.branch_length <= 1024:
            raise UsageError("decoding length and branch length must lie between 1 and 1024 tokens.")
        if self.session_tokens < 0:
            raise UsageError("session tokens must be 0 or more.")


class Drafter:
    """start(prompt) -> draft() -> accept(tokens) -> draft() -> ... -> finish(), for one request at a time."""

    def __init__(self, tries: Sequence[Trie] = (), options: DraftOptions | None = None):
        self.options = options or DraftOptions()
        self.tries = tuple(tries)
        self.source_names = ("prompt", "output", "session", *(f"trie:{trie.name}" for trie in self.tries))
        self.own = TokenLog(LONGEST_REQUEST, hash_bits=12)
        self.session = TokenLog(self.options.session_tokens)
        self._prompt_length = 0
        self._root = 0
        rows = 4 * candidates.PER_CHAIN + candidates.PER_TRIE * sum(len(trie.segments) for trie in self.tries)
        self._table = candidates.CandidateTable(rows, self.options.branch_length)
        nodes = self.options.decoding_length
        self._lists = np.empty(rows * (nodes + 1), np.int32)
        self._nodes = (
            np.empty(nodes, np.int32),
            np.empty(nodes, np.int32),
            np.empty(nodes, np.float32),
            np.empty(nodes, np.int32),
        )

    def start(self, prompt_ids: Sequence[int] | np.ndarray) -> None:
        """Begin a request: its prompt (at least one token) becomes its own text."""
        self.own.clear()
        self.accept(prompt_ids)
        self._prompt_length = len(self.own)

    def accept(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """The model said these tokens next."""
        if len(token_ids):
            self._root = int(token_ids[-1])
            if self.options.strategy != "off":  # plain decoding needs no memory
                self.own.append(token_ids)

    def finish(self) -> None:
        """End the request: its output joins the job's memory, its prompt is forgotten."""
        text = self.own.tokens[: len(self.own)]
        if len(self.own) > self._prompt_length:
            start = max(0, self._prompt_length - LEFT_CONTEXT)
            self.session.append_document(text[start : self._prompt_length], text[self._prompt_length :])
        self.own.clear()
        self._prompt_length = 0

    def warm_up(self) -> None:
        """Compile the kernels that this drafter's sources need (once per machine), so that the first draft is no slower."""
        probe = Drafter(self.tries, dataclasses.replace(self.options, session_tokens=16))
        for _ in range(2):
            probe.start([0, 1, 0, 1])
            probe.draft()
            probe.accept([0])
            probe.finish()

    def restrict_to_chains(self) -> None:
        """From now on draft one branch only: the model takes no tree mask."""
        if self.options.strategy != "off":
            self.options = dataclasses.replace(self.options, strategy="single")

    def draft(self, budget: int | None = None, branch_length: int | None = None) -> DraftTree:
        """The most probable continuations of the request's text.

        budget: draft tokens at most (default and upper limit: decoding_length - 1).
        branch_length: draft tokens on one path at most (default and upper limit: the option of this name).
        """
        options, own = self.options, self.own
        context, length = own.tokens, len(own)
        most = options.decoding_length - 1
        most = most if budget is None else min(budget, most)
        longest = options.branch_length if branch_length is None else min(branch_length, options.branch_length)
        if options.strategy == "off" or most <= 0 or longest <= 0:
            return root_only(self._root)
        table = self._table.arrays
        logs = (own.previous1, own.previous2, own.head1, own.head2)
        filled = candidates.from_log(*table, 0, context, length, *logs, context, length, True, self._prompt_length, 0)
        if len(self.session):
            filled = candidates.from_log(
                *table, filled, self.session.tokens, len(self.session), self.session.previous1, self.session.previous2,
                self.session.head1, self.session.head2, context, length, False, 0, 2,
            )  # fmt: skip
        for number, trie in enumerate(self.tries):
            matches = trie.match_orders(context, length, candidates.LONGEST_MATCH)
            for index, part in enumerate(trie.segments):
                filled = candidates.from_trie(
                    *table, filled, part.tokens, part.suffixes, trie.header.separator,
                    part.document_ends, part.document_sources, trie.source_weights, trie.weighted,
                    matches, index, context, length, 3 + number,
                )  # fmt: skip
        nodes = planner.grow(
            *table, filled, self._root, most, longest, options.least, options.strategy == "single",
            self._lists, *self._nodes,
        )  # fmt: skip
        tree = DraftTree(*(a[:nodes].copy() for a in self._nodes))
        return as_parallel(tree, most) if options.strategy == "parallel" else tree


def as_parallel(tree: DraftTree, budget: int) -> DraftTree:
    """The branches of `tree` side by side, no prefix shared, most probable leaf first, until `budget` tokens are used."""
    leaf = np.ones(len(tree), bool)
    leaf[tree.parents[1:]] = False
    leaf[0] = False
    nodes: list[int] = [0]
    parents: list[int] = [-1]
    parent_of = tree.parents.tolist()
    for node in sorted(np.flatnonzero(leaf).tolist(), key=lambda n: -tree.probabilities[n]):
        path = []
        while node > 0:
            path.append(node)
            node = parent_of[node]
        path = path[::-1][: budget + 1 - len(nodes)]
        for depth, step in enumerate(path):
            parents.append(0 if depth == 0 else len(nodes) - 1)
            nodes.append(step)
        if len(nodes) > budget:
            break
    picked = np.array(nodes)
    return DraftTree(tree.token_ids[picked], np.array(parents, np.int32), tree.probabilities[picked], tree.sources[picked])
