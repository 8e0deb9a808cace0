"""What instructions of a program are in Triton's language: see program_kernel.py for what they do."""

from __future__ import annotations

import torch

from lookahead.backends.lowering import ops

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
ROUNDED = {ops.NOT: "{}", ops.TO_BFLOAT16: "{}.to(tl.bfloat16).to(tl.float32)"}
ROUNDED[ops.TO_FLOAT16] = "{}.to(tl.float16).to(tl.float32)"
TWO = {ops.ADD: "({} + {})", ops.SUBTRACT: "({} - {})", ops.MULTIPLY: "({} * {})", ops.DIVIDE: "({} / {})"}
ONE = {
    ops.COPY: "{}",
    ops.STORE: "{}",
    ops.NEGATE: "(-{})",
    ops.SQUARE_ROOT: "tl.sqrt({})",
    ops.COSINE: "tl.cos({})",
    ops.SINE: "tl.sin({})",
    ops.EXP: "tl.exp({})",
    ops.SIGMOID: "(1.0 / (1.0 + tl.exp(-{0})))",
    ops.SILU: "({0} / (1.0 + tl.exp(-{0})))",
    ops.TANH: "(1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0})))",
    ops.ERF: "tl.erf({})",
    ops.GELU: "(0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476)))",
    ops.GELU_TANH: "({0} / (1.0 + tl.exp(-1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0}))))",
    ops.RELU: "tl.maximum({}, 0.0)",
}
FOLDS = {ops.SUM: "tl.sum", ops.LARGEST: "tl.max"}
