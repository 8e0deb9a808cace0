"""Cost profiles of GPUs that one does not have. In: a model's sizes and a data sheet. Out: a profile, marked as an estimate.

A forward takes the longest of three times: to start its kernels one by one, to read the weights (and of a mixture of experts
those that its tokens choose), and to compute. Keys and values are read once more for each row; a further call of attention
starts kernels of its own. Data sheets promise peaks; the shares of them taken here, and the time to start a kernel, are
assumptions, and are written into the profile.
"""

from __future__ import annotations

import dataclasses

from lookahead.budget.profile import CostProfile, Setting
from lookahead.errors import UsageError

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
BANDWIDTH_SHARE = 0.8
COMPUTE_SHARE = 0.6
KERNELS_PER_LAYER, KERNELS_PER_CALL = 20, 4
KERNEL_SECONDS = 6e-6
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Figures of a data sheet: bytes per second, and FLOP per second in half precision (dense tensor cores) and float32."""

    name: str
    bandwidth: float
    half: float
    single: float


GPUS = {
    "h200": Gpu("NVIDIA H200 SXM", 4.8e12, 989e12, 67e12),
    "h100": Gpu("NVIDIA H100 SXM", 3.35e12, 989e12, 67e12),
    "a100": Gpu("NVIDIA A100 80GB SXM", 2.039e12, 312e12, 19.5e12),
    "l40s": Gpu("NVIDIA L40S", 0.864e12, 362e12, 91.6e12),
    "l4": Gpu("NVIDIA L4", 0.3e12, 121e12, 30.3e12),
    "a10": Gpu("NVIDIA A10", 0.6e12, 125e12, 31.2e12),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 1.008e12, 165e12, 82.6e12),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", 0.936e12, 71e12, 35.6e12),
    "v100": Gpu("NVIDIA V100 SXM2", 0.9e12, 125e12, 15.7e12),
    "t4": Gpu("NVIDIA T4", 0.32e12, 65e12, 8.1e12),
}


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Numbers of a model: parameters that every token meets (its embedding table aside), parameters in experts, experts in all
    and per token, layers, values of one token's keys and values, multiplications of one query with one key over all layers.
    """

    dense: int
    in_experts: int
    experts: int
    experts_per_token: int
    layers: int
    key_values: int
    query_key: int

    def read(self, tokens: int) -> float:
        """Parameters that a forward over that many tokens reads: of the experts, those that at least one token chooses."""
        chosen = 1 - (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0
        return self.dense + self.in_experts * chosen

    @property
    def of_a_token(self) -> float:
        """Parameters that one token meets."""
        return self.dense + (self.in_experts * self.experts_per_token / self.experts if self.experts else 0.0)


def estimate(sizes: ModelSizes, setting: Setting, gpu: str, vocab_size: int, longest_text: int) -> CostProfile:
    """The profile of a model on a GPU of GPUS. Raises UsageError for an unknown one."""
    if gpu not in GPUS:
        raise UsageError(f"--estimate {gpu}: choose one of {', '.join(GPUS)}.")
    sheet, width = GPUS[gpu], BYTES[setting.dtype]
    bandwidth = BANDWIDTH_SHARE * sheet.bandwidth
    compute = COMPUTE_SHARE * (sheet.single if setting.dtype == "float32" else sheet.half)
    started = sizes.layers * KERNELS_PER_LAYER * KERNEL_SECONDS

    def forward(tokens: int) -> float:
        return max(started, width * sizes.read(tokens) / bandwidth, 2 * sizes.of_a_token * tokens / compute)

    return CostProfile(
        dataclasses.replace(setting, device=sheet.name, threads=0, mode="packed"),
        "estimate",
        SIZES,
        tuple(forward(tokens) for tokens in SIZES),
        per_key=width * sizes.key_values / bandwidth,
        per_query_key=4 * sizes.query_key / compute,
        per_call=sizes.layers * KERNELS_PER_CALL * KERNEL_SECONDS,
        bucketed=True,
        vocab_size=vocab_size,
        longest_text=longest_text,
        about={
            "estimated_from": f"{sheet.bandwidth / 1e12:g} TB/s, {sheet.half / 1e12:g} TFLOP/s half, "
            f"{sheet.single / 1e12:g} TFLOP/s single precision (data sheet)",
            "assumed": f"{BANDWIDTH_SHARE:.0%} of the bandwidth, {COMPUTE_SHARE:.0%} of the FLOP/s, "
            f"{KERNELS_PER_LAYER} kernels a layer of {KERNEL_SECONDS * 1e6:g} us each to start, "
            f"{KERNELS_PER_CALL} for a further call of attention",
            "parameters": sizes.dense + sizes.in_experts,
        },
    )
