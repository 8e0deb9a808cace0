"""Tokens of 4 and 8 bits: integer sums that a slow path repeats bit for bit, so drafts change no token."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lookahead.backends.cpu.backend import program_of
from lookahead.backends.cpu.linear import LaidOutLinear, lay_out
from lookahead.backends.cpu.packed import matrix_of, tensors_of
from lookahead.backends.cpu.quantize import quantize_linears
from lookahead.backends.cpu.quantized import Quantized, QuantizedPanels, in_4_bits, in_8_bits
from lookahead.errors import ModelError
from lookahead.models import probe
from lookahead.models.exact import exact_or_plain
from lookahead.models.load import load_model
from lookahead.models.options import ModelOptions
from lookahead.models.prequantized import BLOCKS_IN_8_BITS
from lookahead.models.probe import probed
from lookahead.quantize.activation_stats import input_sizes
from lookahead.quantize.mixed import choose_bits, orders_of
from tests.models.lossless import DEMO, assert_any_draft_yields_the_plain_tokens
from tests.support.cli import write_jsonl
from tests.support.depth import deep, some_deep
from tests.support.quantized_panels import held_matrix

pytestmark = pytest.mark.skipif(not QuantizedPanels.takes_here(), reason="an x86 CPU with AVX2")
QUANTIZE = {"int8": in_8_bits, "int4": in_4_bits}
ARCHITECTURES = ("llama", "qwen3", "gpt_neox", "gemma3", "olmo2", "phi", "opt", "cohere2", "starcoder2", "granite")


def in_order(weight: torch.Tensor, scheme: str, order: torch.Tensor) -> Quantized:
    return dataclasses.replace(QUANTIZE[scheme](weight[:, order]), order=order)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of float32 numbers, rounded once (twice in one of 2 ** 29 cases)."""
    return (x.astype(np.float64) * y + z).astype(np.float32)


