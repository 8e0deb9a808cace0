"""What the core asks of CPUs, see forward/backend.py."""

from __future__ import annotations

import torch

from lookahead.backends.cpu.attention_cpu import ENTRIES
from lookahead.backends.cpu.attention_cpu import tree_attention_cpu as tree_attention
from lookahead.backends.cpu.linear import lay_out as pack_linears
from lookahead.backends.cpu.lower import program_of
from lookahead.backends.cpu.quantized_cache_code import quantize_all as quantize_keys

__all__ = ["pack_linears", "program_of", "quantize_keys", "serves", "tree_attention"]


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in ENTRIES
