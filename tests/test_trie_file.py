"""The trie file: what is written comes back, and what is damaged is refused with what is wrong."""

from __future__ import annotations

import dataclasses
import struct
import zlib

import msgpack
import numpy as np
import pytest

from lookahead.atomic import replacing
from lookahead.draft.drafter import Drafter, DraftOptions
from lookahead.errors import CorpusError, LookaheadError, TokenizerMismatchError, TrieFormatError
from lookahead.trie import format
from lookahead.trie.build import TokenDocument, TokenizerIdentity, build_trie
from lookahead.trie.file import Trie

DOCUMENTS = [[1, 2, 3, 4, 1, 2, 3, 5], [7], [1, 2, 3, 4, 6]]
ARRAYS = tuple(format.SECTION_DTYPES)
NUMBERS = struct.Struct("<8sIIQII")  # magic, version, header length, file length, CRC, zero


def rewrite_preamble(path, place, value):
    """Overwrite one field of the first 32 bytes."""
    data = path.read_bytes()
    fields = list(NUMBERS.unpack(data[:32]))
    fields[place] = value
    path.write_bytes(NUMBERS.pack(*fields) + data[32:])


def rewrite_header(path, change):
    """Let `change` edit the header's map in place, and write it back with a checksum that fits."""
    data = path.read_bytes()
    magic, version, length, size, _, reserved = NUMBERS.unpack(data[:32])
    fields = msgpack.unpackb(data[32 : 32 + length])
    start = fields["sections"][0]["offset"]
    fields["options"] = {}  # the fixture filled it, so that there is room for what `change` does
    change(fields)
    packed = msgpack.packb(fields)
    assert 32 + len(packed) <= start
    preamble = NUMBERS.pack(magic, version, len(packed), size, zlib.crc32(packed), reserved)
    path.write_bytes((preamble + packed).ljust(start, b"\0") + data[start:])


def rewrite_arrays(trie, path, **changed):
    """Write `trie` to `path` with some arrays exchanged; the file's checksums fit them."""
    arrays = {name: changed.get(name, np.array(getattr(trie, name))) for name in ARRAYS}
    header = dataclasses.replace(trie.header, sources=changed.get("sources", trie.header.sources))
    format.write(path, header, arrays)
    return Trie(path)


@pytest.fixture
def trie(make_trie):
    return make_trie(DOCUMENTS, sources=["a", "b", "a"], options={"note": "x" * 400})


def test_documents_and_header_come_back_as_written(trie):
    assert [d.tolist() for d in trie.documents()] == DOCUMENTS
    header = trie.header
    assert (header.vocab_size, header.tokens, header.documents, header.depth) == (10, 14, 3, 32)
    assert (header.tokenizer_fingerprint, header.tokenizer_name) == ("0123456789abcdef", "tiny")
    assert [(s.name, s.documents, s.tokens, s.weight) for s in header.sources] == [("a", 2, 13, 1.0), ("b", 1, 1, 1.0)]
    assert trie.document_sources.tolist() == [0, 1, 0]
    assert trie.name == "corpus"
    trie.verify()


def test_longest_match_goes_as_far_back_as_the_corpus_allows(trie):
    match = trie.longest_match(np.array([9, 4, 1, 2, 3], np.int32), longest=32)
    assert (match.length, match.count) == (4, 1)
    match = trie.longest_match(np.array([9, 4, 1, 2, 3], np.int32), longest=2)
    assert (match.length, match.count) == (2, 3)
    match = trie.longest_match(np.array([9], np.int32), longest=32)
    assert (match.length, match.count) == (0, 14)


def test_children_come_commonest_first_without_the_end_of_a_document(trie):
    match = trie.match(np.array([3], np.int32))
    assert [(token, child.count) for token, child in trie.children(match)] == [(4, 2), (5, 1)]
    assert trie.children(match, most=1)[0][0] == 4
    assert trie.children(trie.match(np.array([7], np.int32))) == []


def test_empty_documents_are_left_out(make_trie):
    assert [d.tolist() for d in make_trie([[], [3], []]).documents()] == [[3]]


def test_corpus_without_tokens_is_refused(make_trie):
    with pytest.raises(CorpusError, match="no document with text"):
        make_trie([[], []])


