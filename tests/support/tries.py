"""Random corpora, what a scan of them answers, and trie files made in every way: shared by the tests of the trie store."""

import contextlib
import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st

from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import TrieFormatError
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie import format, runs, stats
from lookahead.trie import segment as segments
from lookahead.trie.build import append_trie, build_trie
from lookahead.trie.file import Trie
from lookahead.trie.runs import Pages
from lookahead.trie.segment import BuildResources
from lookahead.trie.suffixes import DEPTH, SAMPLE
from lookahead.trie.writer import TrieWriter

# 65534 is the last vocabulary whose tokens are packed four to a key, 65535 the last with two-byte tokens.
VOCAB_SIZES = [4, 65534, 65535, 70000]
ARRAYS = tuple(format.SECTION_DTYPES)
FINGERPRINT = "0123456789abcdef"


# ---- corpora
@st.composite
def texts(draw: Any, token: Any, longest: int) -> list[int]:
    """One document: short pieces, some of them many times in a row, so that text repeats itself also beyond DEPTH tokens."""
    piece = st.lists(token, min_size=1, max_size=4)
    pieces = draw(st.lists(st.tuples(piece, st.sampled_from([1, 1, 2, 12])), min_size=1, max_size=4))
    return [token for some, times in pieces for token in some * times][:longest]


@st.composite
def corpora(draw: Any, longest: int = 48, most: int = 6) -> tuple[list[list[int]], int]:
    """(documents, vocab_size): few different tokens, the smallest and the largest id among them."""
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    token = st.sampled_from([0, 1, vocab_size - 1])
    return draw(st.lists(texts(token, longest), min_size=1, max_size=most)), vocab_size


