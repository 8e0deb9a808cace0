"""Drafts whose use is known: stand-ins for Drafter, made from the answer that a model is known to give."""

import numpy as np

from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.sources import Sources
from lookahead.draft.tree import DraftTree, chain

VOCAB_SIZE = 97  # of the tiny models
DRAFTS = ["none", "perfect", "always_wrong", "random_trees", "trie"]


def drafter_of(draft, answers, trie):
    """Any of DRAFTS. answers: (prompt, what the model says after it). trie: of these."""
    if draft == "none":
        return Drafter([], DraftOptions("off"))
    if draft == "trie":
        return Drafter([trie], DraftOptions(decoding_length=16, adaptive=False))
    return KnownAnswer(answers, {"perfect": perfect, "always_wrong": always_wrong, "random_trees": random_trees(0)}[draft])


class KnownAnswer(Drafter):
    """Drafts trees of its own making, whatever the budget.

    propose(root token, rest of the answer) -> DraftTree
    """

    def __init__(self, answers, propose):
        super().__init__([], DraftOptions(decoding_length=16, recycle=False, adaptive=False))
        self.sources, self.source_names = Always((), self.source_names, 0), ("known", *self.source_names[1:])
        self.answers = {tuple(prompt): answer for prompt, answer in answers}
        self.propose = propose

    @property
    def running(self):
        return len(self._rows) - len(self._free)

    def merge_sources(self, rows, limits, price, spans):
        for k, row in enumerate(rows):
            tree = self.draft(row, int(limits[k, 2]))
            arrays, number, nodes = self.rows, row.number, len(tree)
            arrays.trees[number, :, :nodes] = tree.token_ids, tree.parents, tree.sources, tree.matches
            arrays.reach[number, :, :nodes] = tree.probabilities
            arrays.nodes[number] = spans[k, 1] = nodes

    def draft(self, row, longest):
        """Nodes as deep as that at most."""
        text = row.text.tolist()
        prompt = row.prompt_length
        answer = self.answers[tuple(text[:prompt])]
        rest = answer[len(text) - prompt :] if text[prompt:] == answer[: len(text) - prompt] else []
        tree = self.propose(text[-1], rest)
        kept = np.flatnonzero(tree.depths() <= longest)  # parents are less deep: still a tree
        renumbered = np.full(len(tree) + 1, -1)
        renumbered[kept] = np.arange(len(kept))
        parents = renumbered[tree.parents[kept]].astype(np.int32)
        tree = DraftTree(tree.token_ids[kept], parents, tree.probabilities[kept], tree.sources[kept], tree.matches[kept])
        return chain(tree.token_ids[best_path(tree, rest)], source=0) if self.options.strategy == "single" else tree


class Always(Sources):
    """None of the user's own, but asked for."""

    def __bool__(self):
        return True


def best_path(tree, rest):
    """The path of `tree` that agrees longest with `rest`, and then goes on to a leaf."""
    node, path = 0, [0]
    while len(children := np.flatnonzero(tree.parents == node)):
        right = [c for c in children if len(path) <= len(rest) and tree.token_ids[c] == rest[len(path) - 1]]
        node = int((right or children)[0])
        path.append(node)
    return path


def perfect(last, rest):
    return chain([last, *rest[:7]], source=0)


def always_wrong(last, rest):
    """Branches of tokens that the model does not say there: none equals the answer's at its depth."""
    token_ids, parents = [last], [-1]
    for off in (1, 2, 3):
        for depth, token in enumerate(rest[:4]):
            parents.append(len(token_ids) - 1 if depth else 0)
            token_ids.append((token + off) % VOCAB_SIZE)
    return tree_of(token_ids, parents)


def random_trees(seed):
    """Trees of random shape whose nodes are right by chance: accepted nodes lie scattered among rejected ones."""
    generator = np.random.default_rng(seed)

    def propose(last, rest):
        token_ids, parents, depths = [last], [-1], [0]
        for _ in range(generator.integers(0, 15)):
            parent = int(generator.choice(len(token_ids), p=softmax(depths)))
            depth = depths[parent]
            right = depth < len(rest) and generator.random() < 0.5
            token_ids.append(rest[depth] if right else int(generator.integers(0, VOCAB_SIZE)))
            parents.append(parent)
            depths.append(depth + 1)
        return tree_of(token_ids, parents)

    return propose


def softmax(values):
    raised = np.exp(np.array(values) / 2)
    return raised / raised.sum()


def tree_of(token_ids, parents):
    sources, matches = np.zeros((2, len(parents)), np.int32)
    sources[0] = -1
    ones = np.ones(len(parents), np.float32)
    return DraftTree(np.array(token_ids, np.int32), np.array(parents, np.int32), ones, sources, matches)


def paths_of(tree):
    """The tokens from the root to each node, the root's own left out."""
    paths = [()]
    for token_id, parent in zip(tree.token_ids[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token_id))
    return paths


def answered(drafter, prompt, answer):
    """A finished request."""
    row = drafter.start(prompt)
    row.accept(answer)
    row.finish()
