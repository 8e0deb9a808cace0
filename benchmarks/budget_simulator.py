"""Draft budgets over recorded drafts and measured cost curves. In: benchmarks/budget/. Out: time of each policy in each cell.

    python benchmarks/budget_simulator.py                    the grid, worst cells of each policy
    python benchmarks/budget_simulator.py --only demo --show

A cell is a workload, a cost curve, a batch size, a number of rows, and what the machine does. Steps advance through recorded
answers (budget_recording.py), so what a step emits for its number of nodes is exact. Seconds of a step are

    forward (curve, slower after another size on a CPU)  +  growing trees  +  accounting

What the policy sees is multiplied by lognormal noise, and one step in fifty takes twice as long. The score is without.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from budget_recording import MOST, Recording, read_recording

from lookahead.budget import ladder
from lookahead.budget.policy import FIRST, Budget, StepCost

DATA = Path(__file__).parent / "budget"
PER_DRAFT, PER_NODE = 40e-6, 1e-6  # seconds of growing a row's tree, as in tuning.py
PLAIN_HOST, DRAFT_HOST = 15e-6, 25e-6  # seconds of a step outside of its forward, and more of it with drafts
CHANGED = 1.02  # a forward of another size than the one before, on a CPU
LENGTHS = (2, 4, 8, 12, 16, 24, 32, 64)
SHORTEST, SPREAD = 40, 60  # tokens of an answer


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of curves.json. seconds: of one row, by tokens; per_row: seconds of each further row."""

    name: str
    sizes: Sequence[float]
    seconds: Sequence[float]
    per_row: float
    buckets: bool = False
    on_cpu: bool = True
    source: str = ""

    def table(self, rows: int, most: int = 520) -> list[float]:
        """Seconds of forwards of 0, 1, 2, ... tokens."""
        at = np.arange(most, dtype=float)
        if self.buckets:
            at = np.array(self.sizes)[np.minimum(np.searchsorted(self.sizes, at), len(self.sizes) - 1)]
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        found = np.interp(at, self.sizes, self.seconds) + slope * np.maximum(np.arange(most) - self.sizes[-1], 0)
        return list(found + self.per_row * (rows - 1))


def read_curves() -> dict[str, Curve]:
    lines = json.loads((DATA / "curves.json").read_text())
    return {name: Curve(name, **line) for name, line in lines.items()}


class Machine(NamedTuple):
    """noise: of a step, standard deviation of its log. what: steady, half (half as fast in every second phase), busy (another
    process on a core from the first third on: what tokens cost above one is more), steep or wrong (what tokens cost above one
    is half more, or three times what it was when costs were measured).
    """

    noise: float
    what: str = "steady"

    def pace(self, progress: float) -> tuple[float, float]:
        """(times a forward takes, times each further token takes), at that share of the job."""
        if self.what == "half":
            return (2.0, 1.0) if int(progress * 8) % 2 else (1.0, 1.0)
        if self.what == "busy":
            return (1.2, 1.6) if progress > 1 / 3 else (1.0, 1.0)
        if self.what in ("steep", "wrong"):
            return 1.0, 1.5 if self.what == "steep" else 3.0
        return 1.0, 1.0


class Policy(Protocol):
    def drafts(self, rows: int) -> bool: ...
    def choose(self, trees: list[np.ndarray], rows: int) -> list[int]:
        """Draft tokens of each row."""

    @property
    def price(self) -> float: ...

    def observe(self, rows: int, tokens: int, emitted: float, expected: float, seconds: float, drafting: float) -> None: ...


class Plain:
    price = 0.0

    def drafts(self, rows: int) -> bool:
        return False

    def choose(self, trees: list[np.ndarray], rows: int) -> list[int]:
        return [0] * len(trees)

    def observe(self, *args: float) -> None:
        pass


class Fixed(Plain):
    def __init__(self, length: int) -> None:
        self.most, self.grown = length - 1, length - 1

    def drafts(self, rows: int) -> bool:
        return True

    def choose(self, trees: list[np.ndarray], rows: int) -> list[int]:
        return [min(self.most, int(np.count_nonzero(tree))) for tree in trees]


