"""Logged answers to replay, without a model. In: `BenchOptions`, as typed. Out: workloads, EDL of each strategy; with
costs of forwards, predicted speed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead.bench.contenders import ModelBench, batch_sizes_of, options_of
from lookahead.bench.options import BenchOptions
from lookahead.bench.replay import BASELINES, CONTENDER, Pair, ReplayResult, baseline_class, replay
from lookahead.bench.trie_report import load_tokenizer_of
from lookahead.budget.profile import CostProfile, read_profile
from lookahead.corpus.read import named_files
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError, UsageError
from lookahead.files.hub import tokenizer_of_trie
from lookahead.files.outputs import Input
from lookahead.job.events import COMPILING, BenchEvents
from lookahead.job.fields import RowFields, template_of
from lookahead.job.pairs import JobSettings, Log, pairs_of, read_log, settings_of
from lookahead.job.plan import open_tries, trie_weights
from lookahead.models.options import ModelOptions
from lookahead.token_documents import TokenizerIdentity
from lookahead.tokenizer import TOKENIZER_FILES, identity, load_tokenizer
from lookahead.trie.file import Trie, names_of

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison

Contender = tuple[str | None, DraftOptions]  # (name of a baseline or None for our drafter, its lengths)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Workload of a replay. build_seconds: what opening the tries took. weights: of the tries, see `Drafter`."""

    name: str
    pairs: list[Pair]
    tries: list[Trie]
    build_seconds: float = 0.0
    weights: list[float] | None = None

    @property
    def starts(self) -> list[list[Trie]]:
        """The tries of each start: warm, if there are any, and cold."""
        return [self.tries, []] if self.tries else [[]]


@dataclasses.dataclass(frozen=True)
class WorkloadReplay:
    name: str
    rows: int
    tokens: int
    results: list[ReplayResult]
    build_seconds: float

    def as_json(self) -> dict[str, Any]:
        """The object that `bench --replay --json` prints for one workload."""
        results, seconds = [result.as_json() for result in self.results], round(self.build_seconds, 4)
        return {"rows": self.rows, "tokens": self.tokens, "strategies": results, "build_seconds": seconds}


def replay_workloads(
    workloads: Sequence[Workload], contenders: Sequence[Contender], progress: Callable[[int], None] = lambda done: None
) -> list[WorkloadReplay]:
    """Replay each workload with each contender, warm if it has tries and cold. Raises UsageError for want of a checkout."""
    replays, done = [], itertools.count(1)
    for name, _ in contenders:
        if name:
            baseline_class(name)
    for workload in workloads:
        results = []
        for tries, (baseline, options) in itertools.product(workload.starts, contenders):
            results.append(replay(workload.pairs, tries, options, baseline, workload.weights if tries else None))
            progress(next(done))
        tokens = sum(len(response) for _, response in workload.pairs)
        replays.append(WorkloadReplay(workload.name, len(workload.pairs), tokens, results, workload.build_seconds))
    return replays


def geometric_means(replays: Sequence[WorkloadReplay]) -> list[tuple[ReplayResult, float]]:
    """(a result, the mean EDL) of each contender and start that all workloads have: a mean over fewer would not compare."""
    means = []
    for result in max((each.results for each in replays), key=len):
        found = [same.edl for each in replays for same in each.results if same.contender == result.contender]
        if len(found) == len(replays):
            means.append((result, math.prod(found) ** (1 / len(found))))
    return means


def as_json(replays: Sequence[WorkloadReplay]) -> dict[str, Any]:
    """The object that `bench --replay --json` prints: of one workload, or of several with their means."""
    if len(replays) == 1:
        return replays[0].as_json()
    means = geometric_means(replays)
    of_all = [dict(zip(CONTENDER, result.contender, strict=True)) | {"edl": round(edl, 4)} for result, edl in means]
    return {"workloads": [{"name": each.name, **each.as_json()} for each in replays], "geometric_mean": of_all}


