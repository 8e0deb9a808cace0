"""Keys and values in 8 or 4 bits: each is quantized alone, so that drafts and batches change no token."""

import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lookahead.backends.cpu.attention_cpu import NUMBERS
from lookahead.backends.cpu.linear import lay_out
from lookahead.backends.cpu.quantized_kv import with_kv_dtype
from lookahead.draft.tree import chain, side_by_side
from lookahead.errors import UsageError
from lookahead.forward import kv_cache
from lookahead.forward.quantized_cache import DTYPES, as_keys, bytes_of, quantized, restored
from lookahead.forward.slots import PackedSlots, slots_of
from lookahead.forward.target import TargetModel
from lookahead.models.load import load_model, random_model
from lookahead.models.probe import probed
from lookahead.tokenizer import load_tokenizer
from tests.forward.test_tree_attention import Step
from tests.models.lossless import (
    DEMO,
    answers_of_jobs,
    assert_any_draft_yields_the_plain_tokens,
    assert_demo_model_answers_the_same,
)
from tests.support.cli import write_jsonl
from tests.support.cpu import HALVES
from tests.support.depth import deep, some_deep
from tests.support.drafts import tree_of
from tests.support.plain_attention import reference

HALF = "bfloat16" if HALVES else "float32"
STEPS = {"int8": 127, "int4": 7.5}  # of half a group's range, about
NAMES = ("llama", "gpt_neox", "gemma3", "qwen3", "phi")
OTHERS = ("opt", "olmo2", "cohere2", "starcoder2", "stablelm", "granite")


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 128, 80, 48, 16, 20, 5])
def test_numbers_come_back_within_a_step_of_their_group(kv_dtype, width):
    states = torch.randn(2, 9, width, generator=torch.Generator().manual_seed(0)) * 3 + 2
    held = quantized(states, DTYPES[kv_dtype])
    assert held.shape == (2, 9, bytes_of(width, DTYPES[kv_dtype]))
    found = restored(held, width)
    for begin in range(0, width, 32):
        group, back = states[..., begin : begin + 32], found[..., begin : begin + 32]
        if kv_dtype == "int8":
            half = group.abs().amax(-1, keepdim=True)
        else:
            half = (group.amax(-1, keepdim=True) - group.amin(-1, keepdim=True)) / 2
        assert ((back - group).abs() <= half / STEPS[kv_dtype] * 0.51 + group.abs().amax() / 256).all()
        assert (back - group).abs().mean() <= half.mean() / STEPS[kv_dtype] * 0.3, "rounded to the nearest, on average"


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_numbers_that_are_all_alike_come_back(kv_dtype):
    for value in (0.0, -2.5, 1e-35):
        found = restored(quantized(torch.full((1, 1, 64), value), DTYPES[kv_dtype]), 64)
        torch.testing.assert_close(found, torch.full((1, 1, 64), value), rtol=0.01, atol=1e-30)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_bytes_of_a_token_do_not_depend_on_others(kv_dtype):
    states = torch.randn(3, 20, 80)
    together = quantized(states, DTYPES[kv_dtype])
    for token in range(20):
        assert quantized(states[:, token : token + 1], DTYPES[kv_dtype]).equal(together[:, token : token + 1])


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    some_deep(itertools.product(DTYPES, sorted(NUMBERS, key=str)), [("int8", torch.float32), ("int4", torch.bfloat16)]),
)
def test_attention_reads_what_was_written(kv_dtype, dtype):
    """Of trees, windows and heads that share keys; 40 queries are worked on in another way than few."""
    bush = [-1, 0, 0, 1, 1, 2]
    far = [-1, *(max(0, node - 3) for node in range(1, 40))]
    for widths in ((64, 64), (80, 80), (128, 64), (24, 40)):
        for step in (Step([bush, [-1], [], far], [30, 200, 4, 7]), Step([bush, far], [30, 100], window=16, filling=3)):
            random = torch.Generator().manual_seed(1)
            query = torch.randn(step.tokens + step.filling, 4, widths[0], generator=random).to(dtype)
            states = [torch.randn(len(step.pasts), 2, 256, width, generator=random) for width in widths]
            held = [torch.stack([quantized(slot, DTYPES[kv_dtype]) for slot in each]) for each in states]
            shown = [as_keys(each, width) for each, width in zip(held, widths, strict=True)]
            known = [restored(each, width) for each, width in zip(held, widths, strict=True)]
            found = torch.ops.lookahead.tree_attention(query, *shown, step.meta(), 0.2)
            close = 2e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(
                found.float(), reference(query.float(), *known, step.meta(), 0.2), rtol=close, atol=close
            )


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("name", [NAMES[0], *deep(NAMES[1:]), *deep(OTHERS)])
def test_any_draft_yields_the_plain_tokens(tiny_model, make_trie, name, kv_dtype):
    target = with_kv_dtype(probed(lay_out(copy.deepcopy(tiny_model(name))), name), kv_dtype)
    assert target.setting.file_name.endswith(f"-kv-{kv_dtype}.json"), "costs of another cache"
    assert_any_draft_yields_the_plain_tokens(target, make_trie)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "mode"),
    [
        ("int4", HALF, "program"),
        *deep([("int8", HALF, "modules"), ("int8", "float32", "program"), ("int8", HALF, "program")]),
        *deep([("int4", "float32", "modules"), ("int4", "float32", "program")]),
    ],
)
@pytest.mark.parametrize("quantize", ["none", *deep(["int8", "int4"])])
def test_demo_model_answers_the_same_with_drafts_and_in_batches(kv_dtype, dtype, mode, quantize):
    target = load_model(DEMO, dtype=dtype, device="cpu", engine_mode=mode, quantize=quantize, kv_dtype=kv_dtype)
    assert (target.program is not None) == (mode == "program")
    assert_demo_model_answers_the_same(target, 24)


