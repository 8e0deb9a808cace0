"""Drafts for the rows of a batch. In: prompts and accepted tokens. Out: one DraftTree a row and step.

The drafter owns what rows share: the prebuilt tries, the memory of the job's finished outputs, and all that has been learned
about which of them to believe. A `Row` is one running request with its own text. A request's prompt serves its own request only
and is gone when the request ends.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lookahead.arguments import numbers_of
from lookahead.budget.worth import SourceUtility
from lookahead.draft import planner
from lookahead.draft.arrays import Block, rows_block, shared_block
from lookahead.draft.calibration import EDGES, Calibration
from lookahead.draft.cells import AT, CELLS, RECYCLED, SESSION
from lookahead.draft.growth import TreeBuilder
from lookahead.draft.mixture import FACTORS, FIRST_GRADIENTS
from lookahead.draft.options import DraftOptions
from lookahead.draft.own_text import OwnText
from lookahead.draft.priors import Priors, load_priors
from lookahead.draft.recycled import ANY, BEST, ENTRIES, Recycled
from lookahead.draft.sorted_text import SortedText, table_of
from lookahead.draft.sources import DraftSource, Grown, Limits, Sources
from lookahead.draft.tree import DraftTree, as_parallel, root_only
from lookahead.native.threads import run_in
from lookahead.trie.file import Trie, names_of
from lookahead.trie.session import SessionMemory

Answer = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]  # what stood before it, its tokens
SHARED, SHARE = 2, 32  # tokens of each row, and one in that many, that are new before its siblings draft from them


class Row:
    """One request: made by `Drafter.start`, then draft() -> accept(tokens) -> draft() -> ... -> finish().

    unread: int32, its text as long as nothing is drafted for it and nothing learned from it; None: its own text holds it.
    """

    def __init__(self, drafter: Drafter, number: int):
        self.drafter = drafter
        self.number = number  # in the drafter's arrays
        self.own = OwnText()
        self.unread: np.ndarray | None = None
        self.root = 0
        self.prompt_length = 0
        self.prompt = b""  # as a key of the drafter's `running`
        self.shared = 0  # tokens of its output that the session holds while it runs

    @property
    def text(self) -> np.ndarray:
        """int32 [length]: the prompt, and what was accepted so far."""
        return self.own.tokens if self.unread is None else self.unread

    def draft(self, budget: int | None = None, branch_length: int | None = None, price: float | None = None) -> DraftTree:
        """The most probable continuations of the request's text.

        budget: draft tokens at most (default and upper limit: decoding_length - 1).
        branch_length: draft tokens on one path at most (default and upper limit: the option of this name).
        price: path probability that a node must have (default: the option of this name).
        """
        return self.drafter._draft(self, budget, branch_length, price)

    def accept(self, token_ids: Sequence[int], learn: bool = True) -> None:
        """The model emitted these tokens next. learn: from each of them; it takes most of the time."""
        self.drafter.append(self, token_ids, learn)
        if self.drafter.options.strategy != "off":
            self.drafter.sources.accept(self.number, token_ids, learn and self.drafter.options.learn)

    def reserve(self, more: int) -> None:
        """Make room for that many more tokens of a text that is read."""
        if self.own.reserve(more):
            self.own.describe(self.drafter.rows.own[self.number], self.prompt_length)

    def finish(self) -> None:
        """End the request: its output joins the job's memory, its prompt is forgotten."""
        self.drafter._finish(self)


