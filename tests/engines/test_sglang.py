"""Draft trees in SGLang's form: arrays as its own corpus answers, texts as its scheduler has them; its interface, if installed.

SGLang's kernels need a GPU, or a CPU with AVX-512 and a build that the package index does not have. With those of
support/sglang_on_cpu in their place its engine runs on any CPU, jobs too (its C++ corpus is compiled, which takes minutes):

python -m venv sglang && sglang/bin/pip install lookahead pytest hypothesis  # with a torch for CPUs
sglang/bin/pip install --no-deps -r tests/support/sglang_on_cpu/requirements.txt
sglang/bin/pip install --no-deps torchvision==... --index-url https://download.pytorch.org/whl/cpu  # that fits torch
sglang/bin/python -m pytest -m sglang tests/engines tests/job/test_engines.py
"""

import ast
import importlib.util
import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import DraftTree
from lookahead.engines import sglang
from lookahead.engines.batch_rows import ByTree, Text, only_filler, write_tree
from lookahead.engines.requests import NewTokens, Requests
from lookahead.engines.settings import SETTINGS, settings_of
from lookahead.errors import UsageError
from tests.engines.test_requests import VOCABULARY, text_of

INTERFACE = {  # what of SGLang is used: class -> its methods and their parameters
    "NGRAMWorker": {
        "__init__": ("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
        "_prepare_draft_tokens": ("self", "batch"),
        "_update_ngram_corpus": ("self", "batch"),
        "forward_batch_generation": ("self", "batch", "on_publish", "pp_proxy_tensors"),
    },
    "CustomSpecAlgo": {
        "__init__": ("self", "name", "factory", "supports_overlap", "validate_server_args"),
        "handle_server_args": ("self", "server_args"),
        "create_worker": ("self", "server_args"),
    },
}

RECORDED = json.loads((Path(__file__).parent / "sglang_calls.json").read_text(encoding="utf-8"))
WIDTH = 12
HAS_SGLANG = importlib.util.find_spec("sglang") is not None


def parents_of(mask: np.ndarray) -> list[int]:
    """As SGLang reads a mask [n, n]: the parent is the last node before that stands on the path. Raises if it is no tree."""
    parents = [max((int(k) for k in np.flatnonzero(row[:node])), default=-1) for node, row in enumerate(mask)]
    for node, parent in enumerate(parents):
        path = mask[parent].copy() if parent >= 0 else np.zeros(len(mask), mask.dtype)
        path[node] = 1
        assert (parent >= 0) == (node > 0)
        assert np.array_equal(mask[node], path), node
    return parents


def drafter_of(tries: Any = (), price: float = 0.0) -> Drafter:
    options = DraftOptions("hierarchical", decoding_length=WIDTH, branch_length=WIDTH - 1, price=price, recycle=False)
    return Drafter(tries, options)


@pytest.fixture
def trie(make_trie):
    return make_trie([text_of(seed) for seed in range(20)], VOCABULARY)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_tree_of_its_corpus_is_written_as_it_writes_it(number):
    """But for filler, which forms a branch here: children of one node are different tokens."""
    tokens, parents = (np.array(RECORDED[name][number], np.int32) for name in ("tokens", "parents"))
    nodes = len(tokens) - int(np.count_nonzero(tokens == 0))
    empty = np.zeros(nodes, np.int32)
    ours, mask = np.zeros(8, np.int64), np.zeros((8, 8), np.int64)
    write_tree(DraftTree(tokens[:nodes], parents[:nodes], empty.astype(np.float32), empty, empty), ours, mask)
    assert ours.tolist() == tokens.tolist()
    theirs = np.array([[int(digit) for digit in row] for row in RECORDED["masks"][number].split()])
    assert np.array_equal(mask[:nodes], theirs[:nodes])
    assert parents_of(mask)[nodes:] == ([0, *range(nodes, 7)] if nodes < 8 else [])


@pytest.mark.parametrize("price", [0.0, 0.2])
def test_arrays_hold_the_drafters_trees_and_filler(trie, price):
    texts = {"a": text_of(99), "b": text_of(3), "c": list(range(20))}
    rows, other = ByTree(Requests(drafter_of([trie], price)), WIDTH), Requests(drafter_of([trie], price))
    for request_id, text in texts.items():
        other.begin(request_id, text[:12])
    filled = 0
    for end in range(13, 20):
        tokens, mask = rows.step(list(texts), [Text(text[:12], text[12:end]) for text in texts.values()])
        assert [str(tokens.dtype), str(mask.dtype)] == RECORDED["dtypes"]
        trees = other.step([NewTokens(request_id, [text[end - 1]], WIDTH - 1) for request_id, text in texts.items()])
        for tree, row, of_row in zip(trees, tokens.reshape(3, WIDTH), mask.reshape(3, WIDTH, WIDTH), strict=True):
            parents, nodes = parents_of(of_row), len(tree)
            assert row[:nodes].tolist() == tree.token_ids.tolist()
            assert parents[:nodes] == tree.parents.tolist()
            children = list(zip(parents, row.tolist(), strict=True))
            assert len(set(children)) == WIDTH, "no two children of a node are the same token"
            filled += nodes < WIDTH
    assert bool(filled) == bool(price)


def test_tokens_that_are_late_come_once(trie):
    """Where schedules overlap, the latest step's tokens are not in the output yet; they are in it at the next step."""
    text = text_of(99)
    late, at_once = (ByTree(Requests(drafter_of([trie])), WIDTH) for _ in range(2))
    seen = 12
    for end in (13, 16, 17, 22):
        found = late.step(["a"], [Text(text[:12], text[12:seen], text[seen:end])])
        expected = at_once.step(["a"], [Text(text[:12], text[12:end])])
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one, other)
        assert late.requests.has_text("a", np.array(text[:end], np.int32))
        seen = end


