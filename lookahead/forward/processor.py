"""The processor that a model runs on: its name, and which of torch's ways of multiplying matrices are fast on it."""

from __future__ import annotations

import platform

import torch


def processor_name(device: torch.device) -> str:
    """The GPU's name; the CPU's with the instructions that torch uses, as virtual machines often name little but its maker."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def multiplies_bfloat16() -> bool:
    """Whether oneDNN does on this CPU. With AVX-512 alone it takes bfloat16, too, but converts it at each product."""
    converts = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not converts


def multiplies_pairs() -> bool:
    """Whether this CPU adds products of pairs of bfloat16 to float32 sums (AVX-512 BF16)."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def multiplies_bytes() -> bool:
    """Whether this CPU adds products of four bytes to sums of 32 bits (AVX-512 VNNI)."""
    return bool(torch.cpu._is_vnni_supported())


def multiplies_tiles() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 (AMX)."""
    return bool(torch.cpu._is_amx_tile_supported())


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "CPU")
    except OSError:
        return platform.processor() or "CPU"
