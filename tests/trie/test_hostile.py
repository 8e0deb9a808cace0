"""Files whose checksums fit but whose arrays lie: verify finds it, nothing follows them outside, no edit passes them on."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.errors import LookaheadError, TrieFormatError
from lookahead.trie import build
from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_tries
from lookahead.trie.prune import prune_trie
from tests.support.processes import Program
from tests.support.tries import ARRAYS, append_ids, arrays_of, ask_everything, build_ids, rewrite_arrays, verifies

DOCUMENTS = [[1, 2, 3, 4, 1, 2, 3, 5], [7], [1, 2, 3, 4, 6]]


@pytest.fixture
def trie(make_trie):
    return make_trie(DOCUMENTS, sources=["a", "b", "a"])


def changed(array, place, value):
    copy = np.array(array)
    copy[place] = value
    return copy


def arrays_with(name, place, value):
    """Of a segment: the array of this name with one place altered."""
    return lambda segment: {name: changed(getattr(segment, name), place, value)}


CONTRADICTIONS = {
    "token": (arrays_with("tokens", 0, 11), "outside the vocabulary"),
    "separator-inside": (arrays_with("tokens", 0, 10), "document ends"),
    "last-separator-gone": (arrays_with("tokens", -1, 1), "document ends"),
    "ends": (arrays_with("document_ends", 0, 3), "document ends"),
    "ends-swapped": (arrays_with("document_ends", [0, 1], [10, 8]), "document ends"),
    "source": (arrays_with("document_sources", 0, 2), "not listed"),
    "source-largest": (arrays_with("document_sources", 2, 65535), "not listed"),
    "source-sums": (arrays_with("document_sources", 0, 1), "do not add up"),
    "suffix-outside": (arrays_with("suffixes", 0, 17), "points outside"),
    "suffix-twice": (lambda s: {"suffixes": changed(s.suffixes, 0, s.suffixes[1])}, "not sorted"),
    "suffix-at-a-separator": (arrays_with("suffixes", -1, 16), "first-token table"),
    "first-table": (arrays_with("first", 2, 0), "first-token table"),
    "first-table-from-above-zero": (arrays_with("first", 0, 1), "first-token table"),
    "sampled-keys": (arrays_with("samples", 0, 1), "sampled keys"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
@pytest.mark.parametrize("segments", [1, 2])
def test_arrays_that_contradict_each_other_are_found_by_verify_though_checksums_fit(trie, tmp_path, kind, segments):
    change, message = CONTRADICTIONS[kind]
    if segments == 2:
        trie = append_ids(trie.path, [[1, 2, 3]])
    altered = rewrite_arrays(trie, tmp_path / "altered.trie", change(trie.segments[0]))
    with pytest.raises(TrieFormatError, match=message):
        altered.verify()


# ---- queries
@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A trie of two segments where one token begins more suffixes than one sample bounds."""
    path = tmp_path_factory.mktemp("crowded") / "x.trie"
    build_ids(path, [[1, 2] * 300, [1] * 400, [2, 1, 3]])
    return append_ids(path, [[1, 2, 3]], source="b")


@given(st.sets(st.sampled_from(ARRAYS), min_size=1), st.integers(0, 1 << 32))
def test_random_arrays_are_refused_or_answered_from_inside_the_file(crowded, tmp_path_factory, names, seed):
    random = np.random.default_rng(seed)
    arrays = arrays_of(crowded.segments[0])
    for name in names:
        array = arrays[name]
        if name not in ("tokens", "document_sources"):
            array = array.astype("<u8")
        picked = random.random(len(array)) < random.choice([0.01, 0.3, 1.0])
        most = (12, 1100, np.iinfo(array.dtype).max)[random.integers(3)]
        arrays[name] = np.where(
            picked, random.integers(0, most, len(array), np.uint64, endpoint=True).astype(array.dtype), array
        )
    hostile = rewrite_arrays(crowded, tmp_path_factory.getbasetemp() / "random.trie", arrays)
    with contextlib.suppress(TrieFormatError):
        ask_everything(hostile)
    same = all(np.array_equal(arrays[name], getattr(crowded.segments[0], name)) for name in ARRAYS)
    assert verifies(hostile) == same
    for edit in (merged_alone, pruned):
        try:
            edited = edit(hostile.path)
        except LookaheadError:
            continue
        edited.verify()


