"""What each tuned constant of drafting and of the draft budget is worth: what half of it and twice as much cost.

In: logged answers (`NAME.train.jsonl` warms a trie, `NAME.test.jsonl` is drafted for; rows of `prompt_ids` and `response_ids`).
Out: a file of results, and docs/tuning.md made of them.

    python benchmarks/tuning.py run --data FOLDER          hours; goes on where it was interrupted
    python benchmarks/tuning.py run --data FOLDER --only draft/mixture.py:MEMORY
    python benchmarks/tuning.py write                      docs/tuning.md

A variant is the package with one constant changed in its source, as one would edit it, in a folder and a process of its own. No
clock is read: what is compared are counts, which repeat exactly.

    logged     EDL of logged answers, draft trees of a fixed size: 15 and 63 draft tokens warm, 63 cold
    answered   EDL of the demo model's own answers, which is where there are runner-up tokens

Constants of the draft budget are varied in budget_simulator.py; their table (results/budget.md) becomes a part of the page.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from host_time import read_pairs

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "tuning.jsonl"
IDEAS, BUDGET = RESULTS.with_name("ideas.md"), RESULTS.with_name("budget.md")
WORKLOADS = ("gsm8k-model", "alpaca-tempnet", "humaneval", "sum-davinci")
MATTERS = 0.3  # per cent
FACTORS = (0.5, 2.0)

# What a constant is measured on, by its file or its file's folder.
MEASURES = {
    "draft": "logged",
    "draft/recycled.py": "answered",
    "draft/sources.py": "sources",
    "budget": "",  # budget_simulator.py
}
# Files whose numbers tune neither drafts nor the budget.
OTHER_FILES = (
    "draft/explain.py",
    "draft/options.py",
    "draft/tree.py",
    "budget/estimate.py",
    "budget/profile.py",
    "budget/speedup.py",
)
# Names of things, sizes of formats, and what follows from other constants.
NOT_TUNED = {
    "draft/arrays.py": ("MOST_THREADS", "COLUMNS", "OWN_COLUMNS", "RECENT", "BINS", "CHAINS"),
    "draft/calibration.py": ("FIRST_BIN", "LEAST", "OCTAVE"),
    "draft/cells.py": ("OWN", "OTHER", "ORDERS", "COUNTS", "SHARES", "RANKS", "HITS", "MISSES", "SEENS", "BINARY"),
    "draft/experts.py": ("LAST", "LEAST_WEIGHT"),
    "draft/mixture.py": ("BY_ORDERS",),
    "draft/own_text.py": ("TOKEN", "CHAIN"),
    "draft/sorted_text.py": ("END", "FEW"),
    "draft/priors.py": ("UNTRAINED",),
    "draft/recycled.py": ("ANY", "KINDS"),
}


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number, or several, that a module gives a name. file: within the package. start, end: of its value in the source."""

    file: str
    name: str
    start: int
    end: int
    source: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.name}"

    @property
    def measure(self) -> str:
        return MEASURES.get(self.file, MEASURES[self.file.split("/")[0]])

    @property
    def value(self) -> Any:
        return eval(self.source, {"np": np})

    def times(self, factor: float) -> str:
        """The source of so many times its value. Of a weight of the past, it is its memory that is; of a factor just above 1,
        what it is above 1.
        """
        return _source(self.value, factor)


def _source(value: Any, factor: float) -> str:
    if isinstance(value, tuple):
        return "(" + "".join(f"{_multiple(each, factor)!r}, " for each in value) + ")"
    if isinstance(value, np.ndarray):
        return f"np.array({[_multiple(each, factor) for each in value.tolist()]}, np.{value.dtype})"
    if isinstance(value, np.floating):
        return f"np.{value.dtype}({_source(round(float(value), 6), factor)})"
    if 0.9 < value < 1:
        return repr(round(1 - (1 - value) / factor, 9))
    if 1 < value <= 1.5:
        return repr(round(1 + (value - 1) * factor, 9))
    return repr(_multiple(value, factor))


def _multiple(value: float, factor: float) -> float:
    return round(value * factor) if isinstance(value, int) else round(value * factor, 9)


def constants() -> list[Constant]:
    """All tuned constants, in the order of files and lines."""
    found = []
    for room in ("draft", "budget"):
        for path in sorted((ROOT / "lookahead" / room).glob("*.py")):
            file = f"{room}/{path.name}"
            if file not in OTHER_FILES:
                found += [each for each in _in_file(file, path.read_text()) if each.name not in NOT_TUNED.get(file, ())]
    return found


