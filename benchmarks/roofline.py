"""Forwards beside what the processor can do: how fast it reads, how fast it multiplies.

In: a model. Out: for each dtype and number of tokens, milliseconds of a forward behind 128 tokens, and as a limit the longer
of two times: to read all weights, and to multiply by them. Both are measured in the same run, by loops that read and by loops
of registers. Then milliseconds of its parts, each alone: products, attention, and what is done with single tokens.

    python benchmarks/roofline.py --model FOLDER
    python benchmarks/roofline.py --model FOLDER --kinds bfloat16 bfloat16:int8 --tokens 1 8 16
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from lookahead.backends.cpu import program_kernel
from lookahead.backends.cpu.huge_pages import in_huge_pages
from lookahead.backends.cpu.panel_code import PAIRS
from lookahead.backends.cpu.quantized_code import Bytes
from lookahead.backends.lowering.plan import Product
from lookahead.draft.tree import Wanted, chain, side_by_side
from lookahead.forward.processor import multiplies_pairs
from lookahead.forward.slots import slots_of
from lookahead.forward.target import TargetModel
from lookahead.models.load import load_model
from lookahead.native.kernels import carray, int64_at
from lookahead.native.threads import add, run_in
from lookahead.native.vector_code import LANES, LONG, VECTOR, WHOLE, emitted

PAST = 128  # tokens in the cache
READ = 512 << 20  # bytes
PIECE = 1 << 20  # bytes that a thread takes at once
REPEATS = 200_000  # of MULTIPLIED multiplications of 16 lanes
MULTIPLIED = 24  # that do not wait for each other
KINDS = ("float32", "bfloat16", "float16", "bfloat16:int8", "bfloat16:int4")
TOKENS = (1, 2, 4, 8, 16, 32)
TURNS = 15
OTHER = 0.8e-3  # seconds of a forward that are allowed for what is neither
PARTS = ("rows", "products", "attention")  # kinds of stages; see program_kernel.py


@emitted()
def read_all(code, address, count, into):
    """Read `count` bytes, a multiple of 512; what they add up to is written to `into`, so that they are read."""
    registers = [code.variable(WHOLE, ir.Constant(WHOLE, [0] * LANES)) for _ in range(8)]
    with code.loop(count, 64 * len(registers)) as at:
        for number, register in enumerate(registers):
            where = code.builder.add(address, code.builder.add(at, ir.Constant(LONG, 64 * number)))
            code.builder.store(code.builder.xor(code.builder.load(register), code.load(where, WHOLE)), register)
    for number, register in enumerate(registers):
        code.store(code.builder.load(register), code.builder.add(into, ir.Constant(LONG, 64 * number)))


def _multiplier(kind: str) -> Callable[..., None]:
    @emitted()
    def multiply_registers(code, count, into):
        """Multiply and add in MULTIPLIED registers, `count` times.

        They, and what is multiplied behind them, begin as the vectors at `into`, where the sums are written.
        """
        builder, vector = code.builder, VECTOR if kind != "bytes" else WHOLE
        homes = [builder.add(into, ir.Constant(LONG, 64 * number)) for number in range(MULTIPLIED + 2)]
        *sums, left, right = (code.load(home, vector) for home in homes)
        read, registers = (left, right), [code.variable(vector, each) for each in sums]
        with code.loop(count):
            for register in registers:
                total = builder.load(register)
                if kind == "bytes":
                    multiplied = Bytes(code, 8)
                    total = multiplied.end(total, multiplied.add(multiplied.begin(total), *read))
                elif kind == "pairs":
                    pairs = [builder.bitcast(each, PAIRS) for each in read]
                    total = code.call("llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, total, *pairs)
                else:
                    total = code.fma(*read, total)
                builder.store(total, register)
        for register, home in zip(registers, homes, strict=False):
            code.store(builder.load(register), home)

    return multiply_registers


_multiply_numbers, _multiply_pairs, _multiply_bytes = (_multiplier(kind) for kind in ("numbers", "pairs", "bytes"))


def _read(address):
    """Take pieces of the memory that the array at `address` describes: tickets, begin, pieces."""
    task, into = carray(int64_at(address), (3,)), np.empty(8 * LANES, np.float32)
    piece = add(address, 1)
    while piece < task[2]:
        read_all(task[1] + piece * PIECE, PIECE, into.ctypes.data)
        piece = add(address, 1)


def _numbers(address):
    into = np.zeros((MULTIPLIED + 2) * LANES, np.float32)
    _multiply_numbers(REPEATS, into.ctypes.data)


def _pairs(address):
    into = np.zeros((MULTIPLIED + 2) * LANES, np.float32)
    _multiply_pairs(REPEATS, into.ctypes.data)


def _bytes(address):
    into = np.zeros((MULTIPLIED + 2) * LANES, np.float32)
    _multiply_bytes(REPEATS, into.ctypes.data)


# Of each kind: the loop, and products of a multiplication of 16 lanes
LOOPS = {"numbers": (_numbers, 1), "pairs": (_pairs, 2), "bytes": (_bytes, 4)}


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


class Limits:
    """What the processor reads, bytes a second, and multiplies, products a second, with all threads: the best of all turns."""

    def __init__(self) -> None:
        self._memory = in_huge_pages(torch.ones(READ, dtype=torch.uint8))
        self._task = np.array([0, self._memory.data_ptr(), READ // PIECE], np.int64)
        self.read, self.rates = 0.0, dict.fromkeys(LOOPS, 0.0)

    def measure(self) -> None:
        threads = torch.get_num_threads()
        self._task[0] = 0
        self.read = max(self.read, READ / _seconds(lambda: run_in(threads, _read, self._task.ctypes.data)))
        for kind, (loop, products) in LOOPS.items():
            if kind != "pairs" or multiplies_pairs():
                done = REPEATS * MULTIPLIED * LANES * products * threads
                self.rates[kind] = max(self.rates[kind], done / _seconds(functools.partial(run_in, threads, loop, 0)))

    def of(self, target: TargetModel, kind: str, tokens: int) -> float:
        """Seconds that a forward takes at least."""
        size, numbers = weights_of(target)
        pairs = kind.startswith("bfloat16") and multiplies_pairs()
        rate = self.rates["bytes" if ":" in kind else "pairs" if pairs else "numbers"]
        return max(size / self.read, tokens * numbers / rate)


def weights_of(target: TargetModel) -> tuple[int, int]:
    """(bytes, numbers) of all matrices that a token is multiplied by."""
    program: Any = target.program
    steps = (step for stage in program.plan.stages for step in stage.steps)
    found = {id(step.weight): step.weight for step in steps if isinstance(step, Product)}
    return sum(each.nbytes for each in found.values()), sum(each.inner * each.outputs for each in found.values())


class Forwards:
    """Forwards of one row of a loaded model."""

    def __init__(self, target: TargetModel):
        self.program: Any = target.program
        self._slots = slots_of(target)
        self._slots.add([*range(5, 5 + PAST + max(TOKENS) + 1)])
        self._forward(PAST, "none")
        self._slots.keep([range(PAST)])

    def _forward(self, tokens: int, wanted: Wanted) -> float:
        batch = side_by_side([chain(np.arange(7, 7 + tokens, dtype=np.int32))], [wanted])
        return _seconds(lambda: self._slots.forward(batch))

    def seconds(self, tokens: int) -> float:
        taken = self._forward(tokens, "all")
        self._slots.keep([[]])
        return taken

    def seconds_of_parts(self, tokens: int) -> dict[str, float]:
        """Of a forward whose other stages are left out; what it computes means nothing."""
        self.seconds(tokens)
        program, found = self.program, {}
        head, stages = program._head, program._stages
        for kind, name in enumerate(PARTS):
            some = np.ascontiguousarray(stages[stages[:, program_kernel.STAGE_KIND] == kind])
            head[program_kernel.STAGE_TABLE], head[program_kernel.STAGES] = some.ctypes.data, len(some)
            found[name] = self.seconds(tokens)
        head[program_kernel.STAGE_TABLE], head[program_kernel.STAGES] = stages.ctypes.data, len(stages)
        return found


@torch.inference_mode()
def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    limits = Limits()
    for kind in arguments.kinds:
        dtype, quantize = [*kind.split(":"), "none"][:2]
        target = load_model(arguments.model, dtype=dtype, device="cpu", quantize=quantize)
        forwards, limits.read = Forwards(target), 0.0  # machines that others use read now faster, now slower
        found: dict[int, list[float]] = {tokens: [] for tokens in arguments.tokens}
        parts: dict[int, list[dict[str, float]]] = {tokens: [] for tokens in arguments.tokens}
        for turn in range(-2, TURNS):
            if turn % 5 == 0:
                limits.measure()
            for tokens in arguments.tokens:
                taken, of_parts = forwards.seconds(tokens), forwards.seconds_of_parts(tokens)
                if turn >= 0:
                    found[tokens].append(taken)
                    parts[tokens].append(of_parts)
        rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in limits.rates.items() if rate)
        read = f"{weights_of(target)[0] / 1e6:.0f} MB, read at {limits.read / 1e9:.1f} GB/s"
        print(f"{kind}: {read}; billions of products a second: {rates}")
        first = median(found[arguments.tokens[0]])
        for tokens, times in found.items():
            own, least = median(times), limits.of(target, kind, tokens)
            print(
                f"  {tokens:3} tokens {own * 1e3:6.2f} ms, {own / first:5.2f} times {arguments.tokens[0]}; "
                f"limit {least * 1e3:6.2f}, "
                f"{own / (1.25 * least + OTHER):5.2f} of 1.25 times that and {OTHER * 1e3:.1f} ms; "
                + ", ".join(f"{name} {median(each[name] for each in parts[tokens]) * 1e3:.2f}" for name in PARTS),
                flush=True,
            )
        del target, forwards


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="dtype, or dtype:quantization")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


if __name__ == "__main__":
    main()
