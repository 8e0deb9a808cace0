"""What a trie holds and how it drafts. In: a trie file, and what is asked of it. Out: a `TrieReport`, also as JSON."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lookahead.bench.options import InspectOptions
from lookahead.bench.replay import ReplayResult, replay
from lookahead.corpus.read import first_documents
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import Evidence, evidence
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import DraftTree
from lookahead.errors import LookaheadError, UsageError
from lookahead.files.hub import tokenizer_of_trie
from lookahead.job.events import COMPILING
from lookahead.tokenizer import identity, load_tokenizer
from lookahead.trie import stats
from lookahead.trie.check import checked_documents, checked_tokens
from lookahead.trie.file import Match, Trie
from lookahead.trie.prune import prune_trie
from lookahead.trie.segment import BuildResources

OF_SOURCES = ("name", "documents", "tokens", "weight")
MORE_BRANCHES = 8  # for each that is shown, as many are looked at

WithSpinner = Callable[[Callable[[], Any], str], Any]  # calls its first argument; the second tells what takes so long


@dataclasses.dataclass(frozen=True)
class Drafted:
    """Draft after a context (int32 [length]), its longest match, and what the trie holds for each node."""

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
            **{name: getattr(header, name) for name in ("tokens", "documents", "branches")},
            "segments": [{"tokens": s.tokens, "documents": s.documents} for s in header.segments],
            "vocab_size": header.vocab_size,
            "tokenizer": {"name": header.tokenizer_name, "fingerprint": header.tokenizer_fingerprint},
            **{name: getattr(header, name) for name in ("content_hash", "tool_version", "created")},
            "options": dict(header.options),
            "verified": self.asked.verify,
            "sources": [{name: getattr(source, name) for name in OF_SOURCES} for source in header.sources],
            "depths": [vars(row) for row in self.seen.depths],
            "top": [{"token_ids": ids, "count": count, "text": self.text(ids)} for ids, count in self.seen.top],
        }
        if self.replayed is not None:
            value["coverage"] = {"file": self.asked.coverage, "tokens": self.replayed.tokens, **self.replayed.as_json()}
        if self.curve is not None:
            value["capacity"] = [vars(each) for each in self.curve]
        if self.drafted is not None:
            value["query"] = self._query_json(self.drafted)
        return value

    def _query_json(self, drafted: Drafted) -> dict[str, Any]:
        match, continuations = stats.continuations(self.trie, drafted.context)
        return {
            "text": self.asked.query,
            "match_length": match.length,
            "count": match.count,
            "continuations": [self._continuation_json(each) for each in continuations],
            "draft": [self._node_json(drafted, node) for node in range(1, len(drafted.evidence))],
        }

    def _node_json(self, drafted: Drafted, node: int) -> dict[str, Any]:
        """A draft token; parent: its index in the list, -1 for the query itself."""
        tree, seen = drafted.tree, drafted.evidence[node]
        return {
            "token_id": int(tree.token_ids[node]),
            "text": self.text([int(tree.token_ids[node])]),
            "parent": int(tree.parents[node]) - 1,
            "probability": round(float(tree.probabilities[node]), 6),
            "source": drafted.source_names[tree.sources[node]],
            "match_length": int(tree.matches[node]),
            "count": seen.count if seen else None,
            "match_count": seen.of if seen else None,
        }

    def _continuation_json(self, node: Any) -> dict[str, Any]:
        return {
            "token_id": node.token_id,
            "text": self.text([node.token_id]),
            "count": node.count,
            "share": round(node.share, 4),
            "children": [self._continuation_json(child) for child in node.children],
        }


def report_on(trie: Trie, asked: InspectOptions, resources: BuildResources, with_spinner: WithSpinner) -> TrieReport:
    """Raises LookaheadError for a trie that is damaged and for files that cannot be used, UsageError for a useless query."""
    if asked.verify:
        with_spinner(lambda: trie.verify(resources.workers), "Checking every byte ...")
    path, query = asked.coverage, asked.query
    loaded = load_tokenizer_of(trie, asked.tokenizer, needed=query is not None or path is not None)
    context = ids_of(query, trie, loaded) if query is not None else None
    most = MORE_BRANCHES * asked.top
    seen: stats.Overview = with_spinner(lambda: stats.overview(trie, most=most, resources=resources), "Reading the trie ...")
    # Without those that most often begin documents, if there are others.
    inside = (branch for branch in seen.top if not stats.begins_documents(trie, branch[0]))
    top = list(itertools.islice(inside, asked.top)) or seen.top[: asked.top]
    found: dict[str, Any] = {"seen": dataclasses.replace(seen, top=top)}
    if path is not None:
        found["replayed"] = with_spinner(lambda: coverage([trie], path, loaded), COMPILING)
        if asked.plot is not None:
            found["curve"] = with_spinner(lambda: capacity_curve(trie, path, loaded, resources), "Pruning to rising sizes ...")
    if context is not None:
        found["drafted"] = with_spinner(lambda: draft_after(trie, context, asked.decoding_length), COMPILING)
    return TrieReport(trie, asked, loaded, **found)


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
    drafter = Drafter([trie], DraftOptions(decoding_length=decoding_length))
    tree = drafter.start(context).draft()
    of_trie = len(drafter.source_names) - 1
    known = evidence(trie, of_trie, context.tolist(), tree)
    return Drafted(context, trie.longest_match(context), tree, known, drafter.source_names)


SHARES = (64, 32, 16, 8, 4, 2)  # a capacity curve has the trie pruned to 1 / share of its tokens


def coverage(
    tries: Sequence[Trie],
    path: str,
    tokenizer: Any | None,
    options: DraftOptions | None = None,
    most: int = 200,
    vocab_size: int | None = None,
) -> ReplayResult:
    """Replay up to `most` documents of a corpus file against `tries`. Raises CorpusError if none has two tokens or more."""
    vocab_size = tries[0].header.vocab_size if tries else vocab_size
    pairs = [(ids[:1], ids[1:]) for ids in first_documents(path, tokenizer, vocab_size, most)]
    return replay(pairs, tries, options or DraftOptions())


@dataclasses.dataclass(frozen=True)
class Capacity:
    """EDL that a trie of this size gives; 0 tokens: no trie, only the requests' own text and each other's."""

    tokens: int
    bytes: int
    edl: float


def capacity_curve(trie: Trie, path: str, tokenizer: Any | None, resources: BuildResources) -> list[Capacity]:
    """EDL on a corpus file without a trie, with `trie` pruned to rising sizes (in a temporary folder), and with all of it."""
    curve = [Capacity(0, 0, coverage([], path, tokenizer, vocab_size=trie.header.vocab_size).edl)]
    with tempfile.TemporaryDirectory() as folder:
        for share in SHARES:
            limit = trie.header.tokens // share
            try:
                prune_trie(trie.path, Path(folder) / "pruned.trie", max_tokens=limit, resources=resources)
            except LookaheadError:  # not one document is so small
                continue
            pruned = Trie(Path(folder) / "pruned.trie")
            size = pruned.path.stat().st_size
            curve.append(Capacity(pruned.header.tokens, size, coverage([pruned], path, tokenizer).edl))
    curve.append(Capacity(trie.header.tokens, trie.path.stat().st_size, coverage([trie], path, tokenizer).edl))
    return curve


@dataclasses.dataclass(frozen=True)
class HeldDocument:
    """number: from 1, in the order of the file. text: None where no tokenizer is known."""

    number: int
    source: str
    ids: list[int]
    text: str | None

    @property
    def shown(self) -> str:
        return " ".join(map(str, self.ids)) if self.text is None else self.text


def held_documents(trie: Trie, tokenizer: Any | None, query: str = "") -> Iterator[HeldDocument]:
    """The documents whose text, or ids without a tokenizer, contain `query`. Raises TrieFormatError for a damaged trie."""
    numbers = itertools.count(1)
    sought = query if tokenizer is not None or not query else f" {' '.join(query.split())} "
    for segment in trie.segments:
        ends, sources = checked_documents(trie, segment)
        collections.deque(checked_tokens(trie, segment, ends), 0)
        begin = 0
        for end, source in zip(ends.tolist(), sources.tolist(), strict=True):
            ids = segment.tokens[begin:end].tolist()
            text = str(tokenizer.decode(ids)) if tokenizer is not None else None
            held = HeldDocument(next(numbers), trie.header.sources[source].name, ids, text)
            if sought in (held.shown if text is not None else f" {held.shown} "):
                yield held
            begin = end + 1


def load_tokenizer_of(trie: Trie, name: str | None, needed: bool) -> Any | None:
    """The tokenizer to show a trie's text with, by `name` or its own; None if it came as ids, or it is gone and not needed."""
    if not (name or trie.header.tokenizer_name):
        return None
    try:
        chosen = name or tokenizer_of_trie(trie.path, trie.header.tokenizer_name)
        loaded = load_tokenizer(chosen)
    except LookaheadError:
        if name or needed:
            raise
        return None
    known = identity(loaded, chosen)
    trie.check_tokenizer(known.fingerprint, known.vocab_size, chosen)
    return loaded
