"""Segments of trie files. In: sorted parts of other tries, and token documents. Out: the sections of one segment.

Documents fill a stretch of memory; its suffixes are sorted and, if more follow, put on disk as a run; at the end the runs are
merged into the file, parts of other tries being runs that are sorted already. Knows nothing of whole files and their locks.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lookahead.errors import CorpusError, TokenizerMismatchError, UsageError
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie import format
from lookahead.trie.check import check_suffixes, checked_documents, checked_section, checked_tokens
from lookahead.trie.file import Trie
from lookahead.trie.mapped import Segment
from lookahead.trie.runs import BASE_BYTES, Pages, Run, Scratch, merged
from lookahead.trie.suffixes import DEPTH, SAMPLE, add_counts, add_first_tokens, sort_suffixes
from lookahead.trie.writer import TrieWriter
from lookahead.version import __version__

MAX_MEMORY = 2 << 30
SORTING_BYTES = 24  # of each suffix of the first token that a worker sorts, see sort_suffixes
GROUP_TOKENS, GROUP_DOCUMENTS = 1 << 16, 1 << 10  # read at a time

# (what is done: "copying", "reading", "sorting", "counting" or "writing"; tokens done of it; of how many)
Progress = Callable[[str, int, int | None], None]


@dataclasses.dataclass(frozen=True)
class BuildResources:
    """Resources of a build, merge or prune, and whom it notifies. max_memory: bytes of the whole process; workers: threads.

    notice: gets a line for the user, such as that another process is waited for.
    """

    max_memory: int = MAX_MEMORY
    workers: int = 1
    progress: Progress = lambda stage, done, total: None
    notice: Callable[[str], None] = lambda text: None

    @property
    def arrays(self) -> int:
        """Bytes for arrays."""
        return max(self.max_memory - BASE_BYTES, 16 << 20)

    def pages(self) -> Pages:
        """Mapped pages are released when the process comes near the limit."""
        return Pages(max(self.max_memory, 3 * BASE_BYTES // 2) * 9 // 10)


def check_same_tokenizer(trie: Trie, tokenizer: TokenizerIdentity, what: str = "the new documents") -> None:
    """Raise TokenizerMismatchError unless `trie` holds ids of this very tokenizer."""
    ours, theirs = trie.header.tokenizer_fingerprint, tokenizer.fingerprint
    if ours != theirs or trie.header.vocab_size != tokenizer.vocab_size:
        raise TokenizerMismatchError(
            f"{trie.path}: tokenizer {ours[:8] or 'none (ids)'} (vocab {trie.header.vocab_size}) differs from that of {what}: "
            f"{theirs[:8] or 'none (ids)'} (vocab {tokenizer.vocab_size}). Rebuild one of them."
        )


def header_like(header: format.TrieHeader, sources: tuple[format.Source, ...], options: Mapping[str, Any]) -> format.TrieHeader:
    """Make the header of a file that this version makes of another."""
    return dataclasses.replace(header, sources=sources, options=dict(options), tool_version=__version__)


@dataclasses.dataclass(frozen=True)
class Part:
    """A segment of an existing trie that goes into a new one. numbers: its source numbers in the new file.

    trusted: its suffixes are taken to be sorted where nothing is merged with them, which would show it.
    """

    trie: Trie
    segment: Segment
    numbers: np.ndarray
    trusted: bool = False


class SourceTable:
    """Numbers the sources of a file by name and weight, and adds up what they hold."""

    def __init__(self, sources: Sequence[format.Source] = ()):
        self._numbers = {(s.name, s.weight): number for number, s in enumerate(sources)}
        self._documents = [s.documents for s in sources]
        self._tokens = [s.tokens for s in sources]

    def number(self, name: str, weight: float = 1.0) -> int:
        """The source's number; a new one if it is not known yet."""
        name = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # file names need not be text
        number = self._numbers.setdefault((name, weight), len(self._numbers))
        if number == len(self._documents):
            if number == format.MAX_SOURCES:
                raise CorpusError(f"more than {format.MAX_SOURCES} sources. Give them one name with --source.")
            self._documents.append(0)
            self._tokens.append(0)
        return number

    def count(self, numbers: np.ndarray, lengths: np.ndarray, sign: int = 1) -> None:
        """Add documents, or take them out (sign -1): their source numbers and their tokens."""
        documents = np.bincount(numbers)
        tokens = np.bincount(numbers, lengths)
        for number in np.flatnonzero(documents).tolist():
            self._documents[number] += sign * int(documents[number])
            self._tokens[number] += sign * int(tokens[number])

    def sources(self) -> tuple[format.Source, ...]:
        return tuple(
            format.Source(name, documents, tokens, weight)
            for (name, weight), documents, tokens in zip(self._numbers, self._documents, self._tokens, strict=True)
        )


