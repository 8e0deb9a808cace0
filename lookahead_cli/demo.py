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
    """Build a trie, look into it, generate and bench, on a small model that ships with the package. Needs no network.

    The model (5.8 M parameters, trained on GSM8K) is too small to be right; what it says is said faster, token for token.

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

    from lookahead_cli import bench, build_trie, generate, inspect_trie, render
    from lookahead_cli.options import draft_options

    logging.getLogger("transformers").setLevel(logging.ERROR)
    samples = samples_folder()
    model, trie, answers = str(samples / "demo-model"), str(folder / TRIE_FILE), str(folder / ANSWERS)
    prompts = folder / PROMPTS
    lines = (samples / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:rows]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def say(step: str, command_line: str) -> None:
        render.out.print(f"\n{step}", style="bold")
        render.out.print(f"$ {command_line}", style="dim")

    say(
        "1. A trie of the answers in the training corpus", "lookahead build-trie corpus.jsonl -o answers.trie --tokenizer MODEL"
    )
    build_trie.command([str(samples / "corpus.jsonl")], trie, tokenizer=model, source="gsm8k train answers")
    say("2. What it would draft", 'lookahead inspect-trie answers.trie --query " He has 3 *" --top 5')
    inspect_trie.command(trie, " He has 3 *", top=5)
    say(
        "3. Answers to held-out questions",
        "lookahead generate --model MODEL --input prompts.jsonl --trie answers.trie -o answers.jsonl",
    )
    prompts_of_three = folder / THREE
    prompts_of_three.write_text("\n".join(lines[:3]) + "\n", encoding="utf-8")
    generate.command(model, [str(prompts_of_three)], out=answers, trie=[trie], overwrite=True, quiet=False)
    _print_answers(prompts_of_three, Path(answers))
    say("4. The proof", "lookahead bench --model MODEL --input prompts.jsonl --trie answers.trie")
    options = [draft_options(name, length, 64) for name, length in (("auto", "auto"), ("hierarchical", "16"), ("single", "8"))]
    (comparison,), _ = bench.compare_on(
        model, str(prompts), [trie], options, None, 256, "float32", "auto", None, True, True, shown=True
    )
    bench.print_comparison(comparison)
    best = comparison.runs[1]
    same = sum(a == b for a, b in zip(best.outputs, comparison.runs[0].outputs, strict=True))
    render.out.print(
        f"\n{same}/{comparison.rows} outputs identical, {best.speedup:.1f} times faster", style="bold green", end=" "
    )
    render.out.print(
        f"than plain decoding ({best.tokens_per_second:.0f} against {comparison.runs[0].tokens_per_second:.0f} tokens/s)"
    )


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
    """Where the demo model and corpus lie: inside an installed package, or beside it in a source checkout."""
    from lookahead.errors import LookaheadError

    here = Path(__file__).resolve().parent
    for folder in (here / "samples", here.parent / "samples"):
        if (folder / "demo-model" / "config.json").exists():
            return folder
    raise LookaheadError(f"{here / 'samples'}: the demo files are missing. Reinstall the package.")