def _in_file(file: str, text: str) -> Iterator[Constant]:
    lines = np.cumsum([0, *(len(line) for line in text.splitlines(keepends=True))]).tolist()
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Assign) or not isinstance(target := statement.targets[0], ast.Name | ast.Tuple):
            continue
        if isinstance(target, ast.Name):
            pairs = [(target, statement.value)]
        elif isinstance(statement.value, ast.Tuple):
            pairs = list(zip(target.elts, statement.value.elts, strict=True))  # type: ignore[arg-type]
        else:
            continue
        for name, value in pairs:
            if _is_number(value):
                start = lines[value.lineno - 1] + value.col_offset
                end = lines[(value.end_lineno or 0) - 1] + (value.end_col_offset or 0)
                yield Constant(file, name.id, start, end, text[start:end])


def _is_number(node: ast.expr) -> bool:
    """The expression is made of numbers alone."""
    allowed = (ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load, ast.Call)
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute | ast.Name):
            if not ast.unparse(each).startswith("np"):
                return False
        elif not isinstance(each, allowed) or (isinstance(each, ast.Constant) and not isinstance(each.value, int | float)):
            return False
    return not isinstance(node, ast.Call) or ast.unparse(node.func) in ("np.float32", "np.array")


# Running variants.


def run(data: Path, results: Path, only: Sequence[str], jobs: int) -> None:
    """Measure what is not in `results` yet, for this state of the package."""
    state = _state()
    known = {(each["key"], each["factor"]) for each in _read(results) if each["state"] == state}
    wanted: list[tuple[Constant | None, float, str]] = [
        (None, 1.0, measure) for measure in sorted(set(MEASURES.values()) - {""}) if (measure, 1.0) not in known
    ]
    for constant in constants():
        if constant.measure and (not only or constant.key in only):
            wanted += [(constant, factor, constant.measure) for factor in FACTORS if (constant.key, factor) not in known]
    results.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        _build_tries(data, Path(folder))
        with ThreadPoolExecutor(jobs) as pool:
            for line in pool.map(lambda each: _variant(each, state, data, Path(folder)), wanted):
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(line["key"], line["factor"], line.get("problem") or _mean(line["figures"]), flush=True)


def _variant(wanted: tuple[Constant | None, float, str], state: str, data: Path, tries: Path) -> dict[str, Any]:
    """A line of the results. wanted: constant (None: the package as it is), factor, measure."""
    constant, factor, measure = wanted
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for package in ("lookahead", "lookahead_cli"):
            shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
        if constant:
            path = root / "lookahead" / constant.file
            text = path.read_text()
            path.write_text(text[: constant.start] + constant.times(factor) + text[constant.end :])
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(tries)}
        command = [sys.executable, __file__, "measure", measure, "--data", str(data), "--tries", str(tries)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    line: dict[str, Any] = {"key": constant.key if constant else measure, "factor": factor, "state": state}
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"ended with code {done.returncode}"]
        return line | {"problem": reason[0][:200]}
    figures = json.loads(done.stdout.splitlines()[-1])
    return line | {"figures": {name: float(f"{value:.6g}") for name, value in figures.items()}}


def _state() -> str:
    """Of the package's source."""
    files = sorted((ROOT / "lookahead").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def _read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []


def _mean(figures: dict[str, float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, figures.values())) / len(figures))


# Writing the table.

ABOUT = """# Tuned constants

The constants of drafting and of the draft budget that no theory gives, and the cost of half and of twice each value: EDL or
speed lost in per cent, the geometric mean over all workloads and settings; negative numbers are gains. Of a decay factor (0.98)
the memory length is halved or doubled, of a factor just above 1 (1.03) its distance from 1, of several numbers each number.
`benchmarks/tuning.py` describes how it is measured and writes this page.

A constant stays if half or twice its value costs {matters} % or more, or if it bounds an array or a search (then it costs time
or memory, which are not shown here).
"""
MEASURED = {
    "logged": "EDL of logged answers, drafts of a fixed size",
    "answered": "EDL of the demo model's own answers, where there are runner-up tokens",
    "sources": "EDL of logged answers with a draft source of the user's own",
}


def write(results: Path, page: Path) -> None:
    """docs/tuning.md, from the latest results of each constant that there is now."""
    found = {(each["key"], each["factor"]): each for each in _read(results)}
    bases = {line["state"] + line["key"]: line for line in _read(results) if line["factor"] == 1.0}
    text = ABOUT.format(matters=MATTERS)
    for measure, title in MEASURED.items():
        rows = []
        for constant in (each for each in constants() if each.measure == measure):
            value = " ".join(constant.source.split())
            costs = " | ".join(_cost(found.get((constant.key, factor)), bases, measure) for factor in FACTORS)
            rows.append(f"| `{constant.file}` `{constant.name}` | `{value}` | {costs} |")
        text += (
            f"\n## {title[0].upper()}{title[1:]}\n\n| constant | value | half costs % | twice costs % |\n|---|---|---|---|\n"
        )
        text += "\n".join(rows) + "\n"
    text += "".join(each.read_text(encoding="utf-8") for each in (BUDGET, IDEAS))
    page.write_text(text, encoding="utf-8")


