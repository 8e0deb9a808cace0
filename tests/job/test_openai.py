"""OpenAI batch lines: answered as asked and as OpenAI's own client reads them, or an error row that names the key."""

import dataclasses
import datetime
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lookahead.decode import limits
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.sampling import Sampling
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.job.params import Request
from lookahead.job.rows import parse_row
from lookahead.job.runner import JobOptions, run_rows
from lookahead.models.load import load_model
from lookahead.tokenizer import load_tokenizer
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, PROMPTS

CHAT = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "How many legs do 3 cats have?"}], "max_tokens": 8}
COMPLETION = {"model": "davinci-002", "prompt": PROMPTS[0], "max_tokens": 8}


def line(body: Any, custom_id: Any = "a", url: str | None = None, **more: Any) -> dict[str, Any]:
    chat = isinstance(body, dict) and "messages" in body
    url = url or ("/v1/chat/completions" if chat else "/v1/completions")
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}


@pytest.fixture(scope="module")
def job():
    """job(rows, **options) -> output rows; one engine for all tests."""
    target, tokenizer = load_model(str(MODEL), device="cpu"), load_tokenizer(str(MODEL))

    def run(rows, batch_size=4, **options):
        engine = DecodingEngine(target, Drafter([], DraftOptions("off")), batch_size, tokenizer=tokenizer)
        written, asked = [], JobOptions(**{"max_new_tokens": 8, **options})
        run_rows(engine, tokenizer, requests_of(rows), asked, written.append, lambda: False)
        return [ended.row for ended in written]

    return run


def requests_of(rows: list[Any]) -> list[Request]:
    parsed = [parse_row(json.loads(json.dumps(row)), number) for number, row in enumerate(rows, 1)]
    return [dataclasses.replace(each, number=n, fingerprint=repr(rows[n]).encode()) for n, each in enumerate(parsed)]


def strictly(kind: str, value: Any) -> Any:
    """The client's type of this name, made of JSON with no conversion and nothing missing."""
    from openai.types import Completion  # not in each worker of the tests: it takes a second
    from openai.types.chat import ChatCompletion
    from openai.types.shared import ErrorObject

    kinds = {each.__name__: each for each in (Completion, ChatCompletion, ErrorObject)}
    return kinds[kind].model_validate(value, strict=True)


def error_of(row: dict[str, Any]) -> dict[str, Any]:
    """The error of a rejected row, which must be as in OpenAI's error files."""
    body, request_id = row["response"]["body"], row["response"]["request_id"]
    response = {"status_code": 400, "request_id": request_id, "body": body}
    assert row == {"id": row["id"], "custom_id": row["custom_id"], "response": response, "error": None}
    assert request_id
    strictly("ErrorObject", body["error"])
    assert body["error"]["type"] == "invalid_request_error"
    return body["error"]


# ---- answers
def test_answers_are_what_openais_client_reads(job):
    rows = [
        line({**CHAT, "n": 2, "temperature": 1.0, "logprobs": True, "top_logprobs": 2}, "chat"),
        line({**COMPLETION, "logprobs": 3}, "completion"),
        line(CHAT, "plain"),
    ]
    answered = job(rows, began=datetime.datetime.fromtimestamp(1_700_000_000), token_ids=True)
    for row in answered:
        assert {*row} == {"id", "custom_id", "response", "error"}
        assert row["error"] is None
        assert {*row["response"]} == {"status_code", "request_id", "body"}
        assert row["response"]["status_code"] == 200
        assert row["id"].startswith("batch_req_")
    chat = strictly("ChatCompletion", answered[0]["response"]["body"])
    completion = strictly("Completion", answered[1]["response"]["body"])
    plain = strictly("ChatCompletion", answered[2]["response"]["body"])
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert all(len(entry.top_logprobs) == 2 for choice in chat.choices for entry in choice.logprobs.content)
    said = completion.choices[0]
    assert len(said.logprobs.tokens) == len(said.token_ids) == completion.usage.completion_tokens
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].message.refusal is None
    assert {chat.model, completion.model} == {"demo-model"}  # who answered, not who was asked
    assert {chat.created, completion.created} == {1_700_000_000}
    assert chat.id.startswith("chatcmpl-")
    assert completion.id.startswith("cmpl-")
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    ids = [row["id"] for row in answered] + [row["response"]["body"]["id"] for row in answered]
    assert len({*ids}) == 6


