"""The attention op in Triton: what the reference says, the same bits in any company; compiled for GPUs without spills.

Needs Triton, which comes with torch for CUDA and can be installed beside torch for CPUs (300 MB), and its interpreter, which
knows no bfloat16:

    pip install triton && TRITON_INTERPRET=1 pytest tests/backends/test_triton_attention.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forward.test_tree_attention import NO_LIMIT, Step, assert_same_alone, buffers, queries, steps
from tests.support.depth import deep
from tests.support.plain_attention import reference

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 to run Triton's kernels without a GPU", allow_module_level=True)

from lookahead.backends.cuda.triton_attention import tree_attention_triton, with_paths

CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3}
SCALE = 0.2
pytestmark = pytest.mark.filterwarnings("ignore")  # rows of a tile that nobody uses divide by 0 in the interpreter


steps_here = steps(3, (5, 17, 33), (63, 64, 200, 255, 256, 270))


@settings(max_examples=8)  # an example takes seconds
@given(
    steps_here,
    st.sampled_from([(1, 1), (4, 2), (3, 1), (8, 1)]),
    st.sampled_from([(64, 64), (16, 16), (24, 40)]),
    st.sampled_from(sorted(CLOSE, key=str)),
)
def test_outputs_are_those_of_the_reference_whatever_the_scratch_memory(step, heads, widths, dtype):
    keys, values = buffers(step, heads[1], widths, dtype)
    query, meta = queries(step, heads[0], widths[0], dtype), step.meta()
    outputs = tree_attention_triton(query, keys, values, meta, SCALE)
    expected = reference(query, keys, values, meta, SCALE)
    torch.testing.assert_close(outputs, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert not outputs[step.tokens :].any()
    assert tree_attention_triton(query, keys, values, meta, SCALE, scratch=30_000).equal(outputs)
    assert tree_attention_triton(query, keys, values, with_paths(meta[None])[0], SCALE).equal(outputs)


@settings(max_examples=8)
@given(steps_here, st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(0, 99))
def test_token_gets_the_same_bits_in_a_tree_a_chain_a_batch_and_alone(step, heads, seed):
    keys, values = buffers(step, heads[1], (16, 16), torch.float32)
    query = queries(step, heads[0], 16, torch.float32)
    assert_same_alone(lambda *given: tree_attention_triton(*given, SCALE), step, query, keys, values, seed)


@pytest.mark.parametrize("size", deep([100, 256]))
@settings(max_examples=4)
@given(st.sampled_from([NO_LIMIT, 40]), st.sampled_from([1, 2, 6, 8]), st.integers(0, 9))
def test_wide_trees(size, window, shared, seed):
    random = np.random.default_rng(seed)
    step = Step([[-1, *(int(random.integers(max(0, node - 9), node)) for node in range(1, size))]], [50], window)
    keys, values = buffers(step, 1, (16, 16), torch.float32)
    query, meta = queries(step, shared, 16, torch.float32), step.meta()
    torch.testing.assert_close(
        tree_attention_triton(query, keys, values, meta, SCALE),
        reference(query, keys, values, meta, SCALE),
        rtol=2e-5,
        atol=2e-5,
    )


# ---- compiled for GPUs that are not here
SHAPES = ["bfloat16 4 128", "bfloat16 1 128", "float32 1 128"]
MORE = [f"bfloat16 {shared} {width}" for shared in (1, 2, 4, 7) for width in (64, 80, 128, 256)]
MORE += [f"float32 4 {width}" for width in (32, 64, 128, 256)] + ["float16 4 128"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("shapes", [SHAPES, *deep([MORE])], ids=len)
def test_kernels_spill_no_register_and_add_up_alike(shapes, capability):
    script = Path(__file__).parents[1] / "support" / "triton_for_gpus.py"
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, str(capability), *shapes], capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr[-2000:]
    for kernels in map(json.loads, done.stdout.splitlines()):
        text, path = kernels["_text"], kernels["_path"]
        for used in (text, path):
            assert (used["stack"], used["local"], used["spills"]) == (0, 0, 0), kernels
            assert (used["tensor_cores"] > 0) == (not kernels["shape"].startswith("float32"))
        assert text["async_copies"] > 0  # keys are on their way while others are worked on
        assert text["layouts"] == path["layouts"], kernels  # else both would add up in other orders
