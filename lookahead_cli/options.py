"""Options of commands. In: dataclasses that declare them (lookahead/options.py), a file of --config. Out: typer parameters.

Panels of --help are those of a job (lookahead/job/spec.py), or named by the options themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead.bench.options import IO, REPORTING
from lookahead.errors import UsageError
from lookahead.job.spec import MOST_WORKERS, OPTIONS, PANELS, JobSpec, as_of_job
from lookahead.options import Option, OptionGroup, begins, declared, kinds, option, typed
from lookahead_cli import logs

if TYPE_CHECKING:
    from lookahead.files.outputs import Input, Output
    from lookahead.trie.segment import BuildResources, Progress

RESOURCES = "Resources"
ADDRESS = re.compile(r"auto|local|ray://\S+|[^\s/:]+:\d+")


def load_config(context: typer.Context, path: str | None) -> str | None:
    """Make the values of a YAML file the command's defaults. Keys are option names, with - or _."""
    if path is None:
        return None
    import yaml

    try:
        document = yaml.compose(Path(path).read_text(encoding="utf-8-sig"), yaml.BaseLoader)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(document, yaml.MappingNode):
        raise UsageError(f"{path}: needs one option per line, such as `model: org/name`.")
    by_name: dict[str, Any] = {}
    # No value is typed here: each is the text as written, which options read as on the command line.
    for parameter in context.command.params:
        for flag in [parameter.name or "", *parameter.opts]:
            by_name[flag.lstrip("-").replace("-", "_")] = parameter
    defaults: dict[str, Any] = {}
    for name, node in document.value:
        key, where = str(name.value), f"{path}:{name.start_mark.line + 1}"
        option = by_name.get(key.replace("-", "_"))
        if option is None or option.name in (None, "config"):
            known = ", ".join(sorted(p.name.replace("_", "-") for p in context.command.params if p.name))
            raise UsageError(f"{where}: unknown option {key[:80]!r} (known: {known}).")
        if option.name in defaults:
            raise UsageError(f"{where}: {key} stands here a second time.")
        many = getattr(option, "multiple", False) or option.nargs == -1
        if _is_null(node):  # as --print-config writes what is not given
            defaults[option.name] = None
            continue
        values = node.value if many and node.id == "sequence" else [node]
        for each in values:
            if each.id != "scalar" or _is_null(each) or not re.fullmatch(".*:(str|int|float|bool)", each.tag):
                found = f"{each.value or 'nothing'!s:.80}" if each.id == "scalar" else f"a {each.id}"
                raise UsageError(f'{where}: {key} holds {found}, which is not text: put text in quotes, such as "null".')
        defaults[option.name] = [each.value for each in values] if many else node.value
    defaults = {name: value for name, value in defaults.items() if value is not None}
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _is_null(node: Any) -> bool:
    """Tell whether it is null by the core schema of YAML 1.2."""
    return node.id == "scalar" and node.style is None and node.value in ("", "~", "null", "Null", "NULL")


def _strategies(incomplete: str) -> list[str]:
    from lookahead.draft.options import STRATEGIES

    return begins(("auto", *STRATEGIES), incomplete)


CALLBACKS: dict[str, Callable[..., Any]] = {"config": load_config, "log_file": logs.open_file, "verbose": logs.be_verbose}
COMPLETIONS = {"strategy": _strategies}


def _parameter(kind: type, name: str, default: Any, about: Option) -> inspect.Parameter:
    """Make the parameter of a function for an option of a group."""
    if about.is_argument:
        made = typer.Argument(metavar=about.metavar, help=about.help)
    else:
        made = typer.Option(
            *(about.flags or (typed(name),)),
            metavar=about.metavar,
            help=about.help,
            min=about.least,
            max=about.most,
            show_default=about.default_text or True,
            rich_help_panel=about.panel,
            callback=CALLBACKS.get(name),
            is_eager=name == "config",
            autocompletion=about.complete or COMPLETIONS.get(name),
        )
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    annotation: Any = Annotated[_type_of(kinds(kind)[name]), made]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _type_of(members: tuple[type, ...]) -> Any:
    """The type that typer parses: of several values a list, of a number or a word a text."""
    base: Any = next(kind for kind in members if kind is not type(None))
    if tuple in members:
        base = list[int] if int in members else list[str]
    elif str in members:
        base = str
    return base | None if type(None) in members else base


