"""Quantized linear layers: whole numbers that add up exactly, so that a quantized model answers the same with any draft."""

import copy
import itertools
import json

import numba
import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from lookahead.backends.cpu import quantized_code
from lookahead.backends.cpu.embedding import TableInPanels, in_panels, may_be_in_panels
from lookahead.backends.cpu.linear import LaidOutLinear, lay_out
from lookahead.backends.cpu.quantize import quantize_linears
from lookahead.backends.cpu.quantized import QuantizedPanels, in_4_bits, in_8_bits
from lookahead.backends.cpu.quantized_code import multiply
from lookahead.bench.on_model import weight_bytes
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.errors import ModelError, UsageError
from lookahead.models.exact import exact_or_plain
from lookahead.models.load import load_model, random_model
from lookahead.models.probe import kind_of_linear, probed
from lookahead.tokenizer import load_tokenizer
from tests.architectures import decoded, plainly, random_prompts
from tests.models.lossless import DEMO, assert_any_draft_yields_the_plain_tokens, assert_demo_model_answers_the_same
from tests.models.test_mixed import simulated
from tests.support.depth import deep, some_deep
from tests.support.quantized_panels import held_matrix

pytestmark = pytest.mark.skipif(not QuantizedPanels.takes_here(), reason="an x86 CPU with AVX2")
SHAPES = ((256, 256), (100, 65), (64, 700), (333, 128), (1, 1))
QUANTIZE = {"int8": in_8_bits, "int4": in_4_bits}
EXACT = ("llama", "gpt_neox", "gemma3", "qwen3", "olmo2", "phi", "opt", "cohere2", "starcoder2", "stablelm", "granite")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", QUANTIZE)
@pytest.mark.parametrize(("outputs", "inner"), [(100, 65), (640, 2100)])
def test_token_gets_the_same_bits_in_any_company_and_by_any_threads(scheme, outputs, inner, dtype):
    torch.manual_seed(0)
    panels = QuantizedPanels(QUANTIZE[scheme](torch.randn(outputs, inner)), dtype)
    tokens, before = torch.randn(261, inner).to(dtype), torch.get_num_threads()
    together = panels.product(tokens, None)
    assert together.dtype == dtype
    for size in (1, 2, 3, 4, 5, 6, 7, 13, 64, 250):
        assert panels.product(tokens[11 : 11 + size], None).equal(together[11 : 11 + size]), size
    strided = torch.randn(9, 2 * inner).to(dtype)[::2, ::2]
    assert panels.product(strided, None).equal(panels.product(strided.contiguous(), None))
    torch.set_num_threads(3)
    try:
        assert panels.product(tokens, None).equal(together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.deep
@pytest.mark.parametrize("bits", [8, 4])
def test_every_processor_adds_up_to_the_same_bits(monkeypatch, bits):
    """With VNNI, with AVX-512 alone, with AVX2 alone, where this machine has them: those of sums by NumPy."""
    torch.manual_seed(0)
    kind, inner, count = (np.uint8 if bits == 8 else np.int8)(0), 256, 9
    panels = QuantizedPanels((in_8_bits if bits == 8 else in_4_bits)(torch.randn(64, inner) * 3), torch.float32)
    numbers = torch.randn(count, inner)
    tokens, expected = panels.given(numbers), simulated(panels, numbers, None).numpy()
    weights = panels.weight.data_ptr() + (quantized_code.SCALES if bits == 8 else 0)
    forms = {(quantized_code.AVX512, quantized_code.multiplies_bytes()), (quantized_code.AVX512, False), (False, False)}
    for avx512, vnni in forms:
        monkeypatch.setattr(quantized_code, "AVX512", avx512)
        monkeypatch.setattr(quantized_code, "multiplies_bytes", lambda vnni=vnni: vnni)

        @numba.njit(error_model="numpy")
        def add_up(token, stride, count, weights, groups, sums):
            multiply(kind, token, stride, count, weights, groups, sums, 0, 0)

        sums = np.zeros((count, 64), np.float32)
        add_up(tokens.data_ptr(), tokens.stride(0), count, weights, inner // 64, sums.ctypes.data)
        if bits == 8:  # whole columns have one scale
            sums *= held_matrix(panels).scales[:, 0].numpy()
        assert sums.any()
        np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("scheme", QUANTIZE)
@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
def test_panels_hold_what_they_were_made_of(scheme, outputs, inner):
    torch.manual_seed(0)
    matrix = QUANTIZE[scheme](torch.randn(outputs, inner))
    held = held_matrix(QuantizedPanels(matrix, torch.float32))
    for name in ("numbers", "scales", "zeros"):
        ours, theirs = getattr(held, name), getattr(matrix, name)
        assert ours is theirs is None or (ours.dtype == theirs.dtype and ours.equal(theirs)), name


def test_weights_are_rounded_to_the_nearest_number():
    torch.manual_seed(0)
    weight = torch.randn(40, 200)
    weight[2], weight[3] = 0, 5
    weight[4, :64] = torch.linspace(2, 3, 64)  # all far from zero, which a group of 4 bits holds as well
    eight, four = in_8_bits(weight), in_4_bits(weight)
    assert ((eight.to_dense() - weight).abs() <= eight.scales / 2 * 1.001).all()
    steps = four.scales.repeat_interleave(64, 1)[:, :200]
    error = (four.to_dense() - weight).abs()
    assert (error.square().mean() / weight.square().mean()).sqrt() < 0.09
    assert error[4, :64].max() < 3 / 15
    assert (four.to_dense()[2] == 0).all()
    assert (steps[2] > 0).all()
    torch.testing.assert_close(four.to_dense()[3], weight[3], rtol=1e-2, atol=0)


IN_TURN = list(zip(EXACT[:4], itertools.cycle(QUANTIZE), strict=False))


@pytest.mark.parametrize(("name", "scheme"), some_deep(itertools.product(EXACT, QUANTIZE), IN_TURN))
def test_any_draft_yields_the_plain_tokens_of_the_quantized_model(tiny_model, make_trie, name, scheme):
    model = lay_out(quantize_linears(copy.deepcopy(tiny_model(name)), scheme, name))
    assert kind_of_linear(model) == scheme
    target = exact_or_plain(probed(model, name))
    assert target.setting.file_name.endswith(f"-{scheme}.json"), "costs of another model"
    assert_any_draft_yields_the_plain_tokens(target, make_trie)


def test_model_that_is_not_exact_decodes_plainly(tiny_model):
    """Soft caps: its attention is not computed in a fixed order."""
    model = lay_out(quantize_linears(copy.deepcopy(tiny_model("gemma2")), "int8", "gemma2"))
    target = exact_or_plain(probed(model, "gemma2"))
    assert target.mode == "plain"
    assert "quantized, and not the same bits in every forward (attention" in target.reason
    prompts = random_prompts()[:3]
    done = decoded(DecodingEngine(target, Drafter(), 2), prompts)
    assert [each.token_ids for each in done] == [plainly(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("scheme", QUANTIZE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_those_of_the_matrix(scheme, dtype):
    torch.manual_seed(0)
    panels = QuantizedPanels(QUANTIZE[scheme](torch.randn(333, 200)), dtype)
    ids = torch.tensor([[0, 332, 64], [63, 128, 0]])
    assert panels.rows(ids).equal(panels.to_dense()[ids])
    assert panels.rows(ids[:0]).shape == (0, 3, 200)
    for wrong in (-1, 333):
        with pytest.raises(IndexError, match="no row for: they end at 332"):
            panels.rows(torch.tensor([wrong]))


@pytest.mark.parametrize("scheme", QUANTIZE)
def test_tied_embedding_is_stored_once_and_an_untied_one_in_the_bits_of_most_layers(tiny_model, scheme):
    for name, tied in (("gemma3", True), ("llama", False)):
        model = copy.deepcopy(tiny_model(name))
        if tied:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
        table, kind = model.get_input_embeddings().weight.detach().clone(), type(model.get_input_embeddings())
        model = lay_out(quantize_linears(model, scheme, name))
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert isinstance(embedding, TableInPanels)
        assert isinstance(embedding, kind)
        assert (embedding.laid_out is head.laid_out) is tied
        assert embedding.laid_out.library == ("int8" if tied else scheme)
        assert all(tensor.shape != table.shape for tensor in model.parameters())
        rounded_table = QUANTIZE[embedding.laid_out.library](table).to_dense()
        ids = torch.arange(9)[None]
        factor = float(embedding.embed_scale) if name == "gemma3" else 1.0
        torch.testing.assert_close(embedding(ids), rounded_table[ids] * factor)


def test_embedding_of_a_class_that_computes_with_its_weight_stays_as_it_is():
    class Own(nn.Embedding):
        def forward(self, ids):
            return nn.functional.embedding(ids, self.weight * 2)

    embedding = Own(70, 64)
    weight = embedding.weight
    assert not in_panels(embedding, QuantizedPanels(in_8_bits(weight.detach()), torch.float32))
    assert type(embedding) is Own
    assert embedding.weight is weight
    assert not may_be_in_panels(nn.Embedding(70, 64, max_norm=1.0))


@pytest.mark.parametrize(("scheme", "share"), [*deep([("int8", 0.505)]), ("int4", 0.298)])
def test_resident_weights(tmp_path, scheme, share):
    """Of bfloat16, a Llama of 12M numbers with an output layer of its own; the bars are 0.55 and 0.32."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 3072}
    LlamaConfig(**sizes, num_key_value_heads=4, tie_word_embeddings=False).save_pretrained(tmp_path)
    models = (random_model(str(tmp_path), dtype="bfloat16", device="cpu", quantize=each) for each in (scheme, "none"))
    quantized, plain = (weight_bytes(target.model) for target in models)
    assert quantized / plain == pytest.approx(share, abs=0.01)  # by how the CPU's kernels pad


def test_head_of_a_model_of_4_bits_has_8_and_routers_stay(tiny_model):
    model = copy.deepcopy(tiny_model("afmoe"))
    routers = [name for name, layer in model.named_modules() if type(layer) is nn.Linear and layer.out_features == 4]
    quantized = quantize_linears(model, "int4", "afmoe")
    layers = {name: layer.laid_out.library for name, layer in quantized.named_modules() if isinstance(layer, LaidOutLinear)}
    assert routers
    assert not layers.keys() & set(routers)
    assert layers.pop("lm_head") == "int8"
    assert set(layers.values()) == {"int4"}


@pytest.mark.deep
@pytest.mark.parametrize(("scheme", "most", "texts"), [("int4", 0.03, 32), *deep([("int8", 0.002, 400)])])
def test_demo_model_loses_little(scheme, most, texts):
    """nats per token, of texts of its corpus: the bars are those for held-out text, see docs/quantization.md."""
    tokenizer = load_tokenizer(DEMO)
    with open("samples/corpus.jsonl", encoding="utf-8") as file:
        tokenized = [tokenizer(json.loads(next(file))["response"])["input_ids"] for _ in range(texts)]

    @torch.inference_mode()
    def loss(quantize):
        model = load_model(DEMO, device="cpu", quantize=quantize).model
        total = 0.0
        for text in tokenized:
            ids = torch.tensor([text])
            total += float(nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
        return total / sum(len(text) - 1 for text in tokenized)

    assert abs(loss(scheme) - loss("none")) < most


@pytest.mark.parametrize(
    ("scheme", "dtype"), [("int4", "float32"), *deep([("int8", "bfloat16"), ("int8", "float32"), ("int4", "bfloat16")])]
)
def test_demo_model_runs_as_a_program_with_the_same_answers(scheme, dtype):
    assert_demo_model_answers_the_same(load_model(DEMO, dtype=dtype, device="cpu", quantize=scheme, engine_mode="program"), 40)


def test_schemes_that_cannot_be_had_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="--quantize int2: choose none, int8, int4"):
        load_model(DEMO, quantize="int2")
    with pytest.raises(UsageError, match="--quantize int4: there is no kernel for meta, only for x86 CPUs with AVX2"):
        random_model(DEMO, device="meta", quantize="int4")
    with pytest.raises(UsageError, match="--quantize int4 is for a model on one device"):
        load_model(DEMO, device="cpu", device_map="cpu", quantize="int4")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(UsageError, match="there is no kernel for this CPU"):
        load_model(DEMO, device="cpu", quantize="int8")


def test_model_without_linear_layers_is_refused():
    class Model(nn.Module):
        config = type("Config", (), {"get_text_config": lambda self, decoder: self})()

        def get_output_embeddings(self):
            return None

        get_input_embeddings = get_output_embeddings

    with pytest.raises(ModelError, match="m: --quantize int8: it has no linear layers"):
        quantize_linears(Model(), "int8", "m")
