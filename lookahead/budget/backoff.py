"""When a row whose drafts do not pay is drafted for again. In: what drafts saved at each step. Out: draft now, or not."""

from __future__ import annotations

DEBT = 8  # times what drafting takes: when so much more has been spent on a row's drafts than they save, it backs off
OWN_DEBT = 2  # of it, so much at least is a row's own: rows of a job are alike, so it begins as the latest one ended
BACKOFFS = (1, 2, 4, 8)  # steps, for each time more


class Backoff:
    """When a row is drafted for: at each step while drafts pay; while they do not, ever more rarely, down to one step in 9.

    Rows that back off longest are drafted for at the same steps, as one draft for several rows takes less than one for each.
    after: of the row that ended last.
    """

    def __init__(self, after: Backoff | None = None) -> None:
        self._debt: float = min(after._debt, DEBT - OWN_DEBT) if after else 0.0  # see DEBT
        self._until = 0  # number of the step at which it is over

    def is_over(self, step: int) -> bool:
        """The row is to be drafted for at the step of this number."""
        return step >= self._until

    def drafted(self, returns: float, step: int) -> None:
        """At the step of this number drafts saved so many times what drafting took."""
        self._debt = min(max(0.0, self._debt + 1 - returns), DEBT + len(BACKOFFS) - 1)
        self._until = step + 1
        if self._debt >= DEBT:
            steps = BACKOFFS[int(self._debt) - DEBT]
            apart = 1 + steps
            self._until = step + apart if steps < BACKOFFS[-1] else (step // apart + 1) * apart
