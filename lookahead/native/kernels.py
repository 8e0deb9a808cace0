"""How kernels are compiled, and how they are given many arrays. In: functions over numbers and arrays. Out: machine code.

Kernels release the GIL and are compiled once per machine, which a new user waits for. So their compiler is a faster one
(compiler.py), arrays that a kernel finds by an address are bare (arrays.py), arrays are copied into arrays by
loops (numba's own check of their shapes takes a second or two to compile, in each kernel), and variables that a loop changes
begin as np.int64: what is called with one that begins as a literal is compiled twice.

numba keeps what it has compiled until the function's own file changes. But the kernels that it calls are a part of it, as are
constants, and those may come from other files. So here it is kept until any file with kernels changes, or one that these import
from (`_sources`): after an update, a kernel of yesterday would write where arrays no longer are. Where: see cache.py.
numba has no public way to do so. Its own cache takes only a folder (`NUMBA_CACHE_DIR`, `NUMBA_CACHE_LOCATOR_CLASSES`, which
hold for the user's own functions too), not what a kernel depends on nor who may have written it; so the cache of a kernel is
put into its dispatcher's `_cache`, the one private field of numba that we write.

A kernel that is given forty arrays spends more time on taking them over than on a short draft. So a `Block` allocates them and
keeps their addresses in one array; inside the kernel a `BlockPointer`, a single pointer, stands for them all. Both follow from
one `Layout`. Whoever calls a kernel keeps the blocks alive.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model, typeof_impl
from numba.np.arrayobj import make_array
from numba.np.numpy_support import from_dtype

from lookahead.native.arrays import BareArray, array_at
from lookahead.native.arrays import address_of as address_of
from lookahead.native.arrays import carray as carray
from lookahead.native.cache import KernelCache
from lookahead.native.compiler import KernelCompiler, PartCompiler


def _sources() -> bytes:
    """A hash of all files of this package that hold kernels, and of those that they import from: this one is among them."""
    root = Path(__file__).parents[1]
    texts = {".".join(path.relative_to(root).with_suffix("").parts): path.read_bytes() for path in root.rglob("*.py")}
    names = {name for name, text in texts.items() if b"from lookahead.native.kernels import" in text}
    for text in [texts[name] for name in names]:
        names.update(name.decode() for name in re.findall(rb"^from lookahead\.([\w.]+) import", text, re.MULTILINE))
    return hashlib.sha256(b"".join(texts[name] for name in sorted(names & texts.keys()))).digest()


SOURCES = _sources()


def kernel(function: Callable[..., Any]) -> Any:
    """A decorator: compile the function, and keep that on disk for as long as SOURCES is the same."""
    dispatcher = numba.njit(nogil=True, error_model="numpy", pipeline_class=KernelCompiler)(function)
    if not numba.config.DISABLE_JIT:  # else it is the function itself
        dispatcher._cache = KernelCache(function, SOURCES)
    return dispatcher


class Part:
    """A function that kernels call: compiled with each of them. Python can call it too; then it is a kernel."""

    def __init__(self, function: Callable[..., Any], **options: Any):
        self._kernel = kernel(function)
        self.dispatcher = numba.njit(error_model="numpy", pipeline_class=PartCompiler, **options)(function)

    def __call__(self, *arguments: Any) -> Any:
        return self._kernel(*arguments)


@typeof_impl.register(Part)
def _type_of_part(part: Part, context: Any) -> types.Dispatcher:
    return types.Dispatcher(part.dispatcher)


part = Part  # a function within kernels: for large ones, and those with several callers
inlined = functools.partial(Part, forceinline=True)  # inlined by LLVM: for calls in inner loops, and those with one caller


def pointer_to(numba_type):
    """A kernel that takes an address for a pointer to values of this type."""

    @intrinsic
    def pointer(typing_context, address):
        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(numba_type)(types.int64), codegen

    return pointer


uint8_at, uint16_at = pointer_to(types.uint8), pointer_to(types.uint16)
uint32_at, uint64_at = pointer_to(types.uint32), pointer_to(types.uint64)
int16_at, int32_at, int64_at = pointer_to(types.int16), pointer_to(types.int32), pointer_to(types.int64)
float32_at, float64_at = pointer_to(types.float32), pointer_to(types.float64)


def fetch(builder, pointer):
    """A hint to the processor; it is ignored where nothing can be read."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    to_read, near, data = number(0), number(3), number(1)
    builder.call(function, [builder.bitcast(pointer, byte), to_read, near, data])


