"""Prompts made of the fields of rows, and fields that rows keep. In: a row as an object. Out: a row with a prompt, kept fields.

A template is Jinja in its sandbox: a row can neither run code nor change what the next row gets.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookahead.errors import UsageError
from lookahead.job.params import RowError, names_in

ALL = "all"
KEEP = "--keep-fields"  # param of a RowError about kept fields
NO_FIELDS = "an OpenAI line, which has no fields to keep: leave --keep-fields out"
FORMS = ("prompt", "messages", "prompt_ids", "custom_id", "method", "url", "body")  # fields of a row with a prompt
OF_ECHO = ("prompt", "messages", "prompt_ids")  # fields of output rows with --echo
OF_ROWS = "id text token_ids finish_reason logprobs prompt_tokens completion_tokens steps draft_tokens accepted_tokens edl"
OWN = frozenset(f"{OF_ROWS} accepted_by_source seconds samples error custom_id response complete prompt_logprobs".split())


class RowFields:
    """Fields that a job takes of its rows. prompt_field: the field with the prompt's text. template: Jinja that makes the
    prompt.

    keep: fields that output rows keep; ("all",): every one. echo: output rows have the prompt, so that it is not kept twice.
    adapters: names that rows may give.
    Raises UsageError for options that do not go together, a template that cannot be read, or names that output rows use.
    """

    def __init__(
        self,
        prompt_field: str | None = None,
        template: str | None = None,
        keep: Sequence[str] = (),
        echo: bool = False,
        adapters: Sequence[str] = (),
    ) -> None:
        if prompt_field is not None and template is not None:
            raise UsageError("--prompt-field and --template both make the prompt: give one of them.")
        self._own = OWN.union(OF_ECHO) if echo else OWN
        if taken := sorted(set(keep) & self._own - {"id"}):
            raise UsageError(f"--keep-fields {','.join(keep)}: {', '.join(taken)} stands in output rows, with another meaning.")
        self.prompt_field, self.keep, self._echo = prompt_field, tuple(name for name in keep if name != "id"), echo
        self.adapters = tuple(adapters)
        self._template: Any = None if template is None else compiled(template)

    @property
    def makes_prompts(self) -> bool:
        """Rows need not have one, nor the form of rows with one."""
        return self._template is not None or self.prompt_field is not None

    @functools.cached_property
    def columns(self) -> frozenset[str] | None:
        """List the columns of a table that are read; None: all."""
        named = FORMS if self._template is None else self._template[1]
        if self.keep == (ALL,) or "row" in named:
            return None
        return frozenset(("id", "params", *self.keep, *((self.prompt_field,) if self.prompt_field is not None else named)))

    def prompted(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row as one that has a prompt. Raises RowError if a field that it needs is missing."""
        if not self.makes_prompts:
            return row
        prompt = self._rendered(row) if self._template is not None else self._field(row)
        return {"id": row.get("id"), "params": row.get("params"), "prompt": prompt}

    def kept(self, row: dict[str, Any]) -> dict[str, Any]:
        """The fields that the output row keeps, as JSON has them; null for one that is missing. Raises RowError."""
        if not self.keep:
            return {}
        names: Sequence[str] = self.keep
        if self.keep == (ALL,):
            names = [name for name in row if name != "id" and not (self._echo and name in OF_ECHO)]
            if taken := sorted(self._own.intersection(names)):
                problem = f'has "{taken[0]}", which stands in output rows with another meaning: name the fields to keep'
                raise RowError(problem, KEEP)
        # What is not a value in JSON is text (dates), or null (NaN).
        return {name: json.loads(json.dumps(row.get(name), default=str), parse_constant=lambda _: None) for name in names}

    def _field(self, row: dict[str, Any]) -> Any:
        assert self.prompt_field is not None
        if row.get(self.prompt_field) is None:
            raise RowError(f'has no "{self.prompt_field}" (found: {names_in(row)})', self.prompt_field)
        if not isinstance(row[self.prompt_field], str):
            kind = type(row[self.prompt_field]).__name__
            raise RowError(f'"{self.prompt_field}" is a {kind}, not text', self.prompt_field)
        return row[self.prompt_field]

    def _rendered(self, row: dict[str, Any]) -> str:
        import jinja2

        try:
            return str(self._template[0].render({"row": row, **row}))
        except jinja2.UndefinedError as error:
            raise RowError(f"the template needs a field: {_one_line(error)} (found: {names_in(row)})") from None
        except _NullError:
            empty = names_in({name: 0 for name in self.columns or row if row.get(name, 0) is None})
            raise RowError(f"the template writes a value that is null (null are: {empty})") from None
        except Exception as error:  # an expression of the template raises what it likes
            raise RowError(f"the template cannot be used: {type(error).__name__}: {_one_line(error)}") from None


def keep_of(option: str | None) -> tuple[str, ...]:
    """ "a,b" -> ("a", "b"). Raises UsageError for an empty name."""
    names = tuple(name.strip() for name in option.split(",")) if option is not None else ()
    if not all(names) or (ALL in names and len(names) > 1):
        raise UsageError(f"--keep-fields {option}: give names with commas between them, such as source,topic, or all.")
    return names


def template_of(option: str | None) -> str | None:
    """The template in a file, or the text itself. Raises UsageError for what is neither."""
    if option is None:
        return None
    source, where = option, "--template"
    if is_template_file(option):
        where = option
        try:
            source = Path(option).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"{option}: cannot be read ({why}).") from None
    if "{{" not in source and "{%" not in source:
        missing = "no such file, and as a text it" if where == "--template" else "it"
        raise UsageError(f"--template {option:.80}: {missing} uses no field, such as {{{{ question }}}}.")
    return source


def is_template_file(option: str) -> bool:
    try:
        return Path(option).is_file()
    except (OSError, ValueError):  # a text that is not a path
        return False


@functools.lru_cache(maxsize=1)
def compiled(source: str) -> tuple[Any, set[str]]:
    """A template of the sandbox, and the names that it looks up. Raises UsageError with the line where it is wrong."""
    import jinja2.meta
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, finalize=_not_null)
    try:
        return environment.from_string(source), jinja2.meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"--template, line {error.lineno}: {_one_line(error)}") from None


class _NullError(Exception):
    """A template writes null."""


def _not_null(value: Any) -> Any:
    if value is None:
        raise _NullError
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
