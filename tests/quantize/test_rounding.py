"""Rounding: outliers move from norms into weights, and errors of weights compensate each other on calibration texts."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lookahead.backends.cpu.equalize import equalize, factors_of, norms_before
from lookahead.backends.cpu.linear import LaidOutLinear
from lookahead.backends.cpu.quantized import QuantizedPanels, in_4_bits, in_8_bits
from lookahead.bench.quantized import loss_of
from lookahead.models.load import empty_model, load_model
from lookahead.quantize import activation_stats as moments
from lookahead.quantize.activation_stats import Moments, input_sizes
from lookahead.quantize.rounding import quantized
from lookahead.tokenizer import load_tokenizer
from tests.architectures import tiny_config
from tests.support.cli import write_jsonl
from tests.support.depth import deep

DEMO = "samples/demo-model"
# Norms whose outputs linear layers read.
NORMS = {"llama": 6, "qwen3": 6, "opt": 6, "phi": 3, "cohere2": 3, "gpt_neox": 6, "starcoder2": 6}
KEPT = ("gemma3", "olmo2")  # weights that are added to 1; outputs that are added to what came before


def with_outliers(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for layer in model.modules():
        if getattr(layer, "weight", None) is not None and layer.weight.ndim == 1:
            layer.weight.data[[1, -3, -7]] *= 24
    return model


@pytest.mark.parametrize(
    "name", ["llama", "opt", "phi", "gemma3", *deep(["qwen3", "cohere2", "gpt_neox", "starcoder2", "olmo2"])]
)
def test_equalized_model_is_the_same_function_to_the_bit(tiny_model, name):
    model = with_outliers(tiny_model(name))
    readers = norms_before(model)
    assert len(readers) == NORMS.get(name, 0)
    assert readers == norms_before(empty_model(tiny_config(name)))
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        before = model(ids).logits
        equalize(model)
        assert model(ids).logits.equal(before)
    for norm, layers in readers.items():
        assert model.get_submodule(norm).weight.abs().max() < 24, norm
        assert layers


def test_factors_are_powers_of_two_for_outliers_alone():
    sizes = torch.tensor([1.0, 0.5, 24.0, 1.9, 1.2, 1e-9, -5.0])
    factors = factors_of(sizes)
    assert factors.tolist() == [1, 1, 4, 1, 1, 1, 2]
    assert factors_of(torch.tensor([1.0, 1.5, 0.2])) is None
    assert factors_of(torch.zeros(3)) is None


def test_norm_that_something_else_reads_is_left_alone(tiny_model):
    model = copy.deepcopy(tiny_model("llama"))
    layer = model.model.layers[1].mlp
    forward = layer.forward
    layer.forward = lambda x: forward(x) + x
    assert "model.layers.1.post_attention_layernorm" not in norms_before(model)
    assert len(norms_before(model)) == 5


def correlated(inner: int) -> torch.Tensor:
    torch.manual_seed(0)
    tokens = torch.randn(4000, 24) @ torch.randn(24, inner) + 0.3 * torch.randn(4000, inner)
    tokens[:, 7] *= 10
    return tokens


@pytest.mark.parametrize(("bits", "inner"), [(4, 256), (8, 256), (8, 200)])
def test_errors_compensate_each_other(bits, inner):
    """Products on such inputs are nearer, in the same format: less than half of the squared error."""
    tokens, weight = correlated(inner), torch.randn(70, inner)
    nearest = in_4_bits(weight) if bits == 4 else in_8_bits(weight)
    ours = quantized(weight, bits, tokens.T @ tokens / len(tokens))
    assert ours.numbers.dtype == nearest.numbers.dtype
    assert ours.scales.shape == nearest.scales.shape
    assert bits == 8 or (ours.zeros is not None and ours.zeros.dtype == torch.uint8)
    errors = [((each.to_dense() - weight) @ tokens.T).square().mean() for each in (ours, nearest)]
    assert errors[0] < 0.5 * errors[1]
    if bits == 8:
        assert ours.scales.equal(nearest.scales)
        assert ours.numbers.abs().max() <= 127
    else:
        assert ours.scales.bfloat16().float().equal(ours.scales)


def test_without_moments_weights_are_rounded_to_the_nearest():
    weight = torch.randn(9, 128)
    for moments_of_nothing in (None, torch.zeros(128, 128)):
        assert quantized(weight, 4, moments_of_nothing).to_dense().equal(in_4_bits(weight).to_dense())
    assert quantized(weight, 8).to_dense().equal(in_8_bits(weight).to_dense())
    broken = torch.full((128, 128), torch.nan)
    assert quantized(weight, 4, broken).to_dense().equal(in_4_bits(weight).to_dense())


class Three(nn.Module):
    """a and b read the same input, c another one; d fills no group of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(64, 8), nn.Linear(64, 8), nn.Linear(128, 8), nn.Linear(60, 8)

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize("most", [1 << 30, 64 * 64 * 4])
def test_moments_are_means_over_all_texts(monkeypatch, most):
    monkeypatch.setattr(moments, "HELD_BYTES", most)
    model, runs = Three(), []
    texts = [(torch.randn(1, n, 64), torch.randn(1, n, 128)) for n in (3, 5)]

    def run():
        runs.append(1)
        with torch.inference_mode():
            for x, y in texts:
                model.a(x), model.b(x), model.c(y), model.d(x[..., :60])

    asked = Moments(model, run, ["a", "b", "c", "d", "other"])
    wide, long = (torch.cat([text[n][0] for text in texts]) for n in (0, 1))
    for name, tokens in (("a", wide), ("b", wide), ("c", long)):
        found = asked.of(name)
        assert found is not None
        expected = tokens.T @ tokens / (8 + tokens.shape[1])
        expected.diagonal().copy_(tokens.square().mean(0))
        torch.testing.assert_close(found, expected)
        assert found is asked.of(name)
    assert asked.of("d") is None
    assert asked.of("other") is None
    assert len(runs) == (1 if most == 1 << 30 else 3)
    if most == 1 << 30:
        assert asked.of("a") is asked.of("b")
    sizes = input_sizes(model, run)
    torch.testing.assert_close(sizes.squares["c"], long.square().mean(0))
    torch.testing.assert_close(sizes.largest["a"], wide.abs().amax(0))
    assert set(sizes.largest) == {"a", "b", "c"}


