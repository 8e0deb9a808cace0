"""What the model almost said: the best few scores, and the table they come into."""

import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.recycled import ANY, BEST, KEPT, KINDS, Recycled
from lookahead.draft.tree import chain
from lookahead.errors import TrieFormatError
from lookahead.forward.scores import Scores
from lookahead.models.probe import probed
from lookahead.step.best_tokens import BLOCK, best_few
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie.build import build_trie
from lookahead.trie.file import Trie
from tests.support.jobs import MODEL


def best_tokens(logits, places):
    """(ids, scores), [places, BEST] both, by the kernel."""
    scores = Scores(logits, [len(logits)])
    kind, address, vocabulary = scores.native()
    ids, found = np.zeros((len(places), BEST), np.int32), np.zeros((len(places), BEST), np.float32)
    best = np.zeros(len(logits), int)
    best_few(kind, address, len(logits), vocabulary, np.array(places), ids, found.ctypes.data, best)
    assert best[places].tolist() == ids[:, 0].tolist()
    return ids, found


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


# ---- the best few scores
@given(
    st.integers(0, 1 << 30),
    st.sampled_from(DTYPES),
    st.sampled_from([BEST, BEST + 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3]),
    st.sampled_from([-3.0, 0.0, 3.0]),
    st.booleans(),
)
def test_best_scores_are_those_of_a_sort(seed, dtype, vocabulary, mean, infinite):
    scores = torch.empty(4, vocabulary).normal_(mean, 1, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if infinite:
        scores[:, ::2] = -torch.inf
    places = np.array([3, 0])
    ids, found = best_tokens(scores, places)
    for row, k in enumerate(places):
        expected = scores[k].float().sort(descending=True, stable=True).values[: len(ids[row])]
        assert found[row].tolist() == expected.tolist()
        assert scores[k, ids[row].tolist()].tolist() == expected.tolist()
        assert len(set(ids[row].tolist())) == len(ids[row])


# ---- the table
def slowly(steps):
    """Key -> (candidates with weights, descending), by the rule; keys without bound."""
    table = defaultdict(list)
    for tree, before, ids, scores in steps:
        contexts = []
        for node, token in enumerate(tree.token_ids.tolist()):
            above = [*before] if node == 0 else contexts[tree.parents[node]]
            contexts.append([token, *above][:3])
            shares = np.exp(scores[node] - scores[node][0], dtype=np.float32)
            shares /= shares.sum(dtype=np.float32)
            for kind, kept in zip(KINDS.tolist(), KEPT, strict=True):
                key = tuple(t if used else ANY for t, used in zip(contexts[-1], kind, strict=True))
                if any(used and t == ANY for t, used in zip(contexts[-1], kind, strict=True)):
                    continue
                held = [(token, weight * kept) for token, weight in table[key]]
                for candidate, share in zip(ids[node].tolist(), shares, strict=True):
                    known = next((k for k, (token, _) in enumerate(held) if token == candidate), None)
                    if known is None and len(held) == BEST:
                        if share <= held[-1][1]:
                            continue
                        held.pop()
                    weight = share + (held.pop(known)[1] if known is not None else 0)
                    at = sum(w >= weight for _, w in held)
                    held.insert(at, (candidate, weight))
                table[key] = held
    return table


@given(st.integers(0, 1 << 30))
def test_table_sums_up_the_shares_of_candidates_by_key(seed):
    random = np.random.default_rng(seed)
    table, steps = Recycled.empty(1 << 12), []
    for _ in range(random.integers(1, 12)):
        trees, before = [], []
        for _ in range(random.integers(1, 4)):
            tree = chain(random.integers(0, 4, random.integers(1, 7)).tolist())
            tree.parents[1:] = [random.integers(0, node) for node in range(1, len(tree))]
            trees.append(tree)
            before.append([ANY, ANY] if random.random() < 0.2 else random.integers(0, 4, 2).tolist())
        nodes = sum(map(len, trees))
        ids = np.array([random.permutation(20)[:BEST] for _ in range(nodes)], np.int32)
        scores = -np.sort(random.normal(0, 2, (nodes, BEST)).astype(np.float32))
        tokens, parents = (np.concatenate([getattr(tree, name) for tree in trees]) for name in ("token_ids", "parents"))
        sizes = np.array([len(tree) for tree in trees])
        table.add(tokens, parents, sizes, np.array(before, np.int32), ids, scores)
        for tree, start, known in zip(trees, np.cumsum(sizes) - sizes, before, strict=True):
            steps.append((tree, known, ids[start : start + len(tree)], scores[start : start + len(tree)]))
    expected, taken = slowly(steps), (table.keys != ANY).any(1)
    assert {tuple(key) for key in table.keys[taken].tolist()} == set(expected)
    for key, tokens, weights in zip(table.keys[taken].tolist(), table.tokens[taken], table.weights[taken], strict=True):
        held = expected[tuple(key)]
        np.testing.assert_allclose(weights[: len(held)], [weight for _, weight in held], rtol=1e-4)
        assert not weights[len(held) :].any()
        assert (np.diff(weights) <= 0).all()
        apart = [k for k in range(len(held)) if np.isclose([w for _, w in held], held[k][1], rtol=1e-4).sum() == 1]
        assert [tokens[k] for k in apart] == [held[k][0] for k in apart]


# ---- drafting
def test_what_is_recycled_serves_under_its_name_until_it_is_forgotten():
    drafter = Drafter([], DraftOptions(decoding_length=8))
    row = drafter.start([1, 2, 3])
    row.accept([40, 3])
    ids, scores = np.arange(40, 40 + BEST, dtype=np.int32)[None], np.zeros((1, BEST), np.float32)
    drafter.recycled.add(np.array([3]), np.array([-1]), np.array([1]), np.full((1, 2), ANY, np.int32), ids, scores)
    tree = row.draft()
    named = [drafter.source_names[source] for source in tree.sources[1:]]
    assert {int(t) for t, name in zip(tree.token_ids[1:], named, strict=True) if name == "recycled"} & set(range(41, 48))
    drafter.forget()
    assert len(drafter.recycled) == 0


def test_without_recycling_nothing_is_kept():
    drafter = Drafter([], DraftOptions(recycle=False))
    drafter.warm_up()
    drafter.recycled.add(*[np.zeros((1, 1), np.int32)] * 6)
    assert sum(array.nbytes for array in drafter.recycled.arrays) == 0


def outputs(target, prompts, batch_size, **options):
    engine = DecodingEngine(target, Drafter([], DraftOptions(**{"adaptive": False, **options})), batch_size)
    generations = [engine.request(prompt, 48) for prompt in prompts]
    list(engine.run(generations))
    return engine, generations


@pytest.mark.parametrize("batch_size", [1, 3])
def test_recycled_drafts_are_accepted_and_change_nothing(tiny_model, batch_size):
    target = probed(tiny_model("llama"))
    prompts = [[5, 6, 7 + k] for k in range(6)]
    _, plain = outputs(target, prompts, batch_size, strategy="off")
    engine, with_it = outputs(target, prompts, batch_size, decoding_length=16)
    assert [g.token_ids for g in with_it] == [g.token_ids for g in plain]
    assert sum(g.accepted_by_source["recycled"] for g in with_it) > 0
    assert len(engine.drafter.recycled) > 0
    _, without = outputs(target, prompts, batch_size, decoding_length=16, recycle=False)
    assert sum(g.steps for g in with_it) < sum(g.steps for g in without)


def test_of_given_answers_nothing_is_recycled(tiny_model):
    target = probed(tiny_model("llama"))
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=8, adaptive=False)), 1)
    generation = dataclasses.replace(engine.request([1, 2, 3], 8), forced=[4, 5, 6, 7, 8, 9, 10, 11])
    list(engine.run([generation]))
    assert (generation.error, len(engine.drafter.recycled)) == (None, 0)


