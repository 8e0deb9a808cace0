"""Trie files that are cut, altered or made to deceive: each is refused, or harmless."""

import contextlib
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.errors import TrieFormatError
from lookahead.trie import format
from lookahead.trie.file import Trie
from tests.support.tries import ARRAYS, append_ids, ask_everything, build_ids, rewrite_header, rewrite_packed, verifies

DOCUMENTS = [[1, 2, 3, 4, 1, 2, 3, 5], [7], [1, 2, 3, 4, 6]]


@pytest.fixture
def trie(make_trie):
    return make_trie(DOCUMENTS, sources=["a", "b", "a"], options={"note": "x"})


@pytest.fixture(scope="module")
def two_segments(tmp_path_factory):
    """The bytes of a trie that was appended to: more text than one sample, so that all sections of both are filled."""
    path = tmp_path_factory.mktemp("two") / "x.trie"
    build_ids(path, [*DOCUMENTS, [1, 2] * 150])
    append_ids(path, [[1, 2, 3, 1, 2], [2, 3], [8], [4, 5] * 3], source="b")
    return path.read_bytes()


# ---- the first bytes
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        pytest.param(0, b"\x89LKT\n\x1a\n\0", "not a trie file", id="magic"),
        pytest.param(1, 1, "format version 1; this tool reads versions 2 and 3", id="version-older"),
        pytest.param(1, 4, "format version 4; this tool reads versions 2 and 3", id="version-newer"),
        pytest.param(1, 3, "format version 3 contradicts the sections", id="version-of-other-sections"),
        pytest.param(2, 1 << 30, "impossible length 1073741824", id="header-length-too-large"),
        pytest.param(2, -31, "impossible length", id="header-length-into-the-first-bytes"),
        pytest.param(2, 0, "damaged header", id="header-length-zero"),
        pytest.param(2, 40, "damaged header", id="header-length-too-small"),
        pytest.param(3, 0, "header states 0 bytes, file has", id="file-length"),
        pytest.param(3, (1 << 64) - 1, "header states 18446744073709551615 bytes, file has", id="file-length-largest"),
        pytest.param(4, 12345, "damaged header .checksum differs", id="header-checksum"),
        pytest.param(5, 1, "damaged header", id="reserved"),
    ],
)
def test_each_preamble_field_altered_is_refused(trie, place, value, message):
    data = trie.path.read_bytes()
    fields = list(format.PREAMBLE.unpack(data[:32]))
    fields[place] = value if value != -31 else len(data) - 31
    trie.path.write_bytes(format.PREAMBLE.pack(*fields) + data[32:])
    with pytest.raises(TrieFormatError, match=message) as refused:
        Trie(trie.path)
    assert str(refused.value).startswith(f"{trie.path}: ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b"\x89LKT", "not a trie file"),
        (b"hello, this is some text and no trie at all", "not a trie file"),
        (format.MAGIC + b"\1\0\0\0", "only 12 bytes"),
        (bytes(4096), "not a trie file"),
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


# ---- the header
def section(which, /, **changed):
    """A change of one section's entry in the header of the first segment."""

    def change(fields):
        next(s for s in fields["segments"][0]["sections"] if s["name"] == which).update(changed)

    return change


def segment(**changed):
    return lambda fields: fields["segments"][0].update(changed)


def source(**changed):
    return lambda fields: fields["sources"][0].update(changed)


def field(**changed):
    return lambda fields: fields.update(changed)


def sections(change):
    return lambda fields: change(fields["segments"][0]["sections"])


IMPOSSIBLE, UNREADABLE = "impossible value", "unreadable header"
CHANGES = {
    "dtype": (section("tokens", dtype="<f4"), "section tokens has dtype '<f4'"),
    "dtype-no-text": (section("tokens", dtype=["<u2"]), IMPOSSIBLE),
    "dtype-of-tokens-wider": (section("tokens", dtype="<u4"), "would lie at|section tokens has dtype"),
    "offset-unaligned": (section("first", offset=1), "section first would lie at 1"),
    "offset-with-a-gap": (section("document_sources", offset=640), "section document_sources would lie at 640"),
    "entries-far-too-many": (section("tokens", entries=1 << 61), "section tokens would lie at"),
    "entries-of-tokens": (section("tokens", entries=16), "section tokens has 16 entries, not 17"),
    "entries-of-first": (section("first", entries=10), "section first has 10 entries, not 11"),
    "entries-of-samples": (section("samples", entries=0), "section document_ends would lie at"),
    "more-suffixes-than-tokens": (section("suffixes", entries=15), "more suffixes than tokens"),
    "section-unknown": (section("suffixes", name="trie"), "sections .*'trie'.*, expected"),
    "section-missing": (sections(lambda found: found.pop()), "sections .*, expected"),
    "entries-negative": (section("tokens", entries=-1), IMPOSSIBLE),
    "checksum-no-number": (section("tokens", crc="no"), IMPOSSIBLE),
    "segments-none": (field(segments=[]), IMPOSSIBLE),
    "segments-no-list": (field(segments=7), UNREADABLE),
    "segment-twice": (lambda f: f["segments"].append(f["segments"][0]), "section tokens would lie at"),
    "segment-tokens": (segment(tokens=13), "section tokens has 17 entries, not 16"),
    "segment-without-documents": (segment(documents=0, tokens=17), IMPOSSIBLE),
    "segment-without-sections": (lambda f: f["segments"][0].pop("sections"), UNREADABLE),
    "vocab-size": (field(vocab_size=9), "section first has 11 entries, not 10"),
    "vocab-size-zero": (field(vocab_size=0), IMPOSSIBLE),
    "vocab-size-no-number": (field(vocab_size=True), IMPOSSIBLE),
    "depth-less": (field(depth=31), IMPOSSIBLE),
    "options-no-map": (field(options=[]), IMPOSSIBLE),
    "options-with-bytes": (field(options={"x": [b"\xff"]}), UNREADABLE),
    "options-too-deep": (
        lambda f: f.update(options={"x": functools.reduce(lambda inner, _: [inner], range(480), 0)}),
        UNREADABLE,
    ),
    "source-twice": (lambda f: f["sources"].append({**f["sources"][0], "documents": 0, "tokens": 0}), IMPOSSIBLE),
    "name-no-text": (field(tokenizer_name=None), IMPOSSIBLE),
    "created-no-number": (field(created="now"), IMPOSSIBLE),
    "created-negative": (field(created=-1.0), IMPOSSIBLE),
    "sources-no-list": (field(sources=5), UNREADABLE),
    "sources-none": (field(sources=[]), IMPOSSIBLE),
    "source-tokens": (source(tokens=12), "documents or tokens of the sources do not add up"),
    "weight-negative": (source(weight=-1.0), IMPOSSIBLE),
    "weight-not-a-number": (source(weight=float("nan")), IMPOSSIBLE),
    "weight-too-large": (source(weight=1e7), IMPOSSIBLE),
    "source-name-no-text": (source(name=1), IMPOSSIBLE),
    "field-missing": (lambda f: f.pop("depth"), UNREADABLE),
    "field-unknown": (field(unknown=1), UNREADABLE),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_header_field_altered_is_refused_even_with_a_checksum_that_fits(trie, change):
    alter, message = CHANGES[change]
    rewrite_header(trie.path, alter)
    with pytest.raises(TrieFormatError, match=message) as refused:
        Trie(trie.path)
    assert str(refused.value).startswith(f"{trie.path}: ")


@pytest.mark.parametrize("packed", [b"\x05", b"\x93\x01\x02\x03", b"\xc1", b"\x81\xa1a", b"", b"\x91" * 5000, b"\xa1\xff"])
def test_header_that_is_no_map_is_refused(trie, packed):
    rewrite_packed(trie.path, packed)
    with pytest.raises(TrieFormatError, match=UNREADABLE):
        Trie(trie.path)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from([0, 1, 2, 10, 64, 1 << 31, 1 << 32, (1 << 62) - 1, 1 << 62, (1 << 64) - 1, -1]),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["<u2", "<u4", "<u8", *ARRAYS]),
    st.binary(max_size=4),
)
values = st.recursive(
    scalars, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.text(max_size=4), v, max_size=3)), max_leaves=6
)


