"""Kernels run by Python, from the same source. In: a kernel. Out: a function of the same arguments and results.

To compile the kernel that drafts takes ten seconds or more, to run it in Python for one tree a fraction of a second. Numbers
keep numba's types: literals and constants become np.int64 and np.float64, so that mixed types are promoted as numba does it
(iterations of `range` and results of `math` excepted, so that a float32 may differ in its last bit).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba.core.registry import CPUDispatcher

from lookahead.native.kernels import PYTHON_IMPLS, Part


class Interpreted:
    """A kernel run by Python. Called with the kernel's arguments."""

    def __init__(self, kernel: Any):
        self.function = _interpreted(_source_of(kernel), {})

    def __call__(self, *arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return self.function(*(_strict(each) for each in arguments))

    def call_with(self, task: Any) -> None:
        """For a kernel of one address. task: an address, or bytes to read and write."""
        self(task if isinstance(task, int) else ctypes.cast(task, ctypes.c_void_p).value)


@contextlib.contextmanager
def interpreting(*kernels: Any) -> Iterator[None]:
    """While open, calls of these kernels from Python are run by Python, in all threads."""
    modules = [module for name, module in sys.modules.items() if name.startswith("lookahead.")]
    named = [(vars(module), name, kernel) for kernel in kernels for module in modules for name in _names_of(kernel, module)]
    made = {id(kernel): Interpreted(kernel) for kernel in kernels}
    for names, name, kernel in named:
        names[name] = made[id(kernel)]
    try:
        yield
    finally:
        for names, name, kernel in named:
            names[name] = kernel


def _names_of(kernel: Any, module: types.ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if value is kernel]


def _source_of(kernel: Any) -> Any:
    """The Python function that a kernel is compiled from."""
    dispatcher = kernel.dispatcher if isinstance(kernel, Part) else kernel
    return dispatcher.py_func if isinstance(dispatcher, CPUDispatcher) else dispatcher


def _interpreted(function: Any, known: dict[Any, Any]) -> Any:
    """A copy whose constants are strict, and which calls copies of the kernels that it calls. known: those made so far."""
    if function not in known:
        code = function.__code__
        names = {name: function.__globals__[name] for name in _names_in(code) if name in function.__globals__}
        made = known[function] = types.FunctionType(
            code.replace(co_consts=tuple(_strict(each) for each in code.co_consts)),
            {"__builtins__": function.__globals__["__builtins__"]},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        made.__globals__.update({name: _meaning(value, known) for name, value in names.items()})
    return known[function]


def _names_in(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _meaning(value: Any, known: dict[Any, Any]) -> Any:
    """What a global name of a kernel stands for in Python."""
    if isinstance(value, (Part, CPUDispatcher)):
        return _interpreted(_source_of(value), known)
    meaning: Callable[..., Any] | None = PYTHON_IMPLS.get(id(value))
    return _strict(value) if meaning is None else meaning


def _strict(value: Any) -> Any:
    """Numbers as numba types them; anything else unchanged."""
    if type(value) is int and -(2**63) <= value < 2**63:
        return np.int64(value)
    if type(value) is float:
        return np.float64(value)
    return tuple(map(_strict, value)) if type(value) is tuple else value
