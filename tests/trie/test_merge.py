"""Merging: one file of one segment, weights by source, and nothing of what is damaged or of other tokenizers."""

import numpy as np
import pytest

from lookahead.errors import TokenizerMismatchError, UsageError
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie.build import build_trie
from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_tries


@pytest.fixture
def merge(tmp_path):
    def merge(*tries, **options):
        merge_tries([trie.path for trie in tries], tmp_path / "merged.trie", **options)
        return Trie(tmp_path / "merged.trie")

    return merge


def test_merged_counts_are_the_sums(make_trie, merge):
    one = make_trie([[1, 2, 3], [1, 2]], name="one.trie", sources=["a", "b"])
    merged = merge(one, make_trie([[1, 2, 4]], name="two.trie"))
    match = merged.match(np.array([1, 2], np.int32))
    assert match.count == 3
    assert [(token, child.count) for token, child in merged.children(match)] == [(3, 1), (4, 1)]
    assert [(s.name, s.documents, s.tokens) for s in merged.header.sources] == [("a", 2, 6), ("b", 1, 2)]
    assert merged.header.options == {"merged": ["one.trie", "two.trie"]}


@pytest.mark.parametrize("name", ["one.trie", "one", "a", "path"])
def test_weight_may_name_a_source_or_a_trie_file(make_trie, merge, name):
    one, two = make_trie([[1, 2]], name="one.trie"), make_trie([[1, 3]], name="two.trie", sources="b")
    merged = merge(one, two, weights={str(one.path) if name == "path" else name: 2.5})
    assert [(s.name, s.weight) for s in merged.header.sources] == [("a", 2.5), ("b", 1.0)]
    assert merged.weighted


def test_weight_that_names_nothing_is_refused_with_the_known_sources(make_trie, merge, tmp_path):
    one = make_trie([[1], [1]], sources=["a", "b"])
    with pytest.raises(UsageError, match=r"--weight x: no such trie or source \(sources: a, b\)"):
        merge(one, weights={"x": 2.0})
    assert list(tmp_path.iterdir()) == [one.path]


@pytest.mark.parametrize("other", [TokenizerIdentity(10, "0" * 16), TokenizerIdentity(7, "0123456789abcdef")])
def test_tries_of_different_tokenizers_are_not_merged(make_trie, tmp_path, other):
    one = make_trie([[1]], name="one.trie")
    build_trie([TokenDocument([1], "a")], tmp_path / "two.trie", other)
    with pytest.raises(TokenizerMismatchError, match=rf"two.trie: .* \(vocab {other.vocab_size}\) differs from .*one.trie"):
        merge_tries([one.path, tmp_path / "two.trie"], tmp_path / "merged.trie")
    assert not (tmp_path / "merged.trie").exists()