class Some:
    """Options of a group, or of a job, that a command has.

    names: separated by spaces; "": all. others: by name what they declare that differs, and their default.
    """

    def __init__(self, names: str = "", **others: dict[str, Any]):
        self._names, self._others = names.split(), others

    def parameters(self, group: type[OptionGroup] | type[JobSpec]) -> Iterator[inspect.Parameter]:
        """Make the parameters of a function, one an option."""
        of_job = {name: (PANELS[each.group][1], each.field, each.about) for name, each in OPTIONS.items()}
        options = {name: about for name, about in of_job.items() if group in (JobSpec, about[0])}
        if not options:
            options = {each.name: (group, each, declared(each)) for each in dataclasses.fields(group)}  # type: ignore[misc]
        for name in self._names or options:
            kind, field, about = options[name]
            others = dict(self._others.get(name, {}))
            default = others.pop("default", field.default)
            yield _parameter(kind, name, default, dataclasses.replace(about, **others))


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which gets a group of options for each of its parameters of the type Annotated[group, Some(...)]."""
    signature = inspect.signature(command, eval_str=True)
    parameters, groups = list[inspect.Parameter](), dict[str, tuple[Any, list[str]]]()
    for each in signature.parameters.values():
        kind, *about = typing.get_args(each.annotation) or [each.annotation]
        if about and isinstance(about[0], Some):
            options = list(about[0].parameters(kind))
            groups[each.name] = kind.of if kind is JobSpec else kind, [option.name for option in options]
            parameters += options
        else:
            parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def grouped(**values: Any) -> None:
        made = {name: of(**{option: values.pop(option) for option in names}) for name, (of, names) in groups.items()}
        command(**made, **values)

    grouped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    grouped.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    return grouped


@dataclasses.dataclass(frozen=True)
class Common(OptionGroup):
    """Options of most commands."""

    overwrite: bool = option(False, "Replace existing files, including files of another kind.", panel=IO)
    json: bool = option(False, "Print one JSON object on stdout and nothing else.", panel=REPORTING)
    log_file: str | None = as_of_job("log_file")
    verbose: bool = as_of_job("verbose")
    config: str | None = option(
        None, "YAML file with any options of this command; options on the command line override it.", "FILE", panel=IO
    )

    def check(self, outputs: Sequence[Output], inputs: Sequence[Input]) -> None:
        """See `check_outputs`; these, and the files of these options."""
        from lookahead.files.outputs import Input, Output, check_outputs

        outputs = [*outputs, Output("--log-file", self.log_file)]
        check_outputs(outputs, [*inputs, Input("--config", [self.config])], self.overwrite)


@dataclasses.dataclass(frozen=True)
class Resources(OptionGroup):
    """Resources of work on tries."""

    workers: int = option(
        0, "Threads that tokenize, sort and merge; 0: one per core.", "N", least=0, most=MOST_WORKERS, panel=RESOURCES
    )
    max_memory: str = option(
        "1GiB", "Memory to stay within, such as 512MiB or 2GiB (the tool itself takes about 0.2GiB).", "SIZE", panel=RESOURCES
    )
    ray: str | None = as_of_job("ray", panel=RESOURCES)

    def resources(self, progress: Progress | None = None) -> BuildResources:
        """Make the resources of a build, merge or prune."""
        from lookahead.native.cores import usable_cores
        from lookahead.trie.segment import BuildResources
        from lookahead_cli.render import notice

        return BuildResources(
            size_in_bytes(self.max_memory), self.workers or usable_cores(), progress or BuildResources.progress, notice
        )


def with_address(typed: Sequence[str]) -> list[str]:
    """A command line in which --ray is followed by an address: auto, where none is given."""
    line: list[str] = []
    for word, following in itertools.zip_longest(typed, typed[1:], fillvalue=""):
        line += [word, "auto"] if word == "--ray" and not ADDRESS.fullmatch(following) else [word]
    return line


def given(context: typer.Context, *names: str) -> list[str]:
    """Flags of those parameters that were given, on the line or in the file of --config, be it as their defaults."""
    sources = {name: context.get_parameter_source(name) for name in names}
    flags = {each.name: max(each.opts, key=len) for each in context.command.params}
    return [flags[name] for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def refuse(context: typer.Context, why: str, *names: str) -> None:
    """Raise UsageError if one of these was given: none of them could be honoured."""
    if flags := given(context, *names):
        raise UsageError(f"{why}: leave out {', '.join(flags)}.")


def size_in_bytes(text: str) -> int:
    """ "512", "64KiB", "1.5MB", "2GiB" -> bytes. Raises UsageError for anything else."""
    number, letter, unit = re.findall(r"^(.*?)\s*(?:([kmg])(i?b)?|b)?$", text.strip().lower(), re.DOTALL)[0]
    try:
        size = int(float(number) * (1000 if unit == "b" else 1024) ** " kmg".index(letter or " "))
    except (ValueError, OverflowError) as error:
        raise UsageError(f"size {text!r}: give bytes, or a number with KiB, MiB or GiB.") from error
    if size <= 0:
        raise UsageError(f"size {text!r}: must be more than 0 bytes.")
    return size
