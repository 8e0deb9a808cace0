"""Arguments that take one value or several. In: what a caller gave. Out: a tuple, in which a str or Path is one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any, NoReturn

from lookahead.errors import UsageError

BYTES = (bytes, bytearray, memoryview)  # sequences of integers, which are neither text nor token ids


def texts_of(value: Any, name: str) -> tuple[str, ...]:
    """ "END" -> ("END",); ["a", "b"] -> ("a", "b"); None -> (). Raises UsageError for anything but str and iterables of str."""
    return _several(value, name, is_text, "text or a list of texts", str)


def is_text(value: Any) -> bool:
    """Text that UTF-8 has, and so tokenizers and files: without half a surrogate pair."""
    return isinstance(value, str) and (value.isascii() or value == value.encode("utf-8", "ignore").decode("utf-8"))


def token_ids_of(value: Any, name: str) -> tuple[int, ...]:
    """7 -> (7,); [7, 8] -> (7, 8), also of an array. Raises UsageError for anything but token ids."""
    return tuple(int(each.__index__()) for each in _several(value, name, _is_id, "a token id or a list of them", int))


def id_lists_of(value: Any, name: str) -> tuple[tuple[int, ...], ...]:
    """[[5, 6], [7]] -> ((5, 6), (7,)). Raises UsageError, for one flat list of ids too: [5, 6] can mean one sequence or two."""
    listed = _listed(value, name, "a list of lists of token ids")
    if unordered := next((each for each in listed if isinstance(each, Set)), None):
        _refuse(name, unordered, "a list of lists of token ids: a set has no order")
    if any(_is_id(each) for each in listed):
        raise UsageError(f"{name} is a flat list: give a list of lists of token ids, such as [[5, 6], [7]].")
    return tuple(token_ids_of(each, name) for each in listed)


def paths_of(value: Any, name: str, *kinds: type) -> tuple[Any, ...]:
    """ "a.trie" -> ("a.trie",). kinds: what is allowed in addition to str and Path. Raises UsageError for anything else."""
    allowed = (str, Path, *kinds)
    return _several(value, name, lambda each: isinstance(each, allowed), "a path or a list of paths", *allowed)


def numbers_of(value: Any, name: str) -> tuple[float, ...]:
    """2.0 -> (2.0,). Raises UsageError for anything but numbers."""
    return _several(value, name, lambda each: isinstance(each, int | float), "a number or a list of numbers", int, float)


def _several(value: Any, name: str, good: Callable[[Any], bool], wanted: str, *single: type) -> tuple[Any, ...]:
    """A tuple of `value`, which is one (of the types `single`) or several. Raises UsageError if one is not `good`."""
    listed = (value,) if isinstance(value, single) else _listed(value, name, wanted)
    for each in listed:
        if not good(each):
            _refuse(name, each, wanted)
    return listed


def _listed(value: Any, name: str, wanted: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if getattr(value, "ndim", None) == 0:  # a scalar of an array library
        return (value,)
    if isinstance(value, (str, dict, *BYTES)) or not isinstance(value, Iterable):
        _refuse(name, value, wanted)
    return tuple(value)


def _is_id(value: Any) -> bool:
    if getattr(value, "ndim", 0):
        return False
    plain = value.item() if hasattr(value, "item") else value  # of an array library, whose booleans have an index, too
    return not isinstance(plain, bool | float) and hasattr(plain, "__index__")


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    raise UsageError(f"{name}: got {value!r:.80}. Give {wanted}.")
