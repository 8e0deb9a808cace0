"""Options of a job as parameters of a command line. In: their declarations in lookahead/job/spec.py. Out: typer parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from lookahead.errors import UsageError
from lookahead.job.options import kinds, typed
from lookahead.job.spec import OPTIONS, PANELS
from lookahead_cli import completion, logs

CALLBACKS: dict[str, Callable[..., Any]] = {"log_file": logs.open_file, "verbose": logs.be_verbose}
COMPLETIONS: dict[str, Callable[[str], list[str]]] = {"strategy": completion.strategies}


def of_job(name: str, panel: str | None = None, help: str | None = None) -> Any:
    """The typer option of a job's option. panel, help: instead of its own."""
    each = OPTIONS[name]
    about = each.about
    return typer.Option(
        *(about.flags or (typed(name),)),
        metavar=about.metavar,
        help=help or about.help,
        min=about.least,
        max=about.most,
        show_default=about.default_text or True,
        rich_help_panel=panel or each.panel,
        callback=CALLBACKS.get(name),
        autocompletion=COMPLETIONS.get(name),
    )


def type_of(name: str) -> Any:
    """The type that typer parses: of several values a list, of a number or a word a text."""
    found = kinds(PANELS[OPTIONS[name].group][1])[name]
    base: Any = next(kind for kind in found if kind is not type(None))
    if tuple in found:
        base = list[int] if int in found else list[str]
    elif str in found:
        base = str
    return base | None if type(None) in found else base


def job_parameters(names: Iterable[str] = OPTIONS) -> list[inspect.Parameter]:
    """Parameters of a function, one an option."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=OPTIONS[name].field.default,
            annotation=Annotated[type_of(name), of_job(name)],
        )
        for name in names
    ]


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, whose ** parameter stands for all options of a job."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    context, others = own[:1], [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own[1:]]
    parameters = [*context, *job_parameters(), *others]
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
