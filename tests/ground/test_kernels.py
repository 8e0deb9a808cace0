"""Compiled kernels, kept on disk; arrays at addresses inside them: elements, rows and slices as numpy has them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lookahead.files import folders
from lookahead.native import kernels
from lookahead.native.kernels import address_of, carray, int32_at, int64_at, kernel

LIMIT = """
from lookahead.native.kernels import kernel
from lookahead.most import AT_MOST


@kernel
def limited(number):
    return min(number, AT_MOST)
"""
TWICE = """
from lookahead.native.kernels import kernel
from lookahead.limit import limited
from lookahead.most import AT_MOST


@kernel
def twice(number):
    return 2 * limited(number) + 1000 * AT_MOST
"""


@pytest.fixture
def twice_of_99(tmp_path, monkeypatch):
    """twice_of_99(at most) -> (what a new process says, True if it compiled it). Two files of kernels, one of a constant."""
    package = tmp_path / "lookahead"
    (package / "files").mkdir(parents=True)
    for module in ("__init__.py", "files/__init__.py"):
        (package / module).touch()
    shutil.copytree(Path(kernels.__file__).parent, package / "native", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(folders.__file__, package / "files")
    (package / "limit.py").write_text(LIMIT)
    (package / "twice.py").write_text(TWICE)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    asked = "from lookahead.twice import twice; print(twice(99), sum(twice.stats.cache_misses.values()))"

    def ask(at_most):
        (package / "most.py").write_text(f"AT_MOST = {at_most}")
        # Without bytecode, as of a file that changes within a second, and not in length, Python would take the old one.
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert ran.returncode == 0, ran.stderr
        said, missed = map(int, ran.stdout.split())
        return said, missed > 0

    return ask


@pytest.mark.deep
def test_kernel_is_compiled_anew_when_another_file_that_it_takes_in_has_changed_and_only_then(twice_of_99):
    assert twice_of_99(10) == (10_020, True)
    assert twice_of_99(10) == (10_020, False)
    assert twice_of_99(20) == (20_040, True)


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


def test_elements_rows_and_slices_are_those_of_numpy():
    compiled, array = results_of(elements)
    assert compiled == [23, 19, 19, 23, 7, 17, 7, ROWS, COLUMNS, 2, 17, 16]
    assert array[19] == 1019
