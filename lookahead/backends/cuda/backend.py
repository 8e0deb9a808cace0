"""What the core asks of GPUs, see forward/backend.py."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from lookahead.backends.cuda.captured import tried_capture
from lookahead.backends.cuda.device_builder import DeviceBuilder, merged_products
from lookahead.backends.cuda.device_program import DeviceProgram
from lookahead.backends.cuda.device_rows import must_be_written
from lookahead.backends.cuda.graphs import CapturedSteps as captured_steps
from lookahead.backends.lowering.lower import lowered
from lookahead.backends.lowering.trace import traced
from lookahead.forward.target import TargetModel

__all__ = ["captured_steps", "tried_capture"]


def program_of(target: TargetModel) -> DeviceProgram:
    """Make a program of a model whose linear layers are as torch makes them. Its weights may come to lie elsewhere."""
    forward = traced(target)
    kinds, merge = len(target.mask_plan.windows), functools.partial(merged_products, model=target.model)
    plan = lowered(forward, DeviceBuilder(forward.tokens), kinds, target.dtype, merge, must_be_written)
    return DeviceProgram(plan, target.device)


@functools.cache  # asked at each call
def serves(device: torch.device, dtype: torch.dtype) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from lookahead.backends.cuda import triton_attention

    return dtype in triton_attention.DTYPES and torch.cuda.get_device_capability(device) >= triton_attention.CAPABILITY


def tree_attention(*arguments: Any, **named: Any) -> torch.Tensor:
    from lookahead.backends.cuda.triton_attention import tree_attention_triton

    return tree_attention_triton(*arguments, **named)
