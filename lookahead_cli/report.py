"""lookahead report: what drafts brought to a job."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lookahead.errors import UsageError
from lookahead.options import OptionGroup, option
from lookahead_cli import render
from lookahead_cli.options import Common, Some, with_groups

if TYPE_CHECKING:
    from lookahead.job.record import JobRecord


@dataclasses.dataclass(frozen=True)
class ReportOptions(OptionGroup):
    output: str | None = option(
        None, "Output of lookahead generate, finished or running; its journal is read too.", "OUT", is_argument=True
    )
    out: str | None = option(None, "Write it as one HTML page that needs no network.", "FILE.html", flags=("--out", "-o"))
    plot: str | None = option(None, "Draw the figures of the page to this file.", "FILE.png")


@with_groups
def command(options: Annotated[ReportOptions, Some()], common: Annotated[Common, Some("overwrite json config")]) -> None:
    """Report what drafts contributed to a job: speed over time, EDL by source and row length. Does not change the job.

    Example: lookahead report out.jsonl -o report.html --plot report.png

    What a trie would contribute: lookahead replay out.jsonl --trie answers.trie
    """
    from lookahead.files.atomic import replacing
    from lookahead.files.outputs import PAGE, PICTURE, Input, Output
    from lookahead.job.lock import JobFiles
    from lookahead.job.record import read_record

    if not options.output:
        raise UsageError("name the output of a job: lookahead report out.jsonl.")
    files = JobFiles(Path(options.output))
    reads = Input("the report", [options.output, files.rows, files.journal, files.manifest])
    common.check([Output("-o", options.out, PAGE), Output("--plot", options.plot, PICTURE)], [reads])
    record = read_record(options.output)
    if options.plot or options.out:
        from lookahead.bench.page import job_page
        from lookahead.bench.plot import save_figure
        from lookahead.bench.report import job_figure

        if options.plot:
            save_figure(job_figure(record), options.plot)
        if options.out:
            html = job_page(record)
            with replacing(options.out, "w") as file:
                file.write(html)
    if common.json:
        render.print_json(record.as_json())
    else:
        _print(record)


def _print(record: JobRecord) -> None:
    """Title and tables on stdout."""
    from lookahead.job.record import tables, title_of

    render.out.print(title_of(record))
    if record.latest_run:
        render.out.print(record.latest_run)
    for table in tables(record).values():
        render.table(table.title, table.columns, table.rows, table.left)
