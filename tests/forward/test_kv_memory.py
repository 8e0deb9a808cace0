"""Keys and values are kept once: in buffers of their final size that do not move, on a device with little more memory."""

import dataclasses
import weakref

import numpy as np
import pytest
import torch

from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import chain, side_by_side
from lookahead.forward import kv_cache
from lookahead.forward import slots as slots_module
from lookahead.forward.kv_cache import SlotCache
from lookahead.forward.slots import PackedSlots
from lookahead.models.probe import probed
from tests.architectures import plainly


@pytest.fixture(scope="module")
def target(tiny_model):
    return dataclasses.replace(probed(tiny_model("llama"), "llama"), bucketed=True)


class Device:
    """Memory for buffers of keys and values. size: bytes."""

    def __init__(self, patch):
        self.size, self._live, self._zeros = 1 << 50, {}, kv_cache.zeros
        patch.setattr(kv_cache, "zeros", self.zeros)
        patch.setattr(slots_module, "free_memory", lambda device: self.size - self.held)

    def zeros(self, like, *shape):
        made = self._zeros(like, *shape)
        self._live[len(self._live)] = weakref.ref(made), made.numel() * made.element_size()
        assert self.held <= self.size, "out of memory"
        return made

    @property
    def held(self):
        return sum(size for alive, size in self._live.values() if alive() is not None)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


@torch.inference_mode()
def test_job_whose_keys_and_values_take_83_percent_of_memory_passes(target, device):
    rows, length, room = 4, 180, 60
    need = target.kv_bytes * (rows + 1) * 256
    device.size = int(need * 1.2)
    slots = PackedSlots(target)
    texts = [np.random.default_rng(row).integers(3, 60, length).astype(np.int32) for row in range(rows)]
    for text in texts:
        slots.begin(slots.add(text.tolist(), room))
    held = []
    for start in range(0, 180, 60):
        slots.forward(side_by_side([chain(text[start : start + 60]) for text in texts], ["last"] * rows))
        slots.keep([range(60)] * rows)
        held.append(device.held)
    assert held == [need] * 3


def test_buffers_grow_where_old_and_new_ones_do_not_fit_side_by_side(target, device, monkeypatch):
    monkeypatch.setattr(slots_module, "KEYS", 32)
    made, reserve = [], SlotCache.reserve
    monkeypatch.setattr(SlotCache, "reserve", lambda cache, *args: made.append(args) or reserve(cache, *args))
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=8, adaptive=False)), 2)
    prompts = [[*range(3, 40)], [*range(5, 60)], [int(t) for t in np.random.default_rng(1).integers(3, 60, 230)]]
    device.size = int(target.kv_bytes * 3 * 256 * 1.2)  # the last prompt wants more than twice of what the first ones want
    requests = [engine.request(prompt, 20) for prompt in prompts]
    assert len(list(engine.run(requests))) == 3
    assert [request.token_ids for request in requests] == [plainly(target.model, prompt, 20) for prompt in prompts]
    assert engine.batch_size == 2
    assert engine._slots.cache.capacity == 256
    assert len(made) == 2
