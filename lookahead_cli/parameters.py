"""Options of a job as parameters of a command line. In: their declarations in lookahead/job/spec.py. Out: typer parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from lookahead.errors import UsageError
from lookahead.job.spec import OPTIONS, PANELS
from lookahead.options import Option, OptionGroup, declared, kinds, option, typed
from lookahead_cli import completion, logs

CALLBACKS: dict[str, Callable[..., Any]] = {"log_file": logs.open_file, "verbose": logs.be_verbose}
COMPLETIONS: dict[str, Callable[[str], list[str]]] = {"strategy": completion.strategies}


def of_job(name: str, **others: Any) -> Any:
    """The typer option of a job's option. others: what it declares that differs, such as its panel."""
    each = OPTIONS[name]
    return typer_option(name, dataclasses.replace(each.about, **others), each.panel)


def typer_option(name: str, about: Option, panel: str | None, completion: Callable[[str], list[str]] | None = None) -> Any:
    return typer.Option(
        *(about.flags or (typed(name),)),
        metavar=about.metavar,
        help=about.help,
        min=about.least,
        max=about.most,
        show_default=about.default_text or True,
        rich_help_panel=about.panel or panel,
        callback=CALLBACKS.get(name),
        autocompletion=completion or COMPLETIONS.get(name),
    )


def type_of(group: type, name: str) -> Any:
    """The type that typer parses: of several values a list, of a number or a word a text."""
    found = kinds(group)[name]
    base: Any = next(kind for kind in found if kind is not type(None))
    if tuple in found:
        base = list[int] if int in found else list[str]
    elif str in found:
        base = str
    return base | None if type(None) in found else base


def job_parameter(name: str) -> inspect.Parameter:
    """Parameter of a function."""
    kind, default = PANELS[OPTIONS[name].group][1], OPTIONS[name].field.default
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type_of(kind, name), of_job(name)]
    )


def as_of_job(name: str, **others: Any) -> Any:
    """A field of a group: an option of a job. others: its default or what it declares, where they differ."""
    each = OPTIONS[name]
    about = dataclasses.asdict(each.about) | {"panel": each.panel} | others
    return option(about.pop("default", each.field.default), **about)


class Some:
    """Options of a group that a command has. names: separated by spaces. others: what they declare that differs, by name."""

    def __init__(self, names: str, completions: dict[str, Callable[[str], list[str]]] | None = None, **others: dict[str, Any]):
        self.names, self.completions, self.others = names.split(), completions or {}, others

    def parameters(self, group: type[OptionGroup]) -> Iterator[inspect.Parameter]:
        """Of a function, one an option."""
        fields = {field.name: field for field in dataclasses.fields(group)}
        panel = next((title for title, kind in PANELS.values() if kind is group), None)
        for name in self.names:
            about = dataclasses.replace(declared(fields[name]), **self.others.get(name, {}))
            declaration = typer_option(name, about, panel, self.completions.get(name))
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=fields[name].default,
                annotation=Annotated[type_of(group, name), declaration],
            )


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which gets a group of options for each of its parameters of the type Annotated[group, Some(...)]."""
    signature = inspect.signature(command, eval_str=True)
    parameters, groups = list[inspect.Parameter](), dict[str, tuple[type[OptionGroup], list[str]]]()
    for each in signature.parameters.values():
        kind, *about = typing.get_args(each.annotation) or [each.annotation]
        if about and isinstance(about[0], Some):
            groups[each.name] = kind, about[0].names
            parameters += about[0].parameters(kind)
        else:
            parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def grouped(**values: Any) -> None:
        made = {name: kind(**{option: values.pop(option) for option in names}) for name, (kind, names) in groups.items()}
        command(**made, **values)

    grouped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    grouped.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    return grouped


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, whose ** parameter stands for all options of a job."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    context, others = own[:1], [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own[1:]]
    parameters = [*context, *map(job_parameter, OPTIONS), *others]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    return command


def given(context: typer.Context, *names: str) -> list[str]:
    """Flags of those parameters that were given, on the line or in the file of --config, be it as their defaults."""
    sources = {name: context.get_parameter_source(name) for name in names}
    flags = {each.name: max(each.opts, key=len) for each in context.command.params}
    return [flags[name] for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def refuse(context: typer.Context, why: str, *names: str) -> None:
    """Raise UsageError if one of these was given: none of them could be honoured."""
    if flags := given(context, *names):
        raise UsageError(f"{why}: leave out {', '.join(flags)}.")
