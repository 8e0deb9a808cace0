"""What a config says of a model, whatever its class has and lacks."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lookahead import GenerationParams, LookaheadEngine
from lookahead.errors import ModelError
from lookahead.forward.target import NO_LIMIT, longest_text
from lookahead.models.load import estimated_profile
from lookahead.models.options import ModelOptions


def scaled(kind, factor, original=None, **others):
    stated = {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_type": kind, "factor": factor, "rope_theta": 1e4, **stated, **others}


LONG = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LAYERS = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": scaled("linear", 8.0)}
LIMITS = {  # kind of model, max_position_embeddings, rope_parameters, tokens
    "as it is": ("llama", 4096, None, 4096),
    "default": ("llama", 4096, scaled("default", 4.0), 4096),
    "-1": ("xlnet", None, None, NO_LIMIT),
    "-1 of a class that has it": ("llama", -1, None, NO_LIMIT),
    "-1, scaled": ("llama", -1, scaled("linear", 4.0), NO_LIMIT),
    "none": ("bloom", None, None, NO_LIMIT),
    "linear": ("llama", 4096, scaled("linear", 4.0), 16384),
    "linear, raised": ("llama", 16384, scaled("linear", 4.0, 4096), 16384),
    "dynamic": ("llama", 4096, scaled("dynamic", 2.0), 8192),
    "no factor": ("llama", 4096, scaled("dynamic", None), 4096),
    "yarn": ("qwen2", 32768, scaled("yarn", 4.0, 32768), 131072),
    "yarn alone": ("qwen2", 32768, scaled("yarn", 4.0), 131072),
    "yarn, raised": ("qwen2", 131072, scaled("yarn", 4.0, 32768), 131072),
    "yarn, raised by less": ("qwen3", 40960, scaled("yarn", 4.0, 32768), 131072),
    "yarn of layers": ("olmo3", 65536, scaled("yarn", 8.0, 8192), 65536),
    "llama3": ("llama", 131072, scaled("llama3", 8.0, 8192, **LLAMA3), 131072),
    "llama3, less": ("llama", 131072, scaled("llama3", 32.0, 8192, **LLAMA3), 131072),
    "llama3, not raised": ("llama", 8192, scaled("llama3", 8.0, 8192, **LLAMA3), 65536),
    "longrope by factor": ("phi3", 4096, scaled("longrope", 8.0, 4096, **LONG), 32768),
    "some layers": ("gemma3_text", 131072, LAYERS, 131072),
}


@pytest.mark.parametrize("case", LIMITS)
def test_scaled_positions_reach_as_far_as_the_model_takes(case):
    kind, positions, rope, tokens = LIMITS[case]
    fields = {"max_position_embeddings": positions, "rope_parameters": rope}
    assert longest_text(AutoConfig.for_model(kind, **{name: each for name, each in fields.items() if each})) == tokens


def test_positions_scaled_by_other_fields():
    old = {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert longest_text(AutoConfig.for_model("llama", **old)) == 16384
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **LONG}
    raised = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_parameters": rope}
    assert longest_text(AutoConfig.for_model("phi3", **raised)) == 131072


def test_text_beyond_dynamic_positions_is_decoded_as_generate_does_and_leaves_short_text_alone():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    config = AutoConfig.for_model(
        "llama", max_position_embeddings=16, rope_parameters=scaled("dynamic", 4.0), eos_token_id=None, **sizes
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = LookaheadEngine(model)
    for length, new in ((6, 30), (6, 10), (4, 4), (40, 24), (15, 1)):
        prompt = torch.arange(length)[None] + 5
        expected = model.generate(prompt, max_new_tokens=new, do_sample=False, pad_token_id=0)[0, length:].tolist()
        assert engine.generate(prompt[0].tolist(), GenerationParams(max_new_tokens=new))[0].token_ids == expected


def test_config_without_eos_token_id_is_decoded_and_needs_no_other_field(tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 64, "num_hidden_layers": 2}
    config = AutoConfig.for_model("cpmant", vocab_size=97, prompt_length=4, prompt_types=8, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    expected = model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False, pad_token_id=0)[0, 2:].tolist()
    assert LookaheadEngine(str(tmp_path)).generate([5, 6], GenerationParams(max_new_tokens=4))[0].token_ids == expected


def test_every_config_of_a_causal_model_gives_what_is_read_of_it():
    for of_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config = of_class().get_text_config(decoder=True)
        except Exception:  # transformers has some without defaults
            continue
        assert longest_text(config) > 0, of_class


def test_costs_of_a_model_without_attention_heads_are_not_estimated(tmp_path):
    AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=97).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be estimated"):
        estimated_profile(ModelOptions(str(tmp_path), dtype="auto"), "h100")