def test_a_request_that_was_preempted_begins_again_with_all_its_text(trie):
    text, rows = text_of(99), ByTree(Requests(drafter_of([trie])), WIDTH)
    rows.step(["a", "b"], [Text(text[:12], text[12:20]), Text(text[:12], text[12:13])])
    rows.finish(["a", "never seen"])
    assert ("b" in rows.requests, len(rows.requests)) == (True, 1)
    rows.step(["b", "a"], [Text(text[:12], text[12:15]), Text(text[:12], text[12:22])])
    for request_id, end in (("a", 22), ("b", 15)):
        assert rows.requests.has_text(request_id, np.array(text[:end], np.int32))
    rows.clear()
    assert not len(rows.requests)


def test_only_filler_is_a_branch_for_each_row():
    tokens, mask = only_filler([7, 9], 3)
    assert tokens.tolist() == [7, 0, 0, 9, 0, 0]
    assert [parents_of(each) for each in mask.reshape(2, 3, 3)] == [[-1, 0, 1]] * 2


def test_a_version_that_is_not_known_is_left_as_it_is_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99.1")
    with caplog.at_level(logging.WARNING, "lookahead"):
        sglang.register()
    (record,) = caplog.records
    assert "SGLang 0.99.1 is not one of the versions that are known" in record.getMessage()


@pytest.mark.skipif(HAS_SGLANG, reason="SGLang is installed")
def test_the_entry_point_raises_nothing_where_sglang_cannot_be_loaded(caplog):
    sglang.register()
    assert "LOOKAHEAD is left out of SGLang" in caplog.text


def test_settings_come_from_the_environment():
    assert settings_of({}).tries == ()
    assert settings_of({SETTINGS: '{"tries": ["a.trie"]}'}).tries == ("a.trie",)
    for text, saying in (("{", "not JSON"), ('{"trees": 1}', "no setting 'trees'"), ("[]", r"got \[\]")):
        with pytest.raises(UsageError, match=saying):
            settings_of({SETTINGS: text})


@pytest.mark.parametrize(("plugin", "packages"), [("sglang", {"numba", "torch", "numpy", "sglang"}), ("vllm", {"numba"})])
def test_the_plugin_loads_nothing_that_drafting_needs(plugin, packages):
    code = f"import sys, lookahead.engines.{plugin}; print({packages} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


