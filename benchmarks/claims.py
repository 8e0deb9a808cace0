"""The speedup that jobs report, beside the clock. In: a model and prompts. Out: a table of twelve kinds of jobs.

    python benchmarks/claims.py --model FOLDER --chat questions.jsonl --passages rag.jsonl

Each job runs by the command line with drafts and with `--strategy off`, in turn, `--turns` times. The clock is the ratio of the
seconds of answering (loading is the same either way) of all turns; the claim the mean of what the turns with drafts reported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

PROMPTS = Path(__file__).parent.parent / "samples" / "prompts.jsonl"
OTHER = "Explain each step."
SCHEMA = {
    "type": "object",
    "properties": {"steps": {"type": "array", "items": {"type": "string"}, "maxItems": 6}, "answer": {"type": "integer"}},
    "required": ["steps", "answer"],
}
# Name, prompts, batch size, options.
JOBS = (
    ("questions", "chat", 1, "--max-new-tokens 128"),
    ("questions", "chat", 8, "--max-new-tokens 128"),
    ("passages", "passages", 1, "--max-new-tokens 96"),
    ("passages", "passages", 8, "--max-new-tokens 96"),
    ("again, other system prompt", "again", 1, "--max-new-tokens 128 --trie {trie}"),
    ("again, other system prompt", "again", 8, "--max-new-tokens 128 --trie {trie}"),
    ("sampled, n=8", "chat", 8, "--limit 6 --max-new-tokens 64 -n 8 --temperature 0.7"),
    ("sampled, n=8", "chat", 1, "--limit 2 --max-new-tokens 64 -n 8 --temperature 0.3"),
    ("schema", "chat", 1, "--limit 12 --max-new-tokens 96 --json-schema {schema}"),
    ("schema", "chat", 8, "--max-new-tokens 96 --json-schema {schema}"),
    ("short answers", "chat", 1, "--max-new-tokens 8"),
    ("stop texts", "chat", 1, "--max-new-tokens 128 --stop Therefore --stop #"),
)


def seconds(command: list[str], out: Path) -> dict[str, float | None]:
    """Of a job: what it prints with --json."""
    run = subprocess.run([*command, "-o", str(out), "--overwrite", "--json"], capture_output=True, text=True, check=False)
    if run.returncode not in (0, 3):
        sys.exit(f"{' '.join(command)}\n{run.stderr}")
    found: dict[str, float | None] = json.loads(run.stdout)
    return found


def asked_otherwise(rows: Path, out: Path) -> None:
    """The same questions behind another system prompt."""
    with out.open("w") as file:
        for row in map(json.loads, rows.read_text().splitlines()):
            if "messages" in row:
                row["messages"] = [{"role": "system", "content": OTHER}, *row["messages"]]
            else:
                row["prompt"] = f"{OTHER}\n{row['prompt']}"
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PROMPTS.parent / "demo-model"))
    parser.add_argument("--chat", default=str(PROMPTS), help="questions, as rows of prompts or messages")
    parser.add_argument("--passages", default=str(PROMPTS), help="questions with passages to answer from")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="jobs whose names begin with one of these")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    schema, trie = folder / "schema.json", folder / "answers.trie"
    again = folder / "again.jsonl"
    schema.write_text(json.dumps(SCHEMA))
    asked_otherwise(Path(options.chat), again)
    generate = [sys.executable, "-m", "lookahead_cli", "generate", "--model", options.model, "--dtype", options.dtype]
    seconds([*generate, "--input", options.chat, "--max-new-tokens", "128", "--save-trie", str(trie)], folder / "first.jsonl")
    print("| job | batch | reported | clock | reported / clock | EDL |\n|---|---|---|---|---|---|")
    for name, prompts, batch_size, more in JOBS:
        if options.only and not name.startswith(tuple(options.only)):
            continue
        given = more.format(schema=schema, trie=trie).split()
        source = again if prompts == "again" else getattr(options, prompts)
        job = [*generate, "--input", str(source), "--batch-size", str(batch_size), *given]
        plain, drafted = [], []
        for _ in range(options.turns):
            drafted.append(seconds(job, folder / "out.jsonl"))
            plain.append(seconds([*job, "--strategy", "off"], folder / "plain.jsonl"))
        clock = sum(run["run_seconds"] or 0 for run in plain) / sum(run["run_seconds"] or 0 for run in drafted)
        claims = [run for run in drafted if run["speedup_over_plain"]]
        if claims:
            low, high, claim = (
                mean(run[key] or 0 for run in claims) for key in ("speedup_low", "speedup_high", "speedup_over_plain")
            )
            said = f"{low:.2f} to {high:.2f} | {clock:.2f} | {claim / clock:.2f}"
        else:
            said = f"not measured | {clock:.2f} | -"
        print(f"| {name} | {batch_size} | {said} | {drafted[-1]['edl'] or 0:.2f} |", flush=True)


if __name__ == "__main__":
    main()
