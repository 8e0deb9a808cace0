"""A forward as kernels of ours on a GPU, by Triton's interpreter: the scores of the model's own modules.

pip install triton && TRITON_INTERPRET=1 pytest tests/backends/test_device_program.py
"""

import copy
import dataclasses
import os

import numpy as np
import pytest
import torch

from lookahead.backends.cuda.backend import program_of as device_program_of
from lookahead.backends.cuda.device_builder import Matrix
from lookahead.backends.cuda.device_program import DeviceProgram
from lookahead.backends.lowering.plan import Product
from lookahead.draft.tree import chain, side_by_side
from lookahead.forward.slots import PackedSlots
from lookahead.models.exact import batch_invariance_violation
from lookahead.models.probe import probed
from tests.backends.test_program import assert_by_modules

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 where there is no GPU", allow_module_level=True)

NAMES = ("llama", "gpt_neox", "cohere2", "gemma3", "olmo2", "phi", "opt", "glm4", "qwen3", "stablelm", "nemotron", "phi3")
DTYPES = (torch.float32, torch.float16)  # the interpreter knows no bfloat16


def of(tiny_model, name: str, dtype: torch.dtype):
    target = probed(copy.deepcopy(tiny_model(name)).to(dtype), name)
    assert target.attends_by_op
    return dataclasses.replace(target, program=device_program_of(target))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_says_what_the_modules_say(tiny_model, name, dtype):
    assert_by_modules(of(tiny_model, name, dtype), {torch.float32: 1e-4, torch.float16: 0.03}[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_same_in_any_company(tiny_model, dtype):
    target = of(tiny_model, "llama", dtype)
    exact = DeviceProgram(target.program.plan, target.device, exact=True)
    assert batch_invariance_violation(dataclasses.replace(target, program=exact)) == ""


def test_memory_that_graphs_hold_stays_where_it_is(tiny_model):
    target = of(tiny_model, "llama", torch.float32)
    slots, text = PackedSlots(target), np.arange(3, 8, dtype=np.int32)
    slots.begin(slots.add(text.tolist(), 8))
    with torch.inference_mode():
        slots.forward(side_by_side([chain(text)], ["all"]))
        held = [each[256].data_ptr() for each in (target.program._arenas, target.program._every)]
        target.program._made(512, in_parts=True)
    assert [each[256].data_ptr() for each in (target.program._arenas, target.program._every)] == held


def test_products_of_the_same_tokens_are_one_and_keep_nothing_twice(tiny_model):
    target = of(tiny_model, "llama", torch.float32)
    layer = target.model.model.layers[0].self_attn
    starts = [each.weight.data_ptr() for each in (layer.q_proj, layer.k_proj, layer.v_proj)]
    assert starts[1] - starts[0] == layer.q_proj.weight.numel() * 4
    assert starts[2] - starts[1] == layer.k_proj.weight.numel() * 4
    products = [len(stage.steps) for stage in target.program.plan.stages if isinstance(stage.steps[0], Product)]
    assert products == [1] * len(products)


@pytest.mark.parametrize(("outputs", "inner", "parts"), [(4096, 4096, 4), (12288, 4096, 1), (512, 256, 1), (4096, 11008, 4)])
def test_parts_of_a_matrix_cover_it(outputs, inner, parts):
    matrix = Matrix(torch.empty(outputs, inner, device="meta"))
    assert matrix.parts == parts
    assert (matrix.parts - 1) * matrix.of_part < inner <= matrix.parts * matrix.of_part
