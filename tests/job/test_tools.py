"""Tool calls in OpenAI lines: shown to the model, read from its answer, constrained where asked, or an error row."""

import dataclasses
import json
from typing import Any

import jsonschema
import pytest

from lookahead.decode.constraint import Constraint, Grammars
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.request import Generation
from lookahead.decode.sampling import GREEDY
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError
from lookahead.job.rows import parse_row, prompts_of, sampling_of
from lookahead.job.runner import JobOptions, run_rows
from lookahead.job.tools import Tools, message_of
from lookahead.models.load import load_model
from lookahead.tokenizer import load_tokenizer
from tests.job.test_openai import error_of, line, requests_of, strictly
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, rows_of

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
COUNT = {"type": "object", "properties": {"basket": {"type": "integer"}}, "required": ["basket"], "additionalProperties": False}
SCHEMAS = {"get_weather": CITY, "count_apples": COUNT}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
USER = {"role": "user", "content": "How warm is it in Rome?"}
ASKED = {"messages": [USER], "tools": TOOLS, "max_tokens": 100}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}

# The parts about calls of the chat templates of Qwen 2.5, Llama 3.2, Mistral Nemo and Mistral Small 3.2, shortened
QWEN = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{% endif %}{% for m in messages %}{{ m.role + ": " + m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}"""
LLAMA = """{{ 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}{% for m in messages %}
{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{{ '{"name": "' + call.name + '", ' }}
{{ '"parameters": ' }}{{ call.arguments | tojson }}}{% else %}{{ m.role + ": " + m.content }}{% endif %}{% endfor %}"""
NEMO = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}
{% if m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}]
{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"""
SMALL = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}
{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}
[INST]{{ m.content }}[/INST]{% endfor %}"""
CODER = QWEN.replace("<tool_call>", "<tool_call><function=")  # parameters in tags, which no grammar of ours writes
TEMPLATES = {"hermes": QWEN, "llama": LLAMA, "mistral": NEMO, "mistral args": SMALL}
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]  # tokens of their own in models that have them


def tokenizer_with(template: str, special: tuple[str, ...] | list[str] = ()) -> Any:
    tokenizer = load_tokenizer(str(MODEL))
    tokenizer.chat_template = template
    if special:
        tokenizer.add_special_tokens({"extra_special_tokens": [*special]})
    return tokenizer


@pytest.fixture(scope="module")
def target():
    return load_model(str(MODEL), device="cpu")


@pytest.fixture(scope="module")
def job(target):
    """job(rows, tokenizer, **options) -> rows that have ended."""

    def run(rows, tokenizer=None, drafts=None, batch_size=4, **options):
        tokenizer = tokenizer or load_tokenizer(str(MODEL))
        engine = DecodingEngine(target, Drafter([], drafts or DraftOptions()), batch_size, tokenizer=tokenizer)
        written: list[Any] = []
        run_rows(engine, tokenizer, requests_of(rows), JobOptions(**options), written.append, lambda: False)
        return written

    return run


def choice_of(ended: Any) -> Any:
    """The only choice of a row, as OpenAI's client reads it."""
    return strictly("ChatCompletion", ended.row["response"]["body"]).choices[0]


def tools_of(body: dict[str, Any]) -> Tools:
    request = parse_row(line({**ASKED, **body}), 1)
    assert request.problem == ""
    assert request.tools is not None
    return request.tools


# ---- what the model is shown


def test_template_gets_tools_and_calls_with_arguments_as_objects():
    tokenizer = tokenizer_with(QWEN)
    answered = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "31"}]}
    described = {**TOOLS[0]["function"], "description": "Weather.", "strict": None}
    body = {**ASKED, "messages": [USER, answered, result], "tools": [{"type": "function", "function": described}]}
    (ids,) = prompts_of(parse_row(line(body), 1), tokenizer)
    shown = {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "description": "Weather."}}
    called = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [called]}, {**result, "content": "31"}]
    theirs = tokenizer.apply_chat_template(messages, [shown], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == theirs
    assert '"arguments": {"city": "Rome"}}' in tokenizer.decode(ids)


@pytest.mark.parametrize("body", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_tools_that_may_not_be_called_are_not_shown(body):
    tokenizer = tokenizer_with(QWEN)
    request = parse_row(line({**ASKED, **body}), 1)
    assert (request.problem, request.tools) == ("", None)
    assert prompts_of(request, tokenizer) == prompts_of(parse_row(line({"messages": [USER]}), 1), tokenizer)


def test_function_without_parameters_takes_an_empty_object():
    tools = tools_of({"tools": [{"type": "function", "function": {"name": "now"}}]})
    jsonschema.validate({}, tools.schemas["now"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"zone": 1}, tools.schemas["now"])


@pytest.mark.parametrize(
    ("template", "body", "saying"),
    [
        ("{{ messages[0].content }}", {}, 'the chat template does not show "tools"'),
        (CODER, {}, "in a form that is not known"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}", {}, "in a form that is not known"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            {"tools": None, "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
            'does not show the "tool_calls"',
        ),
    ],
)
def test_template_that_leaves_out_tools_or_calls_makes_an_error_row(job, template, body, saying):
    (ended,) = job([line({**ASKED, **body})], tokenizer_with(template))
    assert saying in error_of(ended.row)["message"]


def function(**parts: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **parts}}]


