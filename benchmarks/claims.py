"""The speedup that jobs report, beside the clock. In: a model and prompts. Out: a table of twelve kinds of jobs.

    python benchmarks/claims.py --model FOLDER --chat questions.jsonl --passages rag.jsonl

Each job runs with drafts and without, in turn, `--turns` times, in one process with one loaded model: on a machine that others
use, whole processes differ by more than what is to be shown. The clock is the ratio of the seconds of all turns without drafts
to those with them; the claim what the turns with drafts reported, by their seconds.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from lookahead.budget.speedup import total
from lookahead.job import setup
from lookahead.job.progress import JobReport
from lookahead.job.run import run_job
from lookahead.job.spec import JobSpec

PROMPTS = Path(__file__).parent.parent / "samples" / "prompts.jsonl"
OTHER = "Explain each step."
SCHEMA = {
    "type": "object",
    "properties": {"steps": {"type": "array", "items": {"type": "string"}, "maxItems": 6}, "answer": {"type": "integer"}},
    "required": ["steps", "answer"],
}
# Name, prompts, batch size, options.
JOBS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("questions", "chat", 1, {"max_new_tokens": 128}),
    ("questions", "chat", 8, {"max_new_tokens": 128}),
    ("passages", "passages", 1, {"max_new_tokens": 96}),
    ("passages", "passages", 8, {"max_new_tokens": 96}),
    ("again, other system prompt", "again", 1, {"max_new_tokens": 128, "trie": True}),
    ("again, other system prompt", "again", 8, {"max_new_tokens": 128, "trie": True}),
    ("sampled, n=8", "chat", 8, {"limit": 6, "max_new_tokens": 64, "samples": 8, "temperature": 0.7}),
    ("sampled, n=8", "chat", 1, {"limit": 2, "max_new_tokens": 64, "samples": 8, "temperature": 0.3}),
    ("schema", "chat", 1, {"max_new_tokens": 192, "json_schema": True}),
    ("schema", "chat", 8, {"max_new_tokens": 192, "json_schema": True}),
    ("short answers", "chat", 1, {"max_new_tokens": 8}),
    ("stop texts", "chat", 1, {"max_new_tokens": 128, "stop": ["Therefore", "#"]}),
)


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
    setup.load_model = functools.cache(setup.load_model)

    def answered(**given: Any) -> JobReport:
        """A job, written to a file."""
        return run_job(
            JobSpec.of(model=options.model, dtype=options.dtype, out=str(folder / "out.jsonl"), overwrite=True, **given)
        )

    answered(input=options.chat, max_new_tokens=128, save_trie=str(trie))
    print("| job | batch | reported | clock | reported / clock | EDL |\n|---|---|---|---|---|---|")
    for name, prompts, batch_size, more in JOBS:
        if options.only and not name.startswith(tuple(options.only)):
            continue
        files = {"trie": [str(trie)], "json_schema": str(schema)}
        source = again if prompts == "again" else getattr(options, prompts)
        job = {"input": str(source), "batch_size": batch_size, **more, **{key: files[key] for key in files if key in more}}
        drafted, plain = [], 0.0
        for _ in range(options.turns):
            drafted.append(answered(**job))
            plain += answered(**job, strategy="off").seconds
        clock = plain / sum(report.seconds for report in drafted)
        found = total(report.speedup for report in drafted if report.speedup and report.speedup.is_measured)
        claim = f"{found} | {clock:.2f} | {found.value / clock:.2f}" if found else f"not measured | {clock:.2f} | -"
        print(f"| {name} | {batch_size} | {claim} | {drafted[-1].totals.edl or 0:.2f} |", flush=True)


if __name__ == "__main__":
    main()
