"""Checkpoints that other libraries have quantized. In: a model's config. Out: by whom, and whether drafts can be verified.

transformers loads them by those libraries. Where tokens are quantized too, a small difference becomes a large one: such a model
must give a token the same bits in every forward, or it decodes plainly.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from lookahead.errors import ModelError
from lookahead.forward.target import TargetModel
from lookahead.models.exact import exact_or_plain

# Our own formats, in config.json: the embedding is packed, too; and blocks of tokens that have 8 bits, by names of layers
WITH_EMBEDDING = "pack-quantized-with-embedding"
BLOCKS_IN_8_BITS = "lookahead_blocks_in_8_bits"
TOKENS_TOO = ("fp8", "fbgemm_fp8", "bitnet", "fp_quant")  # methods that quantize tokens


def settings_of(config: Any) -> dict[str, Any]:
    """Return what config.json states about how the weights are quantized; empty if they are not."""
    stated = getattr(config, "quantization_config", None) or {}
    settings = dict(stated if isinstance(stated, dict) else stated.to_dict())
    method = settings.get("quant_method")
    return {**settings, "quant_method": getattr(method, "value", method)} if settings else {}


def check_method(name: str, config: Any) -> None:
    """Raises ModelError for a checkpoint whose method transformers does not know, and would leave out, or that is not named."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    settings = settings_of(config)
    if not settings:
        return
    method = settings.get("quant_method")
    loads_bits = settings.get("load_in_8bit") or settings.get("load_in_4bit")
    if not loads_bits and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelError(
            f"{name}: its weights are quantized by {method}, which transformers cannot load. Give another checkpoint."
        )
    if method == "torchao" and importlib.util.find_spec("torchao") is None:
        raise ModelError(f"{name}: its weights are quantized by torchao, which is not installed: pip install torchao.")


def refuse_own_format(name: str, config: Any) -> None:
    """Raises ModelError for what only a CPU's `packed_model` loads: tokens of 4 and 8 bits, and a packed embedding."""
    own = settings_of(config).get("format") == WITH_EMBEDDING
    if own or getattr(config, BLOCKS_IN_8_BITS, None):
        what = "embedding is packed" if own else "tokens have 4 and 8 bits"
        raise ModelError(
            f"{name}: its {what}, for which there are kernels for x86 CPUs with AVX2 only, without an adapter or --device-map. "
            "Quantize the model without --pack-embedding and --activations mixed."
        )


def quantizes_tokens(settings: dict[str, Any]) -> bool:
    """Tell whether numbers of tokens are quantized as well, so far as the config tells."""
    method = str(settings.get("quant_method"))
    if method == "compressed-tensors":
        return any(group.get("input_activations") for group in (settings.get("config_groups") or {}).values())
    if method == "bitsandbytes":
        return not settings.get("load_in_4bit")
    return method in TOKENS_TOO or (method == "torchao" and "Activation" in str(settings.get("quant_type")))


def exact_where_needed(target: TargetModel, config: Any) -> TargetModel:
    """The same model, loaded from a checkpoint of this config; in mode "plain" if tokens' scores depend on other tokens."""
    settings = settings_of(config)
    if not settings:
        return target
    if target.mode != "plain" and quantizes_tokens(settings) and not target.exact:
        target = exact_or_plain(target)
    if target.mode != "plain":
        return target
    return dataclasses.replace(target, reason=f"weights of {settings.get('quant_method')}: {target.reason}")
