"""What others draft, to measure ours against. In: prompts and accepted tokens. Out: one DraftTree a step.

Each baseline serves one request at a time and is its own row, so that a replay asks all of them alike. They are our own,
written to draft what the published ones draft, in plain Python: compare how much of their drafts is accepted, not how long
drafting takes. `lookahead replay --baselines` loads this file from a checkout (lookahead/bench/replay.py).

prompt-lookup   one branch, copied from where the last tokens first stood in the request's own text
original-trie   a tree from the trie of arXiv 2312.12728, ranked as in its authors' public code
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence

import numpy as np

from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import DraftTree, chain, root_only
from lookahead.trie.file import Trie

LONGEST_NGRAM = 3  # tokens that prompt lookup searches for, then fewer
COPIED = 10  # tokens that prompt lookup copies, as the usual prompt_lookup_num_tokens=10 does
BRANCH = 12  # tokens; of the published 8 to 12: alike in the mean of four workloads, 12 ahead by 2 to 4 % where text is copied
PROMPT_WEIGHT = 10_000  # one occurrence in the request's own prompt outranks as many in outputs
END = -1  # stands behind each document


class PromptLookup:
    """Prompt lookup as in Hugging Face's `PromptLookupCandidateGenerator`: the earliest occurrence of the longest n-gram.

    Worked example: after the text 7 8 1 7 8 2 7 8 the n-gram of 3, "2 7 8", stands nowhere else; that of 2, "7 8", stands
    first at the very beginning, and so "1 7 8 2 7 8" is drafted, although "2" followed later.
    """

    source_names = ("prompt", "output")

    def __init__(self, tries: Sequence[Trie] = (), options: DraftOptions | None = None):
        """`tries` are not looked at: this baseline knows the request's own text only."""
        options = options or DraftOptions()
        self.options = dataclasses.replace(options, branch_length=min(COPIED, options.branch_length))
        self._text: list[int] = []
        self._first: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind its earliest occurrence
        self._prompt_length = 0

    def start(self, prompt_ids: Sequence[int] | np.ndarray) -> PromptLookup:
        """Begin a request: its prompt (at least one token) is searched from now on."""
        self.finish()
        self.accept(prompt_ids)
        self._prompt_length = len(self._text)
        return self

    def accept(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """The model said these tokens next."""
        for token in map(int, token_ids):
            self._text.append(token)
            for n in range(1, min(LONGEST_NGRAM, len(self._text)) + 1):
                self._first.setdefault(tuple(self._text[-n:]), len(self._text))

    def finish(self) -> None:
        """End the request: nothing of it is kept."""
        self._text, self._first = [], {}

    def draft(self, budget: int | None = None, branch_length: int | None = None) -> DraftTree:
        """One branch of at most 10 tokens; bounds as for `Row.draft`."""
        text = self._text
        length = min(_bounds(self.options, budget, branch_length))
        for n in range(min(LONGEST_NGRAM, len(text)), 0, -1):
            place = self._first[tuple(text[-n:])]
            copied = text[place : place + max(0, length)]
            if copied:
                tree = chain([text[-1], *copied])
                tree.sources[1:] = np.arange(place, place + len(copied)) >= self._prompt_length
                return tree
        return root_only(text[-1])


class OriginalTrie:
    """The trie of arXiv 2312.12728: branches of tokens with how often each was inserted, matched by the last two tokens.

    Prompt branches leave with their request. Output branches stay: of the job's outputs, each inserted as soon as it is whole,
    and beforehand those of the trie files' documents. From the authors' public code (alipay/PainlessInferenceAcceleration):

    - The tree under the last two tokens is taken if it has branch_length nodes or more, else that under the last token.
    - Half of the tree goes to the nodes most frequent in outputs, the rest to the most frequent by PROMPT_WEIGHT times the
      frequency in the prompt + that in outputs. Among equals, a branch is followed to its end before the next one.

    What is left out does not hold it back: no node is dropped to save memory, no word is barred from being matched alone, and
    nodes that tie for the last places of the tree fill it.
    """

    source_names = ("prompt", "output")  # outputs and trie files share their counts

    def __init__(self, tries: Sequence[Trie] = (), options: DraftOptions | None = None):
        options = options or DraftOptions()
        self.options = dataclasses.replace(options, branch_length=min(BRANCH, options.branch_length))
        longest = self.options.branch_length + 1  # matched by two tokens, a branch still goes on for branch_length tokens
        self._prompt = BranchTrie(longest)
        self._outputs = BranchTrie(longest)
        self._context: list[int] = []  # the last two tokens
        for trie in tries:
            for document in trie.documents():
                self._outputs.extend(document[document < trie.header.vocab_size].tolist())
                self._outputs.end_document()

    def start(self, prompt_ids: Sequence[int] | np.ndarray) -> OriginalTrie:
        """Begin a request: the branches of its prompt (at least one token) serve until it ends."""
        prompt = [int(token) for token in prompt_ids]
        self._prompt.extend(prompt)
        self._prompt.end_document()
        self._context = prompt[-2:]
        return self

    def accept(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """The model said these tokens next."""
        said = [int(token) for token in token_ids]
        self._outputs.extend(said)
        self._context = [*self._context, *said][-2:]

    def finish(self) -> None:
        """End the request: its output's last branches are inserted, those of its prompt are gone."""
        self._outputs.end_document()
        self._prompt = BranchTrie(self._prompt.longest)

    def draft(self, budget: int | None = None, branch_length: int | None = None) -> DraftTree:
        """The most frequent continuations of the last two tokens, else of the last one; bounds as for `Row.draft`."""
        most, longest = _bounds(self.options, budget, branch_length)
        tree = root_only(self._context[-1])
        if most <= 0 or longest <= 0:
            return tree
        for matched in (self._context, self._context[-1:]):
            tree = self._grow(matched, most, longest)
            if len(tree) >= longest:
                break
        return tree

    def _grow(self, matched: list[int], most: int, longest: int) -> DraftTree:
        """The tree under `matched`: at most `most` nodes below the root, `longest` on one path."""
        token_ids, parents, depths = [matched[-1]], [-1], [0]
        nodes: list[Nodes] = [(self._prompt.find(matched), self._outputs.find(matched))]  # of each place in the tree
        taken: dict[tuple[int, int], int] = {}  # (parent, token) -> place in the tree

        def fill(most: int, frequency: Callable[[Nodes], int]) -> None:
            """Take the most frequent nodes whose parents are taken, until there are `most`."""
            queue: list[tuple[int, int, int, int, Nodes]] = []
            offered, place = 0, 0
            while len(token_ids) <= most:
                if depths[place] < longest:
                    in_prompt, in_outputs = self._prompt.children(nodes[place][0]), self._outputs.children(nodes[place][1])
                    for token in reversed(in_outputs | in_prompt):
                        child = in_prompt.get(token), in_outputs.get(token)
                        offered += 1  # of equals the last one offered comes first, so a branch is followed to its end
                        heapq.heappush(queue, (-frequency(child), -offered, place, token, child))
                if not queue or queue[0][0] == 0:
                    return
                _, _, parent, token, child = heapq.heappop(queue)
                place = taken.setdefault((parent, token), len(token_ids))
                if place == len(token_ids):
                    token_ids.append(token)
                    parents.append(parent)
                    depths.append(depths[parent] + 1)
                    nodes.append(child)

        fill((most + 1) // 2, lambda both: _count(both[1]))
        fill(most, _mixed)
        frequencies = np.array([max(1, _mixed(both)) for both in nodes], np.float64)
        return DraftTree(
            np.array(token_ids, np.int32),
            np.array(parents, np.int32),
            (frequencies / frequencies[0]).astype(np.float32),
            np.array([-1, *(0 if in_prompt else 1 for in_prompt, _ in nodes[1:])], np.int32),
            np.full(len(nodes), len(matched), np.int32),
        )


class Node:
    """A path that begins with some token. places: where in the text it goes on; children: by token, once looked into."""

    __slots__ = ("children", "places")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.children: dict[int, Node] | None = None


Nodes = tuple[Node | None, Node | None]  # of one path: in the prompt's trie, in that of the outputs


class BranchTrie:
    """All branches of up to `longest` tokens behind each token of a text; a node's count is how many go through it.

    Inserting every branch node by node would make about ten nodes a token, most of them never seen again. Here the text is
    kept once, and a node's children are made when it is first looked into, by sorting its places by the token there.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.tokens: list[int] = []
        self._first: dict[int, Node] = {}  # by first token
        self._inserted = 0  # places before this one have their branch inserted

    def extend(self, token_ids: list[int]) -> None:
        """Add to the running document; a branch is inserted as soon as all its tokens are there."""
        self.tokens += token_ids
        self._insert_before(len(self.tokens) - self.longest)

    def end_document(self) -> None:
        """Insert the shorter branches at the end of the running document; the next one is not its continuation."""
        self.tokens.append(END)
        self._insert_before(len(self.tokens) - 1)
        self._inserted = len(self.tokens)

    def find(self, path: list[int]) -> Node | None:
        """The node of a path of one token or more, None if it was never inserted."""
        node = self._first.get(path[0])
        for token in path[1:]:
            node = self.children(node).get(token)
        return node

    def children(self, node: Node | None) -> dict[int, Node]:
        """Token -> node of each continuation, the one inserted first first, of a node less than `longest` tokens deep."""
        if node is None:
            return {}
        if node.children is None:
            node.children = {}
            for place in node.places:
                _add(node.children, self.tokens[place], place)
        return node.children

    def _insert_before(self, end: int) -> None:
        for start in range(self._inserted, end):
            node = _add(self._first, self.tokens[start], start)
            place = start
            while node is not None and node.children is not None:
                place += 1
                node = _add(node.children, self.tokens[place], place)
        self._inserted = max(self._inserted, end)


def _add(nodes: dict[int, Node], token: int, place: int) -> Node | None:
    """Count one more path through the node of `token`, which stands at `place`; None behind the end of a document."""
    if token == END:
        return None
    node = nodes.get(token)
    if node is None:
        node = nodes[token] = Node()
    node.places.append(place + 1)
    return node


def _count(node: Node | None) -> int:
    return len(node.places) if node else 0


def _mixed(both: Nodes) -> int:
    return PROMPT_WEIGHT * _count(both[0]) + _count(both[1])


def _bounds(options: DraftOptions, budget: int | None, branch_length: int | None) -> tuple[int, int]:
    """(draft tokens at most, draft tokens on one path at most): what is asked for, within the options."""
    most, longest = options.decoding_length - 1, options.branch_length
    return most if budget is None else min(budget, most), longest if branch_length is None else min(branch_length, longest)


BASELINES: dict[str, type[PromptLookup] | type[OriginalTrie]] = {"prompt-lookup": PromptLookup, "original-trie": OriginalTrie}
