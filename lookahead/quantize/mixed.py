"""Tokens of 4 and 8 bits. In: a model, its loss on texts. Out: an order of each layer's inputs, and how many have 8 bits.

Inputs of a linear layer are sorted by the largest numbers that they have in the texts, so that channels with outliers share
blocks of 128. The first blocks of a layer have 8 bits, the others 4. Layers with the same input get the same order and bits.
Source: fine-grained mixed-precision quantization (FMPQ), COMET, arXiv 2410.12168.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lookahead.backends.cpu.packed import BLOCK
from lookahead.backends.cpu.quantized import GROUP, QuantizedPanels
from lookahead.errors import ModelError

ACTIVATIONS = ("none", "int8", "mixed")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """in_8_bits: blocks, by the names of layers. blocks: of all these layers. loss_in_8_bits: where all blocks have 8, in nats
    per token; loss: as chosen.
    """

    in_8_bits: dict[str, int]
    blocks: int
    loss_in_8_bits: float
    loss: float

    @property
    def share(self) -> float:
        """Share of blocks in 8 bits."""
        return sum(self.in_8_bits.values()) / self.blocks


def orders_of(largest: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """int64 [in] of each layer: its inputs, the one with the largest number first. largest: see activation_stats.py."""
    return {name: each.argsort(descending=True, stable=True) for name, each in largest.items()}


def choose_bits(model: Any, largest: Mapping[str, torch.Tensor], loss: Callable[[], float], budget: float) -> Chosen:
    """The fewest blocks in 8 bits for which `loss` rises by `budget` nats at most over all blocks in 8 bits.

    model: quantized, its inputs sorted; it is left as chosen. Blocks are ranked by their largest number as a multiple of the
    median of the layer's, and `loss` is taken to fall with each. Raises ModelError for a model without such layers.
    """
    panels: dict[str, QuantizedPanels] = {}
    same: dict[bytes, list[str]] = {}  # layers with the same input
    for name, layer in model.named_modules():
        held = getattr(layer, "laid_out", None)
        if name in largest and isinstance(held, QuantizedPanels) and held.order is not None:
            panels[name] = held
            same.setdefault(largest[name].numpy().tobytes(), []).append(name)
    if not panels:
        raise ModelError("--activations mixed: no layer has inputs in groups of 64.")
    ranked = []
    for names in same.values():
        most = largest[names[0]].sort(descending=True).values
        ranked += [(float(first / most.median().clamp_min(1e-30)), names) for first in most[::BLOCK]]
    ranked.sort(key=lambda block: -block[0])

    def loss_with(count: int) -> float:
        chosen.update(dict.fromkeys(panels, 0))
        for _, names in ranked[:count]:
            for name in names:
                chosen[name] += 1
        for name, blocks in chosen.items():
            panels[name].eight = min(blocks * BLOCK // GROUP, panels[name].lines)
        return loss()

    chosen: dict[str, int] = {}
    best = in_8_bits = loss_with(len(ranked))
    too_few, enough = -1, len(ranked)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        found = loss_with(middle)
        if found - in_8_bits <= budget:
            enough, best = middle, found
        else:
            too_few = middle
    loss_with(enough)
    return Chosen(chosen, sum(len(largest[name][::BLOCK]) for name in panels), in_8_bits, best)
