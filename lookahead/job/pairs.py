"""Logged answers to (prompt, response) pairs. In: a file of JSON lines. Out: token ids of each pair, for a replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lookahead.corpus import json_rows
from lookahead.errors import CorpusError


def replay_pairs(
    path: str, tokenizer: Any | None, vocab_size: int = 1 << 31, longest: int | None = None
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of logged rows {"prompt_ids", "response_ids"} or {"prompt", "response"}.

    vocab_size, longest: of the model that is to say them, which all ids must be below, and tokens of both together at most.
    Raises CorpusError naming file and line of the first row that is neither or does not fit.
    """
    for line, pair in _pairs(path, tokenizer):
        prompt, response = pair
        highest, together = max((*prompt, *response)), len(prompt) + len(response)
        if highest >= vocab_size:
            raise CorpusError(f"{path}:{line}: token id {highest} is outside the model's vocabulary of {vocab_size}.")
        if longest is not None and together > longest:
            raise CorpusError(f"{path}:{line}: prompt and response have {together} tokens, the model has {longest} positions.")
        yield pair


def _pairs(path: str, tokenizer: Any | None) -> Iterator[tuple[int, tuple[list[int], list[int]]]]:
    """Line and pair of each row."""
    if path != "-" and not Path(path).is_file():
        raise CorpusError(f"{path}: no such file.")
    found = False
    for line, row in json_rows(path):
        found = True
        if isinstance(row, str):
            raise CorpusError(f"{path}:{line}: {row}.")
        ids = [row.get("prompt_ids"), row.get("response_ids")]
        if all(isinstance(x, list) and x and all(type(t) is int and 0 <= t < 1 << 31 for t in x) for x in ids):
            yield line, (ids[0], ids[1])  # type: ignore[misc]
            continue
        texts = [row.get("prompt"), row.get("response")]
        if not all(isinstance(x, str) and x for x in texts):
            raise CorpusError(
                f'{path}:{line}: needs "prompt_ids" and "response_ids", or "prompt" and "response" '
                f"(found: {', '.join(sorted(map(str, row))) or 'nothing'})."
            )
        if tokenizer is None:
            raise CorpusError(f"{path}:{line}: holds text: name its tokenizer with --tokenizer MODEL_OR_FOLDER.")
        response: Sequence[int] = tokenizer(texts[1], add_special_tokens=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        yield line, (list(tokenizer(texts[0])["input_ids"]), [*response, *end])
    if not found:
        raise CorpusError(f"{path}: empty file.")
