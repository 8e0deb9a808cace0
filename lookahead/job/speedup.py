"""How much faster than plain decoding a running job is, by what the engine has learned about the cost of its forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lookahead.job.totals import JobTotals

if TYPE_CHECKING:
    from lookahead.decode.engine import LookaheadEngine


def speedup_over_plain(engine: LookaheadEngine, run: JobTotals) -> float | None:
    """Tokens that a step gains, times the cost of a plain step over that of a step with drafts; prefill is the same for both.

    None where costs are not known. Example: EDL 2.2, 3 ms for 8 rows alone, 4.5 ms with their drafts and the drafting: 1.5.
    """
    curve, steps = getattr(engine.budget, "curve", None), engine.clock.steps
    if curve is None or not steps or run.steps < steps:
        return None
    rows, tokens = round(run.steps / steps), round((run.steps + run.draft_tokens) / steps)  # of a step, on average
    try:
        seconds = curve.seconds(tokens)
    except ValueError:  # no step has been measured
        return None
    return run.edl * float(seconds[rows] / (seconds[tokens] + engine.clock.draft / steps))
