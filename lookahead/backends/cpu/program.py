"""A model's packed forward in one native call. In: a plan of it, a pack of draft trees, slots. Out: scores.

The plan (plan.py) becomes tables of instructions that hold addresses, which program_kernel.py runs. What changes from step to
step stands in the head of a run; the tables are changed only where buffers have moved: when a step brings more tokens than any
before, when the slots have got other memory, and when torch is given another number of threads.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import torch

from lookahead.backends.cpu import attention_kernel
from lookahead.backends.cpu import program_kernel as kernel
from lookahead.backends.cpu.attention_cpu import entry_of
from lookahead.backends.cpu.panel_kernel import OUTPUT, TASK, multiplier_of
from lookahead.backends.lowering import ops
from lookahead.backends.lowering.plan import STORED as IN_FLOATS
from lookahead.backends.lowering.plan import Attention, Buffer, Instruction, Plan, Product, Stage, View
from lookahead.forward.batch import Pack
from lookahead.forward.batch_kernel import NO_LIMIT
from lookahead.forward.kv_cache import SlotCache
from lookahead.forward.quantized_cache import DTYPES
from lookahead.native.threads import COUNTS, SHARES, c_function, gives_way, openmp, run_in, thread_number

LEAST = 64  # tokens that there is room for from the beginning
LINE = 64  # bytes, of a processor's cache
MOST_SHARES = 1 << 32  # of a stage
OF_RUN = struct.Struct(f"={kernel.RUN}q")
STORED = {**IN_FLOATS, torch.int8: ops.IN_8_BITS, torch.uint8: ops.IN_4_BITS}  # by the dtype of buffers


def _memory(size: int) -> tuple[np.ndarray, int]:
    """(what keeps it alive, the address of `size` bytes that begin at a line of the cache)."""
    memory = np.zeros(size + LINE, np.uint8)
    return memory, -(-memory.ctypes.data // LINE) * LINE


class Program:
    """Runs a plan. One forward at a time: a lock sees to it. kv_dtype: as of the caches that it is given."""

    exact = True

    def __init__(self, plan: Plan, kv_dtype: str = "none"):
        self.plan = plan
        self._kept = DTYPES.get(kv_dtype, plan.dtype)
        self._lock = threading.Lock()
        self._room = self._threads = self._base_count = 0
        self._version = -1  # of the cache whose buffers the tables know
        self._attend = c_function(entry_of(plan.dtype, self._kept))[1]
        instructions = (step for stage in plan.stages for step in stage.steps if isinstance(step, Instruction))
        self._written = [(row, step) for row, step in enumerate(instructions) if step.op == ops.WRITE]

    def run(self, pack: Pack, wanted: torch.Tensor | None, cache: SlotCache) -> torch.Tensor:
        """[wanted tokens, vocab] scores; fills the slots' keys and values. wanted: int64, tokens of the pack; None: all.

        Raises IndexError for ids and positions that tables have no row for.
        """
        assert pack.meta is not None
        tokens = pack.tokens
        with self._lock:
            self._arrange(tokens, torch.get_num_threads())
            self._find(cache)
            count, kept = (tokens, self._every.data_ptr()) if wanted is None else (len(wanted), wanted.data_ptr())
            scores = torch.empty(count, self.plan.vocab, dtype=self.plan.scores_dtype)
            addresses = pack.inputs.data_ptr(), pack.meta.data_ptr(), kept, scores.data_ptr()
            self._base_count += MOST_SHARES
            OF_RUN.pack_into(self._head.data, 0, self._base_count, 0, tokens, count, *addresses)
            run_in(1, kernel.prepare, self._head_at)
            if which := self._head[kernel.OUTSIDE]:
                what, last = "token id" if which == ops.IDS else "position", self.plan.most[int(which)] - 1
                raise IndexError(f"a {what} that the model has no row for: they end at {last}")
            run_in(self._threads, kernel.run, self._head_at)
            return scores

    def _arrange(self, tokens: int, threads: int) -> None:
        """Room for that many tokens, and memory for that many threads."""
        threads = threads if openmp() else 1
        if tokens <= self._room and threads == self._threads:
            return
        if tokens > self._room:
            self._room = max(LEAST, 1 << (tokens - 1).bit_length())
            self._every = torch.arange(self._room)
        self._threads, self._version = threads, -1
        self._held = [_memory(self.plan.row_bytes * self._room), _memory(self.plan.thread_bytes * threads)]
        (_, self._arena), (_, self._scratch) = self._held
        self._make_tables()

    def _make_tables(self) -> None:
        stages: list[tuple[int, ...]] = []
        rows: list[np.ndarray] = []
        products: list[list[int]] = []
        attention: list[bytes] = []
        for stage in self.plan.stages:
            first = stage.steps[0]
            if isinstance(first, Instruction):
                stages.append((kernel.ROWS, len(rows), len(stage.steps), stage.late, 0))
                rows += [self._row(step, stage) for step in stage.steps]
            elif isinstance(first, Product):
                stages.append((kernel.PRODUCTS, len(products), len(stage.steps), stage.late, 0))
                products += [self._product(step) for step in stage.steps]
            else:
                stages.append((kernel.ATTENTION, len(attention), attention_kernel.TASK * 8, stage.late, first.kind))
                attention.append(self._task(first))
        self._stages = np.array(stages, np.int64)
        self._rows = np.array(rows, np.int64).reshape(-1, kernel.ROW)
        self._products = np.array(products, np.int64).reshape(-1, TASK)
        self._attention = np.frombuffer(b"".join(attention), np.int64).reshape(-1, attention_kernel.TASK).copy()
        self._counters, counters = _memory(len(stages) * self._threads * COUNTS * 8)
        head = np.zeros(kernel.HEAD, np.int64)
        head[kernel.THREADS], head[kernel.STAGES] = self._threads, len(stages)
        head[kernel.STAGE_TABLE], head[kernel.ROW_TABLE] = self._stages.ctypes.data, self._rows.ctypes.data
        head[kernel.PRODUCT_TABLE], head[kernel.ATTENTION_TABLE] = self._products.ctypes.data, self._attention.ctypes.data
        head[kernel.ATTEND], head[kernel.YIELDS], head[kernel.COUNTERS] = self._attend, gives_way(), counters
        head[kernel.NUMBER] = thread_number()
        by_product = isinstance(self.plan.stages[-1].steps[-1], Product)
        last = self._products[-1, OUTPUT:] if by_product else self._rows[-1, kernel.TARGET + kernel.BASE :]
        head[kernel.SCORES_AT] = last.ctypes.data
        most = self.plan.most
        head[kernel.MOST_IDS], head[kernel.MOST_POSITIONS] = (most.get(which, NO_LIMIT) for which in (ops.IDS, ops.POSITIONS))
        self._head, self._head_at = head, head.ctypes.data

    def _base(self, view: View) -> tuple[int, int, int]:
        """Address of what a view shows first, bytes from token to token and from thread to thread."""
        home = view.home
        if not isinstance(home, Buffer):
            return home.data_ptr() + view.start * 4, 0, 0
        start = view.start * home.size
        if home.local:
            return self._scratch + home.offset + start, 0, self.plan.thread_bytes
        return self._arena + home.offset * self._room + start, home.stride, 0

    def _row(self, step: Instruction, stage: Stage) -> np.ndarray:
        line = np.zeros(kernel.ROW, np.int64)
        line[[kernel.OP, kernel.OUTER, kernel.INNER, kernel.AS]] = step.op, step.outer, step.inner, step.rounds
        line[kernel.MORE : kernel.MORE + len(step.more)] = step.more
        columns = (kernel.TARGET, kernel.LEFT, kernel.RIGHT)
        for column, operand in zip(columns, (step.target, *step.sources), strict=False):
            if operand is None:  # scores, whose address each run sets
                size = torch.finfo(self.plan.scores_dtype).bits // 8
                line[column : column + kernel.OPERAND] = 0, self.plan.vocab * size, 0, 0, 0, 1
                continue
            view, outer, inner = operand
            early = stage.late and isinstance(view.home, Buffer) and not view.home.late
            line[column : column + kernel.OPERAND] = *self._base(view), early, outer, inner
        return line

    def _product(self, step: Product) -> list[int]:
        address, stride, _ = self._base(step.tokens)
        weight, bias, target = step.weight, step.bias, step.target
        if target is None:
            output, output_stride = 0, self.plan.vocab * torch.finfo(self.plan.scores_dtype).bits // 8
        else:
            output, output_stride = self._arena + target.offset * self._room, target.stride
        return [
            *(0, multiplier_of(weight.kind), address, stride, 0, weight.weight.data_ptr(), weight.lines, weight.outputs),
            *(0 if bias is None else bias.data_ptr(), output, output_stride, step.stored, weight.held),
        ]

    def _task(self, step: Attention) -> bytes:
        address, stride, _ = self._base(step.query)
        size = step.target.size
        output = self._arena + step.target.offset * self._room
        return attention_kernel.TASK_BYTES.pack(
            *(0, 0, step.heads, step.key_heads, step.width, step.value_width, step.scale * attention_kernel.LOG2_E),
            *(address, stride, step.width * size, *[0] * 8, output, 0, size, 0, 0),
            SHARES * self._threads if self._threads > 1 else 1,
        )

    def _find(self, cache: SlotCache) -> None:
        """Write where the slots' keys and values are to the tables, if that has changed."""
        if cache.version == self._version:
            return
        plan = self.plan
        cache.open_layers(plan.placed, plan.dtype, torch.device("cpu"))
        where: dict[int, list[int]] = {}
        for number in plan.placed:
            layer = cache.layers[number // 2]
            held: Any = layer.values if number % 2 else layer.keys
            where[number] = [held.data_ptr(), *(stride * held.element_size() for stride in held.stride()[:3])]
        stored = STORED[self._kept]
        for row, step in self._written:
            assert step.placed is not None
            self._rows[row, kernel.MORE : kernel.MORE + 5] = *where[step.placed], stored
        attentions = [step for stage in plan.stages for step in stage.steps if isinstance(step, Attention)]
        for line, attention in zip(self._attention, attentions, strict=True):
            line[attention_kernel.KEY : attention_kernel.KEY + 4] = where[attention.keys]
            line[attention_kernel.VALUE : attention_kernel.VALUE + 4] = where[attention.values]
        self._version = cache.version
