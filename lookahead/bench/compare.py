"""Every strategy and peer on a real model. In: prompts and contenders. Out: tokens/s, EDL, and whether outputs are the same.

All contenders answer the same prompts in the same run, prompt by prompt in turn, so that a machine that slows down slows all
of them. Each contender keeps its own memory of the job. The first prompts are run once beforehand and not counted.
"""

from __future__ import annotations

import dataclasses
import platform
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

import lookahead
from lookahead.decode.engine import LookaheadEngine
from lookahead.decode.model import TargetModel
from lookahead.draft.drafter import Drafter, DraftOptions
from lookahead.trie.file import Trie

PLAIN, GENERATE, PROMPT_LOOKUP = "plain", "model.generate", "HF prompt lookup"


@dataclasses.dataclass
class Run:
    """One contender over all prompts. outputs: token ids per prompt. speedup: tokens/s over those of plain decoding."""

    name: str
    strategy: str
    answer: Callable[[Sequence[int]], list[int]] = dataclasses.field(repr=False)
    forget: Callable[[], None] = dataclasses.field(repr=False)  # drop what earlier answers left in memory
    outputs: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
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
            "edl": round(self.edl, 4),
            "speedup": round(self.speedup, 4),
            "peak_memory_bytes": self.peak_memory_bytes,
            "draft_tokens": self.draft_tokens,
            "accepted_by_source": dict(self.accepted_by_source),
            "draft_seconds": round(self.draft_seconds, 4),
            "forward_seconds": round(self.forward_seconds, 4),
        }


@dataclasses.dataclass(frozen=True)
class Lossless:
    """Outputs of all strategies against plain decoding.

    near_tie: the two tokens at the first difference score the same within rounding. different: they do not.
    """

    checked: int
    identical: int
    near_tie: int
    different: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `bench` reports."""

    model: str
    device: str
    dtype: str
    mode: str
    rows: int
    runs: list[Run]
    lossless: Lossless | None
    environment: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The object that `bench --json` prints."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["runs"] = [run.as_json() for run in self.runs]
        fields["lossless"] = dataclasses.asdict(self.lossless) if self.lossless else None
        fields["batch_size"] = 1
        return fields


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
) -> Comparison:
    """Answer every prompt with every contender: plain decoding, each of `options`, and with `peers` Hugging Face's own.

    weights: of the tries, see `Drafter`.
    """
    runs = [_ours(PLAIN, target, Drafter((), DraftOptions(strategy="off")), max_new_tokens)]
    runs += [_ours(_name_of(o), target, Drafter(tries, o, weights), max_new_tokens) for o in options]
    if peers:
        runs += [_peer(GENERATE, target, max_new_tokens)]
        if target.mode != "plain":
            runs += [_peer(PROMPT_LOOKUP, target, max_new_tokens, prompt_lookup_num_tokens=10)]
    for prompt in prompts[:warm_up]:
        for run in runs:
            run.answer(prompt)
    for run in runs:
        run.forget()  # a warm-up answer must not draft itself
        run.steps = run.draft_tokens = 0
        run.draft_seconds = run.forward_seconds = 0.0
        run.accepted_by_source.clear()
    for number, prompt in enumerate(prompts):
        turn = number % len(runs)
        for run in (*runs[turn:], *runs[:turn]):
            if target.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(target.device)
            began = time.perf_counter()
            output = run.answer(prompt)
            run.seconds += time.perf_counter() - began
            run.outputs.append(output)
            run.peak_memory_bytes = max(run.peak_memory_bytes, _peak_memory(target.device))
        progress(number + 1)
    for run in runs:
        run.speedup = run.tokens_per_second / runs[0].tokens_per_second
    ours = runs[1 : 1 + len(options)]
    return Comparison(
        model=target.name,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        mode=target.mode,
        rows=len(prompts),
        runs=runs,
        lossless=lossless(target, prompts, runs[0], ours) if check_lossless else None,
        environment=environment(target.device),
    )


def lossless(target: TargetModel, prompts: Sequence[Sequence[int]], plain: Run, others: Sequence[Run]) -> Lossless:
    """Compare token ids row by row and class each first difference."""
    identical = near_tie = different = 0
    for run in others:
        for prompt, expected, output in zip(prompts, plain.outputs, run.outputs, strict=True):
            if output == expected:
                identical += 1
            elif _is_near_tie(target, prompt, expected, output):
                near_tie += 1
            else:
                different += 1
    return Lossless(identical + near_tie + different, identical, near_tie, different)


@torch.inference_mode()
def _is_near_tie(target: TargetModel, prompt: Sequence[int], expected: list[int], output: list[int]) -> bool:
    """True if the scores of the two tokens at the first difference lie within 4 units of rounding of each other."""
    place = next((i for i, (a, b) in enumerate(zip(expected, output, strict=False)) if a != b), None)
    if place is None:
        return False  # one is a part of the other: a matter of where to stop, not of scores
    text = torch.tensor([[*prompt, *expected[:place]]], device=target.device)
    scores = target.model(input_ids=text, use_cache=False).logits[0, -1].float()
    a, b = float(scores[expected[place]]), float(scores[output[place]])
    unit = max(torch.finfo(target.dtype).eps, 1e-5) * max(1.0, abs(a), abs(b))
    return abs(a - b) <= 4 * unit


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    import transformers

    return {
        "lookahead": lookahead.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
    }


def _name_of(option: DraftOptions) -> str:
    if option.adaptive:
        return "auto" if option.strategy == "hierarchical" else f"{option.strategy} auto"
    return f"{option.strategy} {option.decoding_length}"


def _ours(name: str, target: TargetModel, drafter: Drafter, max_new_tokens: int) -> Run:
    strategy, engine = drafter.options.strategy, LookaheadEngine(target, drafter)

    def answer(prompt: Sequence[int]) -> list[int]:
        before = dataclasses.replace(engine.clock)
        generation = engine.generate(prompt, max_new_tokens)
        run.steps += generation.steps
        run.draft_tokens += generation.draft_tokens
        run.accepted_by_source.update(generation.accepted_by_source)
        run.draft_seconds += engine.clock.draft - before.draft
        run.forward_seconds += engine.clock.forward - before.forward
        return generation.token_ids

    run = Run(name, strategy, answer, drafter.forget)
    return run


def _peer(name: str, target: TargetModel, max_new_tokens: int, **arguments: Any) -> Run:
    """Hugging Face's own decoding. Steps: one a token, or with drafts the forwards after the prefill, counted by a hook."""
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    @torch.inference_mode()
    def answer(prompt: Sequence[int]) -> list[int]:
        nonlocal forwards
        forwards = 0
        text = torch.tensor([list(prompt)], device=target.device)
        room = min(max_new_tokens, target.longest_text - len(prompt))
        handle = target.model.register_forward_pre_hook(count) if arguments else None
        try:
            output = target.model.generate(
                text,
                attention_mask=torch.ones_like(text),
                do_sample=False,
                max_new_tokens=room,
                pad_token_id=min(target.eos_token_ids, default=0),
                **arguments,
            )
        finally:
            if handle:
                handle.remove()
        token_ids: list[int] = output[0, len(prompt) :].tolist()
        run.steps += (forwards if handle else len(token_ids)) - 1
        return token_ids

    run = Run(name, "peer", answer, lambda: None)
    return run


def _peak_memory(device: torch.device) -> int:
    """Bytes: of the device since the last reset, or of this process since it started."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if platform.system() == "Darwin" else used * 1024


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "CPU")
    except OSError:
        return platform.processor() or "CPU"
