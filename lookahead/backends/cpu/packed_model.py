"""Checkpoints of packed weights (packed.py) loaded into panels, without compressed-tensors. In: a folder. Out: a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lookahead.backends.cpu.embedding import in_panels, may_be_in_panels
from lookahead.backends.cpu.linear import LaidOutLinear, plain_linears
from lookahead.backends.cpu.packed import ACTIVATIONS_FIELD, BLOCK, EMBEDDING_BITS, FORMAT, METHOD, read_packed
from lookahead.backends.cpu.panels import Panels
from lookahead.backends.cpu.quantize import QUANTIZE
from lookahead.backends.cpu.quantized import GROUP, Quantized, QuantizedPanels
from lookahead.errors import ModelError
from lookahead.models.checkpoint import check_weights, damaged_of, refuse_weights
from lookahead.models.prequantized import BLOCKS_IN_8_BITS, WITH_EMBEDDING, settings_of


def packed_model(name: str, config: Any, dtype: torch.dtype, wishes: dict[str, Any]) -> Any | None:
    """The causal LM of a folder; None for one that transformers is to load. Its quantized linear layers are in panels, or
    floats where tokens are not to be quantized.

    wishes: further arguments of `from_pretrained`. Raises ModelError for a checkpoint that is damaged or another model's.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder, known = Path(name), AutoModelForCausalLM._model_mapping
    weights_only = getattr(config, ACTIVATIONS_FIELD, None) == "none"
    settings, may_be = settings_of(config), weights_only or QuantizedPanels.takes_here()
    is_packed = settings.get("quant_method") == METHOD and settings.get("format") in (FORMAT, WITH_EMBEDDING)
    if not (folder.is_dir() and is_packed and type(config) in known and may_be):
        return None
    read = read_packed(folder)
    if read is None:
        return None
    matrices, state = read
    if weights_only:
        state |= {f"{layer}.weight": matrix.to_dense().to(dtype) for layer, matrix in matrices.items()}
        matrices = {}
    refuse_weights(name, {"not finite": damaged_of((layer, matrix.scales) for layer, matrix in matrices.items())[0]})
    config = copy.deepcopy(config)
    del config.quantization_config
    in_8_bits = getattr(config, BLOCKS_IN_8_BITS, None) or {}
    panels = dict[str, Panels]()
    for layer in list(matrices):
        blocks = in_8_bits.get(layer)
        panels[layer] = QuantizedPanels(matrices.pop(layer), dtype, None if blocks is None else blocks * BLOCK // GROUP)
    model, has_table = model_of(name, config, state, panels, dtype, wishes)
    bits, embedding = getattr(config, EMBEDDING_BITS, None), model.get_input_embeddings()
    if not has_table and bits in QUANTIZE and may_be_in_panels(embedding):
        _quantize(embedding, QUANTIZE[bits], model.get_output_embeddings())
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def model_of(
    name: str,
    config: Any,
    state: dict[str, torch.Tensor],
    panels: dict[str, Panels],
    dtype: torch.dtype,
    wishes: dict[str, Any],
) -> tuple[Any, bool]:
    """(a causal LM; whether its embedding is one of `panels`). panels: weights of linear layers and of the embedding, by the
    names of layers. state: the other weights. wishes: as of `packed_model`, which also tells what is raised.
    """
    from transformers import AutoModelForCausalLM

    nothing = torch.zeros((), dtype=dtype)  # stands for the weights that are in panels
    state = state | {f"{layer}.weight": nothing.expand(each.outputs, each.inner) for layer, each in panels.items()}
    model, found = AutoModelForCausalLM._model_mapping[type(config)].from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, **wishes
    )
    check_weights(name, model, found, {f"{layer}.weight" for layer in panels})
    names, left = {id(layer): path for path, layer in model.named_modules()}, set(panels)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table = panels.get(names[id(embedding)])
    left.discard(names[id(embedding)])
    for users in plain_linears(model):
        for module, attribute in users:
            layer = getattr(module, attribute)
            is_table = layer is head and head.weight is embedding.weight
            weight = table if is_table and table is not None else panels.get(names[id(layer)])
            if weight is not None:
                setattr(module, attribute, LaidOutLinear(layer, weight))
                left.discard(names[id(layer)])
    if left:
        raise ModelError(f"{name}: {min(left)} is quantized, and no linear layer of this model.")
    if table is not None and not (may_be_in_panels(embedding) and in_panels(embedding, table)):
        embedding.weight = torch.nn.Parameter(table.to_dense(), requires_grad=False)
    return model.requires_grad_(False).eval(), table is not None


def _quantize(embedding: Any, quantize: Callable[[torch.Tensor], Quantized], head: Any) -> None:
    """The rows of an embedding; those of the output layer where they are the same."""
    panels = QuantizedPanels(quantize(embedding.weight.detach()), embedding.weight.dtype)
    of_head = getattr(head, "laid_out", None)
    if isinstance(of_head, QuantizedPanels) and of_head.weight.equal(panels.weight):
        panels = of_head
    in_panels(embedding, panels)
