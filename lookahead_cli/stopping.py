"""Ending a job well: the first SIGINT or SIGTERM lets the step in progress end, the second ends the process at once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


@dataclasses.dataclass
class Stop:
    """number: the signal that asked for the end; 0 as long as none did."""

    number: int = 0

    def wanted(self) -> bool:
        return self.number != 0


@contextlib.contextmanager
def on_signals() -> Iterator[Stop]:
    """Signals set what is yielded, as long as the block runs (in the main thread, the only one that may take signals)."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def first(number: int, frame: FrameType | None) -> None:
        stop.number = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # so that the second needs nobody's consent
        show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
        os.write(2, show_cursor + b"\nstopping after this step; once more stops at once\n")

    before = {each: signal.signal(each, first) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
