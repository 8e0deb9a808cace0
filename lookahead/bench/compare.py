"""Every strategy and peer on a real model. In: prompts and contenders. Out: tokens/s, EDL, and whether outputs are the same.

All contenders answer the same prompts in the same run, a turn after the other: one prompt, or 4 B where B are decoded at once.
Within a turn they advance side by side, a few tokens at a time, so that what slows a shared machine slows all alike; peers
cannot be interrupted. The first prompts are run once and not counted, nor is a forward of each size, as kernels are compiled
for each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lookahead.bench.contenders import PLAIN, ModelBench
from lookahead.bench.lossless import Lossless, lossless
from lookahead.bench.run import Run, Sample, StepLog, progress
from lookahead.budget.shapes import bucket
from lookahead.decode.engine import Clock, DecodingEngine, Generation
from lookahead.decode.generation_config import generate_alone, generation_config
from lookahead.decode.sampling import GREEDY
from lookahead.draft.counts import summed
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import chain, side_by_side
from lookahead.errors import LookaheadError
from lookahead.forward.backend import QUANTIZED
from lookahead.forward.memory import gc_frozen, peak_memory
from lookahead.forward.processor import processor_name
from lookahead.forward.slots import slots_of
from lookahead.forward.target import TargetModel
from lookahead.models.exact import tried_for_exactness
from lookahead.trie.file import Trie
from lookahead.version import __version__

Texts = Sequence[Sequence[int]]  # token ids

REFILLS = 4  # prompts of a turn for each slot, where there are several
LARGEST_WARMED = 128  # tokens of a forward
AT_A_TIME = 4  # tokens that a contender advances by before the next one does; the first step, caches being cold, takes 2 % more


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Result of a bench. repeats: of each turn. forced: the answers were given. predicted: from a cost profile."""

    model: str
    device: str
    dtype: str
    mode: str
    batch_size: int
    rows: int
    repeats: int
    forced: bool
    runs: list[Run]
    lossless: Lossless | None
    lossless_rows: int
    environment: dict[str, Any]
    predicted: bool = False

    @property
    def precision(self) -> str:
        """The dtype, and in which bits linear layers are, and keys and values, where they are quantized."""
        linear, kv_dtype = self.environment.get("linear"), self.environment.get("kv_dtype", "none")
        kept = "" if kv_dtype == "none" else f", keys and values {kv_dtype}"
        return f"{self.dtype}, {linear}{kept}" if linear in QUANTIZED else f"{self.dtype}{kept}"

    @property
    def best(self) -> Run:
        """The fastest of our drafting runs."""
        return max((run for run in self.runs if run.drafts), key=lambda run: run.speedup)

    @property
    def best_fixed(self) -> Run | None:
        """The fastest of those of a fixed decoding length."""
        return max((run for run in self.runs if run.drafts and not run.adaptive), key=lambda run: run.speedup, default=None)

    @property
    def auto(self) -> Run | None:
        """The first of those that find their own decoding length."""
        return next((run for run in self.runs if run.adaptive), None)

    def as_json(self) -> dict[str, Any]:
        """The object that `bench --json` prints."""
        fields, judged = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, self.lossless
        fields |= {"runs": [run.as_json() for run in self.runs], "lossless": judged.as_json() if judged else None}
        return {**fields, "divergences": [dataclasses.asdict(each) for each in judged.shown] if judged else []}


