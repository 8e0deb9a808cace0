"""The loop of lookahead decoding (arXiv 2312.12728). In: prompt ids. Out: the tokens plain decoding gives, step by step.

Prefill, then in turn: draft, forward, verify and accept, keep what was accepted, tell the drafter (`LookaheadEngine._decode`).
Limits and counting stand in `Generation`.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from lookahead.budget.goodput import GoodputBudget
from lookahead.decode.model import TargetModel
from lookahead.decode.verify import Accepted, Processor, verify_and_accept
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import Observer, Step
from lookahead.draft.tree import DraftTree, root_only
from lookahead.errors import LookaheadError

FinishReason = Literal["", "stop", "length"]


@dataclasses.dataclass
class Generation:
    """One request, running or finished.

    token_ids: the output, the end-of-sequence token included. finish_reason: "" while it runs.
    steps: forwards after the prefill. draft_tokens, accepted_tokens: guessed and right, summed over steps;
    accepted_by_source: the latter by who guessed.
    seconds: wall time; draft_seconds and forward_seconds (prefill and verification) are parts of it.
    observer: is told what each decode step drafted and accepted.
    """

    prompt_tokens: int
    room: int  # new tokens at most
    eos_token_ids: frozenset[int]
    observer: Observer | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason = ""
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_source: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: float = 0.0
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0

    @property
    def edl(self) -> float:
        """Effective decoding length: tokens per decode step. The first token comes from the prefill and is not counted."""
        return (len(self.token_ids) - 1) / self.steps if self.steps else 0.0

    def add(self, token_ids: list[int]) -> list[int]:
        """Take tokens up to the limit or the first end-of-sequence id, where plain decoding ends too; returns those taken."""
        taken = token_ids[: self.room - len(self.token_ids)]
        for place, token in enumerate(taken):
            if token in self.eos_token_ids:
                taken = taken[: place + 1]
                self.finish_reason = "stop"
                break
        self.token_ids += taken
        if not self.finish_reason and len(self.token_ids) >= self.room:
            self.finish_reason = "length"
        return taken

    def count(self, tree: DraftTree, accepted: Accepted, taken: int, source_names: Sequence[str]) -> None:
        """Add one step to the counts. taken: tokens of it that made it into the output."""
        self.steps += 1
        self.draft_tokens += tree.draft_tokens
        for node in accepted.nodes[1 : taken + 1]:
            self.accepted_tokens += 1
            source = tree.sources[node]
            self.accepted_by_source[source_names[source] if source >= 0 else "given"] += 1


class LookaheadEngine:
    """Decodes one request after the other; what they say is remembered by the drafter."""

    def __init__(self, target: TargetModel, drafter: Drafter):
        self.target = target
        self.drafter = drafter
        self.budget = GoodputBudget(drafter.options.decoding_length) if drafter.options.adaptive else None
        if target.mode == "chain":
            drafter.restrict_to_chains()

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int = 256, observer: Observer | None = None) -> Generation:
        """The greedy continuation of `prompt_ids`, until an end-of-sequence id or for `max_new_tokens`.

        observer: is told what was drafted and accepted in each step.
        Raises LookaheadError for an empty prompt, one that leaves no room in the model's positions, or unknown ids.
        """
        generation = self.request(prompt_ids, max_new_tokens)
        generation.observer = observer
        for _ in self.stream(prompt_ids, generation):
            pass
        return generation

    def request(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Generation:
        """A request that has not begun. Raises LookaheadError as `generate` does."""
        target = self.target
        if not prompt_ids:
            raise LookaheadError("the prompt is empty.")
        unknown = [t for t in prompt_ids if not 0 <= t < target.vocab_size]
        if unknown:
            raise LookaheadError(f"prompt token id {unknown[0]} is outside the model's vocabulary of {target.vocab_size}.")
        room = min(max_new_tokens, target.longest_text - len(prompt_ids))
        if room < 1:
            raise LookaheadError(
                f"the prompt has {len(prompt_ids)} tokens and the model has {target.longest_text} positions: "
                "no room for an answer."
            )
        return Generation(len(prompt_ids), room, target.eos_token_ids)

    @torch.inference_mode()
    def stream(self, prompt_ids: Sequence[int], generation: Generation) -> Iterator[list[int]]:
        """Yields the new tokens of each step and keeps `generation` up to date."""
        start = time.perf_counter()
        text = torch.tensor([list(prompt_ids)], device=self.target.device)
        crosses = len(prompt_ids) + generation.room > self.target.rope_changes_at
        decode = self._plain if self.target.mode == "plain" or crosses else self._decode
        for token_ids in decode(text, generation):
            generation.seconds = time.perf_counter() - start
            yield token_ids

    def _decode(self, text: torch.Tensor, generation: Generation) -> Iterator[list[int]]:
        target, drafter = self.target, self.drafter
        processor = greedy_processor(target, text.shape[1])
        sequence = target.sequence(text.shape[1] + generation.room + drafter.options.decoding_length)
        prompt, names = text[0].tolist(), drafter.source_names
        row = drafter.start(prompt)
        try:
            began = time.perf_counter()
            scores = sequence.prefill(text)
            accepted = verify_and_accept(root_only(int(text[0, -1])), scores, processor, text)
            generation.forward_seconds += time.perf_counter() - began
            taken = generation.add(accepted.token_ids)
            row.accept(taken)
            yield taken
            while not generation.finish_reason:
                began = time.perf_counter()
                length = self.budget.decoding_length() if self.budget else drafter.options.decoding_length
                tree = row.draft(length - 1, branch_length=generation.room - len(generation.token_ids) - 1)
                drafted = time.perf_counter()
                logits = sequence.forward(tree)
                if processor:
                    text = torch.cat([text, torch.tensor([taken], device=text.device)], dim=1)
                accepted = verify_and_accept(tree, logits, processor, text)
                sequence.keep(accepted.nodes)
                verified = time.perf_counter()
                generation.draft_seconds += drafted - began
                generation.forward_seconds += verified - drafted
                if self.budget:
                    self.budget.observe(len(tree), accepted.nodes, verified - drafted, verified - began)
                taken = generation.add(accepted.token_ids)
                generation.count(tree, accepted, len(taken), names)
                if generation.observer:
                    told = Step.of(generation.steps, prompt, generation.token_ids, tree, accepted.nodes, taken, names)
                    generation.observer(told)
                row.accept(taken)
                yield taken
        finally:
            row.finish()

    def _plain(self, text: torch.Tensor, generation: Generation) -> Iterator[list[int]]:
        """The model's own `generate`, for models whose state cannot be rolled back."""
        output = self.target.model.generate(
            text,
            attention_mask=torch.ones_like(text),
            do_sample=False,
            max_new_tokens=generation.room,
            pad_token_id=next(iter(generation.eos_token_ids), 0),
        )
        taken = generation.add(output[0, text.shape[1] :].tolist())
        generation.steps = len(taken) - 1
        yield taken


def greedy_processor(target: TargetModel, prompt_length: int) -> Processor | None:
    """What the model's generation config asks greedy decoding to do to scores (repetition penalty, ...); None: nothing."""
    config = copy.deepcopy(target.model.generation_config)
    config.do_sample = False
    config.max_length = None
    if config.eos_token_id is None:
        config.eos_token_id = sorted(target.eos_token_ids) or None
    target.model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=target.device)
    processors = target.model._get_logits_processor(config, input_ids_seq_length=prompt_length, device=target.device)
    return processors or None
