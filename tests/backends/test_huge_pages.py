"""lookahead/backends/cpu/huge_pages.py: copies in huge pages."""

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from lookahead.backends.cpu.huge_pages import CHUNK, LINE, in_huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_copies_are_contiguous_equal_and_apart(dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(0, 100, (rows, 7), generator=generator).to(dtype).T for rows in (1, 3, 64, 1000)]
    copies = [in_huge_pages(each) for each in tensors]
    assert all(
        copy.equal(each) and copy.is_contiguous() and copy.data_ptr() % LINE == 0
        for copy, each in zip(copies, tensors, strict=True)
    )
    copies[0].zero_()
    assert copies[1].equal(tensors[1])
    assert in_huge_pages(torch.zeros(0, 3)).shape == (0, 3)


def test_memory_is_released_with_the_last_copy_in_it():
    def mapped() -> int:
        return int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10

    in_huge_pages(torch.zeros(CHUNK, dtype=torch.uint8))  # what comes next begins another piece
    before = mapped()
    copy = in_huge_pages(torch.zeros(8 * CHUNK, dtype=torch.uint8))
    assert mapped() >= before + 7 * CHUNK
    del copy
    in_huge_pages(torch.zeros(CHUNK, dtype=torch.uint8))
    gc.collect()
    assert mapped() < before + 2 * CHUNK


@pytest.mark.parametrize("system", ["without", "refuses"])
def test_copies_are_the_same_where_there_are_no_such_pages(system, monkeypatch):
    if system == "without":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # EINVAL
        in_huge_pages(torch.zeros(CHUNK, dtype=torch.uint8))
    tensor = torch.arange(12).view(3, 4).T
    copy = in_huge_pages(tensor)
    assert copy.equal(tensor)
    assert copy.is_contiguous()
