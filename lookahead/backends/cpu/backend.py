"""What the core asks of CPUs, see forward/backend.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.cpu.attention_cpu import NUMBERS
from lookahead.backends.cpu.attention_cpu import tree_attention_cpu as tree_attention
from lookahead.backends.cpu.gguf_model import gguf_model
from lookahead.backends.cpu.linear import lay_out
from lookahead.backends.cpu.packed_model import packed_model
from lookahead.backends.cpu.panel_builder import PanelBuilder
from lookahead.backends.cpu.program import Program
from lookahead.backends.cpu.quantize import quantize_linears
from lookahead.backends.cpu.quantized import QuantizedPanels
from lookahead.backends.cpu.quantized_cache_kernel import quantize_all as quantize_keys
from lookahead.backends.cpu.quantized_kv import with_kv_dtype
from lookahead.backends.lowering.lower import lowered
from lookahead.backends.lowering.trace import traced
from lookahead.forward.backend import QUANTIZED
from lookahead.forward.target import TargetModel

__all__ = ["gguf_model", "packed_model", "quantize_keys", "tree_attention", "with_kv_dtype"]


def offers(option: str) -> Sequence[str]:
    return QUANTIZED if option == "--kv-dtype" or QuantizedPanels.takes_here() else ()


def pack_linears(model: Any, scheme: str, name: str) -> Any:
    return lay_out(quantize_linears(model, scheme, name))


def program_of(target: TargetModel) -> Program:
    forward = traced(target)
    build = PanelBuilder(forward.tokens, forward.linears, forward.tables)
    return Program(lowered(forward, build, len(target.mask_plan.windows), target.dtype))


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in NUMBERS