@pytest.mark.parametrize("token", [-1, 10, 11, 1 << 40])
def test_token_outside_the_vocabulary_is_refused_by_the_build(make_trie, token):
    with pytest.raises(CorpusError, match=f"token id {token} is outside the vocabulary of 10"):
        make_trie([[1, token, 2]])


def test_same_documents_give_the_same_bytes_apart_from_the_time(make_trie):
    first, second = make_trie(DOCUMENTS, name="first.trie"), make_trie(DOCUMENTS, name="second.trie")
    assert first.header.content_hash == second.header.content_hash
    assert first.header.created != second.header.created
    assert dataclasses.replace(first.header, created=0.0) == dataclasses.replace(second.header, created=0.0)
    start = first.header.sections[0].offset
    assert first.path.read_bytes()[start:] == second.path.read_bytes()[start:]


def test_other_documents_or_names_give_another_content_hash(make_trie):
    plain = make_trie(DOCUMENTS).header.content_hash
    assert make_trie(DOCUMENTS[::-1]).header.content_hash != plain
    assert make_trie(DOCUMENTS, sources="b").header.content_hash != plain


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65535, "<u2"), (65536, "<u4")])
def test_tokens_take_two_bytes_up_to_65535_ids_and_four_above(make_trie, vocab_size, dtype):
    trie = make_trie([[0, vocab_size - 1]], vocab_size)
    assert {name: getattr(trie, name).dtype.str for name in ARRAYS} == {
        "tokens": dtype,
        "suffixes": "<u4",
        "first": "<u4",
        "document_ends": "<u4",
        "document_sources": "<u2",
    }
    assert trie.documents()[0].tolist() == [0, vocab_size - 1]
    trie.verify()


@pytest.mark.parametrize(("largest", "dtype"), [((1 << 32) - 1, "<u4"), (1 << 32, "<u8")])
def test_positions_take_eight_bytes_beyond_four_thousand_million(largest, dtype):
    assert format.smallest_dtype("suffixes", largest).str == dtype


def test_more_sources_than_sixteen_bits_count_are_refused():
    with pytest.raises(TrieFormatError, match="document_sources: 65536 does not fit"):
        format.smallest_dtype("document_sources", 65536)


def test_arrays_of_an_opened_trie_are_read_only(trie):
    with pytest.raises(ValueError, match="read-only"):
        trie.tokens[0] = 9


def test_every_section_starts_at_a_multiple_of_64_bytes(trie):
    assert [s.offset % 64 for s in trie.header.sections] == [0] * 5
    assert trie.header.sections[-1].end == trie.path.stat().st_size


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        pytest.param(0, b"\x89LKT\n\x1a\n\0", "not a trie file", id="magic"),
        pytest.param(1, 2, "format version 2; this tool reads version 1", id="version"),
        pytest.param(2, 1 << 30, "impossible length 1073741824", id="header-length-too-large"),
        pytest.param(2, 40, "damaged header", id="header-length-too-small"),
        pytest.param(3, 0, "header says 0 bytes, file has", id="file-length"),
        pytest.param(4, 12345, "damaged header .checksum differs", id="header-checksum"),
        pytest.param(5, 1, "damaged header", id="reserved"),
    ],
)
def test_each_preamble_field_altered_is_refused(trie, place, value, message):
    rewrite_preamble(trie.path, place, value)
    with pytest.raises(TrieFormatError, match=message) as refused:
        Trie(trie.path)
    assert str(refused.value).startswith(f"{trie.path}: ")


