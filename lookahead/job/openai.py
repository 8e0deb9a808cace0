"""Lines of the OpenAI batch API, and log-probabilities in rows. In: a line of a batch input file. Out: a Request, later a line.

A key that cannot be honoured makes the row an error row that names it; keys that do not touch the answer, and options of this
package (top_k, regex, ...), are accepted. What a line leaves open is as the job's options set it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lookahead.decode import limits
from lookahead.decode.limits import shown
from lookahead.decode.text import REPLACEMENT, TokenTexts
from lookahead.job import params, tools
from lookahead.job.params import Request, RowError, chat_messages, check_text, is_ids

if TYPE_CHECKING:
    from lookahead.decode.engine import Generation
    from lookahead.decode.logprobs import TokenLogprobs

LINE_KEYS = ("custom_id", "method", "url", "body")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
FORMS = ("prompt", "messages", "prompt_ids")
ROLES = {"developer": "system", **{role: role for role in ("system", "user", "assistant", "tool")}}
MESSAGE_KEYS = {"assistant": ("role", "content", "name", "tool_calls"), "tool": ("role", "content", "name", "tool_call_id")}


# Keys that do not touch the answer, as long as their value is of this type or one of these; null always is.
HARMLESS: dict[str, type | tuple[Any, ...]] = {
    **dict.fromkeys(("model", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"), str),
    **dict.fromkeys(("prompt_cache_options", "metadata"), dict),
    **dict.fromkeys(("store", "stream"), (False,)),
    "stream_options": ({},),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "moderation"), ()),
}


def is_openai(row: dict[str, Any]) -> bool:
    return isinstance(row.get("body"), dict) or (row.get("custom_id") is not None and row.get("url") is not None)


def fields_of(row: dict[str, Any]) -> dict[str, Any]:
    """Prompt and params of a line, as fields of a Request. Raises RowError."""
    for name, value in row.items():
        if value is not None and name not in LINE_KEYS:
            raise RowError(f'"{name}" stands next to "body": an OpenAI line holds {", ".join(LINE_KEYS)}', name)
    if row.get("method") not in (None, "POST"):
        raise RowError(f'"method" is {shown(row["method"])}, not "POST"', "method")
    body = row.get("body")
    if not isinstance(body, dict):
        raise RowError('"body" is not an object', "body")
    body = {name: value for name, value in body.items() if value is not None}
    forms = [form for form in FORMS if form in body]
    if len(forms) != 1:
        raise RowError(f'needs one of "prompt", "messages" and "prompt_ids" (found: {params.names_in(body)})')
    chat = forms == ["messages"]
    url = row.get("url")
    if url not in (None, CHAT, COMPLETION):
        raise RowError(f'"url" is {shown(url)}, not {CHAT} or {COMPLETION}', "url")
    if url is not None and (url == CHAT) != chat:
        raise RowError(f'"url" is {url}, but the body has "{forms[0]}"', "url")
    fields = _read_body(body, chat)
    prompt = _messages(body["messages"]) if chat else _prompt(forms[0], body[forms[0]])
    answers = len(prompt.get("prompts", "1")) * (fields.get("n") or 1)
    if answers > limits.SAMPLES:
        raise RowError(f"prompts and n ask for {answers} answers: at most {limits.SAMPLES} are given", "prompt")
    return {**fields, **prompt}


def _read_body(body: dict[str, Any], chat: bool) -> dict[str, Any]:
    """What is asked in addition to the prompt. Raises RowError for a key that is unknown or cannot be honoured."""
    asked: dict[str, Any] = {}
    more: dict[str, Any] = {}
    if any(name in body for name in tools.KEYS) and (found := tools.tools_of(body)):
        if not chat:
            raise RowError('"tools" go with "messages" only', "tools")
        more["tools"] = found
    for name, value in body.items():
        if name in FORMS or name in tools.KEYS:
            continue
        if name in HARMLESS:
            known = HARMLESS[name]
            if not isinstance(value, known) if isinstance(known, type) else not any(_same(value, each) for each in known):
                raise RowError(f'"{name}" is {shown(value)}, which is not supported', name)
        elif name == "echo":
            if type(value) is not bool or (value and chat):
                raise RowError(f'"echo" is {shown(value)}, which goes with a prompt only', name)
            more |= {"echo": True} if value else {}
            if value and body.get("logprobs") is None:
                more["logprobs"] = False
            elif value:
                asked.setdefault("prompt_logprobs", body["logprobs"])
        elif name == "best_of":
            if type(value) is not int or value != body.get("n", 1):
                raise RowError(
                    f'"best_of" is {shown(value)}, which is not supported: leave it out, or give as many as "n"', name
                )
            asked["n"] = value
        elif name == "response_format":
            asked |= _constraint(value)
        elif name == "top_p" and value == 0 and type(value) in (int, float):
            asked[name] = sys.float_info.min  # the best token alone
        elif name in ("logprobs", "top_logprobs") and chat:
            more["logprobs"] = _chat_logprobs(body)
        elif name in params.NAMES:
            asked[name] = value
        else:
            raise RowError(f'unknown key "{name}" in the body', name)
    constraints = [name for name in asked if name in params.KINDS]
    if "response_format" in body and len(constraints) > ("json_schema" not in body):
        raise RowError('"response_format" and another constraint: an answer can have one', "response_format")
    return {**params.read_params(asked), **more}


def _same(value: Any, known: Any) -> bool:
    return type(value) is type(known) and value == known


def _constraint(wish: Any) -> dict[str, Any]:
    """The constraint in a response_format, as an option of ours. Raises RowError."""
    kind = wish.get("type") if isinstance(wish, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    schema = wish.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        problem = '"response_format" is not {"type": "text" or "json_object"} or {"type": "json_schema", "json_schema"}'
        raise RowError(problem, "response_format")
    return {"json_schema": schema["schema"]}


def _chat_logprobs(body: dict[str, Any]) -> Any:
    """Return how many of the most probable: {"logprobs": true, "top_logprobs": K}. False: none at all. Raises RowError."""
    asked, most = body.get("logprobs"), body.get("top_logprobs")
    if asked is not None and type(asked) is not bool:
        raise RowError(f'"logprobs" is {shown(asked)}, not true or false', "logprobs")
    if most is not None and (type(most) is not int or most < 0):
        raise RowError(f'"top_logprobs" is {shown(most)}, not a whole number', "top_logprobs")
    if most is not None and not asked:
        raise RowError('"top_logprobs" goes with "logprobs": true', "top_logprobs")
    return params.asked_logprobs("top_logprobs", most or 0) if asked else False


def _messages(value: Any) -> dict[str, Any]:
    """Messages of the roles that chat templates know. Raises RowError for what is not text or calls of functions."""
    if isinstance(value, list):  # an assistant's message of calls has no content
        value = [{**each, "content": each.get("content") or ""} if _calls(each) else each for each in value]
    messages = []
    for number, message in enumerate(chat_messages(value), 1):
        role = message["role"]
        if role not in ROLES:
            raise RowError(f"message {number} has the role {shown(role)}: known are {', '.join(ROLES)}", "messages")
        for name, part in message.items():
            if name not in MESSAGE_KEYS.get(role, ("role", "content", "name")) and part not in (None, [], {}, ""):
                raise RowError(f'message {number} has "{name}", which is not supported', "messages")
        check_text("messages", message["content"])
        kept = {"role": ROLES[role], "content": message["content"]}
        for name in ("name", "tool_call_id"):
            if message.get(name) is not None:
                check_text("messages", message[name])
                kept[name] = message[name]
        if role == "tool" and "tool_call_id" not in kept:
            raise RowError(f"message {number} has the role 'tool' and no \"tool_call_id\"", "messages")
        if _calls(message):
            kept["tool_calls"] = tools.calls_of(message["tool_calls"], number)
        messages.append(kept)
    return {"messages": messages}


def _calls(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant" and bool(message.get("tool_calls"))


def _prompt(form: str, value: Any) -> dict[str, Any]:
    """A prompt, or several: text or ids, or a list of either. Raises RowError."""
    if is_ids(value):
        return {"prompt_ids": value}
    if form == "prompt_ids":
        raise RowError('"prompt_ids" is not a list of token ids', form)
    if not isinstance(value, list):
        check_text("prompt", value)
        return {"prompt": value}
    if not value or not (all(isinstance(each, str) for each in value) or all(map(is_ids, value))):
        raise RowError('"prompt" is a list, but not of texts, of token ids, or of lists of token ids', form)
    for text in value:
        if isinstance(text, str):
            check_text("prompt", text)
    return {"prompts": value}


# ---- answers


@dataclasses.dataclass(frozen=True)
class Writer:
    """Output lines of a job. created: seconds since 1970. seed: of the job, of which ids are made: the same in every run."""

    tokenizer: Any
    logprobs: LogprobsOf
    model: str
    created: int
    seed: int
    token_ids: bool = False

    def answer(
        self, request: Request, samples: Sequence[Generation], texts: Sequence[str], prompts: Sequence[str]
    ) -> dict[str, Any]:
        """samples, texts: index = prompt * n + sample. prompts: their texts, which stand first if the request asks for it."""
        chat, n = request.messages is not None, len(samples) // len(prompts)
        choices = []
        for index, (generation, text) in enumerate(zip(samples, texts, strict=True)):
            first, whole = samples[index // n * n], prompts[index // n] + text  # `first` has log-probabilities of the prompt
            message: dict[str, Any] = {"role": "assistant", "content": whole, "refusal": None}
            reason: str = generation.finish_reason
            if request.tools:
                name = f"{named(request, self.seed)}\n{index}"
                if found := tools.message_of(request.tools, generation, self.tokenizer, name):
                    ended = reason == "stop" or generation.complete
                    message, reason = {**message, **found}, "tool_calls" if ended else reason
            choice: dict[str, Any] = {"index": index, **({"message": message} if chat else {"text": whole})}
            if self.token_ids:
                choice["token_ids"] = generation.token_ids
            choice["logprobs"] = None
            if generation.logprobs is not None:
                echoed = first if request.echo and first.prompt_logprobs is not None else None
                of_completion = functools.partial(self.logprobs.of_completion, prompt=echoed)
                choice["logprobs"] = (self.logprobs.of_chat if chat else of_completion)(generation)
            if first.prompt_logprobs is not None and not (request.echo and choice["logprobs"]):
                choice["prompt_logprobs"] = self.logprobs.of_prompt(first)
            if generation.complete is not None:
                choice["complete"] = generation.complete
            choices.append({**choice, "finish_reason": reason})
        before = sum(generation.prompt_tokens for generation in samples[::n])
        after = sum(len(generation.token_ids) for generation in samples)
        body = {
            "id": ("chatcmpl-" if chat else "cmpl-") + named(request, self.seed),
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after},
        }
        return _line(request, self.seed, 200, body)


def error_line(request: Request, message: str, kind: str, at_fault: bool, seed: int = 0) -> dict[str, Any]:
    """The line of a row without an answer, as OpenAI's error files have it: status 400 if the row is at fault, else 500."""
    fault = "invalid_request_error" if at_fault else "server_error"
    problem = {"message": message, "type": fault, "param": request.param, "code": kind, "line": request.line}
    named_file = {"file": request.file} if request.file else {}
    return _line(request, seed, 400 if at_fault else 500, {"error": {**problem, **named_file}})


