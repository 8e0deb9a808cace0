"""Replays of logged answers, of one or more workloads without a model or on one: reading and running."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from lookahead.bench.compare import Comparison
    from lookahead.bench.workloads import Contender, Workload, WorkloadReplay
    from lookahead.budget.profile import CostProfile
    from lookahead.draft.options import DraftOptions
    from lookahead.job.pairs import JobSettings, Log
    from lookahead.outputs import Input
    from lookahead.trie.file import Trie


def replay_all(workloads: list[Workload], options: list[DraftOptions], baselines: bool) -> list[WorkloadReplay]:
    """Replay each workload with each of `options`, and with `baselines` at the same decoding lengths."""
    from lookahead.bench.baselines import BASELINES
    from lookahead.bench.workloads import replay_workloads
    from lookahead_cli import render

    contenders: list[Contender] = [(None, option) for option in options]
    if baselines:
        at_each_length = {option.decoding_length: option for option in options}.values()
        contenders += [(name, option) for name in BASELINES for option in at_each_length]
    compile_for(workloads, options[0])
    runs = len(contenders) * sum(len(workload.starts) for workload in workloads)
    with render.progress("replaying", runs) as update:
        return replay_workloads(workloads, contenders, progress=lambda done: update(done, "runs"))


def fixed(options: list[DraftOptions]) -> list[DraftOptions]:
    """Those that need no costs; if there are none, the first at its longest."""
    return [option for option in options if not option.adaptive] or [dataclasses.replace(options[0], adaptive=False)]


def predict_all(
    profile: CostProfile,
    workloads: list[Workload],
    options: list[DraftOptions],
    batch_sizes: Sequence[int],
    repeats: int,
    value: dict[str, Any],
    shown: bool,
) -> list[Comparison]:
    """What a bench with forwards of these costs would show, for each workload and batch size.

    It goes into `value`, the JSON of the replays: "predicted" of each workload, and the speedup of each strategy.
    """
    from lookahead.bench.compare import as_json
    from lookahead.bench.planner import predict
    from lookahead_cli import render

    found: list[Comparison] = []
    for workload, told in zip(workloads, value.get("workloads", [value]), strict=True):
        of_this: list[Comparison] = []
        for size in batch_sizes:
            with render.progress(f"predicting, batch {size}", len(workload.pairs) * repeats, shown=shown) as update:
                of_this.append(
                    predict(
                        profile, workload.pairs, workload.tries, options, workload.weights, size, repeats,
                        lambda n, update=update: update(n, "answers"),  # type: ignore[misc]
                    )
                )  # fmt: skip
        if len(workloads) > 1:
            of_this = [dataclasses.replace(each, model=f"{workload.name} on {each.model}") for each in of_this]
        start = "warm" if workload.tries else "cold"
        for run in of_this[0].runs[1:]:
            for strategy in told["strategies"]:
                lengths = strategy["strategy"], strategy["decoding_length"], strategy["branch_length"], strategy["start"]
                if not run.adaptive and lengths == (run.strategy, run.decoding_length, run.branch_length, start):
                    strategy["predicted_speedup"] = round(run.speedup, 4)
        told["predicted"] = as_json(of_this)
        found += of_this
    return found


def explain_rows(workloads: list[Workload], option: DraftOptions, tokenizer: Any | None, rows: int, console: Console) -> None:
    """Show each step of the first rows of each workload, warm if it has tries: what they are in the replay of all rows."""
    from lookahead.bench.replay import replay
    from lookahead_cli.explain import Explainer
    from lookahead_cli.replay_tables import label

    compile_for(workloads, option)
    for workload in workloads:
        start = "warm" if workload.tries else "cold"
        explainer = Explainer(
            console, tokenizer, rows, f"{workload.name}, {label(option.strategy, option.decoding_length, start)}, "
        )
        pairs = workload.pairs[:rows]
        replay(pairs, workload.tries, option, weights=workload.weights, observer_of=explainer.observer_of)


def compile_for(workloads: list[Workload], option: DraftOptions) -> None:
    """Have all kernels compiled, so that no draft waits for it."""
    from lookahead.draft.drafter import Drafter
    from lookahead_cli import render

    def compile_kernels() -> None:
        for workload in workloads:
            Drafter(workload.tries, option).warm_up()

    render.patiently(compile_kernels, render.COMPILING)


@dataclasses.dataclass(frozen=True)
class Logs:
    """What is replayed, as it was typed. chat, system, prompt_field, template: of the job that wrote the logs; None: as its
    manifest says.
    """

    paths: Sequence[str]
    tries: Sequence[str] = ()
    weights: list[str] | None = None
    prompts: Sequence[str] = ()
    tokenizer: str | None = None
    chat: bool | None = None
    system: str | None = None
    rows: int | None = None
    prompt_field: str | None = None
    template: str | None = None

    def reads(self, option: str) -> list[Input]:
        """The files that are read. option: under which the logs are given."""
        from lookahead.outputs import Input

        tries = [name for trie in self.tries for name in (trie, trie.partition("=")[2] or None)]
        tokenizer = Input("--tokenizer", [self.tokenizer], hub=True)
        return [Input(option, self.paths), Input("--prompts", self.prompts), Input("--trie", tries), tokenizer]


def read_workloads(logs: Logs, shape: Any | None = None, model: str | None = None) -> tuple[list[Workload], Any | None]:
    """(a workload for each log, the tokenizer that text was tokenized with, if any was)

    shape, model: text config and name of the model that the logs are replayed on, which they and the tries must fit.
    """
    import time
    from functools import partial

    from lookahead.bench.workloads import Workload
    from lookahead.errors import UsageError
    from lookahead.job.pairs import pairs_of, read_log
    from lookahead.trie.file import names_of
    from lookahead_cli import render
    from lookahead_cli.options import open_tries, trie_weights

    twice = [path for number, path in enumerate(logs.paths) if path in logs.paths[:number]]
    if twice:
        raise UsageError(f"{twice[0]}: is given twice.")
    names = names_of(list(logs.paths))
    tries_of = tries_of_each(logs.tries, names)
    tokenizers = Tokenizers(logs.tokenizer)
    opened, build_seconds = [], []
    for name in names:
        began = time.perf_counter()
        opened.append(open_tries(tries_of[name]))
        build_seconds.append(time.perf_counter() - began)
    workloads = []
    of_each = zip(logs.paths, names, opened, build_seconds, trie_weights(logs.weights, opened), strict=True)
    for path, name, some, seconds, weights in of_each:
        tokenizers.check(some)
        limits: dict[str, int] = {}
        if shape is not None:
            from lookahead.forward.target import longest_text

            limits = {"vocab_size": shape.vocab_size, "longest": longest_text(shape)}
            for trie in some:
                trie.check_tokenizer("", max(shape.vocab_size, tokenizers.vocab_size), "the model")
        log = read_log(path, logs.rows)
        prompts, job = _job_of(log, logs)
        others = [trie for group in opened for trie in group]
        of_log = partial(tokenizers.of, some, model if _has_tokenizer(model) else job.tokenizer, others)
        pairs = pairs_of(log, of_log, prompts, job, **limits)
        for note in log.notes():
            render.notice(note)
        workloads.append(Workload(name, pairs, some, seconds, weights))
    return workloads, tokenizers.latest


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
        from lookahead.tokenizer import identity

        if self.named is not None:
            whose = identity(self.latest, self.named)
            for trie in tries:
                trie.check_tokenizer(whose.fingerprint, whose.vocab_size, self.named)

    def of(self, tries: Sequence[Trie], model: str | None, others: Sequence[Trie]) -> Any | None:
        """For the text of a log: the one asked for, else that of its tries, of the model, of other tries.

        model: that the log is replayed on, or whose job wrote it.
        """
        if self.named is not None:
            return self._load(self.named)
        found = self._of_tries(tries)
        if found is None:
            found = self._load(model) if model else self._of_tries(others)
        self.latest = found
        return found

    def _of_tries(self, tries: Sequence[Trie]) -> Any | None:
        """Of the first of them that was built with one; the others must fit. None: all hold ids."""
        from lookahead.tokenizer import identity
        from lookahead_cli.inspect_trie import tokenizer_of

        for trie in tries:
            key = trie.header.tokenizer_fingerprint
            if key and key not in self._loaded:
                self._loaded[key] = tokenizer_of(trie, None, needed=True)
            if key and (found := self._loaded[key]) is not None:
                whose = identity(found, trie.header.tokenizer_name)
                for other in tries:
                    other.check_tokenizer(whose.fingerprint, whose.vocab_size, trie.header.tokenizer_name)
                return found
        return None

    def _load(self, name: str) -> Any:
        from lookahead.tokenizer import identity, load_tokenizer

        if name not in self._loaded:
            self._loaded[name] = load_tokenizer(name)
        self.latest = self._loaded[name]
        self.vocab_size = identity(self.latest, name).vocab_size
        return self.latest


def _has_tokenizer(model: str | None) -> bool:
    """Of a model that needs no weights; a folder may hold its config.json only."""
    from lookahead.tokenizer import TOKENIZER_FILES

    folder = Path(model or "")
    return model is not None and (not folder.is_dir() or any((folder / name).exists() for name in TOKENIZER_FILES))


def tokenizer_to_show(loaded: Any | None, workloads: Sequence[Workload]) -> Any | None:
    """The tokenizer to show tokens with: that of the logs, else of a trie if it can be loaded."""
    from lookahead_cli.inspect_trie import tokenizer_of

    tries = [trie for workload in workloads for trie in workload.tries]
    return loaded if loaded is not None or not tries else tokenizer_of(tries[0], None, needed=False)


def _job_of(log: Log, logs: Logs) -> tuple[Sequence[str], JobSettings]:
    """(prompt files, settings) of the job that wrote a log: what was given, else what its manifest says."""
    from lookahead.corpus import named_files
    from lookahead.job.fields import RowFields, template_of
    from lookahead.job.pairs import settings_of
    from lookahead_cli import render

    known = settings_of(log.path)
    prompts: Sequence[str] = named_files(logs.prompts)
    if log.lacks_prompts and not prompts and known.inputs and all(Path(name).is_file() for name in known.inputs):
        prompts = known.inputs
        render.notice(f"{log.path}: prompts are read from {', '.join(prompts)}, which its manifest names.")
    fields = known.fields
    if logs.prompt_field or logs.template:
        fields = RowFields(logs.prompt_field, template_of(logs.template))
    chat = known.chat if logs.chat is None else logs.chat
    system = known.system if logs.system is None else logs.system
    return prompts, dataclasses.replace(known, chat=chat, system=system, fields=fields)


def replay_on(
    model: str,
    logs: Logs,
    options: list[DraftOptions],
    dtype: str,
    device: str,
    attention: str | None,
    batch_sizes: Sequence[int],
    peers: bool,
    repeats: int,
    shown: bool,
    recycling: bool = False,
    loading: Mapping[str, Any] | None = None,
) -> list[Comparison]:
    """Replay a log on a model of random weights; one comparison for each batch size.

    loading: trust_remote_code and revision, of `random_model`.
    """
    from lookahead.bench.compare import compare
    from lookahead.models.load import random_model, read_config
    from lookahead_cli import render

    shape = read_config(model, **(loading or {})).get_text_config(decoder=True)
    workloads, _ = read_workloads(logs, shape, model)
    (workload,) = workloads
    compile_for(workloads, options[0])
    target = random_model(model, dtype, device, attention, **(loading or {}))
    if target.mode != "packed":
        render.notice(f"{model} verifies by {target.mode}: {target.reason}")
    prompts, answers = [prompt for prompt, _ in workload.pairs], [answer for _, answer in workload.pairs]
    comparisons = []
    for size in batch_sizes:
        with render.progress(f"replaying, batch {size}", len(prompts) * repeats, shown=shown) as update:
            comparisons.append(
                compare(
                    target,
                    prompts,
                    workload.tries,
                    options,
                    peers=peers,
                    progress=lambda n, update=update: update(n, "answers"),  # type: ignore[misc]
                    weights=workload.weights,
                    batch_size=size,
                    answers=answers,
                    repeats=repeats,
                    recycling=recycling,
                )
            )
    return comparisons


def tries_of_each(tries: Sequence[str], names: list[str]) -> dict[str, list[str]]:
    """Paths of each workload's tries: FILE is for all workloads, NAME=FILE for that of this name.

    A file whose own name holds "=" is a FILE. Raises UsageError for a NAME that no workload has.
    """
    from lookahead.errors import UsageError

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
