"""Arrays inside kernels that are an address and sizes. In: pointers. Out: elements, rows and slices of what lies there.

An array of numba's own is seven numbers or more and an owner whose references are counted. Each index into one becomes some
sixty instructions of LLVM, which take time until they are optimised away. A `BareArray` is a pointer and those sizes that are
not constants, and an index into it becomes about five. It is C-contiguous, and nobody owns it. Kernels may do with it what is
defined here: read and write elements by integers (negative ones count from the end), take rows and slices of one axis, ask for
`len`, `shape` and `dtype`. A loop replaces what numpy would do to a whole array.
"""

from __future__ import annotations

import operator
from typing import Any

from numba import types
from numba.core.cgutils import unpack_tuple
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import infer_getattr, intrinsic, lower_builtin, lower_getattr, models, register_model


class BareArray(types.Type):
    """extents: of each axis its size, None where it is known at run time only."""

    def __init__(self, dtype: Any, extents: tuple[int | None, ...]):
        self.dtype, self.extents, self.ndim = dtype, extents, len(extents)
        super().__init__(f"BareArray({dtype}, {extents})")

    mutable = True


@register_model(BareArray)
class _BareArrayModel(models.StructModel):
    """The address of the first element, and the sizes that are not constants."""

    def __init__(self, manager: Any, kind: BareArray):
        sizes = [(f"size{axis}", types.intp) for axis, extent in enumerate(kind.extents) if extent is None]
        super().__init__(manager, kind, [("data", types.CPointer(kind.dtype)), *sizes])


def array_at(context, builder, kind, data, sizes):
    """The array at a typed pointer. sizes: values, of all axes; those that are constants are not used."""
    fields = [data, *(size for size, extent in zip(sizes, kind.extents, strict=True) if extent is None)]
    model = context.data_model_manager[kind]
    array = context.get_constant_undef(kind)
    for position, field in enumerate(fields):
        array = model.set(builder, array, field, position)
    return array


def _size(context, builder, kind, array, axis):
    if kind.extents[axis] is not None:
        return context.get_constant(types.intp, kind.extents[axis])
    return builder.extract_value(array, 1 + kind.extents[:axis].count(None))


def _sizes(context, builder, kind, array):
    return [_size(context, builder, kind, array, axis) for axis in range(kind.ndim)]


def _indices(index):
    """Types of the indices of each axis; None if these are not all integers."""
    several = tuple(index) if isinstance(index, types.BaseTuple) else (index,)
    return several if all(isinstance(each, types.Integer) for each in several) else None


def _element(context, builder, kind, array, index, given):
    """A pointer to where an index, of as many axes or fewer, leads. index: its type; given: its value."""
    types_of = _indices(index)
    values = unpack_tuple(builder, given) if isinstance(index, types.BaseTuple) else [given]
    offset = None
    for axis in range(kind.ndim):
        if offset is not None:
            offset = builder.mul(offset, _size(context, builder, kind, array, axis), flags=("nsw",))
        if axis < len(types_of):
            value = _position(context, builder, kind, array, axis, types_of[axis], values[axis])
            offset = value if offset is None else builder.add(offset, value, flags=("nsw",))
    return builder.gep(builder.extract_value(array, 0), [offset], inbounds=True)


def _position(context, builder, kind, array, axis, index, value):
    """An index of one axis, counted from its beginning."""
    if isinstance(index, types.IntegerLiteral):
        number = index.literal_value
        if number >= 0:
            return context.get_constant(types.intp, number)
        return builder.add(_size(context, builder, kind, array, axis), context.get_constant(types.intp, number))
    if not index.signed:
        return context.cast(builder, value, index, types.uintp)
    value = context.cast(builder, value, index, types.intp)
    zero = context.get_constant(types.intp, 0)
    from_end = builder.add(value, _size(context, builder, kind, array, axis))
    return builder.select(builder.icmp_signed("<", value, zero), from_end, value)


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):
    prefer_literal = True

    def generic(self, args, kws):
        array, index = args
        if not isinstance(array, BareArray):
            return None
        if array.ndim == 1 and isinstance(index, types.SliceType) and not index.has_step:
            return signature(BareArray(array.dtype, (None,)), array, types.slice2_type)
        several = _indices(index)
        if several is None or len(several) > array.ndim:
            return None
        left = array.extents[len(several) :]
        return signature(BareArray(array.dtype, left) if left else array.dtype, array, index)