@pytest.mark.parametrize(
    ("body", "param", "saying"),
    [
        ({"tools": {}}, "tools", '"tools" is {}, not a list'),
        ({"tools": [5]}, "tools", '"tools" is [5], not a list'),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "not a list of"),
        ({"tools": [{"type": "function"}]}, "tools", "number 1 is not"),
        ({"tools": [*TOOLS, *function(name="a b")]}, "tools", "number 3 is not"),
        ({"tools": function(name="x" * 65)}, "tools", "1 to 64 letters"),
        ({"tools": function(parameters=[])}, "tools", '"parameters" of f is [], not a dict'),
        ({"tools": function(parameters={"type": "string"})}, "tools", "not a schema of an object"),
        ({"tools": function(strict="yes")}, "tools", "\"strict\" of f is 'yes', not a bool"),
        ({"tools": function(description="\ud800")}, "tools", "surrogate"),
        ({"tools": TOOLS + TOOLS}, "tools", "two functions of one name"),
        ({"tools": function() * 129}, "tools", "129 entries: at most 128"),
        ({"tool_choice": "any"}, "tool_choice", "not none, auto, required or a function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "not supported"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", 'not in "tools"'),
        ({"tool_choice": "required", "tools": []}, "tool_choice", 'there are no "tools"'),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "not true or false"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages", '"tool_calls" is [5]'),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages", '"tool_calls" is 5'),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{1"}}]}]},
            "messages",
            "arguments of 'f' that are not the JSON text of an object",
        ),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages", 'has "tool_calls"'),
        ({"messages": [USER, {"role": "tool", "content": "31"}]}, "messages", 'no "tool_call_id"'),
    ],
)
def test_tools_that_cannot_be_are_refused_by_name(body, param, saying):
    request = parse_row(line({**ASKED, **body}), 1)
    assert saying in request.problem
    assert request.param == param


def test_tools_go_with_messages():
    request = parse_row(line({"prompt": "a", "tools": TOOLS}), 1)
    assert (request.param, "messages" in request.problem) == ("tools", True)
    plain = parse_row({"messages": [USER], "tools": TOOLS}, 1)
    assert "OpenAI" in plain.problem


# ---- what the model has written


def read(template: str, text: str, special: tuple[str, ...] | list[str] = (), **body: Any) -> dict[str, Any] | None:
    tokenizer = tokenizer_with(template, special)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    generation = Generation([1], 999, frozenset(), token_ids=ids, finish_reason="stop")
    return message_of(tools_of(body), generation, tokenizer, "name")


ONE, OTHER = '"name": "get_weather", "arguments": {"city": "Köln"}', '"name": "count_apples", "arguments": {}'
BOTH = [("get_weather", '{"city": "Köln"}'), ("count_apples", "{}")]


