"""Logged answers to (prompt, response) pairs. In: files of logged rows or of a job's output. Out: token ids for a replay.

Rows hold both sides, or are output rows of a job (answers.py), whose prompts are found by their ids in the job's own prompt
files unless the rows keep them. Text is tokenized once all rows are read, so that a log of ids needs no tokenizer.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from lookahead.corpus.answers import Answer, answered, fields_read, is_ids, messages_of, prompt_of
from lookahead.errors import CorpusError, LookaheadError
from lookahead.files.outputs import kind_of
from lookahead.job.fields import RowFields, template_of
from lookahead.job.inputs import input_rows
from lookahead.job.lock import JobFiles
from lookahead.job.manifest import began
from lookahead.job.rows import Request, local_time, prompts_of, read_requests
from lookahead.models.options import ModelOptions

Pair = tuple[list[int], list[int]]

RESPONSES = ("response", "output", "completion", "answer")  # fields of a logged answer


@dataclasses.dataclass(frozen=True)
class Logged:
    """One logged answer. prompt: ids, chat messages or text; None: to be found by `row_id`. job: a job wrote the row."""

    line: int
    answer: Answer
    prompt: Any
    row_id: Any = None
    prompt_tokens: int | None = None
    job: bool = False


@dataclasses.dataclass
class Log:
    """Logged answers of a file. failed: rows without one. unmatched: no prompt has their id. retokenized: text only."""

    path: str
    answers: list[Logged]
    failed: int = 0
    unmatched: int = 0
    first_unmatched: Any = None
    retokenized: int = 0
    other_prompts: int = 0

    def notes(self) -> list[str]:
        """Return what a reader of the results should know, a line each."""
        job = "than in the job. Give its --chat, --system and --tokenizer, or write prompts with the answers: generate --echo."
        again = "which can differ from the tokens of the model. generate --token-ids keeps those."
        missing = f"no prompt has their id (the first: {json.dumps(self.first_unmatched)})."
        notes = (
            (self.failed, "rows hold no answer (failed or empty) and are left out."),
            (self.unmatched, f"answers are left out: {missing}"),
            (self.retokenized, f"answers are text and were tokenized again, {again}"),
            (self.other_prompts, f"prompts have another number of tokens {job}"),
        )
        return [f"{self.path}: {count:,} {note}" for count, note in notes if count]


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """What token ids of a job's prompts depend on. inputs: its files of prompts. began: its chat template may write that."""

    tokenizer: str | None = None
    chat: bool = False
    system: str | None = None
    fields: RowFields | None = None
    inputs: Sequence[str] = ()
    began: datetime.datetime = dataclasses.field(default_factory=local_time)


UNKNOWN = JobSettings()


def read_log(path: str, rows: int | None = None) -> Log:
    """The logged answers of a file, of its first `rows` rows with one. Raises CorpusError naming the first row that is none."""
    if path != "-" and (Path(path).is_dir() or not Path(path).exists()):
        raise CorpusError(f"{path}: no such file.")
    log, used, line = Log(path, []), 0, 0
    for found_row in input_rows(path, (*fields_read(None), *RESPONSES)):
        line, row = found_row.line, found_row.row
        if used == rows:
            break
        if isinstance(row, str):
            raise CorpusError(f"{path}:{line}: {row}.")
        found = _answers_of(row, path, line)
        log.answers += found
        log.failed += not found
        used += bool(found)
    if not line:
        raise CorpusError(f"{path}: empty file.")
    if not log.answers:
        raise CorpusError(f"{path}: none of its {log.failed:,} rows holds an answer: all failed or are empty.")
    return log


def _answers_of(row: dict[str, Any], path: str, line: int) -> list[Logged]:
    """The answers of a row; none if it failed. Raises CorpusError if it is neither a pair nor a job's output."""
    ids = row.get("response_ids")
    if all(is_ids(each) and each for each in (row.get("prompt_ids"), ids)):
        return [Logged(line, Answer(None, ids, True), row["prompt_ids"])]
    found = answered(row)
    if found is not None and (found.answers or found.failed):
        return [Logged(line, answer, found.prompt, found.row_id, found.prompt_tokens, job=True) for answer in found.answers]
    response = next((row[name] for name in RESPONSES if isinstance(row.get(name), str) and row[name]), None)
    if response and (prompt := prompt_of(row)):
        return [Logged(line, Answer(response, None, True), prompt)]
    messages = messages_of(row.get("messages")) or []
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        *before, last = messages
        return [Logged(line, Answer(last["content"], None, True), before)] if last["content"] else []
    if found is not None:
        return []
    raise CorpusError(
        f'{path}:{line}: needs "prompt_ids" and "response_ids", "prompt" and "response", or to be a row of a job\'s output '
        f"(found: {', '.join(sorted(map(str, row))) or 'nothing'})."
    )