def write_segment(
    writer: TrieWriter,
    parts: Sequence[Part],
    documents: TokenDocument | Iterable[TokenDocument],
    sources: SourceTable,
    separator: int,
    folder: Path,
    resources: BuildResources,
) -> None:
    """One segment out of sorted parts and new documents, in this order; counts what it holds in `sources`.

    folder: where runs are kept that do not fit in memory.
    Raises TrieFormatError for a damaged part, CorpusError if there is nothing to write.
    """
    pages = resources.pages()
    scratch = Scratch(folder, pages)
    runs: list[Run] = []
    ends: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    n = 0
    writer.begin("tokens", format.smallest_dtype("tokens", separator))
    for part in parts:
        trie, segment = part.trie, part.segment
        pages.watch(trie.mapped)
        part_ends, part_sources = checked_documents(trie, segment, pages)
        for chunk in checked_tokens(trie, segment, part_ends, pages):
            writer.append(chunk)
        collections.deque(checked_section(trie, segment.section("suffixes"), pages), 0)  # before anything is made of them
        ends.append(part_ends + n)
        numbers.append(part.numbers[part_sources])
        sources.count(numbers[-1], np.diff(part_ends, prepend=-1) - 1)
        runs.append(
            Run(segment.suffixes, n, len(segment.tokens), str(trie.path), functools.partial(check_suffixes, trie, segment))
        )
        n += len(part.segment.tokens)
        resources.progress("copying", n, None)
    for stretch in _stretches(documents, sources, separator, resources):
        writer.append(stretch.tokens)
        suffixes = sort_suffixes(stretch.tokens, separator, DEPTH, resources.workers, resources.progress)
        if runs or not stretch.last:
            suffixes = scratch.put(suffixes)
        ends.append(stretch.ends + n)
        numbers.append(stretch.numbers)
        runs.append(Run(suffixes, n, len(stretch.tokens)))
        n += len(stretch.tokens)
        del stretch, suffixes  # or they would last as long as the merge
    if not runs:
        raise CorpusError("no document with text in the corpus: nothing to build.")
    mapped, all_tokens = writer.written_tokens()
    pages.watch(mapped, often=True)
    blocks = merged(all_tokens, separator, runs, resources.workers, pages)
    finish_segment(writer, n, blocks, np.concatenate(ends), np.concatenate(numbers), separator, resources.progress)


def finish_segment(
    writer: TrieWriter,
    n: int,
    blocks: Iterable[tuple[np.ndarray, np.ndarray]],
    ends: np.ndarray,
    numbers: np.ndarray,
    separator: int,
    progress: Progress,
) -> None:
    """Write the sections behind the tokens, of which `writer` has written `n`.

    blocks: (int64 positions, uint64 keys) of the suffixes, sorted. ends, numbers: of the documents.
    """
    tokens = n - len(ends)
    writer.begin("suffixes", format.smallest_dtype("suffixes", n))
    counts = np.zeros(separator + 1, np.int64)
    samples = []
    done = 0
    for positions, keys in blocks:
        writer.append(positions)
        add_first_tokens(keys, separator, counts)
        samples.append(keys[-done % SAMPLE :: SAMPLE].copy())
        done += len(positions)
        progress("writing", done, tokens)
    first = np.concatenate([[0], np.cumsum(counts[:-1])])
    writer.write("first", first if format.stores_first(done, separator) else first[:0], n)
    writer.write("samples", np.concatenate(samples), 0)
    writer.write("document_ends", ends, n)
    writer.write("document_sources", numbers, 0)
    writer.end_segment(tokens, len(ends))