@pytest.mark.parametrize(
    ("form", "text", "content", "count"),
    [
        ("hermes", f"<tool_call>\n{{{ONE}}}\n</tool_call>", None, 1),
        ("hermes", f"I look.\n<tool_call>\n{{{ONE}}}\n</tool_call>\n<tool_call>\n{{{OTHER}}}\n</tool_call>", "I look.", 2),
        ("hermes", f"<tool_call>{{{ONE}}}", None, 1),
        ("llama", f"{{{ONE.replace('arguments', 'parameters')}}}", None, 1),
        ("llama", f"<|python_tag|>{{{ONE}}}", None, 1),
        ("mistral", f"[TOOL_CALLS] [{{{ONE}}}, {{{OTHER}}}]", None, 2),
        ("mistral", f"I look.[TOOL_CALLS][{{{ONE}}}]", "I look.", 1),
        ("mistral args", '[TOOL_CALLS]get_weather[CALL_ID]D681PevKs[ARGS]{"city": "Köln"}', None, 1),
        ("mistral args", '[TOOL_CALLS]get_weather[ARGS]{"city": "Köln"}[TOOL_CALLS]count_apples[ARGS]{}', None, 2),
    ],
)
@pytest.mark.parametrize("special", [(), SPECIAL], ids=["text", "tokens"])
def test_calls_are_read_in_the_form_of_the_chat_template(form, text, content, count, special):
    message = read(TEMPLATES[form], text, special)
    assert message is not None
    assert message["content"] == content
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert called == BOTH[:count]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len({*ids}) == count
    assert all(len(each) == 9 and each.isalnum() if "mistral" in form else each.startswith("call_") for each in ids)
    single = read(TEMPLATES[form], text, special, parallel_tool_calls=False)
    assert single == {**message, "tool_calls": message["tool_calls"][:1]}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "It is warm."),
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": "Rome"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": NaN}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": "\\ud800"}}\n</tool_call>'),
        ("hermes", f"<tool_call>\n{{{ONE}}}\n</tool_call><tool_call>{{"),
        ("llama", f"Here: {{{ONE}}}"),
        ("llama", '<|python_tag|>brave_search.call(query="Rome")'),
        ("mistral", f"{{{ONE}}}"),
        ("mistral", "[TOOL_CALLS][5]"),
        ("mistral args", "[TOOL_CALLS]get_weather[ARGS]{"),
    ],
)
def test_answer_without_calls_or_with_a_malformed_one_stays_content(form, text):
    assert read(TEMPLATES[form], text) is None


def test_stop_text_ends_the_answer_before_calls_are_read():
    tokenizer = tokenizer_with(QWEN)
    ids = tokenizer(f"Well. STOP <tool_call>{{{ONE}}}</tool_call>", add_special_tokens=False)["input_ids"]
    sampling = dataclasses.replace(GREEDY, include_stop=False)
    generation = Generation([1], 999, frozenset(), sampling, stop=("STOP",), token_ids=ids, finish_reason="stop")
    assert message_of(tools_of({}), generation, tokenizer, "name") is None


RESPONSE = {  # as in transformers for Qwen 3.5
    "defaults": {"role": "assistant"},
    "start_anchor": "\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "</s>", "content": "text"},
    },
}


def test_tokenizer_with_a_response_template_reads_the_answer(job):
    tokenizer = tokenizer_with(CODER)
    tokenizer.response_template = RESPONSE
    text = "<think>Hm.</think>I look.<tool_call>\n<function=count_apples>\n<parameter=basket>\n7\n</parameter>\n</function>"
    text += "\n</tool_call>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    generation = Generation([1], 999, frozenset(), token_ids=ids, finish_reason="stop")
    message = message_of(tools_of({}), generation, tokenizer, "name")
    assert message is not None
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "count_apples", "arguments": '{"basket": 7}'}]
    tokenizer.response_template = {"fields": {}}
    (broken,) = job([line(ASKED)], tokenizer)
    assert "response template cannot be used" in error_of(broken.row)["message"]
    tokenizer.response_template = RESPONSE
    auto, required = job([line(ASKED, "a"), line({**ASKED, "tool_choice": "required"}, "b")], tokenizer)
    assert choice_of(auto).finish_reason in ("stop", "length")
    assert '"tool_choice"' in error_of(required.row)["message"]


# ---- what the model must write


@pytest.mark.parametrize("form", TEMPLATES)
def test_required_and_named_calls_have_arguments_of_their_schemas(job, form):
    rows = [
        line({**ASKED, "tool_choice": "required", "n": 3, "temperature": 1.0}, "required"),
        line({**ASKED, "tool_choice": NAMED, "messages": [{"role": "user", "content": "Call count_apples."}]}, "named"),
        line({**ASKED, "tool_choice": "required", "parallel_tool_calls": False}, "single"),
    ]
    tokenizer = tokenizer_with(TEMPLATES[form])
    ended = job(rows, tokenizer)
    for each in ended:
        for choice in strictly("ChatCompletion", each.row["response"]["body"]).choices:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            assert choice.complete
            for call in choice.message.tool_calls:
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert [call.function.name for call in choice_of(ended[1]).message.tool_calls] == ["get_weather"]
    assert len(choice_of(ended[2]).message.tool_calls) == 1
    again = job(rows, tokenizer, DraftOptions("off"), batch_size=1, began=ended_began(ended))
    assert [each.row for each in again] == [each.row for each in ended]  # ids of calls, too


def ended_began(ended: list[Any]) -> Any:
    import datetime

    return datetime.datetime.fromtimestamp(ended[0].row["response"]["body"]["created"])


