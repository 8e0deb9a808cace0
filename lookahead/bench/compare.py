"""Every strategy and peer on a real model. In: prompts and contenders. Out: tokens/s, EDL, and whether outputs are the same.

All contenders answer the same prompts in the same run, in turn, so that a machine that slows down slows all of them. A turn is
one prompt; where B are decoded at once it is up to 4 B, so that slots are filled again. Each contender keeps its own memory of
the job. The first prompts are run once beforehand and not counted.

Where answers are given, they are taken as the model's choices (forced): what is drafted, accepted and computed is real.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

import lookahead
from lookahead.bench.lossless import Lossless, lossless
from lookahead.decode.engine import Generation, LookaheadEngine
from lookahead.decode.memory import peak_memory
from lookahead.decode.model import TargetModel, processor_name
from lookahead.draft.drafter import Drafter, DraftOptions
from lookahead.errors import LookaheadError
from lookahead.trie.file import Trie

PLAIN, GENERATE, PROMPT_LOOKUP = "plain", "model.generate", "HF prompt lookup"
REFILLS = 4  # prompts of a turn for each slot at most, where there are several


@dataclasses.dataclass
class Run:
    """One contender over all prompts.

    answer: token ids for each of some rows of the prompts. outputs: of all rows. steps: summed over rows. forwards: of the
    model, several rows in one; not counted for peers. speedup: tokens/s over those of plain decoding.
    """

    name: str
    strategy: str
    answer: Callable[[Sequence[int]], list[list[int]]] = dataclasses.field(repr=False)
    forget: Callable[[], None] = dataclasses.field(repr=False)  # drop what earlier answers left in memory
    outputs: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    forwards: int = 0
    draft_tokens: int = 0
    accepted_by_source: Counter[str] = dataclasses.field(default_factory=Counter)
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    speedup: float = 1.0
    peak_memory_bytes: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def edl(self) -> float:
        return (self.tokens - len(self.outputs)) / self.steps if self.steps else 0.0

    def as_json(self) -> dict[str, Any]:
        """One entry of "runs" in the JSON of `bench`."""
        return {
            "name": self.name,
            "strategy": self.strategy,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "steps": self.steps,
            "forwards": self.forwards,
            "edl": round(self.edl, 4),
            "speedup": round(self.speedup, 4),
            "peak_memory_bytes": self.peak_memory_bytes,
            "draft_tokens": self.draft_tokens,
            "accepted_by_source": dict(self.accepted_by_source),
            "draft_seconds": round(self.draft_seconds, 4),
            "forward_seconds": round(self.forward_seconds, 4),
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `bench` reports.

    forced: the answers were given. predicted: from a cost profile. lossless: None where it was not checked.
    """

    model: str
    device: str
    dtype: str
    mode: str
    batch_size: int
    rows: int
    forced: bool
    runs: list[Run]
    lossless: Lossless | None
    environment: dict[str, Any]
    predicted: bool = False

    def as_json(self) -> dict[str, Any]:
        """The object that `bench --json` prints."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["runs"] = [run.as_json() for run in self.runs]
        fields["lossless"] = self.lossless.as_json() if self.lossless else None
        fields["divergences"] = [dataclasses.asdict(each) for each in self.lossless.shown] if self.lossless else []
        return fields


def as_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The object that `bench --json` prints: of one batch size, or of several."""
    if len(comparisons) == 1:
        return comparisons[0].as_json()
    return {"batches": [each.as_json() for each in comparisons]}


