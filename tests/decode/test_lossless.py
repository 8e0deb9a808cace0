"""Lossless: whatever is drafted, the tokens are those of plain greedy decoding, id for id.

float32, tiny models with random weights, `model.generate(do_sample=False)` as the truth.
"""

import copy
import dataclasses
import functools
import itertools
import mmap
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, MistralForCausalLM

from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import chain, side_by_side
from lookahead.errors import LookaheadError
from lookahead.forward.batch import MaskPlan, pack
from lookahead.forward.kv_cache import SequenceCache, SlotCache, zeros
from lookahead.forward.sequence import BufferState
from lookahead.models.probe import probed
from tests.architectures import MODES, NEW_TOKENS, SAYS_ENOUGH, decoded, plain_answers, plainly, random_prompts
from tests.support.depth import deep, some_deep
from tests.support.drafts import DRAFTS, VOCAB_SIZE, KnownAnswer, always_wrong, drafter_of, perfect, random_trees

PROMPTS = random_prompts((1, 9, 20))

IN_FULL = ("llama", "gptj", "gpt_neo", "bamba")  # one of each mode that takes drafts: every draft
PRODUCT = list(itertools.product(DRAFTS, (1, 3, 8)))
SMALL = [way for way in PRODUCT if way[1] == 3]  # of modes that verify row by row, whatever the batch
FEW = [("perfect", 3), ("random_trees", 3)]
DEEP = ("qwen3_next", "gemma3", "gemma4", "phi3_longrope", "llama4", "afmoe", "gpt_neox", "qwen3", "gpt2")  # in shallow tests
SHALLOW = {name: FEW if name not in IN_FULL else PRODUCT if mode == "packed" else SMALL for name, mode in MODES.items()}
WAYS = [
    *some_deep(SHALLOW.items(), [(name, ways) for name, ways in SHALLOW.items() if name not in DEEP]),
    *deep((name, [way for way in PRODUCT if way not in ways]) for name, ways in SHALLOW.items() if ways is not PRODUCT),
]


@pytest.fixture(scope="session")
def target_of(tiny_model):
    """target_of(architecture, device) -> TargetModel, probed once."""
    return functools.cache(lambda architecture, device="cpu": probed(tiny_model(architecture, device), architecture))


@pytest.fixture(scope="session")
def answers_of():
    """answers_of(architecture, device) -> (prompt, plain greedy tokens) of PROMPTS."""
    return lambda architecture, device="cpu": plain_answers(architecture, PROMPTS, device)


@pytest.mark.parametrize(("architecture", "mode"), MODES.items())
def test_probe_finds_how_a_model_verifies(target_of, device, architecture, mode):
    target = target_of(architecture, device)
    assert target.mode == mode, target.reason
    assert bool(target.reason) == (mode != "packed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt_neo", "mpt"])
def test_probe_finds_the_same_in_half_precision(tiny_model, target_of, architecture, dtype):
    rounded = copy.deepcopy(tiny_model(architecture)).to(dtype)
    assert probed(rounded).mode == target_of(architecture).mode


