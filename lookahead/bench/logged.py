"""Logged answers to replay. In: names of logs, tries and tokenizers as they are typed. Out: workloads, and their replays."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lookahead.bench.replay import Pair, ReplayResult, baseline_class, replay
from lookahead.bench.trie_report import load_tokenizer_of
from lookahead.corpus.read import named_files
from lookahead.draft.options import DraftOptions
from lookahead.errors import UsageError
from lookahead.files.outputs import Input
from lookahead.job.drafting import open_tries, trie_weights
from lookahead.job.events import BenchEvents
from lookahead.job.fields import RowFields, template_of
from lookahead.job.pairs import JobSettings, Log, pairs_of, read_log, settings_of
from lookahead.models.options import ModelOptions
from lookahead.tokenizer import TOKENIZER_FILES, identity, load_tokenizer
from lookahead.trie.file import Trie, names_of

Contender = tuple[str | None, DraftOptions]  # (name of a baseline or None for our drafter, its lengths)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is replayed. build_seconds: what opening the tries took. weights: of the tries, see `Drafter`."""

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
    """All results on one workload. tokens: of its responses."""

    name: str
    rows: int
    tokens: int
    results: list[ReplayResult]
    build_seconds: float

    def as_json(self) -> dict[str, Any]:
        """The object that `bench --replay --json` prints for one workload."""
        results, seconds = [result.as_json() for result in self.results], round(self.build_seconds, 4)
        return {"rows": self.rows, "tokens": self.tokens, "strategies": results, "build_seconds": seconds}


@dataclasses.dataclass(frozen=True)
class Mean:
    """A contender over all workloads; edl is the geometric mean."""

    strategy: str
    decoding_length: int
    branch_length: int
    start: str
    edl: float


def replay_workloads(
    workloads: Sequence[Workload], contenders: Sequence[Contender], progress: Callable[[int], None] = lambda done: None
) -> list[WorkloadReplay]:
    """Replay each workload with each contender, warm if it has tries and cold; progress(runs done).
    Raises UsageError for a baseline without a checkout, before anything is replayed.
    """
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


def geometric_means(replays: Sequence[WorkloadReplay]) -> list[Mean]:
    """One for each contender and start that all workloads have: a mean over fewer would not compare."""
    means = []
    for result in max((each.results for each in replays), key=len):
        found = [same for each in replays for same in each.results if same.contender == result.contender]
        if len(found) == len(replays):
            means.append(Mean(*result.contender, math.prod(same.edl for same in found) ** (1 / len(found))))
    return means


def as_json(replays: Sequence[WorkloadReplay]) -> dict[str, Any]:
    """The object that `bench --replay --json` prints: of one workload, or of several with their means."""
    if len(replays) == 1:
        return replays[0].as_json()
    means = [dataclasses.asdict(mean) for mean in geometric_means(replays)]
    return {
        "workloads": [{"name": each.name, **each.as_json()} for each in replays],
        "geometric_mean": [{**mean, "edl": round(mean["edl"], 4)} for mean in means],
    }