@pytest.fixture(scope="module")
def outliers(tmp_path_factory):
    """The demo model, 3 channels of each norm in a layer 24 times as large, and the weights behind them smaller."""
    folder = tmp_path_factory.mktemp("outliers") / "model"
    folder.mkdir()
    tensors = load_file(f"{DEMO}/model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for layer in range(6):
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            channels = torch.randperm(256, generator=generator)[:3]
            tensors[f"model.layers.{layer}.{norm}.weight"][channels] *= 24
            for reader in readers:
                tensors[f"model.layers.{layer}.{reader}.weight"][:, channels] /= 24
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for path in Path(DEMO).glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def questions_with_answers() -> list[str]:
    """Held-out questions, with the demo model's answers."""
    prompts, logged = (
        [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        for path in ("samples/prompts.jsonl", "samples/logged.jsonl")
    )
    return [prompts[row["id"] - 1]["prompt"] + row["text"] for row in logged]


def loss(folder: Path | str, quantize: str = "none") -> float:
    """nats per token of the last 40, in float32."""
    target = load_model(str(folder), dtype="float32", device="cpu", quantize=quantize, engine_mode="modules")
    tokenizer = load_tokenizer(DEMO)
    return loss_of(target, [tokenizer(text)["input_ids"] for text in questions_with_answers()[60:]]) or 0.0


@pytest.mark.deep
@pytest.mark.skipif(not QuantizedPanels.takes_here(), reason="an x86 CPU with AVX2")
def test_calibrated_weights_lose_less(cli, tmp_path, outliers):
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in questions_with_answers()[:60]])
    assert cli("quantize", "--model", outliers, "-o", tmp_path / "a", "--weights", "int4", "--calibration", texts).code == 0
    original, nearest, ours = loss(outliers), loss(outliers, "int4"), loss(tmp_path / "a")
    assert ours - original < 0.8 * (nearest - original), (original, nearest, ours)


def test_weights_only(cli, tmp_path, monkeypatch):
    """Layers are floats once they are loaded, on any CPU: those of the written numbers."""
    shown = cli("quantize", "--model", DEMO, "-o", tmp_path / "a", "--weights", "int4", "--activations", "none")
    assert shown.code == 0, shown.err
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    target = load_model(str(tmp_path / "a"), dtype="float32", device="cpu")
    layer = target.model.model.layers[2].mlp.up_proj
    assert not isinstance(getattr(layer, "laid_out", None), QuantizedPanels)
    assert isinstance(layer, LaidOutLinear | nn.Linear)
    original = load_file(f"{DEMO}/model.safetensors")
    torch.testing.assert_close(
        layer.weight.data, in_4_bits(original["model.layers.2.mlp.up_proj.weight"]).to_dense(), rtol=0, atol=0
    )
    embedding = target.model.get_input_embeddings().weight.data
    assert embedding.equal(original["model.embed_tokens.weight"].float())
