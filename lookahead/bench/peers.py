"""Hugging Face's own decoding as contenders of a bench. In: a model and prompts. Out: runs like ours.

Where answers are given, a hook behind the model's forward raises the score of each logged token above all others, at all
positions at once. (A logits processor is asked by prompt lookup for each token that it finds: one that forbids all but the
logged token would keep it from drafting anything wrong.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lookahead.bench.run import Run, Turn, progress
from lookahead.decode.generation_config import generate_alone, generation_config
from lookahead.decode.sampling import GREEDY
from lookahead.draft.counts import summed
from lookahead.forward.target import TargetModel

GENERATE, PROMPT_LOOKUP = "model.generate", "HF prompt lookup"
COPIED = 10  # tokens that prompt lookup drafts at most

Ids = Sequence[int]


def peers_of(
    target: TargetModel, prompts: Sequence[Ids], max_new_tokens: int, batch_size: int, answers: Sequence[Ids] | None
) -> list[Run]:
    """`model.generate`, and prompt lookup where it can run: it takes no batches. answers: taken as the model's choices."""
    runs = [_peer(GENERATE, target, prompts, max_new_tokens, batch_size, answers)]
    if target.mode != "plain" and batch_size == 1:
        runs.append(_peer(PROMPT_LOOKUP, target, prompts, max_new_tokens, 1, answers, prompt_lookup_num_tokens=COPIED))
    return runs


class Watcher:
    """A hook behind the model's forward: counts forwards and the tokens they drafted, and forces answers if there are any.
    width: tokens of the padded prompts. forced: [rows, positions]. cache: its name in the model's output.
    """

    def __init__(self, width: int, forced: torch.Tensor | None, cache: str):
        self.forwards = self.draft_tokens = 0
        self._width = width
        self._cache = cache
        self._forced = forced
        if forced is not None:
            self._rows = torch.arange(forced.shape[0], device=forced.device)[:, None]
            self._positions = torch.arange(forced.shape[1], device=forced.device)

    def __call__(self, model: Any, _: Any, arguments: dict[str, Any], output: Any) -> None:
        length = output[self._cache].get_seq_length()  # of the text, what is drafted included
        self.draft_tokens += length - self._width if self.forwards == 0 else arguments["input_ids"].shape[1] - 1
        self.forwards += 1
        if self._forced is not None:
            positions = min(output.logits.shape[1], length - self._width + 1)
            first = length - self._width + 1 - positions  # of the answer, that the first of these scores choose
            scores = output.logits[:, output.logits.shape[1] - positions :]
            scores[self._rows, self._positions[:positions], self._forced[:, first : first + positions]] = torch.inf


def _peer(
    name: str,
    target: TargetModel,
    prompts: Sequence[Ids],
    max_new_tokens: int,
    batch_size: int,
    answers: Sequence[Ids] | None,
    **arguments: Any,
) -> Run:
    """Shorter prompts are padded at the left. A row's steps are one a token, or with drafts the forwards after the first."""
    ends = target.eos_token_ids
    padding = min(ends, default=0)

    @torch.inference_mode()
    def generate(rows: Sequence[int], most: int) -> Turn:
        """Answers of at most `most` tokens, decoded at once."""
        some, began = [prompts[row] for row in rows], target.now()
        width = max(map(len, some))
        text = torch.tensor([[padding] * (width - len(prompt)) + list(prompt) for prompt in some], device=target.device)
        shown = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in some], device=target.device)
        forced = _forced([answers[row] for row in rows], most, target) if answers is not None else None
        watcher = Watcher(width, forced, target.state_name)
        config = generation_config(target, GREEDY, width, most)
        config.pad_token_id = padding
        if answers is not None:
            config.eos_token_id = None
        config.update(**arguments)
        watched = arguments or answers is not None
        handle = target.model.register_forward_hook(watcher, with_kwargs=True) if watched else None
        try:
            output = generate_alone(target, config, inputs=text, attention_mask=shown)
        finally:
            if handle:
                handle.remove()
        emitted = output[:, width:].tolist()
        seconds = target.now() - began
        if answers is not None:
            outputs = [ids[: len(answers[row])] for row, ids in zip(rows, emitted, strict=True)]
        else:
            outputs = [_until_end(ids, ends) for ids in emitted]
        steps = watcher.forwards - 1 if arguments else sum(len(output) - 1 for output in outputs)
        drafted = watcher.draft_tokens if arguments else 0
        accepted = sum(map(len, outputs)) - watcher.forwards if arguments else 0  # each forward gives one more than that
        return Turn(outputs, seconds, watcher.forwards, steps=steps, draft_tokens=drafted, accepted_tokens=accepted)

    def room(row: int) -> int:
        return min(max_new_tokens, target.longest_text - len(prompts[row]))

    def answer(rows: Sequence[int]) -> Iterator[int | Turn]:
        parts: list[Turn] = []
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            if answers is not None:
                parts.append(generate(batch, max(len(answers[row]) for row in batch)))
            else:
                for most, alike in itertools.groupby(batch, room):  # one limit holds for all rows of a batch
                    parts.append(generate(list(alike), most))
            yield progress(sum(part.tokens for part in parts), sum(len(prompts[row]) for row in rows[: start + batch_size]))
        outputs = [output for part in parts for output in part.outputs]
        seconds, forwards = sum(part.seconds for part in parts), sum(part.forwards for part in parts)
        yield Turn(outputs, seconds, forwards, **vars(summed(parts)))

    return Run(name, None, answer, lambda: None)


def _forced(answers: Sequence[Ids], longest: int, target: TargetModel) -> torch.Tensor:
    """int64 [rows, positions]: the answers, and zeros behind them for positions that are cut off."""
    width = longest + COPIED + 1
    return torch.tensor([[*answer, *[0] * (width - len(answer))] for answer in answers], device=target.device)


def _until_end(token_ids: list[int], ends: frozenset[int]) -> list[int]:
    """An answer without the padding behind the token that ended it."""
    return next((token_ids[: index + 1] for index, token in enumerate(token_ids) if token in ends), token_ids)
