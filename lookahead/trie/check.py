"""Whether what a trie file holds can be right. In: an open trie. Out: nothing, or TrieFormatError with section and byte.

Checksums show that a file is as it was written; here its arrays are checked against each other and the header. `check_trie`
reads the whole file. What merge and prune take from a file they check on the way: ids, documents and sources with
`checked_documents` and `checked_tokens` while they copy, the order of suffixes while they merge or count.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from lookahead.native.kernels import kernel
from lookahead.trie import format
from lookahead.trie.mapped import MappedTrie, Segment
from lookahead.trie.suffixes import AHEAD, DEPTH, SAMPLE, compare_suffixes, fetch_texts, sample_keys

if TYPE_CHECKING:
    from lookahead.trie.runs import Pages

CHECKED = 1 << 20  # suffixes checked at a time; a multiple of SAMPLE
UNSORTED = "suffixes are not sorted"


def check_trie(trie: MappedTrie, workers: int = 1, pages: Pages | None = None) -> None:
    """Read the whole file: see `Trie.verify`; also zeros between sections, ids. workers: threads."""
    format.check_gaps(trie.path, trie.mapped, trie.header)
    for section in trie.header.sections:  # a damaged one is called so, regardless of other errors
        collections.deque(checked_section(trie, section, pages), 0)
    documents = np.zeros(len(trie.header.sources), np.int64)
    tokens = np.zeros(len(trie.header.sources), np.int64)
    for segment in trie.segments:
        ends, numbers = checked_documents(trie, segment, pages)
        collections.deque(checked_tokens(trie, segment, ends, pages), 0)
        documents += np.bincount(numbers, minlength=len(documents))
        tokens += np.bincount(numbers, np.diff(ends, prepend=-1) - 1, len(tokens)).astype(np.int64)
        check_suffixes(trie, segment, workers, pages)
    for number, source in enumerate(trie.header.sources):
        if (source.documents, source.tokens) != (documents[number], tokens[number]):
            raise trie.damaged(f"documents or tokens of source {source.name!r} do not add up")
    if format.content_hash(trie.header) != trie.header.content_hash:
        raise trie.damaged("the header's content hash does not fit it")


def checked_section(trie: MappedTrie, section: format.Section, pages: Pages | None = None) -> Iterator[np.ndarray]:
    """A section in chunks; raises at its end if its checksum differs, so that damage gets no fresh one."""
    array, crc = format.section_array(trie.mapped, section), 0
    for begin in range(0, section.entries, format.CHUNK):
        chunk = array[begin : begin + format.CHUNK]
        crc = zlib.crc32(chunk.view(np.uint8).data, crc)
        yield chunk
        if pages is not None:
            pages.trim()
    format.check_crc(trie.path, section, crc)


def checked_documents(trie: MappedTrie, segment: Segment, pages: Pages | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(ends, source numbers) of a segment's documents, int64. Raises if they contradict its length or the header."""
    where, whose = segment.section("document_ends"), segment.section("document_sources")
    ends = np.concatenate(list(checked_section(trie, where, pages))).astype(np.int64)
    numbers = np.concatenate(list(checked_section(trie, whose, pages))).astype(np.int64)
    wrong = ends <= np.concatenate([[-1], ends[:-1]])
    if wrong.any():
        raise trie.damaged("document ends do not ascend", where, int(np.argmax(wrong)))
    if ends[-1] != len(segment.tokens) - 1:
        raise trie.damaged("document ends do not end with the tokens", where, len(ends) - 1)
    if numbers.max() >= len(trie.header.sources):
        raise trie.damaged("a document names a source that is not listed", whose, int(np.argmax(numbers)))
    return ends, numbers


