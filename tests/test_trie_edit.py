"""Merging and pruning: the result answers as a build over the documents that it holds."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.errors import LookaheadError, TokenizerMismatchError, TrieFormatError, UsageError
from lookahead.trie.build import TokenDocument, TokenizerIdentity, build_trie
from lookahead.trie.edit import BRANCH_DEPTH, merge_tries, prune_trie
from lookahead.trie.file import Trie

VOCAB_SIZE = 6
documents_of_sources = st.lists(
    st.builds(TokenDocument, st.lists(st.integers(0, 3), min_size=1, max_size=10), st.sampled_from(["a", "b", "c"])),
    min_size=1,
    max_size=8,
)


def build(folder, name, documents, **options):
    path = Path(folder) / name
    build_trie(documents, path, TokenizerIdentity(VOCAB_SIZE, "f" * 16, "tiny"), **options)
    return Trie(path)


def assert_same_content(one, other):
    """The same arrays; sources may be numbered in another order, but each document has the same one."""
    for name in ("tokens", "suffixes", "first", "document_ends"):
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype
        assert left.tolist() == right.tolist()
    assert sources_of_documents(one) == sources_of_documents(other)
    assert (one.header.tokens, one.header.documents) == (other.header.tokens, other.header.documents)


def sources_of_documents(trie):
    return [trie.header.sources[number] for number in trie.document_sources]


def kept_documents(pruned, original):
    """The documents of `original` that are left in `pruned`, by their order; fails if any other is there."""
    sources = [s.name for s in original.header.sources]
    rest = list(zip(original.documents(), original.document_sources.tolist(), strict=True))
    names = [s.name for s in pruned.header.sources]
    kept = []
    for ids, source in zip(pruned.documents(), pruned.document_sources.tolist(), strict=True):
        while rest:
            candidate, of = rest.pop(0)
            if candidate.tolist() == ids.tolist() and sources[of] == names[source]:
                kept.append(TokenDocument(candidate.tolist(), sources[of]))
                break
        else:
            pytest.fail(f"{ids.tolist()} of {names[source]} is not in the original, or not in this order")
    return kept


@given(documents_of_sources, documents_of_sources, documents_of_sources)
@settings(max_examples=25, deadline=None)
def test_merged_tries_hold_what_a_build_over_all_corpora_holds(first, second, third):
    with tempfile.TemporaryDirectory() as folder:
        parts = [build(folder, f"{i}.trie", part) for i, part in enumerate((first, second, third))]
        merge_tries([part.path for part in parts], Path(folder) / "merged.trie")
        merged = Trie(Path(folder) / "merged.trie")
        merged.verify()
        whole = build(folder, "whole.trie", [*first, *second, *third])
        assert_same_content(merged, whole)
        assert merged.header.sources == whole.header.sources


def test_merged_counts_are_the_sums(tmp_path):
    one = build(tmp_path, "one.trie", [TokenDocument([1, 2, 3], "a"), TokenDocument([1, 2], "b")])
    two = build(tmp_path, "two.trie", [TokenDocument([1, 2, 4], "a")])
    merge_tries([one.path, two.path], tmp_path / "merged.trie")
    merged = Trie(tmp_path / "merged.trie")
    match = merged.match(np.array([1, 2], np.int32))
    assert match.count == 3
    assert [(token, child.count) for token, child in merged.children(match)] == [(3, 1), (4, 1)]
    assert [(s.name, s.documents, s.tokens) for s in merged.header.sources] == [("a", 2, 6), ("b", 1, 2)]


@pytest.mark.parametrize("name", ["one.trie", "one", "a", "path"])
def test_weight_may_name_a_source_or_a_trie_file(tmp_path, name):
    one = build(tmp_path, "one.trie", [TokenDocument([1, 2], "a")])
    two = build(tmp_path, "two.trie", [TokenDocument([1, 3], "b")])
    weights = {str(one.path) if name == "path" else name: 2.5}
    merge_tries([one.path, two.path], tmp_path / "merged.trie", weights)
    merged = Trie(tmp_path / "merged.trie")
    assert [(s.name, s.weight) for s in merged.header.sources] == [("a", 2.5), ("b", 1.0)]
    assert merged.weighted


def test_weights_survive_a_second_merge_and_a_prune(tmp_path):
    one = build(tmp_path, "one.trie", [TokenDocument([1, 2], "a")])
    two = build(tmp_path, "two.trie", [TokenDocument([1, 3], "a")])
    merge_tries([one.path, two.path], tmp_path / "merged.trie", {"one": 2.0})
    merge_tries([tmp_path / "merged.trie", two.path], tmp_path / "again.trie")
    sources = [(s.name, s.weight, s.documents) for s in Trie(tmp_path / "again.trie").header.sources]
    assert sources == [("a", 2.0, 1), ("a", 1.0, 2)]
    prune_trie(tmp_path / "again.trie", tmp_path / "pruned.trie", max_tokens=6)
    assert [(s.name, s.weight, s.documents) for s in Trie(tmp_path / "pruned.trie").header.sources] == sources


def test_weight_that_names_nothing_is_refused_with_the_known_sources(tmp_path):
    one = build(tmp_path, "one.trie", [TokenDocument([1], "a"), TokenDocument([1], "b")])
    with pytest.raises(UsageError, match=r"--weight x: no such trie or source \(sources: a, b\)"):
        merge_tries([one.path], tmp_path / "merged.trie", {"x": 2.0})
    assert not (tmp_path / "merged.trie").exists()


@pytest.mark.parametrize("other", [TokenizerIdentity(VOCAB_SIZE, "0" * 16), TokenizerIdentity(VOCAB_SIZE + 1, "f" * 16)])
def test_tries_of_different_tokenizers_are_not_merged(tmp_path, other):
    one = build(tmp_path, "one.trie", [TokenDocument([1], "a")])
    build_trie([TokenDocument([1], "a")], tmp_path / "two.trie", other)
    with pytest.raises(TokenizerMismatchError, match=rf"two.trie: .* \(vocab {other.vocab_size}\) differs from .*one.trie"):
        merge_tries([one.path, tmp_path / "two.trie"], tmp_path / "merged.trie")


@pytest.mark.parametrize(
    "edit", [lambda path, out: merge_tries([path], out), lambda path, out: prune_trie(path, out)], ids=["merge", "prune"]
)
def test_damaged_trie_gets_no_fresh_checksums(tmp_path, edit):
    one = build(tmp_path, "one.trie", [TokenDocument([1, 2, 3], "a")])
    data = bytearray(one.path.read_bytes())
    data[one.header.sections[0].offset] ^= 1
    one.path.write_bytes(data)
    with pytest.raises(TrieFormatError, match="section tokens is damaged"):
        edit(one.path, tmp_path / "out.trie")
    assert not (tmp_path / "out.trie").exists()


def branches(trie):
    """(token ids of the branch, document, offset in it) of each suffix in the file."""
    starts = [0, *(end + 1 for end in trie.document_ends.tolist()[:-1])]
    tokens = trie.tokens.tolist()
    found = []
    for position in trie.suffixes.tolist():
        document = int(np.searchsorted(trie.document_ends, position))
        end = trie.document_ends[document]
        found.append((tuple(tokens[position : end + 1][:BRANCH_DEPTH]), document, position - starts[document]))
    return found


@given(documents_of_sources, st.integers(2, 4))
@settings(max_examples=25, deadline=None)
def test_min_count_keeps_the_branches_seen_often_enough_and_no_other(documents, min_count):
    with tempfile.TemporaryDirectory() as folder:
        whole = branches(build(folder, "whole.trie", documents))
        counts = Counter(branch for branch, _, _ in whole)
        expected = [(branch, document, offset) for branch, document, offset in whole if counts[branch] >= min_count]

        built = build(folder, "built.trie", documents, min_count=min_count)
        built.verify()
        assert branches(built) == expected
        assert built.header.options["min_count"] == min_count

        out = Path(folder) / "pruned.trie"
        if not expected:
            with pytest.raises(LookaheadError, match="nothing would be left"):
                prune_trie(Path(folder) / "whole.trie", out, min_count=min_count)
            return
        prune_trie(Path(folder) / "whole.trie", out, min_count=min_count)
        pruned = Trie(out)
        pruned.verify()
        used = sorted({document for _, document, _ in expected})  # documents without a frequent branch go
        assert [d.tolist() for d in pruned.documents()] == [list(documents[d].token_ids) for d in used]
        assert branches(pruned) == [(branch, used.index(document), offset) for branch, document, offset in expected]


@given(documents_of_sources, st.integers(0, 40))
@settings(max_examples=25, deadline=None)
def test_max_tokens_leaves_whole_documents_within_the_limit(documents, max_tokens):
    with tempfile.TemporaryDirectory() as folder:
        whole = build(folder, "whole.trie", documents)
        out = Path(folder) / "pruned.trie"
        try:
            prune_trie(whole.path, out, max_tokens=max_tokens)
        except LookaheadError:
            assert max_tokens < max(len(d.token_ids) for d in documents)
            return
        pruned = Trie(out)
        pruned.verify()
        assert pruned.header.tokens <= max_tokens
        assert_same_content(pruned, build(folder, "rest.trie", kept_documents(pruned, whole)))
        if whole.header.tokens <= max_tokens:
            assert_same_content(pruned, whole)


def test_documents_whose_text_is_shared_least_go_first(tmp_path):
    shared, alone = [1, 2, 3, 4], [5, 4, 3, 5]
    trie = build(tmp_path, "whole.trie", [TokenDocument(ids, "a") for ids in (shared, alone, shared)])
    prune_trie(trie.path, tmp_path / "pruned.trie", max_tokens=8)
    assert [d.tolist() for d in Trie(tmp_path / "pruned.trie").documents()] == [shared, shared]


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
        prune_trie(whole.path, tmp_path / "pruned.trie", min_count=min_count, max_bytes=max_bytes)
        pruned = Trie(tmp_path / "pruned.trie")
        pruned.verify()
        assert max_bytes * 0.2 < pruned.path.stat().st_size <= max_bytes
        kept_documents(pruned, whole)


def test_limits_of_tokens_and_bytes_hold_together(tmp_path):
    whole = build(tmp_path, "whole.trie", SHAPES["text repeated and not"])
    size = whole.path.stat().st_size
    prune_trie(whole.path, tmp_path / "pruned.trie", max_tokens=200, max_bytes=size - 1)
    assert Trie(tmp_path / "pruned.trie").header.tokens == 200
    prune_trie(whole.path, tmp_path / "pruned.trie", max_tokens=1199, max_bytes=size // 2)
    assert (tmp_path / "pruned.trie").stat().st_size <= size // 2


def test_limits_that_are_large_enough_leave_everything(tmp_path):
    whole = build(tmp_path, "whole.trie", SHAPES["text repeated and not"])
    prune_trie(whole.path, tmp_path / "pruned.trie", max_bytes=1 << 30, max_tokens=1 << 30)
    assert_same_content(Trie(tmp_path / "pruned.trie"), whole)


@given(documents_of_sources)
@settings(max_examples=25, deadline=None)
def test_dropping_a_source_leaves_what_a_build_from_the_others_holds(documents):
    with tempfile.TemporaryDirectory() as folder:
        whole = build(folder, "whole.trie", documents)
        dropped = documents[0].source
        rest = [d for d in documents if d.source != dropped]
        out = Path(folder) / "pruned.trie"
        if not rest:
            with pytest.raises(LookaheadError, match="nothing would be left"):
                prune_trie(whole.path, out, drop_sources=[dropped])
            return
        prune_trie(whole.path, out, drop_sources=[dropped])
        pruned = Trie(out)
        pruned.verify()
        assert_same_content(pruned, build(folder, "rest.trie", rest))


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


def test_trie_may_be_pruned_onto_itself(tmp_path):
    whole = build(tmp_path, "whole.trie", [TokenDocument([1, 2], "a"), TokenDocument([3], "b")])
    prune_trie(whole.path, whole.path, drop_sources=["b"])
    assert [d.tolist() for d in Trie(whole.path).documents()] == [[1, 2]]