@dataclasses.dataclass(frozen=True)
class Logs:
    """What is replayed, as typed. chat, system, prompt_field, template: of the job that wrote it; None: of its manifest."""

    paths: Sequence[str]
    tries: Sequence[str] = ()
    weights: Sequence[str] | None = None
    prompts: Sequence[str] = ()
    tokenizer: str | None = None
    chat: bool | None = None
    system: str | None = None
    rows: int | None = None
    prompt_field: str | None = None
    template: str | None = None

    def reads(self, option: str) -> list[Input]:
        """The files that are read. option: under which the logs are given."""
        tries = [name for trie in self.tries for name in (trie, trie.partition("=")[2] or None)]
        tokenizer = Input("--tokenizer", [self.tokenizer], hub=True)
        return [Input(option, self.paths), Input("--prompts", self.prompts), Input("--trie", tries), tokenizer]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model that logs are replayed on, which they and the tries must fit. config: its text config."""

    name: str
    config: Any


def read_workloads(logs: Logs, events: BenchEvents, shape: Shape | None = None) -> tuple[list[Workload], Any | None]:
    """(a workload for each log, the tokenizer that text was tokenized with, if any was). Raises UsageError for what is named
    wrongly, LookaheadError for what cannot be read or does not fit.
    """
    for number, path in enumerate(logs.paths):
        if path in logs.paths[:number]:
            raise UsageError(f"{path}: is given twice.")
    names = names_of(list(logs.paths))
    tries_of = tries_of_each(logs.tries, names)
    tokenizers = Tokenizers(logs.tokenizer)
    named = logs.tokenizer or (shape.name if shape else None)
    opened, build_seconds = [], []
    for name in names:
        began = time.perf_counter()
        opened.append(open_tries(tries_of[name], ModelOptions(named) if named else None))
        build_seconds.append(time.perf_counter() - began)
    weights = trie_weights(logs.weights, opened)
    others = [trie for tries in opened for trie in tries]
    workloads = []
    for number, (path, name, tries) in enumerate(zip(logs.paths, names, opened, strict=True)):
        tokenizers.check(tries)
        limits = _limits(tries, tokenizers, shape)
        log = read_log(path, logs.rows)
        prompts, job = _job_of(log, logs, events.notice)
        model = shape.name if shape and _has_tokenizer(shape.name) else job.tokenizer
        pairs = pairs_of(log, partial(tokenizers.of, tries, model, others), prompts, job, **limits)
        for note in log.notes():
            events.notice(note)
        workloads.append(Workload(name, pairs, tries, build_seconds[number], weights[number]))
    return workloads, tokenizers.latest


def _limits(tries: Sequence[Trie], tokenizers: Tokenizers, shape: Shape | None) -> dict[str, int]:
    """What a model has room for; nothing without one. Raises LookaheadError for a trie that does not fit it."""
    if shape is None:
        return {}
    from lookahead.forward.target import longest_text

    for trie in tries:
        trie.check_tokenizer("", max(shape.config.vocab_size, tokenizers.vocab_size), "the model")
    return {"vocab_size": shape.config.vocab_size, "longest": longest_text(shape.config)}


class Tokenizers:
    """Tokenizers of logs, each loaded when the first text asks for it. named: the one that was asked for, loaded at once."""

    def __init__(self, named: str | None):
        self.named = named
        self.vocab_size, self.latest = 0, None
        self._loaded: dict[str, Any] = {}
        if named is not None:
            self._load(named)

    def check(self, tries: Sequence[Trie]) -> None:
        """Raises LookaheadError for a trie of another tokenizer than the one that was asked for."""
        if self.named is not None:
            whose = identity(self.latest, self.named)
            for trie in tries:
                trie.check_tokenizer(whose.fingerprint, whose.vocab_size, self.named)

    def of(self, tries: Sequence[Trie], model: str | None, others: Sequence[Trie]) -> Any | None:
        """For the text of a log: the one asked for, else that of its tries, of the model (that it is replayed on, or whose job
        wrote it), of other tries.
        """
        if self.named is not None:
            return self._load(self.named)
        self.latest = self._of_tries(tries)
        if self.latest is None:
            self.latest = self._load(model) if model else self._of_tries(others)
        return self.latest

    def _of_tries(self, tries: Sequence[Trie]) -> Any | None:
        """Of the first of them that was built with one; the others must fit. None: all hold ids."""
        for trie in tries:
            key = trie.header.tokenizer_fingerprint
            if key and key not in self._loaded:
                self._loaded[key] = load_tokenizer_of(trie, None, needed=True)
            if key and (found := self._loaded[key]) is not None:
                whose = identity(found, trie.header.tokenizer_name)
                for other in tries:
                    other.check_tokenizer(whose.fingerprint, whose.vocab_size, trie.header.tokenizer_name)
                return found
        return None

    def _load(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load_tokenizer(name)
        self.latest = self._loaded[name]
        self.vocab_size = identity(self.latest, name).vocab_size
        return self.latest


def _has_tokenizer(model: str | None) -> bool:
    """Of a model that needs no weights; a folder may hold its config.json only."""
    folder = Path(model or "")
    return model is not None and (not folder.is_dir() or any((folder / name).exists() for name in TOKENIZER_FILES))


def tokenizer_to_show(loaded: Any | None, workloads: Sequence[Workload]) -> Any | None:
    """The tokenizer to show tokens with: that of the logs, else of a trie if it can be loaded."""
    tries = [trie for workload in workloads for trie in workload.tries]
    return loaded if loaded is not None or not tries else load_tokenizer_of(tries[0], None, needed=False)


def _job_of(log: Log, logs: Logs, notice: Callable[[str], None]) -> tuple[Sequence[str], JobSettings]:
    """(prompt files, settings) of the job that wrote a log: what was given, else what its manifest states."""
    known = settings_of(log.path)
    prompts: Sequence[str] = named_files(logs.prompts)
    if log.lacks_prompts and not prompts and known.inputs and all(Path(name).is_file() for name in known.inputs):
        prompts = known.inputs
        notice(f"{log.path}: prompts are read from {', '.join(prompts)}, which its manifest names.")
    fields = known.fields
    if logs.prompt_field or logs.template:
        fields = RowFields(logs.prompt_field, template_of(logs.template))
    chat = known.chat if logs.chat is None else logs.chat
    system = known.system if logs.system is None else logs.system
    return prompts, dataclasses.replace(known, chat=chat, system=system, fields=fields)


def tries_of_each(tries: Sequence[str], names: list[str]) -> dict[str, list[str]]:
    """Paths of each workload's tries: FILE is for all workloads, NAME=FILE for that of this name; a file whose own name holds
    "=" is a FILE. Raises UsageError for a NAME that no workload has.
    """
    paths: dict[str, list[str]] = {name: [] for name in names}
    for trie in tries:
        if "=" not in trie or Path(trie).exists():
            for each in paths.values():
                each.append(trie)
            continue
        named = [name for name in names if trie.startswith(f"{name}=")]
        if not named:
            name = trie.partition("=")[0]
            raise UsageError(f'--trie {trie}: no workload is named "{name}" (known: {", ".join(names)}).')
        longest = max(named, key=len)
        paths[longest].append(trie.removeprefix(f"{longest}="))
    return paths
