"""Copies of a user's logits processors and stopping criteria, one for each answer, as they may keep state about a text.

In: what the user gave, which is never called. Out: deep copies. Models, tokenizers and anything that a `__deepcopy__` method of
the user's own hands back are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from lookahead.errors import UsageError
from lookahead.tokenizer import first_line

DEPTH = 4  # of attributes and containers that are searched for models and tokenizers


def own_copies(things: Sequence[Any]) -> list[Any]:
    """Deep copies; what several of them share is shared by their copies.

    Raises UsageError for one that cannot be copied, as state in it would pass from one answer to another.
    """
    shared: dict[int, Any] = {}
    for thing in things:
        _find_shared(thing, shared, DEPTH)
    copies = []
    for thing in things:
        try:
            copies.append(copy.deepcopy(thing, shared))
        except Exception as error:  # an attribute may raise anything that cannot be copied, such as a lock or a file
            raise UsageError(
                f"{type(thing).__name__} cannot be copied for each answer ({first_line(error)}): give it a method "
                "__deepcopy__(self, memo) that returns a copy, or self if it keeps no state about a text."
            ) from error
    return copies


def _find_shared(thing: Any, shared: dict[int, Any], depth: int) -> None:
    """Note, by id, the models and tokenizers that a thing holds: they are large and keep no state about a text."""
    if isinstance(thing, nn.Module | PreTrainedTokenizerBase):
        shared[id(thing)] = thing
        return
    if not depth:
        return
    parts: Iterable[Any] = ()
    if isinstance(thing, Mapping):
        parts = thing.values()
    elif isinstance(thing, list | tuple):
        parts = thing
    elif hasattr(thing, "__dict__"):
        parts = vars(thing).values()
    for part in list(parts):
        if not isinstance(part, str | bytes | int | float | bool | type(None)):
            _find_shared(part, shared, depth - 1)
