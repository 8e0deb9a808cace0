"""lookahead report: what drafts brought to a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lookahead_cli.options import Config, Context, Json, Overwrite

if TYPE_CHECKING:
    from lookahead.job.record import JobRecord


def command(
    output: Annotated[
        str | None,
        typer.Argument(metavar="OUT", help="Output of lookahead generate, finished or running; its journal is read too."),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE.html", help="Write it as one HTML page that needs no network.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE.png", help="Draw the figures of the page to this file.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    config: Config = None,
    context: Context = None,  # type: ignore[assignment]
) -> None:
    """Report what drafts contributed to a job: EDL by row, source, prompt length and time. Does not change the job.

    Example: lookahead report out.jsonl -o report.html --plot report.png

    What a trie would contribute: lookahead replay out.jsonl --trie answers.trie
    """
    from pathlib import Path

    from lookahead.errors import UsageError
    from lookahead.files.atomic import replacing
    from lookahead.files.outputs import PAGE, PICTURE, Input, Output, check_outputs
    from lookahead.job.lock import JobFiles
    from lookahead.job.record import read_record
    from lookahead_cli import render

    if not output:
        raise UsageError("name the output of a job: lookahead report out.jsonl.")
    files = JobFiles(Path(output))
    reads = Input("the report", [output, files.rows, files.journal, files.manifest])
    check_outputs([Output("-o", out, PAGE), Output("--plot", plot, PICTURE)], [reads], overwrite)
    record = read_record(output)
    if plot or out:
        from lookahead.bench.plot import save_figure
        from lookahead.bench.report import job_figure

        if plot:
            save_figure(job_figure(record), plot)
        if out:
            with render.on_page(
                f"lookahead report: {record.name}", [("Figures", job_figure(record, False))]
            ) as page:
                _print(record)
                render.facts([("model", record.model or "-"), ("command", context.obj)])
                html = page()
            with replacing(out, "w") as file:
                file.write(html)
    if json:
        render.print_json(record.as_json())
    else:
        _print(record)


def _print(record: JobRecord) -> None:
    """Title and tables on stdout."""
    from lookahead.job.record import tables, title_of
    from lookahead_cli import render

    render.out.print(title_of(record))
    if record.latest_run:
        render.out.print(record.latest_run)
    for title, columns, rows in tables(record):
        render.table(title, columns, rows)
