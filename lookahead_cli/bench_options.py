"""What bench and replay share: options, files that they write, and how far they are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead_cli.options import DRAFTING, IO, REPORTING, RUNS

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.events import BenchEvents
    from lookahead.outputs import Input

Rows = Annotated[int | None, typer.Option("--rows", min=1, metavar="N", help="Use the first N rows only.", rich_help_panel=IO)]
NamedTries = Annotated[
    list[str] | None,
    typer.Option(
        "--trie",
        metavar="[NAME=]FILE",
        help="Prebuilt trie to draft from; repeat for several. NAME=FILE: for the replay's workload of that name only.",
        rich_help_panel=DRAFTING,
    ),
]
BranchLengths = Annotated[
    str | None,
    typer.Option(
        "--branch-length",
        metavar="N[,N]",
        help="Draft tokens on one path at most; several with --sweep only. Default: 64, with --sweep 4,8,16,64.",
        rich_help_panel=DRAFTING,
    ),
]
Baselines = Annotated[
    bool,
    typer.Option(
        "--baselines/--no-baselines",
        help="In a replay: also prompt lookup and the original lookahead trie, at the same decoding lengths.",
        rich_help_panel=RUNS,
    ),
]
Explain = Annotated[
    int | None,
    typer.Option(
        "--explain",
        min=1,
        metavar="ROWS",
        help="In a replay: show each step of the first ROWS rows, as the first strategy drafts them, warm if there is a trie. "
        "On stdout; with --json on stderr.",
        rich_help_panel=REPORTING,
    ),
]
Save = Annotated[
    str | None,
    typer.Option("--save", metavar="FILE", help="Write the JSON to this file as well.", rich_help_panel=REPORTING),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw speed and EDL, of a sweep by lengths: .png, .pdf, .svg. Of a replay: with --sweep or --cost-profile.",
        rich_help_panel=REPORTING,
    ),
]
Report = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write all of it as one HTML page that needs no network. Of a replay: with --cost-profile.",
        rich_help_panel=REPORTING,
    ),
]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Files to write; None: not asked for. json: one object on stdout in place of tables. reads: what is read meanwhile."""

    json: bool
    save: str | None = None
    plot: str | None = None
    report: str | None = None
    overwrite: bool = False
    reads: Sequence[Input] = ()
    log_file: str | None = None

    def check(self) -> None:
        """See `outputs.check_outputs`."""
        from lookahead.outputs import BENCH, PAGE, PICTURE, Output, check_outputs

        outputs = [Output("--save", self.save, BENCH), Output("--plot", self.plot, PICTURE)]
        outputs += [Output("--report", self.report, PAGE), Output("--log-file", self.log_file)]
        check_outputs(outputs, self.reads, self.overwrite)

    def keep(self, value: dict[str, Any], figure: Callable[[], Any], page: Callable[[], str]) -> None:
        """Write the JSON, the page and the figure to their files; one that cannot be written costs none of the others."""
        import json

        from lookahead.bench.plot import save_figure

        drawn, written = figure() if self.plot else None, page() if self.report else ""
        with contextlib.ExitStack() as stack:
            if self.plot:
                stack.callback(save_figure, drawn, self.plot)
            if self.report:
                stack.callback(_write, self.report, written)
            if self.save:  # the last is called first
                stack.callback(_write, self.save, json.dumps(value, indent=2) + "\n")


def _write(path: str, text: str) -> None:
    from lookahead.atomic import replacing

    with replacing(path, "w") as file:
        file.write(text)


def figure_of(comparisons: Sequence[Comparison], sweep: bool) -> Any:
    from lookahead.bench.plot import comparison_figure
    from lookahead.bench.sweep import sweep_figure

    return sweep_figure(comparisons) if sweep else comparison_figure(comparisons)


def page_of(comparisons: Sequence[Comparison], command_line: str, problems: Sequence[str], sweep: bool) -> str:
    from lookahead.bench.report import report_page

    return report_page(comparisons, command_line, problems, sweep)


def on_screen(json: bool) -> BenchEvents:
    """Events that show how far a bench or a replay is. json: stdout is for one object."""
    from lookahead.bench.events import BenchEvents
    from lookahead_cli import render

    class OnScreen(BenchEvents):
        def notice(self, text: str) -> None:
            render.notice(text)

        def patiently(self, act: Callable[[], None], why: str) -> None:
            render.patiently(act, why)

        @contextlib.contextmanager
        def working(self, what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
            with render.progress(what, total, shown=not json) as update:
                yield lambda done: update(done, unit)

        def observers(self, tokenizer: Any | None, rows: int, name: str) -> Any:
            from lookahead_cli.explain import Explainer

            return Explainer(render.err if json else render.out, tokenizer, rows, name).observer_of

    return OnScreen()