def section(which, /, **changed):
    """A change of one section's entry in the header."""

    def change(fields):
        found = next(s for s in fields["sections"] if s["name"] == which)
        found.update(changed)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(section("tokens", dtype="<f4"), "section tokens has dtype '<f4'", id="dtype"),
        pytest.param(section("tokens", dtype="|O"), "section tokens has dtype '|O'", id="dtype-of-objects"),
        pytest.param(section("tokens", dtype=["<u2"]), r"section tokens has dtype \['<u2'\]", id="dtype-no-text"),
        pytest.param(section("suffixes", dtype="<u8"), "section first would lie at", id="dtype-too-wide"),
        pytest.param(section("tokens", offset=0), "section tokens would lie at 0", id="offset-in-the-header"),
        pytest.param(section("first", offset=1), "section first would lie at 1", id="offset-unaligned"),
        pytest.param(section("first", offset=1 << 40), "section first would lie at 1099511627776", id="offset-outside"),
        pytest.param(section("tokens", entries=1 << 61), "section tokens would lie at", id="entries-far-too-many"),
        pytest.param(section("tokens", entries=16), "section tokens has 16 entries, not 17", id="entries-of-tokens"),
        pytest.param(section("first", entries=10), "section first has 10 entries, not 11", id="entries-of-first"),
        pytest.param(section("document_ends", entries=2), "section document_ends has 2 entries, not 3", id="entries-of-ends"),
        pytest.param(section("document_sources", entries=2), "section document_sources has 2", id="entries-of-sources"),
        pytest.param(section("suffixes", entries=15), "contradict each other", id="more-suffixes-than-tokens"),
        pytest.param(section("suffixes", name="trie"), "sections .*'trie'.*, expected", id="section-unknown"),
        pytest.param(section("suffixes", name=["x"]), "sections .*, expected", id="section-name-no-text"),
        pytest.param(lambda f: f["sections"].pop(), "sections .*, expected", id="section-missing"),
        pytest.param(lambda f: f["sections"].append(f["sections"][0]), "sections .*, expected", id="section-twice"),
        pytest.param(lambda f: f["sections"].reverse(), "sections .*, expected", id="sections-in-another-order"),
        pytest.param(section("tokens", entries=-1), "impossible value", id="entries-negative"),
        pytest.param(section("tokens", crc="no"), "impossible value", id="checksum-no-number"),
        pytest.param(section("tokens", offset=1.5), "impossible value", id="offset-no-whole-number"),
        pytest.param(section("tokens", extra=1), "unreadable header", id="section-with-unknown-field"),
        pytest.param(lambda f: f.update(vocab_size=9), "section first has 11 entries, not 10", id="vocab-size"),
        pytest.param(lambda f: f.update(vocab_size=0), "impossible value", id="vocab-size-zero"),
        pytest.param(lambda f: f.update(vocab_size=True), "impossible value", id="vocab-size-no-number"),
        pytest.param(lambda f: f.update(tokens=13), "section tokens has 17 entries, not 16", id="tokens"),
        pytest.param(lambda f: f.update(documents=4), "section tokens has 17 entries, not 18", id="documents"),
        pytest.param(lambda f: f.update(documents=0, tokens=17), "impossible value", id="no-documents"),
        pytest.param(lambda f: f.update(depth=0), "impossible value", id="depth-zero"),
        pytest.param(lambda f: f.update(depth=1025), "impossible value", id="depth-too-large"),
        pytest.param(lambda f: f.update(options=[]), "impossible value", id="options-no-map"),
        pytest.param(lambda f: f.update(tokenizer_fingerprint=5), "impossible value", id="fingerprint-no-text"),
        pytest.param(lambda f: f.update(tokenizer_name=None), "impossible value", id="name-no-text"),
        pytest.param(lambda f: f.update(sources=5), "unreadable header", id="sources-no-list"),
        pytest.param(lambda f: f["sources"][0].update(weight="x"), "impossible weight", id="weight-no-number"),
        pytest.param(lambda f: f["sources"][0].update(weight=-1.0), "impossible weight", id="weight-negative"),
        pytest.param(lambda f: f["sources"][0].update(weight=float("nan")), "impossible weight", id="weight-not-a-number"),
        pytest.param(lambda f: f["sources"][0].update(name=1), "impossible value", id="source-name-no-text"),
        pytest.param(lambda f: f.pop("depth"), "unreadable header", id="field-missing"),
        pytest.param(lambda f: f.update(unknown=1), "unreadable header", id="field-unknown"),
    ],
)
def test_each_header_field_altered_is_refused_even_with_a_checksum_that_fits(trie, change, message):
    rewrite_header(trie.path, change)
    with pytest.raises(TrieFormatError, match=message) as refused:
        Trie(trie.path)
    assert str(refused.value).startswith(f"{trie.path}: ")


@pytest.mark.parametrize("packed", [b"\x05", b"\x93\x01\x02\x03", b"\xc1", b"\x81\xa1a", b"", b"\x91" * 5000])
def test_header_that_is_no_map_is_refused(trie, packed):
    data = NUMBERS.pack(format.MAGIC, 1, len(packed), 32 + len(packed), zlib.crc32(packed), 0) + packed
    trie.path.write_bytes(data)
    with pytest.raises(TrieFormatError, match="unreadable header"):
        Trie(trie.path)


