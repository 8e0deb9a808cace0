"""The commands that faults of the disk are injected into, with small files; each is run here once, so that children need not
import or compile anything."""

import functools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.deep.faults import Scenario

TOKENIZER = Path(__file__).parents[2] / "samples" / "demo-model"
SMALL_MEMORY = "1MiB"


def contents(folder: Path, *names: str) -> list[bytes | None]:
    """Of each file its bytes."""
    return [(folder / name).read_bytes() if (folder / name).exists() else None for name in names]


def id_corpus(folder: Path, name: str = "ids.jsonl", rows: int = 40) -> None:
    lines = [json.dumps({"ids": [(7 * row + 3 * k) % 50 for k in range(20 + row % 5)]}) for row in range(rows)]
    (folder / name).write_text("\n".join(lines) + "\n")


def run_here(folder: Path, *command: str) -> None:
    """The command in this process; what a child needs is then imported and compiled."""
    from lookahead_cli.app import run

    before = os.getcwd()
    os.chdir(folder)
    try:
        assert run(command) == 0, command
    finally:
        os.chdir(before)


def of_files(made: Path, given: Sequence[str], command: Sequence[str], *targets: str) -> Scenario:
    """A scenario with copies of the files `given` in the folder `made`; it has been run there."""

    def prepare(folder: Path) -> None:
        for name in given:
            shutil.copy(made / name, folder / name)

    warm = made / "warm"
    warm.mkdir()
    prepare(warm)
    run_here(warm, *command)
    return Scenario(prepare, tuple(command), lambda folder: contents(folder, *targets))


def build_in_runs(made: Path) -> Scenario:
    """A trie that replaces another, by sorted runs on disk."""
    small_runs()
    id_corpus(made)
    id_corpus(made, "other.jsonl", 5)
    run_here(made, "build-trie", "other.jsonl", "-o", "x.trie", "--vocab-size", "50", "--json")
    command = ("build-trie", "ids.jsonl", "-o", "x.trie", "--vocab-size", "50", "--workers", "2", "--json")
    return of_files(made, ["ids.jsonl", "x.trie"], command, "x.trie")


def build_pruned(made: Path) -> Scenario:
    """With --min-count, which takes a scratch file."""
    id_corpus(made)
    command = ("build-trie", "ids.jsonl", "-o", "x.trie", "--vocab-size", "50", "--min-count", "2", "--json")
    return of_files(made, ["ids.jsonl"], command, "x.trie")


def append_joining(made: Path) -> Scenario:
    """To a trie of as many segments as there may be: the smaller ones are joined."""
    id_corpus(made, "ids.jsonl", 5)
    run_here(made, "build-trie", "ids.jsonl", "-o", "x.trie", "--vocab-size", "50", "--json")
    for _ in range(7):
        run_here(made, "build-trie", "ids.jsonl", "--append", "x.trie", "--json")
    return of_files(made, ["x.trie", "ids.jsonl"], ("build-trie", "ids.jsonl", "--append", "x.trie", "--json"), "x.trie")


def two_segments(made: Path) -> None:
    id_corpus(made)
    id_corpus(made, "more.jsonl", 5)
    run_here(made, "build-trie", "ids.jsonl", "-o", "a.trie", "--vocab-size", "50", "--json")
    run_here(made, "build-trie", "more.jsonl", "--append", "a.trie", "--json")


def merge(made: Path) -> Scenario:
    """The output is the input."""
    two_segments(made)
    return of_files(made, ["a.trie"], ("merge-tries", "a.trie", "-o", "a.trie", "--json"), "a.trie")


def prune(made: Path) -> Scenario:
    two_segments(made)
    return of_files(made, ["a.trie"], ("prune-trie", "a.trie", "-o", "x.trie", "--min-count", "2", "--json"), "x.trie")


def small_runs() -> None:
    """Memory for a few documents only, so that there are many runs: for this process and its children."""
    from lookahead.trie import segment
    from lookahead.trie.runs import Pages
    from lookahead.trie.segment import BuildResources

    segment.GROUP_DOCUMENTS = 8
    BuildResources.arrays = property(lambda self: 8)
    BuildResources.pages = lambda self: Pages(0)


# ---- jobs
PROMPTS = [{"id": f"q{number}", "prompt": prompt} for number, prompt in enumerate(["Hello", "What is", "The cat"])]


def generate(made: Path) -> Scenario:
    """With all that it writes: rows, journal, manifest, metrics, a trie that is there. It is resumed until it is done."""
    import dataclasses

    import torch

    from lookahead.job.setup import EngineSettings
    from lookahead.models.options import ModelOptions

    torch.set_num_threads(1)
    out = "out.jsonl"
    (made / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    model = ("--model", str(TOKENIZER), "--input", "in.jsonl", "--max-new-tokens", "3", "--batch-size", "2", "--quiet")
    command = ("generate", *model, "-o", out, "--metrics", "job.prom", "--save-trie", "learned.trie", "--resume")
    run_here(made, *[part if part != out else "other.jsonl" for part in command])
    real = EngineSettings.load
    loaded: list[Any] = []

    def load_once(settings: EngineSettings, *arguments: Any) -> Any:
        return loaded.pop() if loaded else real(settings, *arguments)

    EngineSettings.load = load_once
    scenario = of_files(made, ["in.jsonl", "learned.trie"], command)
    settings = EngineSettings(ModelOptions(str(TOKENIZER)), batch_size=2)
    loaded.append(real(settings))  # for the children, each of which takes its copy of it
    answered, kept = rows_of(made / "warm" / out), documents_of(made / "warm")

    def is_done(folder: Path) -> bool:
        manifest = folder / f"{out}.manifest.json"
        done = (folder / out).exists() and rows_of(folder / out) == answered and documents_of(folder) == kept
        return done and manifest.exists() and json.loads(manifest.read_text())["state"] == "complete"

    def whole(folder: Path) -> None:
        if (folder / out).exists():  # the last line may be cut short
            lines = (folder / out).read_bytes().splitlines(keepends=True)
            assert all(steady(json.loads(line)) in answered for line in lines if line.endswith(b"\n"))
        documents_of(folder)
        for manifest in folder.glob("*.manifest.json"):
            json.loads(manifest.read_text())
        if (folder / "job.prom").exists():
            assert (folder / "job.prom").read_text().endswith("\n")

    notice = r"^--metrics .* The job continues\.$"
    return dataclasses.replace(scenario, state=is_done, whole=whole, one_file=False, notice=notice)


def steady(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says in every run."""
    return {name: row[name] for name in ("id", "text", "finish_reason", "completion_tokens")}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [steady(json.loads(line)) for line in path.read_bytes().splitlines()]


def documents_of(folder: Path) -> list[list[int]]:
    """What the trie holds, checked; in any order, as rows end in any."""
    from lookahead.trie.file import Trie

    if not (folder / "learned.trie").exists():
        return []
    trie = Trie(folder / "learned.trie")
    trie.verify()
    return sorted(document.tolist() for document in trie.documents())


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    made.__name__: made for made in (build_in_runs, build_pruned, append_joining, merge, prune, generate)
}


def prepared(name: str, made: Path) -> Any:
    """The scenario of this name, which uses files in the folder `made`, a new one."""
    import typer.main

    typer.main.get_command = functools.cache(typer.main.get_command)  # most of what a run of a small command takes
    made.mkdir(parents=True)
    return SCENARIOS[name](made)