def files_read(bench: BenchOptions, option: str) -> list[Input]:
    """The files that a replay reads. option: under which the logs are given."""
    tries = [name for trie in bench.trie or () for name in (trie, trie.partition("=")[2] or None)]
    logs, prompts = Input(option, bench.pairs or ()), Input("--prompts", bench.prompts or ())
    costs = Input("--cost-profile", [bench.cost_profile])
    return [logs, prompts, Input("--trie", tries), Input("--tokenizer", [bench.tokenizer], hub=True), costs]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model that logs are replayed on, which they and the tries must fit. config: of its text. longest: text, in tokens."""

    name: str
    config: Any
    longest: int


def read_workloads(bench: BenchOptions, events: BenchEvents, shape: Shape | None = None) -> tuple[list[Workload], Any | None]:
    """(a workload for each log, the tokenizer of its text, if any). Raises LookaheadError for what cannot be used."""
    paths = bench.pairs or ()
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise UsageError(f"{path}: is given twice.")
    names = names_of(paths)
    tries_of = tries_of_each(bench.trie or (), names)
    tokenizers = Tokenizers(bench.tokenizer)
    named = bench.tokenizer or (shape.name if shape else None)
    opened, build_seconds = [], []
    for name in names:
        began = time.perf_counter()
        opened.append(open_tries(tries_of[name], ModelOptions(named) if named else None))
        build_seconds.append(time.perf_counter() - began)
    weights = trie_weights(bench.trie_weight, opened)
    others = [trie for tries in opened for trie in tries]
    workloads = []
    for number, (path, name, tries) in enumerate(zip(paths, names, opened, strict=True)):
        tokenizers.check(tries)
        limits = {}
        if shape:
            for trie in tries:
                trie.check_tokenizer("", max(shape.config.vocab_size, tokenizers.known.vocab_size), "the model")
            limits = {"vocab_size": shape.config.vocab_size, "longest": shape.longest}
        log = read_log(path, bench.rows)
        prompts, job = _job_of(log, bench, events.notice)
        model = job.tokenizer
        if shape and (not Path(shape.name).is_dir() or any((Path(shape.name) / file).exists() for file in TOKENIZER_FILES)):
            model = shape.name  # a folder may hold its config.json only
        pairs = pairs_of(log, partial(tokenizers.of, tries, model, others), prompts, job, **limits)
        for note in log.notes():
            events.notice(note)
        workloads.append(Workload(name, pairs, tries, build_seconds[number], weights[number]))
    return workloads, tokenizers.latest


class Tokenizers:
    """Tokenizers of logs, each loaded when the first text asks for it. named: the one that was asked for, loaded at once."""

    def __init__(self, named: str | None):
        self.named, self._loaded = named, functools.cache(load_tokenizer)
        self.latest = None if named is None else self._loaded(named)
        self.known = TokenizerIdentity(0) if named is None else identity(self.latest, named)

    def check(self, tries: Sequence[Trie]) -> None:
        """Raises LookaheadError for a trie of another tokenizer than the one that was asked for."""
        for trie in tries if self.named is not None else ():
            trie.check_tokenizer(self.known.fingerprint, self.known.vocab_size, str(self.named))

    def of(self, tries: Sequence[Trie], model: str | None, others: Sequence[Trie]) -> Any | None:
        """Choose the tokenizer of a log's text: the one asked for, else that of its tries, of `model`, of other tries."""
        if self.named is None:
            self.latest = self._of_tries(tries)
            if self.latest is None:
                self.latest = self._loaded(model) if model else self._of_tries(others)
        return self.latest

    def _of_tries(self, tries: Sequence[Trie]) -> Any | None:
        """Load the tokenizer of the first trie that was built with one; the others must fit. None: all hold ids."""
        first = next((trie for trie in tries if trie.header.tokenizer_fingerprint and trie.header.tokenizer_name), None)
        if first is None:
            return None
        name = tokenizer_of_trie(first.path, first.header.tokenizer_name)
        found = self._loaded(name)
        known = identity(found, name)
        for trie in tries:
            trie.check_tokenizer(known.fingerprint, known.vocab_size, name)
        return found


def _job_of(log: Log, bench: BenchOptions, notice: Callable[[str], None]) -> tuple[Sequence[str], JobSettings]:
    """(prompt files, settings) of the job that wrote a log: what was given, else what its manifest states."""
    known = settings_of(log.path)
    prompts: Sequence[str] = named_files(bench.prompts or ())
    lacking = any(logged.prompt is None for logged in log.answers)
    if lacking and not prompts and known.inputs and all(Path(name).is_file() for name in known.inputs):
        prompts = known.inputs
        notice(f"{log.path}: prompts are read from {', '.join(prompts)}, which its manifest names.")
    fields = known.fields
    if bench.prompt_field or bench.template:
        adapters = fields.adapters if fields else ()
        fields = RowFields(bench.prompt_field, template_of(bench.template), adapters=adapters)
    chat = known.chat if bench.chat is None else bench.chat
    system = known.system if bench.system is None else bench.system
    return prompts, dataclasses.replace(known, chat=chat, system=system, fields=fields)


def tries_of_each(tries: Sequence[str], names: list[str]) -> dict[str, list[str]]:
    """Paths of each workload's tries: FILE is for all, NAME=FILE for one. Raises UsageError for a NAME that no workload has."""
    paths: dict[str, list[str]] = {name: [] for name in names}
    for trie in tries:
        named = names if "=" not in trie or Path(trie).exists() else [name for name in names if trie.startswith(f"{name}=")]
        if not named:
            name = trie.partition("=")[0]
            raise UsageError(f'--trie {trie}: no workload is named "{name}" (known: {", ".join(names)}).')
        longest = max(named, key=len)
        for name in names if named is names else [longest]:
            paths[name].append(trie if named is names else trie.removeprefix(f"{longest}="))
    return paths


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """replays: of each workload. comparisons: the predicted ones, of each workload and batch size. value: as JSON."""

    replays: list[WorkloadReplay]
    comparisons: list[Comparison]
    value: dict[str, Any]


