"""Counts what decode steps drafted and accepted: one record for a request, a job, a benchmark and a replay."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from lookahead.draft.tree import DraftTree, name_of


@dataclasses.dataclass(kw_only=True)
class DraftCounts:
    """Counts of one request, or sums over several.

    steps: decode steps, each a forward after the prefill. draft_tokens, accepted_tokens: drafted and accepted in all of them;
    accepted_by_source: the latter by draft source.
    """

    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_source: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def draft_tokens_per_step(self) -> float:
        return self.draft_tokens / max(1, self.steps)

    def count(self, tree: DraftTree, nodes: Sequence[int], source_names: Sequence[str]) -> list[str]:
        """Add one decode step. nodes: the root and the accepted. Returns the draft source of each accepted token."""
        self.steps += 1
        self.draft_tokens += tree.draft_tokens
        if len(nodes) == 1:
            return []
        self.accepted_tokens += len(nodes) - 1
        sources = [name_of(source, source_names) for source in tree.sources[nodes[1:]].tolist()]
        for source in sources:
            self.accepted_by_source[source] += 1
        return sources

    def add_counts(self, other: DraftCounts) -> None:
        """Add those of another."""
        self.steps += other.steps
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.accepted_by_source.update(other.accepted_by_source)


def summed(counts: Sequence[DraftCounts]) -> DraftCounts:
    """The sums of several."""
    total = DraftCounts()
    for each in counts:
        total.add_counts(each)
    return total
