"""The trie file: what is written comes back, the same documents are the same bytes, and whose ids they are is checked."""

import functools

import numpy as np
import pytest
from hypothesis import given

from lookahead.errors import CorpusError, LookaheadError, TokenizerMismatchError, TrieFormatError
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie import format
from lookahead.trie.build import build_trie
from lookahead.trie.file import Trie
from lookahead.trie.segment import BuildResources
from tests.support.tries import (
    ARRAYS,
    append_ids,
    assert_answers,
    build_ids,
    corpora,
    rewrite_arrays,
    rewrite_header,
    tiny_runs,
)

DOCUMENTS = [[1, 2, 3, 4, 1, 2, 3, 5], [7], [1, 2, 3, 4, 6]]


@pytest.fixture
def trie(make_trie):
    return make_trie(DOCUMENTS, sources=["a", "b", "a"])


def test_documents_and_header_come_back_as_written(trie):
    assert [d.tolist() for d in trie.documents()] == DOCUMENTS
    header = trie.header
    assert (header.vocab_size, header.tokens, header.documents, header.depth, header.branches) == (10, 14, 3, 32, 14)
    assert (header.tokenizer_fingerprint, header.tokenizer_name) == ("0123456789abcdef", "tiny")
    assert [(s.name, s.documents, s.tokens, s.weight) for s in header.sources] == [("a", 2, 13, 1.0), ("b", 1, 1, 1.0)]
    assert [(s.documents, s.tokens) for s in header.segments] == [(3, 14)]
    assert trie.segments[0].document_sources.tolist() == [0, 1, 0]
    assert trie.name == "corpus"
    trie.verify()
    options = {"note": [1, "x"]}
    header = build_trie([TokenDocument([1], "a")], trie.path, TokenizerIdentity(10), options=options)
    assert header == Trie(trie.path).header
    assert header.options == {"min_count": 1, **options}


@pytest.mark.parametrize("context", [[], [9], [1, 9], [-1], [10], [1 << 30]])
def test_context_whose_last_token_is_unknown_matches_at_the_root(trie, context):
    match = trie.longest_match(np.array(context, np.int32))
    assert match == trie.root()
    assert (match.length, match.count) == (0, 14)
    assert trie.children(match, most=2) == [(1, trie.match(np.array([1], np.int32))), (2, trie.match(np.array([2], np.int32)))]


def test_corpus_without_tokens_is_refused_and_nothing_is_written(tmp_path):
    for documents in ([], [[], []]):
        with pytest.raises(CorpusError, match="no document with text"):
            build_ids(tmp_path / "x.trie", documents)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, *(functools.partial(np.array, dtype=dtype) for dtype in ("u2", "u8", ">i4"))]
)
def test_ids_may_come_as_any_sequence_of_whole_numbers(tmp_path, kind):
    build_trie([TokenDocument(kind([1, 2]), "a"), TokenDocument([3], "a")], tmp_path / "x.trie", TokenizerIdentity(10))
    assert [d.tolist() for d in Trie(tmp_path / "x.trie").documents()] == [[1, 2], [3]]


@pytest.mark.parametrize("token", [-1, 10, 11, 1 << 40, 1 << 63, 1 << 70])
def test_token_outside_the_vocabulary_is_refused_by_the_build(tmp_path, token):
    with pytest.raises(CorpusError, match=f"token id {token} is outside the vocabulary of 10"):
        build_ids(tmp_path / "x.trie", [[1, 2], [1, token, 2], [3]])
    assert list(tmp_path.iterdir()) == []


# ---- bytes
def test_time_of_a_file_may_be_given(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert build_ids(tmp_path / "x.trie", DOCUMENTS).header.created == 1_700_000_000


@pytest.mark.parametrize("time", ["noon", "nan", "-5"])
def test_given_time_that_is_none_is_refused_and_nothing_is_written(tmp_path, monkeypatch, time):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", time)
    with pytest.raises(LookaheadError, match="SOURCE_DATE_EPOCH"):
        build_ids(tmp_path / "x.trie", DOCUMENTS)
    assert list(tmp_path.iterdir()) == []


@given(corpora())
def test_bytes_do_not_depend_on_memory_or_workers(tmp_path_factory, corpus):
    documents, vocab_size = corpus
    folder = tmp_path_factory.mktemp("builds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "0")
        expected = build_ids(folder / "whole.trie", documents, vocab_size).path.read_bytes()
        for in_a_run, workers in ((1, 1), (1, 3), (2, 2), (1000, 3)):
            with tiny_runs(in_a_run):
                build_ids(folder / "runs.trie", documents, vocab_size, resources=BuildResources(workers=workers))
            assert (folder / "runs.trie").read_bytes() == expected
    assert sorted(path.name for path in folder.iterdir()) == ["runs.trie", "whole.trie"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65535, "<u2"), (65536, "<u4")])
