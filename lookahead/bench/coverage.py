"""What EDL to expect of a trie on held-out text. In: a trie and a corpus file. Out: the replay of its answers."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookahead.bench.replay import ReplayResult, replay
from lookahead.corpus.read import CorpusReport, expand, read_documents
from lookahead.draft.options import DraftOptions
from lookahead.errors import CorpusError, LookaheadError
from lookahead.trie.file import Trie
from lookahead.trie.prune import prune_trie
from lookahead.trie.segment import Effort

SHARES = (64, 32, 16, 8, 4, 2)  # a capacity curve has the trie pruned to 1 / share of its tokens


def coverage(
    tries: Sequence[Trie],
    path: str,
    tokenizer: Any | None,
    options: DraftOptions | None = None,
    most: int = 200,
    vocab_size: int | None = None,
) -> ReplayResult:
    """Replay up to `most` documents of a corpus file (any format of build-trie) against `tries`.

    vocab_size: that ids must lie below, where there is no trie that gives it.
    Raises CorpusError if the file holds no usable document of two tokens or more.
    """
    report = CorpusReport()
    vocab_size = tries[0].header.vocab_size if tries else vocab_size
    pairs = []
    for document in read_documents(expand([path]), tokenizer, report, vocab_size=vocab_size):
        ids = list(document.token_ids)
        if len(ids) > 1:
            pairs.append((ids[:1], ids[1:]))
        if len(pairs) == most:
            break
    if not pairs:
        raise CorpusError(report.problems[0] if report.problems else f"{path}: no usable document.")
    return replay(pairs, tries, options or DraftOptions())


@dataclasses.dataclass(frozen=True)
class Capacity:
    """EDL that a trie of this size gives; 0 tokens: no trie, only the requests' own text and each other's."""

    tokens: int
    bytes: int
    edl: float


def capacity_curve(trie: Trie, path: str, tokenizer: Any | None, effort: Effort) -> list[Capacity]:
    """EDL on the documents of a corpus file without a trie, with `trie` pruned to rising sizes, and with all of it.

    Pruned tries are made in the folder for temporary files, one at a time.
    """
    curve = [Capacity(0, 0, coverage([], path, tokenizer, vocab_size=trie.header.vocab_size).edl)]
    with tempfile.TemporaryDirectory() as folder:
        for share in SHARES:
            limit = trie.header.tokens // share
            try:
                prune_trie(trie.path, Path(folder) / "pruned.trie", max_tokens=limit, effort=effort)
            except LookaheadError:  # not one document is so small
                continue
            pruned = Trie(Path(folder) / "pruned.trie")
            size = pruned.path.stat().st_size
            curve.append(Capacity(pruned.header.tokens, size, coverage([pruned], path, tokenizer).edl))
    curve.append(Capacity(trie.header.tokens, trie.path.stat().st_size, coverage([trie], path, tokenizer).edl))
    return curve
