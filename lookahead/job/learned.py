"""Answers that a job keeps as a trie. In: the documents of an output. Out: a trie that holds each of them once.

Another job may add to the same trie, or make it, at the same time. And the process may be killed between the writing of the
trie and the removal of the documents: how many copies of them the trie holds is noted before they are added, and a run that
finds the note adds them only if there are no more copies now.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lookahead.token_documents import OUTPUTS, TokenDocument, TokenizerIdentity
from lookahead.trie.build import append_trie, build_trie
from lookahead.trie.file import Trie
from lookahead.trie.segment import Effort

if TYPE_CHECKING:
    from lookahead.job.journal import AnswerStore


def save_learned(
    output: AnswerStore, path: str, identity: TokenizerIdentity, model: str, effort: Effort | None = None, source: str = OUTPUTS
) -> None:
    """Add the answers that `output` has kept to the trie at `path`, or make it. source: of the answers.

    Raises LookaheadError if it cannot be written or is of another tokenizer; the answers stay, and the next run adds them.
    """
    before = output.half_saved()
    if before is not None and copies_in(path, before[1]) > before[0]:
        output.forget_half_saved()

    def documents() -> Iterable[TokenDocument]:
        return (dataclasses.replace(document, source=source) for document in output.learned())

    while next(iter(output.learned()), None) is not None:
        output.note_saving(copies_in(path, output.learned))
        with contextlib.suppress(FileExistsError):  # made by another job meanwhile: then it is added to
            if Path(path).exists():
                append_trie(documents(), path, identity, effort)
            else:
                options = {"learned_from": model}
                build_trie(documents(), path, identity, 1, options, effort, new=True)
            break
    output.forget_learned()


def copies_in(path: str, documents: Callable[[], Iterable[TokenDocument]]) -> int:
    """How many segments of a trie end in these documents; 0 if there is no trie."""
    if not Path(path).exists():
        return 0
    trie = Trie(path)
    length = sum(len(document.token_ids) + 1 for document in documents() if len(document.token_ids))
    found = 0
    for segment in trie.segments:
        begin = len(segment.tokens) - length
        found += begin >= 0 and _stands_at(segment.tokens, begin, documents(), trie.header.separator)
    return found


def _stands_at(tokens: np.ndarray, begin: int, documents: Iterable[TokenDocument], separator: int) -> bool:
    for document in documents:
        end = begin + len(document.token_ids)
        if end == begin:
            continue  # it is in no trie
        if tokens[end] != separator or not np.array_equal(tokens[begin:end], document.token_ids):
            return False
        begin = end + 1
    return True
