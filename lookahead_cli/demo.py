"""lookahead demo: everything once, on the shipped model and corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PROMPTS, THREE, TRIE_FILE, ANSWERS = "prompts.jsonl", "three.jsonl", "answers.trie", "answers.jsonl"  # what it writes


def command(
    rows: Annotated[int, typer.Option("--rows", min=1, max=200, metavar="N", help="Held-out questions to bench on.")] = 24,
    keep: Annotated[
        str | None, typer.Option("--keep", metavar="DIR", help="Keep the trie and the answers in this folder.")
    ] = None,
) -> None:
    """Build a trie, inspect it, generate and bench, on a small model that ships with the package. Needs no network.

    The model (5.8 M parameters, trained on GSM8K) is too small to give right answers. It gives the same answers faster, token
    for token.

    Example: lookahead demo
    """
    import tempfile

    from lookahead.errors import LookaheadError

    if keep is not None and not Path(keep).is_dir():
        raise LookaheadError(f"{keep}: no such folder. Create it first.")
    if keep is not None:
        check_kept(Path(keep))
        _run(Path(keep), rows)
        return
    with tempfile.TemporaryDirectory(prefix="lookahead-demo-") as folder:
        _run(Path(folder), rows)


def _run(folder: Path, rows: int) -> None:
    import logging

    from lookahead import compile_ahead
    from lookahead_cli import render

    logging.getLogger("transformers").setLevel(logging.ERROR)
    if compile_ahead.start(["sorting", "forward", "drafting", "budget", "steps"]):
        render.announce_compiling()
    samples = samples_folder()
    model, trie = str(samples / "demo-model"), str(folder / TRIE_FILE)
    prompts, three = folder / PROMPTS, folder / THREE
    lines = (samples / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:rows]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    three.write_text("\n".join(lines[:3]) + "\n", encoding="utf-8")
    _build_and_inspect(samples / "corpus.jsonl", trie, model)
    _generate(model, trie, three, folder / ANSWERS)
    _bench(model, trie, prompts)


def _say(step: str, command_line: str) -> None:
    from lookahead_cli import render

    render.out.print(f"\n{step}", style="bold")
    render.out.print(f"$ {command_line}", style="dim")


def _build_and_inspect(corpus: Path, trie: str, model: str) -> None:
    from lookahead.bench.trie_report import TrieQuestions
    from lookahead.corpus_build import BuildSpec, CorpusBuild
    from lookahead_cli import build_trie, inspect_trie

    _say(
        "1. A trie of the answers in the training corpus", "lookahead build-trie corpus.jsonl -o answers.trie --tokenizer MODEL"
    )
    build = CorpusBuild(BuildSpec([str(corpus)], trie, tokenizer=model, source="gsm8k train answers"))
    build_trie.print_built(build_trie.run(build))
    _say("2. What it would draft", 'lookahead inspect-trie answers.trie --query " He has 3 *" --top 5')
    inspect_trie.show(trie, inspect_trie.inspect(trie, TrieQuestions(" He has 3 *", top=5)))


def _generate(model: str, trie: str, prompts: Path, answers: Path) -> None:
    from lookahead.job.spec import JobSpec
    from lookahead_cli import generate

    _say(
        "3. Answers to held-out questions",
        "lookahead generate --model MODEL --input prompts.jsonl --trie answers.trie -o answers.jsonl",
    )
    generate.answer(JobSpec.of(model=model, input=prompts, out=answers, trie=trie, overwrite=True))
    _print_answers(prompts, answers)


def _bench(model: str, trie: str, prompts: Path) -> None:
    from lookahead.bench.on_model import ModelBench, bench_prompts
    from lookahead.job.drafting import draft_options
    from lookahead_cli import bench_options, comparison, render

    _say("4. The proof", "lookahead bench --model MODEL --input prompts.jsonl --trie answers.trie")
    options = [draft_options(name, length, 64) for name, length in (("auto", "auto"), ("hierarchical", "16"), ("single", "8"))]
    bench = ModelBench(model, options, dtype="float32", lossless_rows=None)
    (compared,), _ = bench_prompts(bench, str(prompts), [trie], events=bench_options.on_screen(json=False))
    comparison.print_comparison(compared)
    best, plain = compared.runs[1], compared.runs[0]
    same = sum(a == b for a, b in zip(best.outputs, plain.outputs, strict=True))
    verdict = f"\n{same}/{compared.rows} outputs identical, {best.speedup:.2g} times the speed"
    render.out.print(verdict, style="bold green", end=" ")
    render.out.print(f"of plain decoding ({best.tokens_per_second:.0f} against {plain.tokens_per_second:.0f} tokens/s)")
    if best.speedup < 1.1:
        render.out.print("A forward of this small model takes about as long as a draft: `lookahead bench` measures yours.")


def check_kept(folder: Path) -> None:
    """Raise UsageError or LookaheadError if the demo would replace files in `folder` that it has not made, or cannot write."""
    from lookahead.outputs import JOURNAL, LEARNED, MANIFEST, TRIE, Kind, Output, check_outputs

    lines = set((samples_folder() / "prompts.jsonl").read_bytes().splitlines())
    prompts = Kind("a file of the demo's prompts", lambda path: lines.issuperset(path.read_bytes().splitlines()))
    answers = Kind("a file of the demo's answers", lambda path: path.with_name(f"{ANSWERS}.journal").is_file())
    beside = {"journal": JOURNAL, "manifest.json": MANIFEST, "learned.jsonl": LEARNED}
    kinds = {PROMPTS: prompts, THREE: prompts, TRIE_FILE: TRIE, ANSWERS: answers}
    kinds |= {f"{ANSWERS}.{ending}": kind for ending, kind in beside.items()}
    check_outputs([Output("--keep", folder / name, kind) for name, kind in kinds.items()], [])


def _print_answers(prompts: Path, answers: Path) -> None:
    import json

    from lookahead_cli import render

    for prompt, answer in zip(prompts.read_text("utf-8").splitlines(), answers.read_text("utf-8").splitlines(), strict=True):
        row = json.loads(answer)
        render.out.print(json.loads(prompt)["prompt"], style="cyan", end="")
        render.out.print(row["text"])
        render.out.print(
            f"{row['completion_tokens']} tokens in {row['steps']} steps, EDL {row['edl']:.2f}, {row['seconds']:.2f} s\n",
            style="dim",
        )


def samples_folder() -> Path:
    """Where the demo model and corpus lie: inside an installed package, or next to it in a source checkout."""
    from lookahead.errors import LookaheadError

    here = Path(__file__).resolve().parent
    for folder in (here / "samples", here.parent / "samples"):
        if (folder / "demo-model" / "config.json").exists():
            return folder
    raise LookaheadError(f"{here / 'samples'}: the demo files are missing. Reinstall the package.")
