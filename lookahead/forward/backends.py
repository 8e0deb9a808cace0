"""How torch computes while our code runs: which attention kernels it may take on a GPU, and none of its caller's settings.

cuDNN builds a plan for every shape of queries, keys and mask, which takes 20 to 400 ms each, and keeps all of them. The shapes
of our steps change with draft trees and text lengths, so plans would take longer than the rest of a job. torch prefers cuDNN on
recent GPUs, by a flag of the whole process: we clear it around our forwards only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils._contextlib import context_decorator

Function = TypeVar("Function", bound=Callable[..., Any])
_callers = threading.local()  # device: the caller's default one, while our code runs and it is not the CPU


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


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """While open, default device, default dtype and autocast are as torch starts with; then as the caller has set them."""
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
            _callers.device = device
            stack.callback(vars(_callers).clear)
        yield


def by_own_settings(function: Function) -> Function:
    """Decorate a function, or a generator: between two items the caller's settings count."""
    decorated: Function = context_decorator(own_settings, function)
    return decorated


def callers_device() -> contextlib.AbstractContextManager[object]:
    """Call what the caller has given, such as processors: while open, the default device is the caller's."""
    device = getattr(_callers, "device", None)
    return contextlib.nullcontext() if device is None else torch.device(device)