@lower_builtin(operator.getitem, BareArray, types.Any)
def _get_item(context, builder, sig, args):
    kind, index = sig.args
    pointer = _element(context, builder, kind, args[0], index, args[1])
    if not isinstance(sig.return_type, BareArray):
        return context.unpack_value(builder, kind.dtype, pointer)
    sizes = _sizes(context, builder, kind, args[0])[-sig.return_type.ndim :]
    return array_at(context, builder, sig.return_type, pointer, sizes)


@lower_builtin(operator.getitem, BareArray, types.SliceType)
def _get_slice(context, builder, sig, args):
    """Slice one axis, from 0 to its size: bounds are neither negative nor beyond it."""
    bounds = context.make_helper(builder, sig.args[1], args[1])
    zero = context.get_constant(types.intp, 0)
    size = builder.sub(bounds.stop, bounds.start)
    size = builder.select(builder.icmp_signed("<", size, zero), zero, size)
    data = builder.gep(builder.extract_value(args[0], 0), [bounds.start], inbounds=True)
    return array_at(context, builder, sig.return_type, data, [size])


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):
    prefer_literal = True

    def generic(self, args, kws):
        array, index, value = args
        if not isinstance(array, BareArray) or len(_indices(index) or ()) != array.ndim:
            return None
        if self.context.can_convert(value, array.dtype) is None:
            return None
        return signature(types.none, array, index, array.dtype)


@lower_builtin(operator.setitem, BareArray, types.Any, types.Any)
def _set_item(context, builder, sig, args):
    kind, index, _ = sig.args
    pointer = _element(context, builder, kind, args[0], index, args[1])
    context.pack_value(builder, kind.dtype, args[2], pointer)


@infer_global(len)
class _Len(AbstractTemplate):
    def generic(self, args, kws):
        if len(args) == 1 and isinstance(args[0], BareArray):
            return signature(types.intp, *args)
        return None


@lower_builtin(len, BareArray)
def _len(context, builder, sig, args):
    return _size(context, builder, sig.args[0], args[0], 0)


@infer_getattr
class _Attributes(AttributeTemplate):
    key = BareArray

    def resolve_shape(self, array):
        return types.UniTuple(types.intp, array.ndim)

    def resolve_dtype(self, array):
        return types.DType(array.dtype)


@lower_getattr(BareArray, "dtype")
def _dtype(context, builder, kind, array):
    return context.get_dummy_value()


@lower_getattr(BareArray, "shape")
def _shape(context, builder, kind, array):
    sizes = _sizes(context, builder, kind, array)
    return context.make_tuple(builder, types.UniTuple(types.intp, kind.ndim), sizes)


@intrinsic(prefer_literal=True)
def carray(typing_context, pointer, shape):
    """The array of this shape at a typed pointer."""
    extents = tuple(size.literal_value if isinstance(size, types.IntegerLiteral) else None for size in shape)
    kind = BareArray(pointer.dtype, extents)

    def codegen(context, builder, signature, arguments):
        values = unpack_tuple(builder, arguments[1])
        sizes = [context.cast(builder, size, of, types.intp) for size, of in zip(values, signature.args[1], strict=True)]
        return array_at(context, builder, kind, arguments[0], sizes)

    return kind(pointer, shape), codegen


@intrinsic
def address_of(typing_context, array):
    """int64: where an array begins."""

    def codegen(context, builder, signature, arguments):
        return builder.ptrtoint(builder.extract_value(arguments[0], 0), context.get_value_type(types.int64))

    return types.int64(array), codegen
