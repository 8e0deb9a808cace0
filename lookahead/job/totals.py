"""What the rows of a job add up to."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lookahead.draft.counts import DraftCounts

if TYPE_CHECKING:
    from lookahead.decode.engine import Generation


@dataclasses.dataclass
class JobTotals(DraftCounts):
    """Sums over the rows of a job, or counts of one row.

    errors: failed rows; faults: those of them that are not the row's own fault and may succeed when tried again.
    first_tokens: answers that have one; it comes from the prefill. seconds: spent in answering, loading excluded.
    """

    rows: int = 0
    errors: int = 0
    faults: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    first_tokens: int = 0
    seconds: float = 0.0

    @property
    def edl(self) -> float | None:
        """Effective decoding length; None where no decode step was taken, as for answers of one token."""
        return (self.tokens - self.first_tokens) / self.steps if self.steps else None

    @property
    def rounded_edl(self) -> float | None:
        return None if self.edl is None else round(self.edl, 4)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, generation: Generation) -> None:
        """Count an answer."""
        self.tokens += len(generation.token_ids)
        self.first_tokens += bool(generation.token_ids)
        self.add_counts(generation)

    def merge(self, other: JobTotals) -> None:
        """Add the counts of another."""
        for field in dataclasses.fields(self):
            if field.name != "accepted_by_source":
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.accepted_by_source.update(other.accepted_by_source)

    def minus(self, other: JobTotals) -> JobTotals:
        """What was added since `other`."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "accepted_by_source"]
        counts = {name: getattr(self, name) - getattr(other, name) for name in names}
        return JobTotals(accepted_by_source=self.accepted_by_source - other.accepted_by_source, **counts)

    def as_json(self) -> dict[str, Any]:
        """The object that `generate --json` prints."""
        names = ("rows", "errors", "faults", "prompt_tokens", "tokens", "steps", "draft_tokens", "accepted_tokens")
        return {
            **{name: getattr(self, name) for name in names},
            "seconds": round(self.seconds, 4),
            "accepted_by_source": dict(self.accepted_by_source),
            "edl": self.rounded_edl,
            "tokens_per_second": round(self.tokens_per_second, 2),
        }
