"""Kernels that Python runs in place of compiled ones: the same draft trees and ranges, and nothing is compiled."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from lookahead.bench import trie_report
from lookahead.bench.trie_report import draft_after
from lookahead.draft import own_text, planner
from lookahead.native.interpreted import interpreting
from lookahead.trie.file import Trie
from tests.support.tries import append_ids, build_ids


@pytest.fixture(scope="module")
def trie(tmp_path_factory):
    """Two segments of two sources that repeat each other with changes."""
    path = tmp_path_factory.mktemp("interpreted") / "x.trie"
    rng = np.random.default_rng(7)
    documents = [rng.integers(0, 9, 60).tolist() for _ in range(40)]
    build_ids(path, documents, 300)
    append_ids(path, [[*document[:30], 8, *document[30:]] for document in documents[:20]], 300, "b")
    return Trie(path)


def fields_of(drafted):
    tree = {field.name: getattr(drafted.tree, field.name).tolist() for field in dataclasses.fields(drafted.tree)}
    return tree, drafted.match, drafted.evidence, drafted.source_names


@pytest.mark.parametrize("decoding_length", [2, 16, 64])
@pytest.mark.parametrize(
    "context", [[5], [299], [1, 2, 3], [4] * 40, None], ids=["one", "unknown", "three", "repeated", "copied"]
)
def test_draft_tree_of_python_is_that_of_the_compiled_kernels(trie, monkeypatch, context, decoding_length):
    tokens = np.array(trie.segments[0].tokens[10:45] if context is None else context, np.int32)
    interpreted = draft_after(trie, tokens, decoding_length)
    monkeypatch.setattr(trie_report, "MOST_INTERPRETED", 1)
    assert fields_of(interpreted) == fields_of(draft_after(trie, tokens, decoding_length))
    assert interpreted.tree.draft_tokens > 0 or context == [299]


def test_query_compiles_no_kernel_of_drafting(tmp_path, trie):
    code = (
        "import sys, numpy as np; from lookahead.bench.trie_report import draft_after; from lookahead.trie.file import Trie\n"
        "draft_after(Trie(sys.argv[1]), np.array([1, 2, 3], np.int32), 16)"
    )
    env = {"NUMBA_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(trie.path)], check=True, env=env)
    assert not [path.name for path in tmp_path.rglob("*.kernel") if ".draft." in path.name]


def test_kernels_are_compiled_ones_again_afterwards():
    before = planner.grow_rows, own_text.append_tokens
    with interpreting(*before):
        assert planner.append_tokens is own_text.append_tokens is not before[1]
    assert (planner.grow_rows, own_text.append_tokens) == before
