"""Packed steps as captured graphs, emulated: what a replay says is what the model says, in few graphs, of any job."""

import dataclasses

import numpy as np
import pytest
import torch

from lookahead.backends.cuda.captured import tried_capture
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import chain, side_by_side
from lookahead.forward.slots import PackedSlots
from lookahead.models.probe import probed
from tests.architectures import CONFIGS, plainly, tiny_model
from tests.support.depth import some_deep
from tests.support.emulated import EmulatedCapture

SHALLOW = ("llama", "gemma3", "deepseek_v3")
NOT_CAPTURED = {"jetmoe": "scores differ"}  # it asks the device how many tokens each expert takes


def on_a_gpu(name: str):
    """As the model would be probed on a GPU, but for the capture."""
    return dataclasses.replace(probed(tiny_model(name), name), bucketed=True)


@pytest.mark.parametrize("name", some_deep(CONFIGS, SHALLOW))
def test_replays_say_what_the_model_says(name, caplog):
    target = on_a_gpu(name)
    if not target.attends_by_op:
        pytest.skip(f"{target.mode}, not by the op")
    captured = tried_capture(target, EmulatedCapture())
    if name in NOT_CAPTURED:
        assert captured.capture is None
        assert NOT_CAPTURED[name] in caplog.text
        return
    assert captured.capture, caplog.text
    assert captured.capture.graphs == [captured.capture.graphs[0]]


@pytest.fixture(scope="module")
def target():
    return dataclasses.replace(on_a_gpu("gemma3"), capture=EmulatedCapture())


def test_job_takes_few_graphs_and_says_what_each_row_says_alone(target):
    capture = EmulatedCapture()
    made = []
    watched = dataclasses.replace(
        target, capture=capture, slots_factory=lambda each: made.append(PackedSlots(each)) or made[-1]
    )
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 60, size).tolist() for size in random.integers(1, 50, 12)]
    engine = DecodingEngine(watched, Drafter([], DraftOptions(decoding_length=24, adaptive=False)), 5)
    requests = [engine.request(prompt, 20) for prompt in prompts]
    assert len(list(engine.run(requests))) == 12
    assert [request.token_ids for request in requests] == [plainly(target.model, prompt, 20) for prompt in prompts]
    captured = made[0].captured
    assert captured.replays > 0.5 * engine.clock.steps
    assert len(capture.graphs) == len(captured._steps) <= 16
    assert sum(request.accepted_tokens for request in requests) > 0


def test_nothing_is_learned_from_the_time_of_a_step_that_was_captured(target):
    engine = DecodingEngine(dataclasses.replace(target, capture=EmulatedCapture()), Drafter([], DraftOptions()), 1)
    learned, firsts = [], []
    observe, record = engine.budget.observe, engine.accounting.record
    engine.budget.observe = lambda *measured: learned.append(measured) or observe(*measured)
    engine.accounting.record = lambda *given: firsts.append(given[-1]) or record(*given)
    assert len(list(engine.run([engine.request([5, 6, 7], 12)]))) == 1
    assert len(engine.target.capture.graphs) > 0
    assert 0 < len(learned) <= len(firsts) - sum(firsts)


def test_sampled_tokens_and_their_probabilities_are_those_of_other_forwards(target):
    from lookahead.decode.sampling import Sampling

    found = []
    for each in (target, dataclasses.replace(target, capture=None)):
        engine = DecodingEngine(each, Drafter([], DraftOptions(decoding_length=8, adaptive=False)), 3)
        sampling = Sampling(temperature=0.8, top_k=20)
        requests = [engine.request([5 + row, 6, 7], 15, sampling, seed=row, logprobs=2) for row in range(4)]
        assert len(list(engine.run(requests))) == 4
        found.append(requests)
    assert [request.token_ids for request in found[0]] == [request.token_ids for request in found[1]]
    of_each = [[token.logprob for request in requests for token in request.token_logprobs] for requests in found]
    assert of_each[0] == pytest.approx(of_each[1], abs=1e-5)


def test_graphs_are_dropped_where_keys_and_values_move(target):
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=8, adaptive=False)), 1)
    assert engine.generate([5, 6, 7], 12).token_ids == plainly(target.model, [5, 6, 7], 12)
    slots = engine._slots
    places = [layer.keys.data_ptr() for layer in slots.cache.layers]
    assert slots.captured._steps
    slots.cache.reserve(4, 512, [])
    assert places != [layer.keys.data_ptr() for layer in slots.cache.layers]
    assert engine.generate([8, 6, 9], 12).token_ids == plainly(target.model, [8, 6, 9], 12)


def test_model_that_reads_from_the_device_goes_on_without_graphs(target, caplog, monkeypatch):
    forward = type(target.model).forward

    def reading(model, *args, **given):
        output = forward(model, *args, **given)
        assert float(output.logits.sum()) < 1e9
        return output

    monkeypatch.setattr(type(target.model), "forward", reading)
    assert tried_capture(dataclasses.replace(target, capture=None), EmulatedCapture()).capture is None
    assert "steps are not captured as graphs" in caplog.text
    engine = DecodingEngine(target, Drafter())
    assert len(engine.generate([5, 6, 7], 12).token_ids) == 12
    assert engine._slots.captured._steps == {}


def test_steps_that_prefill_or_are_wide_are_not_captured(target):
    captured = PackedSlots(target).captured

    def serves(sizes, wanted):
        return captured.serves(side_by_side([chain([5] * size) if size else None for size in sizes], wanted))

    assert serves([4, 0, 250], ["all", "none", "all"])
    assert not serves([4, 8], ["all", "last"])
    assert not serves([200, 57], ["all", "all"])
    assert not serves([0], ["none"])
    assert torch.is_inference_mode_enabled() is False