class Drafter:
    """Starts rows and drafts for them.

    tries: prebuilt, open or as paths, one or several, each with a weight (default 1): how much an occurrence in its text counts
    against one in another's. sources: draft sources of the user's own, one or several, see `DraftSource`.
    """

    def __init__(
        self,
        tries: str | Path | Trie | Sequence[str | Path | Trie] = (),
        options: DraftOptions | None = None,
        weights: float | Sequence[float] | None = None,
        priors: Priors | None = None,
        sources: DraftSource | Sequence[DraftSource] = (),
    ):
        self.options = options or DraftOptions()
        several = (tries,) if isinstance(tries, str | Path | Trie) else tries
        self.tries = tuple(Trie(trie) if isinstance(trie, str | Path) else trie for trie in several)
        names = names_of([trie.path for trie in self.tries])
        self.source_names = ("prompt", "output", "session", "recycled", *(f"trie:{name}" for name in names))
        self.sources = Sources(sources, (*self.source_names, "grammar", "padding"), first=len(self.source_names))
        self.source_names += self.sources.names
        self.session = SessionMemory(self.options.session_tokens)
        self._priors = priors or load_priors()
        trie_weights = [1.0] * len(self.tries) if weights is None else list(numbers_of(weights, "weights"))
        self._trie_texts, text_weights = [], []
        for number, (trie, weight) in enumerate(zip(self.tries, trie_weights, strict=True)):
            for part in trie.segments:
                text = SortedText(part.tokens, part.suffixes, part.first, RECYCLED + 1 + number, trie.header.depth)
                if trie.weighted:
                    weighing = (part.document_ends, part.document_sources, trie.source_weights)
                    text = dataclasses.replace(text, weighing=weighing)
                self._trie_texts.append(text)
                text_weights.append(weight)
        text_weights += [1.0] * len(self.session.runs)
        self.recycled, self.recycled_utility = Recycled.empty(ENTRIES if self.options.recycle else 0), SourceUtility()
        self.shared = shared_block(len(text_weights), CELLS, FACTORS, len(self.recycled.seen), BEST)
        self.shared.recycled_keys, self.shared.recycled_seen = self.recycled.keys, self.recycled.seen
        self.shared.recycled_tokens, self.shared.recycled_weights = self.recycled.tokens, self.recycled.weights
        self.shared.given[:] = text_weights
        self.shared.edges = EDGES
        self._learn_from(self._priors)
        self.rows: Block
        self._rows: list[Row] = []
        self._free: list[Row] = []
        self.growth = TreeBuilder(self.options.decoding_length, len(text_weights))
        self._make_rows(1)
        self._remembered: list[SortedText] = []
        self._running: dict[bytes, list[Row]] = {}  # by prompt
        self._unread: deque[Answer] = deque()  # which the memory does not hold yet, as many as it has room for
        self._unread_tokens = 0
        self._refresh_texts()

    @property
    def wants_runner_up(self) -> bool:
        """Runner-up tokens are drafted from at present."""
        return self.options.strategy != "off" and self.options.recycle and self.recycled_utility.pays

    def start(self, prompt_ids: Sequence[int] | np.ndarray) -> Row:
        """Begin a request: its prompt (at least one token) becomes its own text."""
        if not self._free:
            self._make_rows(len(self._rows))
        row = self._free.pop()
        self.sources.start(row.number)
        row.prompt_length = len(prompt_ids)
        if self.options.strategy != "off":  # plain decoding needs no memory
            row.unread = np.array(prompt_ids, np.int32)
            row.prompt, row.shared = row.unread.tobytes(), 0
            self._running.setdefault(row.prompt, []).append(row)
        if len(prompt_ids):
            row.root = int(prompt_ids[-1])
        return row

    def read(self, rows: Sequence[Row]) -> None:
        """Index the text of these rows. Deferred until the first draft, because drafting may be off."""
        unread = [row for row in rows if row.unread is not None]
        if not unread:
            return
        self.remember(())
        self.calibration.refit()
        self.shared.curve[:] = self.calibration.curve
        for row in unread:
            text, row.unread = row.text, None
            row.own.clear(len(text))
            row.own.append(text)
            row.own.describe(self.rows.own[row.number], row.prompt_length)
            self.rows.aligned[row.number, :, AT] = -1
            self.rows.nodes[row.number] = 0
        self._find_roots(unread)

    def append(self, row: Row, token_ids: Sequence[int], learn: bool) -> None:
        """Append tokens as `Row.accept` does, without notifying the user's own sources."""
        if not len(token_ids):
            return
        row.root = int(token_ids[-1])
        if self.options.strategy == "off":
            return
        if learn:
            self.read([row])
        if row.unread is not None:
            row.unread = np.append(row.unread, np.asarray(token_ids, np.int32))
            return
        row.reserve(len(token_ids))
        tokens = array("i", token_ids)
        what = row.number, len(tokens), planner.LEARN if learn and self.options.learn else planner.APPEND
        blocks = [block.address for block in (self.shared, self.rows, self.growth.first)]
        task = array("q", (1, len(tokens), tokens.buffer_info()[0], *blocks, *what))
        run_in(1, planner.accept_rows, task.buffer_info()[0])

    def _draft(self, row: Row, budget: int | None, branch_length: int | None, price: float | None) -> DraftTree:
        """See `Row.draft`."""
        options = self.options
        if options.strategy == "off":
            return root_only(row.root)
        self.read([row])
        self.get_ready()
        price = options.price if price is None else price
        most = options.decoding_length - 1 if budget is None else min(budget, options.decoding_length - 1)
        longest = options.branch_length if branch_length is None else min(branch_length, options.branch_length)
        blocks, number = (self.shared.address, self.rows.address), row.number
        nodes = self.growth.grow(blocks, number, most, longest, options.strategy == "single", price)
        if self.sources:
            self.merge_sources([row], self.growth.limits, price, self.growth.spans)
            nodes = int(self.growth.spans[0, 1])
        self.rows.kept[number] = nodes
        token_ids, parents, sources, matches = self.rows.trees[number, :, :nodes].copy()
        tree = DraftTree(token_ids, parents, self.rows.reach[number, 1, :nodes].copy(), sources, matches)
        return as_parallel(tree, most) if options.strategy == "parallel" else tree

    def copied_trees(self, numbers: np.ndarray, nodes: np.ndarray) -> list[DraftTree]:
        """The first nodes of the trees that were grown for these rows, copied. nodes: of each, the root included."""
        most = int(nodes.max(initial=0))
        copied, reach = self.rows.trees[numbers, :, :most], self.rows.reach[numbers, 1, :most]
        return [
            DraftTree(token_ids[:count], parents[:count], paths[:count], sources[:count], matches[:count])
            for token_ids, parents, sources, matches, paths, count in zip(
                *copied.transpose(1, 0, 2), reach, nodes.tolist(), strict=True
            )
        ]

    def get_ready(self) -> None:
        """Bring what all rows share up to date before a draft."""
        if self._unread:
            self.remember(())
        if len(self._running) < len(self._rows) - len(self._free):
            self._share_running()
        self.shared.used[1] = self.recycled.has_keys and self.wants_runner_up

    def _share_running(self, ended: bool = False) -> None:
        """Samples of one prompt draft from what the others have emitted so far: the session holds it, up to date by SHARED
        tokens each. ended: one of them has just left, and the caller updates the session.
        """
        rows = [row for of_prompt in self._running.values() if len(of_prompt) > 1 for row in of_prompt if len(row.own)]
        lengths = [len(row.own) - row.prompt_length for row in rows]
        due = sum(lengths) - sum(row.shared for row in rows) >= max(SHARED * len(rows), sum(lengths) // SHARE, 1)
        if not (due or ended):
            return
        for row, length in zip(rows, lengths, strict=True):
            row.shared = length
        self.session.set_running([(row.text[: row.prompt_length], row.text[row.prompt_length :]) for row in rows])
        if not ended:
            self.session.append_documents(())
            self._refresh_texts()

    def _finish(self, row: Row) -> None:
        self.sources.finish(row.number)
        text, row.unread = row.text, None  # own tokens stay where they are until the row's next text
        if row in (of_prompt := self._running.pop(row.prompt, [])):
            of_prompt.remove(row)
            self._running.update({row.prompt: of_prompt} if of_prompt else {})
        if row.shared:
            self._share_running(ended=True)
        if len(row.own):
            row.own.clear()
        if len(text) > row.prompt_length:
            self._unread.append((text[row.prompt_length - 1 : row.prompt_length].copy(), text[row.prompt_length :].copy()))
            self._unread_tokens += len(text) - row.prompt_length
            while self._unread_tokens > self.options.session_tokens and len(self._unread) > 1:
                self._unread_tokens -= len(self._unread.popleft()[1])
        row.prompt_length = 0
        self._free.append(row)

    def remember(self, answers: Sequence[Answer]) -> None:
        """Finished outputs join the job's memory, each with what stood before it. Not while a draft is being made.

        So do those of rows that have finished since the latest draft: while nothing is drafted, nobody needs them sorted.
        """
        answers, self._unread_tokens = [*self._unread, *answers], 0
        self._unread.clear()
        if self.options.strategy == "off" or not answers:
            return
        self.session.append_documents(answers)
        self._refresh_texts()

    def forget(self) -> None:
        """Be as new: nothing remembered, nothing learned. No row may be running."""
        self._unread.clear()
        self.session.clear()
        self.sources.forget()
        self.recycled.clear()
        self.recycled_utility = SourceUtility()
        self._learn_from(self._priors)
        self._refresh_texts()

    def warm_up(self) -> None:
        """Compile the kernels (once per machine), so that the first draft is not slower."""
        probe = Drafter(self.tries, dataclasses.replace(self.options, session_tokens=16))
        row = probe.start([0, 1, 0, 1])
        one, best = np.zeros(1, np.int32), (np.zeros((1, BEST), np.int32), np.zeros((1, BEST), np.float32))
        probe.recycled.add(one, one - 1, one.astype(np.int64) + 1, np.full((1, 2), ANY, np.int32), *best)
        row.draft()
        row.accept([0])
        row.finish()

    def restrict_to_chains(self) -> None:
        """Draft one branch only from now on: the model takes no tree mask."""
        if self.options.strategy != "off":
            self.options = dataclasses.replace(self.options, strategy="single")

    def merge_sources(self, rows: Sequence[Row], limits: np.ndarray, price: float, grown: np.ndarray) -> None:
        """Put what the user's sources propose into the trees that were grown; grown[k, 1] gets their nodes."""
        single, adaptive = self.options.strategy == "single", self.options.adaptive
        for k, row in enumerate(rows):
            number, nodes = row.number, int(grown[k, 1])
            tree, reach = self.rows.trees[number], self.rows.reach[number]
            of_row = Limits(int(limits[k, 1]), int(limits[k, 2]), price, single, adaptive)
            merged = self.sources.grow(number, row.own.tokens, Grown(tree[:, :nodes], reach[:, :nodes]), of_row)
            nodes = merged.tree.shape[1]
            tree[:, :nodes], reach[:, :nodes] = merged.tree, merged.reach
            self.rows.nodes[number] = grown[k, 1] = nodes

    def _make_rows(self, more: int) -> None:
        """Room for that many more rows at once."""
        count = len(self._rows) + more
        block = rows_block(count, len(self.shared.texts), self.options.decoding_length)
        if self._rows:
            for name in block.names:
                getattr(block, name)[: len(self._rows)] = getattr(self.rows, name)
        self.rows = block
        for row in self._rows:
            row.own.columns = block.own[row.number]
        added = [Row(self, number) for number in range(len(self._rows), count)]
        self._rows += added
        self._free += added[::-1]

    def _refresh_texts(self) -> None:
        """Point the table at the session's arrays. Running rows look their context up again in those that have changed."""
        runs = self.session.runs[::-1]  # the recent one changes with each output, the older one rarely
        before, tries = self._remembered, len(self._trie_texts)
        self._remembered, changed = [], []
        for number, run in enumerate(runs):
            if before and run.suffixes is before[number].suffixes:
                text = dataclasses.replace(before[number], tokens=self.session.tokens)
            else:
                text = SortedText(self.session.tokens, run.suffixes, run.first, SESSION)
                changed.append(tries + number)
            self._remembered.append(text)
        self.shared.texts[:] = table_of([*self._trie_texts, *self._remembered])  # it holds addresses only
        self.shared.used[0] = len(self.shared.texts) - (not len(runs[-1].suffixes))
        if changed:
            running = [row for row in self._rows if len(row.own)]  # of free ones it is empty
            self._find_roots(running, changed[0], changed[-1] + 1)

    def _find_roots(self, rows: Sequence[Row], begin: int = 0, end: int | None = None) -> None:
        """Look the ends of these rows' texts up in the sorted texts from `begin` to `end` (default: all)."""
        numbers = np.array([row.number for row in rows], np.int64)
        texts = begin, int(self.shared.used[0]) if end is None else min(end, int(self.shared.used[0]))
        planner.find_roots(numbers, *texts, self.shared.addresses, self.rows.addresses, self.growth.first.addresses)

    def _learn_from(self, priors: Priors) -> None:
        self.shared.lambdas, self.shared.earned = priors.fresh()
        self.shared.factors[:] = 1
        self.shared.learned[:] = 0, FIRST_GRADIENTS
        self.shared.counted[:] = 0
        self.shared.trust[:] = 0
        self.shared.weights[:] = self.shared.given
        self.shared.refresh()
        self.calibration = Calibration(priors.calibration, self.shared.counted)
