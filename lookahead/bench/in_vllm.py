"""A bench inside vLLM. In: prompts, and ways to draft. Out: plain vLLM against its own ways to draft and ours.

All engines are in memory at once and answer the same rows in turn: a prompt each, or, where B are decoded at once, 4 B, so that
slots are filled again as in a long job. A turn is not interrupted, as our drafts are sized by the time between two steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from lookahead.bench.compare import PLAIN, REFILLS, Comparison, environment
from lookahead.bench.events import BenchEvents
from lookahead.bench.lossless import Lossless, lossless
from lookahead.bench.on_model import answerable
from lookahead.bench.run import Run, Turn
from lookahead.draft.counts import summed
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError, UsageError, first_line
from lookahead.forward.memory import untidied
from lookahead.job.drafting import draft_options, open_tries, trie_weights
from lookahead.job.engines import InEngine, in_engine
from lookahead.job.rows import read_requests
from lookahead.job.spec import SESSION_TOKENS

if TYPE_CHECKING:
    from lookahead.engines.vllm_engine import VllmSettings
    from lookahead.trie.file import Trie

STRATEGIES = ("auto", "single")
DECODING_LENGTH = 9  # of a row in a forward: a chain is saturated at 8 to 15 draft tokens
OWN: dict[str, dict[str, Any]] = {  # vLLM's own ways to draft: speculative configs
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix"},
}
NEEDS = {"suffix": "arctic_inference"}  # package of one of them


@dataclasses.dataclass(frozen=True)
class Contender:
    """name: of its run. options: how we draft; None: vLLM's own way `own`, a speculative config. draft_tokens: at most."""

    name: str
    options: DraftOptions | None
    draft_tokens: int
    own: dict[str, Any] | None = None


def contenders(
    strategy: str | None = None,
    decoding_length: str | None = None,
    branch_length: str | None = None,
    session_tokens: int = SESSION_TOKENS,
    price: float = 0.0,
    peers: bool = True,
) -> list[Contender]:
    """Plain decoding, vLLM's own ways to draft that are installed, ours. Strategies and lengths as typed, several with commas.

    Raises UsageError for what vLLM does not have.
    """
    names = list(dict.fromkeys(strategy.split(","))) if strategy else list(STRATEGIES)
    for name in names:
        if name not in STRATEGIES:
            raise UsageError(f"--strategy {name}: vLLM verifies single branches. Choose from {', '.join(STRATEGIES)}.")
    lengths = list(dict.fromkeys((decoding_length or str(DECODING_LENGTH)).split(",")))
    branch = branch_length or "64"
    if not branch.isdecimal() or not 1 <= int(branch) <= 1024:
        raise UsageError(f"--branch-length {branch}: give a number of tokens from 1 to 1024.")
    found: dict[str, Contender] = {}
    for name in names:
        for length in lengths:
            number = str(DECODING_LENGTH) if length == "auto" else length
            typed = draft_options("single", number, int(branch), session_tokens, price, recycle=False)
            drafted = min(typed.branch_length, max(1, typed.decoding_length - 1))
            adaptive = name == "auto" or length == "auto"
            options = dataclasses.replace(typed, decoding_length=drafted + 1, branch_length=drafted, adaptive=adaptive)
            label = ("auto" if len(lengths) == 1 else f"auto {number}") if adaptive else f"single {number}"
            found[label] = Contender(label, options, drafted)
    ours, most = list(found.values()), max(each.draft_tokens for each in found.values())
    own = [Contender(name, None, most, config) for name, config in OWN.items()] if peers else []
    return [Contender(PLAIN, DraftOptions("off"), 0), *filter(_installed, own), *ours]


def _installed(contender: Contender) -> bool:
    package = NEEDS.get(contender.name)
    return package is None or importlib.util.find_spec(package) is not None


@dataclasses.dataclass(frozen=True)
class VllmBench:
    """A model in vLLM, and what is compared on it. engine_args: of vLLM, by name. Others as of `on_model.ModelBench`."""

    model: str
    contenders: Sequence[Contender]
    batch_sizes: Sequence[int] = (1,)
    dtype: str = "auto"
    repeats: int = 1
    lossless_rows: int | None = 64
    revision: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    engine_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    def settings(self, contender: Contender, tries: Sequence[str], weights: Sequence[float], batch_size: int) -> VllmSettings:
        """What vLLM is started with for a contender."""
        from lookahead.engines.vllm_engine import VllmSettings

        return VllmSettings(
            self.model,
            tuple(tries),
            tuple(weights),
            contender.options or DraftOptions("off"),
            contender.draft_tokens,
            self.dtype,
            batch_size,
            self.trust_remote_code,
            self.revision,
            self.tokenizer,
            self.engine_args,
            contender.own,
            len(self.contenders),
        )


