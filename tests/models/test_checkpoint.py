"""A checkpoint that is not whole, or of another model, is refused by name before any row is answered."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lookahead.errors import LookaheadError, ModelError
from lookahead.models.checkpoint import check_weights
from lookahead.models.load import load_model, read_config
from lookahead.quantize.write_packed import quantize_checkpoint
from lookahead.tokenizer import load_tokenizer
from tests.architectures import tiny_model
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, questions

WEIGHTS, GATE = "model.safetensors", "model.layers.0.mlp.gate_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path):
    """A copy of the demo model."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def changed(folder: Path, change: Callable[[Tensors], object], file: str = WEIGHTS) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def with_fields(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))


CHANGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "renamed": (lambda tensors: tensors.update(other=tensors.pop(GATE)), f"missing: {GATE}"),
    "missing": (lambda tensors: tensors.pop("model.norm.weight"), "missing: model.norm.weight"),
    "of a layer too many": (
        lambda tensors: tensors.update({"model.layers.99.x.weight": torch.ones(2)}),
        "not in this model: model.layers.99.x.weight",
    ),
    "of a bias that the model has not": (
        lambda tensors: tensors.update({"model.layers.0.mlp.gate_proj.bias": torch.ones(2)}),
        "not in this model: model.layers.0.mlp.gate_proj.bias",
    ),
    "whole numbers": (lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.int32)}), f"not floats: {GATE}"),
    "zero": (lambda tensors: tensors[GATE].zero_(), f"all zero: {GATE}"),
    "a norm of zeros": (
        lambda tensors: tensors["model.layers.0.input_layernorm.weight"].zero_(),
        "all zero: model.layers.0.input_layernorm.weight",
    ),
    "not finite": (lambda tensors: tensors[GATE][3, 4:5].fill_(torch.nan), f"not finite: {GATE}"),
    "infinite": (lambda tensors: tensors["model.norm.weight"][:1].fill_(-torch.inf), "not finite"),
    "of another shape": (lambda tensors: tensors.update({GATE: tensors[GATE][:-1].clone()}), GATE),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weight_that_is_not_right_is_named(folder, name):
    change, saying = CHANGES[name]
    changed(folder, change)
    with pytest.raises(ModelError) as raised:
        load_model(str(folder))
    assert saying in str(raised.value)
    assert str(folder) in str(raised.value)


def test_parts_that_belong_to_no_language_model_are_left_out(folder):
    changed(folder, lambda tensors: tensors.update({"vision.x.weight": torch.ones(2), "v_head.bias": torch.ones(1)}))
    changed(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}))
    assert load_model(str(folder)).name == str(folder)


def test_weights_in_pytorch_files_are_checked_too(folder):
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    tensors["renamed"] = tensors.pop(GATE)
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"missing: model\.layers\.0\.mlp\.gate_proj\.weight"):
        load_model(str(folder))


def test_scale_that_is_not_finite_is_refused(tmp_path):
    quantize_checkpoint(str(MODEL), str(tmp_path / "q"), "int8")
    (file,) = (each.name for each in (tmp_path / "q").glob("*.safetensors"))
    changed(
        tmp_path / "q", lambda tensors: next(t for n, t in tensors.items() if n.endswith("_scale"))[:1].fill_(torch.nan), file
    )
    with pytest.raises(ModelError, match="not finite"):
        load_model(str(tmp_path / "q"))


@pytest.mark.parametrize("architecture", ["afmoe", "gpt_oss", "gemma3", "mamba", "deepseek_v3", "gemma4"])
def test_parts_that_are_zero_before_training_are_no_fault(architecture):
    model = tiny_model(architecture)
    unused = {"missing_keys": set(), "mismatched_keys": set(), "unexpected_keys": {"vision_tower.x.weight"}}
    check_weights(architecture, model, unused)


@pytest.mark.parametrize("name", ["zero", "not finite", "whole numbers"])
def test_damaged_weights_are_not_quantized(folder, tmp_path, name):
    changed(folder, CHANGES[name][0])
    with pytest.raises(ModelError, match="its weights are not those of this model"):
        quantize_checkpoint(str(folder), str(tmp_path / "q"), "int8")
    assert not (tmp_path / "q").exists()


def test_job_with_such_a_model_leaves_no_rows(folder, tmp_path, cli):
    changed(folder, CHANGES["renamed"][0])
    source, out = write_jsonl(tmp_path / "in.jsonl", questions(2)), tmp_path / "out.jsonl"
    cli.fails(1, "generate", "--model", folder, "--input", source, "-o", out, "-q", saying=[GATE, "Get the checkpoint again"])
    assert not out.exists()


@pytest.mark.parametrize("file", ["generation_config.json", "special_tokens_map.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null"])
def test_damaged_file_is_named(folder, file, content):
    (folder / file).write_bytes(content)
    with pytest.raises(ModelError, match=rf"{file}: is damaged"):
        read_config(str(folder))
    with pytest.raises(ModelError, match=f"{file}: is damaged"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "architectures", 5),
        ("config.json", "architectures", [5]),
        ("config.json", "text_config", 5),
        ("config.json", "text_config", {}),
        ("config.json", "num_hidden_layers", 0),
        ("config.json", "num_hidden_layers", -1),
        ("config.json", "hidden_size", 0),
        ("config.json", "vocab_size", -2),
        ("config.json", "max_position_embeddings", 0),
        ("config.json", "eos_token_id", "2"),
        ("generation_config.json", "stop_strings", 5),
        ("generation_config.json", "eos_token_id", "</s>"),
        ("generation_config.json", "bad_words_ids", [5]),
        ("tokenizer_config.json", "model_max_length", "x"),
    ],
)
def test_odd_value_is_named(folder, file, field, value):
    with_fields(folder / file, **{field: value})
    with pytest.raises(LookaheadError) as raised:
        read_config(str(folder))
    assert field in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.sampled_from(["x", "", [], {}, [None], [[1]], 1e308, {"a": 1}])
)
FIELDS = st.sampled_from(
    [
        *(("config.json", name) for name in ("rope_parameters", "layer_types", "hidden_act", "dtype", "tie_word_embeddings")),
        *(("generation_config.json", name) for name in ("suppress_tokens", "temperature", "sequence_bias", "eos_token_id")),
    ]
)


@given(field=FIELDS, value=VALUES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_of_a_field_is_one_error_or_none(tmp_path_factory, field, value):
    folder = Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("odd") / "model"))
    with_fields(folder / field[0], **{field[1]: value})
    with contextlib.suppress(LookaheadError):
        load_model(str(folder))