def test_ids_are_the_same_in_every_run_and_others_with_another_seed(job):
    rows = [line(CHAT, "a"), line(CHAT, "a2"), line({"bad": 1}, "b")]
    began = datetime.datetime.fromtimestamp(1_700_000_000)
    assert job(rows, began=began) == job(rows, began=began, batch_size=1)
    assert {row["id"] for row in job(rows)}.isdisjoint(row["id"] for row in job(rows, seed=1))


def test_stop_text_is_no_part_of_the_answer(job):
    body = {"prompt": PROMPTS[0], "max_tokens": 60, "logprobs": 1}
    whole = job([line(body)])[0]["response"]["body"]["choices"][0]["text"]
    for stop in ("<<", ["=", "<<"], whole[9:12], whole[5:6], whole[-4:]):
        (row,) = job([line({**body, "stop": stop})])
        (choice,) = row["response"]["body"]["choices"]
        first = min(place for text in ([stop] if isinstance(stop, str) else stop) if (place := whole.find(text)) >= 0)
        assert choice["text"] == whole[:first]
        assert choice["finish_reason"] == "stop"
        offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        assert all(offset < max(first, 1) for offset in offsets)
        assert len("".join(tokens)) >= first
        (own,) = job([{"prompt": PROMPTS[0], "params": {"max_new_tokens": 60, "stop": stop}}])
        assert own["text"].startswith(whole[: first + 1])  # rows of our own keep it
        (cut,) = job([{"prompt": PROMPTS[0], "params": {"max_new_tokens": 60, "stop": stop, "include_stop": False}}])
        assert cut["text"] == whole[:first]
        (kept,) = job([line({**body, "stop": stop, "include_stop": True})])
        assert kept["response"]["body"]["choices"][0]["text"] == own["text"]