def simulated(panels: QuantizedPanels, tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What `panels.product` gives: sorted inputs, groups of 64 rounded to 8 or 4 bits, sums of whole numbers."""
    matrix, single = held_matrix(panels), np.float32
    order = torch.arange(panels.inner) if panels.order is None else panels.order
    count, width = len(tokens), panels.lines * 64
    x, weights = np.zeros((count, width), single), np.zeros((panels.outputs, width), np.int64)
    x[:, : panels.inner], weights[:, : panels.inner] = tokens[:, order].float().numpy(), matrix.numbers.numpy()
    sums = np.zeros((count, panels.outputs), single)
    for group in range(panels.lines):
        part = slice(64 * group, 64 * group + 64)
        most, full = np.abs(x[:, part]).max(1, keepdims=True), single(127 if group < panels.eight else 7.49)
        factor = np.where(most > 1e-30, full / np.maximum(most, single(1e-30)), single(0))
        numbers = np.rint(x[:, part] * factor).astype(np.int64)
        assert np.abs(numbers).max() == (127 if group < panels.eight else 7)
        total, scale = (numbers @ weights[:, part].T).astype(single), most / full
        if matrix.zeros is None:
            sums = fma(total, scale, sums)
        else:
            total -= numbers.sum(1, keepdims=True).astype(single) * matrix.zeros[:, group].numpy().astype(single)
            sums = fma(total * scale, matrix.scales[:, group].numpy(), sums)
    if matrix.zeros is None:
        sums = sums * matrix.scales[:, 0].numpy()
    return torch.from_numpy(sums) if bias is None else torch.from_numpy(sums) + bias


@pytest.mark.parametrize("scheme", QUANTIZE)
@pytest.mark.parametrize(("outputs", "inner", "eight"), [(100, 256, 2), (64, 640, 0), (70, 128, 2), (5, 192, 1), (100, 65, 2)])
def test_product_is_the_simulated_one_bit_for_bit(scheme, outputs, inner, eight):
    torch.manual_seed(0)
    panels = QuantizedPanels(in_order(torch.randn(outputs, inner), scheme, torch.randperm(inner)), torch.float32, eight)
    tokens, bias = torch.randn(67, inner), torch.randn(outputs)
    tokens[:, 5] *= 30
    tokens[3] = 0
    tokens[4, : inner // 2] *= 1e4
    tokens[5] *= 1e-36  # taken for zeros
    together = panels.product(tokens, bias)
    assert together.equal(simulated(panels, tokens, bias))
    assert together[3].equal(together[5])
    for size in (1, 3, 8, 64):
        assert panels.product(tokens[2 : 2 + size], bias).equal(together[2 : 2 + size]), size


def with_mixed_tokens(model: nn.Module, scheme: str) -> nn.Module:
    """A quantized model whose layers, but for the last, read tokens of 4 and 8 bits in random orders."""
    model = lay_out(quantize_linears(model, scheme, "m"))
    random = torch.Generator().manual_seed(0)
    for number, layer in enumerate(each for each in model.modules() if isinstance(each, LaidOutLinear)):
        if layer is not model.get_output_embeddings():
            layer.laid_out.order = torch.randperm(layer.in_features, generator=random)
            layer.laid_out.eight = number % 2
    return model


@pytest.mark.parametrize("scheme", some_deep(QUANTIZE, ["int4"]))
def test_model_is_the_simulated_one_bit_for_bit(tiny_model, monkeypatch, scheme):
    target = probed(with_mixed_tokens(copy.deepcopy(tiny_model("llama")), scheme), "llama")
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        fast = target.model(ids).logits
        monkeypatch.setattr(
            QuantizedPanels, "product", lambda s, x, b: simulated(s, x.flatten(0, -2), b).view(*x.shape[:-1], -1)
        )
        assert target.model(ids).logits.equal(fast)


@pytest.mark.parametrize("scheme", QUANTIZE)
@pytest.mark.parametrize("name", [ARCHITECTURES[0], *deep(ARCHITECTURES[1:])])
def test_any_draft_yields_the_plain_tokens(tiny_model, make_trie, name, scheme):
    target = exact_or_plain(probed(with_mixed_tokens(copy.deepcopy(tiny_model(name)), scheme), name))
    if name == ARCHITECTURES[0]:  # of others a small difference of rounding may become so large that the probe refuses it
        assert target.program is not None
    assert_any_draft_yields_the_plain_tokens(target, make_trie)


@pytest.mark.parametrize("scheme", QUANTIZE)
def test_sorted_inputs_come_back_from_a_checkpoint_by_groups(scheme):
    """In the file columns are in the order of the inputs, as compressed-tensors has them for "actorder": "group"."""
    torch.manual_seed(0)
    weight, order = torch.randn(70, 256), torch.randperm(256)
    matrix = in_order(weight, scheme, order)
    assert (matrix.to_dense() - weight).square().mean().sqrt() < (0.01 if scheme == "int8" else 0.12)
    tensors = {name.rpartition("weight_")[2]: tensor for name, tensor in tensors_of("a", matrix).items()}
    assert tensors["g_idx"][order].tolist() == [column // 64 for column in range(256)]
    back = matrix_of(tensors, 8 if scheme == "int8" else 4)
    assert back.to_dense().equal(matrix.to_dense())
    tokens = torch.randn(9, 256)
    products = [QuantizedPanels(each, torch.float32, 2).product(tokens, None) for each in (matrix, back)]
    assert products[0].equal(products[1]), "the order within a group changes nothing"
    with pytest.raises(RuntimeError, match="weight_g_idx has no 256 numbers"):
        matrix_of({**tensors, "g_idx": tensors["g_idx"][:9]}, 8 if scheme == "int8" else 4)
    uneven = {**tensors, "g_idx": torch.cat([torch.zeros(2, dtype=torch.int32), tensors["g_idx"][2:]])}
    assert scheme == "int8" or matrix_of(uneven, 4) is None


class TwoLayers(nn.Module):
    """Layers of 256 inputs, a's the numbers of b's but for three outliers; c reads what a does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(256, 8) for _ in range(3))

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, x: torch.Tensor) -> None:
        self.b(x)
        y = x.clone()
        y[:, [3, 130, 255]] *= 24
        self.a(y), self.c(y)


def test_fewest_blocks_within_the_budget_have_8_bits_those_with_outliers_first():
    torch.manual_seed(0)
    model = TwoLayers()
    largest = input_sizes(model, lambda: model(torch.randn(1, 99, 256)[0])).largest
    orders = orders_of(largest)
    assert set(orders["a"][:3].tolist()) == {3, 130, 255}
    for name in "abc":
        layer = getattr(model, name)
        panels = QuantizedPanels(in_order(layer.weight.detach(), "int8", orders[name]), torch.float32)
        setattr(model, name, LaidOutLinear(layer, panels))
    panels = {name: getattr(model, name).laid_out for name in "abc"}
    tried = []

    def loss():
        tried.append({name: each.eight for name, each in panels.items()})
        return 1.0 + 0.5 * (panels["a"].eight < 2) + 0.125 * (panels["b"].eight < 2)

    for budget, blocks in ((1.0, (0, 0, 0)), (0.2, (1, 0, 1)), (0.0, (1, 1, 1))):
        chosen = choose_bits(model, largest, loss, budget)
        assert tuple(chosen.in_8_bits[name] for name in "abc") == blocks, budget
        assert {name: each.eight for name, each in panels.items()} == {name: 2 * chosen.in_8_bits[name] for name in "abc"}
        assert chosen.loss - chosen.loss_in_8_bits <= budget
    assert tried[0] == dict.fromkeys("abc", 4)
    assert all(each["a"] == each["c"] for each in tried), "they share their tokens"
    assert chosen.share == 0.5
    with pytest.raises(ModelError, match="no layer has inputs in groups of 64"):
        choose_bits(nn.Module(), largest, loss, 0.1)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "calibration.jsonl"
    return write_jsonl(path, [{"text": f"Question: {n} pears cost {2 * n}.\nAnswer: {n * 3} dollars."} for n in range(5)])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, texts):
    """The demo model, and the report of it."""
    from lookahead.bench.options import QuantizeOptions
    from lookahead.bench.quantized import quantize

    folder = tmp_path_factory.mktemp("mixed") / "model"
    options = QuantizeOptions(str(folder), "int4", activations="mixed", calibration=str(texts), loss_budget=0.05)
    return folder, quantize(ModelOptions(DEMO), options).as_json()