def bench_in_vllm(
    bench: VllmBench,
    path: str,
    tries: Sequence[str] = (),
    weights: Sequence[str] | None = None,
    max_new_tokens: int = 256,
    rows: int | None = None,
    events: BenchEvents | None = None,
) -> tuple[list[Comparison], list[str]]:
    """As `on_model.bench_prompts`. Raises LookaheadError if vLLM, the model or a trie cannot be used, or no row be answered."""
    events = events or BenchEvents()
    requests = list(islice(read_requests(path), rows))
    opened = open_tries(tries)
    of_each = trie_weights(weights, [opened])[0]
    found, failed = [], list[str]()
    for size in bench.batch_sizes:
        start = functools.partial(_started, bench, tries, opened, of_each, size, events)
        with _running(bench, start, events) as engines:
            prompts, failed = answerable(requests, engines[PLAIN], path, max_new_tokens)
            found.append(_measured(bench, engines, prompts, max_new_tokens, size, events))
    return [dataclasses.replace(each, lossless=_judged(bench, each, prompts)) for each in found], failed


def _started(
    bench: VllmBench,
    tries: Sequence[str],
    opened: Sequence[Trie],
    weights: Sequence[float],
    batch_size: int,
    events: BenchEvents,
    contender: Contender,
) -> InEngine:
    return in_engine("vllm", bench.settings(contender, tries, weights, batch_size), opened, events)


@contextlib.contextmanager
def _running(bench: VllmBench, start: Callable[[Contender], InEngine], events: BenchEvents) -> Iterator[dict[str, InEngine]]:
    """The engine of each contender, by name, as long as the block runs. One of vLLM's own that does not start is left out."""
    engines: dict[str, InEngine] = {}
    try:
        for contender in bench.contenders:
            try:
                engines[contender.name] = start(contender)
            except LookaheadError as error:
                if contender.own is None:
                    raise
                events.notice(f"left out {contender.name}: {first_line(error)}")
        yield engines
    finally:
        for each in engines.values():
            each.engine.close()


def _measured(
    bench: VllmBench,
    engines: dict[str, InEngine],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    events: BenchEvents,
) -> Comparison:
    """All contenders over all prompts; outputs are judged later."""
    options = {each.name: each.options for each in bench.contenders}
    runs = [_run(name, options[name], each, prompts, max_new_tokens) for name, each in engines.items()]
    rows, of_a_turn = range(len(prompts)), batch_size * REFILLS if batch_size > 1 else 1
    with untidied(), events.working(f"answering, batch {batch_size}", len(rows) * bench.repeats, "prompts") as progress:
        for run in runs:  # kernels are compiled, caches filled
            list(run.answer(rows[: max(2, batch_size)]))
        for repeat in range(bench.repeats):
            for run in runs:
                run.forget()
            for number, start in enumerate(rows[::of_a_turn]):
                first = (number + repeat) % len(runs)
                for run in (*runs[first:], *runs[:first]):
                    for turn in run.answer(rows[start : start + of_a_turn]):
                        assert isinstance(turn, Turn)
                        run.add(number, turn)
                progress(repeat * len(rows) + min(start + of_a_turn, len(rows)))
    for run in runs:
        run.settle(runs[0])
    engine = engines[PLAIN].engine
    checked = min(len(rows), len(rows) if bench.lossless_rows is None else bench.lossless_rows)
    about = {**environment(torch.device(engine.device)), "vllm": engine.version, "quantization": engine.quantization}
    return Comparison(
        model=bench.model,
        device=engine.device,
        dtype=engine.dtype,
        mode="vllm",
        batch_size=batch_size,
        rows=len(prompts),
        repeats=bench.repeats,
        forced=False,
        runs=runs,
        lossless=None,
        lossless_rows=checked,
        environment={**about, "engine_args": bench.engine_args},
    )


def _run(
    name: str, options: DraftOptions | None, running: InEngine, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Run:
    """One contender; its turns come whole."""
    engine = running.engine

    def answer(rows: Sequence[int]) -> Iterator[int | Turn]:
        began, steps = time.perf_counter(), engine.steps
        generations = [engine.request(prompts[row], max_new_tokens) for row in rows]
        for ended in engine.run(iter(generations)):
            if ended.error:
                raise ended.error
        seconds = time.perf_counter() - began
        outputs = [generation.token_ids for generation in generations]
        yield Turn(outputs, seconds, forwards=engine.steps - steps, **vars(summed(generations)))

    return Run(name, options, answer, engine.forget)


def _judged(bench: VllmBench, found: Comparison, prompts: Sequence[Sequence[int]]) -> Lossless | None:
    """Our outputs against those of plain vLLM. Where some differ, the stock model judges them, as in a bench on a model.

    It cannot where vLLM has quantized the model: then all that differ count as different.
    """
    first = found.lossless_rows
    if not first:
        return None
    expected, outputs = found.runs[0].outputs[:first], {run.name: run.outputs[:first] for run in found.runs if run.drafts}
    unjudged = lossless(None, prompts[:first], expected, outputs)
    if not unjudged.divergences or found.environment["quantization"]:
        return unjudged
    from lookahead.models.load import load_model

    code: dict[str, Any] = {"trust_remote_code": bench.trust_remote_code, "revision": bench.revision}
    return lossless(load_model(bench.model, found.dtype, **code), prompts[:first], expected, outputs)
