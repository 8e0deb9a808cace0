"""Many rows at once: any schedule of arrivals and ends, shared beginnings, prompts in pieces, memory that runs out.

Whatever happens, each row's tokens are those that plain decoding gives it alone.
"""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.budget.attention import runs_of
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.sampling import Sampling
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.forward.slots import slots_of
from lookahead.models.probe import probed
from tests.architectures import plainly
from tests.support.drafts import VOCAB_SIZE


@pytest.fixture(scope="module")
def target(tiny_model, device):
    """Windows of 8 tokens on some layers."""
    return probed(tiny_model("gemma3", device), "gemma3")


@pytest.fixture(scope="module")
def alone(target):
    """alone(prompt, new_tokens) -> what plain decoding says after this prompt alone."""
    return functools.cache(lambda prompt, new_tokens: plainly(target.model, list(prompt), new_tokens))


@st.composite
def prompts(draw):
    """A few tokens, often beginning as other prompts do."""
    size = draw(st.integers(1, 40))
    shared = draw(st.sampled_from([0, 0, 12, 30]))
    beginning = np.random.default_rng(7).integers(3, VOCAB_SIZE, shared)
    return *map(int, beginning), *map(int, np.random.default_rng(draw(st.integers(0, 5))).integers(3, VOCAB_SIZE, size))


@given(
    rows=st.lists(st.tuples(prompts(), st.sampled_from([1, 2, 5, 12])), min_size=1, max_size=9),
    batch_size=st.integers(1, 5),
    prefill_chunk=st.sampled_from([1, 5, 16, 512]),
    decoding_length=st.sampled_from([1, 4, 16]),
    bucketed=st.booleans(),
    by_op=st.booleans(),
)
def test_any_schedule_yields_what_each_row_says_alone(
    target, alone, rows, batch_size, prefill_chunk, decoding_length, bucketed, by_op
):
    target = dataclasses.replace(target, bucketed=bucketed, attends_by_op=by_op)
    engine = DecodingEngine(
        target, Drafter([], DraftOptions(decoding_length=decoding_length, adaptive=False)), batch_size, prefill_chunk
    )
    requests = [engine.request(prompt, new_tokens) for prompt, new_tokens in rows]
    most_at_once = begun = ended = 0

    def arriving():
        nonlocal begun, most_at_once
        for request in requests:
            begun += 1
            most_at_once = max(most_at_once, begun - ended)
            yield request

    for _ in engine.run(arriving()):
        ended += 1
    assert [r.token_ids for r in requests] == [alone(prompt, new_tokens) for prompt, new_tokens in rows]
    assert ended == len(rows)
    assert most_at_once <= batch_size + 1  # requests are asked for as slots come free
    assert all(not len(row.own) for row in engine.drafter._rows)


def test_rows_end_as_they_end_and_the_next_takes_the_free_slot_at_once(target):
    engine = DecodingEngine(target, Drafter([], DraftOptions("off")), 2)
    lengths = [12, 1, 1, 1, 12]
    requests = [engine.request([5 + n, 9], length) for n, length in enumerate(lengths)]
    ended = [requests.index(request) for request in engine.run(requests)]
    assert ended == [1, 2, 3, 0, 4]
    # Row 0: 12 forwards. Rows 1 to 3 one each beside it, then row 4, of whose 12 forwards 9 stand beside row 0.
    assert engine.clock.steps == 12 + 3


def test_beginning_that_prompts_share_goes_through_the_model_once(target, alone):
    beginning = tuple(int(t) for t in np.random.default_rng(1).integers(3, VOCAB_SIZE, 150))
    ends = [tuple(int(t) for t in np.random.default_rng(n).integers(3, VOCAB_SIZE, 5)) for n in range(32)]
    engine = DecodingEngine(target, Drafter([], DraftOptions("off")), 8, prefill_chunk=32)
    requests = [engine.request([*beginning, *end], 4) for end in ends]
    list(engine.run(requests))
    assert engine.clock.prefilled <= 1.1 * (len(beginning) + sum(map(len, ends)))
    assert [r.token_ids for r in requests] == [alone((*beginning, *end), 4) for end in ends]


# ---- memory
class Crowded:
    """Slots that raise MemoryError with more than `most` rows: in the forward, or when they keep what was verified."""

    def __init__(self, slots, most, late=False):
        self.slots, self.most, self.late = slots, most, late

    def __getattr__(self, name):
        return getattr(self.slots, name)

    def check(self, rows, late):
        if rows > self.most and late == self.late:
            raise MemoryError("no room for so many")

    def forward(self, trees):
        self.check(len(trees.sizes), late=False)
        return self.slots.forward(trees)

    def keep(self, nodes):
        self.check(len(nodes), late=True)
        self.slots.keep(nodes)


