"""A model's generation config: each field is honoured as `model.generate` does, or said. Processors keep their state apart."""

import copy
import dataclasses
import logging
import threading
import warnings

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

from lookahead.api import GenerationParams, LookaheadEngine
from lookahead.decode.chooser import check_generation_config
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.generation_config import FIELDS, not_used
from lookahead.decode.sampling import Sampling
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import ModelError, UsageError
from tests.architectures import plainly, random_prompts
from tests.support.generate_cases import NOT_USED, Wandering, target_of, tokenizer

PROMPTS = random_prompts((4, 9))
NEW_TOKENS = 12


@pytest.fixture
def configure(monkeypatch):
    """configure(architecture, **fields) -> TargetModel whose generation config has these fields."""

    def with_fields(architecture="llama", **fields):
        target = dataclasses.replace(target_of(architecture))  # a fresh one: ids of the end are read once
        own = copy.deepcopy(target.model.generation_config)
        for name, value in fields.items():
            setattr(own, name, value)
        monkeypatch.setattr(target.model, "generation_config", own)
        return target

    return with_fields


def answers(target, sampling=None, prompts=PROMPTS, batch_size=4):
    engine = DecodingEngine(
        target, Drafter([], DraftOptions(decoding_length=16, adaptive=False)), batch_size, tokenizer=tokenizer()
    )
    requests = [engine.request(prompt, NEW_TOKENS, sampling or Sampling(), 7) for prompt in prompts]
    list(engine.run(iter(requests)))
    for request in requests:
        if request.error:
            raise request.error
    return [request.token_ids for request in requests]


def by_generate(target, **wishes):
    said = []
    wishes = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **wishes}
    for prompt in PROMPTS:
        torch.manual_seed(7)
        text = torch.tensor([prompt])
        output = target.model.generate(text, attention_mask=torch.ones_like(text), **copy.deepcopy(wishes))
        said.append(output[0, len(prompt) :].tolist())
    return said


# ---- every field
def test_every_field_that_transformers_knows_is_in_the_table():
    assert {name for name in vars(GenerationConfig()) if name not in FIELDS} <= {"_original_object_hash", "_mask_length"}
    assert all(field.why for field in FIELDS.values() if field.use == "not used")


@pytest.mark.parametrize(("name", "value"), [pair for pair in NOT_USED.items() if pair[0] != "max_length"])
def test_field_that_is_not_used_is_said_in_one_line_and_changes_nothing(configure, name, value):
    plain = answers(configure())
    target = configure(**{name: value})
    line = not_used(target, Sampling())
    assert f"{name} {value!r} is" in line
    assert "\n" not in line
    assert answers(target) == plain


def test_line_stays_short_whatever_a_field_holds(configure):
    assert len(not_used(configure(force_words_ids=[[5]] * 10_000, own_field="x" * 10_000), Sampling())) < 400


def test_config_that_asks_for_nothing_says_nothing(configure):
    nothing = {"num_beams": 1, "num_return_sequences": 1, "token_healing": False, "cache_implementation": "static"}
    lengths = {"max_length": 4096, "max_new_tokens": 512, "_commit_hash": "abc"}
    assert not_used(configure(**nothing, **lengths, do_sample=False, temperature=0.6), Sampling()) == ""


def test_sampling_that_gives_way_is_said_with_its_settings(configure):
    target = configure(do_sample=True, temperature=0.7, top_p=0.9, top_k=20)
    assert "it samples (temperature 0.7, top_k 20, top_p 0.9), these answers are greedy" in not_used(target, Sampling())
    assert "--sampling model" in not_used(target, Sampling())
    assert "top_k 20, top_p 0.9 not used" in not_used(target, Sampling(temperature=0.7))
    assert not_used(target, Sampling(sampling="model")) == ""
    assert not_used(target, Sampling(temperature=0.7, top_p=0.9, top_k=20)) == ""


def test_no_end_in_the_generation_config_is_none_as_in_generate(configure):
    end = plainly(target_of("llama").model, PROMPTS[1])[3]
    assert len(answers(configure(eos_token_id=end))[1]) == 4
    target = configure(eos_token_id=None)
    target.text_config.eos_token_id, before = end, target.text_config.eos_token_id
    try:
        assert answers(target) == by_generate(target, do_sample=False)
        assert len(answers(target)[1]) == NEW_TOKENS
        assert f"it has no eos_token_id, so answers do not end at the {end} of config.json" in not_used(target, Sampling())
    finally:
        target.text_config.eos_token_id = before