def held_of(slots: PackedSlots, slot: int, length: int) -> list[torch.Tensor]:
    """Bytes of a slot's first tokens, in all layers."""
    assert slots.cache.layers
    return [held[slot, :, :length].clone() for layer in slots.cache.layers for held in (layer.keys, layer.values)]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kv_dtype", "mode"),
    some_deep(itertools.product(DTYPES, ("program", "modules")), [("int8", "modules"), ("int4", "program")]),
)
def test_drafts_compaction_and_shared_prefixes_leave_the_bytes_of_plain_decoding(kv_dtype, mode):
    target = load_model(DEMO, device="cpu", engine_mode=mode, kv_dtype=kv_dtype)
    text = np.random.default_rng(0).integers(1, target.vocab_size, 30).astype(np.int32)

    def begun(*texts):
        slots = slots_of(target)
        assert isinstance(slots, PackedSlots)
        for each in texts:
            slots.begin(slots.add(each.tolist(), 64))
        return slots

    plain = begun(text[:21])
    for begin, end in [(0, 20), *((node, node + 1) for node in range(20, 26))]:
        plain.forward(side_by_side([chain(text[begin:end])], ["all"]))
        plain.keep([range(end - begin)])
    tree = begun(text[:21])
    tree.forward(side_by_side([chain(text[:20])], ["last"]))
    tree.keep([range(20)])
    ids = [*text[20:22], 7, 8, text[22], 9, text[23], text[24], 5, text[25]]
    tree.forward(side_by_side([tree_of(ids, [-1, 0, 0, 1, 1, 3, 4, 6, 6, 7])], ["all"]))
    tree.keep([[0, 1, 4, 6, 7, 9]])
    expected = held_of(plain, 0, 26)
    assert all(map(torch.equal, held_of(tree, 0, 26), expected))
    assert any(bool(each.any()) for each in expected)
    slot = tree.add([*text[:24].tolist(), 3])
    assert tree.begin(slot) == 24, "copied from the other slot"
    assert all(map(torch.equal, held_of(tree, slot, 24), [each[:, :24] for each in expected]))


def loss(target: TargetModel, texts: list[list[int]]) -> float:
    """nats per token."""
    total = 0.0
    for text in texts:
        slots = slots_of(target)
        slots.begin(slots.add(text))
        scores = slots.forward(side_by_side([chain(np.array(text, np.int32))], ["all"])).of(0).float()
        total += float(cross_entropy(scores[:-1], torch.tensor(text[1:]), reduction="sum"))
    return total / sum(len(text) - 1 for text in texts)