def _line(request: Request, seed: int, status: int, body: dict[str, Any]) -> dict[str, Any]:
    name = named(request, seed)
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": f"batch_req_{name}", "custom_id": request.id, "response": response, "error": None}


def named(request: Request, seed: int) -> str:
    """24 hexadecimal digits: the same for this row in every run of the job, others for every other row."""
    content = f"{seed}\n{request.number}\n".encode() + request.fingerprint
    return hashlib.blake2b(content, digest_size=12).hexdigest()


LEAST = -9999.0  # JSON has no minus infinity; OpenAI writes this
DIGITS = 6


class LogprobsOf:
    """tokenizer: for the text of each token. None: there are ids only."""

    def __init__(self, tokenizer: Any | None):
        self._text = None if tokenizer is None else _texts(tokenizer)
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def in_row(self, generation: Generation) -> list[dict[str, Any]]:
        """[{"id", "token", "logprob", "top": [{"id", "token", "logprob"}]}], one for each token; best first."""
        return [*map(self._entry, generation.token_logprobs)]

    def of_prompt(self, generation: Generation) -> list[dict[str, Any] | None]:
        return [None, *map(self._entry, generation.prompt_token_logprobs)]

    def _entry(self, found: TokenLogprobs) -> dict[str, Any]:
        return {**self._scored(found.token_id, found.logprob), "top": [self._scored(*pair) for pair in found.top]}

    def of_chat(self, generation: Generation) -> dict[str, Any]:
        """{"content": [{"token", "logprob", "bytes", "top_logprobs": [...]}], "refusal"}."""
        content = [
            {**self._spelled(found.token_id, found.logprob), "top_logprobs": [self._spelled(*pair) for pair in found.top]}
            for found in generation.token_logprobs
        ]
        return {"content": content, "refusal": None}

    def of_completion(self, generation: Generation, prompt: Generation | None = None) -> dict[str, Any]:
        """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}: a list in each. prompt: its tokens come first."""
        scored: list[TokenLogprobs | None] = [*generation.token_logprobs]
        token_ids = generation.token_ids[: len(scored)]
        if prompt:
            scored, token_ids = [None, *prompt.prompt_token_logprobs, *scored], [*prompt.prompt_ids, *token_ids]
        names = [*map(self._named, token_ids)]
        sizes = [0 if token in self._special else len(name) for token, name in zip(token_ids, names, strict=True)]
        return {
            "tokens": names,
            "token_logprobs": [found and _number(found.logprob) for found in scored],
            "top_logprobs": [found and self._by_name(found) for found in scored],
            "text_offset": [*itertools.accumulate(sizes[:-1], initial=0)] if names else [],
        }

    def _by_name(self, found: TokenLogprobs) -> dict[str, float]:
        """The best and the emitted one; of tokens that look alike the better."""
        best: dict[str, float] = {}
        for token, logprob in (*found.top, (found.token_id, found.logprob)):
            best.setdefault(self._named(token), _number(logprob))
        return best

    def _named(self, token: int) -> str:
        return f"token_id:{token}" if self._text is None else self._text(token)

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        named = {} if self._text is None else {"token": self._text(token)}
        return {"id": token, **named, "logprob": _number(logprob)}

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        """bytes: None where the token is a part of a character."""
        text = self._named(token)
        return {"token": text, "logprob": _number(logprob), "bytes": None if REPLACEMENT in text else [*text.encode()]}


def _number(logprob: float) -> float:
    return round(max(logprob, LEAST), DIGITS)


_texts = functools.lru_cache(maxsize=1)(TokenTexts)
