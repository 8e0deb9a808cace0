"""Adding documents to a trie file: what is there stays as it is, and few segments come of many appends."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.errors import CorpusError, LookaheadError, TrieFormatError
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie import build
from lookahead.trie.build import MAX_SEGMENTS, append_trie, kept_segments
from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_tries
from lookahead.trie.segment import BuildResources
from tests.support.processes import Program
from tests.support.tries import ARRAYS, FINGERPRINT, append_ids, assert_answers, build_ids, tiny_runs

DOCUMENTS = [[1, 2, 3, 4, 1, 2, 3, 5], [7]]
IDENTITY = TokenizerIdentity(10, FINGERPRINT)


@pytest.fixture
def path(tmp_path):
    return build_ids(tmp_path / "x.trie", DOCUMENTS).path


def segments_of(trie):
    return [(s.documents, s.tokens) for s in trie.header.segments]


def sources_of(trie):
    return [(s.name, s.documents, s.tokens, s.weight) for s in trie.header.sources]


def test_documents_are_added_as_a_segment_behind_what_is_there(path):
    before = path.read_bytes()
    old = Trie(path)
    trie = append_ids(path, [[1, 2, 9], [3]], source="b")
    assert segments_of(trie) == [(2, 9), (2, 4)]
    assert sources_of(trie) == [("a", 2, 9, 1.0), ("b", 2, 4, 1.0)]
    assert [s.document_sources.tolist() for s in trie.segments] == [[0, 0], [1, 1]]
    end = old.header.segments[-1].sections[-1].end
    assert path.read_bytes()[32:end] == before[32:end]
    assert trie.header.segments[0] == old.header.segments[0]
    assert_answers(trie, [*DOCUMENTS, [1, 2, 9], [3]])


@pytest.mark.parametrize(
    ("weight", "sources"),
    [(1.0, [("a", 3, 11, 1.0), ("b", 1, 2, 1.0)]), (2.0, [("a", 2, 9, 2.0), ("b", 1, 2, 1.0), ("a", 1, 2, 1.0)])],
)
def test_documents_of_a_known_source_are_counted_to_it_but_come_without_its_weight(path, weight, sources):
    append_ids(path, [[1, 2]], source="b")
    merge_tries([path], path, {"a": weight})
    assert append_trie([TokenDocument([4, 4], "a")], path, IDENTITY) == Trie(path).header
    assert sources_of(Trie(path)) == sources
    Trie(path).verify()


def test_same_appends_give_the_same_bytes_whatever_the_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    added = [[[n % 4, n % 3, 1]] * (1 + n % 3) for n in range(12)]
    for name in ("one", "other"):
        build_ids(tmp_path / name, DOCUMENTS)
    for documents in added:
        append_ids(tmp_path / "one", documents)
        with tiny_runs():
            append_ids(tmp_path / "other", documents, resources=BuildResources(workers=3))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_open_readers_keep_answering_from_the_old_file(path):
    reader = Trie(path)
    append_ids(path, [[1, 2, 3]])
    assert_answers(reader, DOCUMENTS)
    assert Trie(path).header.documents == 3


# ---- what is refused
def assert_unchanged(path, before):
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


OTHERS = [TokenizerIdentity(10, "0" * 16), TokenizerIdentity(11, FINGERPRINT), TokenizerIdentity(10, "")]


@pytest.mark.parametrize(
    ("documents", "identity", "message"),
    [
        *(([[1]], other, rf"x.trie: tokenizer 01234567 \(vocab 10\).*\(vocab {other.vocab_size}\)") for other in OTHERS),
        ([[], []], IDENTITY, "no document with text"),
        ([[1], [10]], IDENTITY, "token id 10 is outside the vocabulary of 10"),
        ([[1, 2], None], IDENTITY, "cut short"),
    ],
)
def test_documents_that_do_not_fit_or_cannot_be_read_are_refused_and_the_old_file_stays(path, documents, identity, message):
    def found():
        for ids in documents:
            if ids is None:
                raise CorpusError("cut short")
            yield TokenDocument(ids, "a")

    before = path.read_bytes()
    with pytest.raises(LookaheadError, match=message):
        append_trie(found(), path, identity)
    assert_unchanged(path, before)


@pytest.mark.parametrize("rebuild", [lambda path: build_ids(path, [[9]]), lambda path: append_ids(path, [[9]])])
def test_file_that_another_process_replaced_meanwhile_without_a_lock_is_not_overwritten(path, rebuild, monkeypatch):
    monkeypatch.setattr(build, "locked", lambda *_: contextlib.nullcontext())
    theirs = []

    def documents():
        yield TokenDocument([1, 2, 3], "a")
        rebuild(path)
        theirs.append(path.read_bytes())

    with pytest.raises(TrieFormatError, match="was replaced by another process meanwhile; nothing is appended"):
        append_trie(documents(), path, IDENTITY)
    assert_unchanged(path, theirs[0])


# ---- damage
def flip(path, place):
    """Alter one byte, in a new file: the old one may be mapped."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("name", ARRAYS)