def flat(documents: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """The tokens section: each document closed by the separator, read-only as in a mapped file."""
    tokens = [token for document in documents for token in (*document, vocab_size)]
    array = np.array(tokens, format.smallest_dtype("tokens", vocab_size))
    array.setflags(write=False)
    return array


def sorted_slowly(tokens: Sequence[int], separator: int, depth: int = DEPTH) -> list[int]:
    """Positions of real tokens by the rule: first `depth` tokens up to the own separator, then position."""

    def key(position: int) -> tuple[Sequence[int], int]:
        end = tokens.index(separator, position)
        return tokens[position : end + 1][:depth], position

    return sorted((p for p, token in enumerate(tokens) if token != separator), key=key)


def keys_slowly(tokens: Sequence[int], separator: int, positions: Sequence[int]) -> list[int]:
    """The text at each position as one number: digits of the separator's width up to 64 bits, zeros behind the separator."""
    width = separator.bit_length()
    count = min(64 // width, DEPTH)
    keys = []
    for position in positions:
        end = tokens.index(separator, position) + 1
        digits = [*tokens[position:end][:count]]
        digits += [0] * (count - len(digits))
        keys.append(sum(digit << width * place for place, digit in enumerate(reversed(digits))))
    return keys


def segment_of(documents: Sequence[Sequence[int]], vocab_size: int) -> SimpleNamespace:
    """The arrays of a segment of a file, read-only as there; one source for each document."""
    tokens = flat(documents, vocab_size)
    suffixes = np.array(sorted_slowly(tokens.tolist(), vocab_size), np.uint32)
    ends = np.flatnonzero(tokens == vocab_size)
    arrays = {
        "tokens": tokens,
        "suffixes": suffixes,
        "first": np.searchsorted(tokens[suffixes], np.arange(vocab_size + 1)).astype("<u4"),
        "samples": np.array(keys_slowly(tokens.tolist(), vocab_size, suffixes[::SAMPLE].tolist()), np.uint64),
        "document_ends": ends.astype("<u4"),
        "document_sources": np.arange(len(documents)).astype("<u2"),
    }
    assert list(arrays) == list(ARRAYS)
    for array in arrays.values():
        array.setflags(write=False)
    return SimpleNamespace(**arrays)


# ---- files
def build_ids(path: Path, documents: Sequence[Sequence[int]], vocab_size: int = 10, source: str = "a", **options: Any) -> Trie:
    """A trie of token ids at `path`, all of one source."""
    build_trie([TokenDocument(ids, source) for ids in documents], path, TokenizerIdentity(vocab_size, FINGERPRINT), **options)
    return Trie(path)


def append_ids(path: Path, documents: Sequence[Sequence[int]], vocab_size: int = 10, source: str = "a", **options: Any) -> Trie:
    """The trie at `path` with more documents."""
    append_trie([TokenDocument(ids, source) for ids in documents], path, TokenizerIdentity(vocab_size, FINGERPRINT), **options)
    return Trie(path)


@contextlib.contextmanager
def tiny_runs(documents: int = 1) -> Iterator[None]:
    """Every `documents` documents are a run of their own on disk, merged in small blocks; pages are let go after each step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "GROUP_DOCUMENTS", documents)
        patch.setattr(BuildResources, "arrays", property(lambda self: 8))
        patch.setattr(BuildResources, "pages", lambda self: Pages(0))
        small_blocks(patch, 256)
        yield


def small_blocks(patch: pytest.MonkeyPatch, block: int) -> None:
    """Merge so many suffixes at a time; a run offers 1/16 of them or more: fewer than there are equal texts."""
    patch.setattr(runs, "BLOCK", block)
    patch.setattr(runs, "SWEEP", max(1, block // 16))


def arrays_of(segment: Any) -> dict[str, np.ndarray]:
    return {name: np.array(getattr(segment, name)) for name in ARRAYS}


def rewrite_arrays(trie: Trie, path: Path, changed: dict[str, np.ndarray], header: format.TrieHeader | None = None) -> Trie:
    """Write `trie` to `path` with some arrays of its first segment exchanged; the file's checksums fit them."""
    path.unlink(missing_ok=True)  # the old file may be mapped
    with path.open("w+b") as file:
        writer = TrieWriter(file)
        for number, segment in enumerate(trie.segments):
            arrays = {**arrays_of(segment), **({} if number else changed)}
            for name in ARRAYS:
                writer.begin(name, arrays[name].dtype)
                writer.append(arrays[name])
            writer.end_segment(segment.header.tokens, segment.header.documents)
        writer.finish(header or trie.header)
    return Trie(path)


def rewrite_packed(path: Path, packed: bytes) -> None:
    """Put other bytes in the place of the header, with lengths and a checksum that fit."""
    data = path.read_bytes()
    _, version, length, *_ = format.PREAMBLE.unpack(data[:32])
    sections = data[32 : len(data) - length]
    size = 32 + len(sections) + len(packed)
    path.unlink()
    path.write_bytes(format.PREAMBLE.pack(format.MAGIC, version, len(packed), size, zlib.crc32(packed), 0) + sections + packed)


def header_map(path: Path) -> dict[str, Any]:
    """The header's map, as msgpack gives it."""
    data = path.read_bytes()
    return msgpack.unpackb(data[len(data) - format.PREAMBLE.unpack(data[:32])[2] :])


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Let `change` edit the header's map in place, and write it back with a checksum that fits."""
    fields = header_map(path)
    change(fields)
    rewrite_packed(path, msgpack.packb(fields))


# ---- what is asked of them
def counts_of(documents: Sequence[Sequence[int]]) -> tuple[Counter, dict[tuple[int, ...], Counter]]:
    """(how often each text of up to DEPTH tokens stands inside a document, and what follows it there how often)."""
    counts: Counter = Counter()
    following: dict[tuple[int, ...], Counter] = defaultdict(Counter)
    for document in documents:
        for begin in range(len(document)):
            for end in range(begin + 1, min(begin + DEPTH, len(document)) + 1):
                ngram = tuple(document[begin:end])
                counts[ngram] += 1
                if end < len(document):
                    following[ngram][document[end]] += 1
    return counts, following


def assert_answers(trie: Trie, documents: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]] = ()) -> None:
    """Documents, counts, continuations and longest matches are those of a scan; the file verifies."""
    trie.verify()
    assert [d.tolist() for d in trie.documents()] == [list(d) for d in documents]
    assert (trie.header.documents, trie.header.tokens) == (len(documents), sum(map(len, documents)))
    counts, following = counts_of(documents)
    for ngram, count in counts.items():
        match = trie.match(np.array(ngram, np.int32))
        assert (match.length, match.count) == (len(ngram), count)
        if len(ngram) < DEPTH:  # suffixes are not sorted by the tokens behind
            children = [(token, child.count) for token, child in trie.children(match)]
            assert children == sorted(following[ngram].items(), key=lambda item: (-item[1], item[0]))
    singles = {token: count for (token, *rest), count in counts.items() if not rest}
    assert {token: child.count for token, child in trie.children(trie.root())} == singles
    across = [[*a[-2:], *b[:2]] for a, b in itertools.pairwise(documents)]
    for context in (*contexts, *documents, *across):
        longest = max(m for m in range(min(len(context), DEPTH) + 1) if not m or tuple(context[-m:]) in counts)
        match = trie.longest_match(np.array(context, np.int32))
        expected = counts[tuple(context[-longest:])] if longest else trie.header.branches
        assert (match.length, match.count) == (longest, expected)


def verifies(trie: Trie) -> bool:
    try:
        trie.verify()
    except TrieFormatError:
        return False
    return True


def ask_everything(trie: Trie) -> None:
    """Queries, drafts and figures of a file that may lie: what they raise is TrieFormatError, or they stay inside the file."""
    context = np.array([1, 2, 3, 1, 2], np.int32)
    for end in range(1, len(context) + 1):
        match = trie.longest_match(context[:end])
        for (low, high), segment in zip(match.ranges, trie.segments, strict=True):
            assert 0 <= low <= high <= len(segment.suffixes)
        if match.length < trie.header.depth:
            assert all(0 <= token < trie.header.vocab_size for token, _ in trie.children(match))
    stats.continuations(trie, context)
    stats.overview(trie)
    for strategy in ("hierarchical", "single"):
        drafter = Drafter([trie], DraftOptions(strategy, decoding_length=8, branch_length=4))
        row = drafter.start(context)
        row.accept([1, 2])
        row.draft()
