"""What the core asks of a backend, the kernels of one kind of device: lookahead.backends.cpu and .cuda, found by name.

Targets, packs and caches are those of target.py, batch.py and kv_cache.py, which import this file.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch

from lookahead.errors import UsageError

PROGRAM = "lookahead_program"  # in addition to names of attention, for settings of cost profiles

QUANTIZED = ("int4", "int8")  # what linear layers with such weights are called, see `TargetModel.linear`
SCHEMES = ("none", "int8", "int4")  # of --quantize and --kv-dtype
KERNELS = {"--quantize": "x86 CPUs with AVX2", "--kv-dtype": "CPUs"}  # for what there are kernels


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
        """Make a program of a packed model whose attention is lookahead::tree_attention. Raises Unsupported,
        or as the model.
        """

    def tried_capture(self, target: Any) -> Any:
        """Return, on a GPU, the same model, whose steps are captured as graphs if that is right."""

    def offers(self, option: str) -> Sequence[str]:
        """List, on a CPU, the schemes of --quantize or --kv-dtype that there are kernels for on this machine."""

    def packed_model(self, name: str, config: Any, dtype: torch.dtype, wishes: dict[str, Any]) -> Any | None:
        """Load, on a CPU, the causal LM of a folder of packed weights; None for one that transformers is to load."""

    def gguf_model(
        self, name: str, revision: str | None, config: Any, empty: Any, dtype: torch.dtype, wishes: dict[str, Any]
    ) -> Any | None:
        """Load, on a CPU, the causal LM of a GGUF file, whose blocks stay as they are; None for one that transformers is to
        load. empty: the model without memory for its weights.
        """

    def pack_linears(self, model: Any, scheme: str, name: str) -> Any:
        """Return, on a CPU, the same model, whose linear layers' weights are quantized by `scheme` and laid out for it. Such
        layers are `packed_layers`. Raises ModelError for one that cannot be quantized.
        """

    def with_kv_dtype(self, target: Any, kv_dtype: str) -> Any:
        """Return, on a CPU, the same model with such keys and values. Raises UsageError for one that cannot have them."""

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Tell whether `tree_attention` takes queries of this dtype there."""

    def tree_attention(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """Attention as tree_attention.py defines it; see there for what is handed over."""

    def quantize_keys(self, *arguments: Any) -> None:
        """Convert, on a CPU, keys or values to those that a quantized cache holds (quantized_cache.py)."""

    def captured_steps(self, target: Any, cache: Any, capture: Any) -> Any:
        """Capture, on a GPU, packed steps as graphs."""


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
def backend_of(device_type: str) -> Backend | None:
    """None where this kind of device has none, or it is not installed."""
    name = f"lookahead.backends.{device_type}.backend"
    try:
        return cast(Backend, importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("lookahead"):
            return None
        raise
