"""Options of a job that limit and shape answers: how tokens are chosen, and the constraints. See spec.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead.options import OptionGroup, option


@dataclass(frozen=True)
class SamplingOptions(OptionGroup):
    """How tokens are chosen, where a row's "params" set nothing else."""

    max_new_tokens: int = option(256, "Maximum tokens per answer.", least=1, metavar="N", changes_answers=True)
    min_new_tokens: int | None = option(
        None,
        "Minimum tokens before an end-of-sequence or stop token may end an answer.",
        least=0,
        metavar="N",
        changes_answers=True,
    )
    sampling: str = option(
        "greedy",
        "If no temperature is given: greedy (the most probable token), or model: do_sample, temperature, top_k, top_p and "
        "similar settings of the model's generation config.",
        metavar="NAME",
        changes_answers=True,
    )
    temperature: float | None = option(
        None, "0: always the most probable token (greedy); above 0: sample.", least=0, metavar="T", changes_answers=True
    )
    top_k: int | None = option(
        None, "Sample from the K most probable tokens; 0: from all tokens.", least=0, metavar="K", changes_answers=True
    )
    top_p: float | None = option(
        None, "Sample from the smallest set of tokens whose probabilities sum to P.", metavar="P", changes_answers=True
    )
    min_p: float | None = option(
        None, "Sample from tokens at least P times as probable as the best one.", metavar="P", changes_answers=True
    )
    typical_p: float | None = option(
        None,
        "Sample from the most typical tokens whose probabilities sum to P (typical decoding).",
        metavar="P",
        changes_answers=True,
    )
    repetition_penalty: float | None = option(
        None, "Values above 1 make repeated tokens less likely.", metavar="R", changes_answers=True
    )
    frequency_penalty: float = option(
        0.0, "Subtracted from a token's score for each time it occurs in the answer.", metavar="F", changes_answers=True
    )
    presence_penalty: float = option(
        0.0, "Subtracted from a token's score if it occurs in the answer.", metavar="F", changes_answers=True
    )
    no_repeat_ngram_size: int | None = option(
        None, "No sequence of N tokens occurs twice; 0: off.", least=0, metavar="N", changes_answers=True
    )
    stop: Sequence[str] | None = option(
        None, "End an answer after this text; repeat for several.", metavar="TEXT", changes_answers=True
    )
    include_stop: bool = option(
        True,
        "Whether a stop text is part of the answer. OpenAI lines always end before it.",
        flags=("--include-stop/--no-include-stop",),
        changes_answers=True,
    )
    stop_token_ids: Sequence[int] | None = option(
        None, "Also end an answer after this token; repeat for several.", metavar="ID", changes_answers=True
    )
    bad_words: Sequence[str] | None = option(
        None, "Text whose sequence of tokens is never generated; repeat for several.", metavar="TEXT", changes_answers=True
    )
    bad_words_ids: Sequence[str] | None = option(
        None, "The same as a sequence of token ids, such as 17,4; repeat for several.", metavar="ID[,ID]", changes_answers=True
    )
    logit_bias: Sequence[str] | None = option(
        None, "Add B to the score of a token, such as 17=-5; repeat for several.", metavar="ID=B", changes_answers=True
    )
    samples: int = option(
        1, "Answers to each prompt.", flags=("--samples", "-n"), least=1, most=1024, metavar="N", changes_answers=True
    )
    seed: int = option(
        0,
        "Random seed; combined with each row's id, so that results do not depend on the order of rows.",
        metavar="N",
        changes_answers=True,
    )


@dataclass(frozen=True)
class Constraints(OptionGroup):
    """What answers must look like: one of these, or nothing."""

    json_schema: str | None = option(
        None, "Answers are JSON that validates against the schema in FILE.", metavar="FILE", changes_answers=True, is_file=True
    )
    regex: str | None = option(
        None, "Answers match this regular expression, as a whole.", metavar="REGEX", changes_answers=True
    )
    choice: Sequence[str] | None = option(
        None, "Answers are one of these texts; repeat for each.", metavar="TEXT", changes_answers=True
    )
    grammar: str | None = option(
        None,
        "Answers keep to the grammar in FILE: Lark (start: ...) or EBNF (root ::= ...).",
        metavar="FILE",
        changes_answers=True,
        is_file=True,
    )
