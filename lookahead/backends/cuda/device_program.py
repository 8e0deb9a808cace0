"""A model's packed forward as a few kernels of ours on a GPU. In: a plan of it, a pack of draft trees, slots. Out: scores.

A layer becomes about nine launches: its rows (device_rows.py), its products (device_products.py) and lookahead::tree_attention.
All of them give a token the same bits next to any other tokens, so drafts and batches change no token, in half precision too.
Nothing is read from the device, and all that changes from step to step stands in the pack and in the slots: so a forward can be
captured as a graph (graphs.py), which holds the addresses of buffers here. These are made once for each of few sizes and stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from lookahead.backends.cuda.device_rows import (
    BEHIND,
    IDS,
    KEPT,
    META,
    POSITIONS,
    SCORES,
    RowKernel,
    Slotted,
    row_kernel,
    size_in,
)
from lookahead.backends.lowering.plan import Attention, Buffer, Instruction, Plan, Product, View
from lookahead.forward.batch import MOST_TOKENS, Pack
from lookahead.forward.kv_cache import SlotCache

MOST_OF_OURS = 64  # tokens up to which products of ours take hardly longer than torch's, or less
Run = dict[str, Any]  # of a forward: tensors by the names that kernels know them by, and the cache
Launch = Callable[[Run], None]


class DeviceProgram:
    """Runs a plan. One forward at a time: a lock sees to it.

    exact: tokens get the same bits in forwards of any size. Else products of many tokens are left to torch, whose are faster.
    """

    def __init__(self, plan: Plan, device: torch.device, exact: bool = False):
        self.plan, self.device, self.exact = plan, device, exact
        self._lock = threading.Lock()
        self._launches: dict[tuple[int, bool], list[Launch]] = {}  # by the most tokens, and whether products are ours
        self._arenas: dict[int, torch.Tensor] = {}  # by the most tokens
        self._every: dict[int, torch.Tensor] = {}  # all tokens, likewise: graphs hold its address, too
        self._products = {
            step.target: step
            for stage in plan.stages
            for step in stage.steps
            if isinstance(step, Product) and step.target is not None
        }

    def run(self, pack: Pack, wanted: torch.Tensor | None, cache: SlotCache) -> torch.Tensor:
        """[wanted tokens, vocab] scores; fills the slots' keys and values. wanted: int64, tokens of the pack; None: all."""
        tokens = pack.input_ids.shape[1]
        assert pack.meta is not None
        from lookahead.backends.cuda.triton_attention import with_paths

        with self._lock:
            room = MOST_TOKENS if tokens <= MOST_TOKENS else 1 << (tokens - 1).bit_length()
            how = room, self.exact or tokens <= MOST_OF_OURS
            if how not in self._launches:
                self._launches[how] = self._made(*how)
            cache.open_layers(self.plan.placed, self.plan.dtype, self.device)
            kept = self._every[room][:tokens] if wanted is None else wanted
            scores = torch.empty(len(kept), self.plan.vocab, dtype=self.plan.scores_dtype, device=self.device)
            meta = with_paths(pack.meta) if room == MOST_TOKENS else pack.meta
            run = {IDS: pack.input_ids[0], POSITIONS: pack.position_ids[0], META: meta, KEPT: kept, SCORES: scores}
            run["cache"] = cache
            for launch in self._launches[how]:
                launch(run)
            return scores

    def _made(self, room: int, in_parts: bool) -> list[Launch]:
        """Return what launches the stages one after the other, over buffers for that many tokens. in_parts:
        products are ours.
        """
        if room not in self._arenas:
            for other in [size for size in self._arenas if size != MOST_TOKENS]:  # graphs hold addresses of the small one
                del self._arenas[other], self._every[other]
                self._launches = {how: launches for how, launches in self._launches.items() if how[0] != other}
            self._arenas[room] = torch.zeros(self.plan.row_bytes * room, dtype=torch.uint8, device=self.device)
            self._every[room] = torch.arange(room, device=self.device)
        arena = self._arenas[room]

        def rows_of(buffer: Buffer) -> torch.Tensor:
            """[room, numbers and perhaps some more]"""
            part = arena[buffer.offset * room :][: buffer.stride * room]
            four = size_in(buffer, self._products, in_parts) == 4
            return part.view(torch.float32 if four else self.plan.dtype).view(room, -1)

        launches: list[Launch] = []
        for stage in self.plan.stages:
            if isinstance(stage.steps[0], Instruction):
                kernel = row_kernel(stage, self._products, in_parts, self.plan.vocab, self.plan.scores_dtype)
                launches.append(_launch_rows(kernel, rows_of, stage.late))
            for step in stage.steps:
                if isinstance(step, Product):
                    launches.append(_launch_product(step, rows_of, stage.late, in_parts))
                elif isinstance(step, Attention):
                    launches.append(_launch_attention(step, rows_of))
        return launches