def as_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The object that `bench --json` prints: of one batch size, or of several."""
    found = [each.as_json() for each in comparisons]
    return found[0] if len(found) == 1 else {"batches": found}


def compare(
    target: TargetModel,
    prompts: Texts,
    bench: ModelBench,
    batch_size: int = 1,
    tries: Sequence[Trie] = (),
    weights: Sequence[float] | None = None,
    answers: Texts | None = None,
    progress: Callable[[int], None] = lambda done: None,
    warm_up: int = 2,
) -> Comparison:
    """Answer every prompt with every contender: plain decoding, each of bench.options, and with peers Hugging Face's own.

    batch_size: prompts that are decoded at once. weights: of the tries. answers: of each prompt, taken as the model's choices.
    warm_up: prompts that are answered before, and not counted. Raises LookaheadError if answers cannot be forced.
    """
    if answers is not None:
        longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        if target.decodes_plainly(longest):  # by the model's own `generate`, whose choices are its own
            why = f"the model decodes plainly ({target.reason})" if target.mode == "plain" else "of how it encodes positions"
            raise LookaheadError(f"{target.name}: answers of texts of {longest} tokens cannot be replayed on it, as {why}.")

    def request(engine: DecodingEngine, row: int) -> Generation:
        if answers is None:
            return engine.request(prompts[row], bench.max_new_tokens)
        return Generation(list(prompts[row]), len(answers[row]), frozenset(), forced=answers[row])

    def ours(name: str, option: DraftOptions, tries: Sequence[Trie]) -> Run:
        return _ours(name, DecodingEngine(target, Drafter(tries, option, weights if tries else None), batch_size), request)

    runs = [ours(PLAIN, DraftOptions(strategy="off"), ())]
    for name, option in zip(names_of_runs(bench.options), bench.options, strict=True):
        runs.append(ours(name, option, tries))
        if bench.recycling and option.recycle and option.strategy != "off":
            nothing = dataclasses.replace(option, recycle=False)
            runs.append(ours(f"{name} unrecycled", nothing, tries))
            if tries:
                runs += [ours(f"{name} cold", option, ()), ours(f"{name} cold unrecycled", nothing, ())]
    drafting = runs[1:]
    if bench.peers:
        peer = functools.partial(_peer, target, prompts, bench.max_new_tokens, batch_size, answers)
        runs.append(peer(GENERATE))
        if target.mode != "plain" and batch_size == 1:  # it takes no batches, and no model that cannot take drafts
            runs.append(peer(PROMPT_LOOKUP, prompt_lookup_num_tokens=COPIED))
    rows, before = range(len(prompts)), core_seconds()
    with gc_frozen():
        if warm_up:
            _warm_up_sizes(target)
            list(_in_turn(runs, rows[: max(warm_up, batch_size)], target.device))
        answer_all(runs, rows, batch_size, bench.repeats, target.device, progress)
    for run in runs:
        assert answers is None or run.outputs == [list(answer) for answer in answers], f"{run.name} emitted what was not logged"
    checked = bench.checked_of(len(rows)) if answers is None else 0
    outputs_of = {run.name: run.outputs[:checked] for run in drafting}
    of_target = {"linear": target.linear, "kv_dtype": target.kv_dtype, "waited_for_cores": share_waited(before)}
    judged = None
    if checked:
        judged = lossless(tried_for_exactness(target), prompts[:checked], runs[0].outputs[:checked], outputs_of)
    return Comparison(
        *(target.name, str(target.device), str(target.dtype).removeprefix("torch."), target.mode),
        *(batch_size, len(prompts), bench.repeats, answers is not None),
        runs=runs,
        lossless=judged,
        lossless_rows=checked,
        environment={**environment(target.device), **of_target},
    )


@torch.inference_mode()
def _warm_up_sizes(target: TargetModel) -> None:
    if target.mode == "plain":
        return
    slots = slots_of(target)
    slots.add([0, 0], LARGEST_WARMED)
    slots.begin(0)
    largest = min(LARGEST_WARMED, target.longest_text - 2)
    for size in sorted({bucket(size) for size in range(1, largest // 4 * 3 + 1)}):
        slots.forward(side_by_side([chain([0] * size)], ["all"])).wait()
        slots.keep([[]])


def answer_all(
    runs: Sequence[Run],
    rows: range,
    batch_size: int,
    repeats: int,
    device: torch.device | None,
    progress: Callable[[int], None],
) -> None:
    """All runs over all rows, a turn after the other, as often as asked. device: whose peak memory is noted."""
    of_a_turn = batch_size * REFILLS if batch_size > 1 else 1
    for repeat in range(repeats):
        for run in runs:
            run.forget()  # what was answered before, to warm up too, must not draft itself
        for number, start in enumerate(rows[::of_a_turn]):
            chunk, first = rows[start : start + of_a_turn], (number + repeat) % len(runs)
            for run, done in _in_turn((*runs[first:], *runs[:first]), chunk, device):
                run.add(number, done)
            progress(repeat * len(rows) + chunk[-1] + 1)
    for run in runs:
        run.settle(runs[0])


def _in_turn(runs: Sequence[Run], rows: Sequence[int], device: torch.device | None) -> Iterator[tuple[Run, Sample]]:
    """All runs over the same rows, side by side; yields each as it ends."""
    pending = {run: run.answer(rows) for run in runs}
    peaks, reached = dict.fromkeys(runs, 0), dict.fromkeys(runs, 0)
    for goal in itertools.count(AT_A_TIME, AT_A_TIME):
        for run in [run for run in pending if reached[run] < goal]:
            if device and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            item = next(item for item in pending[run] if isinstance(item, Sample) or item >= goal)
            peaks[run] = max(peaks[run], peak_memory(device) if device else 0)
            if isinstance(item, Sample):
                item.peak_memory_bytes = peaks[run]
                del pending[run]
                yield run, item
            else:
                reached[run] = item
        if not pending:
            return


def environment(device: torch.device) -> dict[str, Any]:
    import transformers

    value = {"lookahead": __version__, "python": platform.python_version(), "torch": torch.__version__}
    value |= {"transformers": transformers.__version__, "system": f"{platform.system()} {platform.machine()}"}
    return {**value, "processor": processor_name(device), "threads": torch.get_num_threads()}


def core_seconds() -> tuple[float, float]:
    """Seconds that this process's threads have run, and those that they have waited for a core, by Linux; zeros elsewhere."""
    ran = waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # a thread that has ended
            of_thread = path.read_text().split()
            ran, waited = ran + int(of_thread[0]), waited + int(of_thread[1])
    return ran / 1e9, waited / 1e9