def compare(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    tries: Sequence[Trie],
    options: Sequence[DraftOptions],
    max_new_tokens: int = 256,
    peers: bool = True,
    check_lossless: bool = True,
    warm_up: int = 2,
    progress: Callable[[int], None] = lambda done: None,
    weights: Sequence[float] | None = None,
    batch_size: int = 1,
    answers: Sequence[Sequence[int]] | None = None,
) -> Comparison:
    """Answer every prompt with every contender: plain decoding, each of `options`, and with `peers` Hugging Face's own.

    weights: of the tries, see `Drafter`. batch_size: prompts that are decoded at once; Hugging Face prompt lookup, which takes
    no batches, runs at 1 only. answers: of each prompt, taken as the model's choices; there are no peers then, and nothing
    that could differ. Raises LookaheadError if they cannot be: the model decodes plainly.
    """
    request: Request = functools.partial(_to_be_answered, prompts, max_new_tokens)
    if answers is not None:
        request, peers, check_lossless = functools.partial(_to_be_forced, prompts, answers), False, False
        _check_forcible(target, prompts, answers)
    off = DraftOptions(strategy="off")
    runs = [_ours(PLAIN, LookaheadEngine(target, Drafter((), off), batch_size), request)]
    runs += [_ours(_name_of(o), LookaheadEngine(target, Drafter(tries, o, weights), batch_size), request) for o in options]
    ours = runs[1:]
    if peers:
        runs += [_peer(GENERATE, target, prompts, max_new_tokens, batch_size)]
        if target.mode != "plain" and batch_size == 1:
            runs += [_peer(PROMPT_LOOKUP, target, prompts, max_new_tokens, prompt_lookup_num_tokens=10)]
    rows = range(len(prompts))
    for run in runs:
        run.answer(rows[: max(warm_up, batch_size)] if warm_up else [])
        run.forget()  # a warm-up answer must not draft itself
        run.steps = run.forwards = run.draft_tokens = 0
        run.draft_seconds = run.forward_seconds = 0.0
        run.accepted_by_source.clear()
    refills = max(1, min(REFILLS, len(rows) // (batch_size * len(runs))))  # few rows are dealt out to as many turns as runs
    of_a_turn = batch_size * refills if batch_size > 1 else 1
    for number, start in enumerate(rows[::of_a_turn]):
        chunk, turn = rows[start : start + of_a_turn], number % len(runs)
        for run in (*runs[turn:], *runs[:turn]):
            if target.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(target.device)
            began = target.now()
            outputs = run.answer(chunk)
            run.seconds += target.now() - began
            run.outputs += outputs
            run.peak_memory_bytes = max(run.peak_memory_bytes, peak_memory(target.device))
        progress(chunk[-1] + 1)
    for run in runs:
        run.speedup = run.tokens_per_second / runs[0].tokens_per_second
        assert answers is None or run.outputs == [list(answer) for answer in answers], f"{run.name} said what was not logged"
    outputs_of = {run.name: run.outputs for run in ours}
    return Comparison(
        model=target.name,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        mode=target.mode,
        batch_size=batch_size,
        rows=len(prompts),
        forced=answers is not None,
        runs=runs,
        lossless=lossless(target, prompts, runs[0].outputs, outputs_of) if check_lossless else None,
        environment=environment(target.device),
    )


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    import transformers

    return {
        "lookahead": lookahead.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(device),
        "threads": torch.get_num_threads(),
    }


def _name_of(option: DraftOptions) -> str:
    if option.adaptive:
        return "auto" if option.strategy == "hierarchical" else f"{option.strategy} auto"
    return f"{option.strategy} {option.decoding_length}"


Request = Callable[[LookaheadEngine, int], Generation]  # for one row of the prompts


def _to_be_answered(prompts: Sequence[Sequence[int]], max_new_tokens: int, engine: LookaheadEngine, row: int) -> Generation:
    return engine.request(prompts[row], max_new_tokens)


def _to_be_forced(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], engine: LookaheadEngine, row: int
) -> Generation:
    return Generation(list(prompts[row]), len(answers[row]), frozenset(), forced=answers[row])


def _check_forcible(target: TargetModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """Raises LookaheadError if a text is left to the model's own `generate`, whose choices are its own."""
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    if target.decodes_plainly(longest):
        why = f"the model decodes plainly ({target.reason})" if target.mode == "plain" else "of how it encodes positions"
        raise LookaheadError(f"{target.name}: answers of texts of {longest} tokens cannot be replayed on it, as {why}.")


def _ours(name: str, engine: LookaheadEngine, request: Request) -> Run:
    def answer(rows: Sequence[int]) -> list[list[int]]:
        before = dataclasses.replace(engine.clock)
        generations = [request(engine, row) for row in rows]
        for generation in engine.run(generations):
            if generation.error:
                raise generation.error
            run.steps += generation.steps
            run.draft_tokens += generation.draft_tokens
            run.accepted_by_source.update(generation.accepted_by_source)
        run.forwards += engine.clock.steps - before.steps
        run.draft_seconds += engine.clock.draft - before.draft
        run.forward_seconds += engine.clock.forward - before.forward
        return [generation.token_ids for generation in generations]

    run = Run(name, engine.drafter.options.strategy, answer, engine.forget)
    return run


def _peer(
    name: str,
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int = 1,
    **arguments: Any,
) -> Run:
    """Hugging Face's own decoding, shorter prompts padded at the left.

    Steps: one a token, or with drafts the forwards after the prefill, counted by a hook.
    """
    forwards = 0
    ends = target.eos_token_ids
    padding = min(ends, default=0)

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    def room(row: int) -> int:
        return min(max_new_tokens, target.longest_text - len(prompts[row]))

    @torch.inference_mode()
    def generate(some: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        """Answers of at most `most` tokens."""
        nonlocal forwards
        forwards, width = 0, max(map(len, some))
        text = torch.tensor([[padding] * (width - len(prompt)) + list(prompt) for prompt in some], device=target.device)
        shown = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in some], device=target.device)
        handle = target.model.register_forward_pre_hook(count) if arguments else None
        try:
            output = target.model.generate(
                text, attention_mask=shown, do_sample=False, max_new_tokens=most, pad_token_id=padding, **arguments
            )
        finally:
            if handle:
                handle.remove()
        answers = [_until_end(answer, ends) for answer in output[:, width:].tolist()]
        run.steps += forwards - 1 if handle else sum(len(answer) - 1 for answer in answers)
        return answers

    def answer(rows: Sequence[int]) -> list[list[int]]:
        answers: list[list[int]] = []
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            for most, alike in itertools.groupby(batch, room):  # one limit holds for all rows of a batch
                answers += generate([prompts[row] for row in alike], most)
        return answers

    run = Run(name, "peer", answer, lambda: None)
    return run


def _until_end(token_ids: list[int], ends: frozenset[int]) -> list[int]:
    """An answer without the padding behind the token that ended it."""
    return next((token_ids[: place + 1] for place, token in enumerate(token_ids) if token in ends), token_ids)