def test_tokens_that_a_schema_forces_take_no_step_of_their_own(job):
    """`<tool_call>`, the name of the only function, keys and what begins only one of the choices are drafted and accepted."""
    (ended,) = job([line({**ASKED, "tool_choice": NAMED})], drafts=DraftOptions(decoding_length=64, adaptive=False))
    counts = ended.counts
    assert counts.accepted_by_source["grammar"] > counts.tokens / 2
    assert counts.steps < counts.tokens / 2


def accepts(constraint: Constraint, tokenizer: Any, text: str) -> bool:
    """Whether an answer may begin so."""
    guide = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).guide(constraint, 500)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return all(guide.possible([0, *ids], [-1, *range(len(ids))]))


@pytest.mark.parametrize("special", [(), [*SPECIAL, "<tool_call>"]], ids=["text", "tokens"])
@pytest.mark.parametrize("form", TEMPLATES)
def test_strict_function_is_called_as_its_schema_says_or_not_at_all(form, special):
    tokenizer = tokenizer_with(TEMPLATES[form], special)
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    constraint = sampling_of(parse_row(line({**ASKED, "tools": strict}), 1), tokenizer, GREEDY).constraint
    assert constraint is not None
    begin, end = {
        "hermes": ('<tool_call>\n{"name": "count_apples", "arguments": ', "}\n</tool_call>"),
        "llama": ('{"name": "count_apples", "parameters": ', "}"),
        "mistral": ('[TOOL_CALLS][{"name": "count_apples", "arguments": ', "}]"),
        "mistral args": ("[TOOL_CALLS]count_apples[ARGS]", ""),
    }[form]
    before = "" if form == "llama" else "I look. "
    assert accepts(constraint, tokenizer, "It is warm.\nSo it is {, < and [.")
    assert accepts(constraint, tokenizer, before + begin + '{"basket": 7}' + end)
    assert not accepts(constraint, tokenizer, before + begin + '{"basket": "red"}')
    assert not accepts(constraint, tokenizer, before + begin.replace("count_apples", "eat_apples"))


def test_response_format_is_of_answers_without_calls():
    tokenizer = tokenizer_with(QWEN)
    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request = parse_row(line({**ASKED, "response_format": form}), 1)
    constraint = sampling_of(request, tokenizer, GREEDY).constraint
    assert constraint is not None
    assert accepts(constraint, tokenizer, '{"degrees": 31}')
    assert accepts(constraint, tokenizer, '<tool_call>\n{"name": "count_apples", "arguments": {"basket": 7}}\n</tool_call>')
    assert not accepts(constraint, tokenizer, "It is")
    required = parse_row(line({**ASKED, "response_format": form, "tool_choice": "required"}), 1)
    constraint = sampling_of(required, tokenizer, GREEDY).constraint
    assert constraint is not None
    assert not accepts(constraint, tokenizer, '{"degrees"')


@pytest.mark.parametrize(
    ("body", "saying"),
    [
        ({"regex": "[0-9]+"}, "only a JSON schema goes with tools"),
        (
            {"tools": function(parameters={"properties": {"a": {"not": {}}}}), "tool_choice": "required"},
            "parameters of f cannot be",
        ),
    ],
)
def test_constraint_that_cannot_be_kept_with_tools_is_an_error(body, saying):
    with pytest.raises(LookaheadError, match=saying):
        sampling_of(parse_row(line({**ASKED, **body}), 1), tokenizer_with(QWEN), GREEDY)


def test_sample_lines_are_answered_as_json_lines_and_as_parquet(cli, tmp_path):
    source = MODEL.parent / "tools.jsonl"
    for name in ("out.jsonl", "out.parquet"):
        assert cli("generate", "--model", MODEL, "--input", source, "-o", tmp_path / name, "--quiet").code == 0
    named, required, answered = rows_of(tmp_path / "out.jsonl")
    import pyarrow.parquet

    columns = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert columns[0]["response"]["body"]["choices"][0]["message"]["tool_calls"] == calls_in(named)
    assert [call["function"]["name"] for call in calls_in(named)] == ["get_weather"]
    assert len(calls_in(required)) == 1
    assert strictly("ChatCompletion", answered["response"]["body"]).choices[0].message.content
    bad = write_jsonl(tmp_path / "bad.jsonl", [line({**ASKED, "tools": function(parameters={"type": "array"})})])
    checked = cli("generate", "--model", MODEL, "--input", bad, "-o", tmp_path / "x.jsonl", "--dry-run")
    assert checked.code != 0
    assert "not a schema of an object" in checked.out + checked.err


def calls_in(row: dict[str, Any]) -> Any:
    return row["response"]["body"]["choices"][0]["message"]["tool_calls"]
