"""What a trie holds and how it drafts. In: a trie file, and what is asked of it. Out: a `TrieReport`, also as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lookahead.bench.coverage import Capacity, capacity_curve, coverage
from lookahead.bench.options import InspectOptions
from lookahead.bench.replay import ReplayResult
from lookahead.bench.trie_text import load_tokenizer_of
from lookahead.draft import own_text, planner
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import Evidence, evidence
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import DraftTree
from lookahead.errors import UsageError
from lookahead.job.events import COMPILING
from lookahead.native.interpreted import interpreting
from lookahead.trie import search, stats
from lookahead.trie.file import Match, Trie
from lookahead.trie.segment import Effort

# Tokens of a tree, of a context and of a vocabulary up to which Python makes a draft sooner than its kernels are compiled.
MOST_INTERPRETED, MOST_CONTEXT, MOST_VOCABULARY = 128, 2_000, 20_000

MORE_BRANCHES = 8  # for each that is shown, as many are looked at

Patiently = Callable[[Callable[[], None], str], None]  # calls its first argument; the second tells what takes so long


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What would be verified after a context (int32 [length]), its longest match, and what the trie holds for each node."""

    context: np.ndarray
    match: Match
    tree: DraftTree
    evidence: list[Evidence | None]
    source_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TrieReport:
    """tokenizer: to show text with; None: ids are shown."""

    trie: Trie
    asked: InspectOptions
    tokenizer: Any | None
    seen: stats.Overview
    drafted: Drafted | None = None
    replayed: ReplayResult | None = None
    curve: Sequence[Capacity] | None = None

    def text(self, token_ids: list[int]) -> str | None:
        return str(self.tokenizer.decode(token_ids)) if self.tokenizer is not None else None

    def as_json(self) -> dict[str, Any]:
        """The object that `inspect-trie --json` prints."""
        header = self.trie.header
        value: dict[str, Any] = {
            "trie": self.asked.trie,
            "bytes": self.trie.path.stat().st_size,
            "tokens": header.tokens,
            "documents": header.documents,
            "branches": header.branches,
            "segments": [{"tokens": s.tokens, "documents": s.documents} for s in header.segments],
            "vocab_size": header.vocab_size,
            "tokenizer": {"name": header.tokenizer_name, "fingerprint": header.tokenizer_fingerprint},
            "content_hash": header.content_hash,
            "tool_version": header.tool_version,
            "created": header.created,
            "options": dict(header.options),
            "verified": self.asked.verify,
            "sources": [
                {"name": s.name, "documents": s.documents, "tokens": s.tokens, "weight": s.weight} for s in header.sources
            ],
            "depths": [vars(row) for row in self.seen.depths],
            "top": [{"token_ids": ids, "count": count, "text": self.text(ids)} for ids, count in self.seen.top],
            "recycled": {"keys": header.recycled_keys, "top": []},  # of an earlier version
        }
        if self.replayed is not None:
            value["coverage"] = {"file": self.asked.coverage, "tokens": self.replayed.tokens, **self.replayed.as_json()}
        if self.curve is not None:
            value["capacity"] = [vars(each) for each in self.curve]
        if self.drafted is not None:
            value["query"] = self._query_json(self.drafted)
        return value

    def _query_json(self, drafted: Drafted) -> dict[str, Any]:
        with interpreting(search.matching_range, search.child_ranges):
            match, continuations = stats.continuations(self.trie, drafted.context)
        return {
            "text": self.asked.query,
            "match_length": match.length,
            "count": match.count,
            "continuations": [self._continuation_json(each) for each in continuations],
            "draft": self._draft_json(drafted),
        }

    def _draft_json(self, drafted: Drafted) -> list[dict[str, Any]]:
        """Draft tokens, the most probable first; parent: index in this list, -1 for the query itself."""
        tree = drafted.tree
        return [
            {
                "token_id": int(tree.token_ids[node]),
                "text": self.text([int(tree.token_ids[node])]),
                "parent": int(tree.parents[node]) - 1,
                "probability": round(float(tree.probabilities[node]), 6),
                "source": drafted.source_names[tree.sources[node]],
                "match_length": int(tree.matches[node]),
                "count": seen.count if seen else None,
                "match_count": seen.of if seen else None,
            }
            for node, seen in enumerate(drafted.evidence)
            if node
        ]

    def _continuation_json(self, node: Any) -> dict[str, Any]:
        return {
            "token_id": node.token_id,
            "text": self.text([node.token_id]),
            "count": node.count,
            "share": round(node.share, 4),
            "children": [self._continuation_json(child) for child in node.children],
        }


