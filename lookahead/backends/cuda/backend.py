"""What the core asks of GPUs, see forward/backend.py."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from lookahead.backends.cpu.lower import device_program_of as program_of
from lookahead.backends.cuda.captured import tried_capture
from lookahead.backends.cuda.graphs import CapturedSteps as captured_steps

__all__ = ["captured_steps", "program_of", "serves", "tree_attention", "tried_capture"]


@functools.cache  # asked at each call
def serves(device: torch.device, dtype: torch.dtype) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from lookahead.backends.cuda import triton_attention

    return dtype in triton_attention.DTYPES and torch.cuda.get_device_capability(device) >= triton_attention.CAPABILITY


def tree_attention(*arguments: Any, **named: Any) -> torch.Tensor:
    from lookahead.backends.cuda.triton_attention import tree_attention_triton

    return tree_attention_triton(*arguments, **named)
