"""Order and memory of a program. In: steps in the order of a model's own forward. Out: stages, and an offset for each buffer.

Steps of one kind that do not wait for each other become a stage: all projections of a layer's input are one, regardless of what
the model computes between them. Behind the last attention, stages work on the tokens whose scores are wanted alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from lookahead.backends.lowering.ops import COPY
from lookahead.backends.lowering.plan import (
    Attention,
    Buffer,
    Instruction,
    Product,
    Stage,
    Step,
    View,
    flat_dims,
    reads,
    written,
)


def planned_memory(
    steps: Sequence[Step],
    changed: Callable[[list[Stage]], None] = lambda stages: None,
    never_local: Callable[[list[Stage]], set[Buffer]] = lambda stages: set(),
) -> tuple[list[Stage], int, int]:
    """(stages, bytes of all buffers for a token, bytes of local buffers for a thread).

    changed: changes stages before buffers get their offsets. never_local: buffers that are not, even if one stage uses them.
    """
    stages = _stages(steps)
    changed(stages)
    _mark_late(stages)
    return stages, *_placed(stages, never_local(stages))


def _needs(steps: Sequence[Step]) -> dict[Step, set[Step]]:
    """Return what each step waits for."""
    writers: dict[Buffer, list[Step]] = defaultdict(list)
    placed: dict[int, Step] = {}
    for step in steps:
        if (buffer := written(step)) is not None:
            writers[buffer].append(step)
        if isinstance(step, Instruction) and step.placed is not None:
            placed[step.placed] = step
    needs: dict[Step, set[Step]] = {}
    for step in steps:
        needs[step] = {writer for buffer in reads(step) for writer in writers[buffer]} - {step}
        if isinstance(step, Attention):
            needs[step] |= {placed[step.keys], placed[step.values]}
    return needs


def _stages(steps: Sequence[Step]) -> list[Stage]:
    needs, done = _needs(steps), set[Step]()
    rest, stages = list(steps), list[Stage]()
    while rest:
        for kind in (Instruction, Product, Attention):
            taken: list[Step] = []
            before = frozenset(done)
            for step in rest:
                # Instructions may wait for others of their stage: one thread runs all of a token's, in this order.
                if isinstance(step, kind) and needs[step] <= (done if kind is Instruction else before):
                    taken.append(step)
                    done.add(step)
                    if kind is Attention:
                        break
            if taken:
                stages.append(Stage(taken))
                rest = [step for step in rest if step not in done]
                break
        else:
            raise AssertionError("steps wait for each other")
    return stages


def _mark_late(stages: list[Stage]) -> None:
    """Stages behind the last attention are late; what products of these read is copied for the wanted tokens first."""
    last = max((number for number, stage in enumerate(stages) if isinstance(stage.steps[0], Attention)), default=-1)
    early = {buffer for stage in stages[: last + 1] for step in stage.steps if (buffer := written(step)) is not None}
    number = last + 1
    while number < len(stages):
        stage = stages[number]
        stage.late = True
        for step in stage.steps:
            if (buffer := written(step)) is not None:
                buffer.late = True
        copies: list[Step] = []
        if isinstance(stage.steps[0], Product):
            for step in stage.steps:
                if step.tokens.home in early:
                    source = step.tokens
                    words = source.count * source.home.size // 4  # copied as they are, with any meaning
                    copy = Buffer(source.count, source.home.size, late=True)
                    whole = View(source.home, source.start, flat_dims([words]), 0, source.dtype)
                    own = View(copy, 0, flat_dims([words]), 0, source.dtype)
                    copies.append(Instruction(COPY, 1, words, (own, 1, 1), [(whole, 1, 1)]))
                    step.tokens = View(copy, 0, source.dims, source.axis, source.dtype)
        if copies:
            stages.insert(number, Stage(copies, late=True))
            number += 1
        number += 1


def _placed(stages: Sequence[Stage], never_local: set[Buffer]) -> tuple[int, int]:
    """Give each buffer its offset. Offsets are used again once the stages that need them are over."""
    first: dict[Buffer, tuple[int, int]] = {}
    last: dict[Buffer, tuple[int, int]] = {}
    for number, stage in enumerate(stages):
        for index, step in enumerate(stage.steps):
            for buffer in filter(None, (*reads(step), written(step))):
                first.setdefault(buffer, (number, index))
                last[buffer] = (number, index)
    for buffer in first:
        number = first[buffer][0]
        of_rows = isinstance(stages[number].steps[0], Instruction)
        buffer.local = number == last[buffer][0] and of_rows and buffer not in never_local
    shared = [(first[b][0], last[b][0], b) for b in first if not b.local]
    own: dict[int, list[tuple[int, int, Buffer]]] = defaultdict(list)
    for buffer in first:
        if buffer.local:
            own[first[buffer][0]].append((first[buffer][1], last[buffer][1], buffer))
    return _fit(shared), max((_fit(lives) for lives in own.values()), default=0)


def _fit(lives: list[tuple[int, int, Buffer]]) -> int:
    """Offsets of buffers that live from one time to another, both included: the first gap that will do. Returns the end."""
    alive: list[tuple[int, int, int]] = []  # offset, end, until
    most = 0
    for begin, until, buffer in sorted(lives, key=lambda life: life[0]):
        alive = sorted(each for each in alive if each[2] >= begin)
        offset, size = 0, -(-buffer.stride // 64) * 64
        for taken, end, _ in alive:
            if offset + size <= taken:
                break
            offset = max(offset, end)
        buffer.offset = offset
        alive.append((offset, offset + size, until))
        most = max(most, offset + size)
    return most