def _cost(line: dict[str, Any] | None, bases: dict[str, dict[str, Any]], measure: str) -> str:
    if line is None:
        return "not measured"
    if "problem" in line:
        return "cannot be"
    base = bases[line["state"] + measure]
    return f"{100 * (1 - _mean(line['figures']) / _mean(base['figures'])):.2f}"


# Measures. These run in the variant's process.


def measure(which: str, data: Path, tries: Path) -> dict[str, float]:
    return {"logged": _logged, "answered": _answered, "sources": _sources}[which](data, tries)


def _logged(data: Path, tries: Path) -> dict[str, float]:
    from lookahead.bench.replay import replay
    from lookahead.draft.options import DraftOptions
    from lookahead.trie.file import Trie

    figures = {}
    for name in WORKLOADS:
        pairs, trie = read_pairs(data / f"{name}.test.jsonl"), Trie(tries / f"{name}.trie")
        for nodes, warm in ((15, True), (63, True), (63, False)):
            options = DraftOptions(decoding_length=nodes + 1, branch_length=nodes, adaptive=False)
            figures[f"{name} {nodes} {'warm' if warm else 'cold'}"] = replay(pairs, [trie] if warm else [], options).edl
    return figures


def _answered(data: Path, tries: Path) -> dict[str, float]:
    from lookahead.decode.engine import DecodingEngine
    from lookahead.draft.drafter import Drafter
    from lookahead.draft.options import DraftOptions
    from lookahead.models.load import load_model
    from lookahead.tokenizer import load_tokenizer

    model = str(ROOT / "samples" / "demo-model")
    target, tokenizer = load_model(model, dtype="float32"), load_tokenizer(model)
    with (ROOT / "samples" / "prompts.jsonl").open(encoding="utf-8") as file:
        prompts = [tokenizer.encode(json.loads(line)["prompt"]) for line in file][:60]
    figures = {}
    for nodes in (15, 63):
        drafter = Drafter([], DraftOptions(decoding_length=nodes + 1, branch_length=nodes, adaptive=False))
        engine = DecodingEngine(target, drafter, 1)
        done = [engine.generate(prompt, 128) for prompt in prompts]
        figures[f"demo model {nodes} cold"] = sum(len(each.token_ids) - 1 for each in done) / sum(each.steps for each in done)
    return figures


def _sources(data: Path, tries: Path) -> dict[str, float]:
    from lookahead.bench.replay import replay_with
    from lookahead.draft.drafter import Drafter
    from lookahead.draft.options import DraftOptions

    class KnownTexts:
        """What followed the last two tokens in these texts."""

        def __init__(self, texts: Sequence[Sequence[int]]):
            self.behind: dict[tuple[int, ...], list[Sequence[int]]] = {}
            for text in texts:
                for at in range(2, len(text)):
                    self.behind.setdefault(tuple(text[at - 2 : at]), []).append(text[at : at + 32])

        def propose(self, request: int, context: np.ndarray, most: int) -> Sequence[Sequence[int]]:
            return self.behind.get(tuple(context[-2:].tolist()), [])[:8]

        def observe(self, request: int, token_ids: Sequence[int], ended: bool) -> None:
            pass

    figures = {}
    for name in ("gsm8k-model", "humaneval"):
        source = KnownTexts([response for _, response in read_pairs(data / f"{name}.train.jsonl")[:500]])
        drafter = Drafter([], DraftOptions(decoding_length=16, branch_length=15, adaptive=False), sources=[source])
        figures[f"{name} 15 with a source"] = replay_with(drafter, read_pairs(data / f"{name}.test.jsonl")[:100]).edl
    return figures


def _build_tries(data: Path, folder: Path) -> None:
    from lookahead.token_documents import TokenDocument, TokenizerIdentity
    from lookahead.trie.build import build_trie

    for name in WORKLOADS:
        pairs = read_pairs(data / f"{name}.train.jsonl")
        documents = [TokenDocument([*prompt_ids, *response_ids], "logged") for prompt_ids, response_ids in pairs]
        build_trie(documents, folder / f"{name}.trie", TokenizerIdentity(32000, "0" * 16, "logged"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "measure", "write", "list"])
    parser.add_argument("measure", nargs="?", choices=sorted(set(MEASURES.values()) - {""}))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tries", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.data.resolve(), arguments.results, arguments.only, arguments.jobs)
    elif arguments.what == "measure":
        print(json.dumps(measure(arguments.measure, arguments.data, arguments.tries)))
    elif arguments.what == "write":
        write(arguments.results, ROOT / "docs" / "tuning.md")
    elif arguments.what == "list":
        for each in constants():
            print(f"{each.key:45} {each.measure:10} {each.source:30} {each.times(0.5):30} {each.times(2.0)}")
