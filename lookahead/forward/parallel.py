"""Processes that share one model, each with a slice of every layer (tensor parallel), as torchrun starts them.

They must take the same steps, or they wait for each other permanently. So what one of them alone knows (requests, that the job
is to end) is sent by the first, and what each measures for itself (time, free memory) is agreed on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lookahead.errors import UsageError

Item = TypeVar("Item")
END = "end"  # instead of an item: there are no more


class Peers:
    """The processes that share a model, this one included. Each call is to be made by all of them, in the same order."""

    def __init__(self) -> None:
        self.leads = dist.get_rank() == 0
        self.together = False  # they have begun to work

    def broadcast(self, value: Any = None) -> Any:
        """The leader's value."""
        box = [value if self.leads else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def begin(self) -> bool:
        """The leader calls the others to work; False for one that is not needed, as the leader has ended."""
        self.together = self.broadcast(True)
        return self.together

    def each(self, items: Iterable[Item] = ()) -> Iterator[Item]:
        """The leader's items, one at a time."""
        own = iter(items)
        while True:
            item = self.broadcast(next(own, END) if self.leads else None)
            if isinstance(item, str) and item == END:
                return
            yield item


@contextlib.contextmanager
def joined() -> Iterator[Peers]:
    """Join the processes that torchrun has started. Raises UsageError if it has not.

    A group that this joins is left at the end: its thread, still letting go of a message while the interpreter ends, would
    abort the process.
    """
    if "RANK" not in os.environ:
        raise UsageError("--tp-plan: start it by torchrun --no-python --nproc-per-node N lookahead generate ...")
    joins = not dist.is_initialized()
    if joins:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    peers = Peers()
    try:
        yield peers
    finally:
        if peers.leads and not peers.together:
            peers.broadcast(False)
        if joins:
            dist.destroy_process_group()


def agreed(value: float) -> float:
    """The least of the values that all processes give."""
    return all_agreed([value])[0]


def all_agreed(values: Sequence[float]) -> list[float]:
    """Return of each value the least that any process gives: one call for all of them, as each waits."""
    box = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MIN)
    return box.tolist()