@pytest.mark.parametrize(
    ("architecture", "ways"), WAYS, ids=lambda value: value if isinstance(value, str) else f"{len(value)} ways"
)
def test_any_draft_at_any_batch_size_yields_the_plain_greedy_tokens(target_of, make_trie, device, architecture, ways):
    target, prompts = target_of(architecture, device), random_prompts()  # more than slots
    answers = plain_answers(architecture, prompts, device)
    assert len({token for _, answer in answers for token in answer}) >= SAYS_ENOUGH
    trie = make_trie([[*prompt, *answer] for prompt, answer in answers], VOCAB_SIZE)
    for draft, batch_size in ways:
        drafter = drafter_of(draft, answers, trie)
        done = decoded(DecodingEngine(target, drafter, batch_size, prefill_chunk=6 if batch_size == 3 else 512), prompts)
        for generation, (_, answer) in zip(done, answers, strict=True):
            assert generation.token_ids == answer, (draft, batch_size)
            assert generation.finish_reason == ("stop" if answer[-1] == 2 else "length")
        # The drafts were used as meant, else the equality above says little.
        done = [g for g in done if not target.decodes_plainly(g.prompt_tokens + NEW_TOKENS)]
        steps, rest = sum(g.steps for g in done), sum(len(g.token_ids) - 1 for g in done)
        accepted = sum(g.accepted_tokens for g in done)
        if not done or draft == "none":
            assert (steps, accepted) == (rest, 0)
        elif draft == "perfect":
            assert steps == sum(-(-(len(g.token_ids) - 1) // 8) for g in done)
        elif draft == "always_wrong":
            assert (steps, accepted) == (rest, 0)
            assert sum(g.draft_tokens for g in done) > rest
        else:
            stopped = sum(g.finish_reason == "stop" for g in done)  # an accepted end of sequence has no token after it
            assert 0 < rest - steps <= accepted <= rest - steps + stopped


@pytest.mark.parametrize("strategy", ["hierarchical", "parallel", "single"])
@pytest.mark.parametrize("decoding_length", [2, 7, 64])
def test_every_strategy_and_length_yields_the_plain_greedy_tokens(target_of, answers_of, strategy, decoding_length):
    target, answers = target_of("mistral"), answers_of("mistral")
    engine = DecodingEngine(target, Drafter([], DraftOptions(strategy, decoding_length, adaptive=False)))
    for _ in range(2):  # the second time all answers are known
        for prompt, answer in answers:
            generation = engine.generate(prompt, NEW_TOKENS)
            assert generation.token_ids == answer
    assert generation.accepted_by_source["session"] > 0


@pytest.mark.deep
def test_trees_of_thirty_seeds_yield_the_plain_greedy_tokens(target_of, answers_of):
    target, answers = target_of("gemma3"), answers_of("gemma3")
    for seed in range(30):
        prompt, answer = answers[seed % len(answers)]
        engine = DecodingEngine(target, KnownAnswer(answers, random_trees(seed)))
        assert engine.generate(prompt, NEW_TOKENS).token_ids == answer


def test_steps_come_one_by_one_and_add_up_to_the_answer(target_of, answers_of):
    prompt, answer = answers_of("llama")[1]
    engine = DecodingEngine(target_of("llama"), KnownAnswer(answers_of("llama"), perfect))
    generation = engine.request(prompt, NEW_TOKENS)
    pieces = list(engine.stream(generation))
    assert [len(piece) for piece in pieces[:3]] == [1, 8, 8]  # the prefill gives one token
    assert [token for piece in pieces for token in piece] == answer
    assert generation.edl == (len(answer) - 1) / (len(pieces) - 1)
    assert generation.accepted_by_source == {"known": generation.accepted_tokens}


# ---- where an answer ends
@pytest.mark.parametrize("place", [1, 7, 8, 9, 11, *deep([2, 3, 4, 5, 6, 10])])  # a draft has seven tokens
def test_answer_stops_at_an_end_of_sequence_inside_an_accepted_branch(target_of, answers_of, monkeypatch, place):
    prompt, answer = answers_of("mistral")[1]
    model = target_of("mistral").model
    monkeypatch.setattr(model.generation_config, "eos_token_id", [answer[place], 96])
    target = dataclasses.replace(target_of("mistral"))  # a fresh one: ids of the end are read once
    generation = DecodingEngine(target, KnownAnswer([(prompt, answer)], perfect)).generate(prompt, NEW_TOKENS)
    assert generation.token_ids == answer[: answer.index(answer[place]) + 1] == plainly(model, prompt)
    assert generation.finish_reason == "stop"
    assert generation.accepted_tokens <= len(generation.token_ids) - 1


@pytest.mark.parametrize("new_tokens", [1, 2, 8, 9, 10])
def test_answer_is_cut_at_the_limit_though_more_was_drafted(target_of, answers_of, new_tokens):
    class Overeager(KnownAnswer):
        def draft(self, row, longest):
            return super().draft(row, 1 << 10)

    prompt, answer = answers_of("llama")[1]
    for kind in (KnownAnswer, Overeager):
        engine = DecodingEngine(target_of("llama"), kind([(prompt, answer)], perfect))
        generation = engine.generate(prompt, new_tokens)
        assert generation.token_ids == answer[:new_tokens]
        assert generation.finish_reason == "length"
        assert generation.accepted_tokens + generation.steps <= new_tokens


@pytest.mark.parametrize("propose", [perfect, always_wrong, random_trees(1)])
def test_answer_ends_where_the_model_has_no_more_positions(target_of, propose):
    target = target_of("gpt2_short")
    assert target.mode == "packed", target.reason
    prompt = PROMPTS[2]
    answer = plainly(target.model, prompt, 32 - len(prompt))
    assert len(answer) == 32 - len(prompt)
    generation = DecodingEngine(target, KnownAnswer([(prompt, answer)], propose)).generate(prompt, 100)
    assert generation.token_ids == answer
    assert generation.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([3] * 32, "the prompt has 32 tokens and the model has 32 positions: no room"),
        ([3, VOCAB_SIZE], "prompt token id 97 is outside the model's vocabulary of 97"),
        ([-1, 3], "prompt token id -1 is outside"),
    ],
)
def test_prompt_that_cannot_be_decoded_is_refused(target_of, prompt, message):
    with pytest.raises(LookaheadError, match=message):
        DecodingEngine(target_of("gpt2_short"), Drafter()).generate(prompt, 10)


