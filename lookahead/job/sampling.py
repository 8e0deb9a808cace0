"""How tokens are chosen, from options as they are typed. In: options of a job. Out: a `Sampling` and its constraint."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead.decode.sampling_options import SamplingFields
from lookahead.errors import ConstraintError, UsageError
from lookahead.options import typed

if TYPE_CHECKING:
    from lookahead.decode.constraint import Constraint
    from lookahead.decode.sampling import Sampling
    from lookahead.job.spec import Constraints, SamplingOptions

AS_GIVEN = (*(field.name for field in dataclasses.fields(SamplingFields)), "sampling", "min_new_tokens", "include_stop")


def sampling_of(options: SamplingOptions, constraint: Constraint | None) -> Sampling:
    """What holds for rows that ask for nothing else. Raises UsageError for values that make no sense."""
    from lookahead.decode.sampling import Sampling

    fields: dict[str, Any] = {name: getattr(options, name) for name in AS_GIVEN}
    fields.update({name: tuple(getattr(options, name) or ()) for name in ("stop", "stop_token_ids", "bad_words")})
    fields["bad_words_ids"] = token_id_lists(options.bad_words_ids)
    fields["logit_bias"] = biases(options.logit_bias)
    return Sampling(**fields, constraint=constraint)


def check_sampling_options(options: SamplingOptions) -> None:
    """Raise UsageError for what is typed wrongly, before anything is imported or read."""
    if options.sampling not in ("greedy", "model"):
        raise UsageError(f"--sampling {options.sampling}: choose greedy or model.")
    token_id_lists(options.bad_words_ids)
    biases(options.logit_bias)


def token_id_lists(items: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """["17,4", "[5, 6]"] -> ((17, 4), (5, 6)). Raises UsageError for anything else."""
    for item in items or ():
        if not re.fullmatch(r"\[?\s*\d{1,18}(\s*,\s*\d{1,18})*\s*\]?", item):
            raise UsageError(f"--bad-words-ids {item:.80}: give token ids with commas between them, such as 17,4.")
    return tuple(tuple(map(int, re.findall(r"\d+", item))) for item in items or ())


def biases(items: Sequence[str] | None) -> dict[int, float]:
    """["17=-5"] -> {17: -5.0}. Raises UsageError for anything but an id and number, and for an id given twice."""
    found: dict[int, float] = {}
    for item in items or ():
        token, _, value = item.partition("=")
        try:
            bias = float(value)
        except ValueError:
            bias = math.nan
        if not re.fullmatch(r"\s*\d{1,18}\s*", token) or math.isnan(bias):
            raise UsageError(f"--logit-bias {item:.80}: give ID=B with a token id and a number, such as 17=-5.")
        if int(token) in found:
            raise UsageError(f"--logit-bias {item}: token {token} is given twice.")
        found[int(token)] = bias
    return found


def constraint_of(options: Constraints) -> Constraint | None:
    """What answers must look like; None: anything.

    Raises UsageError for several options at once and for what was typed wrongly, ConstraintError for files that cannot be used.
    """
    from lookahead.decode.constraint import Constraint

    values = {name: getattr(options, name) for name in ("json_schema", "regex", "choice", "grammar")}
    given = {name: value for name, value in values.items() if value is not None and value != ()}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(map(typed, given))}: give one of them.")
    if not given:
        return None
    ((kind, value),) = given.items()
    where = typed(kind)
    in_words = kind in ("regex", "choice")
    if not in_words:
        where = str(value)
        try:
            value = Path(where).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConstraintError(f"{where}: cannot be read ({why}).") from None
    constraint = Constraint.of(kind, list(value) if isinstance(value, tuple) else value)
    try:
        constraint.check()
    except ConstraintError as error:
        raise (UsageError if in_words else ConstraintError)(f"{where}: {error}") from None
    return constraint
