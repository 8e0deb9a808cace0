"""Limits what one request may ask, as a row or from Python. In: fields. Out: UsageError that names the field.

Each limit bounds memory or time that one request can cost the others of a job. docs/rows.md lists them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from lookahead.arguments import id_lists_of, texts_of, token_ids_of
from lookahead.errors import UsageError

SAMPLES = 1024  # answers to one row
STOPS, STOP_LENGTH = 16, 128  # stop texts; characters of each: each costs a pass over the vocabulary, once
STOP_IDS = 1024
BAD_WORDS, BAD_WORD_LENGTH = 1024, 64  # sequences; ids of each
BIASES = 10_000  # entries of logit_bias
LOGPROBS = 128  # most probable tokens alongside each
TOOLS = 128  # of a chat
ID_LENGTH = 1024  # characters of a row's id, or digits
CONSTRAINT_LENGTH = 1 << 18  # characters of a schema, expression, grammar or list of choices
LARGEST = 1 << 63  # whole numbers lie below
LEAST_BIAS = -1e9  # a bias at or below it rules a token out

# field -> (lower limit, upper limit, whether the lower limit itself is allowed, text of the message)
NUMBERS: dict[str, tuple[float, float, bool, str]] = {
    "temperature": (0, math.inf, True, "0 (greedy) or more"),
    "top_p": (0, 1, False, "above 0 and at most 1"),
    "min_p": (0, 1, True, "from 0 to 1"),
    "typical_p": (0, 1, False, "above 0 and at most 1"),
    "repetition_penalty": (0, math.inf, False, "above 0"),
    "frequency_penalty": (-math.inf, math.inf, True, "a number"),
    "presence_penalty": (-math.inf, math.inf, True, "a number"),
}
COUNTS = {
    "top_k": "0 (all tokens) or more",
    "no_repeat_ngram_size": "0 (off) or more tokens",
    "min_new_tokens": "0 or more tokens",
}
LISTS = ("stop", "stop_token_ids", "bad_words", "bad_words_ids")
OTHERS = ("logit_bias", "sampling", "include_stop")


def checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Sampling, or some of them, with sequences as tuples. Raises UsageError for a value that is out of range."""
    found = dict(fields)
    for name, value in fields.items():
        if name in NUMBERS:
            low, high, with_low, allowed = NUMBERS[name]
            if value is None and name not in ("frequency_penalty", "presence_penalty"):
                continue
            if not is_number(value) or not (low <= value <= high if with_low else low < value <= high):
                raise UsageError(f"{name} is {shown(value)}: it must be {allowed}.")
            found[name] = float(value)
        elif name in COUNTS:
            if value is not None and not (is_count(value) and value >= 0):
                raise UsageError(f"{name} is {shown(value)}: it must be {COUNTS[name]}.")
        elif name in ("stop", "bad_words"):
            found[name] = texts = texts_of(value, name)
            check_size(name, texts, STOPS if name == "stop" else BAD_WORDS, "texts", STOP_LENGTH, "characters")
        elif name == "stop_token_ids":
            found[name] = ids = token_ids_of(value, name)
            check_size(name, ids, STOP_IDS, "ids")
        elif name == "bad_words_ids":
            found[name] = lists = id_lists_of(value, name)
            check_size(name, lists, BAD_WORDS, "sequences", BAD_WORD_LENGTH, "ids")
        elif name == "logit_bias":
            _check_biases(value)
        elif name == "sampling" and value not in ("greedy", "model"):
            raise UsageError(f"sampling is {shown(value)}: it must be greedy or model.")
        elif name == "include_stop" and not isinstance(value, bool):
            raise UsageError(f"include_stop is {shown(value)}: it must be True or False.")
        elif name == "constraint" and value is not None and (length := len(value.text)) > CONSTRAINT_LENGTH:
            raise UsageError(f"{value.kind} has {length} characters: at most {CONSTRAINT_LENGTH} are allowed.")
    if not all(entry for name in ("bad_words_ids", "bad_words", "stop") for entry in found.get(name, ())):
        raise UsageError("bad_words_ids, bad_words and stop must not hold empty entries.")
    return found


def check_samples(count: int, what: str = "n") -> None:
    if count > SAMPLES:
        raise UsageError(f"{what} is {count}: at most {SAMPLES} answers to one prompt are given.")


def check_logprobs(most: int | None, name: str = "logprobs") -> None:
    if most is not None and (not is_count(most) or int(most) < 0):
        raise UsageError(f"{name} is {shown(most)}: it must be a whole number, 0 (of the tokens themselves only) or more.")
    if most is not None and most > LOGPROBS:
        raise UsageError(f"{name} is {most}: at most {LOGPROBS} tokens are listed.")


def check_size(name: str, entries: Any, most: int, unit: str, longest: int | None = None, of_each: str = "") -> None:
    """Raises UsageError for more than `most` entries, or one longer than `longest`."""
    if len(entries) > most:
        raise UsageError(f"{name} has {len(entries)} {unit}: at most {most} are allowed.")
    if longest is not None and (length := max(map(len, entries), default=0)) > longest:
        raise UsageError(f"{name} has an entry of {length} {of_each}: at most {longest} are allowed.")


def shown(value: Any) -> str:
    """Return `repr(value)`, cut where it is long."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # an integer of thousands of digits
        return "a huge number"


def is_number(value: Any) -> bool:
    """A finite number; True and False are none."""
    if isinstance(value, numbers.Integral):
        return is_count(value)
    return isinstance(value, numbers.Real) and math.isfinite(value)


def is_count(value: Any) -> bool:
    """A whole number of ordinary size; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and abs(int(value)) < LARGEST


def _check_biases(biases: Any) -> None:
    if not isinstance(biases, Mapping):
        raise UsageError(f"logit_bias is a {type(biases).__name__}: give each token id a number, such as {{5: -100.0}}.")
    check_size("logit_bias", biases, BIASES, "entries")
    for token, bias in biases.items():
        if not is_count(token):
            raise UsageError(f"logit_bias: {shown(token)} is not a token id.")
        if not (is_number(bias) and abs(bias) < 1e30) and not (isinstance(bias, float) and bias == -math.inf):
            raise UsageError(f"logit_bias of token {token} is {shown(bias)}: give a number.")
