"""What the core asks of a backend, the kernels of one kind of device: lookahead.backends.cpu and .cuda, found by name.

Targets, packs and caches are those of target.py, batch.py and kv_cache.py, which import this file.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Protocol, cast

import torch

PROGRAM = "lookahead_program"  # in addition to names of attention, for settings of cost profiles

QUANTIZED = ("int4", "int8")  # what linear layers with such weights are called, see `TargetModel.linear`


class ForwardProgram(Protocol):
    """A whole packed forward as one native call. exact: a token gets the same bits next to any others."""

    exact: bool

    def run(self, packed: Any, wanted: torch.Tensor | None, cache: Any) -> torch.Tensor:
        """Scores [wanted tokens, vocab]. wanted: which of the pack's tokens; None: all."""

    def made_exact(self) -> ForwardProgram:
        """The same forward, which gives a token the same bits next to any others, as far as it can."""


class Backend(Protocol):
    """A module `backend` of lookahead.backends.cpu or .cuda; each has what makes sense on its device."""

    def program_of(self, target: Any) -> ForwardProgram:
        """Of a packed model whose attention lookahead::tree_attention computes. Raises Unsupported, or as the model."""

    def tried_capture(self, target: Any) -> Any:
        """Of a GPU: the same model, whose steps are captured as graphs if that is right."""

    def pack_linears(self, model: Any) -> Any:
        """Of a CPU: the same model, whose linear layers' weights are laid out for it."""

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether `tree_attention` takes queries of this dtype there."""

    def tree_attention(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """Attention as tree_attention.py defines it; see there for what is handed over."""

    def quantize_keys(self, *arguments: Any) -> None:
        """Of a CPU: keys or values to those that a quantized cache holds (quantized_cache.py)."""

    def captured_steps(self, target: Any, cache: Any, capture: Any) -> Any:
        """Of a GPU: packed steps as graphs."""


@functools.cache
def backend_of(device_type: str) -> Backend | None:
    """None where this kind of device has none, or it is not installed."""
    name = f"lookahead.backends.{device_type}.backend"
    try:
        return cast(Backend, importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("lookahead"):
            return None
        raise
