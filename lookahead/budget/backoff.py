"""When a row whose drafts do not pay is drafted for again. In: what drafts saved at each step. Out: draft now, or not."""

from __future__ import annotations

DEBT = 8  # times what drafting takes: when so much more has been spent on a row's drafts than they save, it backs off
APART = 9  # steps from one draft to the next while it does


class Backoff:
    """When a row is drafted for: at each step while drafts pay; while they do not, at one step in APART.

    Rows that back off are drafted for at the same steps, as one draft for several rows takes less than one for each. after: of
    the row that ended last. Rows of a job are alike, so a row begins as that one ended; its own first draft counts in any case.
    """

    def __init__(self, after: Backoff | None = None) -> None:
        self.debt: float = min(after.debt, DEBT - 1) if after else 0.0  # see DEBT
        self.until = 0  # number of the step at which it is over

    def is_over(self, step: int) -> bool:
        """The row is to be drafted for at the step of this number."""
        return step >= self.until

    def steps_left(self, step: int) -> int:
        """Steps without drafts until it is over, from the step of this number on."""
        return max(0, self.until - step)

    def drafted(self, returns: float, step: int) -> None:
        """At the step of this number drafts saved that many times what drafting took."""
        self.debt = min(max(0.0, self.debt + 1 - returns), DEBT)
        self.until = (step // APART + 1) * APART if self.debt >= DEBT else step + 1