# ---- the file, the commands
def test_trie_with_runner_up_tokens_of_an_earlier_version_is_refused_with_what_to_do():
    with pytest.raises(TrieFormatError, match=r"it holds runner-up tokens, as an earlier version wrote them\)\. Rebuild\."):
        Trie(Path(__file__).parents[1] / "trie" / "runner_up_tokens.trie")


def test_job_drafts_from_runner_up_tokens_unless_it_is_told_not_to(cli, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join((MODEL.parent / "prompts.jsonl").read_text().splitlines()[:3]) + "\n")
    job = ["generate", "--model", MODEL, "--input", prompts, "--max-new-tokens", 24, "--json"]
    job += ["--strategy", "hierarchical", "--decoding-length", 16]
    assert cli(*job, "-o", tmp_path / "one.jsonl").json["accepted_by_source"]["recycled"] > 0
    without = cli(*job, "-o", tmp_path / "two.jsonl", "--no-recycle").json
    assert "recycled" not in without["accepted_by_source"]


@pytest.mark.deep
def test_bench_compares_with_and_without_cold_and_warm(cli, tmp_path):
    documents = [TokenDocument(np.arange(3, 40, dtype=np.int32), "a")]
    build_trie(documents, tmp_path / "x.trie", TokenizerIdentity(4096))
    asked = ("bench", "--model", MODEL, "--input", MODEL.parent / "prompts.jsonl", "--rows", 2, "--no-peers")
    asked += ("--max-new-tokens", 12, "--strategy", "hierarchical", "--trie", tmp_path / "x.trie", "--recycling", "--json")
    runs = {run["name"]: run for run in cli(*asked).json["runs"]}
    name = "hierarchical 16"
    assert [*runs] == ["plain", name, f"{name} unrecycled", f"{name} cold", f"{name} cold unrecycled"]
    assert "recycled" not in runs[f"{name} unrecycled"]["accepted_by_source"]
    cli.fails(2, "bench", "--replay", "x.jsonl", "--recycling", saying=["--recycling", "--model"])