def find_prompts(log: Log, names: Sequence[str], fields: RowFields | None = None) -> dict[str, Request]:
    """The requests that answers without prompts have the ids of. names: files of the job. Raises CorpusError if none fits."""
    wanted = {_key_of(log, logged.row_id) for logged in log.answers if logged.prompt is None}
    found: dict[str, Request] = {}
    for request in read_requests(*names, fields=fields):
        key = _key_of(log, request.id)
        if key in wanted and key not in found and not request.problem:
            found[key] = request
            if len(found) == len(wanted):
                break
    if not found:
        first = json.dumps(next(logged.row_id for logged in log.answers if logged.prompt is None))
        raise CorpusError(f"{log.path}: no prompt in {', '.join(names)} has the id of an answer (the first: {first}).")
    return found


def _key_of(log: Log, row_id: Any) -> str:
    """Make the key of an id for a look-up. In Parquet all ids of a column are text where one is."""
    return str(row_id) if kind_of(log.path) == ".parquet" else json.dumps(row_id)


def pairs_of(
    log: Log,
    tokenizer: Callable[[], Any | None],
    prompts: Sequence[str] = (),
    job: JobSettings = UNKNOWN,
    vocab_size: int = 1 << 31,
    longest: int | None = None,
) -> list[Pair]:
    """(prompt ids, response ids) of each logged answer; `log` counts what is left out.

    tokenizer: called when the first text is met. prompts: files for answers that have none. vocab_size, longest: of the model
    that is to emit them. Raises CorpusError naming file and line of the first answer that lacks something or does not fit.
    """
    lacking = next((logged.line for logged in log.answers if logged.prompt is None), None)
    if lacking is not None and not prompts:
        raise CorpusError(
            f"{log.path}:{lacking}: an answer without its prompt. Name the job's prompts with --prompts FILE (or write "
            "them with the answers: generate --echo)."
        )
    requests = find_prompts(log, prompts, job.fields) if lacking is not None else {}
    pairs, loaded = [], cast(Any, None)
    for logged in log.answers:
        if (prompt := logged.prompt) is None:
            request = requests.get(_key_of(log, logged.row_id))
        else:
            kind = "prompt" if isinstance(prompt, str) else "messages" if isinstance(prompt[0], dict) else "prompt_ids"
            request = Request(logged.row_id, logged.line, **{kind: prompt})
        if request is None:
            log.first_unmatched = logged.row_id if not log.unmatched else log.first_unmatched
            log.unmatched += 1
            continue
        where = f"{log.path}:{logged.line}"
        is_text = logged.answer.token_ids is None or request.prompt_ids is None
        if is_text and loaded is None and (loaded := tokenizer()) is None:
            raise CorpusError(f"{where}: holds text: name its tokenizer with --tokenizer MODEL_OR_FOLDER.")
        try:
            as_asked = logged.job and logged.prompt is not None  # as it was tokenized, system message and all
            of_request = prompts_of(request, loaded, job.chat and not as_asked, None if as_asked else job.system, now=job.began)
        except LookaheadError as error:
            raise CorpusError(f"{where}: {error}") from error
        which = logged.answer.index * len(of_request) // logged.answer.of  # of several prompts each has as many answers
        prompt, answer = of_request[which], logged.answer
        if (response := answer.token_ids) is None:
            text, asked = answer.text or "", request.prompts[which] if request.prompts else request.prompt
            if request.echo and isinstance(asked, str):  # OpenAI's "echo": the prompt stands before the answer
                text = text.removeprefix(asked)
            response = list(loaded(text, add_special_tokens=False)["input_ids"])
            response += [loaded.eos_token_id] if answer.ends and loaded.eos_token_id is not None else []
        log.retokenized += logged.job and logged.answer.token_ids is None
        log.other_prompts += logged.prompt_tokens not in (None, sum(map(len, of_request)))
        highest, together = max((*prompt, *response)), len(prompt) + len(response)
        if highest >= vocab_size:
            raise CorpusError(f"{where}: token id {highest} is outside the model's vocabulary of {vocab_size}.")
        if longest is not None and together > longest:
            raise CorpusError(f"{where}: prompt and response have {together} tokens, the model has {longest} positions.")
        pairs.append((prompt, response))
    return pairs


def settings_of(path: str) -> JobSettings:
    """Read the settings of the job that wrote the file, by the manifest next to it; defaults where there is none."""
    try:
        manifest = json.loads(JobFiles(Path(path)).manifest.read_text(encoding="utf-8"))
        options = manifest["runs"][-1]["options"]
        inputs = [str(each["path"]) for each in manifest["inputs"]]
        adapters = ModelOptions(adapter=options.get("adapter")).adapter_names
        fields = RowFields(options.get("prompt_field"), template_of(options.get("template")), adapters=adapters)
        tokenizer = options.get("tokenizer") or options.get("model")
        asked = tokenizer, bool(options.get("chat")), options.get("system"), fields
        return JobSettings(*asked, inputs, began(manifest["runs"][0]))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, LookaheadError):
        return UNKNOWN
