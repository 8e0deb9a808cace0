"""A constraint beside what else rules out tokens: complete answers end, others fail with both names; drafts change nothing."""

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, MambaConfig, MambaForCausalLM

from lookahead import Constraint, GenerationParams, LookaheadEngine
from lookahead.draft.options import DraftOptions
from lookahead.errors import ConstraintError
from lookahead.models.load import load_model
from lookahead.models.probe import probed
from lookahead.tokenizer import load_tokenizer
from tests.support.cli import Cli, write_jsonl
from tests.support.jobs import MODEL, PROMPTS, rows_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CONSTRAINTS = {
    "choice": Constraint.of("choice", ["yes", "no way"]),
    "regex": Constraint.of("regex", "[0-9]{2,4}"),
    "grammar": Constraint.of("grammar", 'start: "a" | "a" start'),
    "json_schema": Constraint.of("json_schema", SCHEMA),
}


class RulesOutAll(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)


@pytest.fixture(scope="module")
def engines():
    target, tokenizer = load_model(str(MODEL), dtype="float32", device="cpu"), load_tokenizer(str(MODEL))
    drafted = DraftOptions(decoding_length=8, adaptive=False)
    return tuple(LookaheadEngine(target, tokenizer, drafts=each, batch_size=3) for each in (DraftOptions("off"), drafted))


def answer(engine: LookaheadEngine, kind: str, **wishes: Any) -> Any:
    (result,) = engine.generate(
        PROMPTS[0], GenerationParams(**{"max_new_tokens": 40, "constraint": CONSTRAINTS[kind], **wishes})
    )
    return result


@pytest.mark.parametrize("temperature", [None, 1.0])
@pytest.mark.parametrize("kind", ["choice", "regex"])
def test_answer_that_is_complete_ends_before_min_new_tokens(engines, kind, temperature):
    for engine in engines:
        result = answer(engine, kind, min_new_tokens=30, temperature=temperature)
        assert (result.finish_reason, result.complete, result.error) == ("stop", True, None)
        assert len(result.token_ids) < 30


def test_answer_that_may_go_on_does_until_min_new_tokens(engines):
    assert len(answer(engines[0], "grammar", min_new_tokens=12).token_ids) >= 12


@pytest.mark.parametrize(
    ("wishes", "names"),
    [
        ({"bad_words": ["{"]}, "json_schema and bad_words:"),
        ({"no_repeat_ngram_size": 1}, "json_schema and no_repeat_ngram_size:"),
        ({"processors": [RulesOutAll()]}, "json_schema and processors (RulesOutAll):"),
        ({"no_repeat_ngram_size": 1, "temperature": 1.0, "min_new_tokens": 3}, "json_schema and no_repeat_ngram_size:"),
    ],
    ids=["bad words", "no repeat", "processors", "sampled"],
)
def test_conflict_is_an_error_that_names_both_and_keeps_the_text(engines, wishes, names):
    texts = []
    for engine in engines:
        result = answer(engine, "json_schema", **wishes)
        assert isinstance(result.error, ConstraintError)
        assert names in str(result.error)
        assert "no token is allowed by both" in str(result.error)
        texts.append(result.text)
    assert texts[0] == texts[1]
    assert '{"a": 1'.startswith(texts[0][:3])


def test_bad_words_are_not_emitted_to_end_in_time(engines):
    for engine in engines:
        result = answer(engine, "json_schema", bad_words=["}"], max_new_tokens=12)
        assert "}" not in result.text
        assert not result.complete


@pytest.mark.parametrize(("kind", "room", "complete"), [("choice", 1, False), ("regex", 2, True), ("json_schema", 3, False)])
def test_answer_that_is_cut_says_whether_it_is_complete(engines, kind, room, complete):
    for engine in engines:
        result = answer(engine, kind, max_new_tokens=room)
        assert (result.finish_reason, result.complete) == ("length", complete)
    assert engines[0].generate(PROMPTS[0], GenerationParams(max_new_tokens=2))[0].complete is None


def test_stop_text_in_a_constrained_answer_leaves_it_incomplete(engines):
    result = answer(engines[0], "json_schema", stop=['"'])
    assert (result.finish_reason, result.complete) == ("stop", False)


@pytest.mark.parametrize("pattern", ["xyz", "[A-Z]{2}-[0-9]+", "foo|bar"])
def test_text_with_a_pattern_that_may_stand_anywhere_is_completed_in_time(engines, pattern):
    schema = {**SCHEMA, "properties": {"a": {"type": "string", "pattern": pattern}}}
    for engine, room in itertools.product(engines, (12, 20)):
        result = answer(engine, "json_schema", constraint=Constraint.of("json_schema", schema), max_new_tokens=room)
        assert result.complete, result.text
        json.loads(result.text)


def test_models_that_take_no_drafts_end_in_the_same_ways(engines):
    torch.manual_seed(0)
    tokenizer = engines[0].tokenizer
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, eos_token_id=tokenizer.eos_token_id)
    engine = LookaheadEngine(probed(MambaForCausalLM(config).eval()), tokenizer)
    assert answer(engine, "choice", min_new_tokens=20).complete
    assert "json_schema and bad_words:" in str(answer(engine, "json_schema", bad_words=["{"]).error)
    assert answer(engine, "json_schema", max_new_tokens=2).complete is False


def test_job_writes_one_error_row_with_the_text_so_far_and_the_other_rows_as_ever(capsys, tmp_path):
    params = [{}, {"json_schema": SCHEMA, "no_repeat_ngram_size": 1}, {"choice": ["yes", "no"], "min_new_tokens": 9}]
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": PROMPTS[0], "params": each} for each in params])
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl", "--max-new-tokens", 9)
    assert Cli(capsys)(*job).code == 3
    plain, failed, complete = rows_of(tmp_path / "out.jsonl")
    assert plain["finish_reason"] == "length"
    assert "complete" not in plain
    assert failed["error"]["type"] == "invalid_row"
    assert failed["error"]["message"].startswith("line 2: json_schema and no_repeat_ngram_size: no token is allowed by both")
    assert failed["text"].startswith("{")
    assert (complete["finish_reason"], complete["complete"]) == ("stop", True)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    kind=st.sampled_from([*CONSTRAINTS]),
    room=st.integers(1, 20),
    least=st.sampled_from([None, 1, 5, 50]),
    bad_words=st.sampled_from([(), ("0", "1"), ("{",), ("}",), ("yes", "no way"), ("a",)]),
    no_repeat=st.sampled_from([None, 1, 2]),
    bias=st.sampled_from([{}, {2: -1e9}, {2: 50.0}]),
    temperature=st.sampled_from([None, 1.0]),
)
def test_every_row_ends_as_an_answer_or_as_one_clear_error_whatever_is_drafted(
    engines, kind, room, least, bad_words, no_repeat, bias, temperature
):
    wishes = {"min_new_tokens": least, "bad_words": bad_words, "no_repeat_ngram_size": no_repeat, "logit_bias": bias}
    params = GenerationParams(max_new_tokens=room, constraint=CONSTRAINTS[kind], temperature=temperature, **wishes)
    results = [engine.generate(PROMPTS[:2], [params, GenerationParams(max_new_tokens=4)]) for engine in engines]
    for one, other in zip(*results, strict=True):
        assert (one.token_ids, one.finish_reason, one.complete) == (other.token_ids, other.finish_reason, other.complete)
        assert str(one.error) == str(other.error)
    result, unconstrained = results[0]
    assert unconstrained.error is None
    if result.error:
        assert "no token is allowed by both" in str(result.error)
    elif result.finish_reason == "stop":
        assert result.complete
