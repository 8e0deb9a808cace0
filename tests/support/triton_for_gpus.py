"""Compile the attention kernels for a GPU that is not here, and say what they use.

python tests/support/triton_for_gpus.py CAPABILITY "DTYPE HEADS_THAT_SHARE_KEYS WIDTH" ... prints a JSON object for each shape.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lookahead.backends.cuda import triton_attention as attention_triton

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CAPACITY = 4096


def built(kernel: Any, dtype: torch.dtype, shared: int, width: int, capability: int) -> Any:
    """The kernel as Triton would compile it for tensors whose strides are multiples of 16."""
    tiling = attention_triton.Tiling.of(dtype, shared, width)
    fixed = attention_triton.constants(shared, width, width, CAPACITY, tiling)
    fixed |= {"PATHS": True} if kernel is attention_triton._path else {}
    types = dict.fromkeys(("query", "key", "value", "result"), "*" + TYPES[dtype])
    types |= {"meta": "*i32", "outputs": "*fp32", "tops": "*fp32", "totals": "*fp32", "scale": "fp32"}
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    aligned = [name for name, kind in signature.items() if kind[0] == "*" or (kind == "i32" and "_token" not in name)]
    options = attention_triton.launch_options(tiling, kernel is attention_triton._path)
    source = ASTSource(
        kernel,
        signature,
        constexprs={places[name]: value for name, value in fixed.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in [*aligned, "query_token"]},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def used(made: Any) -> dict[str, Any]:
    """Registers and bytes of a thread, and how often its code has instructions of some kinds."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    sizes = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return {
        "registers": int(sizes["REG"]),
        "stack": int(sizes["STACK"]),
        "local": int(sizes["LOCAL"]),
        "shared_memory": made.metadata.shared,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "tensor_cores": len(re.findall(r"\bHG?MMA\.", code)),
        "async_copies": code.count("LDGSTS"),
        "layouts": sorted(set(re.findall(r"instrShape = \[.*?\]", made.asm["ttgir"]))),
    }


if __name__ == "__main__":
    for shape in sys.argv[2:]:
        dtype, shared, width = shape.split()
        kernels = {
            kernel.fn.__name__: used(built(kernel, getattr(torch, dtype), int(shared), int(width), int(sys.argv[1])))
            for kernel in (attention_triton._text, attention_triton._path)
        }
        print(json.dumps({"shape": shape, **kernels}))