def share_waited(before: tuple[float, float]) -> float:
    """Return the share of the time since then in which threads had work and waited, as other processes took their cores."""
    ran, waited = (max(0.0, now - then) for now, then in zip(core_seconds(), before, strict=True))
    return round(waited / (ran + waited), 4) if ran + waited else 0.0


def names_of_runs(options: Sequence[DraftOptions]) -> list[str]:
    """ "auto", "single 16"; where branch lengths differ they stand behind it: "single 16/8"."""
    lengths = {option.branch_length for option in options if not option.adaptive}
    names = []
    for option in options:
        branch = f"/{option.branch_length}" if len(lengths) > 1 else ""
        usual = "auto" if option.strategy == "hierarchical" else f"{option.strategy} auto"
        names.append(usual if option.adaptive else f"{option.strategy} {option.decoding_length}{branch}")
    return names


def _ours(name: str, engine: DecodingEngine, request: Callable[[DecodingEngine, int], Generation]) -> Run:
    def answer(rows: Sequence[int]) -> Iterator[int | Sample]:
        now, seconds = engine.target.now, 0.0
        began = now()
        engine.clock = log = StepLog()
        generations = [request(engine, row) for row in rows]
        for generation in generations:
            generation.observer = log.see
        for ended in engine.steps(iter(generations)):
            seconds += now() - began
            for generation in ended:
                if generation.error:
                    raise generation.error
            yield progress(sum(len(generation.token_ids) for generation in generations), log.prefilled)
            began = now()
        seconds += now() - began
        offered, accepted = log.by_depth()
        outputs, counts = [generation.token_ids for generation in generations], vars(summed(generations))
        clock = Clock(log.draft, log.forward, log.verify, log.steps, log.prefilled)
        yield Sample(outputs, seconds, log.steps, offered, accepted, clock, log.decode_forwards, **counts)

    return Run(name, engine.drafter.options, answer, engine.forget)


GENERATE, PROMPT_LOOKUP = "model.generate", "HF prompt lookup"
COPIED = 10  # tokens that prompt lookup drafts at most


class Watcher:
    """A forward hook: counts forwards and drafted tokens, forces answers. width: padded prompts. forced: [rows, positions]."""

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
    target: TargetModel,
    prompts: Texts,
    max_new_tokens: int,
    batch_size: int,
    answers: Texts | None,
    name: str,
    **arguments: Any,
) -> Run:
    """Shorter prompts are padded at the left. A row's steps are one a token, or with drafts the forwards after the first."""
    ends = target.eos_token_ids
    padding = min(ends, default=0)

    @torch.inference_mode()
    def generate(rows: Sequence[int], most: int) -> Sample:
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
            stops = [next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids)) for ids in emitted]
            outputs = [ids[:stop] for ids, stop in zip(emitted, stops, strict=True)]  # without padding
        steps = watcher.forwards - 1 if arguments else sum(len(output) - 1 for output in outputs)
        drafted = watcher.draft_tokens if arguments else 0
        accepted = sum(map(len, outputs)) - watcher.forwards if arguments else 0  # each forward gives one more than that
        return Sample(outputs, seconds, watcher.forwards, steps=steps, draft_tokens=drafted, accepted_tokens=accepted)

    def room(row: int) -> int:
        return min(max_new_tokens, target.longest_text - len(prompts[row]))

    def answer(rows: Sequence[int]) -> Iterator[int | Sample]:
        whole = Sample()
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            if answers is not None:
                whole.take(generate(batch, max(len(answers[row]) for row in batch)))
            else:
                for most, alike in itertools.groupby(batch, room):  # one limit holds for all rows of a batch
                    whole.take(generate(list(alike), most))
            yield progress(whole.tokens, sum(len(prompts[row]) for row in rows[: start + batch_size]))
        yield whole

    return Run(name, None, answer, lambda: None)


def _forced(answers: Texts, longest: int, target: TargetModel) -> torch.Tensor:
    """int64 [rows, positions]: the answers, and zeros behind them for positions that are cut off."""
    width = longest + COPIED + 1
    return torch.tensor([[*answer, *[0] * (width - len(answer))] for answer in answers], device=target.device)