@dataclasses.dataclass(frozen=True)
class _Stretch:
    tokens: np.ndarray  # documents closed by separators, as in a file
    ends: np.ndarray
    numbers: np.ndarray
    last: bool


def _stretches(
    documents: TokenDocument | Iterable[TokenDocument], sources: SourceTable, separator: int, resources: BuildResources
) -> Iterator[_Stretch]:
    """Documents gathered to as much as can be sorted within the memory limit. The arrays hold until the next is asked for."""
    dtype = format.smallest_dtype("tokens", separator)
    room = min(resources.arrays // (dtype.itemsize + 4), (1 << 32) - 1)
    buffer = np.empty(room, dtype)  # pages that are never touched take no memory
    counts = np.zeros(separator + 1, np.int64)
    ends: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    filled = done = 0

    def stretch(last: bool) -> _Stretch:
        return _Stretch(buffer[:filled], np.concatenate(ends), np.concatenate(numbers), last)

    for ids, group_ends, group_numbers in _groups(documents, sources, separator):
        largest = int(counts[:separator].max(initial=0)) * resources.workers
        needed = (filled + len(ids)) * (dtype.itemsize + 4) + min(filled, largest) * SORTING_BYTES
        if filled and (needed > resources.arrays or filled + len(ids) > room):
            yield stretch(False)
            counts[:], filled = 0, 0
            ends.clear()
            numbers.clear()
        if len(ids) > len(buffer):  # one group larger than the limit: there is no smaller piece to sort
            buffer = np.empty(len(ids), dtype)
        buffer[filled : filled + len(ids)] = ids
        add_counts(buffer[filled : filled + len(ids)], counts)
        ends.append(group_ends + filled)
        numbers.append(group_numbers)
        sources.count(group_numbers, np.diff(group_ends, prepend=-1) - 1)
        filled += len(ids)
        done += len(ids) - len(group_ends)
        resources.progress("reading", done, None)
    if filled:
        yield stretch(True)


def _groups(
    documents: TokenDocument | Iterable[TokenDocument], sources: SourceTable, separator: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(ids of some documents, each closed by a separator; their ends; their source numbers), all int64."""
    closing = np.array([separator])
    taken: list[Any] = []
    numbers: list[int] = []
    size = 0

    def group() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids = np.concatenate(taken)
        ends = np.flatnonzero(ids == separator)
        if ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > separator or len(ends) != len(numbers):
            for token in (t for some in taken[::2] for t in (some if isinstance(some, list) else np.asarray(some).tolist())):
                if type(token) is not int or not 0 <= token < separator:
                    raise CorpusError(
                        f"token id {token} is outside the vocabulary of {separator}. Give the right --vocab-size."
                    )
            ids = np.concatenate([np.asarray(some, np.int64) for some in taken])  # of kinds that numpy makes floats of together
            ends = np.flatnonzero(ids == separator)
        return ids, ends, np.array(numbers)

    for document in (documents,) if isinstance(documents, TokenDocument) else documents:
        if not isinstance(document, TokenDocument) or isinstance(document.token_ids, str | bytes):
            raise UsageError(f"documents hold {document!r:.80}: give TokenDocuments of token ids.")
        length = len(document.token_ids)
        if not length:
            continue
        taken += (document.token_ids, closing)
        numbers.append(sources.number(document.source))
        size += length
        if size >= GROUP_TOKENS or len(numbers) >= GROUP_DOCUMENTS:
            yield group()
            taken.clear()
            numbers.clear()
            size = 0
    if numbers:
        yield group()
