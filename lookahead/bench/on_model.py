"""A bench on a model. In: a `ModelBench`. Out: plain decoding against every strategy and the peers, for each batch size.

The prompts of a file are answered; or logged answers are replayed on a model of random weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import islice

from lookahead.bench.compare import Comparison, compare
from lookahead.bench.logged import Logs, Shape, read_workloads
from lookahead.bench.replay_run import compile_for
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError
from lookahead.forward.target import TargetModel
from lookahead.job.drafting import open_tries, trie_weights
from lookahead.job.engines import InEngine, load_here
from lookahead.job.events import BenchEvents
from lookahead.job.prompt import local_time, prompts_of
from lookahead.job.rows import Request, read_requests
from lookahead.job.setup import EngineSettings, LoadedEngine
from lookahead.models.load import random_model, read_config
from lookahead.models.options import ModelOptions

Look = Callable[[TargetModel, list[list[int]]], None]  # at a loaded model and the prompts that it is to answer


@dataclasses.dataclass(frozen=True)
class ModelBench:
    """A model, and what is compared on it.

    options: of each run of ours. batch_sizes: prompts decoded at once, measured in turn. peers: also Hugging Face's own.
    repeats, recycling: see `compare.compare`. lossless_rows: the first rows, whose outputs are checked; None: all; 0: none.
    """

    model: ModelOptions
    options: Sequence[DraftOptions]
    batch_sizes: Sequence[int] = (1,)
    peers: bool = True
    repeats: int = 1
    recycling: bool = False
    lossless_rows: int | None = 64


def answerable(
    requests: Sequence[Request], running: LoadedEngine | InEngine, path: str, max_new_tokens: int
) -> tuple[list[list[int]], list[str]]:
    """(token ids of rows that can be answered, what is wrong with the others); raises LookaheadError if there are none."""
    prompts, failed, now = [], [], local_time()
    for request in requests:
        try:
            if request.problem:
                raise LookaheadError(request.problem + ".")
            for ids in prompts_of(request, running.tokenizer, longest=running.engine.target.longest_text, now=now):
                running.engine.request(ids, max_new_tokens)
                prompts.append(ids)
        except LookaheadError as error:
            failed.append(f"{path}:{request.line}: {error}")
    if not prompts:
        raise LookaheadError(failed[0])
    return prompts, failed


def bench_prompts(
    bench: ModelBench,
    path: str,
    tries: Sequence[str] = (),
    weights: Sequence[str] | None = None,
    max_new_tokens: int = 256,
    rows: int | None = None,
    events: BenchEvents | None = None,
    look: Look = lambda target, prompts: None,
) -> tuple[list[Comparison], list[str]]:
    """(a comparison for each batch size, what is wrong with rows that were left out)

    path: of a file of prompts, as for generate. tries, weights: files, and NAME=W as typed. rows: the first, None: all.
    look: called with the loaded model and its prompts, before they are answered. Raises LookaheadError if no row can be.
    """
    events = events or BenchEvents()
    opened = open_tries(tries, bench.model)
    of_each = trie_weights(weights, [opened])[0]
    settings = EngineSettings(bench.model, tuple(str(trie.path) for trie in opened), tuple(of_each), bench.options[0])
    loaded = load_here(settings, events)
    return bench_loaded(bench, loaded, path, of_each, max_new_tokens, rows, events, look)


def bench_loaded(
    bench: ModelBench,
    loaded: LoadedEngine,
    path: str,
    weights: Sequence[float] = (),
    max_new_tokens: int = 256,
    rows: int | None = None,
    events: BenchEvents | None = None,
    look: Look = lambda target, prompts: None,
) -> tuple[list[Comparison], list[str]]:
    """`bench_prompts` of a model that is loaded with its tries. weights: of these; none: 1 each."""
    events = events or BenchEvents()
    requests = list(islice(read_requests(path), rows))
    prompts, failed = answerable(requests, loaded, path, max_new_tokens)
    look(loaded.engine.target, prompts)
    return [_compared(bench, loaded, prompts, weights, max_new_tokens, size, events) for size in bench.batch_sizes], failed


def _compared(
    bench: ModelBench,
    loaded: LoadedEngine,
    prompts: list[list[int]],
    weights: Sequence[float],
    max_new_tokens: int,
    batch_size: int,
    events: BenchEvents,
) -> Comparison:
    with events.working(f"answering, batch {batch_size}", len(prompts) * bench.repeats, "prompts") as progress:
        return compare(
            loaded.engine.target,
            prompts,
            loaded.engine.drafter.tries,
            bench.options,
            max_new_tokens,
            bench.peers,
            bench.lossless_rows != 0,
            progress=progress,
            weights=weights or None,
            batch_size=batch_size,
            repeats=bench.repeats,
            lossless_rows=bench.lossless_rows,
            recycling=bench.recycling,
        )


def bench_logged(
    bench: ModelBench,
    logs: Logs,
    events: BenchEvents | None = None,
    look: Look = lambda target, prompts: None,
) -> list[Comparison]:
    """Replay a log on a model of random weights, its answers taken as the model's choices; one comparison for each batch size.

    look: called with the model and no prompts, as random weights know none. Raises LookaheadError for a log that the model has
    no room for.
    """
    events = events or BenchEvents()
    config = read_config(*bench.model.source).get_text_config(decoder=True)
    ((workload,), _) = read_workloads(logs, events, Shape(bench.model.name, config))
    target = random_model(bench.model)
    look(target, [])
    compile_for([workload], bench.options[0], events)
    if target.mode != "packed":
        events.notice(f"{bench.model.name} verifies by {target.mode}: {target.reason}")
    prompts, answers = [prompt for prompt, _ in workload.pairs], [answer for _, answer in workload.pairs]
    comparisons = []
    for size in bench.batch_sizes:
        with events.working(f"replaying, batch {size}", len(prompts) * bench.repeats, "answers") as progress:
            comparisons.append(
                compare(
                    target,
                    prompts,
                    workload.tries,
                    bench.options,
                    peers=bench.peers,
                    progress=progress,
                    weights=workload.weights,
                    batch_size=size,
                    answers=answers,
                    repeats=bench.repeats,
                    recycling=bench.recycling,
                )
            )
    return comparisons
