"""GGUF files whose blocks stay as they are: the numbers, and so the scores, are those of the file unpacked."""

import gguf
import numpy as np
import pytest
import torch

from lookahead.backends.cpu.block_code import FORMATS
from lookahead.backends.cpu.blocks import BlockPanels
from lookahead.backends.cpu.panels import Panels
from lookahead.bench.on_model import weight_bytes
from lookahead.errors import ModelError
from lookahead.models.load import _whole as unpacked_model
from lookahead.models.load import load_model, read_config
from tests.support.cpu import needs_halves
from tests.support.gguf_files import drawn, write_gguf

pytestmark = pytest.mark.skipif(not BlockPanels.takes_here(), reason="an x86 CPU with AVX2")
NAMES = [form.name for form in FORMATS]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("outputs", "blocks"), [(64, 1), (130, 3)])
def test_weights_are_those_that_the_gguf_package_unpacks(name, outputs, blocks):
    inner = blocks * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0]
    rows, order = drawn(name, outputs, inner), np.random.default_rng(1).permutation(outputs)
    expected = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[name]))[order]
    panels = BlockPanels(name, rows, torch.float32, order)
    assert panels.to_dense().equal(expected)
    ids = torch.tensor([[outputs - 1, 0, 7]])
    assert panels.rows(ids).equal(expected[ids])
    with pytest.raises(IndexError):
        panels.rows(torch.tensor([outputs]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_have_the_bits_of_unpacked_weights(name, dtype):
    inner, order = 768, np.arange(100)
    rows = drawn(name, 100, inner)
    unpacked = Panels(torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[name])).to(dtype))
    panels, bias = BlockPanels(name, rows, dtype, order), torch.randn(100).to(dtype)
    for count in (1, 5, 300):
        tokens = torch.randn(count, inner).to(dtype)
        assert panels.product(tokens, bias).equal(unpacked.product(tokens, bias))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_halves)])
def test_model_has_the_scores_of_the_unpacked_file_and_takes_its_memory(tmp_path, dtype):
    file = tmp_path / "mixed.gguf"
    size = write_gguf(file, NAMES)
    kept = load_model(str(file), dtype=dtype, device="cpu")
    unpacked = unpacked_model(str(file), read_config(str(file)), False, None, dtype=torch.float32)
    unpacked.save_pretrained(tmp_path / "folder")
    folder = load_model(str(tmp_path / "folder"), dtype=dtype, device="cpu")
    ids = torch.arange(5, 60)[None]
    with torch.inference_mode():
        assert kept.model(ids).logits.equal(folder.model(ids).logits)
    assert (kept.linear, kept.mode) == ("gguf", "packed")
    assert kept.program is not None
    assert size <= weight_bytes(kept.model) <= 1.15 * size + 20_000  # norms, and rows that fill panels up


def test_quantizing_at_load_and_formats_of_others_unpack_the_file(tmp_path):
    file = tmp_path / "small.gguf"
    write_gguf(file, ["Q8_0"])
    assert load_model(str(file), device="cpu", quantize="int8").linear == "int8"


def test_damage_is_named(tmp_path):
    def damaged(name, blocks):
        if name == "blk.1.ffn_up.weight":
            blocks[3, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
        return blocks

    file = tmp_path / "damaged.gguf"
    write_gguf(file, ["Q4_0"], damaged)
    with pytest.raises(ModelError, match=r"not finite: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(file), device="cpu")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"cannot be (read as a model|loaded)"):
        load_model(str(file), device="cpu")
