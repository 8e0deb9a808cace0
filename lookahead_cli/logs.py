"""What a command prints while it works: on stderr as it is, in a --log-file with time stamps. In: notices, log records.

Lines go to the package's logger. Its handlers print warnings, with --verbose everything, on stderr, and append everything to
the log file. What render.py prints on stderr itself (notices, progress, the summary) is noted for the log file alone.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import sys
import time
from collections.abc import Iterator

from lookahead.errors import LookaheadError, UsageError
from lookahead.printable import in_one_line

package = logging.getLogger("lookahead")
NOT_OURS = ("matplotlib", "fontTools")  # what these print on stderr, such as where they keep a cache, is of no use here
ON_STDERR = "is_on_stderr"  # attribute of a record that stands there already
FIRST_LINE = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d [A-Z]+ ")  # how a log file begins
LINE_SECONDS = 10.0  # between two lines of progress


class OnStderr(logging.Handler):
    """Lines as they are."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, ON_STDERR, False):
            with contextlib.suppress(OSError, ValueError):
                print(in_one_line(record.getMessage(), getattr(sys.stderr, "encoding", None)), file=sys.stderr)


class InFile(logging.Handler):
    """Lines with time stamp and level, appended. When the disk fails that is reported once, and the work continues.

    command_line: stands before the first line of a command that writes one.
    """

    def __init__(self, path: str, command_line: str):
        super().__init__()
        self._path, self._command_line, self._is_new = path, command_line, not os.path.lexists(path)
        self._has_begun = False
        try:
            with open(path, "rb") if os.path.isfile(path) else contextlib.nullcontext() as existing:
                begins = existing.read(64) if existing else b""
            if begins and not FIRST_LINE.match(begins):
                raise UsageError(f"--log-file {path}: exists and is not a log file of this tool. Choose another file.")
            self._file = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - see close
        except OSError as error:
            raise LookaheadError(f"--log-file {path}: cannot be written ({error.strerror}). Choose another file.") from error

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._has_begun:
                self._has_begun = True
                self._file.write(f"{stamp(record.created)} INFO {in_one_line(self._command_line)}\n")
            self._file.write(f"{stamp(record.created)} {record.levelname} {in_one_line(record.getMessage())}\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            package.removeHandler(self)
            why = (isinstance(error, OSError) and error.strerror) or error
            ending = f"cannot be written any more ({why}). The command continues."
            print(f"--log-file {in_one_line(self._path)}: {ending}", file=sys.stderr)

    def close(self) -> None:
        """Remove what was made for nothing, as the command line was refused."""
        with contextlib.suppress(OSError):
            self._file.close()
            if self._is_new and not self._has_begun and os.path.getsize(self._path) == 0:
                os.unlink(self._path)
        super().close()


_command_line = ""


@contextlib.contextmanager
def lines(command_line: str) -> Iterator[None]:
    """The lines of one command, as long as the block runs."""
    global _command_line
    for name in NOT_OURS:
        logging.getLogger(name).setLevel(logging.ERROR)
    _command_line, level = command_line, package.level
    package.setLevel(logging.WARNING)
    package.addHandler(OnStderr(logging.WARNING))
    try:
        yield
    except BaseException as error:
        note(f"ended by {type(error).__name__}: {error}", logging.ERROR)
        raise
    finally:
        for each in [each for each in package.handlers if isinstance(each, (InFile, OnStderr))]:
            package.removeHandler(each)
            each.close()
        package.setLevel(level)


def open_file(path: str | None) -> str | None:
    """Append to this file from now on, to the end of the command. Raises LookaheadError if that cannot be done."""
    if path and not is_kept():
        package.addHandler(InFile(path, _command_line))
        package.setLevel(min(package.level, logging.INFO))
    return path


def be_verbose(wanted: bool) -> bool:
    """Show everything on stderr from now on, to the end of the command."""
    if wanted:
        package.setLevel(logging.DEBUG)
        for each in package.handlers:
            if isinstance(each, OnStderr):
                each.setLevel(logging.DEBUG)
    return wanted


def note(text: str, level: int = logging.INFO) -> None:
    """A line for the log file; it stands on stderr already, or need not."""
    if is_kept():
        package.log(level, "%s", text, extra={ON_STDERR: True})


def is_kept() -> bool:
    """Tell whether there is a log file."""
    return any(isinstance(each, InFile) for each in package.handlers)


def ended(code: int, seconds: float) -> None:
    """The last line of a command. One that was refused before it did anything leaves none."""
    if any(isinstance(each, InFile) and each._has_begun for each in package.handlers) or code != 2:
        note(f"ended with exit code {code} after {seconds:.1f} s", logging.INFO if code == 0 else logging.WARNING)


class NowAndThen:
    """Notes progress, at most every ten seconds."""

    def __init__(self) -> None:
        self._due = time.monotonic() + LINE_SECONDS

    def __call__(self, text: str) -> None:
        if is_kept() and time.monotonic() >= self._due:
            note(text)
            self._due = time.monotonic() + LINE_SECONDS


def stamp(seconds: float | None = None, timespec: str = "milliseconds") -> str:
    """Format a moment, by default now: 2026-01-31T12:05:59.123+01:00 (ISO 8601, local time)."""
    moment = datetime.datetime.now() if seconds is None else datetime.datetime.fromtimestamp(seconds)
    return moment.astimezone().isoformat(timespec=timespec)