@torch.inference_mode()
@pytest.mark.deep
def test_demo_model_loses_little():
    tokenizer = load_tokenizer(DEMO)
    with open("samples/corpus.jsonl", encoding="utf-8") as file:
        texts = [tokenizer(json.loads(next(file))["response"])["input_ids"] for _ in range(64)]
    plain = loss(load_model(DEMO, device="cpu"), texts)
    for kv_dtype, most in (("int8", 0.002), ("int4", 0.03)):
        lost = loss(load_model(DEMO, device="cpu", kv_dtype=kv_dtype), texts) - plain
        assert lost != 0
        assert abs(lost) <= most, kv_dtype


def test_memory_of_a_token():
    whole = load_model(DEMO, dtype="bfloat16", device="cpu").kv_bytes
    for kv_dtype, dtype, share in (("int8", "float32", 0.55), ("int4", HALF, 0.32)):
        held = load_model(DEMO, dtype=dtype, device="cpu", kv_dtype=kv_dtype).kv_bytes
        assert 0 < held <= share * whole


def test_what_cannot_be_had_is_refused(tiny_model, tmp_path):
    with pytest.raises(UsageError, match="--kv-dtype int2: choose none, int8, int4"):
        load_model(DEMO, kv_dtype="int2")
    with pytest.raises(UsageError, match="--kv-dtype int8: there is no kernel for meta, only for CPUs"):
        random_model(DEMO, device="meta", kv_dtype="int8")
    with pytest.raises(UsageError, match="--kv-dtype int8 is for a model on one device"):
        load_model(DEMO, device="cpu", device_map="cpu", kv_dtype="int8")
    with pytest.raises(UsageError, match="gemma2's attention is not lookahead::tree_attention"):
        with_kv_dtype(probed(copy.deepcopy(tiny_model("gemma2")), "gemma2"), "int8")
    with pytest.raises(UsageError, match=r"mamba verifies by .*: .*Leave it out"):
        with_kv_dtype(probed(copy.deepcopy(tiny_model("mamba")), "mamba"), "int4")


def test_model_that_changes_keys_behind_the_cache_is_refused(tiny_model, monkeypatch):
    target = probed(lay_out(copy.deepcopy(tiny_model("llama"))), "llama", may_be_program=False)
    monkeypatch.setattr(kv_cache, "quantized", lambda states, kept: quantized(states * 3, kept))
    with pytest.raises(UsageError, match=r"scores differ by .* of their spread"):
        with_kv_dtype(target, "int8")


def test_model_whose_scores_depend_on_company_is_refused(tiny_model):
    class Uneven(nn.Module):
        """Rounds otherwise where there are many tokens."""

        def __init__(self, head):
            super().__init__()
            self.head = head

        def forward(self, tokens):
            return self.head(tokens) * (1 + 1e-6 * (tokens.shape[-2] > 4))

    model = lay_out(copy.deepcopy(tiny_model("llama")))
    model.lm_head = Uneven(model.lm_head)
    with pytest.raises(UsageError, match=r"cannot be had with such a cache \(with 6 tokens"):
        with_kv_dtype(probed(model, "llama", may_be_program=False), "int8")


def test_commands_refuse_it_in_one_line(cli, tmp_path):
    for name in ("generate", "bench"):
        given = name, "--model", DEMO, "--kv-dtype", "int2", "--input", "samples/prompts.jsonl"
        cli.fails(2, *given, saying=["--kv-dtype int2: choose none, int8, int4"])
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a"}])
    given = "generate", "--model", DEMO, "--input", prompts, "--kv-dtype", "int8"
    cli.fails(2, *given, "--engine", "vllm", saying=["--engine vllm has no --kv-dtype"])
    cli.fails(2, *given, "--attn", "eager", saying=["--kv-dtype int8", "attention is not lookahead::tree_attention"])


def test_job_answers_the_same_with_drafts_and_says_so_in_its_manifest(cli, tmp_path):
    job = "--model", DEMO, "--kv-dtype", "int4"
    plain, drafted = answers_of_jobs(cli, tmp_path, [(*job, "--strategy", "off"), (*job, "--batch-size", 8)])
    assert drafted == plain
    out = tmp_path / "1.jsonl"
    manifest = json.loads(Path(f"{out}.manifest.json").read_text(encoding="utf-8"))
    assert '"kv_dtype": "int4"' in json.dumps(manifest)
    given = "--input", tmp_path / "prompts.jsonl", "-o", out, "--max-new-tokens", 30, "--token-ids", "--resume"
    cli.fails(2, "generate", "--model", DEMO, "--kv-dtype", "none", *given, saying=["kv-dtype"])
