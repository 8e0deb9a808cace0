"""Tool calls in chats of OpenAI lines. In: tools, tool_choice, messages with calls. Out: what a chat template gets, constraints
of answers, and the calls that they hold.

An answer is read with the tokenizer's response template. Where it has none, the text of its chat template tells in which of the
FORMS calls are written.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from lookahead.arguments import is_text
from lookahead.decode.constraint import SEPARATORS, Constraint
from lookahead.decode.limits import TOOLS, shown
from lookahead.decode.text import length_before
from lookahead.errors import ConstraintError, LookaheadError, first_line
from lookahead.job.params import RowError, Tools, check_text

if TYPE_CHECKING:
    from lookahead.decode.engine import Generation
    from lookahead.decode.sampling import Sampling

KEYS = ("tools", "tool_choice", "parallel_tool_calls")  # of a chat's body
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # as OpenAI has it
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = '{"type": "function", "function": {"name", "description", "parameters"}}'


def tools_of(body: dict[str, Any]) -> Tools | None:
    """The tools of a chat's body; None if there are none, or none may be called. Raises RowError."""
    given, choice, several = (body.get(name, unset) for name, unset in zip(KEYS, ([], "auto", True), strict=True))
    if type(several) is not bool:
        raise RowError(f'"parallel_tool_calls" is {shown(several)}, not true or false', "parallel_tool_calls")
    if not isinstance(given, list) or not all(isinstance(tool, dict) and tool.get("type") == "function" for tool in given):
        raise RowError(f'"tools" is {shown(given)}, not a list of {TOOL}', "tools")
    if len(given) > TOOLS:
        raise RowError(f'"tools" has {len(given)} entries: at most {TOOLS} are allowed', "tools")
    functions = [_function(tool.get("function"), number) for number, tool in enumerate(given, 1)]
    strict = any(function.get("strict") for function in functions)
    schemas = {function["name"]: {"type": "object", **function["parameters"]} for function in functions}
    if len(schemas) < len(functions):
        raise RowError('"tools" has two functions of one name', "tools")
    if isinstance(choice, dict):
        name = choice["function"].get("name") if isinstance(choice.get("function"), dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise RowError(f'"tool_choice" is {shown(choice)}, which is not supported: name one function', "tool_choice")
        if name not in schemas:
            raise RowError(f'"tool_choice" names {shown(name)}, which is not in "tools"', "tool_choice")
        schemas, several = {name: schemas[name]}, False
    elif choice not in ("none", "auto", "required"):
        raise RowError(f'"tool_choice" is {shown(choice)}, not none, auto, required or a function', "tool_choice")
    if choice == "required" and not given:
        raise RowError('"tool_choice" is "required", and there are no "tools"', "tool_choice")
    if not given or choice == "none":
        return None
    listed = [{"type": "function", "function": {k: v for k, v in each.items() if k != "strict"}} for each in functions]
    return Tools(listed, schemas, choice != "auto", several, strict)


def _function(value: Any, number: int) -> dict[str, Any]:
    """A function without keys that are null, and with parameters. Raises RowError."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not NAME.fullmatch(value["name"]):
        raise RowError(f'"tools": number {number} is not {TOOL} with a name of 1 to 64 letters, digits, _ and -', "tools")
    function = {name: part for name, part in value.items() if part is not None}
    for name, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if not isinstance(function.get(name, kind()), kind):
            raise RowError(f'"tools": "{name}" of {value["name"]} is {shown(value[name])}, not a {kind.__name__}', "tools")
    parameters = function.get("parameters") or NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise RowError(f'"tools": "parameters" of {value["name"]} is not a schema of an object', "tools")
    check_text("tools", json.dumps(function, ensure_ascii=False))
    return {**function, "parameters": parameters}


def calls_of(value: Any, number: int) -> list[dict[str, Any]]:
    """Calls of an earlier answer, their arguments as objects, as chat templates read them. Raises RowError."""
    found = []
    for call in value if isinstance(value, list) else [None]:
        function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
        if call is None or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f'message {number}: "tool_calls" is {shown(value)}, not a list of calls of functions', "messages")
        arguments = _read_json(function.get("arguments") or "{}")
        if not isinstance(arguments, dict):
            what = f"arguments of {shown(function['name'])} that are not the JSON text of an object"
            raise RowError(f'message {number}: "tool_calls" has {what}', "messages")
        found.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
        found[-1] |= {"id": call["id"]} if call.get("id") is not None else {}
        check_text("messages", json.dumps(found[-1], ensure_ascii=False))
    return found


def _read_json(text: Any) -> Any:
    """None for what is not the text of JSON."""
    try:
        return json.loads(text, parse_constant=int)  # raises for NaN and Infinity
    except (TypeError, ValueError, RecursionError):
        return None


# ---- what the model is to write, and has written


@dataclasses.dataclass(frozen=True)
class Form:
    """How calls are written: mark, call, between, call, ..., end. A call: begin with the name for NAME, arguments, close.

    between: None if an answer is one call. found: finds calls in an answer: JSON of one or several, or "name" and arguments.
    """

    mark: str
    begin: str
    close: str
    between: str | None
    end: str
    found: re.Pattern[str]


HERMES = Form(
    *("<tool_call>", '\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n<tool_call>", ""),
    re.compile(r"<tool_call>\s*(?P<json>.*?)\s*(?:</tool_call>|\Z)", re.DOTALL),
)
LLAMA = Form(
    *("", '{"name": "NAME", "parameters": ', "}", None, ""),
    re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(?P<json>\{.*\})\s*\Z", re.DOTALL),
)
MISTRAL = Form(
    *("[TOOL_CALLS][", '{"name": "NAME", "arguments": ', "}", ", ", "]"),
    re.compile(r"\[TOOL_CALLS\]\s*(?P<json>\[.*\])\s*\Z", re.DOTALL),
)
MISTRAL_ARGS = Form(
    *("[TOOL_CALLS]", "NAME[ARGS]", "", "[TOOL_CALLS]", ""),
    re.compile(
        r"\[TOOL_CALLS\]\s*(?P<name>[\w-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*(?P<json>\{.*?\})\s*(?=\[TOOL_CALLS\]|\Z)", re.DOTALL
    ),
)
FORMS = (  # the first all of whose texts stand in the chat template, and none of the OTHERS
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<tool_call>",), HERMES),
    (('{"name": function name, "parameters"',), LLAMA),
)
OTHERS = ("<function=", "<arg_key>", "<|tool_call>")
REASONING = ("reasoning_content", "thinking")  # names in response templates
TOKENS = re.compile(r"(</?tool_call>|\[TOOL_CALLS\]|\[ARGS\])")  # that may be tokens of their own
UNKNOWN = "the chat template has calls written in a form that is not known (those of Hermes, Qwen, Llama 3 and Mistral are)"


def form_of(tokenizer: Any, tools: Tools) -> Form | None:
    template = tokenizer.get_chat_template(tools=tools.listed)
    if any(text in template for text in OTHERS):
        return None
    return next((form for texts, form in FORMS if all(text in template for text in texts)), None)


def check_template(tokenizer: Any, tools: Tools | None, messages: list[dict[str, Any]], shows_tools: bool) -> None:
    """Raises LookaheadError for a chat template that leaves out tools or earlier calls, or has calls that cannot be read."""
    template = tokenizer.get_chat_template(tools=tools and tools.listed)
    if "tool_calls" not in template and any("tool_calls" in message for message in messages):
        raise LookaheadError('the chat template does not show the "tool_calls" of messages: take a model that has tools.')
    if tools and not shows_tools:
        raise LookaheadError('the chat template does not show "tools": take a model that has them, or leave them out.')
    if tools and form_of(tokenizer, tools) is None and not has_template(tokenizer):
        raise LookaheadError(f"{UNKNOWN}, and the tokenizer has no response template to read them with.")
    if tools and has_template(tokenizer):
        try:
            tokenizer.get_response_parser(prefix="")
        except Exception as error:  # of what it is made of
            raise LookaheadError(f"the tokenizer's response template cannot be used ({first_line(error)}).") from error


def has_template(tokenizer: Any) -> bool:
    """It has a response template."""
    return bool(getattr(tokenizer, "response_template", None))


def constrained(sampling: Sampling, tools: Tools, tokenizer: Any) -> Sampling:
    """The sampling of an answer that may hold calls. Raises LookaheadError if they cannot be constrained as asked.

    Its own constraint, a JSON schema, is that of an answer without calls.
    """
    own = sampling.constraint
    if own is None and not tools.required and not tools.strict:
        return sampling
    if own is not None and own.kind != "json_schema":
        raise LookaheadError(f'"tools" and {own.kind}: of constraints, only a JSON schema goes with tools.')
    form = form_of(tokenizer, tools)
    if form is None:
        raise LookaheadError(f'{UNKNOWN}, so that "tool_choice", "strict" and "response_format" cannot constrain them.')
    for name, schema in tools.schemas.items():
        if problem := _problem_of(json.dumps(schema)):
            raise LookaheadError(f'"tools": the parameters of {name} cannot be a constraint ({problem}).')
    grammar = _grammar(form, tools, None if tools.required else own, tokenizer)
    return dataclasses.replace(sampling, constraint=Constraint("grammar", grammar))


@functools.lru_cache(maxsize=1024)
def _problem_of(schema: str) -> str:
    try:
        Constraint("json_schema", schema).check()
    except ConstraintError as error:
        return str(error).rstrip(".")
    return ""


def _grammar(form: Form, tools: Tools, own: Constraint | None, tokenizer: Any) -> str:
    """The grammar of an answer in Lark's form, as llguidance reads it: `<[5]>` is the token 5."""

    def lark(text: str) -> str:
        return " ".join(_token(part, tokenizer) or json.dumps(part) for part in TOKENS.split(text) if part)

    calls = [
        f"{lark(form.begin.replace('NAME', name))} {_json(schema)} {lark(form.close)}" for name, schema in tools.schemas.items()
    ]
    lines = [f"call: {' | '.join(calls)}"]
    more = f"({lark(form.between)} call)*" if form.between and tools.several else ""
    lines.append(f"calls: call {more} {lark(form.end)}")
    if tools.required or own:
        lines.append(f"start: {lark(form.mark)} calls" + (f" | {_json(json.loads(own.text))}" if own else ""))
    elif form.mark:  # a lazy terminal ends as soon as it can, so that a mark never stands in the text alone
        begins = f"TEXT {lark(form.mark)} | " if _token(TOKENS.split(form.mark)[1], tokenizer) else ""
        lines += [f"start: TEXT | begin calls\nbegin: {begins}spelled\nspelled[lazy]: TEXT {json.dumps(form.mark)}"]
        lines.append(r"TEXT: /(.|\n)*/")
    else:
        lines.append("start: TEXT | calls\nTEXT: /([^{](.|\\n)*)?/")
    return "\n".join(lines)


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": SEPARATORS, **schema})


def _token(text: str, tokenizer: Any) -> str:
    """A text that is a token, as grammars name it; "" if it is none."""
    token = tokenizer.convert_tokens_to_ids(text) if TOKENS.fullmatch(text) else None
    return "" if token is None or tokenizer.convert_ids_to_tokens(token) != text else f"<[{token}]>"


def message_of(tools: Tools, generation: Generation, tokenizer: Any, name: str) -> dict[str, Any] | None:
    """The message of an answer that holds calls; None if it holds none, or one that cannot be read. name: of the answer."""
    text = str(tokenizer.decode(generation.text_ids, skip_special_tokens=False))
    if not generation.sampling.include_stop:
        text = text[: length_before(text, generation.stop)]
    form = form_of(tokenizer, tools)
    if has_template(tokenizer):
        found = _parsed(text, tools, generation, tokenizer)
    else:
        found = None if form is None else _found(text, form, tokenizer)
    calls = []
    for number, (function, arguments) in enumerate(found["tool_calls"] if found else ()):
        called = _called(function, arguments)
        if called is None:
            return None
        digits = hashlib.blake2b(f"{name}\n{number}".encode(), digest_size=12).hexdigest()
        call_id = digits[:9] if form in (MISTRAL, MISTRAL_ARGS) else f"call_{digits}"  # Mistral's templates insist on 9
        calls.append({"id": call_id, "type": "function", "function": called})
    return {**(found or {}), "tool_calls": calls if tools.several else calls[:1]} if calls else None


def _called(name: Any, arguments: Any) -> dict[str, str] | None:
    try:
        called = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    except (TypeError, RecursionError):
        return None
    is_call = isinstance(name, str) and isinstance(arguments, dict)
    return called if is_call and is_text(name + called["arguments"]) else None


def _found(text: str, form: Form, tokenizer: Any) -> dict[str, Any]:
    calls: list[tuple[Any, Any]] = []
    for match in form.found.finditer(text):
        value, named = _read_json(match["json"]), match.groupdict().get("name")
        for call in value if isinstance(value, list) else [{"name": named, "arguments": value} if named else value]:
            call = call if isinstance(call, dict) else {}
            calls.append((call.get("name"), call.get("arguments", call.get("parameters"))))
    left = form.found.sub("", text)
    for token in tokenizer.added_tokens_decoder.values():
        left = left.replace(token.content, "") if token.special else left
    return {"content": left.strip() or None, "tool_calls": calls}


def _parsed(text: str, tools: Tools, generation: Generation, tokenizer: Any) -> dict[str, Any] | None:
    """As the tokenizer's response template has it."""
    try:
        parsed = tokenizer.parse_response(text, prefix=tokenizer.decode(generation.prompt_ids), tools=tools.listed)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in parsed.get("tool_calls") or ()]
    except Exception:  # a template raises what it likes about an answer
        return None
    thought = next(({REASONING[0]: parsed[name]} for name in REASONING if parsed.get(name)), {})
    return {"content": parsed.get("content") or None, **thought, "tool_calls": calls}