def test_header_rewritten_without_a_change_is_accepted(trie):
    rewrite_header(trie.path, lambda fields: None)
    Trie(trie.path).verify()


def test_trie_cut_short_is_refused_with_both_sizes(trie):
    data = trie.path.read_bytes()
    trie.path.write_bytes(data[:-1])
    with pytest.raises(TrieFormatError, match=f"header says {len(data)} bytes, file has {len(data) - 1}.*cut short"):
        Trie(trie.path)


def test_trie_cut_at_any_length_is_refused(trie):
    data = trie.path.read_bytes()
    for size in range(len(data)):
        trie.path.write_bytes(data[:size])
        with pytest.raises(TrieFormatError):
            Trie(trie.path)


def test_trie_with_bytes_appended_is_refused_with_both_sizes(trie):
    data = trie.path.read_bytes()
    trie.path.write_bytes(data + b"\0")
    with pytest.raises(TrieFormatError, match=f"header says {len(data)} bytes, file has {len(data) + 1}.*appended"):
        Trie(trie.path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b"\x89LKT", "not a trie file"),
        (b"hello, this is some text and no trie at all", "not a trie file"),
        (format.MAGIC + b"\1\0\0\0", "only 12 bytes"),
    ],
)
def test_what_is_no_trie_is_refused(tmp_path, data, message):
    path = tmp_path / "x.trie"
    path.write_bytes(data)
    with pytest.raises(TrieFormatError, match=message):
        Trie(path)


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(TrieFormatError, match=r"cannot be read [(]No such file"):
        Trie(tmp_path / "missing.trie")
    with pytest.raises(TrieFormatError, match=r"cannot be read [(]Is a directory"):
        Trie(tmp_path)


@pytest.mark.parametrize("name", ARRAYS)
def test_flipped_byte_in_a_section_is_found_by_verify(trie, name):
    data = trie.path.read_bytes()
    found = next(s for s in trie.header.sections if s.name == name)
    for place in range(found.offset, found.end):
        trie.path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        with pytest.raises(TrieFormatError, match=f"section {name} is damaged"):
            Trie(trie.path).verify()


def test_flipped_byte_before_the_sections_is_found_on_opening(trie):
    data = trie.path.read_bytes()
    header_length = NUMBERS.unpack(data[:32])[2]
    for place in range(32 + header_length):
        trie.path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        with pytest.raises(TrieFormatError):
            Trie(trie.path)


def changed(array, place, value):
    copy = np.array(array)
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(lambda t: {"tokens": changed(t.tokens, 0, 11)}, "outside the vocabulary", id="token"),
        pytest.param(lambda t: {"tokens": changed(t.tokens, 0, 10)}, "document ends", id="separator-inside"),
        pytest.param(lambda t: {"tokens": changed(t.tokens, -1, 1)}, "document ends", id="last-separator-gone"),
        pytest.param(lambda t: {"document_ends": changed(t.document_ends, 0, 3)}, "document ends", id="ends"),
        pytest.param(lambda t: {"document_sources": changed(t.document_sources, 0, 2)}, "not listed", id="source"),
        pytest.param(lambda t: {"document_sources": changed(t.document_sources, 0, 1)}, "do not add up", id="source-sums"),
        pytest.param(
            lambda t: {"sources": (dataclasses.replace(t.header.sources[0], tokens=12), t.header.sources[1])},
            "do not add up",
            id="tokens-of-a-source",
        ),
        pytest.param(lambda t: {"sources": ()}, "not listed", id="no-sources"),
        pytest.param(lambda t: {"suffixes": changed(t.suffixes, 0, 17)}, "points outside", id="suffix-outside"),
        pytest.param(lambda t: {"suffixes": changed(t.suffixes, 0, t.suffixes[1])}, "not sorted", id="suffix-twice"),
        pytest.param(lambda t: {"suffixes": changed(t.suffixes, -1, 16)}, "first-token table", id="suffix-at-a-separator"),
        pytest.param(lambda t: {"first": changed(t.first, 2, 0)}, "first-token table", id="first-table"),
    ],
)
def test_arrays_that_contradict_each_other_are_found_by_verify_though_checksums_fit(trie, tmp_path, changes, message):
    altered = rewrite_arrays(trie, tmp_path / "altered.trie", **changes(trie))
    with pytest.raises(TrieFormatError, match=message):
        altered.verify()


