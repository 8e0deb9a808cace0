"""Checkpoints of other libraries: one that cannot be loaded is refused in a line, one that is not exact decodes plainly."""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from lookahead.errors import ModelError
from lookahead.models.load import load_model
from lookahead.models.prequantized import exact_where_needed, quantizes_tokens
from lookahead.models.probe import probed
from tests.support.cli import Cli

DEMO = "samples/demo-model"
LIBRARIES = {"torchao": "torchao", "gptq": "optimum", "awq": "gptqmodel", "bitsandbytes": "bitsandbytes"}
WITH_TOKENS: tuple[dict[str, Any], ...] = (
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": {"num_bits": 8}}}},
    {"quant_method": "bitsandbytes", "load_in_8bit": True},
    {"quant_method": "fp8"},
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8DynamicActivationInt8WeightConfig"}}},
)
WEIGHTS_ONLY: tuple[dict[str, Any], ...] = (
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": None}}},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
)


def said_to_be(folder: Path, settings: dict[str, Any]) -> Path:
    """The demo model, whose config says that it is quantized."""
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def test_method_that_transformers_does_not_know_is_refused(tmp_path, capsys):
    """It would take the packed numbers for weights."""
    folder = said_to_be(tmp_path / "odd", {"quant_method": "oddly"})
    with pytest.raises(ModelError, match="odd: its weights are quantized by oddly, which transformers cannot load"):
        load_model(str(folder), device="cpu")
    given = "generate", "--model", folder, "--input", "samples/prompts.jsonl", "-o", tmp_path / "out.jsonl"
    Cli(capsys).fails(1, *given, saying=["quantized by oddly"])


@pytest.mark.parametrize("method", LIBRARIES)
def test_library_that_is_not_installed_is_named(tmp_path, method):
    if importlib.util.find_spec(LIBRARIES[method]):
        pytest.skip(f"{LIBRARIES[method]} is installed")
    others = {"torchao": WEIGHTS_ONLY[3], "bitsandbytes": WITH_TOKENS[1]}
    settings = others.get(method, {"quant_method": method, "bits": 4, "group_size": 128})
    with pytest.raises(ModelError, match=f"pip install .*{LIBRARIES[method]}"):
        load_model(str(said_to_be(tmp_path / "model", settings)), device="cpu")


@pytest.mark.parametrize("settings", WITH_TOKENS)
def test_model_that_quantizes_tokens_decodes_plainly_unless_it_is_exact(tiny_model, settings):
    config = SimpleNamespace(quantization_config=settings)
    assert quantizes_tokens(settings)
    unlike = dataclasses.replace(probed(tiny_model("llama")), attends_by_op=False, program=None)  # not in a fixed order
    plain = exact_where_needed(unlike, config)
    assert plain.mode == "plain"
    assert plain.reason.startswith(f"weights of {settings['quant_method']}: quantized, and not the same bits in every forward")
    assert exact_where_needed(dataclasses.replace(unlike, exact=True), config).mode == "packed"


@pytest.mark.parametrize("settings", WEIGHTS_ONLY)
def test_model_whose_weights_alone_are_quantized_verifies_drafts(tiny_model, settings):
    assert not quantizes_tokens(settings)
    target = dataclasses.replace(probed(tiny_model("llama")), attends_by_op=False, program=None)
    assert exact_where_needed(target, SimpleNamespace(quantization_config=settings)) is target
    assert exact_where_needed(target, SimpleNamespace()) is target


@pytest.mark.parametrize(
    ("kind", "mode"), [("Int8WeightOnlyConfig", "packed"), ("Int8DynamicActivationInt8WeightConfig", "plain")]
)
def test_model_of_torchao(kind, mode):
    quantization = pytest.importorskip("torchao.quantization")
    settings = TorchAoConfig(getattr(quantization, kind)())
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, quantization_config=settings).eval()
    target = exact_where_needed(probed(model), model.config)
    assert target.mode == mode
    assert mode == "packed" or target.reason.startswith("weights of torchao: no packed (scores differ")