def places(value):
    """Every (container, key) below a header's map."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found = [(value, key) for key in keys]
    for key in keys:
        found += places(value[key])
    return found


@given(st.data())
def test_anything_anywhere_in_the_header_is_refused_or_harmless(two_segments, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzzed.trie"
    path.unlink(missing_ok=True)
    path.write_bytes(two_segments)

    def change(fields):
        for _ in range(data.draw(st.integers(1, 3))):
            container, key = data.draw(st.sampled_from(places(fields)))
            match data.draw(st.sampled_from(["replace", "nudge", "remove", "repeat"])):
                case "nudge" if type(container[key]) in (int, float):
                    container[key] = data.draw(st.sampled_from([0, 1, 2, container[key] + 1, container[key] * 2, 1e39]))
                case "replace" | "nudge":
                    container[key] = data.draw(values)
                case "remove":
                    del container[key]
                case "repeat" if isinstance(container, list):
                    container.append(container[key])
                case "repeat":
                    container[data.draw(st.text(max_size=4))] = container[key]
            if not places(fields):
                return

    rewrite_header(path, change)
    try:
        opened = Trie(path)
    except TrieFormatError:
        return
    ask_everything(opened)
    verifies(opened)


# ---- bytes that fit nothing
def altered(data, kind, random):
    """`data` with one thing wrong, of a kind."""
    place, other = sorted(random.choice(len(data), 2, replace=False).tolist())
    match kind:
        case "bit flipped":
            return data[:place] + bytes([data[place] ^ 1 << int(random.integers(8))]) + data[place + 1 :]
        case "bytes exchanged":
            size = int(random.integers(1, 40))
            return data[:place] + random.bytes(min(size, len(data) - place)) + data[place + size :]
        case "ranges swapped":
            size = int(random.integers(1, 1 + min(other - place, len(data) - other)))
            one, two = data[place : place + size], data[other : other + size]
            return data[:place] + two + data[place + size : other] + one + data[other + size :]
    raise ValueError(kind)


KINDS = ["bit flipped", "bytes exchanged", "ranges swapped"]


@pytest.mark.parametrize("kind", KINDS)
def test_altered_file_never_verifies_and_harms_no_query(two_segments, tmp_path, kind):
    random = np.random.default_rng(KINDS.index(kind))
    path = tmp_path / "altered.trie"
    opened = 0
    for _ in range(100):
        data = altered(two_segments, kind, random)
        if data == two_segments:
            continue
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        try:
            trie = Trie(path)
        except TrieFormatError:
            continue
        opened += 1
        with contextlib.suppress(TrieFormatError):
            ask_everything(trie)
        with pytest.raises(TrieFormatError):
            trie.verify()
    assert opened


def test_file_cut_or_lengthened_is_refused_with_both_sizes(trie):
    data = trie.path.read_bytes()
    for other, why in ((data[:-1], "cut short"), (data + b"\0", "appended")):
        trie.path.write_bytes(other)
        with pytest.raises(TrieFormatError, match=f"header states {len(data)} bytes, file has {len(other)}.*{why}"):
            Trie(trie.path)
    for size in range(len(data)):
        trie.path.write_bytes(data[:size])
        with pytest.raises(TrieFormatError):
            Trie(trie.path)


def test_flipped_byte_in_preamble_or_header_is_found_on_opening(trie):
    data = trie.path.read_bytes()
    end = trie.header.segments[-1].sections[-1].end
    for place in (*range(32), *range(end, len(data))):
        trie.path.unlink()  # the old file may be mapped
        trie.path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        with pytest.raises(TrieFormatError):
            Trie(trie.path)
