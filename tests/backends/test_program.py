"""A forward as one native call: the scores of the model's own modules, and the same bits in any company."""

import copy
import dataclasses

import numba
import numpy as np
import pytest
import torch
from torch import nn

from lookahead.backends.cpu import vector_math
from lookahead.backends.cpu.linear import lay_out
from lookahead.backends.cpu.panel_builder import PanelBuilder
from lookahead.backends.cpu.panels import Panels
from lookahead.backends.lowering import ops
from lookahead.backends.lowering.lower import lowered
from lookahead.backends.lowering.plan import Attention, Product, reads, written
from lookahead.backends.lowering.trace import traced
from lookahead.draft.tree import DraftTree, chain, side_by_side
from lookahead.errors import ModelError, UsageError
from lookahead.forward.slots import PackedSlots
from lookahead.models import probe
from lookahead.models.exact import batch_invariance_violation
from lookahead.models.load import load_model
from lookahead.models.probe import probed
from tests.support.depth import deep, some_deep

# Norms, rotations of all kinds, heads, activations, biases, windows, learned positions, layers side by side, scaled scores
PROGRAMS = ("llama", "gpt2", "gpt_neox", "cohere2", "gemma3", "olmo2", "phi", "opt", "glm4", "persimmon", "gpt_bigcode")
FURTHER = (
    *("granite", "arcee", "mistral", "qwen2", "qwen3", "gemma", "phi3", "starcoder2", "stablelm", "nemotron", "ernie4_5"),
    *("smollm3", "exaone4", "seed_oss", "hunyuan_v1_dense", "helium", "biogpt", "ministral", "olmo3", "cohere", "glm"),
)
DEMO = "samples/demo-model"
OTHERS = ("mixtral", "deepseek_v3", "gemma2", "mamba")
DTYPES = [d for d in (torch.float32, torch.bfloat16, torch.float16) if Panels.takes(torch.zeros(1, 1, dtype=d))]  # on this CPU


def of(tiny_model, name: str, dtype: torch.dtype):
    return probed(lay_out(copy.deepcopy(tiny_model(name)).to(dtype)), name)


@torch.inference_mode()
def scores_of(target, texts: list[np.ndarray], trees: list[DraftTree]) -> torch.Tensor:
    """Scores behind the first text, and of trees behind all texts."""
    slots = PackedSlots(target)
    for text in texts:
        slots.begin(slots.add([*text.tolist(), 0], 16))
    first = slots.forward(side_by_side([chain(text) for text in texts], ["last", "none"])).logits.float()
    slots.keep([range(len(text)) for text in texts])
    return torch.cat([first, slots.forward(side_by_side(trees, ["all"] * len(trees))).logits.float()])


def assert_by_modules(target, far: float) -> None:
    """The scores of a program are those of the model's modules; far: share of their spread by which they may differ."""
    random = np.random.default_rng(0)
    texts = [random.integers(3, 90, length).astype(np.int32) for length in (31, 4)]
    bush = dataclasses.replace(chain(random.integers(3, 90, 6).astype(np.int32)), parents=probe.BUSH)
    trees = [bush, chain(random.integers(3, 90, 9).astype(np.int32))]
    by_modules = scores_of(dataclasses.replace(target, program=None), texts, trees)
    far *= float(by_modules.std())
    torch.testing.assert_close(scores_of(target, texts, trees), by_modules, rtol=0, atol=far)


@pytest.mark.parametrize("dtype", some_deep(DTYPES, DTYPES[:1]), ids=str)
@pytest.mark.parametrize("name", [*PROGRAMS, *deep(FURTHER)])
def test_program_says_what_the_modules_say(tiny_model, name, dtype):
    target = of(tiny_model, name, dtype)
    assert target.program is not None
    assert target.setting.attention == "lookahead_program"
    assert_by_modules(target, {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.03}[dtype])