# Far, at and just over the end of the tokens, and what turns negative in a signed 64-bit integer.
HOSTILE = [13, 16, 17, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@pytest.mark.parametrize("name", ["suffixes", "first", "document_ends", "document_sources"])
def test_hostile_numbers_in_a_file_are_never_followed_outside_of_it(trie, tmp_path, name):
    """Opened without verify. A read far outside would end the test run; a near one could show as a token."""
    narrow = getattr(trie, name)
    dtype = np.dtype("<u2") if name == "document_sources" else np.dtype("<u8")
    weighted = tuple(dataclasses.replace(source, weight=2.0) for source in trie.header.sources)
    for value in HOSTILE:
        for places in (slice(None), slice(None, None, 2), slice(1, None, 2)):
            array = changed(narrow.astype(dtype), places, np.uint64(value).astype(dtype))
            hostile = rewrite_arrays(trie, tmp_path / "hostile.trie", **{name: array}, sources=weighted)
            for token in range(10):
                match = hostile.longest_match(np.array([1, 2, 3, token], np.int32), longest=32)
                assert 0 <= match.low <= match.high <= len(hostile.suffixes)
                assert all(0 <= child < 10 for child, _ in hostile.children(match))
            drafter = Drafter([hostile], DraftOptions(decoding_length=16))
            drafter.start([9, 1, 2, 3])
            tree = drafter.draft()
            assert set(tree.token_ids[1:].tolist()) <= {1, 2, 3, 4, 5, 6, 7, 9}


def test_failed_write_leaves_the_old_file_as_it_was(make_trie):
    resource = pytest.importorskip("resource")
    trie = make_trie(DOCUMENTS)
    before = trie.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))  # as if the disk were full after 200 bytes
    try:
        with pytest.raises(LookaheadError, match=r"write failed .*\. The old file is unchanged"):
            make_trie([[1, 2, 3]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert trie.path.read_bytes() == before
    assert list(trie.path.parent.iterdir()) == [trie.path]


def test_interrupted_write_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("old")

    def write():
        with replacing(path, "w") as file:
            file.write("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_finished_write_replaces_the_old_file_only_at_its_end(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("old")
    with replacing(path, "w") as file:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_onto_a_folder_or_into_a_missing_one_is_refused(tmp_path):
    identity, documents = TokenizerIdentity(10), [TokenDocument([1], "a")]
    with pytest.raises(LookaheadError, match="is a folder"):
        build_trie(documents, tmp_path, identity)
    with pytest.raises(LookaheadError, match=r"cannot write here [(]No such file or directory"):
        build_trie(documents, tmp_path / "missing" / "x.trie", identity)


def test_opened_trie_stays_readable_when_its_file_is_replaced(trie, make_trie):
    make_trie([[8, 8]])  # the same path
    assert [d.tolist() for d in trie.documents()] == DOCUMENTS


def test_trie_of_another_tokenizer_is_refused_with_both_fingerprints(trie):
    with pytest.raises(TokenizerMismatchError, match=r"tokenizer 01234567 \(vocab 10\); other uses fedcba98 \(vocab 10\)"):
        trie.check_tokenizer("fedcba9876543210", 10, "other")


def test_trie_of_a_larger_vocabulary_is_refused_with_both_sizes(trie):
    with pytest.raises(TokenizerMismatchError, match="vocabulary of 10 tokens; model has 9"):
        trie.check_tokenizer("", 9, "model")


def test_trie_of_the_same_tokenizer_or_of_bare_ids_is_accepted(trie, tmp_path):
    trie.check_tokenizer("0123456789abcdef", 10, "same")
    trie.check_tokenizer("0123456789abcdef", 12, "same, vocabulary padded")
    trie.check_tokenizer("", 10, "model without tokenizer")
    build_trie([TokenDocument([1], "a")], tmp_path / "ids.trie", TokenizerIdentity(10))
    Trie(tmp_path / "ids.trie").check_tokenizer("fedcba9876543210", 10, "any")