# ---- where SGLang is installed
@pytest.mark.sglang
@pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")
class TestSglang:
    @pytest.mark.parametrize(("module", "name"), [("ngram_worker", "NGRAMWorker"), ("spec_registry", "CustomSpecAlgo")])
    def test_what_is_used_of_sglang_is_as_it_was(self, module, name):
        """By its source, as importing the worker needs a GPU."""
        (folder,) = importlib.util.find_spec("sglang.srt.speculative").submodule_search_locations
        tree = ast.parse((Path(folder) / f"{module}.py").read_text(encoding="utf-8"))
        (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        methods = {node.name: node.args for node in found.body if isinstance(node, ast.FunctionDef)}
        for method, parameters in INTERFACE[name].items():
            arguments = methods[method]
            assert tuple(each.arg for each in (*arguments.args, *arguments.kwonlyargs)) == parameters

    def test_the_algorithm_is_registered_and_answers_as_ngram(self):
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        from lookahead.engines.sglang_algorithm import register_algorithm

        register_algorithm("LOOKAHEAD_TEST")
        ours, ngram = SpeculativeAlgorithm.from_string("lookahead_test"), SpeculativeAlgorithm.NGRAM
        asked = [name for name in vars(SpeculativeAlgorithm) if name.startswith(("is_", "supports_", "has_", "need_"))]
        assert len(asked) > 15
        for name in asked:
            assert getattr(ours, name)() == getattr(ngram, name)(), name
        answered = {name for name, value in vars(SpeculativeAlgorithm).items() if name[0] != "_" and inspect.isfunction(value)}
        assert {name for name in answered if not hasattr(ours, name)} == set()

    def test_devices_and_settings_without_trees_are_refused(self):
        from lookahead.engines.sglang_algorithm import Algorithm

        given = {
            "device": "cuda", "enable_dp_attention": False, "attn_dp_size": None, "max_running_requests": 4,
            "speculative_ngram_max_bfs_breadth": 10, "speculative_num_draft_tokens": 12, "speculative_num_steps": None,
            "page_size": 1, "attention_backend": "triton",
        }  # fmt: skip
        for wrong in ({"device": "npu"}, {"enable_dp_attention": True}, {"attn_dp_size": 2}, {"page_size": 16}):
            with pytest.raises(ValueError, match="LOOKAHEAD"):
                Algorithm("LOOKAHEAD", lambda args: object).handle_server_args(SimpleNamespace(**{**given, **wrong}))

    def test_its_own_record_of_arguments_takes_what_we_set(self):
        from sglang.srt.arg_groups.overrides import record_foreign_defaults, resolving_view
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        sglang.register()
        args = ServerArgs(model_path="samples/demo-model", speculative_algorithm=sglang.ALGORITHM, device="cpu")
        ours = SpeculativeAlgorithm.from_string(sglang.ALGORITHM)
        record_foreign_defaults(args, "test", ours.handle_server_args)
        found = resolving_view(args)
        assert (found.speculative_num_draft_tokens, found.max_running_requests, found.enable_mixed_chunk) == (16, 48, False)
        assert {"tokenizer_path", "skip_tokenizer_init", "trust_remote_code"} <= set(dir(args)), "what the worker reads"

    @pytest.mark.timeout(1800)
    def test_its_corpus_still_answers_as_recorded(self):
        from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

        corpus = NgramCorpus(max_trie_depth=12, draft_token_num=8)
        corpus.batch_put(RECORDED["texts"])
        corpus.synchronize()
        contexts = RECORDED["contexts"]
        tokens, mask = corpus.batch_get(["a", "b", "c"], contexts, [len(context) for context in contexts])
        assert [str(tokens.dtype), str(mask.dtype)] == RECORDED["dtypes"]
        assert tokens.reshape(3, 8).tolist() == RECORDED["tokens"]
        assert [parents_of(each) for each in mask.reshape(3, 8, 8)] == RECORDED["parents"]
