"""lookahead generate: answer a file of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.errors import RowsFailedError, UsageError
from lookahead.job.spec import JobSpec
from lookahead.printable import in_one_line
from lookahead_cli import render
from lookahead_cli.job_schema import print_options
from lookahead_cli.options import REPORTING, Common, Some, with_groups
from lookahead_cli.progress import JobOnScreen, rows_done, table

if TYPE_CHECKING:
    from lookahead.job.progress import JobReport


@with_groups
def command(
    spec: Annotated[JobSpec, Some()],
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config", help="Print all options as YAML for --config, and do nothing else.", rich_help_panel=REPORTING
        ),
    ] = False,
    *,
    common: Annotated[Common, Some("config")],
) -> None:
    """Answer files of prompts: the same tokens as plain decoding, in fewer forwards of the model.

    Greedy, or sampled with --temperature or --sampling model; a row's "params" override the options. Reads {"prompt"},
    {"messages"}, {"prompt_ids"} or OpenAI batch lines. A row that fails becomes an error row. --resume continues a job that was
    interrupted or killed. Exit code 0: complete; 3: complete, and some rows failed; 1: not complete.

    Example: lookahead generate --model org/model --input prompts.jsonl --trie answers.trie -o out.jsonl

    To watch it draft: lookahead generate --model org/model --input prompts.jsonl --trie answers.trie -o out.jsonl --explain 1

    Next: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie
    """
    if print_config:
        print_options(spec)
    elif spec.io.dry_run:
        check(spec)
    else:
        answer(spec, common.config)


def answer(spec: JobSpec, config: str | None = None) -> None:
    """Run a job and show it. config: see `run_job`. Raises RowsFailedError if rows have failed."""
    from lookahead.job.run import run_job
    from lookahead.native import compile_ahead

    out, reporting = spec.io.out, spec.reporting
    if reporting.json and out is None and spec.model.model and spec.io.input:
        raise UsageError("--json prints a summary on stdout, where the answers go: name a file with -o.")
    if reporting.quiet and reporting.verbose:
        raise UsageError("--quiet and --verbose: give one of them.")
    compile_ahead.start(["drafting", "budget", "steps"])
    events = JobOnScreen(spec)
    report = run_job(spec, events, config)
    if report.state == "complete":
        print_report(report, spec)
    elif report.state == "stopped":
        instead = " instead of --overwrite" if spec.io.overwrite else ""
        whole = f"; every line of {out or 'the output'} is a whole row"
        rest = f". To continue: the same command with --resume{instead}" if report.resumable else whole
        render.notice(f"stopped after {rows_done(report)}{rest}.")
        raise typer.Exit(128 + events.signal)


def print_report(report: JobReport, spec: JobSpec) -> None:
    """Report what a job that is complete came to. Raises RowsFailedError if rows have failed."""
    totals, json = report.totals, spec.reporting.json
    if json:
        render.print_json(report.as_json())
    table(report, on_stderr=not (json or spec.reporting.quiet))
    if totals.errors:
        retry = totals.faults and report.resumable
        again = f" {totals.faults} of them may succeed with --resume --retry-errors." if retry else ""
        raise RowsFailedError(
            f'{totals.errors} of {totals.rows} rows failed; see their "error" in {report.out or "the output"}.{again}'
        )


def check(spec: JobSpec) -> None:
    """List each row that cannot be answered, then count. Raises RowsFailedError if there are such rows."""
    from lookahead.job.check import check_job

    json = spec.reporting.json
    report = check_job(spec, lambda problem: None if json else render.out.print(in_one_line(problem)))
    if json:
        render.print_json(report.as_json())
    else:
        rows = f"{report.rows:,} ({report.bad_rows:,} cannot be answered)"
        rows += f", after {report.done:,} that are answered" if report.done else ""
        facts = [("rows", rows), ("prompt tokens", f"{report.prompt_tokens:,}, {report.longest:,} of the longest")]
        if found := report.estimate:
            facts += zip(("time", "memory", "disk"), render.estimate_parts(found.as_json()), strict=True)
            facts.append(("estimated", found.basis))
        render.facts(facts)
    if report.bad_rows:
        raise RowsFailedError(f"{report.bad_rows} of {report.rows} rows cannot be answered.")