def test_tokens_take_two_bytes_up_to_65535_ids_and_four_above(make_trie, vocab_size, dtype):
    trie = make_trie([[0, vocab_size - 1]], vocab_size)
    assert {name: getattr(trie.segments[0], name).dtype.str for name in ARRAYS} == {
        "tokens": dtype,
        "suffixes": "<u4",
        "first": "<u4",
        "samples": "<u8",
        "document_ends": "<u4",
        "document_sources": "<u2",
    }
    assert trie.documents()[0].tolist() == [0, vocab_size - 1]
    trie.verify()


def test_more_sources_than_sixteen_bits_count_are_refused(tmp_path):
    with pytest.raises(TrieFormatError, match="document_sources: 65536 does not fit"):
        format.smallest_dtype("document_sources", 65536)
    documents = (TokenDocument([1], str(number)) for number in range(65537))
    with pytest.raises(CorpusError, match="more than 65536 sources"):
        build_trie(documents, tmp_path / "x.trie", TokenizerIdentity(10))


# ---- writing
def test_failed_write_leaves_the_old_file_as_it_was(make_trie):
    resource = pytest.importorskip("resource")
    trie = make_trie(DOCUMENTS)
    before = trie.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))  # as if the disk were full after 200 bytes
    try:
        with pytest.raises(LookaheadError, match=r"write failed .*\. The old file is unchanged"):
            make_trie([[1, 2, 3]])
        with tiny_runs(), pytest.raises(LookaheadError, match=r"write failed|cannot be kept here"):
            make_trie([[1, 2, 3] * 50, [1, 2]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert trie.path.read_bytes() == before
    assert list(trie.path.parent.iterdir()) == [trie.path]


def test_progress_of_a_build_tells_each_stage_up_to_its_end(tmp_path):
    seen = {}
    with tiny_runs():
        build_ids(
            tmp_path / "x.trie", DOCUMENTS, resources=BuildResources(progress=lambda stage, *rest: seen.update({stage: rest}))
        )
    assert seen == {"reading": (14, None), "sorting": (5, 5), "writing": (14, 14)}


# ---- whose token ids
def test_trie_of_the_same_tokenizer_or_of_bare_ids_is_accepted_and_others_are_refused_with_what_differs(trie, tmp_path):
    trie.check_tokenizer("0123456789abcdef", 10, "same")
    trie.check_tokenizer("0123456789abcdef", 12, "same, vocabulary padded")
    trie.check_tokenizer("", 10, "model without tokenizer")
    with pytest.raises(TokenizerMismatchError, match=r"tokenizer 01234567 \(vocab 10\); other uses fedcba98 \(vocab 10\)"):
        trie.check_tokenizer("fedcba9876543210", 10, "other")
    with pytest.raises(TokenizerMismatchError, match="vocabulary of 10 tokens; model has 9"):
        trie.check_tokenizer("", 9, "model")
    build_trie([TokenDocument([1], "a")], tmp_path / "ids.trie", TokenizerIdentity(10))
    Trie(tmp_path / "ids.trie").check_tokenizer("fedcba9876543210", 10, "any")


# ---- the table of first tokens
@pytest.mark.parametrize(("vocab_size", "stored"), [(8, True), (9, False), (70_000, False), (format.MAX_COUNTED + 1, True)])
def test_table_of_first_tokens_is_stored_where_it_is_shorter_than_the_suffixes(tmp_path, vocab_size, stored):
    documents = [[1, 2, 1, 2, 7], [2, 7, 0, 1]]
    trie = build_ids(tmp_path / "x.trie", documents, vocab_size)
    assert bool(trie.segments[0].section("first").entries) is stored
    assert trie.header.version == (2 if stored else 3)
    assert stored or trie.path.stat().st_size < 2048
    assert len(trie.segments[0].first) == vocab_size + 1
    assert_answers(trie, documents, [[1, 2], [7]])
    assert_answers(append_ids(trie.path, [[7, 7]], vocab_size), [*documents, [7, 7]], [[7]])


def test_file_of_version_2_with_a_table_longer_than_its_suffixes_is_read(make_trie, tmp_path):
    trie = make_trie([[1, 2]], vocab_size=100)
    old = rewrite_arrays(trie, tmp_path / "old.trie", {"first": trie.segments[0].first})
    assert (old.header.version, old.segments[0].section("first").entries) == (2, 101)
    assert_answers(old, [[1, 2]], [[1]])


def test_table_that_is_not_stored_of_an_enormous_vocabulary_is_refused(make_trie):
    trie = make_trie([[1, 2]], vocab_size=100)
    rewrite_header(trie.path, lambda fields: fields.update(vocab_size=1 << 31))
    with pytest.raises(TrieFormatError, match="section first has 0 entries, not 2147483649"):
        Trie(trie.path)


def test_positions_outside_the_tokens_do_no_harm_where_the_table_is_counted(make_trie, tmp_path):
    trie = make_trie([[1, 2]], vocab_size=100)
    damaged = rewrite_arrays(trie, tmp_path / "x.trie", {"suffixes": np.array([4_000_000_000, 2], np.uint32)})
    assert damaged.longest_match(np.array([1, 2], np.int32)).count <= 2
    with pytest.raises(TrieFormatError, match="a suffix points outside the tokens"):
        damaged.verify()
