"""A replay of logged answers, without a model. In: a `ReplaySpec`. Out: EDL of each strategy; with costs, predicted speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lookahead.bench.contenders import Contenders
from lookahead.bench.logged import (
    Contender,
    Logs,
    Workload,
    WorkloadReplay,
    read_workloads,
    replay_workloads,
    tokenizer_to_show,
)
from lookahead.bench.logged import as_json as replays_as_json
from lookahead.bench.replay import BASELINES, replay
from lookahead.budget.profile import CostProfile, read_profile
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError, UsageError
from lookahead.job.events import COMPILING, BenchEvents
from lookahead.trie.file import Trie

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.replay import Pair


@dataclasses.dataclass(frozen=True)
class ReplaySpec:
    """baselines: also those of plain Python. explain: rows whose steps are shown first. cost_profile: name or file of the one
    that speed is predicted from, at each of batch_sizes; None: no speed is predicted.
    """

    logs: Logs
    contenders: Contenders
    baselines: bool = False
    explain: int = 0
    cost_profile: str | None = None
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 1

    def options(self) -> list[DraftOptions]:
        return self.contenders.options(timed=self.cost_profile is not None)


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """replays: of each workload. comparisons: the predicted ones, of each workload and batch size. value: as JSON."""

    replays: list[WorkloadReplay]
    comparisons: list[Comparison]
    value: dict[str, Any]


def replay_logs(spec: ReplaySpec, events: BenchEvents) -> ReplayReport:
    """Raises UsageError for what does not go together, LookaheadError for files that cannot be used."""
    options = spec.options()
    if spec.contenders.sweep and spec.baselines:
        raise UsageError("--baselines draft by lengths of their own: leave --sweep out.")
    profile = read_profile(spec.cost_profile) if spec.cost_profile else None
    workloads, loaded = read_workloads(spec.logs, events)
    if spec.explain:
        explain_rows(workloads, options[0], tokenizer_to_show(loaded, workloads), spec.explain, events)
    # Those that need no costs; if there are none, the first at its longest.
    fixed = [option for option in options if not option.adaptive] or [dataclasses.replace(options[0], adaptive=False)]
    replays = _replay_all(workloads, fixed, spec.baselines, events)
    value, comparisons = replays_as_json(replays), []
    if profile:
        for workload, of_workload in zip(workloads, value.get("workloads", [value]), strict=True):
            predicted = []
            for size in spec.batch_sizes:
                with events.working(f"predicting, batch {size}", len(workload.pairs) * spec.repeats, "answers") as progress:
                    drafting = workload.tries, options, workload.weights
                    predicted.append(predict(profile, workload.pairs, *drafting, size, spec.repeats, progress))
            if len(workloads) > 1:
                predicted = [dataclasses.replace(each, model=f"{workload.name} on {each.model}") for each in predicted]
            _add_predicted(of_workload, predicted, "warm" if workload.tries else "cold")
            comparisons += predicted
    return ReplayReport(replays, comparisons, value)


def _replay_all(
    workloads: list[Workload], options: list[DraftOptions], baselines: bool, events: BenchEvents
) -> list[WorkloadReplay]:
    """Replay each workload with each of `options`, and with `baselines` at the same decoding lengths."""
    contenders: list[Contender] = [(None, option) for option in options]
    if baselines:
        at_each_length = {option.decoding_length: option for option in options}.values()
        contenders += [(name, option) for name in BASELINES for option in at_each_length]
    compile_for(workloads, options[0], events)
    runs = len(contenders) * sum(len(workload.starts) for workload in workloads)
    with events.working("replaying", runs, "runs") as progress:
        return replay_workloads(workloads, contenders, progress=progress)


def _add_predicted(value: dict[str, Any], predicted: list[Comparison], start: str) -> None:
    """To the JSON of a replay: "predicted", and the speedup of each strategy at the first batch size."""
    from lookahead.bench.compare import as_json

    for run in predicted[0].runs[1:]:
        for strategy in value["strategies"]:
            lengths = strategy["strategy"], strategy["decoding_length"], strategy["branch_length"], strategy["start"]
            if not run.adaptive and lengths == (run.strategy, run.decoding_length, run.branch_length, start):
                strategy["predicted_speedup"] = round(run.speedup, 4)
    value["predicted"] = as_json(predicted)


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
    """Of one run: "hierarchical 64 warm"."""
    return f"{strategy} {decoding_length} {start}"


def compile_for(workloads: list[Workload], option: DraftOptions, events: BenchEvents) -> None:
    """Have all kernels compiled, so that no draft waits for it."""

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

    The engine runs over a model that only costs time (models/simulated.py) and whose answers are given; drafting costs what it
    costs here. Raises LookaheadError for a pair that the profile's model has no room for.
    """
    from lookahead.bench.compare import compare  # loads torch, which no other replay needs
    from lookahead.models.simulated import simulated_model

    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    if longest > profile.longest_text:
        raise LookaheadError(f"a logged text has {longest} tokens, the model of the profile {profile.longest_text} positions.")
    prompts, answers = [prompt for prompt, _ in pairs], [answer for _, answer in pairs]
    found = compare(
        simulated_model(profile), prompts, tries, options, peers=False,
        progress=progress, weights=weights, batch_size=batch_size, answers=answers, repeats=repeats,
    )  # fmt: skip
    for turn in (turn for run in found.runs for turn in run.turns):
        turn.peak_memory_bytes = 0
    environment = {"cost_profile": profile.kind, **profile.about}
    return dataclasses.replace(found, device=profile.setting.device, environment=environment, predicted=True)