def replay_logs(bench: BenchOptions, events: BenchEvents) -> ReplayReport:
    """Raises UsageError for what does not go together, LookaheadError for files that cannot be used."""
    options = options_of(bench, timed=bench.cost_profile is not None)
    if bench.sweep and bench.baselines:
        raise UsageError("--baselines draft by lengths of their own: leave --sweep out.")
    profile = read_profile(bench.cost_profile) if bench.cost_profile else None
    workloads, loaded = read_workloads(bench, events)
    if bench.explain:
        if loaded is None and (tries := [trie for workload in workloads for trie in workload.tries]):
            loaded = load_tokenizer_of(tries[0], None, needed=False)
        explain_rows(workloads, options[0], loaded, bench.explain, events)
    # Those that need no costs; if there are none, the first at its longest.
    fixed = [option for option in options if not option.adaptive] or [dataclasses.replace(options[0], adaptive=False)]
    contenders: list[Contender] = [(None, option) for option in fixed]
    if bench.baselines:
        at_each_length = {option.decoding_length: option for option in fixed}.values()
        contenders += [(name, option) for name in BASELINES for option in at_each_length]
    compile_for(workloads, fixed[0], events)
    runs = len(contenders) * sum(len(workload.starts) for workload in workloads)
    with events.working("replaying", runs, "runs") as progress:
        replays = replay_workloads(workloads, contenders, progress=progress)
    value, comparisons = as_json(replays), []
    if profile:
        for workload, of_workload in zip(workloads, value.get("workloads", [value]), strict=True):
            predicted = []
            for size in batch_sizes_of(bench.batch_size):
                with events.working(f"predicting, batch {size}", len(workload.pairs) * bench.repeat, "answers") as progress:
                    drafting = workload.tries, options, workload.weights
                    predicted.append(predict(profile, workload.pairs, *drafting, size, bench.repeat, progress))
            if len(workloads) > 1:
                predicted = [dataclasses.replace(each, model=f"{workload.name} on {each.model}") for each in predicted]
            _add_predicted(of_workload, predicted, "warm" if workload.tries else "cold")
            comparisons += predicted
    return ReplayReport(replays, comparisons, value)


def _add_predicted(value: dict[str, Any], predicted: list[Comparison], start: str) -> None:
    """Add to the JSON of a replay "predicted", and the speedup of each strategy at the first batch size."""
    from lookahead.bench.compare import as_json as predicted_json

    for run in predicted[0].runs[1:]:
        for strategy in value["strategies"]:
            lengths = strategy["strategy"], strategy["decoding_length"], strategy["branch_length"], strategy["start"]
            if not run.adaptive and lengths == (run.strategy, run.decoding_length, run.branch_length, start):
                strategy["predicted_speedup"] = round(run.speedup, 4)
    value["predicted"] = predicted_json(predicted)


def explain_rows(
    workloads: list[Workload], option: DraftOptions, tokenizer: Any | None, rows: int, events: BenchEvents
) -> None:
    """Show each step of the first rows of each workload, warm if it has tries: what they are in the replay of all rows."""
    compile_for(workloads, option, events)
    for workload in workloads:
        start = "warm" if workload.tries else "cold"
        name = f"{workload.name}, {label(option.strategy, option.decoding_length, start)}, "
        observer_of = events.observers(tokenizer, rows, name)
        replay(workload.pairs[:rows], workload.tries, option, weights=workload.weights, observer_of=observer_of)


def label(strategy: str, decoding_length: int, start: str) -> str:
    return f"{strategy} {decoding_length} {start}"


def compile_for(workloads: list[Workload], option: DraftOptions, events: BenchEvents) -> None:

    def compile_kernels() -> None:
        for workload in workloads:
            Drafter(workload.tries, option).warm_up()

    events.with_spinner(compile_kernels, COMPILING)


def predict(
    profile: CostProfile,
    pairs: Sequence[Pair],
    tries: Sequence[Trie],
    options: Sequence[DraftOptions],
    weights: Sequence[float] | None = None,
    batch_size: int = 1,
    repeats: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Plain decoding and each of `options` over the pairs, with forwards that cost what `profile` gives.

    The engine runs over a model that only costs time (models/simulated.py); drafting costs what it costs here. Raises
    LookaheadError for a pair that the profile's model has no room for.
    """
    from lookahead.bench.compare import compare  # loads torch, which no other replay needs
    from lookahead.models.simulated import simulated_model

    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    if longest > profile.longest_text:
        raise LookaheadError(f"a logged text has {longest} tokens, the model of the profile {profile.longest_text} positions.")
    prompts, answers = [prompt for prompt, _ in pairs], [answer for _, answer in pairs]
    bench = ModelBench(ModelOptions(), options, peers=False, repeats=repeats)
    found = compare(simulated_model(profile), prompts, bench, batch_size, tries, weights, answers, progress)
    for run in found.runs:
        run.total.peak_memory_bytes = 0
    environment = {"cost_profile": profile.kind, **profile.about}
    return dataclasses.replace(found, device=profile.setting.device, environment=environment, predicted=True)
