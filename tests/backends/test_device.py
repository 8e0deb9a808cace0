"""What a GPU asks of the code around a forward, as far as it shows without one."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.forward.memory import ran_out
from lookahead.forward.slots import Scores, SeparateSlots
from lookahead.models.load import load_model
from lookahead.models.probe import probed
from tests.support.jobs import MODEL


@pytest.fixture(scope="module")
def target(tiny_model):
    return probed(tiny_model("llama"), "llama")


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("separate", [False, True])
def test_forwards_take_no_cudnn_and_leave_it_as_it_was(target, monkeypatch, separate):
    seen, forward = [], type(target.model).forward

    def watched(model, *args, **given):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return forward(model, *args, **given)

    monkeypatch.setattr(type(target.model), "forward", watched)
    engine = DecodingEngine(dataclasses.replace(target, slots_factory=SeparateSlots if separate else None), Drafter())
    assert len(engine.generate([5, 6, 7], 9).token_ids) == 9
    assert seen
    assert not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(RuntimeError), target.packed_attention.named("lookahead_tree"):
        raise RuntimeError
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:130] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), False),
        (ValueError("out of memory of what was said"), False),
    ],
)
def test_every_library_is_understood_that_runs_out_of_memory(error, memory):
    assert ran_out(error) is memory


def test_device_finds_runner_up_tokens():
    scores = Scores(torch.randn(3, 10).as_subclass(Elsewhere), [3])
    expected = scores.logits.as_subclass(torch.Tensor).topk(4)
    ids, values = scores.best_few(np.array([0, 1, 2]), 4)
    assert ids.tolist() == expected.indices.tolist()
    assert values.tolist() == expected.values.tolist()


def test_device_with_a_number_becomes_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: model)
    load_model(MODEL, device="cuda:1")
    load_model(MODEL, device="cpu")
    assert chosen == [torch.device("cuda:1")]


def test_processes_that_share_a_model_agree_once_a_step(target, monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "all_reduce", lambda box, op: calls.append(len(box)))
    engine = DecodingEngine(target.as_tensor_parallel_rank(), Drafter())
    engine.generate([5, 6, 7], 20)
    rooms = calls.count(1)  # how much memory is free, where room is made
    assert rooms <= 2
    assert len(calls) - rooms == engine.clock.steps
