"""Lets vLLM's V2 runner run on a CPU without Triton's CPU backend: by Triton's interpreter. Import it before vllm."""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Driver:
    """Of a device that nothing is compiled for."""

    utils = SimpleNamespace(
        get_device_properties=lambda *device: {"multiprocessor_count": 1, "max_shared_mem": 1 << 20, "warpSize": 1}
    )

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def set_current_device(self, *device: int) -> None:
        """There is one."""

    def get_device_interface(self) -> object:
        return torch.cpu


backends["cpu"] = Backend(compiler=None, driver=Driver)  # type: ignore[arg-type]
driver.set_active(Driver())  # type: ignore[arg-type]
