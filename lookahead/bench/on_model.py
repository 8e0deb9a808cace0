"""A bench on a model. In: a `ModelBench`. Out: plain decoding against every strategy and the peers, for each batch size.

The prompts of a file are answered; or logged answers are replayed on a model of random weights. `bench_schemes` does so with
several quantizations, one model at a time: ratios of their speeds are as exact as the machine is steady.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from lookahead.bench.compare import Comparison, Texts, compare
from lookahead.bench.contenders import ModelBench
from lookahead.bench.logged import Shape, compile_for, read_workloads
from lookahead.bench.options import BenchOptions
from lookahead.bench.quantized import loss_of
from lookahead.errors import LookaheadError, UsageError
from lookahead.forward.backend import SCHEMES
from lookahead.forward.target import TargetModel, longest_text
from lookahead.job.engines import InEngine, load_here
from lookahead.job.events import BenchEvents
from lookahead.job.plan import open_tries, trie_weights
from lookahead.job.rows import Request, local_time, prompts_of, read_requests
from lookahead.job.setup import EngineSettings, LoadedEngine
from lookahead.models.load import random_model, read_config
from lookahead.trie.file import Trie

Look = Callable[[TargetModel, list[list[int]]], None]  # at a loaded model and the prompts that it is to answer


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
    bench: ModelBench, path: str, events: BenchEvents | None = None, look: Look = lambda target, prompts: None
) -> tuple[list[Comparison], list[str]]:
    """(a comparison for each batch size, what is wrong with rows left out). look: called with model and prompts first."""
    opened = open_tries(bench.tries, bench.model)
    weights = trie_weights(bench.weights, [opened])[0]
    settings = EngineSettings(bench.model, tuple(str(trie.path) for trie in opened), tuple(weights), bench.options[0])
    return bench_loaded(bench, load_here(settings, events or BenchEvents()), path, weights, events, look)


def bench_loaded(
    bench: ModelBench,
    loaded: LoadedEngine,
    path: str,
    weights: Sequence[float] = (),
    events: BenchEvents | None = None,
    look: Look = lambda target, prompts: None,
) -> tuple[list[Comparison], list[str]]:
    """`bench_prompts` of a model that is loaded with its tries. weights: of these; none: 1 each."""
    prompts, failed = answerable(list(islice(read_requests(path), bench.rows)), loaded, path, bench.max_new_tokens)
    target, workload = loaded.engine.target, (loaded.engine.drafter.tries, weights or None)
    look(target, prompts)
    return _compared(bench, target, prompts, *workload, None, events), failed


def _compared(
    bench: ModelBench,
    target: TargetModel,
    prompts: Texts,
    tries: Sequence[Trie],
    weights: Sequence[float] | None,
    answers: Texts | None,
    events: BenchEvents | None,
) -> list[Comparison]:
    """One comparison for each batch size. answers: are taken as the model's choices."""
    doing, unit = ("answering", "prompts") if answers is None else ("replaying", "answers")
    found = []
    for size in bench.batch_sizes:
        total = len(prompts) * bench.repeats
        with (events or BenchEvents()).working(f"{doing}, batch {size}", total, unit) as progress:
            found.append(compare(target, prompts, bench, size, tries, weights, answers, progress))
    return found


def bench_logged(
    bench: ModelBench, logs: BenchOptions, events: BenchEvents | None = None, look: Look = lambda target, prompts: None
) -> list[Comparison]:
    """Replay a log on a model of random weights, its answers taken as the model's choices. look: called with the model."""
    events = events or BenchEvents()
    config = read_config(*bench.model.source).get_text_config(decoder=True)
    ((workload,), _) = read_workloads(logs, events, Shape(bench.model.name, config, longest_text(config)))
    target = random_model(bench.model)
    look(target, [])
    compile_for([workload], bench.options[0], events)
    if target.mode != "packed":
        events.notice(f"{bench.model.name} verifies by {target.mode}: {target.reason}")
    prompts, answers = [prompt for prompt, _ in workload.pairs], [answer for _, answer in workload.pairs]
    return _compared(bench, target, prompts, workload.tries, workload.weights or None, answers, events)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """kv_bytes_per_token: 0 where unknown. loss: nats per token of the prompts. comparisons: one for each batch size."""

    quantize: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    loss: float | None
    comparisons: list[Comparison]

    def as_json(self) -> dict[str, Any]:
        """One of "schemes" in the object that `bench --json` prints."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "comparisons": [each.as_json() for each in self.comparisons]}


def weight_bytes(model: Any) -> int:
    """Count the bytes of a model's weights, each once."""
    held = {id(tensor): tensor.nbytes for tensor in model.parameters()}
    held |= {id(layer.laid_out): layer.laid_out.nbytes for layer in model.modules() if hasattr(layer, "laid_out")}
    return sum(held.values())


def bench_schemes(
    bench: ModelBench, measure: Callable[[ModelBench, Look], tuple[list[Comparison], list[str]]]
) -> tuple[list[Scheme], list[str]]:
    """(figures of each quantization, problems of rows). The model's `quantize` and `kv_dtype` may be several: "none,int8".

    measure: given the bench and what to call with the loaded model.
    """
    schemes, failed, of_each = [], list[str](), []
    for option, typed in (("--quantize", bench.model.quantize), ("--kv-dtype", bench.model.kv_dtype)):
        of_each.append(list(dict.fromkeys(part.strip() for part in typed.split(","))))
        if wrong := [name for name in of_each[-1] if name not in SCHEMES]:
            raise UsageError(f"{option} {wrong[0]}: choose {', '.join(SCHEMES)}, or several such as none,int8.")
    for weights, keys in itertools.product(*of_each):
        figures = dict[str, Any]()

        def look(target: TargetModel, prompts: list[list[int]], figures: dict[str, Any] = figures) -> None:
            figures.update(weight_bytes=weight_bytes(target.model), kv_bytes_per_token=target.kv_bytes)
            figures["loss"] = loss_of(target, prompts) if prompts else None

        model = dataclasses.replace(bench.model, quantize=weights, kv_dtype=keys)
        comparisons, failed = measure(dataclasses.replace(bench, model=model), look)
        schemes.append(Scheme(weights, keys, comparisons=comparisons, **figures))
    return schemes, failed
