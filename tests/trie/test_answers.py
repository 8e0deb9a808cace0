"""However a trie came to be, it answers as a scan of its documents does."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.trie import format
from lookahead.trie.build import MAX_SEGMENTS
from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_tries
from lookahead.trie.prune import prune_trie
from lookahead.trie.segment import BuildResources
from tests.support.depth import deep, some_deep
from tests.support.tries import ARRAYS, VOCAB_SIZES, append_ids, assert_answers, build_ids, texts, tiny_runs


def built_in_one_run(path, parts, vocab_size):
    return build_ids(path, [document for part in parts for document in part], vocab_size)


def built_in_many_runs(path, parts, vocab_size):
    with tiny_runs():
        return build_ids(
            path, [document for part in parts for document in part], vocab_size, resources=BuildResources(workers=2)
        )


def appended(path, parts, vocab_size):
    trie = build_ids(path, parts[0], vocab_size)
    for part in parts[1:]:
        trie = append_ids(path, part, vocab_size)
    assert len(trie.segments) <= MAX_SEGMENTS
    return trie


def appended_in_many_runs(path, parts, vocab_size):
    with tiny_runs():
        return appended(path, parts, vocab_size)


def with_wide_positions(path, parts, vocab_size):
    """As files of more than 2^32 tokens are: every position takes 8 bytes."""
    wide = dict.fromkeys(("suffixes", "first", "document_ends"), ("<u8",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format, "SECTION_DTYPES", {**format.SECTION_DTYPES, **wide})
        trie = merged_from_appended_files(path, parts, vocab_size)
        assert trie.segments[0].suffixes.dtype == np.dtype("<u8")
        trie.verify()
        prune_trie(path, path.with_name("whole.trie"), max_tokens=1 << 40)
        assert Trie(path.with_name("whole.trie")).segments[0].suffixes.tolist() == trie.segments[0].suffixes.tolist()
    return trie


def merged(path, parts, vocab_size):
    files = [build_ids(path.with_name(f"{number}.trie"), part, vocab_size) for number, part in enumerate(parts)]
    merge_tries([trie.path for trie in files], path)
    return Trie(path)


def merged_from_appended_files(path, parts, vocab_size):
    half = (len(parts) + 1) // 2
    halves = [some for some in (parts[:half], parts[half:]) if some]
    files = [appended(path.with_name(f"{number}.trie"), some, vocab_size) for number, some in enumerate(halves)]
    with tiny_runs():
        merge_tries([trie.path for trie in files], path, resources=BuildResources(workers=3))
    return Trie(path)


WAYS = [
    built_in_one_run, built_in_many_runs, appended, appended_in_many_runs, merged, merged_from_appended_files,
    with_wide_positions,
]  # fmt: skip
JOINED = {*WAYS} - {appended, appended_in_many_runs}  # one segment, whatever the parts


@st.composite
def corpora_in_parts(draw):
    """(lists of documents, contexts, vocab_size): the corpora of 1 to 11 builds or appends."""
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    token = st.sampled_from([0, 1, vocab_size - 1])
    count = draw(st.sampled_from([1, 2, 3, MAX_SEGMENTS, MAX_SEGMENTS + 1, 11]))
    document = texts(token, 40 if count < 4 else 12)
    parts = draw(st.lists(st.lists(document, min_size=1, max_size=3 if count < 4 else 2), min_size=count, max_size=count))
    contexts = draw(st.lists(st.lists(st.one_of(token, st.sampled_from([2, -1, vocab_size])), max_size=6), max_size=4))
    return parts, contexts, vocab_size


@pytest.mark.parametrize(
    "make",
    some_deep(WAYS, [appended]),
)
@given(corpora_in_parts())
def test_counts_continuations_and_longest_matches_are_those_of_a_scan(make, corpus):
    parts, contexts, vocab_size = corpus
    with tempfile.TemporaryDirectory() as folder:
        trie = make(Path(folder) / "x.trie", parts, vocab_size)
        assert_answers(trie, [document for part in parts for document in part], contexts)
        assert len(trie.segments) == 1 or make not in JOINED


@pytest.mark.parametrize("make", some_deep(WAYS, WAYS[::2]))
def test_texts_longer_than_a_window_and_alike_beyond_the_depth_are_counted(make, tmp_path):
    parts = [[[1] * 1500, [2, 1]], [[1] * 40 + [2] + [1] * 1200], *([[0, 1] * 20, [number, 1]] for number in range(8))]
    trie = make(tmp_path / "x.trie", parts, 10)
    trie.verify()
    documents = [document for part in parts for document in part]
    for length in (1, 31, 32):
        count = sum(d[i : i + length] == [1] * length for d in documents for i in range(len(d)))
        assert count > 2 * 1024  # more than a window of the merge holds
        assert trie.match(np.full(length, 1, np.int32)).count == count
    assert trie.longest_match(np.array([1] * 40, np.int32)).length == 32


@pytest.mark.parametrize("make", [merged_from_appended_files, *deep([merged])])
@given(corpora_in_parts())
def test_merge_is_the_build_over_all_corpora_array_for_array(make, corpus):
    parts, _, vocab_size = corpus
    with tempfile.TemporaryDirectory() as folder:
        merged_trie = make(Path(folder) / "x.trie", parts, vocab_size)
        built = built_in_one_run(Path(folder) / "whole.trie", parts, vocab_size)
        for name in ARRAYS:
            one, other = getattr(merged_trie.segments[0], name), getattr(built.segments[0], name)
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes(), name
        assert merged_trie.header.segments == built.header.segments
        assert merged_trie.header.sources == built.header.sources
