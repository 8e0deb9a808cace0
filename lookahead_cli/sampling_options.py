"""Options of how tokens are chosen, and what they make. In: values of the command line. Out: a `Sampling`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead.errors import UsageError

if TYPE_CHECKING:
    from lookahead.decode.constraint import Constraint
    from lookahead.decode.sampling import Sampling

SamplingFrom = Annotated[
    str,
    typer.Option(
        "--sampling",
        metavar="NAME",
        help="Where no temperature is given: greedy (the most probable token), or model: do_sample, temperature, top_k, top_p "
        "and the like as the model's generation config has them.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=0,
        metavar="T",
        help="0: the most probable token always (greedy); above: sample.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", min=0, metavar="K", help="Sample from the K most probable tokens; 0: from all."),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Sample from the least set of tokens with this probability."),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Sample from tokens at least P times as probable as the best one."),
]
TypicalP = Annotated[
    float | None,
    typer.Option("--typical-p", metavar="P", help="Sample from the most typical tokens with this probability together."),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option("--repetition-penalty", metavar="R", help="Above 1: what was said becomes less probable.")
]
FrequencyPenalty = Annotated[
    float, typer.Option("--frequency-penalty", metavar="F", help="Off a token's score for each time it is in the answer.")
]
PresencePenalty = Annotated[
    float, typer.Option("--presence-penalty", metavar="F", help="Off a token's score once it is in the answer.")
]
NoRepeatNgramSize = Annotated[
    int | None, typer.Option("--no-repeat-ngram-size", min=0, metavar="N", help="No N tokens in a row occur twice; 0: off.")
]
MinNewTokens = Annotated[
    int | None,
    typer.Option("--min-new-tokens", min=0, metavar="N", help="Tokens before an answer may end by a token."),
]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End an answer with it; repeat for several.")]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option("--stop-token-ids", metavar="ID", help="End an answer with this token, too; repeat for several."),
]
BadWords = Annotated[
    list[str] | None,
    typer.Option("--bad-words", metavar="TEXT", help="Tokens that never follow each other, as text; repeat for several."),
]
BadWordsIds = Annotated[
    list[str] | None,
    typer.Option("--bad-words-ids", metavar="ID[,ID]", help="The same as token ids, such as 17,4; repeat for several."),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=B", help="Add B to the score of a token, such as 17=-5; repeat for several."),
]

AS_GIVEN = (
    *("sampling", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "no_repeat_ngram_size", "min_new_tokens"),
)


def sampling_of(given: Mapping[str, Any], constraint: Constraint | None) -> Sampling:
    """What rows ask for that say nothing of their own. given: the command's options by name.

    Raises UsageError for values that make no sense.
    """
    from lookahead.decode.sampling import Sampling

    fields: dict[str, Any] = {name: given[name] for name in AS_GIVEN}
    fields.update({name: tuple(given[name] or ()) for name in ("stop", "stop_token_ids", "bad_words")})
    fields["bad_words_ids"] = token_id_lists(given["bad_words_ids"])
    fields["logit_bias"] = biases(given["logit_bias"])
    return Sampling(**fields, constraint=constraint)


def check_sampling_options(given: Mapping[str, Any]) -> None:
    """Raise UsageError for what is typed wrongly, before anything is imported or read."""
    if given["sampling"] not in ("greedy", "model"):
        raise UsageError(f"--sampling {given['sampling']}: choose greedy or model.")
    token_id_lists(given["bad_words_ids"])
    biases(given["logit_bias"])


def token_id_lists(items: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """["17,4", "[5, 6]"] -> ((17, 4), (5, 6)). Raises UsageError for anything else."""
    for item in items or ():
        if not re.fullmatch(r"\[?\s*\d+(\s*,\s*\d+)*\s*\]?", item):
            raise UsageError(f"--bad-words-ids {item}: give token ids with commas between them, such as 17,4.")
    return tuple(tuple(map(int, re.findall(r"\d+", item))) for item in items or ())


def biases(items: Sequence[str] | None) -> dict[int, float]:
    """["17=-5"] -> {17: -5.0}. Raises UsageError for what is no id and number, and for an id given twice."""
    found: dict[int, float] = {}
    for item in items or ():
        token, _, value = item.partition("=")
        try:
            bias = float(value)
        except ValueError:
            bias = math.nan
        if not token.strip().isdecimal() or math.isnan(bias):
            raise UsageError(f"--logit-bias {item}: give ID=B with a token id and a number, such as 17=-5.")
        if int(token) in found:
            raise UsageError(f"--logit-bias {item}: token {token} is given twice.")
        found[int(token)] = bias
    return found
