"""Weights in 8 or 4 bits. In: a loaded model. Out: the same, whose weights take about half or a third of the memory.

    int8   weights of 8 bits, a scale for each output
    int4   weights of 4 bits, a scale and a zero point for each 64 inputs of an output; the output layer has 8 bits, as its
           rounding costs most

These are linear layers, and the embedding of tokens, whose outputs are its rows; where it shares the output layer's weight,
both read the same numbers. Outliers of norms' weights are moved into the layers behind them before (equalize.py). Tokens are
quantized to 8 bits in groups of 64 on the way into a product (quantized_code.py). Norms, biases, routers of experts,
embeddings of positions, and experts that are not linear layers stay as they are. A quantized model is another model: it has
answers of its own, and drafts change none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lookahead.backends.cpu.embedding import in_panels, may_be_in_panels
from lookahead.backends.cpu.equalize import equalize
from lookahead.backends.cpu.linear import LaidOutLinear, plain_linears
from lookahead.backends.cpu.quantized import QuantizedPanels, in_4_bits, in_8_bits
from lookahead.errors import ModelError

QUANTIZE = {8: in_8_bits, 4: in_4_bits}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # what configs call how many there are


def bits_of(scheme: str) -> int:
    """Return the bits of most weights."""
    return 8 if scheme == "int8" else 4


def layers_to_quantize(model: Any, scheme: str) -> Iterator[tuple[list[tuple[torch.nn.Module, str]], int]]:
    """Each weight as the (module, name) of the linear layers that use it, and its bits. Routers are left out."""
    config = model.config.get_text_config(decoder=True)
    experts = {getattr(config, name, None) for name in EXPERTS}
    head = model.get_output_embeddings()
    for users in plain_linears(model):
        layers = [getattr(module, name) for module, name in users]
        if layers[0].out_features not in experts:
            yield users, 8 if any(layer is head for layer in layers) else bits_of(scheme)


@torch.no_grad()
def quantize_linears(model: Any, scheme: str, name: str) -> Any:
    """Quantize the linear layers and embedding of a model on a CPU; returns it. Weights as they were are released one by one.

    Raises ModelError if it has no such layers.
    """
    if scheme == "none":
        return model
    equalize(model)
    embedding, of_embedding, found = model.get_input_embeddings(), None, False
    for users, bits in layers_to_quantize(model, scheme):
        weight = getattr(*users[0]).weight
        panels = QuantizedPanels(QUANTIZE[bits](weight), weight.dtype)
        if embedding is not None and embedding.weight is weight:
            of_embedding = panels
        for module, attribute in users:
            setattr(module, attribute, LaidOutLinear(getattr(module, attribute), panels).train(module.training))
        del weight
        found = True
    if not found:
        raise ModelError(f"{name}: --quantize {scheme}: it has no linear layers that could be quantized.")
    if may_be_in_panels(embedding):
        weight = embedding.weight
        in_panels(embedding, of_embedding or QuantizedPanels(QUANTIZE[bits_of(scheme)](weight), weight.dtype))
    return model.requires_grad_(False)