@intrinsic
def fetch_address(typing_context, address):
    """The cache line at this address is read soon. It may lie anywhere: nothing is read now."""

    def codegen(context, builder, signature, arguments):
        fetch(builder, builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def fetch_entry(typing_context, array, index):
    """The entry of an array at this index is read soon, counted as in its memory."""

    def codegen(context, builder, signature, arguments):
        data = builder.extract_value(arguments[0], 0)
        fetch(builder, builder.gep(data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


# name -> (dtype, shape). A string in a shape is a size by name, or such a size and more: "texts", "texts + 1".
Layout = Mapping[str, tuple[Any, tuple[int | str, ...]]]


def sizes_in(layout: Layout) -> list[str]:
    """The names of sizes in the shapes of a layout, in the order in which they first stand there."""
    named = (size.partition(" + ")[0] for _, shape in layout.values() for size in shape if isinstance(size, str))
    return list(dict.fromkeys(named))


def _extent(size: int | str, sizes: Mapping[str, int]) -> int:
    """The number that a size in a shape stands for."""
    if isinstance(size, int):
        return size
    name, _, more = size.partition(" + ")
    return sizes[name] + int(more or 0)


class BlockPointer(types.Type):
    """The arrays of a `Block` inside a kernel: its address. An attribute is an array, made where it is used.

    A tuple of the arrays would hold some 200 numbers, and each function that takes it would be compiled with them as arguments.
    """

    def __init__(self, name: str, layout: Layout):
        super().__init__(f"BlockPointer({name})")
        self.sizes, self.numbers = sizes_in(layout), {}
        for number, (field, (dtype, shape)) in enumerate(layout.items(), len(self.sizes)):
            extents = tuple(size if isinstance(size, int) else None for size in shape)
            self.numbers[field] = number, shape, BareArray(from_dtype(np.dtype(dtype)), extents)


@register_model(BlockPointer)
class _ViewModel(models.OpaqueModel):
    """A pointer."""


@infer_getattr
class _ViewAttributes(AttributeTemplate):
    key = BlockPointer

    def generic_resolve(self, view, name):
        return view.numbers[name][-1] if name in view.numbers else None


@lower_getattr_generic(BlockPointer)
def _array_of(context, builder, view, value, name):
    """Addresses do not change while a kernel runs, so they are loaded once."""
    addresses = builder.bitcast(value, context.get_value_type(types.intp).as_pointer())

    def load(number):
        loaded = builder.load(builder.gep(addresses, [context.get_constant(types.intp, number)]))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    def extent(size):
        if isinstance(size, int):
            return context.get_constant(types.intp, size)
        named, _, more = size.partition(" + ")
        return builder.add(load(view.sizes.index(named)), context.get_constant(types.intp, int(more or 0)))

    number, shape, kind = view.numbers[name]
    data = builder.inttoptr(load(number), context.get_data_type(kind.dtype).as_pointer())
    return array_at(context, builder, kind, data, [extent(size) for size in shape])


def unpacker(name: str, layout: Layout) -> Any:
    """Make a function for kernels, from the addresses of a `Block` of this layout to its `BlockPointer`."""
    view = BlockPointer(name, layout)

    @intrinsic
    def arrays(typing_context, addresses):
        def codegen(context, builder, signature, arguments):
            pointer = arguments[0]
            if isinstance(addresses, types.Array):
                pointer = make_array(addresses)(context, builder, pointer).data
            return builder.bitcast(pointer, context.get_value_type(view))

        return view(addresses), codegen

    return arrays


class Block:
    """Arrays of one layout, as attributes."""

    def __init__(self, layout: Layout, **sizes: int):
        """sizes: those that the layout names, in any order."""
        self.sizes = {name: sizes.pop(name) for name in sizes_in(layout)}
        assert not sizes, f"the layout has no sizes named {', '.join(sizes)}"
        self.names = tuple(layout)
        for name, (dtype, shape) in layout.items():
            setattr(self, name, np.zeros([_extent(size, self.sizes) for size in shape], dtype))
        self.addresses = np.zeros(len(self.sizes) + len(self.names), np.int64)
        self.address = self.addresses.ctypes.data  # which stays the same
        self.refresh()

    if TYPE_CHECKING:  # the arrays

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def refresh(self) -> None:
        """After an array was replaced: note all addresses again. addresses: int64 [sizes + arrays], at `address`."""
        arrays = [np.ascontiguousarray(getattr(self, name)) for name in self.names]
        for name, array in zip(self.names, arrays, strict=True):
            setattr(self, name, array)
        self.addresses[:] = [*self.sizes.values(), *(array.ctypes.data for array in arrays)]