def test_checkpoint_says_which_blocks_have_8_bits(mixed):
    folder, report = mixed
    config = json.loads((folder / "config.json").read_text())
    assert config[BLOCKS_IN_8_BITS] == report["blocks_in_8_bits"]
    assert 0 < report["share_in_8_bits"] < 1
    assert report["calibration_loss"] - report["calibration_loss_int8"] <= 0.05
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] == "group"
    target = load_model(str(folder), device="cpu")
    assert target.exact
    assert target.program is not None
    layers = {name: each.laid_out for name, each in target.model.named_modules() if isinstance(each, LaidOutLinear)}
    head = layers.pop("lm_head")
    assert head.order is None
    assert head.eight == head.lines
    assert {name: each.eight // 2 for name, each in layers.items()} == report["blocks_in_8_bits"]
    tensors = load_file(folder / "model.safetensors")
    first = tensors["model.layers.0.self_attn.q_proj.weight_g_idx"]
    assert first.equal(tensors["model.layers.0.self_attn.k_proj.weight_g_idx"])
    assert sorted(first.tolist()) == [column // 64 for column in range(256)]


def test_program_that_is_slightly_wrong_is_found(monkeypatch, mixed):
    """Small differences become large ones where tokens have 4 bits, but not as large as a tenth of an attention's scale."""

    def wrong(target):
        layers = [layer.self_attn for layer in target.model.model.layers]
        for layer in layers:
            layer.scaling *= 1.1
        try:
            return program_of(target)
        finally:
            for layer in layers:
                layer.scaling /= 1.1

    monkeypatch.setattr(probe, "program_of", wrong)
    assert load_model(str(mixed[0]), device="cpu").program is None


@pytest.mark.deep
def test_trie_calibrates_as_its_corpus_does(cli, tmp_path, texts, mixed):
    assert cli("build-trie", texts, "--tokenizer", DEMO, "-o", tmp_path / "t.trie").code == 0
    given = "--weights", "int4", "--activations", "mixed", "--calibration", tmp_path / "t.trie", "--loss-budget", 0.5
    shown = cli("quantize", "--model", DEMO, "-o", tmp_path / "new", *given)
    assert shown.code == 0, shown.err
    assert "blocks in 8 bits, others in 4" in shown.out
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "new", mixed[0]))
    assert ours.keys() == theirs.keys()
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def test_where_there_is_no_kernel_it_is_refused(cli, tmp_path, monkeypatch, texts, mixed):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(ModelError, match="tokens have 4 and 8 bits, for which there are kernels for x86 CPUs with AVX2 only"):
        load_model(str(mixed[0]), device="cpu")
    given = "quantize", "--model", DEMO, "-o", tmp_path / "a", "--activations", "mixed", "--calibration", texts
    cli.fails(2, *given, saying=["there is no kernel for this CPU"])


def test_command_refuses_what_makes_no_sense(cli, tmp_path, texts, make_trie):
    given = "quantize", "--model", DEMO, "-o", tmp_path / "a"
    cli.fails(2, *given, "--activations", "int4", saying=["--activations int4: choose none, int8, mixed"])
    cli.fails(2, *given, "--activations", "mixed", saying=["--calibration FILE"])
    cli.fails(2, *given, "--loss-budget", 0.1, saying=["--loss-budget is of --activations mixed"])
    mixed = *given, "--activations", "mixed", "--calibration"
    cli.fails(1, *mixed, tmp_path / "none.jsonl", saying=["none.jsonl"])
    cli.fails(1, *mixed, make_trie([[5, 6, 7]]).path, saying=["corpus.trie: built for tokenizer 01234567"])
    assert not (tmp_path / "a").exists()
