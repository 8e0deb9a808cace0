"""What the caller of a bench or a replay receives while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lookahead.errors import UsageError
from lookahead.job.events import Events

if TYPE_CHECKING:
    from lookahead.draft.explain import ObserverOf


class BenchEvents(Events):
    """Silent. Derive from it to show how far it is."""

    def working(self, what: str, total: int, unit: str) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Entered for as long as something takes; what it gives is called with how many of `total` units are done."""
        return contextlib.nullcontext(lambda done: None)

    def observers(self, tokenizer: Any | None, rows: int, name: str) -> ObserverOf:
        """Who receives the steps of each row of a replay, with explain=rows. Raises UsageError where that is nobody."""
        raise UsageError("--explain: these events show no steps. Define observers(), see lookahead/bench/events.py.")