@pytest.mark.parametrize("dtype", some_deep(DTYPES, DTYPES[:1]), ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_token_gets_the_same_bits_in_any_company(tiny_model, name, dtype):
    target = of(tiny_model, name, dtype)
    assert target.program is not None
    assert not batch_invariance_violation(target)
    texts = [np.arange(5, 45, dtype=np.int32), np.arange(30, 37, dtype=np.int32)]
    trees = [chain(np.arange(9, 30, dtype=np.int32)), chain(np.array([7], np.int32))]
    alone, before = scores_of(target, texts, trees), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert scores_of(target, texts, trees).equal(alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_run_module_by_module(tiny_model, name):
    assert of(tiny_model, name, torch.float32).program is None


def test_models_that_are_not_laid_out_are_not_copied(tiny_model):
    target = probed(tiny_model("llama"))
    assert target.attends_by_op
    assert target.program is None


def test_what_goes_wrong_is_found_by_the_probe(tiny_model, monkeypatch, caplog):
    """A program of another model."""
    other = copy.deepcopy(tiny_model("llama"))
    other.model.norm.weight.data[3] = 2
    program = probed(lay_out(other)).program
    assert program is not None
    monkeypatch.setattr(probe, "program_of", lambda target: program)
    caplog.set_level("INFO")
    target = of(tiny_model, "llama", torch.float32)
    assert target.mode == "packed"
    assert target.program is None
    assert "its forward is run module by module (scores differ by" in caplog.text


def test_kernel_that_does_not_compile_is_told(tiny_model, monkeypatch, caplog):
    @numba.njit
    def broken():
        return no_such_name  # noqa: F821

    monkeypatch.setattr(probe, "program_of", lambda target: broken())
    assert probed(lay_out(copy.deepcopy(tiny_model("llama")))).mode == "packed"
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "a kernel does not compile, decoding continues without it" in record.getMessage()
    assert "no_such_name" in record.getMessage()


@pytest.mark.parametrize("wanted", [[], [4], [0, 3, 5]])
def test_only_wanted_tokens_get_scores(tiny_model, wanted):
    target = of(tiny_model, "llama", torch.float32)
    assert target.program is not None
    slots = PackedSlots(target)
    slots.begin(slots.add([*range(3, 20)], 0))
    every = slots.forward(side_by_side([chain(np.arange(5, 11, dtype=np.int32))], ["all"])).logits
    some = target.program.run(slots.cache.pack, torch.tensor(wanted, dtype=torch.int64), slots.cache)
    assert some.equal(every[wanted])


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_buffers_that_are_alive_at_once_lie_apart(tiny_model, name):
    target = of(tiny_model, name, torch.float32)
    forward = traced(target)
    plan = lowered(forward, PanelBuilder(forward.tokens, forward.linears), len(target.mask_plan.windows), target.dtype)
    times = {}
    filled = set()
    for number, stage in enumerate(plan.stages):
        assert len({type(step) for step in stage.steps}) == 1
        for place, step in enumerate(stage.steps):
            for buffer in reads(step):
                assert buffer in filled, "read before anything has filled it"
                times[buffer].append((number, place))
            if (buffer := written(step)) is not None:
                filled.add(buffer)
                times.setdefault(buffer, []).append((number, place))
    for one in times:
        for other in times:
            together = times[one][0] <= times[other][-1] and times[other][0] <= times[one][-1]
            if one.local != other.local or not together or one is other:
                continue
            if one.local and times[one][0][0] != times[other][0][0]:
                continue
            assert one.offset + one.stride <= other.offset or other.offset + other.stride <= one.offset
    most = max(buffer.offset + buffer.stride for buffer in times if not buffer.local)
    assert most <= plan.row_bytes <= most + 64
    products = [len(stage.steps) for stage in plan.stages if isinstance(stage.steps[0], Product)]
    assert max(products) >= (3 if name == "llama" else 2), "projections of one input are one stage"
    late = [stage.late for stage in plan.stages]
    last = max(number for number, stage in enumerate(plan.stages) if isinstance(stage.steps[0], Attention))
    assert late == [number > last for number in range(len(late))]


FUNCTIONS = {
    (ops.EXP, ops.NOT): torch.exp,
    (ops.SIGMOID, ops.NOT): torch.sigmoid,
    (ops.SILU, ops.NOT): nn.functional.silu,
    (ops.TANH, ops.NOT): torch.tanh,
    (ops.ERF, ops.NOT): torch.erf,
    (ops.GELU, ops.NOT): nn.functional.gelu,
    (ops.GELU_TANH, ops.NOT): lambda x: nn.functional.gelu(x, approximate="tanh"),
    (ops.RELU, ops.NOT): torch.relu,
    (ops.NEGATE, ops.TO_BFLOAT16): lambda x: (-x.float()).bfloat16().double(),
    (ops.COPY, ops.TO_FLOAT16): lambda x: x.float().half().double(),
    (ops.SQUARE_ROOT, ops.NOT): torch.sqrt,
}
OF_TWO = {ops.ADD: torch.add, ops.SUBTRACT: torch.sub, ops.MULTIPLY: torch.mul, ops.DIVIDE: torch.div}
NUMBERS = torch.cat([torch.linspace(-30, 30, 4003), torch.tensor([0.0, -0.0, float("nan"), 88.0, -88.0, 1e-30])])


@pytest.fixture(scope="module")
def computed():
    kernel = numba.njit(lambda *given: vector_math.compute(*given))

    def run(op, rounds, left, right):
        target = torch.full([len(NUMBERS) + 1], 7.0)
        operands = [each for side in (left, right) for each in (side.data_ptr(), int(len(side) > 1))]
        kernel(op, rounds, len(NUMBERS), target.data_ptr(), *operands)
        assert target[-1] == 7
        return target[:-1]

    return run


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_are_those_of_torch(computed, function):
    found = computed(*function, NUMBERS, NUMBERS)
    torch.testing.assert_close(found.double(), FUNCTIONS[function](NUMBERS.double()), rtol=4e-7, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("op", OF_TWO)
def test_operations_are_those_of_torch(computed, op):
    for left, right in ((NUMBERS, NUMBERS.flip(0)), (NUMBERS, NUMBERS[9:10]), (NUMBERS[9:10], NUMBERS)):
        expected = OF_TWO[op](left, right)
        torch.testing.assert_close(computed(op, ops.NOT, left, right), expected, rtol=0, atol=0, equal_nan=True)
        rounded = computed(op, ops.TO_BFLOAT16, left, right)
        torch.testing.assert_close(rounded, expected.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_engine_mode_is_what_was_asked_for(tiny_model, tmp_path):
    assert load_model(DEMO, device="cpu").program is not None
    assert load_model(DEMO, device="cpu", engine_mode="program").program is not None
    assert load_model(DEMO, device="cpu", engine_mode="modules").program is None
    tiny_model("mixtral").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="--engine-mode program: its forward cannot be one native call"):
        load_model(str(tmp_path), device="cpu", engine_mode="program")
    with pytest.raises(UsageError, match="--engine-mode graph: choose auto, modules, program"):
        load_model(DEMO, engine_mode="graph")


def test_ids_without_a_row_are_an_error(tiny_model):
    slots = PackedSlots(of(tiny_model, "gpt2", torch.float32))
    slots.begin(slots.add([5, 6, 7], 0))
    for token in (-1, 10**6):
        with pytest.raises(IndexError, match="no row"):
            slots.forward(side_by_side([chain(np.array([5, token], np.int32))], ["all"]))