@pytest.mark.parametrize(
    "wish",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 20},
        {"suppress_tokens": [5, 6, 7, 8, 9, 10, 11, 12]},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 1},
    ],
    ids=lambda wish: "-".join(wish),
)
def test_what_the_generation_config_asks_of_greedy_decoding_is_done(target_of, answers_of, monkeypatch, wish):
    target, unwished = target_of("gpt2"), answers_of("gpt2")
    for name, value in wish.items():
        monkeypatch.setattr(target.model.generation_config, name, value)
    wished = [(prompt, plainly(target.model, prompt)) for prompt in PROMPTS]
    assert wished != unwished
    for propose in (perfect, always_wrong, random_trees(2)):
        engine = DecodingEngine(target, KnownAnswer(wished, propose))
        for prompt, answer in wished:
            assert engine.generate(prompt, NEW_TOKENS).token_ids == answer


# ---- the probe does not take a model's word for it
class IgnoresTreeMask(LlamaForCausalLM):
    def forward(self, *args, attention_mask=None, **kwargs):
        return super().forward(*args, attention_mask=None, **kwargs)


class IgnoresPositions(LlamaForCausalLM):
    """It goes by the length of the cache."""

    def forward(self, *args, position_ids=None, **kwargs):
        return super().forward(*args, position_ids=None, **kwargs)


class CountsFromZero(LlamaForCausalLM):
    def forward(self, input_ids, position_ids=None, **kwargs):
        return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **kwargs)


class IgnoresCache(LlamaForCausalLM):
    def forward(self, *args, past_key_values=None, use_cache=None, **kwargs):
        return super().forward(*args, past_key_values=None, use_cache=False, **kwargs)


