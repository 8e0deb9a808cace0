"""Numbers by which a plan names what its instructions do. Needs no torch: kernels are compiled where there is none."""

from __future__ import annotations

(COPY, WIDEN, STORE, ADD, SUBTRACT, MULTIPLY, DIVIDE, SUM, EMBED, POSITION, WRITE, QUANTIZE, GATHER) = range(13)
(NEGATE, SQUARE_ROOT, COSINE, SINE, EXP, SIGMOID, SILU, TANH, ERF, GELU, GELU_TANH, RELU) = range(13, 25)
IDS, POSITIONS = 4, 8  # which numbers of a token are looked up; in the head of a run, where they are (cpu/program_kernel.py)
# How results are rounded: not, or to what these dtypes hold
NOT, TO_BFLOAT16, TO_FLOAT16 = range(3)
# How results are stored: as numbers of this dtype, or as float32 numbers that it holds
AS_FLOAT32, AS_BFLOAT16, AS_FLOAT16, LIKE_BFLOAT16, LIKE_FLOAT16 = range(5)
# How a buffer holds keys and values (of WRITE), and a table its rows (of EMBED), where they are quantized. Of tables in the
# blocks of GGUF: IN_BLOCKS - the number of the format (cpu/block_code.py)
IN_8_BITS, IN_4_BITS, IN_BLOCKS = -8, -4, -16