def _held(cache: SlotCache, number: int) -> torch.Tensor:
    """Keys or values of a layer, [slots, heads, capacity, width]."""
    layer = cache.layers[number // 2]
    held: torch.Tensor | None = layer.values if number % 2 else layer.keys
    assert held is not None
    return held


def _shown(view: View, rows_of: Callable[[Buffer], torch.Tensor]) -> torch.Tensor:
    """[room, numbers] of a flat view."""
    assert isinstance(view.home, Buffer)
    return rows_of(view.home)[:, view.start : view.start + view.count]


def _launch_rows(kernel: RowKernel, rows_of: Callable[[Buffer], torch.Tensor], late: bool) -> Launch:
    fixed = [rows_of(given) if isinstance(given, Buffer) else given for given in kernel.given]
    compiled = kernel.compiled()

    def launch(run: Run) -> None:
        arguments: list[Any] = []
        for given in fixed:
            if isinstance(given, Slotted):
                held = _held(run["cache"], given.number)
                arguments += [held, *held.stride()[:3]]
            elif isinstance(given, str):
                arguments += [run[given], *(run[given].stride(-2) for _ in BEHIND.get(given, ()))]
            else:
                arguments.append(given)
        tokens = len(run[KEPT]) if late else len(run[IDS])
        compiled[(tokens, kernel.pieces)](*arguments, num_warps=kernel.warps)

    return launch


def _launch_product(step: Product, rows_of: Callable[[Buffer], torch.Tensor], late: bool, in_parts: bool) -> Launch:
    """in_parts: by our kernel; else by torch, whose product is rounded and has the bias added."""
    tokens, outputs = _shown(step.tokens, rows_of), step.weight.outputs
    target = None if step.target is None else rows_of(step.target)
    weight, bias = step.weight.weight.t(), None if step.bias is None else step.bias.to(step.weight.dtype)
    if in_parts:
        from lookahead.backends.cuda.device_products import multiply

    def launch(run: Run) -> None:
        some = tokens[: len(run[KEPT]) if late else len(run[IDS])]
        if in_parts:
            if target is None:
                multiply(some, step.weight, step.bias, run[SCORES], outputs)
            else:
                multiply(some, step.weight, None, target, target.shape[1])
            return
        into = run[SCORES] if target is None else target[: len(some), :outputs]
        if bias is None:
            torch.mm(some, weight, out=into)
        else:
            torch.addmm(bias, some, weight, out=into)

    return launch


def _launch_attention(step: Attention, rows_of: Callable[[Buffer], torch.Tensor]) -> Launch:
    from lookahead.backends.cuda.triton_attention import tree_attention_triton

    queries = _shown(step.query, rows_of).unflatten(1, (step.heads, step.width))
    outputs = rows_of(step.target).unflatten(1, (step.heads, step.value_width))

    def launch(run: Run) -> None:
        tokens = len(run[IDS])
        keys, values = (_held(run["cache"], number) for number in (step.keys, step.values))
        tree_attention_triton(queries[:tokens], keys, values, run[META][step.kind], step.scale, result=outputs[:tokens])

    return launch
