"""Which of torch's attention kernels our forwards may take on a GPU.

cuDNN builds a plan for every shape of queries, keys and mask, which takes 20 to 400 ms each, and keeps all of them. The shapes
of our steps change with draft trees and text lengths, so plans would take longer than the rest of a job. torch prefers cuDNN on
recent GPUs, by a flag of the whole process: we clear it around our forwards only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """While open, scaled_dot_product_attention does not take cuDNN; then as before. Also a decorator of functions."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    if not before:
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
