"""Checkpoints of packed weights: what quantizing at load gives is what a checkpoint gives, and damage is found."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lookahead.backends.cpu.packed import EMBEDDING_BITS, matrix_of, packed, read_packed, tensors_of, unpacked
from lookahead.backends.cpu.quantized import QuantizedPanels, in_4_bits, in_8_bits
from lookahead.bench.on_model import weight_bytes
from lookahead.errors import ModelError, UsageError
from lookahead.forward.target import TargetModel
from lookahead.models.load import load_model
from lookahead.quantize import write_packed
from lookahead.quantize.write_packed import quantize_checkpoint
from tests.models.lossless import DEMO, answers_of_jobs
from tests.support.cli import write_jsonl
from tests.support.depth import deep

pytestmark = pytest.mark.skipif(not QuantizedPanels.takes_here(), reason="an x86 CPU with AVX2")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The demo model in 4 bits."""
    folder = tmp_path_factory.mktemp("packed") / "four"
    quantize_checkpoint(DEMO, str(folder), "int4")
    return folder


def changed(folder: Path, into: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A copy whose tensors `change` has gone through."""
    shutil.copytree(folder, into)
    tensors = load_file(into / "model.safetensors")
    change(tensors)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return into


def loaded_from_both(stored: Path, original: Path | str, scheme: str) -> tuple[TargetModel, TargetModel]:
    """A stored quantized model and the one that is quantized at load, which must be the same."""
    one, other = load_model(str(stored), device="cpu"), load_model(str(original), device="cpu", quantize=scheme)
    ids = torch.arange(5, 40)[None]
    with torch.inference_mode():
        assert one.model(ids).logits.equal(other.model(ids).logits)
    assert weight_bytes(one.model) == weight_bytes(other.model)
    return one, other


def test_numbers_are_packed_lowest_bits_first():
    numbers = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]], dtype=torch.uint8)
    assert packed(numbers, 4).tolist() == [[0x87654321 - (1 << 32), 9]]
    assert packed(numbers[:, :5], 8).tolist() == [[0x04030201, 5]]
    for bits in (4, 8):
        assert unpacked(packed(numbers, bits), bits, 9).equal(numbers)


@pytest.mark.parametrize("quantize", [in_8_bits, in_4_bits])
@pytest.mark.parametrize(("outputs", "inner"), [(100, 192), (3, 64), (64, 128)])
def test_matrix_comes_back_from_its_tensors(quantize, outputs, inner):
    matrix = quantize(torch.randn(outputs, inner))
    tensors = {name.rpartition("weight_")[2]: tensor for name, tensor in tensors_of("a", matrix).items()}
    back = matrix_of(tensors, 8 if matrix.zeros is None else 4)
    assert back.numbers.equal(matrix.numbers)
    assert back.scales.equal(matrix.scales)
    assert back.zeros is matrix.zeros is None or back.zeros.equal(matrix.zeros)


def test_larger_groups_and_symmetric_weights_are_read_and_others_left():
    matrix = in_4_bits(torch.randn(8, 256))
    tensors = {name.rpartition("weight_")[2]: tensor for name, tensor in tensors_of("a", matrix).items()}
    del tensors["zero_point"]
    tensors["scale"] = tensors["scale"][:, ::2]  # groups of 128
    read = matrix_of(tensors, 4)
    weight = (matrix.numbers.float() - 8).view(8, 2, 128) * tensors["scale"].float()[..., None]
    assert read.to_dense().equal(weight.view(8, 256))
    assert matrix_of({**tensors, "scale": torch.rand(8, 8).bfloat16()}, 4) is None, "groups of 32"
    assert matrix_of({**tensors, "scale": torch.rand(8, 2)}, 4) is None, "scales that bfloat16 does not hold"


def test_embedding_of_another_checkpoint_stays_as_it_is(tmp_path, four):
    """One whose config.json does not say that it is to be quantized."""
    shutil.copytree(four, tmp_path / "other")
    said = json.loads((tmp_path / "other" / "config.json").read_text())
    assert said.pop(EMBEDDING_BITS) == 8, "it is the output layer's"
    (tmp_path / "other" / "config.json").write_text(json.dumps(said))
    embedding = load_model(str(tmp_path / "other"), device="cpu").model.get_input_embeddings()
    assert type(embedding) is torch.nn.Embedding
    assert embedding.weight.dtype == torch.float32


@pytest.mark.parametrize("scheme", [*deep(["int8"]), "int4"])
def test_checkpoint_is_the_model_that_was_quantized_at_load(tmp_path, scheme):
    """Embeddings of the demo model are tied: its output layer becomes a matrix of its own."""
    written = quantize_checkpoint(DEMO, str(tmp_path / "new"), scheme)
    assert written.bytes_after < written.bytes_before * (0.5 if scheme == "int4" else 0.7)
    assert {layer.bits for layer in written.layers} == ({8} if scheme == "int8" else {4, 8})
    assert max(layer.error for layer in written.layers) < (0.01 if scheme == "int8" else 0.1)
    stored, at_load = loaded_from_both(tmp_path / "new", DEMO, scheme)
    assert stored.linear == scheme
    assert stored.exact
    assert stored.program is not None
    assert stored.model.get_input_embeddings().laid_out is stored.model.get_output_embeddings().laid_out
    assert stored.eos_token_ids == at_load.eos_token_ids
    assert (tmp_path / "new" / "tokenizer.json").exists()


def test_checkpoint_of_several_files_is_read_as_one(monkeypatch, tmp_path, four):
    monkeypatch.setattr(write_packed, "SHARD_BYTES", 1 << 20)
    quantize_checkpoint(DEMO, str(tmp_path / "new"), "int4")
    names = sorted(path.name for path in (tmp_path / "new").glob("*.safetensors"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    one, several = read_packed(four), read_packed(tmp_path / "new")
    assert one[0].keys() == several[0].keys()
    assert all(one[0][name].numbers.equal(several[0][name].numbers) for name in one[0])
    assert load_model(str(tmp_path / "new"), device="cpu").linear == "int4"


def test_weights_whose_inputs_fill_no_groups_have_8_bits_and_routers_stay(tiny_model, tmp_path):
    """The tiny model: inputs of 32 but for down_proj, of 64."""
    copy.deepcopy(tiny_model("llama")).save_pretrained(tmp_path / "llama")
    layers = quantize_checkpoint(str(tmp_path / "llama"), str(tmp_path / "new"), "int4").layers
    assert {layer.name for layer in layers if layer.bits == 4} == {f"model.layers.{n}.mlp.down_proj" for n in range(3)}
    said = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.q_proj" in said["config_groups"]["group_1"]["targets"]
    assert load_model(str(tmp_path / "new"), device="cpu").exact


def test_damage_is_named(tmp_path, four):
    layer = "model.layers.0.mlp.up_proj"
    without = changed(four, tmp_path / "a", lambda t: t.pop(f"{layer}.weight_scale"))
    short = changed(four, tmp_path / "b", lambda t: t.update({f"{layer}.weight_packed": t[f"{layer}.weight_packed"][:8]}))
    no_norm = changed(four, tmp_path / "c", lambda t: t.pop("model.norm.weight"))
    shutil.copytree(four, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes((four / "model.safetensors").read_bytes()[:-9])
    for folder, saying in (
        (without, rf"a: the weights of {layer} are damaged \('scale'\)"),
        (short, f"b: the weights of {layer} are damaged"),
        (no_norm, r"c: its weights are not those of this model \(missing: model\.norm\.weight"),
        (tmp_path / "cut", r"model\.safetensors: cannot be read as safetensors"),
    ):
        with pytest.raises(ModelError, match=saying):
            load_model(str(folder), device="cpu")


def test_what_cannot_be_quantized_is_refused(tmp_path, four):
    with pytest.raises(UsageError, match="--weights int3: choose int8, int4"):
        quantize_checkpoint(DEMO, str(tmp_path / "new"), "int3")
    with pytest.raises(UsageError, match="is there already"):
        quantize_checkpoint(DEMO, str(four), "int4")
    with pytest.raises(ModelError, match="four: is quantized already"):
        quantize_checkpoint(str(four), str(tmp_path / "new"), "int4")
    shutil.copytree(DEMO, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelError, match=r"empty: no weights in this folder \(looked for \*\.safetensors\)"):
        quantize_checkpoint(str(tmp_path / "empty"), str(tmp_path / "new"), "int4")
    other = changed(Path(DEMO), tmp_path / "other", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"other: no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        quantize_checkpoint(str(other), str(tmp_path / "new"), "int4")
    assert not (tmp_path / "new").exists(), "nothing half written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "other"]


@pytest.mark.deep
def test_report_says_what_was_lost(cli, tmp_path):
    text = write_jsonl(tmp_path / "held.jsonl", [{"text": f"Question: {n} pears cost {2 * n}.\nAnswer: {n}"} for n in range(9)])
    out = tmp_path / "new"
    given = ("quantize", "--model", DEMO, "-o", out, "--weights", "int4", "--text", text, "--rows", 5)
    report = cli(*given, "--json").json
    assert report["weights"] == "int4"
    assert report["bytes_after"] == pytest.approx((out / "model.safetensors").stat().st_size, rel=0.01)
    assert len(report["layers"]) == 43
    assert abs(report["loss_after"] - report["loss_before"]) < 0.3
    assert report["answers"]["answers"] == 5
    assert 0 <= report["answers"]["identical"] <= 5
    shutil.rmtree(out)
    shown = cli(*given)
    assert shown.code == 0
    for line in ("43 layers in int4", "RMS error", "nats a token", "of 5 greedy ones stay the same", "Next: lookahead bench"):
        assert line in " ".join(shown.out.split())


def test_command_refuses_what_makes_no_sense(cli, tmp_path):
    cli.fails(2, "quantize", "--weights", "int4", saying=["name a model and a new folder"])
    cli.fails(2, "quantize", "--model", DEMO, "-o", tmp_path / "a", "--rows", 5, saying=["--text FILE"])
    cli.fails(2, "quantize", "--model", DEMO, "-o", tmp_path, "--weights", "int2", saying=["choose int8, int4"])
    cli.fails(1, "quantize", "--model", tmp_path, "-o", tmp_path / "a", saying=["no config.json"])
    given = "generate", "--model", DEMO, "--quantize", "int2", "--input", "samples/prompts.jsonl"
    cli.fails(2, *given, saying=["--quantize int2: choose none, int8, int4"])


@pytest.mark.deep
def test_job_of_a_quantized_model_answers_the_same_with_drafts(cli, tmp_path, four):
    stored, at_load = ("--model", four), ("--model", DEMO, "--quantize", "int4")
    jobs = (*stored, "--strategy", "off"), (*stored, "--batch-size", 8), at_load, ("--model", DEMO)
    plain, drafted, quantized, other = answers_of_jobs(cli, tmp_path, jobs)
    assert plain == drafted == quantized
    assert other != plain, "it is another model"


@pytest.mark.deep
@pytest.mark.parametrize(("scheme", "bar"), [("int8", 0.55), ("int4", 0.32)])
def test_packed_embedding_is_that_of_a_model_quantized_at_load(tmp_path, scheme, bar):
    """A Llama of 12M numbers with an output layer of its own; the bars are of bfloat16."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 3072}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, tie_word_embeddings=False)).bfloat16()
    model.save_pretrained(tmp_path / "old")
    written = quantize_checkpoint(str(tmp_path / "old"), str(tmp_path / "new"), scheme, pack_embedding=True)
    assert written.bytes_after <= bar * written.bytes_before
    assert "model.embed_tokens" in {layer.name for layer in written.layers}
    loaded_from_both(tmp_path / "new", tmp_path / "old", scheme)


@pytest.mark.deep
def test_packed_embedding_that_is_tied_stays_tied(tmp_path, monkeypatch):
    written = quantize_checkpoint(DEMO, str(tmp_path / "new"), "int4", pack_embedding=True)
    assert "lm_head" not in {layer.name for layer in written.layers}
    stored, _ = loaded_from_both(tmp_path / "new", DEMO, "int4")
    assert stored.model.get_input_embeddings().laid_out is stored.model.get_output_embeddings().laid_out
    with pytest.raises(Exception, match=r"compressed|pack-quantized-with-embedding"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(ModelError, match="new: its embedding is packed, for which there are kernels for x86 CPUs"):
        load_model(str(tmp_path / "new"), device="cpu")
