"""What a job came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from lookahead.job.totals import JobTotals

if TYPE_CHECKING:
    from lookahead.budget.speedup import Speedup
    from lookahead.job.progress import JobProgress


@dataclasses.dataclass(frozen=True)
class JobReport:
    """state: complete; stopped, with rows left to answer; or led, in a process whose part of the model another one leads.

    out: the file of answers; None: stdout. totals: of the whole job; run: of this run; seconds: of this run, after
    loading_seconds. speedup: of this run over plain decoding, None of plain decoding itself. expected: rows of the job, None if
    unknown. used: workers, batch size, peak memory (bytes) and path of forwards, by name. resumable: the job can be resumed, as
    it writes to a file.
    """

    state: Literal["complete", "stopped", "led"]
    model: str
    out: str | None
    totals: JobTotals = dataclasses.field(default_factory=JobTotals)
    run: JobTotals = dataclasses.field(default_factory=JobTotals)
    seconds: float = 0.0
    loading_seconds: float = 0.0
    speedup: Speedup | None = None
    expected: int | None = None
    used: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    resumable: bool = False

    @classmethod
    def of(cls, progress: JobProgress, **about: Any) -> JobReport:
        """As things stand now."""
        counts = {
            name: getattr(progress, name) for name in ("totals", "run", "seconds", "loading_seconds", "speedup", "expected")
        }
        return cls(**counts, **about)

    def as_json(self) -> dict[str, Any]:
        """The object that `generate --json` prints."""
        return {"model": self.model, "output": self.out, **self.totals.as_json(), **clocked(self), **self.used}


def clocked(of: JobProgress | JobReport) -> dict[str, Any]:
    """What the clock gave for a run: of `--json` and of manifests."""
    return {
        "run_rows": of.run.rows,
        "run_tokens": of.run.tokens,
        "run_seconds": round(of.seconds, 3),
        "loading_seconds": round(of.loading_seconds, 3),
        **({} if of.speedup is None else of.speedup.as_json()),
    }
