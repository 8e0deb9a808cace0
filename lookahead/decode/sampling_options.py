"""Options of token selection, as a command line, job.yaml and Python have them. See `Sampling` for what they mean."""

from __future__ import annotations

from dataclasses import dataclass

from lookahead.options import option


@dataclass(frozen=True)
class SamplingFields:
    """Part of `Sampling` and of a job's options. None: what `sampling` sets, see there."""

    temperature: float | None = option(None, "0: always the most probable token (greedy); above 0: sample.", "T", least=0)
    top_k: int | None = option(None, "Sample from the K most probable tokens; 0: from all tokens.", "K", least=0)
    top_p: float | None = option(None, "Sample from the smallest set of tokens whose probabilities sum to P.", "P")
    min_p: float | None = option(None, "Sample from tokens at least P times as probable as the best one.", "P")
    typical_p: float | None = option(
        None, "Sample from the most typical tokens whose probabilities sum to P (typical decoding).", "P"
    )
    repetition_penalty: float | None = option(None, "Values above 1 make repeated tokens less likely.", "R")
    frequency_penalty: float = option(0.0, "Subtracted from a token's score for each time it occurs in the answer.", "F")
    presence_penalty: float = option(0.0, "Subtracted from a token's score if it occurs in the answer.", "F")
    no_repeat_ngram_size: int | None = option(None, "No sequence of N tokens occurs twice; 0: off.", "N", least=0)
