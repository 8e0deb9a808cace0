"""What instructions of a program are in Triton's language: see program_kernel.py for what they do."""

from __future__ import annotations

import torch

from lookahead.backends.cpu import program_kernel as kernel

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
ROUNDED = {kernel.NOT: "{}", kernel.TO_BFLOAT16: "{}.to(tl.bfloat16).to(tl.float32)"}
ROUNDED[kernel.TO_FLOAT16] = "{}.to(tl.float16).to(tl.float32)"
TWO = {kernel.ADD: "({} + {})", kernel.SUBTRACT: "({} - {})", kernel.MULTIPLY: "({} * {})", kernel.DIVIDE: "({} / {})"}
ONE = {
    kernel.COPY: "{}",
    kernel.STORE: "{}",
    kernel.NEGATE: "(-{})",
    kernel.SQUARE_ROOT: "tl.sqrt({})",
    kernel.COSINE: "tl.cos({})",
    kernel.SINE: "tl.sin({})",
    kernel.EXP: "tl.exp({})",
    kernel.SIGMOID: "(1.0 / (1.0 + tl.exp(-{0})))",
    kernel.SILU: "({0} / (1.0 + tl.exp(-{0})))",
    kernel.TANH: "(1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0})))",
    kernel.ERF: "tl.erf({})",
    kernel.GELU: "(0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476)))",
    kernel.GELU_TANH: "({0} / (1.0 + tl.exp(-1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0}))))",
    kernel.RELU: "tl.maximum({}, 0.0)",
}
FOLDS = {kernel.SUM: "tl.sum", kernel.LARGEST: "tl.max"}
