"""Compiled kernels, kept on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from lookahead.native import kernels
from tests.support.native import copy_of_native

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

LAYOUT: kernels.Layout = {
    "counts": (np.int64, ("rows", 2)),
    "shares": (np.float64, ("columns + 1",)),
    "tokens": (np.int32, (3,)),
    "weights": (np.float32, ("rows", "columns")),
}
arrays_arrays = kernels.unpacker("Arrays", LAYOUT)


@kernels.kernel
def fill(addresses):
    """Each array with a number of its own; returns their sizes."""
    arrays = arrays_arrays(addresses)
    for row in range(len(arrays.counts)):
        arrays.counts[row, 0], arrays.counts[row, 1] = 1, 1
        for column in range(arrays.weights.shape[1]):
            arrays.weights[row, column] = 4
    for column in range(len(arrays.shares)):
        arrays.shares[column] = 2
    for k in range(3):
        arrays.tokens[k] = 3
    return arrays.counts.shape, arrays.shares.shape, arrays.tokens.shape, arrays.weights.shape


def test_a_kernel_sees_the_arrays_of_a_block_as_its_layout_declares_them() -> None:
    block = kernels.Block(LAYOUT, columns=5, rows=2)
    assert fill(block.addresses) == ((2, 2), (6,), (3,), (2, 5))
    for number, (name, (dtype, _)) in enumerate(LAYOUT.items(), 1):
        assert getattr(block, name).dtype == dtype
        assert (getattr(block, name) == number).all()


@kernels.inlined
def plus(number, more):
    return number + more


@kernels.kernel
def plus_two(number):
    return plus(number, 2)


def test_a_part_runs_within_kernels_and_alone_and_within_them_has_no_machine_code_of_its_own() -> None:
    assert plus_two(1) == 3
    assert plus(1, 4) == 5
    plus.dispatcher.compile((numba.int64, numba.int64))  # where plus_two is loaded from disk, nothing has asked for it
    compiled = plus.dispatcher.overloads[numba.int64, numba.int64]
    assert compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name) == 0
    (whole,) = plus_two.overloads.values()
    assert whole.library.get_pointer_to_function(whole.fndesc.llvm_func_name) != 0


def test_a_block_that_grows_is_seen_with_its_new_sizes() -> None:
    block = kernels.Block(LAYOUT, columns=1, rows=1)
    block.sizes["rows"], block.counts, block.weights = 3, np.zeros((3, 2), np.int64), np.zeros((3, 1), np.float32)
    block.refresh()
    assert fill(block.addresses) == ((3, 2), (2,), (3,), (3, 1))
    assert (block.counts == 1).all()


def test_sizes_are_those_that_the_layout_names() -> None:
    with pytest.raises(KeyError, match="rows"):
        kernels.Block(LAYOUT, columns=1)
    with pytest.raises(AssertionError, match="depth"):
        kernels.Block(LAYOUT, columns=1, rows=1, depth=1)


@pytest.fixture
def twice_of_99(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """twice_of_99(at most) -> (what a new process says, True if it compiled it). Two files of kernels, one of a constant."""
    package = tmp_path / "lookahead"
    package.mkdir()
    (package / "__init__.py").touch()
    copy_of_native(package)
    (package / "limit.py").write_text(LIMIT)
    (package / "twice.py").write_text(TWICE)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    asked = "from lookahead.twice import twice; print(twice(99), sum(twice.stats.cache_misses.values()))"

    def ask(at_most: int) -> tuple[int, bool]:
        (package / "most.py").write_text(f"AT_MOST = {at_most}")
        # Without bytecode, as of a file that changes within a second, and not in length, Python would take the old one.
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert ran.returncode == 0, ran.stderr
        said, missed = map(int, ran.stdout.split())
        return said, missed > 0

    return ask


@pytest.mark.deep
def test_kernel_is_compiled_anew_when_another_file_that_it_takes_in_has_changed_and_only_then(twice_of_99) -> None:
    assert twice_of_99(10) == (10_020, True)
    assert twice_of_99(10) == (10_020, False)
    assert twice_of_99(20) == (20_040, True)