def checked_tokens(trie: MappedTrie, segment: Segment, ends: np.ndarray, pages: Pages | None = None) -> Iterator[np.ndarray]:
    """The tokens of a segment in chunks. Raises if one is outside the vocabulary, or separators do not stand at `ends`."""
    section, separator = segment.section("tokens"), trie.header.separator
    begin = seen = 0
    for chunk in checked_section(trie, section, pages):
        if int(chunk.max()) > separator:
            raise trie.damaged("a token id is outside the vocabulary", section, begin + int(np.argmax(chunk > separator)))
        found = np.flatnonzero(chunk == separator) + begin
        args = ends[seen : seen + np.searchsorted(ends[seen:], begin + len(chunk))]
        if not np.array_equal(found, args):
            first = min(np.setxor1d(found, args).tolist())
            raise trie.damaged("document ends do not stand where the table states", section, int(first))
        yield chunk
        begin, seen = begin + len(chunk), seen + len(found)


def check_suffixes(trie: MappedTrie, segment: Segment, workers: int = 1, pages: Pages | None = None) -> None:
    """Raise unless the suffixes are sorted positions of tokens, and table and samples fit them. The tokens must be checked."""
    tokens, suffixes, section = segment.tokens, segment.suffixes, segment.section("suffixes")
    separator, samples = trie.header.separator, segment.samples

    def check(begin: int) -> None:
        chunk = suffixes[begin : begin + CHECKED]
        if int(chunk.max()) >= len(tokens):
            raise trie.damaged("a suffix points outside the tokens", section, begin + int(np.argmax(chunk >= len(tokens))))
        if begin and int(suffixes[begin - 1]) >= len(tokens):  # of the chunk before, which another thread checks
            return
        before = min(begin, 1)
        wrong = first_unsorted(tokens, separator, suffixes[begin - before : begin + CHECKED], DEPTH)
        if wrong >= 0:
            raise trie.damaged(UNSORTED, section, begin - before + wrong)
        keys = sample_keys(tokens, separator, chunk, np.empty(-(-len(chunk) // SAMPLE), np.uint64))
        differing = keys != samples[begin // SAMPLE : begin // SAMPLE + len(keys)]
        if differing.any():
            index = begin // SAMPLE + int(np.argmax(differing))
            raise trie.damaged("the sampled keys do not fit the suffixes", segment.section("samples"), index)
        if pages is not None:
            pages.trim()

    with ThreadPoolExecutor(workers) as pool:
        collections.deque(pool.map(check, range(0, len(suffixes), CHECKED)), 0)
    check_first(trie, segment)


def check_first(trie: MappedTrie, segment: Segment) -> None:
    """Raise unless the first-token table fits the suffixes, whose positions must be checked, and which must be sorted."""
    section = segment.section("first")
    first = segment.first.astype(np.int64)
    wrong = (first < np.concatenate([[0], first[:-1]])) | (first > len(segment.suffixes))
    wrong[0] |= first[0] != 0
    wrong[-1] |= first[-1] != len(segment.suffixes)
    if wrong.any():
        raise trie.damaged("the first-token table does not fit the suffixes", section, int(np.argmax(wrong)))
    held = np.flatnonzero(np.diff(first))
    for rows in (first[held], first[held + 1] - 1):  # the first and the last suffix of each token
        wrong = segment.tokens[segment.suffixes[rows]] != held
        if wrong.any():
            raise trie.damaged("the first-token table does not fit the suffixes", section, int(held[np.argmax(wrong)]))


@kernel
def first_unsorted(tokens, separator, suffixes, depth):
    """The first k for which suffix k does not sort before suffix k + 1; -1 if there is none.

    They are compared by `depth` tokens up to the separator, then by position.
    """
    n = np.int64(len(tokens))
    touched = np.int64(0)
    for k in range(len(suffixes) - 1):
        if k % AHEAD == 0:
            touched += fetch_texts(tokens, suffixes, k)
        a, b = np.int64(suffixes[k]), np.int64(suffixes[k + 1])
        if not (0 <= a < n and 0 <= b < n):
            return k
        order = compare_suffixes(tokens, separator, a, b, 0, depth)
        if order > 0 or (order == 0 and a >= b):
            return k
    return np.int64(-1) + min(np.int64(0), touched)  # touched is never negative: so that it is computed