def report_on(trie: Trie, asked: InspectOptions, effort: Effort, patiently: Patiently) -> TrieReport:
    """Raises LookaheadError for a trie that is damaged and for files that cannot be used, UsageError for a useless query."""
    found: dict[str, Any] = {}

    def waiting(name: str, why: str, make: Callable[[], Any]) -> None:
        patiently(lambda: found.update({name: make()}), why)

    if asked.verify:
        patiently(lambda: trie.verify(effort.workers), "Checking every byte ...")
    loaded = load_tokenizer_of(trie, asked.tokenizer, needed=asked.query is not None or asked.coverage is not None)
    context = ids_of(asked.query, trie, loaded) if asked.query is not None else None
    waiting("seen", "Reading the trie ...", lambda: _overview(trie, asked.top, effort))
    if asked.coverage is not None:
        path = asked.coverage
        waiting("replayed", COMPILING, lambda: coverage([trie], path, loaded))
        if asked.plot is not None:
            waiting("curve", "Pruning to rising sizes ...", lambda: capacity_curve(trie, path, loaded, effort))
    if context is not None:
        after = context
        waiting("drafted", "Drafting ...", lambda: draft_after(trie, after, asked.decoding_length))
    return TrieReport(trie, asked, loaded, **found)


def _overview(trie: Trie, most: int, effort: Effort) -> stats.Overview:
    """`stats.overview` without branches that most often begin documents, as the end of a prompt does, if there are others."""
    seen = stats.overview(trie, most=MORE_BRANCHES * most, effort=effort)
    with interpreting(search.matching_range):
        inside = (branch for branch in seen.top if not stats.begins_documents(trie, branch[0]))
        return dataclasses.replace(seen, top=list(itertools.islice(inside, most)) or seen.top[:most])


def ids_of(query: str, trie: Trie, tokenizer: Any | None) -> np.ndarray:
    """int32: token ids of a query, which is text, or ids where there is no tokenizer. Raises UsageError for one of no use."""
    if tokenizer is not None:
        ids = tokenizer(query, add_special_tokens=False)["input_ids"]
    elif all(part.isdecimal() and int(part) < trie.header.vocab_size for part in query.split()):
        ids = [int(part) for part in query.split()]
    else:
        raise UsageError(
            f"{trie.path}: was built from ids. Give ids below {trie.header.vocab_size} as --query, such as '5 6 7', or name a "
            "tokenizer: --tokenizer NAME_OR_DIR."
        )
    if not len(ids):
        raise UsageError("--query: is empty. Give the text, or the ids, that drafts are to follow.")
    return np.array(ids, np.int32)


def draft_after(trie: Trie, context: np.ndarray, decoding_length: int) -> Drafted:
    """The tree that a request whose prompt is `context` drafts first, in a job that has not answered anything yet."""
    kernels = [planner.grow_rows, planner.find_roots, own_text.append_tokens, search.matching_range]
    if trie.header.vocab_size <= MOST_VOCABULARY:
        kernels.append(own_text.lead_common)
    few = decoding_length <= MOST_INTERPRETED and len(context) <= MOST_CONTEXT
    with interpreting(*kernels) if few else contextlib.nullcontext():
        drafter = Drafter([trie], DraftOptions(decoding_length=decoding_length))
        tree = drafter.start(context).draft()
        of_trie = len(drafter.source_names) - 1
        known = evidence(trie, of_trie, context.tolist(), tree)
        return Drafted(context, trie.longest_match(context), tree, known, drafter.source_names)
