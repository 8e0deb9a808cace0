"""The probe: what computes a model's scores is accepted, whatever rounding does to them; what computes others is refused."""

import copy
import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
import torch

from lookahead.backends.cpu.backend import program_of
from lookahead.backends.cpu.linear import lay_out
from lookahead.backends.cpu.program import Program
from lookahead.draft.tree import chain, side_by_side
from lookahead.forward.slots import slots_of
from lookahead.forward.target import TargetModel
from lookahead.forward.tree_meta import FIRST, NODE, TRUNK
from lookahead.models import probe
from lookahead.models.probe import kind_of_linear, probed
from lookahead.models.reference import HALF, stock, wide
from tests.support.cpu import needs_halves
from tests.support.depth import deep
from tests.support.mutants import HIDDEN_BY_HALF, MUTANTS, Mutant

DTYPES = [torch.float32, *(pytest.param(dtype, marks=needs_halves) for dtype in HALF)]


def program_of_mutant(model: Any, mutate: Mutant) -> Any:
    """What `probe.program_of` may be replaced by: the program of a model that is a little wrong."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        mutate(other)
    lay_out(other)
    wrong = TargetModel(other, "mutant", "packed", attends_by_op=True, linear=kind_of_linear(other))
    program = program_of(wrong)
    return lambda target: program


def uneven(model: Any) -> Any:
    """The model with weights of norms that are not all 1."""
    for number, weight in enumerate(model.parameters()):
        if weight.ndim == 1:
            weight.data.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)), alpha=0.2)
    return model


def check_mutants(model: Any, monkeypatch: pytest.MonkeyPatch, hidden: set[str]) -> None:
    """Of a model that is not laid out: its program is accepted, and no mutant's but those whose mistake rounding hides."""
    accepted = []
    for name, mutate in {"none": lambda model: None, **MUTANTS}.items():
        with monkeypatch.context() as patch:  # it holds what it puts back
            patch.setattr(probe, "program_of", program_of_mutant(model, mutate))
            target = probed(lay_out(copy.deepcopy(model)))
        assert target.mode == "packed"
        accepted += [name] if target.program is not None else []
        del target
        gc.collect()  # a large model is few objects, whose number the collector goes by
    assert "none" in accepted
    assert set(accepted) <= {"none", *hidden}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_of_models_that_are_a_little_wrong_are_refused(tiny_model, dtype, monkeypatch):
    check_mutants(uneven(copy.deepcopy(tiny_model("llama"))).to(dtype), monkeypatch, HIDDEN_BY_HALF if dtype in HALF else set())


@pytest.mark.parametrize("field", [FIRST, TRUNK])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mask_that_is_off_by_one_is_refused(tiny_model, dtype, field, monkeypatch):
    model = lay_out(copy.deepcopy(tiny_model("llama")).to(dtype))
    run = Program.run

    def shifted(program, pack, wanted, cache):
        meta = pack.meta.clone()
        if field == FIRST:  # a window of a token less than there are
            meta[..., FIRST] = meta[..., FIRST].clamp_min(1)
        else:  # nodes of a branch see one more
            meta[..., TRUNK] += meta[..., TRUNK] < meta[..., NODE]
        return run(program, dataclasses.replace(pack, meta=meta), wanted, cache)

    assert probed(model).program is not None
    monkeypatch.setattr(Program, "run", shifted)
    assert probed(model).program is None


@needs_halves
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "deepseek_v3", *deep(["qwen3_next", "gpt2", "glm4_moe"])])
def test_wide_scores_are_those_of_the_model_in_float32(tiny_model, name):
    """Of a model in bfloat16, and of the same weights in float32."""
    half = copy.deepcopy(tiny_model(name)).bfloat16()
    single = copy.deepcopy(half).float()
    texts = [[*range(5, 25)], [*range(40, 52)]]
    ours = wide(lay_out(half), texts, False).scores
    theirs, rounded = (stock(model, texts, False).scores for model in (single, half))
    assert ours.dtype == torch.float32
    spread = float(theirs.std())
    assert float((ours - theirs).abs().max()) < 1e-3 * spread
    assert float((rounded.float() - theirs).abs().max()) > 5e-3 * spread


def test_scores_that_are_no_numbers_are_refused(tiny_model, monkeypatch):
    model = copy.deepcopy(tiny_model("llama"))
    model.model.norm.weight.data[3] = torch.nan
    target = probed(model)
    assert target.mode == "plain"
    assert "scores are not finite" in target.reason


@needs_halves
def test_coarse_rounding_costs_no_drafts(tiny_model):
    """A model whose scores in half precision are far from those in float32, however they are computed."""
    model = copy.deepcopy(tiny_model("llama"))
    for weight in model.model.layers.parameters():
        if weight.ndim > 1:
            weight.data.mul_(6)
    model = lay_out(model.bfloat16())
    texts = [np.random.default_rng(0).integers(3, 90, 30).tolist()]
    far, right = stock(model, texts, False).scores.float(), wide(model, texts, False).scores
    assert float((far - right).abs().max()) > 0.3 * float(right.std())
    target = probed(model)
    assert target.program is not None
    slots = slots_of(target)
    slots.begin(slots.add(texts[0]))
    ours = slots.forward(side_by_side([chain(np.array(texts[0], np.int32))], ["all"])).of(0).float()
    assert float((ours - right[0]).abs().mean()) < 2 * float((far - right).abs().mean())