@pytest.mark.parametrize(
    ("fields", "tokens", "saying"),
    [
        ({"stop_strings": ["x"]}, None, "has stop_strings, which need a tokenizer"),
        ({"forced_eos_token_id": 5, "suppress_tokens": [5]}, tokenizer, "forced_eos_token_id"),
        ({"repetition_penalty": -1.0}, tokenizer, "penalty"),
        ({"sequence_bias": {"(5,)": 1.0}}, tokenizer, "sequence_bias"),
    ],
)
def test_config_that_cannot_be_used_is_refused_at_load(configure, fields, tokens, saying):
    target = configure(**fields)
    with pytest.raises(ModelError, match=saying) as raised:
        check_generation_config(target, tokens and tokens(), Sampling())
    assert "\n" not in str(raised.value)
    with pytest.raises(ModelError, match="generation config"):
        LookaheadEngine(target, tokens and tokens())


@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_transformers_says_nothing_of_its_own_however_many_rows_there_are(configure, architecture, caplog):
    fields = {
        "max_length": 40,
        "min_length": 39,
        "num_beams": 4,
        "early_stopping": True,
        "temperature": 0.5,
        "eos_token_id": -1,
    }
    target = configure(architecture, **fields)
    caplog.clear()  # of what loading says
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            answers(target, Sampling(min_new_tokens=30))
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == []
    assert [str(warning.message) for warning in warned] == []
    assert target.model.generation_config.num_beams == 4  # as it was


# ---- sampling with the model's own settings
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_sampling_of_the_model_is_that_of_generate_and_what_is_asked_for_wins(configure, architecture):
    own = {"do_sample": True, "temperature": 1.4, "top_k": 9, "top_h": 0.9, "min_p": 0.01, "epsilon_cutoff": 1e-3}
    target, model = configure(architecture, **own), Sampling(sampling="model")
    assert answers(target, model) == by_generate(target) != answers(target)
    hotter = dataclasses.replace(model, temperature=3.0, top_k=0)
    assert answers(target, hotter) == by_generate(target, temperature=3.0, top_k=0)
    assert answers(target, dataclasses.replace(model, temperature=0.0)) == answers(target)
    assert answers(configure(architecture, do_sample=False, temperature=1.4), model) == answers(target)


def test_bad_words_as_texts_are_never_said_with_or_without_a_space_before(configure):
    class Spaced:
        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return {"input_ids": [40, *said[:2]] if text.startswith(" ") else said[:2]}

    target = configure()
    said = answers(target)[1]
    engine = DecodingEngine(target, Drafter([], DraftOptions("off")), tokenizer=Spaced())
    generation = engine.generate(PROMPTS[1], NEW_TOKENS, sampling=Sampling(bad_words=("x",)))
    expected = by_generate(target, do_sample=False, bad_words_ids=[said[:2], [40, *said[:2]]])[1]
    assert generation.token_ids == expected != said
    with pytest.raises(UsageError, match="tokenizer"):
        DecodingEngine(target, Drafter()).generate(PROMPTS[1], NEW_TOKENS, sampling=Sampling(bad_words=("x",)))


# ---- processors with state
def test_rows_that_share_params_do_not_share_the_state_of_their_processors(configure):
    alone = by_generate(configure(), do_sample=False, logits_processor=[Wandering()])
    mine = Wandering()
    for rows in (1, 4):
        assert answers(configure(), Sampling(processors=(mine,)), batch_size=rows) == alone
    assert mine.seen == []
    engine = LookaheadEngine(configure(), batch_size=2)
    params = GenerationParams(max_new_tokens=NEW_TOKENS, processors=[mine])
    assert [result.token_ids for result in engine.generate(PROMPTS, params)] == alone


class Holds(LogitsProcessor):
    def __init__(self, held):
        self.held = held

    def __call__(self, input_ids, scores):
        return scores


class Shared(Holds):
    def __deepcopy__(self, memo):
        return self


def test_processor_that_cannot_be_copied_fails_its_row_and_says_what_to_do(configure):
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"Holds cannot be copied for each answer .*__deepcopy__"):
        answers(configure(), Sampling(processors=(Holds(lock),)))
    assert answers(configure(), Sampling(processors=(Shared(lock),))) == answers(configure())
