"""How many steps go without drafts from now on. In: the rows of a step that has none. Out: steps that may be taken at once.

Between two steps of plain decoding nothing is to be chosen, so they can be one native call (`Slots.plain_steps`) where all rows
take the best token. It ends where an answer may end, where drafts are to be tried again, and soon enough for whoever waits for
new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.decode.accounting import Accounting
from lookahead.decode.row import RunningRow, StepInput
from lookahead.draft.options import DraftOptions

LONGEST = 0.05  # seconds of such a call, about
MOST = 32  # steps


def most_plain_steps(
    rows: Sequence[RunningRow], inputs: Sequence[StepInput], accounting: Accounting, options: DraftOptions, longest_text: int
) -> int:
    """From this step on, which has a token of each row; 0 where steps must be taken one by one. longest_text: positions."""
    for row, each in zip(rows, inputs, strict=True):
        if each.wanted != "all" or row.is_drafted_for or not row.is_followed:
            return 0
    seconds = accounting.plain_seconds
    most = min(MOST, max(1, int(LONGEST / seconds))) if seconds else 1
    rests = accounting.rates.steps_left(len(rows))
    for row in rows:
        most = min(most, row.generation.room - len(row.generation.token_ids), longest_text - row.length)
        if options.strategy != "off":
            most = min(most, max(rests, row.backoff.steps_left(accounting.steps)))
    return max(0, min(most, 1) if any(row.generation.streamed for row in rows) else most)
