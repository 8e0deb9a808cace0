"""A bench inside vLLM or SGLang. In: prompts, and ways to draft. Out: the plain engine against its own ways to draft and ours.

All engines are in memory at once and answer the same rows in turn: a prompt each, or, where B are decoded at once, 4 B, so that
slots are filled again as in a long job. A turn is not interrupted, as our drafts are sized by the time between two steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch

from lookahead.bench.compare import PLAIN, REFILLS, Comparison, environment
from lookahead.bench.engine_contenders import Contender, EngineBench
from lookahead.bench.engine_runs import EngineRun, Here, InProcess
from lookahead.bench.events import BenchEvents
from lookahead.bench.lossless import Lossless, lossless
from lookahead.bench.run import Run, Turn
from lookahead.engines.abilities import ABILITIES
from lookahead.engines.foreign import ForeignSettings
from lookahead.errors import LookaheadError, first_line
from lookahead.forward.memory import untidied
from lookahead.job.drafting import open_tries, trie_weights
from lookahead.job.engines import in_engine
from lookahead.job.rows import read_requests
from lookahead.trie.file import Trie


def bench_in_engine(
    bench: EngineBench,
    path: str,
    tries: Sequence[str] = (),
    weights: Sequence[str] | None = None,
    max_new_tokens: int = 256,
    rows: int | None = None,
    events: BenchEvents | None = None,
) -> tuple[list[Comparison], list[str]]:
    """As `on_model.bench_prompts`. Raises LookaheadError if engine, model or a trie cannot be used, or no row be answered."""
    events = events or BenchEvents()
    requests = list(islice(read_requests(path), rows))
    opened = open_tries(tries, bench.model)
    tries = [str(trie.path) for trie in opened]
    of_each = trie_weights(weights, [opened])[0]
    found, failed = [], list[str]()
    for size in bench.batch_sizes:

        def start(contender: Contender, running: int, size: int = size) -> EngineRun:
            return _started(bench, contender, bench.settings(contender, tries, of_each, size, running), opened, events)

        with _running(bench, start, events) as engines:
            prompts, failed = engines[PLAIN].answerable(requests, path, max_new_tokens)
            found.append(_measured(bench, engines, prompts, max_new_tokens, size, events))
    return [dataclasses.replace(each, lossless=_judged(bench, each, prompts)) for each in found], failed


def _started(
    bench: EngineBench, contender: Contender, settings: ForeignSettings, tries: Sequence[Trie], events: BenchEvents
) -> EngineRun:
    if not settings.takes_signals:
        return Here(in_engine(bench.engine, settings, tries, events))
    settings.check_installed()
    runs: list[EngineRun] = []
    title = ABILITIES[bench.engine].title
    events.patiently(lambda: runs.append(InProcess(bench.engine, settings)), f"Starting {title}: {contender.name} ...")
    return runs[0]


@contextlib.contextmanager
def _running(
    bench: EngineBench, start: Callable[[Contender, int], EngineRun], events: BenchEvents
) -> Iterator[dict[str, EngineRun]]:
    """The engine of each contender, by name, as long as the block runs. One of its own ways that does not start is left out.

    start: takes how many run already, too.
    """
    engines: dict[str, EngineRun] = {}
    try:
        for contender in bench.contenders:
            try:
                engines[contender.name] = start(contender, len(engines))
            except LookaheadError as error:
                if contender.own is None:
                    raise
                events.notice(f"left out {contender.name}: {first_line(error)}")
        yield engines
    finally:
        for each in engines.values():
            each.close()


def _measured(
    bench: EngineBench,
    engines: dict[str, EngineRun],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    events: BenchEvents,
) -> Comparison:
    """All contenders over all prompts; outputs are judged later."""
    options = {each.name: each.options for each in bench.contenders}
    runs = []
    for name, each in engines.items():

        def answer(rows: Sequence[int], engine: EngineRun = each) -> Iterator[int | Turn]:
            yield engine.answer([list(prompts[row]) for row in rows], max_new_tokens)  # a turn comes whole

        runs.append(Run(name, options[name], answer, each.forget))
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
    engine = engines[PLAIN].about
    checked = min(len(rows), len(rows) if bench.lossless_rows is None else bench.lossless_rows)
    about = {**environment(torch.device(engine.device)), bench.engine: engine.version, "quantization": engine.quantization}
    return Comparison(
        model=bench.model.name,
        device=engine.device,
        dtype=engine.dtype,
        mode=bench.engine,
        batch_size=batch_size,
        rows=len(prompts),
        repeats=bench.repeats,
        forced=False,
        runs=runs,
        lossless=None,
        lossless_rows=checked,
        environment={**about, "engine_args": bench.engine_args},
    )


def _judged(bench: EngineBench, found: Comparison, prompts: Sequence[Sequence[int]]) -> Lossless | None:
    """Our outputs against those of the plain engine. Where some differ, the stock model judges them, as in a bench on a model.

    It cannot where the engine has quantized the model: then all that differ count as different.
    """
    first = found.lossless_rows
    if not first:
        return None
    expected, outputs = found.runs[0].outputs[:first], {run.name: run.outputs[:first] for run in found.runs if run.drafts}
    unjudged = lossless(None, prompts[:first], expected, outputs)
    if not unjudged.divergences or found.environment["quantization"]:
        return unjudged
    from lookahead.models.load import load_model

    return lossless(load_model(bench.model, dtype=found.dtype), prompts[:first], expected, outputs)
