"""Pruning: the result answers as a build over the documents that it holds."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.errors import LookaheadError, UsageError
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie.build import append_trie, build_trie
from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_tries
from lookahead.trie.prune import BRANCH_DEPTH, UNIT, prune_trie
from lookahead.trie.segment import BuildResources
from lookahead.trie.suffixes import DEPTH

VOCAB_SIZE = 6
documents_of_sources = st.lists(
    st.builds(TokenDocument, st.lists(st.integers(0, 3), min_size=1, max_size=10), st.sampled_from(["a", "b", "c"])),
    min_size=1,
    max_size=8,
)


def build(folder, name, documents, vocab_size=VOCAB_SIZE, **options):
    path = Path(folder) / name
    build_trie(documents, path, TokenizerIdentity(vocab_size, "f" * 16, "tiny"), **options)
    return Trie(path)


def prune(whole, name="pruned.trie", **options):
    prune_trie(whole.path, whole.path.with_name(name), **options)
    trie = Trie(whole.path.with_name(name))
    trie.verify()
    return trie


def assert_same_content(one, other):
    """The same arrays; sources may be numbered in another order, but each document has the same one."""
    for name in ("tokens", "suffixes", "first", "document_ends"):
        left, right = getattr(one.segments[0], name), getattr(other.segments[0], name)
        assert left.dtype == right.dtype
        assert left.tolist() == right.tolist()
    assert sources_of_documents(one) == sources_of_documents(other)
    assert (one.header.tokens, one.header.documents) == (other.header.tokens, other.header.documents)


def sources_of_documents(trie):
    return [trie.header.sources[number] for number in trie.segments[0].document_sources]


def kept_documents(pruned, original):
    """The documents of `original` that are left in `pruned`, by their order; fails if any other is there."""
    sources = [s.name for s in original.header.sources]
    rest = list(zip(original.documents(), original.segments[0].document_sources.tolist(), strict=True))
    names = [s.name for s in pruned.header.sources]
    kept = []
    for ids, source in zip(pruned.documents(), pruned.segments[0].document_sources.tolist(), strict=True):
        while rest:
            candidate, of = rest.pop(0)
            if candidate.tolist() == ids.tolist() and sources[of] == names[source]:
                kept.append(TokenDocument(candidate.tolist(), sources[of]))
                break
        else:
            pytest.fail(f"{ids.tolist()} of {names[source]} is not in the original, or not in this order")
    return kept


def test_weights_survive_a_second_merge_and_a_prune(tmp_path):
    one = build(tmp_path, "one.trie", [TokenDocument([1, 2], "a")])
    two = build(tmp_path, "two.trie", [TokenDocument([1, 3], "a")])
    merge_tries([one.path, two.path], tmp_path / "merged.trie", {"one": 2.0})
    merge_tries([tmp_path / "merged.trie", two.path], tmp_path / "again.trie")
    again = Trie(tmp_path / "again.trie")
    assert [s.weight for s in sources_of_documents(again)] == [2.0, 1.0, 1.0]
    for trie in (again, prune(again, max_tokens=6)):
        assert [(s.name, s.weight, s.documents) for s in trie.header.sources] == [("a", 2.0, 1), ("a", 1.0, 2)]


# Documents of up to 200 tokens: pieces that many share, and stretches that nobody else has, longer than DEPTH tokens.
common = st.sampled_from([[1, 2, 3], [1, 2, 3, 4, 5], [3, 3, 3, 3]])
rare = st.builds(lambda start, length: list(range(start, start + length)), st.integers(10, 400), st.integers(1, 60))
mixed_documents = st.lists(
    st.lists(st.one_of(common, rare), min_size=1, max_size=4).map(lambda pieces: [t for piece in pieces for t in piece]),
    min_size=1,
    max_size=6,
)


def pruned_slowly(documents, min_count):
    """(texts that are left, their indexed positions in sorted order) by the rule that prune_trie states."""
    branch = lambda ids, at: tuple([*ids, WIDE][at : at + BRANCH_DEPTH])  # noqa: E731
    counts = Counter(branch(ids, at) for ids in documents for at in range(len(ids)))
    texts, indexed = [], []
    position = 0
    for ids in documents:
        reach, open_text = -1, False
        for at in range(len(ids)):
            if counts[branch(ids, at)] >= min_count:
                reach = at + DEPTH
                if not open_text:
                    texts.append([])
                    open_text = True
                indexed.append(position)
            if at < reach:
                texts[-1].append(ids[at])
                position += 1
            elif open_text:
                open_text = False
                position += 1  # the separator
        position += open_text
    flat = [token for text in texts for token in (*text, WIDE)]
    key = lambda place: (flat[place : flat.index(WIDE, place) + 1][:DEPTH], place)  # noqa: E731
    return texts, sorted(indexed, key=key)


WIDE = 500  # vocabulary of mixed_documents


@given(mixed_documents, st.integers(2, 4))
def test_min_count_keeps_the_branches_seen_often_enough_and_the_text_they_need(documents, min_count):
    texts, indexed = pruned_slowly(documents, min_count)
    documents = [TokenDocument(ids, "a") for ids in documents]
    identity = TokenizerIdentity(WIDE)
    with tempfile.TemporaryDirectory() as folder:
        built, whole, out = (Path(folder) / name for name in ("built.trie", "whole.trie", "pruned.trie"))
        build_trie(documents, whole, identity)
        if not texts:
            with pytest.raises(LookaheadError, match=r"pruned\.trie: nothing would be left"):
                prune_trie(whole, out, min_count=min_count)
            with pytest.raises(LookaheadError, match=r"built\.trie: nothing would be left"):
                build_trie(documents, built, identity, min_count=min_count)
            assert list(Path(folder).iterdir()) == [whole]
            return
        prune_trie(whole, out, min_count=min_count)
        build_trie(documents, built, identity, min_count=min_count)
        for trie in (Trie(out), Trie(built)):
            trie.verify()
            assert [d.tolist() for d in trie.documents()] == texts
            assert trie.segments[0].suffixes.tolist() == indexed
            assert trie.header.options["min_count"] == min_count


def test_long_documents_are_kept_piecewise(tmp_path):
    """3 units: the middle one shares nothing, so it goes; suffixes that looked into it are no longer indexed."""
    repeated, other, alone = [1, 2, 3, 4] * (UNIT // 4), [4, 3, 2, 1] * (UNIT // 4), list(range(5, 5 + UNIT))
    whole = build(tmp_path, "x.trie", [TokenDocument([*repeated, *alone, *other], "a")], 2 * UNIT)
    pruned = prune(whole, max_tokens=2 * UNIT)
    assert [d.tolist() for d in pruned.documents()] == [repeated, other]
    starts = set(range(2 * UNIT + 1)) - {UNIT} - set(range(UNIT - DEPTH + 1, UNIT))
    assert set(pruned.segments[0].suffixes.tolist()) == starts
    assert pruned.match(np.array([4, 5], np.int32)).count == 0


@given(documents_of_sources, st.integers(0, 40))
def test_max_tokens_leaves_whole_documents_within_the_limit(documents, max_tokens):
    with tempfile.TemporaryDirectory() as folder:
        whole = build(folder, "whole.trie", documents)
        try:
            pruned = prune(whole, max_tokens=max_tokens)
        except LookaheadError:
            assert max_tokens < max(len(d.token_ids) for d in documents)
            return
        assert pruned.header.tokens <= max_tokens
        assert_same_content(pruned, build(folder, "rest.trie", kept_documents(pruned, whole)))
        if whole.header.tokens <= max_tokens:
            assert_same_content(pruned, whole)


def test_first_copy_of_a_repeated_text_stays_longest_and_further_copies_go_with_what_is_alone(tmp_path):
    shared, other, alone = [1, 2, 3, 4], [4, 3, 2, 2], [5, 0, 5, 5]
    whole = [shared, alone, shared, other, shared, other]
    pruned = prune(build(tmp_path, "whole.trie", [TokenDocument(ids, "a") for ids in whole]), max_tokens=8)
    assert [d.tolist() for d in pruned.documents()] == [shared, other]


def test_pruned_bytes_are_the_same_whatever_the_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    whole = build(tmp_path, "whole.trie", SHAPES["text repeated and not"])
    one, three = (
        prune(whole, f"{workers}.trie", max_tokens=700, min_count=2, resources=BuildResources(workers=workers))
        for workers in (1, 3)
    )
    assert one.path.read_bytes() == three.path.read_bytes()


SHAPES = {
    "many one-token documents": [TokenDocument([i % 6], "a") for i in range(300)],
    "one long and many short": [TokenDocument([1, 2, 3] * 200, "a"), *(TokenDocument([i % 6, 5], "b") for i in range(99))],
    "text repeated and not": [TokenDocument(np.random.default_rng(i % 9).integers(0, 6, 20).tolist(), "a") for i in range(60)],
}


@pytest.mark.parametrize("min_count", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_file_pruned_by_bytes_is_no_larger_than_asked(tmp_path, shape, min_count):
    whole = build(tmp_path, "whole.trie", SHAPES[shape])
    size = whole.path.stat().st_size
    for max_bytes in (size - 1, size * 9 // 10, size * 3 // 4, size // 2):
        pruned = prune(whole, min_count=min_count, max_bytes=max_bytes)
        assert max_bytes * 0.2 < pruned.path.stat().st_size <= max_bytes
        kept_documents(pruned, whole)


def test_limits_of_tokens_and_bytes_hold_together(tmp_path):
    whole = build(tmp_path, "whole.trie", SHAPES["text repeated and not"])
    size = whole.path.stat().st_size
    assert prune(whole, max_tokens=200, max_bytes=size - 1).header.tokens == 200
    assert prune(whole, max_tokens=1199, max_bytes=size // 2).path.stat().st_size <= size // 2


def test_dropping_an_unknown_source_is_refused_with_the_known_ones(tmp_path):
    whole = build(tmp_path, "whole.trie", [TokenDocument([1], "a"), TokenDocument([1], "b")])
    with pytest.raises(UsageError, match=r"--drop-source x: no such source in .*whole.trie \(sources: a, b\)"):
        prune_trie(whole.path, tmp_path / "pruned.trie", drop_sources=["a", "x"])


@pytest.mark.parametrize("limit", [{"max_tokens": 0}, {"max_bytes": 100}, {"min_count": 50}, {"drop_sources": ["a"]}])
def test_limits_that_would_leave_nothing_are_refused_and_nothing_is_written(tmp_path, limit):
    whole = build(tmp_path, "whole.trie", [TokenDocument([1, 2], "a")])
    with pytest.raises(LookaheadError, match="nothing would be left"):
        prune_trie(whole.path, tmp_path / "pruned.trie", **limit)
    assert not (tmp_path / "pruned.trie").exists()


@given(documents_of_sources, st.data())
def test_trie_without_a_source_or_a_document_is_the_one_built_without_it_byte_for_byte(documents, data):
    dropped = data.draw(st.lists(st.sampled_from(documents), min_size=1, max_size=2))
    if data.draw(st.booleans()):
        drop = {"drop_sources": [d.source for d in dropped]}
        rest = [d for d in documents if d.source not in drop["drop_sources"]]
    else:
        drop, gone = {"drop_documents": dropped}, [list(d.token_ids) for d in dropped]
        rest = [d for d in documents if list(d.token_ids) not in gone]
    appended = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "0")
        whole = build(folder, "whole.trie", documents)
        if appended:
            append_trie(rest or documents, whole.path, TokenizerIdentity(VOCAB_SIZE, "f" * 16, "tiny"))
        out = Path(folder) / "pruned.trie"
        if not rest:
            with pytest.raises(LookaheadError, match="nothing would be left"):
                prune_trie(whole.path, out, **drop)
            return
        prune_trie(whole.path, out, **drop)
        expected = build(folder, "rest.trie", rest * 2 if appended else rest)
        assert out.read_bytes() == expected.path.read_bytes()


def test_document_that_is_not_in_the_trie_is_named_and_alone_refused(tmp_path):
    whole = build(tmp_path, "whole.trie", [TokenDocument([1, 2], "a"), TokenDocument([3], "a")])
    here, absent = TokenDocument([3], "x"), TokenDocument([1, 2, 3], "x")
    notices = []
    prune_trie(
        whole.path, tmp_path / "out.trie", drop_documents=[here, absent], resources=BuildResources(notice=notices.append)
    )
    assert [d.tolist() for d in Trie(tmp_path / "out.trie").documents()] == [[1, 2]]
    assert len(notices) == 1
    assert "1 of the 2 documents to be dropped are not in this trie; the first of them is document 2" in notices[0]
    with pytest.raises(LookaheadError, match=r"1 of the 1 documents to be dropped are not in .*--documents"):
        prune_trie(whole.path, tmp_path / "none.trie", drop_documents=absent)
    assert not (tmp_path / "none.trie").exists()
