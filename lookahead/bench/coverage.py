"""What EDL to expect of a trie on held-out text. In: a trie and a corpus file. Out: the replay of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookahead.bench.replay import ReplayResult, replay
from lookahead.corpus import CorpusReport, expand, read_documents
from lookahead.draft.drafter import DraftOptions
from lookahead.errors import CorpusError
from lookahead.trie.file import Trie


def coverage(
    tries: Sequence[Trie], path: str, tokenizer: Any | None, options: DraftOptions | None = None, most: int = 200
) -> ReplayResult:
    """Replay up to `most` documents of a corpus file (any format of build-trie) against `tries`.

    Raises CorpusError if the file holds no usable document of two tokens or more.
    """
    report = CorpusReport()
    vocab_size = tries[0].header.vocab_size if tries else None
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
