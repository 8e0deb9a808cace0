"""Captured graphs without a GPU: what a forward does is recorded, operation by operation, and done again.

As in a CUDA graph, operations read and write the tensors that they had when they were recorded: Python does not run again. What
would read from the device, and so cannot be captured, raises HostRead.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lookahead.backends.cpu import backend
from lookahead.backends.cuda.graphs import Outputs

READS = ("_local_scalar_dense", "nonzero", "aten::equal", "masked_select", "unique", "aten::item", "is_nonzero")


class HostRead(Exception):
    """An operation whose result Python needs."""


class Recording(TorchDispatchMode):
    """done: (function, arguments, keyword arguments, result) of each operation that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if any(read in name for read in READS):
            raise HostRead(name)
        result = function(*args, **(kwargs or {}))
        if not (function.is_view and _shares(result, args)):  # such as `to`, which may copy
            self.done.append((function, args, kwargs or {}, result))
        return result


def _shares(result: Any, args: Any) -> bool:
    """Whether it lies where one of the arguments does."""
    places = [
        {x.untyped_storage().data_ptr() for x in tree_leaves(each) if isinstance(x, torch.Tensor)} for each in (result, args)
    ]
    return bool(places[0] & places[1])


class EmulatedCapture:
    """See `graphs.Capture`. graphs: operations of each, views left out."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        recording, kernel = Recording(), backend.tree_attention

        def noted(*args: Any) -> torch.Tensor:  # it takes addresses, and would not be seen
            result = kernel(*args)
            recording.done.append((kernel, args, {}, result))
            return result

        run()
        with pytest.MonkeyPatch.context() as patch, recording:
            patch.setattr(backend, "tree_attention", noted)
            outputs = run()
        self.graphs.append(len(recording.done))

        def replay() -> None:
            for function, args, kwargs, result in recording.done:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old is not new and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return outputs, replay
