"""Answers that must be something: with drafts as without, complete, and cheap. Drafts hold nothing that could not be said."""

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lookahead.decode.constraint import Constraint, Grammars
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.sampling import Sampling
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import ConstraintError, UsageError
from lookahead.forward.target import TargetModel
from lookahead.models.load import load_model
from lookahead.models.probe import probed
from lookahead.tokenizer import load_tokenizer
from lookahead_cli.demo import samples_folder
from tests.support.cli import write_jsonl
from tests.support.depth import deep
from tests.support.schemas import SCHEMAS

MODEL = samples_folder() / "demo-model"
PROMPTS = ["Tom has 3 apples and buys 4 more. How many", "Answer in JSON:", "The box is red. Ana"]
OFF, DRAFTS = DraftOptions("off"), DraftOptions(decoding_length=16, adaptive=False)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def demo():
    return load_model(str(MODEL), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def random_model(tokenizer):
    """It says anything, and would never end a text by itself."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 5, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id, initializer_range=0.3,
    )  # fmt: skip
    return probed(LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def answers(
    target: TargetModel,
    tokenizer: Any,
    sampling: Sampling | Sequence[Sampling],
    options: DraftOptions = OFF,
    batch_size: int = 1,
    room: int = 120,
    times: int = 1,
) -> list[Any]:
    """To each prompt, one for each sampling; the last of several `times`, so that drafts know what was said before."""
    engine = DecodingEngine(target, Drafter([], options), batch_size, tokenizer=tokenizer)
    wishes = [sampling] * len(PROMPTS) if isinstance(sampling, Sampling) else sampling
    for _ in range(times):
        prompts = [tokenizer(PROMPTS[n % len(PROMPTS)])["input_ids"] for n in range(len(wishes))]
        found = [engine.request(ids, room, wish, n) for n, (ids, wish) in enumerate(zip(prompts, wishes, strict=True))]
        list(engine.run(found))
    for each in found:
        assert each.error is None, each.error
    return found


def text_of(tokenizer: Any, generation: Any) -> str:
    return tokenizer.decode(generation.token_ids, skip_special_tokens=True)


def schema(value: dict[str, Any], **wishes: Any) -> Sampling:
    return Sampling(constraint=Constraint.of("json_schema", value), **wishes)


# answers


WAYS = ((DRAFTS, 4, 2), (DraftOptions(adaptive=True), 8, 1))  # drafts, rows at once, how many times the same is asked
ALONE = ((DRAFTS, 1, 1),)


@pytest.mark.parametrize(
    ("model", "ways"),
    [("demo", WAYS[:1]), *deep([("random_model", WAYS), ("demo", WAYS[1:]), ("demo", ALONE), ("random_model", ALONE)])],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} ways",
)
def test_answers_validate_and_are_those_without_drafts(model, ways, tokenizer, request):
    target = request.getfixturevalue(model)
    wishes = [schema(each) for each in SCHEMAS.values()]
    plain = answers(target, tokenizer, wishes, batch_size=8)
    for name, generation in zip(SCHEMAS, plain, strict=True):
        jsonschema.validate(json.loads(text_of(tokenizer, generation)), SCHEMAS[name])
    for options, batch_size, times in ways:
        found = answers(target, tokenizer, wishes, options, batch_size, times=times)
        for name, before, generation in zip(SCHEMAS, plain, found, strict=True):
            assert generation.token_ids == before.token_ids, name
        if not options.adaptive:
            assert sum(g.steps for g in found) < 0.7 * sum(g.steps for g in plain)


@pytest.mark.parametrize("batch_size", [3, *deep([1])])
@pytest.mark.parametrize(
    "wishes",
    [
        *deep([{"temperature": 1.0}]),
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        *deep([{"repetition_penalty": 1.3}, {"temperature": 1.0, "presence_penalty": 1.0, "min_p": 0.02}]),
        {"stop": ('"',)},
        *deep([{"logit_bias": {5: 4.0, 77: -3.0}}]),
    ],
    ids=str,
)
def test_samplers_keep_to_the_constraint_too(demo, tokenizer, wishes, batch_size):
    sampled = [schema(SCHEMAS[name], **wishes) for name in ("person", "list of points", "told apart by kind")]
    plain = answers(demo, tokenizer, sampled, room=45)
    found = answers(demo, tokenizer, sampled, DRAFTS, batch_size, room=45, times=2)
    assert [g.token_ids for g in found] == [g.token_ids for g in plain]
    if "stop" not in wishes:
        for generation, wish in zip(plain, sampled, strict=True):
            jsonschema.validate(json.loads(text_of(tokenizer, generation)), json.loads(wish.constraint.text))


@pytest.mark.parametrize(
    ("kind", "value", "good"),
    [
        ("regex", r"[a-z]{3,9}\.(com|org)", r"[a-z]{3,9}\.(com|org)"),
        ("regex", r"\(\d{3}\) \d{3}-\d{4}", r"\(\d{3}\) \d{3}-\d{4}"),
        ("choice", ["yes", "no", 'may"be', "not sure, é"], r'yes|no|may"be|not sure, é'),
        ("grammar", 'root ::= "x" [0-9]{2} ("," [0-9]{2}){1,3} "\\n"', r"x\d\d(,\d\d){1,3}\n"),
        ("grammar", 'start: "<" WORD ">" DIGIT\nWORD: /[a-z]{2,5}/\nDIGIT: /[0-9]/', r"<[a-z]{2,5}>[0-9]"),
    ],
)
def test_regular_expressions_choices_and_grammars(demo, random_model, tokenizer, kind, value, good):
    import re

    for target in (demo, random_model):
        wish = Sampling(constraint=Constraint.of(kind, value))
        plain, found = answers(target, tokenizer, wish), answers(target, tokenizer, wish, DRAFTS, 3)
        assert [g.token_ids for g in found] == [g.token_ids for g in plain]
        for generation in plain:
            assert re.fullmatch(good, text_of(tokenizer, generation))
            assert generation.finish_reason == "stop"


def test_each_row_has_its_own_and_some_have_none(demo, tokenizer):
    wishes = [schema(SCHEMAS["person"]), Sampling(), Sampling(constraint=Constraint.of("choice", ["yes", "no"])), Sampling()]
    alone = [answers(demo, tokenizer, [Sampling()] * n + [wish], room=60)[n] for n, wish in enumerate(wishes)]
    assert [g.token_ids for g in answers(demo, tokenizer, wishes, DRAFTS, 4, room=60)] == [g.token_ids for g in alone]
    assert text_of(tokenizer, alone[2]) in ("yes", "no")


@pytest.mark.parametrize("room", [1, 40, *deep([2, 5, 20, 60])])
@pytest.mark.parametrize("wish", [{}, {"temperature": 1.5}, *deep([{"repetition_penalty": 1.2}])], ids=str)
def test_answers_are_complete_if_there_is_room_for_any(random_model, tokenizer, grammars, room, wish):
    """A model that would never end: what was begun is brought to an end in time, and no answer is cut that need not be."""
    names = ["text", "integer", "numbers", "person", "lists of lists", "list of points", "tree", "any JSON", "three colours"]
    wishes = [schema(SCHEMAS[name], **wish) for name in names]
    plain = answers(random_model, tokenizer, wishes, room=room)
    drafted = answers(random_model, tokenizer, wishes, DRAFTS, 3, room=room)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
    for name, generation in zip(names, plain, strict=True):
        least = len(grammars.guide(Constraint.of("json_schema", SCHEMAS[name]), room)._completion() or ())
        if least <= room:
            jsonschema.validate(json.loads(text_of(tokenizer, generation)), SCHEMAS[name])


# drafts
def test_what_must_come_is_drafted_and_nothing_that_cannot(demo, tokenizer):
    """The tokens between values come from the grammar; every node of every tree could be accepted."""
    engine = DecodingEngine(demo, Drafter([], DRAFTS), tokenizer=tokenizer)
    constraint = Constraint.of("json_schema", SCHEMAS["list of points"])
    steps = []
    for _ in range(2):
        generation = engine.request(tokenizer(PROMPTS[0])["input_ids"], 120, Sampling(constraint=constraint))
        generation.observer = steps.append
        list(engine.run([generation]))
        assert generation.accepted_by_source["grammar"] >= 10
    said = generation.token_ids
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    at = 1
    for step in steps[-generation.steps :]:
        guide = grammars.guide(constraint, 120)
        for token in said[:at]:
            guide.accept_token(token)
        assert all(guide.possible(step.tree.token_ids.tolist(), step.tree.parents.tolist()))
        at += len(step.emitted)
    assert at == len(said)


def test_plain_steps_are_timed_between_drafts_of_constrained_rows(demo, tokenizer):
    """Else the speedup of a job of such rows is never measured."""
    engine = DecodingEngine(demo, Drafter([], DraftOptions()), 1, tokenizer=tokenizer)
    ids = tokenizer(PROMPTS[0])["input_ids"]
    for _ in engine.run([engine.request(ids, 60, schema(SCHEMAS["list of points"])) for _ in range(4)]):
        pass
    assert engine.accounting.drafted[True] > 0
    assert engine.accounting.plain._blocks  # of timed steps


# bad constraints
@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        ("json_schema", {"type": "string", "enum": [1]}, "Unsatisfiable schema"),
        ("json_schema", {"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ("json_schema", {"type": "wrong"}, "Invalid type: wrong"),
        ("json_schema", "{", "the JSON schema is not a JSON object"),
        ("json_schema", "[1]", "the JSON schema is not a JSON object"),
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("grammar", "start: nothing_known", "unknown name"),
        ("grammar", "root ::= )", "cannot be read"),
    ],
)
def test_constraints_that_cannot_be_kept_are_said_on_one_line(kind, value, problem, grammars):
    constraint = Constraint.of(kind, value)
    for reject in (constraint.check, lambda: grammars.guide(constraint, 10)):
        with pytest.raises(ConstraintError) as error:
            reject()
        assert problem in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "value"), [("json_schema", 3), ("choice", []), ("choice", "yes"), ("regex", None), ("xml", "a")]
)
def test_constraints_of_the_wrong_type_are_refused(kind, value):
    with pytest.raises(UsageError):
        Constraint.of(kind, value)


def test_job_takes_constraints_for_all_rows_and_for_one(cli, tmp_path):
    person, bad = SCHEMAS["person"], {"type": "string", "enum": [1]}
    schema_file, out = tmp_path / "person.json", tmp_path / "out.jsonl"
    schema_file.write_text(json.dumps(person))
    body = {"messages": [{"role": "user", "content": "3 + 4"}]}
    formats = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS["from 3 to 17"]}}
    rows = [
        {"id": "job", "prompt": "Who?"},
        {"id": "own", "prompt": "Who?", "params": {"choice": ["yes", "no"]}},
        {"id": "bad", "prompt": "Who?", "params": {"json_schema": bad}},
        {"id": "two", "prompt": "Who?", "params": {"json_schema": person, "regex": "a"}},
        {"id": "type", "prompt": "Who?", "params": {"regex": 3}},
        {"id": "dead end", "prompt": "Who?", "params": {"regex": r"[^\s\S]"}},
        {"custom_id": "openai", "body": {**body, "response_format": formats}},
        {"custom_id": "object", "body": {**body, "response_format": {"type": "json_object"}}},
        {"custom_id": "what", "body": {**body, "response_format": {"type": "xml"}}},
    ]
    write_jsonl(tmp_path / "in.jsonl", rows)
    on_files = ("--input", tmp_path / "in.jsonl", "-o", out, "--json-schema", schema_file, "--max-new-tokens", 40)
    assert cli("generate", "--model", MODEL, *on_files).code == 3
    found = {row.get("custom_id", row.get("id")): row for row in map(json.loads, out.read_text().splitlines())}
    jsonschema.validate(json.loads(found["job"]["text"]), person)
    assert found["own"]["text"] in ("yes", "no")
    assert "Unsatisfiable" in found["bad"]["error"]["message"]
    assert "an answer can have one" in found["two"]["error"]["message"]
    assert "regex is of type int" in found["type"]["error"]["message"]
    assert "no token of the vocabulary" in found["dead end"]["error"]["message"]
    said = {name: found[name]["response"]["body"]["choices"][0]["message"]["content"] for name in ("openai", "object")}
    assert 3 <= int(said["openai"]) <= 17
    assert isinstance(json.loads(said["object"]), dict)
    assert "response_format" in found["what"]["response"]["body"]["error"]["message"]
    schema_file.write_text(json.dumps(bad))
    resumed = cli("generate", "--model", MODEL, *on_files, "--resume")
    assert resumed.code == 1
    assert "Unsatisfiable" in resumed.err
    schema_file.write_text(json.dumps(SCHEMAS["point"]))
    resumed = cli("generate", "--model", MODEL, *on_files, "--resume")
    assert (resumed.code, "--json-schema of content" in resumed.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("--regex", "("), 2, "--regex: regex: regex parse error: unclosed group"),
        (("--regex", "a", "--choice", "b"), 2, "--regex and --choice: give one of them"),
        (("--json-schema", "missing.json"), 1, "missing.json: cannot be read"),
        (("--grammar", MODEL / "config.json"), 1, "config.json: the grammar cannot be read"),
    ],
)
def test_line_that_asks_for_what_cannot_be_is_refused_before_the_model_is_loaded(cli, arguments, code, problem):
    result = cli("generate", "--model", MODEL, "--input", samples_folder() / "prompts.jsonl", *arguments)
    assert result.code == code
    assert problem in result.err
    assert result.out == ""
