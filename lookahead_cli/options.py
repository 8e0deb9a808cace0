"""Options that several commands share, and reading them from a job file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead.errors import UsageError
from lookahead.job.spec import MOST_WORKERS, PANELS
from lookahead_cli.parameters import of_job

if TYPE_CHECKING:
    from lookahead.trie.segment import Effort, Progress

# Panels of --help; those of a job are in lookahead/job/spec.py.
IO, DRAFTING, MODEL, REPORTING = (PANELS[group][0] for group in ("io", "drafting", "model", "reporting"))
RESOURCES, RUNS, COSTS = "Resources", "Runs", "Costs"


def _load_config(context: typer.Context, path: str | None) -> str | None:
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
    """By the core schema of YAML 1.2."""
    return node.id == "scalar" and node.style is None and node.value in ("", "~", "null", "Null", "NULL")


Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        callback=_load_config,
        is_eager=True,
        metavar="FILE",
        help="YAML file with any options of this command; options on the command line override it.",
        rich_help_panel=IO,
    ),
]
LogFile = Annotated[str | None, of_job("log_file")]
Verbose = Annotated[bool, of_job("verbose")]
Context = typer.Context  # its obj is the command line, as typed
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.", rich_help_panel=REPORTING)
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace existing files, including files of another kind.",
        rich_help_panel=IO,
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        "--workers",
        min=0,
        max=MOST_WORKERS,
        metavar="N",
        help="Threads that tokenize, sort and merge; 0: one per core.",
        rich_help_panel=RESOURCES,
    ),
]
MaxMemory = Annotated[
    str,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        help="Memory to stay within, such as 512MiB or 2GiB (the tool itself takes about 0.2GiB).",
        rich_help_panel=RESOURCES,
    ),
]
Ray = Annotated[str | None, of_job("ray", panel=RESOURCES)]
ADDRESS = re.compile(r"auto|local|ray://\S+|[^\s/:]+:\d+")


def with_address(typed: Sequence[str]) -> list[str]:
    """A command line in which --ray is followed by an address: auto, where none is given."""
    line: list[str] = []
    for word, following in itertools.zip_longest(typed, typed[1:], fillvalue=""):
        line += [word, "auto"] if word == "--ray" and not ADDRESS.fullmatch(following) else [word]
    return line


def effort_of(max_memory: str, workers: int, progress: Progress | None = None) -> Effort:
    """What a build, merge or prune may use; 0 workers: one per core that this process may run on."""
    import os

    from lookahead.trie.segment import Effort, no_progress
    from lookahead_cli.render import notice

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Effort(size_in_bytes(max_memory), workers or cores, progress or no_progress, notice)


def part_of(whole: int, text: str, what: str) -> int | None:
    """ "50%" -> that share of `whole`, which is `what`; None for no percentage. Raises UsageError outside of 0 to 100."""
    if not text.strip().endswith("%"):
        return None
    try:
        share = float(text.strip()[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise UsageError(f"{text!r}: give a percentage of the {what}, above 0 and at most 100, such as 50%.")
    return max(1, int(share * whole))


def size_in_bytes(text: str) -> int:
    """ "512", "64KiB", "1.5MB", "2GiB" -> bytes. Raises UsageError for anything else."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmg", 1):
        units.update({letter: 1024**power, f"{letter}ib": 1024**power, f"{letter}b": 1000**power})
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"size {text!r}: give bytes, or a number with KiB, MiB or GiB.") from error
    if size <= 0:
        raise UsageError(f"size {text!r}: must be more than 0 bytes.")
    return size
