"""What people see: tables on stdout, progress and notices on stderr. Only this and explain.py know rich."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from lookahead.job.events import COMPILING
from lookahead.printable import duration, in_one_line, json_text, printable, size
from lookahead_cli import logs

if TYPE_CHECKING:
    from lookahead.corpus.read import CorpusReport
    from lookahead.trie.format import TrieHeader


class _Console(Console):
    """Takes no text for markup, as names from outside may look like it, and shows control characters escaped."""

    def __init__(self, stderr: bool = False, soft_wrap: bool = True):
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, self.encoding), **options)

    def on_broken_pipe(self) -> None:
        """The reader has gone, as `| head` does: no error (see app.run), and of stderr not the end of the work."""
        if not self.stderr:
            raise BrokenPipeError
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def abandon_stdout() -> None:
    """The reader has gone: what is still written goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


out = _Console()
err = _Console(stderr=True)

Result = TypeVar("Result")


def print_json(value: Any) -> None:
    """One object, one line."""
    print(json_text(value, sys.stdout.encoding))


def notice(text: str) -> None:
    """A line on stderr, and in the log file if there is one."""
    err.print(in_one_line(text))
    logs.note(text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1, above: str = "") -> None:
    """A title and a table on stdout; the first `left` columns are text, the others numbers. above: the title's second line."""
    for line in filter(None, (title, above)):
        out.print(in_one_line(line), style="bold")
    made = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        text = number < left  # in several lines where numbers leave no room for it
        made.add_column(name, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in rows:
        made.add_row(*(_cell(cell) for cell in row))
    out.print(made, soft_wrap=False)


def sources(title: str, header: TrieHeader, weights: bool = True) -> None:
    """The table of a trie's sources."""
    columns = ["source", "documents", "tokens", *(["weight"] if weights else [])]
    rows = [(s.name, s.documents, s.tokens, *([f"{s.weight:g}"] if weights else [])) for s in header.sources]
    table(title, columns, rows)


def _cell(value: Any) -> str | Text:
    if isinstance(value, str):
        return in_one_line(value)
    return value if isinstance(value, Text) else f"{value:,}"


def width() -> int:
    """Characters that a line of a table may have."""
    return _Console().width


def bold(text: str) -> Text:
    """A cell of a table that stands out."""
    return Text(text, "bold")


def folded(name: str, width: int) -> str:
    """A column's name in lines of at most `width` characters, broken behind - . _ / and blanks where that is possible."""
    lines = [""]
    for word in re.findall(r"[^-._/ ]*[-._/ ]?", in_one_line(name, out.encoding)):
        for part in (word[i : i + width] for i in range(0, len(word), width)):
            if len(lines[-1]) + len(part) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(lines)


def facts(rows: Sequence[tuple[str, str]]) -> None:
    """Name and value pairs, one per line, on stdout."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        out.print(f"{name:<{width}}  ", style="bold", end="")
        out.print(in_one_line(value))


def summary(rows: Sequence[tuple[str, str]]) -> None:
    """Name and value pairs as a small table on stderr."""
    made = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, value in rows:
        made.add_row(name, in_one_line(value))
    _Console(stderr=True, soft_wrap=False).print(made)


def estimate_parts(found: Mapping[str, Any]) -> tuple[str, str, str]:
    """Time, memory and disk of an estimate of a job."""
    most = "at most " if found["at_most"] else ""
    time = "not measured" if found["seconds"] is None else f"{most}{duration(found['seconds'])}"
    memory = "not known" if found["memory_bytes"] is None else size(found["memory_bytes"])
    return time, memory, f"{most}{size(found['disk_bytes'])}"


def _bar(shown: bool, *columns: str | ProgressColumn) -> Progress:
    """On stderr, only on a terminal."""
    made = (TextColumn(each, markup=False) if isinstance(each, str) else each for each in columns)
    return Progress(*made, console=err, transient=True, disable=not shown or not err.is_terminal)


@contextlib.contextmanager
def progress(description: str, total: int | None, shown: bool = True, done: int = 0) -> Iterator[Callable[..., None]]:
    """A progress bar, `done` of `total` at first. Yields update(done, note, total); None leaves the total as it is."""
    log, of = logs.NowAndThen(), total
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[note]}"
    with _bar(shown, *columns, TimeElapsedColumn(), "elapsed,", TimeRemainingColumn(), "left") as bar:
        task = bar.add_task(description, total=total, completed=done, note="")

        def update(done: int, note: str = "", total: int | None = None) -> None:
            nonlocal of
            of = of if total is None else total
            log(f"{description}: {done:,}{f' of {of:,}' if of is not None else ''} {note}".rstrip())
            bar.update(task, completed=done, note=note and f"{note},", total=total)

        yield update


@contextlib.contextmanager
def stages(
    shown: bool = True, report: CorpusReport | None = None, total: int | None = None
) -> Iterator[Callable[[str, int, int | None], None]]:
    """A progress bar for work in stages. Yields update(stage, tokens done, of how many).

    report, total: in the stage "reading" the bar shows the bytes that `report` has read of `total`, and its rows.
    """
    log, lock, began, start = logs.NowAndThen(), threading.Lock(), 0.0, 0
    columns = "{task.description:<8}", BarColumn(), TaskProgressColumn(), "{task.fields[note]}", "left", TimeRemainingColumn()
    with _bar(shown, *columns) as bar:
        task = bar.add_task("starting", total=None, note="")

        def update(stage: str, done: int, of: int | None) -> None:
            nonlocal began, start
            with lock:
                now = time.monotonic()
                if stage != bar.tasks[0].description:
                    logs.package.info("%s", stage)
                    bar.reset(task, description=stage, total=of, note="")
                    began, start = now, done
                log(f"{stage}: {done:,}{f' of {of:,}' if of is not None else ''} tokens")
                rate = (done - start) / (now - began) if now > began else 0.0
                note = f"{done:,} tokens  {rate:,.0f} tokens/s"
                if stage == "reading" and report is not None:
                    bar.update(task, total=total, completed=report.bytes, note=f"{report.rows:,} rows  {note}")
                else:
                    bar.update(task, total=of, completed=done, note=note)

        yield update


@functools.cache
def announce_compiling() -> None:
    """A line on stderr, once a process."""
    notice(COMPILING)


def with_spinner(work: Callable[[], Result], notice_text: str, after: float = 0.7) -> Result:
    """Run `work`; if it takes longer than `after` seconds, print why and show a spinner until it is done."""
    done = threading.Event()

    def show() -> None:
        if not done.wait(after):
            announce_compiling() if notice_text == COMPILING else notice(notice_text)
            with err.status("working"):
                done.wait()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        return work()
    finally:
        done.set()
        thread.join()