def test_several_prompts_give_choices_in_their_order(job):
    tokenizer = load_tokenizer(str(MODEL))
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS[:2]]
    alone = [job([line({**COMPLETION, "prompt": prompt})])[0]["response"]["body"] for prompt in PROMPTS[:2]]
    for prompt in (PROMPTS[:2], ids):
        (row,) = job([line({**COMPLETION, "prompt": prompt})])
        body = row["response"]["body"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert [choice["text"] for choice in body["choices"]] == [each["choices"][0]["text"] for each in alone]
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    (row,) = job([line({**COMPLETION, "prompt": ids[0]})])
    assert row["response"]["body"]["choices"] == alone[0]["choices"]
    (row,) = job([line({**COMPLETION, "prompt": PROMPTS[:2], "n": 3, "echo": True, "temperature": 1.0, "max_tokens": 4})])
    choices = row["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["text"].startswith(PROMPTS[index // 3]) for index, choice in enumerate(choices)] == [True] * 6
    (row,) = job([line({**COMPLETION, "prompt": PROMPTS[0], "echo": True})])
    assert row["response"]["body"]["choices"][0]["text"] == PROMPTS[0] + alone[0]["choices"][0]["text"]
    assert len({choice["text"] for choice in choices}) == 6
    assert "no room for an answer" in error_of(job([line({**COMPLETION, "prompt": [ids[0], [5] * 3000]})])[0])["message"]


def test_content_in_parts_is_their_text(job):
    content = CHAT["messages"][0]["content"]
    parts = [{"type": "text", "text": content[:7]}, {"type": "text", "text": content[7:]}]
    rows = [line({**CHAT, "messages": [{"role": "user", "content": each}]}, n) for n, each in enumerate((content, parts))]
    one, other = (row["response"]["body"]["choices"] for row in job(rows))
    assert one == other
    (own,) = job([{"messages": [{"role": "user", "content": parts}]}])
    assert own["text"] == one[0]["message"]["content"]


# ---- what is asked


ACCEPTED: dict[str, Any] = json.loads(
    """{"stream": false, "stream_options": null, "n": null, "store": false, "seed": -5, "user": "u", "tools": [],
    "functions": [], "service_tier": "default", "metadata": {"a": "b"}, "parallel_tool_calls": true, "tool_choice": "none",
    "stop": [], "modalities": ["text"], "response_format": {"type": "text"}, "logit_bias": {"5": -100},
    "presence_penalty": 0.1, "safety_identifier": "x", "prompt_cache_key": "x", "audio": null, "prediction": null,
    "top_p": 0, "suffix": null, "reasoning_effort": "none", "verbosity": "medium", "temperature": 2,
    "frequency_penalty": -2, "max_completion_tokens": 8, "top_k": 5, "min_p": 0.1, "regex": null}"""
)


def test_keys_that_do_not_touch_the_answer_or_are_honoured_are_accepted():
    problems = {name: parse_row(line({**CHAT, name: value}), 1).problem for name, value in ACCEPTED.items()}
    assert problems == dict.fromkeys(ACCEPTED, "")


REFUSED: dict[str, Any] = json.loads(
    """{"stream": true, "stream_options": {"include_usage": true}, "store": true, "audio": {"voice": "x"},
    "suffix": "end", "tools": [{"type": "function"}], "tool_choice": "required", "functions": [{}],
    "function_call": {"name": "f"}, "modalities": ["text", "audio"], "prediction": {"type": "content", "content": "x"},
    "web_search_options": {}, "best_of": 3, "reasoning_effort": "high", "verbosity": "low", "moderation": {},
    "echo": true, "colour": 1, "user": 5, "metadata": "x", "max_tokens": 0, "max_completion_tokens": 9, "n": 0,
    "temperature": "hot", "logit_bias": {"x": 1}, "stop": ["a", 3], "response_format": {"type": "xml"}, "seed": 1.5,
    "logprobs": 3, "top_logprobs": 3, "model": 5}"""
)


def test_keys_that_cannot_be_honoured_are_refused_by_name():
    refused = {name: parse_row(line({**CHAT, name: value}), 1) for name, value in REFUSED.items()}
    assert {name: request.param for name, request in refused.items()} == {name: name for name in REFUSED}
    unnamed = [name for name, each in refused.items() if name not in each.problem.replace("max_new_tokens", name)]
    assert unnamed == []


@pytest.mark.parametrize(
    ("row", "param", "saying"),
    [
        (line(CHAT, url="/v1/completions"), "url", 'but the body has "messages"'),
        (line(COMPLETION, url="/v1/chat/completions"), "url", 'but the body has "prompt"'),
        (line(CHAT, url="/v1/embeddings"), "url", "not /v1/chat/completions or /v1/completions"),
        ({**line(CHAT), "method": "GET"}, "method", 'not "POST"'),
        (line(CHAT, params={"n": 2}), "params", 'stands next to "body"'),
        (line(CHAT, [1]), "custom_id", "is a list"),
        (line(CHAT, "x" * 2000), "custom_id", "longer than 1024"),
        (line("text"), "body", "is not an object"),
        (line({}), None, 'needs one of "prompt"'),
        (line({**CHAT, "prompt": "a"}), None, 'needs one of "prompt"'),
        (line({**COMPLETION, "prompt": []}), "prompt", "but not of texts"),
        (line({**COMPLETION, "prompt": ["a", 5]}), "prompt", "but not of texts"),
        (line({**COMPLETION, "prompt": [[1], []]}), "prompt", "but not of texts"),
        (line({**COMPLETION, "prompt": ["a", ""]}), "prompt", "is empty"),
        (line({**COMPLETION, "prompt": ["a"] * 600, "n": 2}), "prompt", "ask for 1200 answers"),
        (line({**COMPLETION, "top_logprobs": 2}), "top_logprobs", "unknown key"),
        (line({**CHAT, "messages": [{"role": "tool", "content": "x"}]}), "messages", "has the role 'tool'"),
        (line({**CHAT, "messages": [{"role": "user", "content": None}]}), "messages", "with text"),
        (line({**CHAT, "messages": [{"role": "user", "content": [{"type": "image"}]}]}), "messages", "part of type 'image'"),
        (line({**CHAT, "messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}), "messages", '"tool_calls"'),
        (line({**CHAT, "response_format": {"type": "json_object"}, "regex": "a"}), "response_format", "can have one"),
        (line({**CHAT, "max_tokens": 1, "max_completion_tokens": 2}), "max_completion_tokens", "another limit"),
        (line({**CHAT, "logprobs": False, "top_logprobs": 3}), "top_logprobs", 'goes with "logprobs": true'),
        (line({**CHAT, "logprobs": True, "top_logprobs": -1}), "top_logprobs", "is -1, not a whole number"),
        (line({**CHAT, "logprobs": True, "top_logprobs": True}), "top_logprobs", "is True, not a whole number"),
    ],
)
def test_line_that_cannot_be_answered_says_why(row, param, saying):
    request = parse_row(row, 7)
    assert saying in request.problem
    assert request.param == param
    assert request.openai


def test_messages_keep_what_templates_read_and_the_developer_speaks_as_the_system(job):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Ann", "refusal": None},
        {"role": "assistant", "content": "Hello", "tool_calls": [], "annotations": []},
        {"role": "user", "content": "Bye"},
    ]
    request = parse_row(line({"messages": messages}), 1)
    assert request.problem == ""
    assert request.messages is not None
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "user"]
    assert request.messages[1] == {"role": "user", "content": "Hi", "name": "Ann"}


def test_rejected_rows_stand_in_the_output_as_in_openais_error_files(cli, tmp_path, job):
    source = write_jsonl(tmp_path / "in.jsonl", [line({**CHAT, "max_tokens": 2}, "good"), line({**CHAT, "tools": [{}]}, "bad")])
    out = tmp_path / "out.jsonl"
    assert cli("generate", "--model", MODEL, "--input", source, "-o", out, "--quiet").code == 3
    good, bad = map(json.loads, out.read_text("utf-8").splitlines())
    error = error_of(bad)
    assert (bad["custom_id"], error["code"], error["param"], error["line"]) == ("bad", "invalid_row", "tools", 2)
    assert error["message"].startswith('line 2: "tools" is')
    body = strictly("ChatCompletion", good["response"]["body"])
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text("utf-8"))
    assert body.created == int(manifest["runs"][0]["began"])
    # Resumed later, the rows are the same to the byte, the time included.
    whole = out.read_bytes()
    out.write_bytes(whole.splitlines(keepends=True)[1])
    manifest["runs"][0]["began"] -= 1000
    (tmp_path / "out.jsonl.manifest.json").write_text(json.dumps(manifest))
    assert cli("generate", "--model", MODEL, "--input", source, "-o", out, "--quiet", "--resume").code == 3
    written = whole.replace(f'"created": {body.created}'.encode(), f'"created": {body.created - 1000}'.encode())
    assert out.read_bytes() == written


# ---- whatever a body holds


OWN = {"prompt", "messages", "prompt_ids", "min_new_tokens", "json_schema", "choice", "grammar"}
KEYS = sorted({*ACCEPTED, *REFUSED, *OWN})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**30), 1 << 63, float("nan"), float("inf"), 1e308, 0, 1]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["text", "json_object", "user", "\0", "\ud800", "none"]),
)
NAMES = st.sampled_from(["role", "content", "type", "text", "schema", "5"]) | st.text(max_size=4)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner), max_leaves=12)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": VALUES})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool", "system"]) | SCALARS, "content": st.text() | st.lists(PARTS) | VALUES},
        optional={"name": VALUES, "tool_calls": VALUES},
    ),
    max_size=3,
)
NEARLY_VALID = st.dictionaries(st.sampled_from(KEYS), st.one_of(SCALARS, st.floats(0, 1), st.integers(0, 9)), max_size=1)
BODIES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5).flatmap(
    lambda body: st.one_of(
        st.just(body),
        MESSAGES.map(lambda messages: {"messages": messages, **body}),
        st.one_of(VALUES, st.lists(st.text(), max_size=3)).map(lambda prompt: {"prompt": prompt, **body}),
    )
)
ROWS = st.one_of(
    NEARLY_VALID.map(lambda body: {"body": {**body, "prompt": "a"}}),
    NEARLY_VALID.map(lambda params: {"prompt": "a", "params": params}),
    st.fixed_dictionaries(
        {"body": st.one_of(BODIES, VALUES)}, optional={"custom_id": VALUES, "url": VALUES, "method": VALUES, "x": VALUES}
    ),
    st.fixed_dictionaries(
        {}, optional={"id": VALUES, "prompt": VALUES, "messages": VALUES, "prompt_ids": VALUES, "params": BODIES}
    ),
)


@given(ROWS)
@example({"body": {"prompt": "a", "temperature": 10**400}})
@example({"prompt": "a", "params": {"top_p": 10**400}})
@example({"prompt": "a", "params": {"logit_bias": {"9" * 5000: 1}}})
@example({"body": {"a\nkey": 1}})
@example({"body": {"prompt": "a", "k" * 100_000: 1}})
def test_every_row_is_a_request_or_has_a_problem(row):
    request = parse_row(row, 3)
    forms = [request.prompt, request.messages, request.prompt_ids, request.prompts]
    assert sum(form is not None for form in forms) == (0 if request.problem else 1)
    assert "\n" not in request.problem
    assert len(request.problem) < 2000
    if not request.problem:
        Sampling(**request.sampling)  # what was accepted can be asked for
        assert (request.n or 1) <= limits.SAMPLES
