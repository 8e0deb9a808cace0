"""Arrays at addresses inside kernels: elements, rows and slices as numpy has them."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from numba.core.types.functions import BaseFunction

from lookahead.native.interpreted import Interpreted
from lookahead.native.kernels import address_of, carray, int32_at, int64_at, kernel

ROWS, COLUMNS, LAYERS = 3, 4, 2


@kernel
def elements(address, results, row, column, unsigned):
    """Results, int64 [12], of an array int32 [layers, 3, 4] at an address."""
    array, out = carray(int32_at(address), (LAYERS, ROWS, COLUMNS)), carray(int64_at(results), (12,))
    sized = carray(int32_at(address), (np.int64(LAYERS), np.int64(ROWS), np.int64(COLUMNS)))  # sizes that are no constants
    out[0], out[1], out[2] = array[1, 2, 3], array[1, row, column], sized[1, row, column]
    out[3], out[4] = array[-1, -1, -1], sized[-2, row - ROWS, -1]
    out[5], out[6] = array[unsigned, unsigned, unsigned], sized[0][row][column]
    layer = sized[1]
    out[7], out[8] = len(layer), layer.shape[1]
    part = layer[row][1:column]
    out[9], out[10] = len(part), part[0]
    layer[row, column] += 1000
    out[11] = (address_of(layer[row]) - address) // 4


def results_of(function) -> tuple[list[int], np.ndarray]:
    array, results = np.arange(LAYERS * ROWS * COLUMNS, dtype=np.int32), np.zeros(12, np.int64)
    function(array.ctypes.data, results.ctypes.data, np.int64(1), np.int32(3), np.uint64(1))
    return results.tolist(), array


def test_elements_rows_and_slices_are_those_of_numpy() -> None:
    compiled, array = results_of(elements)
    assert compiled == [23, 19, 19, 23, 7, 17, 7, ROWS, COLUMNS, 2, 17, 16]
    interpreted, other = results_of(Interpreted(elements))
    assert interpreted == compiled
    assert np.array_equal(array, other)
    assert array[19] == 1019


@kernel
def of_two_axes(address):
    return carray(int64_at(address), (2,))[0, 0]


@kernel
def filled(address):
    carray(int64_at(address), (2,))[:] = 0


@pytest.mark.parametrize("wrong", [of_two_axes, filled])
def test_what_is_not_defined_is_refused_and_leaves_the_compiler_as_it_was(wrong) -> None:
    before = BaseFunction.get_call_type
    with pytest.raises(numba.TypingError):
        wrong(0)
    assert BaseFunction.get_call_type is before
