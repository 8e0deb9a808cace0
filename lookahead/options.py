"""What an option declares of itself. In: a declaration. Out: a field of a frozen dataclass that carries it.

One declaration serves all users: the command line, job.yaml, its JSON Schema, the check of --resume, and Python.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from lookahead.errors import UsageError

KEY = "option"  # of a field's metadata
_kinds: dict[type, dict[str, tuple[type, ...]]] = {}  # of each group, once asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """changes_answers: a job that is resumed with another value would answer differently, or write other rows; None: as its
    group has it.

    is_file: the value names a file, whose content counts and not its name. flags: as typed, where they are not --name alone.
    least, most: bounds of a number, inclusive. default_text: what None stands for. panel: of --help, instead of its group's.
    is_argument: it is typed without a name. complete: what is typed of a value -> values that begin so.
    """

    help: str
    changes_answers: bool | None = None
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    default_text: str | None = None
    is_file: bool = False
    panel: str | None = None
    is_argument: bool = False
    complete: Callable[[str], list[str]] | None = None


def option(default: Any, help: str, metavar: str | None = None, **about: Any) -> Any:
    """A field of an option group. default: `dataclasses.MISSING` where one has to be given. about: see `Option`."""
    return dataclasses.field(default=default, metadata={KEY: Option(help=help, metavar=metavar, **about)})


def declared(field: dataclasses.Field[Any]) -> Option:
    """Raises TypeError for a field that is not an option."""
    found = field.metadata.get(KEY)
    if not isinstance(found, Option):
        raise TypeError(f"{field.name}: declare it with option(...), as all options are.")
    return found


def typed(name: str) -> str:
    """The flag of an option: "batch_size" -> "--batch-size"."""
    return f"--{name.replace('_', '-')}"


def begins(names: Iterable[str], incomplete: str) -> list[str]:
    """Names that a shell completes."""
    return [name for name in names if name.startswith(incomplete)]


def kinds(group: type) -> dict[str, tuple[type, ...]]:
    """Types of each field: `int | str | None` -> (int, str, NoneType); a sequence: (tuple, type of its items, NoneType)."""
    if group in _kinds:
        return _kinds[group]
    found = _kinds.setdefault(group, {})
    for name, hint in typing.get_type_hints(group).items():
        members: list[type] = []
        for member in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
            members += [tuple, *typing.get_args(member)] if typing.get_origin(member) is not None else [member]
        found[name] = tuple(members)
    return found


@dataclasses.dataclass(frozen=True)
class OptionGroup:
    """Base of the dataclasses of options: takes paths for texts and one value for several, and refuses what cannot be meant.

    Several values are kept as a tuple; none at all as None. Raises UsageError for a value of another type or out of bounds.
    CHANGES_ANSWERS: of its options that do not declare it; a group of a job has to.
    """

    CHANGES_ANSWERS: ClassVar[bool]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, about = getattr(self, field.name), declared(field)
            if value == field.default and type(value) is type(field.default):
                continue
            allowed = kinds(type(self))[field.name]
            checked = _several(field.name, value, allowed) if tuple in allowed else _one(field.name, value, allowed)
            _check_bounds(field.name, checked, about)
            object.__setattr__(self, field.name, checked)


def _several(name: str, value: Any, allowed: tuple[type, ...]) -> tuple[Any, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, os.PathLike)) or not isinstance(value, Sequence):
        value = (value,)
    items = tuple(kind for kind in allowed if kind not in (tuple, type(None)))
    return tuple(_one(name, item, items) for item in value) or None


def _check_bounds(name: str, value: Any, about: Option) -> None:
    if value is None or isinstance(value, (str, tuple)):
        return
    if (about.least is not None and value < about.least) or (about.most is not None and value > about.most):
        limits = f"at least {about.least}" if about.most is None else f"from {about.least} to {about.most}"
        raise UsageError(f"{typed(name)} {value}: give a number {limits}.")


def _one(name: str, value: Any, allowed: tuple[type, ...]) -> Any:
    if isinstance(value, os.PathLike) and str in allowed:
        value = os.fspath(value)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise UsageError(f"{typed(name)}: give a number below 2^63.")
    if isinstance(value, int) and not isinstance(value, bool) and float in allowed:
        value = float(value)
    if type(value) not in allowed:
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
        raise UsageError(f"{typed(name)} {value!r}: is a {type(value).__name__}, not {expected}.")
    return value