def test_damage_of_what_is_kept_is_without_verify_still_found_after_an_append(tmp_path, name):
    path = build_ids(tmp_path / "x.trie", DOCUMENTS * 2).path  # more suffixes than the vocabulary: `first` is stored
    section = Trie(path).segments[0].section(name)
    flip(path, section.offset)
    trie = append_ids(path, [[1, 2, 3]], verify=False)
    assert trie.segments[0].section(name) == section
    with pytest.raises(TrieFormatError, match=f"section {name} is damaged"):
        trie.verify()


@pytest.mark.parametrize("verify", [True, False])
def test_bytes_between_sections_that_are_not_zero_are_found_by_an_append_or_after_it(path, verify):
    first, second = Trie(path).header.segments[0].sections[:2]
    assert first.end < second.offset
    flip(path, first.end)
    with pytest.raises(TrieFormatError, match="bytes before section suffixes are not zero"):
        append_ids(path, [[1, 2, 3]], verify=verify).verify()


# ---- how many segments
def test_forty_small_appends_leave_few_segments_that_add_up(path):
    documents = list(DOCUMENTS)
    names = ["a", "a"]
    for number in range(40):
        added = [[number % 9, *([1, 2] * (number % 4))], [number % 7]]
        documents += added
        names += ["abcde"[number % 5]] * 2
        trie = append_ids(path, added, source=names[-1])
        assert len(trie.segments) <= MAX_SEGMENTS
        assert sum(d for d, _ in segments_of(trie)) == trie.header.documents == len(documents)
        assert sum(t for _, t in segments_of(trie)) == trie.header.tokens == sum(map(len, documents))
    assert_answers(trie, documents)
    assert {name: (d, t) for name, d, t, _ in sources_of(trie)} == {
        name: (names.count(name), sum(len(d) for d, n in zip(documents, names, strict=True) if n == name)) for name in "abcde"
    }
    numbers = [n for s in trie.segments for n in s.document_sources.tolist()]
    assert [trie.header.sources[n].name for n in numbers] == names


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=MAX_SEGMENTS))
def test_kept_segments_outweigh_what_is_behind_them_and_leave_room_for_one_more(tokens):
    kept = kept_segments(tokens)
    assert kept + 1 <= MAX_SEGMENTS
    if len(tokens) < MAX_SEGMENTS:
        assert kept == len(tokens)
    else:
        assert all(tokens[k] > sum(tokens[k + 1 :]) for k in range(kept))


# ---- several processes
APPENDING = """
import sys
from lookahead.trie.segment import BuildResources
from tests.support.tries import append_ids
path, source = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
for number in range(4):
    append_ids(path, [[1, 2, 3], [4, 5]], source=source)
"""


@pytest.mark.deep
def test_processes_that_append_to_one_trie_at_once_lose_nothing(tmp_path):
    path = tmp_path / "shared.trie"
    build_ids(path, [[9, 8]], source="first")
    others = [Program(APPENDING, path, source) for source in ("a", "b")]
    assert [other.stdout.readline() for other in others] == ["ready\n"] * 2
    for other in others:
        other.stdin.write("go\n")
        other.stdin.flush()
    for other in others:
        other.communicate()
        assert other.returncode == 0
    trie = Trie(path)
    trie.verify()
    assert {s.name: (s.documents, s.tokens) for s in trie.header.sources} == {"first": (1, 2), "a": (8, 20), "b": (8, 20)}
    assert [p.name for p in tmp_path.iterdir()] == ["shared.trie"]