# ---- edits
def merged_alone(path):
    merge_tries([path], path.with_name("out.trie"))
    return Trie(path.with_name("out.trie"))


def merged_with_itself(path):
    merge_tries([path, path], path.with_name("out.trie"))
    return Trie(path.with_name("out.trie"))


def joined_by_an_append(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "MAX_SEGMENTS", 1)
        return append_ids(path, [[1, 2, 3]])


def appended(path):
    return append_ids(path, [[1, 2, 3]])


def pruned(path):
    prune_trie(path, path.with_name("out.trie"), min_count=2)
    return Trie(path.with_name("out.trie"))


EDITS = [merged_alone, merged_with_itself, joined_by_an_append, appended, pruned]
COUNTED_ANEW = {"first-table", "first-table-from-above-zero", "sampled-keys", "source-sums"}  # by a merge


@pytest.mark.parametrize("kind", [kind for kind in CONTRADICTIONS if kind != "token"])  # see the next test
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("edit", EDITS)
def test_arrays_that_contradict_each_other_are_refused_or_made_anew(trie, edit, segments, kind):
    change, _ = CONTRADICTIONS[kind]
    if segments == 2:
        trie = append_ids(trie.path, [[1, 2, 3]])
    altered = rewrite_arrays(trie, trie.path.with_name("altered.trie"), change(trie.segments[0]))
    before = altered.path.read_bytes()
    try:
        edited = edit(altered.path)
    except TrieFormatError as error:
        said = str(error)
        assert edit not in (merged_alone, merged_with_itself) or kind not in COUNTED_ANEW
        assert said.startswith(f"{altered.path}: ")
        assert "\n" not in said
        assert altered.path.read_bytes() == before
        assert sorted(p.name for p in trie.path.parent.iterdir()) == ["altered.trie", trie.path.name]
    else:
        assert edit in (merged_alone, merged_with_itself, pruned)
        assert kind in COUNTED_ANEW
        ask_everything(edited)
        edited.verify()


def test_refusal_names_file_section_and_byte(trie):
    section = trie.segments[0].section("suffixes")
    altered = rewrite_arrays(trie, trie.path.with_name("altered.trie"), CONTRADICTIONS["suffix-twice"][0](trie.segments[0]))
    for edit in EDITS:
        with pytest.raises(TrieFormatError) as refused:
            edit(altered.path)
        assert str(refused.value) == (
            f"{altered.path}: section suffixes at byte {section.offset}: suffixes are not sorted. Rebuild."
        )


EDITED_ELSEWHERE = """
import pathlib, sys
from lookahead.errors import TrieFormatError
from tests.trie import test_hostile
for edit in test_hostile.EDITS:
    try:
        edit(pathlib.Path(sys.argv[1]))
    except TrieFormatError as error:
        print(error)
"""


def test_token_outside_the_vocabulary_is_refused_before_it_is_counted(trie):
    """In a process of its own, which a count written behind the end of the table may end."""
    tokens = changed(trie.segments[0].tokens, 9, 65535)  # the one that sorts last: nothing else contradicts it
    altered = rewrite_arrays(trie, trie.path.with_name("altered.trie"), {"tokens": tokens})
    with Program(EDITED_ELSEWHERE, altered.path) as other:
        out, err = other.communicate()
    assert other.returncode == 0, err
    assert out.count(str(altered.path)) == len(EDITS)


@pytest.mark.parametrize("flip", [0x01, 0x80])
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("edit", EDITS)
def test_damaged_section_gets_no_fresh_checksum_but_is_refused_or_made_anew(trie, edit, name, flip):
    data = bytearray(trie.path.read_bytes())
    damaged = trie.path.with_name("damaged.trie")
    data[trie.segments[0].section(name).offset] ^= flip
    damaged.write_bytes(data)
    try:
        edited = edit(damaged)
    except TrieFormatError as error:
        said = str(error)
        assert edit not in (appended, joined_by_an_append) or f"section {name} is damaged" in said
        assert damaged.read_bytes() == data
        assert name not in ("first", "samples") or edit not in (merged_alone, merged_with_itself)
    else:
        assert name in ("first", "samples")
        edited.verify()
