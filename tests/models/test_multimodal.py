"""Multimodal checkpoints answer text as the whole model does on its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from lookahead import GenerationParams, LookaheadEngine
from lookahead.errors import ModelError
from lookahead.models.load import load_model, random_model
from lookahead.quantize.write_packed import quantize_checkpoint

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
TEXT = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0}
VISION = {**SIZES, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
CLIP, SIGLIP = {"model_type": "clip_vision_model"}, {"model_type": "siglip_vision_model"}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
QWEN = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "out_hidden_size": 32, "patch_size": 4}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # mode, text, images
    "gemma3": ("packed", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, VISION),
    "llava": ("packed", {"model_type": "llama"}, {**VISION, **CLIP}),
    "qwen2_vl": ("packed", MROPE, QWEN),
    "qwen2_5_vl": ("packed", MROPE, {**QWEN, "intermediate_size": 32, "fullatt_block_indexes": [0]}),
    "mistral3": ("packed", {"model_type": "mistral"}, {**VISION, "model_type": "pixtral"}),
    "llama4": (
        "packed",
        {"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 16},
        {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "smolvlm": ("packed", {"model_type": "llama"}, VISION),
    "paligemma": ("plain", {"model_type": "gemma"}, {**VISION, **SIGLIP}),  # a prompt sees all of itself
}


def saved(kind: str, folder: Path) -> Any:
    """A model with random weights."""
    _, text, images = MODELS[kind]
    ids = {"bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(
        kind, text_config={**TEXT, **text, **ids}, vision_config=images, image_token_id=90, image_token_index=90, **ids
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.2 if "embed" in name or "lm_head" in name else 1.0)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_text_is_answered_as_the_whole_model_does(kind, tmp_path):
    model = saved(kind, tmp_path)
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13, 5, 6, 7, 40, 41, 42]]
    asked = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = [model.generate(torch.tensor([ids]), **asked)[0, len(ids) :].tolist() for ids in prompts]
    target = load_model(str(tmp_path))
    assert target.mode == MODELS[kind][0]
    results = LookaheadEngine(target).generate(prompts, GenerationParams(max_new_tokens=20))
    assert [result.token_ids for result in results] == expected


def test_whole_model_is_made_of_its_config_and_not_quantized_to_a_folder(tmp_path):
    model = saved("llava", tmp_path / "llava")
    assert type(random_model(str(tmp_path / "llava")).model) is type(model)
    with pytest.raises(ModelError, match="no tensor"):
        quantize_checkpoint(str(tmp_path / "llava"), str(tmp_path / "out"), "int8")


def test_model_that_needs_images_is_refused(tmp_path):
    small = {**SIZES, "num_hidden_layers": 1, "encoder_hidden_size": 16}
    AutoConfig.for_model("blip", text_config=small, vision_config=VISION).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="blip model is not a causal language model"):
        load_model(str(tmp_path))
