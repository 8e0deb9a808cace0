"""What the caller of a job, a bench or a replay receives while it runs. Derive from them to show progress, or to stop it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lookahead.errors import UsageError

if TYPE_CHECKING:
    from lookahead.draft.explain import ObserverOf
    from lookahead.job.progress import JobProgress

log = logging.getLogger(__name__)
COMPILING = "Compiling kernels, once per machine (some seconds) ..."


class Events:
    """Silent: notices go to the log of the package."""

    def notice(self, text: str) -> None:
        """A line that a user should read, such as why a model verifies drafts in a slower way."""
        log.warning("%s", text)

    def with_spinner(self, act: Callable[[], Any], why: str) -> Any:
        """Calls `act`, which can take seconds, and returns its result. why: what it does, for somebody who waits."""
        return act()

    def observers(self, tokenizer: Any | None, rows: int, name: str = "") -> ObserverOf:
        """Receivers of the steps of each row, with option explain=rows. name: of a replay. Raises UsageError where none is."""
        raise UsageError("--explain: these events show no steps. Define observers(), see lookahead/job/events.py.")


class JobEvents(Events):
    """Events of a job, called in its thread; in `running`, after each step, progress and stopped."""

    def running(self, progress: JobProgress) -> contextlib.AbstractContextManager[None]:
        """Entered before the first row is answered, and left when what the job writes is complete or the job fails."""
        return contextlib.nullcontext()

    def progress(self, progress: JobProgress) -> None:
        """A step has been made."""

    def stopped(self) -> bool:
        """True ends the job after the step at hand; what is written until then is resumable."""
        return False


class BenchEvents(Events):
    """Silent. Derive from it to show how far it is."""

    def working(self, what: str, total: int, unit: str) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Entered for as long as something takes; what it gives is called with how many of `total` units are done."""
        return contextlib.nullcontext(lambda done: None)