class SaysNothing(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * float("nan")
        return output


class HidesItsWindow(MistralForCausalLM):
    """Its config does not tell of the window of 64 tokens, which no text of the probe reaches."""

    def forward(self, *args, **kwargs):
        self.config.sliding_window = 64
        output = super().forward(*args, **kwargs)
        self.config.sliding_window = None
        return output


@pytest.mark.parametrize(
    ("kind", "mode", "reason"),
    [
        (IgnoresTreeMask, "chain", "no tree"),
        (IgnoresPositions, "packed", "^$"),
        (CountsFromZero, "plain", "no packed .keys of layer 0 differ .*; no replay .scores differ"),
        (IgnoresCache, "plain", "no tree .*; no chain"),
        (SaysNothing, "plain", "not finite"),
        (HidesItsWindow, "chain", "no packed .at position 255 a layer sees 64 tokens, by the config 256.; no tree"),
    ],
)
def test_model_that_verifies_wrongly_is_not_trusted_with_it(tiny_model, kind, mode, reason):
    plain = tiny_model("llama")
    model = kind(copy.deepcopy(plain.config)).eval()
    model.load_state_dict(plain.state_dict())
    target = probed(model)
    assert target.mode == mode
    assert re.search(reason, target.reason)


# ---- the key/value buffers
def test_buffers_grow_and_lose_nothing():
    """Two layers, the second with narrower values, as latent attention has them."""
    cache = SequenceCache()
    new = torch.arange(2 * 12 * 3, dtype=torch.float32).reshape(1, 2, 12, 3)
    for start, end, room in ((0, 3, 4), (3, 5, 5), (5, 12, 12)):
        cache.make_room(room)
        for layer in range(2):
            keys, values = cache.update(new[:, :, start:end] + layer, -new[:, :, start:end, : 3 - layer], layer)
            assert torch.equal(keys, new[:, :, :end] + layer)
            assert torch.equal(values, -new[:, :, :end, : 3 - layer])
        cache.keep(range(end - start))
    assert cache.get_seq_length() == 12


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells how much memory a process has")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_take_memory_for_what_is_written_only(dtype):
    def taken():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = taken()
    buffer = zeros(torch.empty(0, dtype=dtype), 4, 64 << 20)
    buffer[2, 5] = 7
    assert buffer.dtype == dtype
    assert buffer[2, :10].tolist() == [0, 0, 0, 0, 0, 7, 0, 0, 0, 0]
    assert not buffer[1].any()
    assert taken() - before < buffer.nbytes / 4


def test_slots_keep_what_they_hold_when_there_is_more_room():
    cache, plan = SlotCache(), MaskPlan({"all": None}, {"all": None}, by_type=False)
    cache.reserve(2, 4, [])
    written = torch.arange(2 * 3 * 2, dtype=torch.float32).reshape(1, 2, 3, 2)
    cache.pack = pack(
        side_by_side([chain([1, 2]), chain([3])], ["all", "all"]), [0, 0], plan, torch.float32, torch.device("cpu")
    )
    cache.update(written, -written, 0)
    cache.reserve(3, 9, [2, 1])
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert keys.shape == (3, 2, 9, 2)
    assert torch.equal(keys[0, :, :2], written[0, :, :2])
    assert torch.equal(values[1, :, :1], -written[0, :, 2:])
    assert not keys[2].any()


@pytest.mark.parametrize("nodes", [[], [0], [0, 1, 2], [2], [0, 2, 4], [1, 3], [0, 1, 4]])
def test_only_accepted_places_stay_and_they_close_up(nodes):
    cache = SequenceCache()
    new = torch.arange(9, dtype=torch.float32).reshape(1, 1, 9, 1)
    cache.make_room(9)
    cache.update(new[:, :, :3], -new[:, :, :3], 0)
    cache.keep(range(3))
    cache.update(new[:, :, 3:8], -new[:, :, 3:8], 0)
    cache.keep(nodes)
    keys, values = cache.update(new[:, :, 8:], -new[:, :, 8:], 0)
    kept = [0, 1, 2, *(3 + node for node in nodes), 8]
    assert keys.flatten().tolist() == kept
    assert values.flatten().tolist() == [-place for place in kept]


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neo"])
def test_scores_do_not_depend_on_how_large_the_buffers_began(target_of, architecture):
    target = dataclasses.replace(target_of(architecture), mode="chain")
    scores = []
    for capacity in (1, 100):
        sequence = BufferState(target, capacity)
        sequence.prefill(chain(PROMPTS[1]))
        sequence.keep(range(len(PROMPTS[1])))
        sequence.forward(chain([5, 6, 7, 8]))
        sequence.keep([0, 1])
        scores.append(sequence.forward(chain([9, 10])))
    assert torch.equal(*scores)
