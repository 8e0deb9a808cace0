"""Checkpoints of packed weights (packed.py) loaded into panels, without compressed-tensors. In: a folder. Out: a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lookahead.backends.cpu.embedding import in_panels, may_be_in_panels
from lookahead.backends.cpu.linear import LaidOutLinear, plain_linears
from lookahead.backends.cpu.packed import ACTIVATIONS_FIELD, BLOCK, EMBEDDING_BITS, is_packed, read_packed
from lookahead.backends.cpu.quantize import QUANTIZE
from lookahead.backends.cpu.quantized import GROUP, Quantized, QuantizedPanels
from lookahead.errors import ModelError
from lookahead.models.checkpoint import check_weights, damaged_of, refuse_weights
from lookahead.models.prequantized import BLOCKS_IN_8_BITS


def packed_model(name: str, config: Any, dtype: torch.dtype, wishes: dict[str, Any]) -> Any | None:
    """The causal LM of a folder; None for one that transformers is to load. Its quantized linear layers are in panels, or
    floats where tokens are not to be quantized.

    wishes: further arguments of `from_pretrained`. Raises ModelError for a checkpoint that is damaged or another model's.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder, known = Path(name), AutoModelForCausalLM._model_mapping
    weights_only = getattr(config, ACTIVATIONS_FIELD, None) == "none"
    if not (folder.is_dir() and is_packed(config) and type(config) in known and (weights_only or QuantizedPanels.takes_here())):
        return None
    read = read_packed(folder)
    if read is None:
        return None
    matrices, state = read
    if weights_only:
        state |= {f"{layer}.weight": matrix.to_dense().to(dtype) for layer, matrix in matrices.items()}
        matrices = {}
    refuse_weights(name, {"not finite": damaged_of((layer, matrix.scales) for layer, matrix in matrices.items())[0]})
    nothing = torch.zeros((), dtype=dtype)  # stands for the weights, which come as panels
    state |= {f"{layer}.weight": nothing.expand(matrix.numbers.shape) for layer, matrix in matrices.items()}
    config = copy.deepcopy(config)
    del config.quantization_config
    model, found = known[type(config)].from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, **wishes
    )
    check_weights(name, model, found, {f"{layer}.weight" for layer in matrices})
    in_8_bits = getattr(config, BLOCKS_IN_8_BITS, None) or {}
    names = {id(layer): path for path, layer in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table = matrices.pop(names[id(embedding)], None)
    of_table = None if table is None else QuantizedPanels(table, dtype)
    for users in plain_linears(model):
        for module, attribute in users:
            layer = getattr(module, attribute)
            if of_table is not None and layer is head and head.weight is embedding.weight:
                setattr(module, attribute, LaidOutLinear(layer, of_table))
                continue
            matrix = matrices.pop(names[id(layer)], None)
            if matrix is not None:
                blocks = in_8_bits.get(names[id(layer)])
                panels = QuantizedPanels(matrix, dtype, None if blocks is None else blocks * BLOCK // GROUP)
                setattr(module, attribute, LaidOutLinear(layer, panels))
    if matrices:
        raise ModelError(f"{name}: {min(matrices)} is quantized, and no linear layer of this model.")
    bits = getattr(config, EMBEDDING_BITS, None)
    if of_table is not None:
        if not (may_be_in_panels(embedding) and in_panels(embedding, of_table)):
            embedding.weight = torch.nn.Parameter(of_table.to_dense(), requires_grad=False)
    elif bits in QUANTIZE and may_be_in_panels(embedding):
        _quantize(embedding, QUANTIZE[bits], model.get_output_embeddings())
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model.requires_grad_(False).eval()


def _quantize(embedding: Any, quantize: Callable[[torch.Tensor], Quantized], head: Any) -> None:
    """The rows of an embedding; those of the output layer where they are the same."""
    panels = QuantizedPanels(quantize(embedding.weight.detach()), embedding.weight.dtype)
    of_head = getattr(head, "laid_out", None)
    if isinstance(of_head, QuantizedPanels) and of_head.weight.equal(panels.weight):
        panels = of_head
    in_panels(embedding, panels)
