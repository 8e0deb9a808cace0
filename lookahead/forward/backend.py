"""Backends, the kernels of one kind of device: the modules `backend` of lookahead.backends.cpu and .cuda, found by name.

Both have `program_of`, a model's forward as one native call; `serves` and `tree_attention`, see tree_attention.py. For a CPU
there are also `offers`, the schemes of an option; `packed_model`, `gguf_model`, `pack_linears` for loading; `with_kv_dtype` and
`quantize_keys` for quantized caches; for a GPU `tried_capture` and `captured_steps`, steps as graphs.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Protocol

import torch

from lookahead.errors import UsageError

PROGRAM = "lookahead_program"  # in addition to names of attention, for settings of cost profiles

QUANTIZED = ("int4", "int8")  # what linear layers with such weights are called, see `TargetModel.linear`
SCHEMES = ("none", "int8", "int4")  # of --quantize and --kv-dtype
KERNELS = {"--quantize": "x86 CPUs with AVX2", "--kv-dtype": "CPUs"}  # for what there are kernels


class ForwardProgram(Protocol):
    """A whole packed forward as one native call. exact: a token gets the same bits next to any others; may be set."""

    exact: bool

    def run(self, packed: Any, wanted: torch.Tensor | None, cache: Any) -> torch.Tensor:
        """Scores [wanted tokens, vocab]. wanted: which of the pack's tokens; None: all."""


def packed_layers(model: Any) -> tuple[list[Any], list[Any]]:
    """(linear layers, embeddings) whose weight a backend holds as `laid_out`; it has `library`, `nbytes` and `to_dense`."""
    packed = [module for module in model.modules() if hasattr(module, "laid_out")]
    embeddings = [layer for layer in packed if isinstance(layer, torch.nn.Embedding)]
    return [layer for layer in packed if layer not in embeddings], embeddings


def check_offered(option: str, scheme: str, device: torch.device) -> None:
    """Raises UsageError for a scheme of --quantize or --kv-dtype that is none, or that no backend has kernels for there."""
    if scheme not in SCHEMES:
        raise UsageError(f"{option} {scheme}: choose {', '.join(SCHEMES)}.")
    cpu = backend_of("cpu") if device.type == "cpu" else None
    if scheme != "none" and not (cpu and scheme in cpu.offers(option)):
        here = "this CPU" if device.type == "cpu" else str(device)
        raise UsageError(f"{option} {scheme}: there is no kernel for {here}, only for {KERNELS[option]}. Leave it out.")


@functools.cache
def backend_of(device_type: str) -> Any:
    """None where this kind of device has none, or it is not installed."""
    name = f"lookahead.backends.{device_type}.backend"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("lookahead"):
            return None
        raise