class Oracle(Plain):
    """Knows the curve, and what the job's tokens take on average."""

    def __init__(self, tables: dict[int, np.ndarray], worth: float) -> None:
        self.tables, self.worth = tables, worth
        self.price = 0.5 * min(np.diff(table[rows : rows + 64]).min() for rows, table in tables.items()) / worth

    def drafts(self, rows: int) -> bool:
        return True

    def choose(self, trees: list[np.ndarray], rows: int) -> list[int]:
        table = self.tables[rows]
        chances = np.concatenate(trees)
        order = np.argsort(-chances, kind="stable")
        saved = np.concatenate([[0.0], np.cumsum(chances[order])]) * self.worth - table[rows : rows + len(chances) + 1]
        taken = order[: int(np.argmax(saved))]
        return np.bincount(taken // MOST, minlength=len(trees)).tolist()


class Job(NamedTuple):
    """What is run: recorded rows, as many as `rows`, again and again. Answers end at different lengths, as those of jobs do."""

    recording: Recording
    rows: int
    batch: int

    def positions(self, number: int) -> list[int]:
        """Where the row of this number begins, and ends."""
        begins, ends = self.recording.rows[:-1], self.recording.rows[1:]
        row = number % len(begins)
        return [int(begins[row]), int(min(ends[row], begins[row] + SHORTEST + 37 * number % SPREAD))]

    @property
    def tokens(self) -> int:
        return sum(end - begin for begin, end in map(self.positions, range(self.rows)))


class New:
    """lookahead/budget/policy.py. Costs are measured behind the first steps, as by the engine; kept: they are those of an
    earlier job, long enough and on a steady machine. spent: seconds of this job that measuring took.
    """

    def __init__(self, job: Job, curve: Curve, machine: Machine, kept: bool, seed: int = 0) -> None:
        self.budget, self.spent = Budget(), 0.0
        self._job, self._curve, self._machine, self._kept = job, curve, machine, kept
        self._tables = {rows: curve.table(rows) for rows in range(1, job.batch + 1)}
        self._before, self._random = 0, np.random.default_rng(seed + 1)

    def drafts(self, rows: int) -> bool:
        seconds = self.budget.first_seconds(rows)
        if seconds is None or self.budget.is_measured:
            return seconds is not None and self.budget.drafts(rows)
        self.budget.measured(self._measured(seconds), rows, seconds)
        return True

    def _measured(self, plain: float) -> StepCost:
        """plain: seconds of the forward of a plain step of this job."""
        batch, steps, most = self._job.batch, self._job.tokens / self._job.batch, ladder.SECONDS
        if self._kept:
            plain, steps, most = min(self._forward(batch, batch) for _ in range(FIRST - 1)), np.inf, np.inf
        cost = ladder.measure(self._forward, batch, steps, plain, self._curve.buckets, most)
        self.spent *= not self._kept
        return cost

    def _forward(self, rows: int, tokens: int) -> float:
        seconds = self._tables[rows][tokens] * (CHANGED if self._curve.on_cpu and tokens != self._before else 1.0)
        self._before = tokens
        self.spent += seconds
        return float(seconds * math.exp(self._random.normal(0, self._machine.noise)))

    @property
    def price(self) -> float:
        return self.budget.price

    def choose(self, trees: list[np.ndarray], rows: int) -> list[int]:
        sizes = [1 + int(np.count_nonzero(tree)) for tree in trees]
        spans = np.zeros((len(trees), 2), np.int64)
        spans[:, 1] = sizes
        spans[1:, 0] = np.cumsum(sizes)[:-1]
        chances = np.ones(sum(sizes), np.float32)
        for (begin, size), tree in zip(spans.tolist(), trees, strict=True):
            chances[begin + 1 : begin + size] = tree[: size - 1]
        return (self.budget.choose(chances, spans, rows) - 1).tolist()

    def observe(self, rows: int, tokens: int, emitted: float, expected: float, seconds: float, drafting: float) -> None:
        host = PLAIN_HOST + (DRAFT_HOST if drafting else 0)
        self.budget.observe(rows, tokens, emitted, expected, seconds, seconds - drafting - host, drafting > 0)


def run(job: Job, curve: Curve, machine: Machine, policy: Policy, seed: int = 0) -> tuple[float, int, int]:
    """(seconds, steps, those that drafted)."""
    recording, tables = job.recording, {rows: curve.table(rows) for rows in range(1, job.batch + 1)}
    random = np.random.default_rng(seed)
    chances, accepted = recording.probabilities, recording.accepted
    total, done, following = job.tokens, 0, 0
    running: list[list[int]] = []  # position, end
    spent, steps, drafted, before = 0.0, 0, 0, 0
    noise = np.exp(random.normal(0, machine.noise, 4096)) * np.where(random.random(4096) < 0.02, 2.0, 1.0)
    while True:
        while len(running) < job.batch and following < job.rows:
            running.append(job.positions(following))
            following += 1
        if not running:
            return spent, steps, drafted
        rows, expected, drafting, host = len(running), 0.0, 0.0, PLAIN_HOST
        nodes = [0] * rows
        whole, further = machine.pace(done / total)
        if policy.drafts(rows):
            trees = [chances[position] for position, _ in running]
            if policy.price > 0:
                trees = [np.where(tree >= policy.price, tree, 0) for tree in trees]
            most = getattr(policy, "grown", MOST)
            grown = sum(min(most, int(np.count_nonzero(tree))) for tree in trees)
            drafting = whole * (PER_DRAFT * rows + PER_NODE * grown)
            nodes = policy.choose(trees, rows)
            host += DRAFT_HOST
            drafted += 1
            expected = float(sum(tree[:n].sum() for tree, n in zip(trees, nodes, strict=True)))
        tokens = rows + sum(nodes) + (getattr(policy, "padding", 0) if sum(nodes) else 0)
        table = tables[rows]
        forward = whole * (table[rows] + further * (table[tokens] - table[rows]))
        if curve.on_cpu and tokens != before:
            forward *= CHANGED
        before = tokens
        emitted = 0
        for slot, n in zip(running, nodes, strict=True):
            gained = int(accepted[slot[0], n]) + 1
            gained = min(gained, slot[1] - slot[0])
            slot[0] += gained
            emitted += gained
        running = [slot for slot in running if slot[0] < slot[1]]
        seconds = forward + drafting + whole * host
        spent += seconds
        done += emitted
        factor = noise[steps % 4096]
        steps += 1
        policy.observe(rows, tokens, emitted, expected, seconds * factor, drafting * factor)


def new_seconds(job: Job, curve: Curve, machine: Machine, kept: bool, seed: int = 0) -> float:
    """Seconds of the job with the policy of today, measuring costs included."""
    policy = New(job, curve, machine, kept, seed)
    return run(job, curve, machine, policy, seed)[0] + policy.spent


class Result(NamedTuple):
    plain: float
    fixed: dict[int, float]
    oracle: float
    new: float
    kept: float  # the new one with a ladder that is kept

    def line(self) -> dict[str, float]:
        best = min(self.plain, *self.fixed.values())
        return {
            "best fixed": self.plain / min(self.fixed.values()),
            "oracle": self.plain / self.oracle,
            "new": self.plain / self.new,
            "kept": self.plain / self.kept,
            "new of best": best / self.new,
            "kept of best": best / self.kept,
        }


Known = tuple[float, dict[int, float], float]  # seconds: plain, of each fixed length, of the oracle


def known(job: Job, curve: Curve, machine: Machine) -> Known:
    """What does not depend on any budget."""
    plain = run(job, curve, machine, Plain())[0]
    fixed = {length: run(job, curve, machine, Fixed(length))[0] for length in LENGTHS}
    tables = {rows: np.array(curve.table(rows, 8 * 64 + 64)) for rows in range(1, job.batch + 1)}
    oracle = min(plain, *fixed.values())
    for _ in range(3):
        oracle = min(oracle, run(job, curve, machine, Oracle(tables, oracle / job.tokens))[0])
    return plain, fixed, oracle


def cell(job: Job, curve: Curve, machine: Machine, others: Known, seeds: Sequence[int] = (0,)) -> Result:
    plain, fixed, oracle = others
    found = (float(np.mean([new_seconds(job, curve, machine, kept, seed) for seed in seeds])) for kept in (False, True))
    return Result(plain, fixed, oracle, *found)


MACHINES = (Machine(0.03), Machine(0.10), *(Machine(0.03, what) for what in ("half", "busy", "steep", "wrong")))


def in_cell(name: tuple[str, str, int, int, Machine], others: Known | None, seeds: int) -> tuple[Known, Result]:
    """A cell by the names of its curve and workload, its batch size, rows and machine."""
    curve, workload, batch, rows, machine = name
    job = Job(read_recording(DATA / f"{workload}.npz"), rows, batch)
    others = others or known(job, read_curves()[curve], machine)
    return others, cell(job, read_curves()[curve], machine, others, range(seeds))


def title(name: tuple[str, str, int, int, Machine]) -> str:
    curve, workload, batch, rows, machine = name
    return f"{curve}/{workload}/b{batch}/r{rows}/{machine.what}{machine.noise}"


def report(lines: list[tuple[str, dict[str, float]]], worst: int) -> None:
    for key in ("new", "kept", "new of best", "kept of best"):
        ranked = sorted((line[key], name) for name, line in lines if not math.isnan(line[key]))
        if ranked:
            mean = math.exp(sum(math.log(value) for value, _ in ranked) / len(ranked))
            print(f"\n{key}: mean {mean:.4f}, worst:")
            for value, name in ranked[:worst]:
                print(f"  {value:.4f} {name}")


def by_kind(lines: list[tuple[str, dict[str, float]]], key: str) -> None:
    """The worst cell, the twentieth and the mean of each batch size, rows and machine."""
    kinds: dict[str, list[float]] = {}
    for name, line in lines:
        for kind in ("all", " ".join(name.split("/")[2:])):
            kinds.setdefault(kind, []).append(line[key])
    print(f"\n{key}:")
    for kind, values in kinds.items():
        mean = math.exp(float(np.mean(np.log(values))))
        print(f"  {kind:22} worst {min(values):.3f}, 5 % {np.quantile(values, 0.05):.3f}, mean {mean:.3f}, {len(values)} cells")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cells whose name holds all of these words")
    parser.add_argument("--every", type=int, default=1, help="one cell in so many")
    parser.add_argument("--show", action="store_true", help="all cells")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cache", type=Path, help="keeps what does not depend on a budget")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--worst", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each budget, with noise of their own")
    args = parser.parse_args()
    workloads = [path.stem for path in sorted(DATA.glob("*.npz"))]
    names = [*itertools.product(read_curves(), workloads, args.batch, args.rows, MACHINES)]
    names = [name for name in names if all(word in title(name) for word in args.only.split())][:: args.every]
    seen = json.loads(args.cache.read_text()) if args.cache and args.cache.exists() else {}
    lines, began = [], time.time()
    with ProcessPoolExecutor(args.jobs) as pool:
        others = [seen.get(title(name)) for name in names]
        results = pool.map(in_cell, names, others, repeat(args.seeds), chunksize=4)
        for name, (found, result) in zip(names, results, strict=True):
            seen[title(name)] = found
            lines.append((title(name), result.line()))
            if args.show:
                print(f"{title(name):50}", *(f"{key} {value:.3f}" for key, value in result.line().items()), flush=True)
    if args.cache:
        args.cache.write_text(json.dumps(seen))
    report(lines, args.worst)
    for key in ("new of best", "kept", "kept of best"):
        by_kind(lines, key)
    print(f"{len(lines)} cells, {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