@pytest.mark.parametrize(("most", "late"), [(1, False), (2, False), (5, False), (2, True)])
def test_batch_gets_smaller_when_memory_runs_out_and_nothing_is_lost(target, alone, caplog, most, late):
    crowded = dataclasses.replace(target, slots_factory=lambda each: Crowded(slots_of(target), most, late))
    engine = DecodingEngine(crowded, Drafter([], DraftOptions(decoding_length=16, adaptive=False)), 8)
    prompts = [tuple(range(3 + n, 9 + 2 * n)) for n in range(12)]
    requests = [engine.request(prompt, 12 - 11 * (late and n % 2)) for n, prompt in enumerate(prompts)]
    assert len(list(engine.run(requests))) == 12
    assert [r.token_ids for r in requests] == [alone(prompt, 12 - 11 * (late and n % 2)) for n, prompt in enumerate(prompts)]
    assert late or engine.batch_size == {1: 1, 2: 2, 5: 4}[most]
    assert "going on with 4" in caplog.text
    assert all(not len(row.own) for row in engine.drafter._rows)


def test_request_that_cannot_begin_fails_alone(target, alone):
    engine = DecodingEngine(target, Drafter(), 2)  # without a tokenizer
    requests = [engine.request([5, 6 + n], 4, Sampling(stop=("a",)) if n == 1 else Sampling()) for n in range(4)]
    assert len(list(engine.run(requests))) == 4
    assert [bool(request.error) for request in requests] == [False, True, False, False]
    assert "tokenizer" in str(requests[1].error)
    assert requests[3].token_ids == alone((5, 9), 4)


def test_row_that_does_not_fit_alone_fails_and_the_others_go_on(target):
    crowded = dataclasses.replace(target, slots_factory=lambda each: Crowded(slots_of(target), 0))
    engine = DecodingEngine(crowded, Drafter(), 4)
    requests = [engine.request([5, 6], 4) for _ in range(3)]
    assert len(list(engine.run(requests))) == 3
    assert {type(request.error) for request in requests} == {MemoryError}


def test_room_that_is_not_there_is_not_taken(target, monkeypatch):
    monkeypatch.setattr("lookahead.forward.slots.free_memory", lambda device: 200_000)
    engine = DecodingEngine(target, Drafter([], DraftOptions("off")), 8)
    requests = [engine.request([*range(3, 90)], 4) for _ in range(8)]
    assert len(list(engine.run(requests))) == 8
    assert not any(request.error for request in requests)
    assert 1 <= engine.batch_size < 8


def test_limit_of_an_answer_takes_no_memory(target, monkeypatch):
    monkeypatch.setattr("lookahead.forward.target.longest_text", lambda config: 1 << 30)
    engine = DecodingEngine(probed(target.model, "gemma3"), Drafter(), 2)
    for request in (engine.request([5, 6, 7], 10**9), engine.request([5, 6, 8], 10**9, Sampling(repetition_penalty=1.1))):
        stream = engine.stream(request)
        next(stream)
        stream.close()
        assert request.room > 10**8
    assert engine._slots.cache.capacity < 10_000


@pytest.mark.parametrize("mode", ["packed", "chain"])
def test_answers_longer_than_the_memory_reserved_are_the_same(target, alone, monkeypatch, mode):
    requests = []
    for ahead in (4096, 4):
        monkeypatch.setattr("lookahead.decode.row.AHEAD", ahead)
        monkeypatch.setattr("lookahead.decode.chooser.AHEAD", ahead)
        engine = DecodingEngine(dataclasses.replace(target, mode=mode), Drafter(), 3)
        several = [
            engine.request([5, 6], 150, Sampling(repetition_penalty=1.2)),
            engine.request([7], 100),
            engine.request([9], 3),
        ]
        assert len(list(engine.run(several))) == 3
        requests.append([request.token_ids for request in several])
    assert requests[0] == requests[1]
    assert requests[1][1] == alone((7,), 100)


# ---- the pack
@pytest.mark.parametrize(
    ("sizes", "pasts", "runs"),
    [
        ([1, 1, 1], [100, 100, 100], [(0, 3, 1, 101)]),
        ([2, 2, 256, 0, 4], [100] * 5, [(0, 2, 2, 102), (2, 3, 256, 356), (4, 5, 4, 104)]),
        ([4, 30, 4], [300, 300, 300], [(0, 1, 4, 304), (1, 2, 30, 330), (2, 3, 4, 304)]),  # much would be padded
        ([1, 1, 1], [100, 120, 1500], [(0, 2, 1, 121), (2, 3, 1, 1501)]),
    ],
)
def test_neighbours_share_a_call_of_attention_where_padding_costs_less(sizes, pasts, runs):
    assert [tuple(run) for run in runs_of(np.array(sizes), np.array(pasts), 1000.0).tolist()] == runs


def test_next_run_shares_what_the_last_one_took_in_until_it_is_forgotten(target, alone):
    engine = DecodingEngine(target, Drafter([], DraftOptions(decoding_length=16, adaptive=False)), 2)
    prompt = tuple(range(3, 60))
    prefilled = []
    for _ in range(2):
        assert engine.generate(prompt, 6).token_ids == alone(prompt, 6)
        prefilled.append(engine.clock.prefilled)
    assert prefilled == [len(prompt), len(prompt) + 1]
    engine.forget()
    assert engine.generate(prompt, 6).token_ids == alone(prompt, 6)
    assert engine.clock.prefilled == 2 * len(prompt) + 1
