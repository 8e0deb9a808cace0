"""Learning behind the forward. In: steps whose tokens are appended only. Out: what they prove, learned in a thread.

To learn from tokens takes longer than to draft behind them, and what is drafted next hardly depends on it. So a step of a
large batch appends its tokens, drafts, and hands drafts over; then a thread learns from the tokens, without the GIL, while the
forward runs. The next call of the drafter waits for it: drafts do not depend on how fast the thread is.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lookahead.draft import planner
from lookahead.native.threads import run_in


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """One for all drafters of this process."""
    return ThreadPoolExecutor(1, "lookahead-learn")


class Behind:
    """The latest step of one drafter that is still to be learned from. It keeps what the kernel reads."""

    def __init__(self) -> None:
        self._task: tuple[array[int], array[int]] | None = None
        self._learning: Future[None] | None = None

    def add(self, task: array[int], tokens: array[int]) -> None:
        """task: arguments of a call of `planner.accept_rows` that has kept rows, whose tokens these are. The step before has
        been settled.
        """
        assert self._task is None
        task[planner.ROWS_AT] = task[planner.KEPT_AT]
        for at in range(planner.FIRST_ROW + 2, len(task), 3):
            task[at] = planner.LEARN_KEPT if task[at] == planner.KEEP else planner.NOTHING
        self._task = task, tokens

    def start(self) -> None:
        """Begin to learn, in the thread."""
        if self._task and not self._learning:
            self._learning = _thread().submit(self._learn)

    def wait(self) -> None:
        """Wait for what was begun."""
        if self._learning:
            self.settle()

    def settle(self) -> None:
        """Wait until everything is learned; what was not begun is learned now."""
        if self._task:
            wait: Callable[[], None] = self._learning.result if self._learning else self._learn
            wait()
            self._task = self._learning = None

    def _learn(self) -> None:
        assert self._task is not None
        run_in(1, planner.accept_rows, self._task[0].buffer_info()[0])
