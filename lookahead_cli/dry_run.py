"""generate --dry-run: what a job would read, and which of its rows it could not answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lookahead.errors import RowsFailedError
from lookahead.printable import in_one_line

if TYPE_CHECKING:
    from lookahead.job.request import Request
    from lookahead.job.runner import JobOptions
    from lookahead.job.setup import EngineSettings

LISTED = 1000  # problems in --json


def dry_run(requests: Iterable[Request], names: Sequence[str], settings: EngineSettings, job: JobOptions, json: bool) -> None:
    """List each row that cannot be answered, then count. names: of the input files.

    Raises RowsFailedError if there are such rows.
    """
    from lookahead.job.check import checked_rows
    from lookahead_cli import render

    rows = tokens = longest = 0
    problems: list[dict[str, Any]] = []
    bad = 0
    for checked in checked_rows(requests, settings, job):
        rows += 1
        tokens += checked.prompt_tokens
        longest = max(longest, checked.prompt_tokens)
        if not checked.problem:
            continue
        bad += 1
        request = checked.request
        file = request.file or names[0]
        if not json:
            render.out.print(in_one_line(f"{file}:{request.line}: {checked.problem}"))
        elif len(problems) < LISTED:
            problems.append({"file": file, "line": request.line, "id": request.id, "message": checked.problem})
    if json:
        counts = {"rows": rows, "bad_rows": bad, "prompt_tokens": tokens, "longest_prompt_tokens": longest}
        render.print_json({"model": settings.model, **counts, "problems": problems})
    else:
        render.facts(
            [
                ("rows", f"{rows:,} ({bad:,} cannot be answered)"),
                ("prompt tokens", f"{tokens:,}, {longest:,} of the longest"),
            ]
        )
    if bad:
        raise RowsFailedError(f"{bad} of {rows} rows cannot be answered.")
