"""The processor that a model runs on: its name, what kernels can use of it, and which of torch's ways of multiplying matrices
are fast on it. What kernels are compiled for is asked of LLVM: torch need not be there.
"""

from __future__ import annotations

import functools
import platform
from typing import TYPE_CHECKING

from llvmlite.binding import get_host_cpu_features

if TYPE_CHECKING:
    import torch


def processor_name(device: torch.device) -> str:
    """The GPU's name; the CPU's with the instructions that torch uses, as virtual machines often name little but its maker."""
    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def multiplies_bfloat16() -> bool:
    """Tell whether oneDNN multiplies bfloat16 on this CPU. With AVX-512 alone it takes bfloat16, too, but converts it at each
    product.
    """
    import torch

    converts = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not converts


def has_avx512() -> bool:
    """Tell whether this CPU has vectors of 16 numbers, with all that goes with them since 2017."""
    return _has("avx512f", "avx512bw", "avx512dq", "avx512vl")


def multiplies_pairs() -> bool:
    """Tell whether this CPU adds products of pairs of bfloat16 to float32 sums (AVX-512 BF16)."""
    return _has("avx512bf16")


def multiplies_bytes() -> bool:
    """Tell whether this CPU adds products of four bytes to sums of 32 bits (AVX-512 VNNI)."""
    return _has("avx512vnni")


def multiplies_tiles() -> bool:
    """Tell whether this CPU multiplies tiles of bfloat16 (AMX)."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


@functools.cache
def _has(*features: str) -> bool:
    """Tell whether this CPU and its system have these features, in LLVM's names."""
    try:
        found = get_host_cpu_features()
    except RuntimeError:  # not known of this kind of CPU
        return False
    return all(found.get(feature, False) for feature in features)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "CPU")
    except OSError:
        return platform.processor() or "CPU"
