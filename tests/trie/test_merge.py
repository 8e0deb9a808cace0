"""Merging: one file of one segment, weights by source, and nothing of what is damaged or of other tokenizers."""

from pathlib import Path

import numpy as np
import pytest

from lookahead.errors import TokenizerMismatchError, UsageError
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie.build import build_trie
from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_tries
from lookahead.trie.segment import BuildResources
from tests.support.tries import tiny_runs

IDENTITY = TokenizerIdentity(6, "f" * 16, "tiny")


def build(folder, name, documents):
    build_trie(documents, Path(folder) / name, IDENTITY)
    return Trie(Path(folder) / name)


def merge(folder, *tries, name="merged.trie", **options):
    merge_tries([trie.path for trie in tries], Path(folder) / name, **options)
    return Trie(Path(folder) / name)


def ids(*documents, source="a"):
    return [TokenDocument(document, source) for document in documents]


def test_merged_counts_are_the_sums(tmp_path):
    one = build(tmp_path, "one.trie", [*ids([1, 2, 3]), *ids([1, 2], source="b")])
    merged = merge(tmp_path, one, build(tmp_path, "two.trie", ids([1, 2, 4])))
    match = merged.match(np.array([1, 2], np.int32))
    assert match.count == 3
    assert [(token, child.count) for token, child in merged.children(match)] == [(3, 1), (4, 1)]
    assert [(s.name, s.documents, s.tokens) for s in merged.header.sources] == [("a", 2, 6), ("b", 1, 2)]
    assert merged.header.options == {"merged": ["one.trie", "two.trie"]}


def test_same_merge_gives_the_same_bytes_whatever_the_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    tries = [build(tmp_path, f"{n}.trie", ids([n, 1, 2], [1, 2, n] * 9)) for n in range(4)]
    expected = merge(tmp_path, *tries).path.read_bytes()
    with tiny_runs():
        assert merge(tmp_path, *tries, resources=BuildResources(workers=3)).path.read_bytes() == expected


@pytest.mark.parametrize("name", ["one.trie", "one", "a", "path"])
def test_weight_may_name_a_source_or_a_trie_file(tmp_path, name):
    one, two = build(tmp_path, "one.trie", ids([1, 2])), build(tmp_path, "two.trie", ids([1, 3], source="b"))
    merged = merge(tmp_path, one, two, weights={str(one.path) if name == "path" else name: 2.5})
    assert [(s.name, s.weight) for s in merged.header.sources] == [("a", 2.5), ("b", 1.0)]
    assert merged.weighted


def test_weight_that_names_nothing_is_refused_with_the_known_sources(tmp_path):
    one = build(tmp_path, "one.trie", [*ids([1]), *ids([1], source="b")])
    with pytest.raises(UsageError, match=r"--weight x: no such trie or source \(sources: a, b\)"):
        merge(tmp_path, one, weights={"x": 2.0})
    assert list(tmp_path.iterdir()) == [one.path]


@pytest.mark.parametrize("other", [TokenizerIdentity(6, "0" * 16), TokenizerIdentity(7, "f" * 16)])
def test_tries_of_different_tokenizers_are_not_merged(tmp_path, other):
    one = build(tmp_path, "one.trie", ids([1]))
    build_trie(ids([1]), tmp_path / "two.trie", other)
    with pytest.raises(TokenizerMismatchError, match=rf"two.trie: .* \(vocab {other.vocab_size}\) differs from .*one.trie"):
        merge_tries([one.path, tmp_path / "two.trie"], tmp_path / "merged.trie")
    assert not (tmp_path / "merged.trie").exists()
