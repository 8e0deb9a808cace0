"""Attention of packed draft trees on a CPU, for tensors. The kernels are in attention_kernel.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lookahead.backends.cpu import attention_kernel as kernel
from lookahead.forward.tree_meta import POSITION
from lookahead.native.threads import SHARES, run_in

ALONE = 300_000  # products of numbers, up to which a call is not worth other threads

# Types of array elements that stand for numbers of a dtype (vectors.py), and for quantized keys and values (quantized_cache.py)
NUMBERS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}
QUANTIZED = {torch.int8: np.int8, torch.uint8: np.uint8}


def entry_of(dtype: torch.dtype, kept: torch.dtype) -> Callable[[Any], None]:
    """The kernel for queries of a dtype, and for keys and values of the same, or quantized. Raises KeyError for others."""
    return kernel.attention(NUMBERS[dtype], QUANTIZED.get(kept, NUMBERS[dtype]))


def tree_attention_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, meta: torch.Tensor, scale: float
) -> torch.Tensor:
    """[1, tokens, heads, value width]; see tree_attention.py, but query: [1, heads, tokens, width], meta: any shape.

    Tensors are on a CPU and of one dtype of NUMBERS, or key and value are quantized (quantized_cache.py); numbers of a vector
    lie side by side, and so does all of meta. A step of a small model spends as long on the calls around the kernel as in it:
    there are few.
    """
    _, heads, tokens, width = query.shape
    _, key_heads, capacity, value_width = value.shape
    output = query.new_zeros(1, tokens, heads, value_width)
    size = query.element_size()
    _, query_head, query_token, _ = query.stride()
    kept = key.element_size()
    key_slot, key_head, key_position, _ = key.stride()
    value_slot, value_head, value_position, _ = value.stride()
    products = tokens * heads * width
    # the second: keys that a token of the pack sees, more or less
    large = products * capacity > ALONE and products * int(meta.numpy()[..., POSITION].max()) > ALONE
    threads = torch.get_num_threads() if large else 1
    task = kernel.TASK_BYTES.pack(
        *(0, tokens, heads, key_heads, width, value_width, scale * kernel.LOG2_E),
        *(query.data_ptr(), query_token * size, query_head * size),
        *(key.data_ptr(), key_slot * kept, key_head * kept, key_position * kept),
        *(value.data_ptr(), value_slot * kept, value_head * kept, value_position * kept),
        *(output.data_ptr(), meta.data_ptr(), size, 0, 0, SHARES * threads if threads > 1 else 1),
    )
    run_in(threads, entry_of(query.dtype, key.dtype), task)
    return output
